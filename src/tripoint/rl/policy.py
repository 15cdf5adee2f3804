"""The model that is trained: loaded, made to round as its arm says, and shown its inputs as an engine sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, PreTrainedModel

from tripoint.align import align
from tripoint.rl.config import TrainConfig
from tripoint.rl.exact import make_exact
from tripoint.schedule import RoundingSchedule


def build_policy(model: Path, config: TrainConfig, schedule: RoundingSchedule | None) -> PreTrainedModel:
    """The checkpoint in directory `model` with `config.weights`, rounding by `schedule` (None: nowhere) under `autocast_of`.

    Raises UsageError for a model that cannot be aligned.
    """
    dtype = torch.bfloat16 if config.weights == "bf16" else torch.float32
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    prepare(policy, config, schedule)
    return policy


def prepare(policy: PreTrainedModel, config: TrainConfig, schedule: RoundingSchedule | None) -> None:
    """What `build_policy` does to a model once it is loaded."""
    if schedule is not None:
        align(policy, schedule)
    if config.how.exact:
        make_exact(policy)
    policy.base_model.register_forward_pre_hook(_as_engines_do, with_kwargs=True)


def fsdp2_policy(config: TrainConfig) -> MixedPrecisionPolicy:
    """FP32 shards whose 16-bit rounding is what modules see, and nothing cast between them: accelerate's own policy would
    round the residual sum after each layer, wherever the engine rounds it."""
    dtype = getattr(torch, config.how.trainer_dtype)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def autocast_of(config: TrainConfig, device: str) -> torch.autocast:
    """The context of every forward pass: FP32 parameters are cast to the arm's 16-bit type; without those, nothing is."""
    dtype = getattr(torch, config.how.trainer_dtype)
    return torch.autocast(device, dtype, enabled=config.weights == "fp32-masters" and dtype != torch.float32)


def as_trained(policy: PreTrainedModel, config: TrainConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """`policy` as a function from token ids to logits that computes as it does in training."""

    @torch.no_grad()
    def logits(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(policy.device)
        with autocast_of(config, policy.device.type):
            return policy(input_ids=ids).logits  # type: ignore[no-any-return]

    return logits


def _as_engines_do(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Count positions from a sequence's first token, and mask nothing where nothing precedes it.

    TRL pads prompts on the left, and transformers counts the padding: the same tokens at other positions, rotated by other
    angles, round differently. Padding on the right needs no mask, since no token attends to what follows it.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None and bool(mask[:, 0].all()):
        kwargs["attention_mask"] = None
    elif mask is not None:
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return args, kwargs
