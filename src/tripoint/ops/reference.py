"""The three operations under any rounding schedule, forward and backward, written to be read.

Each function computes in FP32 and calls `round_to` exactly where the schedule rounds. They are the oracle of every
faster kernel. Gradients are computed in FP32 from the formula without roundings and rounded once per input, except under
R1, S1 and N1, where they round wherever transformers' own autograd does, and give its bits. They are rounded to nearest
whatever the schedule's cast: truncation is a property of the forward pass that is copied, and would shrink every gradient.

`dtype` is the compute dtype: a schedule that says "round to BF16" means "round to FP16" in an FP16 model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripoint.ops.rounding import cast_like, cast_to, fma, round_to

# -- RoPE -------------------------------------------------------------------------------------------------------------


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rotate `query` and `key` [batch, heads, seq, head_dim] by the FP32 tables `cos` and `sin` (broadcastable, full head_dim).

    Source: Su et al. 2021 (arXiv 2104.09864), in the half-split layout of GPT-NeoX and Llama.
    Both are in `dtype`, or FP32 where a QK-norm's output is not rounded; they may differ in the number of heads, and the
    dimensions may stand in another order. Returns `dtype`, laid out in memory like `query` and `key`.
    """
    if table == "bf16":
        cos, sin = round_to(cos, dtype, cast), round_to(sin, dtype, cast)
    return _rotate(query, cos, sin, compute, cast, dtype), _rotate(key, cos, sin, compute, cast, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, compute: str, cast: str, dtype: torch.dtype) -> Tensor:
    x32 = x.float()
    first, second = x32.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    if compute == "bf16":
        out = round_to(x32 * cos, dtype, cast) + round_to(rotated * sin, dtype, cast)
    elif compute == "bf16_fma":
        out = fma(x32, cos, round_to(rotated * sin, dtype, cast))
    else:
        out = x32 * cos + rotated * sin
    return cast_like(out, x, dtype, cast)


def rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    table: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Gradients at a query and a key of dtype `x_dtype`: the rotation by the opposite angle."""
    if table == "bf16":
        cos, sin = round_to(cos, dtype, cast), round_to(sin, dtype, cast)
    stepwise = compute == "bf16" and x_dtype == dtype
    return rope(grad_query, grad_key, cos, -sin, "fp32", "bf16" if stepwise else "fp32", "rne", x_dtype)


def rope_angles(position: Tensor, theta: float, head_dim: int, angle: str) -> Tensor:
    """Angles in radians [..., head_dim / 2], FP32, of integer `position` [...], in the stack's own order of operations.

    Only for plain RoPE of base `theta`. Sources: `pos/timescale` MaxText embeddings.py, `exp2` MLX rope.metal,
    `powscale` llama.cpp ggml_rope_cache_init.
    """
    half = head_dim // 2
    pair = torch.arange(half, dtype=torch.float32, device=position.device)
    base = torch.tensor(theta, dtype=torch.float32, device=position.device)
    pos = position[..., None].float()
    if angle == "pos/timescale":
        return pos / base ** (pair / half)
    if angle == "exp2":
        return pos * torch.exp2(-(pair / half) * torch.log2(base))
    if angle == "powscale":
        scale = base ** (-2.0 / head_dim)
        columns = [pos[..., 0]]
        for _ in range(half - 1):
            columns.append(columns[-1] * scale)
        return torch.stack(columns, dim=-1)
    return pos * (1.0 / base ** (2.0 * pair / head_dim))


# -- SwiGLU and GeGLU -------------------------------------------------------------------------------------------------


def _act(gate32: Tensor, act: str) -> Tensor:
    if act == "silu":
        return torch.nn.functional.silu(gate32)
    return torch.nn.functional.gelu(gate32, approximate="tanh" if act == "gelu_tanh" else "none")


def _act_backward(grad32: Tensor, gate32: Tensor, act: str) -> Tensor:
    if act == "silu":
        return torch.ops.aten.silu_backward(grad32, gate32)
    return torch.ops.aten.gelu_backward(grad32, gate32, approximate="tanh" if act == "gelu_tanh" else "none")


def _silu_with_bf16_sigmoid(gate32: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    """silu whose sigmoid rounds after every step. Source: MLX ops.h `Sigmoid`, evaluated in the array's dtype."""
    exp = round_to(torch.exp(gate32.abs()), dtype, cast)
    y = round_to(1.0 / round_to(1.0 + exp, dtype, cast), dtype, cast)
    sigmoid = torch.where(gate32 < 0, y, round_to(1.0 - y, dtype, cast))
    return gate32 * sigmoid


