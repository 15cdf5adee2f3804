"""Puts a rounding schedule into a live transformers model, instance by instance, and takes it out again.

`layouts` finds the modules, `forwards` holds what they run once aligned, `model` installs and records it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tripoint.schedule import RoundingSchedule

if TYPE_CHECKING:
    from torch import nn

    from tripoint.align.model import Alignment


def align(model: nn.Module, to: str | Path | RoundingSchedule) -> Alignment:
    """Make every RoPE, gated MLP, norm and residual add of `model` round where `to` says, and nowhere else.

    `model`: a transformers model of a known layout (llama, qwen2, qwen3, mistral; silu or gelu gates), bare or wrapped
    (PEFT, value heads, accelerate, FSDP, torch.compile), in BF16, FP16, or FP32 under autocast. An FP32 model run without
    autocast computes as before. `to`: a code line (`"R3 S3 N3 carry=layer"`), a profile (`"vllm"`), a fingerprint's
    `.toml`, or a schedule. Where it says nothing about QK-norms, theirs round like transformers' (`qk=both`).

    Only instances change: each aligned module gets a `forward` of its own. Parameters, `state_dict`, hooks and device
    placement stay; compiled models are compiled anew. Modules patched by Liger are taken over, which the record says.
    Aligning again moves the model to the new target.

    Raises UsageError, and changes nothing, for an unknown target, for a module whose layout is not known, and for one that
    another library has patched. If something between the layers casts what the schedule needs in FP32 (FSDP2 with
    `cast_forward_inputs=True`), the forward pass raises RuntimeError rather than round twice.
    """
    # torch and transformers take seconds to import, and the command line wants `tripoint` without them.
    from tripoint.align.model import align_model

    return align_model(model, to)
