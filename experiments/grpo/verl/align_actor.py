"""Aligns verl's FSDP2 models to the rollout engine: verl imports this in every worker (`actor_rollout_ref.model.external_lib`).

The target is read from `TRIPOINT_TARGET`: a code line, a profile such as `vllm@0.32/cuda/compiled/tp1`, or a fingerprint's
file. Actor, reference and critic are aligned alike, after LoRA and before sharding. Written for verl 0.9.
"""

from __future__ import annotations

import os
from typing import Any

from verl.workers.engine.fsdp import transformer_impl

import tripoint
from tripoint.errors import UsageError

_build_fsdp_module = transformer_impl.FSDPEngine._build_fsdp_module
_policy = transformer_impl.MixedPrecisionPolicy


def _aligned_build(self: Any, module: Any) -> Any:
    target = os.environ.get("TRIPOINT_TARGET")
    if not target:
        raise UsageError("TRIPOINT_TARGET is not set in this worker: pass it in ray_kwargs.ray_init.runtime_env.env_vars")
    if self.engine_config.strategy != "fsdp2":
        raise UsageError(f"strategy={self.engine_config.strategy!r} casts between layers: set actor.strategy=fsdp2")
    record = tripoint.align(module, to=target)
    if self.rank == 0:
        print(record)
    return _build_fsdp_module(self, module)


def _policy_without_casts(**settings: Any) -> Any:
    # verl casts every module's inputs, and with them the residual sum that the schedule wants unrounded.
    return _policy(**settings | {"cast_forward_inputs": False})


transformer_impl.FSDPEngine._build_fsdp_module = _aligned_build
transformer_impl.MixedPrecisionPolicy = _policy_without_casts