def gated_act(gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str) -> Tensor:
    """act(gate) * up, `gate` and `up` of one shape and dtype; `act` is silu, gelu or gelu_tanh.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    dtype = gate.dtype
    gate32 = gate.float()
    activated = _silu_with_bf16_sigmoid(gate32, dtype, cast) if sig == "bf16" else _act(gate32, act)
    if silu_round:
        activated = round_to(activated, dtype, cast)
    return cast_like(activated * up.float(), gate, dtype, cast)


def gated_act_backward(
    grad: Tensor, gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str
) -> tuple[Tensor, Tensor]:
    """Gradients at `gate` and `up`."""
    dtype = gate.dtype
    grad32, gate32, up32 = grad.float(), gate.float(), up.float()
    activated = _act(gate32, act)
    grad_activated = grad32 * up32
    if silu_round and sig == "fp32":
        activated = round_to(activated, dtype, cast)
        grad_activated = round_to(grad_activated, dtype, "rne")
    return (
        cast_like(_act_backward(grad_activated, gate32, act), gate, dtype, "rne"),
        cast_like(grad32 * activated, up, dtype, "rne"),
    )


# -- residual add + RMSNorm -------------------------------------------------------------------------------------------


def _norm_inputs(x: Tensor, residual: Tensor | None, sum_round: str, cast: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The FP32 residual sum, what the variance sees and what the normalisation sees."""
    total = x.float() if residual is None else residual.float() + x.float()
    rounded = total if sum_round == "never" else round_to(total, dtype, cast)
    return total, (rounded if sum_round == "before_var" else total), rounded


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    sum_round: str,
    norm_round: bool,
    out_round: bool,
    carry_round: bool | None,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of `x + residual`, or of `x` alone, [..., hidden]. Source: Zhang and Sennrich 2019 (arXiv 1910.07467).

    `x` and `residual` are in `dtype`, or FP32 where an unrounded sum is carried; `weight` [hidden] is in `dtype`.
    Returns the normalised output (FP32 if not `out_round`), the residual for the next add (FP32 if not `carry_round`,
    empty if that is None: nobody asks) and the reciprocal root mean square [..., 1] in FP32.
    """
    total, seen_by_var, seen_by_norm = _norm_inputs(x, residual, sum_round, cast, dtype)
    rstd = torch.rsqrt(seen_by_var.pow(2).mean(-1, keepdim=True) + eps)
    normalised = seen_by_norm * rstd
    if norm_round:
        normalised = round_to(normalised, dtype, cast)
    out = normalised * weight.float()
    if carry_round is None:
        carry = x.new_empty(0)
    else:
        carry = cast_like(total, x, dtype if carry_round else torch.float32, cast)
    return cast_like(out, x, dtype if out_round else torch.float32, cast), carry, rstd


def add_rms_norm_backward(
    grad_out: Tensor,
    grad_carry: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    rstd: Tensor,
    sum_round: str,
    norm_round: bool,
    out_round: bool,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at `x`, at `residual` (an empty tensor if there is none) and at `weight`."""
    _, seen_by_var, seen_by_norm = _norm_inputs(x, residual, sum_round, cast, dtype)
    grad32, weight32 = grad_out.float(), weight.float()
    stepwise = sum_round == "before_var" and norm_round and out_round

    normalised = seen_by_norm * rstd
    if norm_round:
        normalised = round_to(normalised, dtype, cast)
    grad_weight = grad32 * normalised
    grad_normalised = grad32 * weight32
    if stepwise:
        grad_weight = round_to(grad_weight, dtype, "rne")
        grad_normalised = round_to(grad_normalised, dtype, "rne")
    grad_rstd = (grad_normalised * seen_by_norm).sum(-1, keepdim=True)
    # d rstd / d variance, then d variance / d x: the factors stand in autograd's order, for its bits.
    grad_square = -0.5 * grad_rstd * rstd.pow(3) / x.shape[-1]
    grad_total = grad_normalised * rstd + grad_square * (2.0 * seen_by_var)
    if stepwise:
        grad_total = round_to(grad_total, dtype, "rne")
    if grad_carry is not None:
        grad_total = grad_total + grad_carry.float()
    weight_in_dtype = cast_to(grad_weight.sum(tuple(range(x.dim() - 1))), weight.dtype, "rne")
    grad_residual = x.new_empty(0) if residual is None else cast_like(grad_total, residual, residual.dtype, "rne")
    return cast_like(grad_total, x, x.dtype, "rne"), grad_residual, weight_in_dtype


# -- QK-norm and RoPE -------------------------------------------------------------------------------------------------


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    norm_round: bool,
    out_round: bool,
    norm_cast: str,
    cos: Tensor,
    sin: Tensor,
    table: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rope` of `query` and `key` after an RMSNorm over head_dim of each, as in Qwen3; weights are [head_dim].

    Returns the rotated query and key in `dtype` and the reciprocal root mean squares of both [..., 1] in FP32.
    """
    norm = (eps, "before_var", norm_round, out_round, None, norm_cast, dtype)  # there is no sum in front of it to round
    normed_query, _, query_rstd = add_rms_norm(query, None, query_weight, *norm)
    normed_key, _, key_rstd = add_rms_norm(key, None, key_weight, *norm)
    return *rope(normed_query, normed_key, cos, sin, table, compute, cast, dtype), query_rstd, key_rstd


def qk_norm_rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    query_rstd: Tensor,
    key_rstd: Tensor,
    norm_round: bool,
    out_round: bool,
    norm_cast: str,
    cos: Tensor,
    sin: Tensor,
    table: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients at `query`, `key` and their weights."""
    normed_dtype = dtype if out_round else torch.float32
    grad_query, grad_key = rope_backward(grad_query, grad_key, cos, sin, table, compute, cast, dtype, normed_dtype)
    norm = ("before_var", norm_round, out_round, norm_cast, dtype)
    grad_query, _, grad_query_weight = add_rms_norm_backward(grad_query, None, query, None, query_weight, query_rstd, *norm)
    grad_key, _, grad_key_weight = add_rms_norm_backward(grad_key, None, key, None, key_weight, key_rstd, *norm)
    return grad_query, grad_key, grad_query_weight, grad_key_weight


# -- adding -----------------------------------------------------------------------------------------------------------


def residual_add(x: Tensor, residual: Tensor, rounded: bool, cast: str, dtype: torch.dtype) -> Tensor:
    """`residual + x` in FP32, or rounded to `dtype`."""
    return cast_like(residual.float() + x.float(), x, dtype if rounded else torch.float32, cast)
