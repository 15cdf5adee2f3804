"""RoPE, SwiGLU and residual + RMSNorm under any rounding schedule.

`reference` holds the formulas, `library` the custom ops that models call.
"""

from tripoint.ops.library import add_rms_norm, gated_act, qk_norm_rope, residual_add, rope, round_to

__all__ = ["add_rms_norm", "gated_act", "qk_norm_rope", "residual_add", "rope", "round_to"]
