"""The arms of the comparison: how each one's trainer differs from the engine, and what corrects for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tripoint.errors import UsageError
from tripoint.schedule import OPS, Op, RoundingSchedule, suggest

STOCK = RoundingSchedule.parse("R1 S1 N1 qk=both")
"""What transformers does with 16-bit weights, and so what FSDP2 computes under `MixedPrecisionPolicy(param_dtype=bfloat16)`."""

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Arm:
    """`aligned`: the operations that round like the engine; the others round like transformers' (`STOCK`).

    `trainer_dtype`, `engine_dtype`: what each side computes in. `correction`: the mode of TRL's importance-sampling
    correction (`vllm_importance_sampling_mode`). `exact`: linears and attention are the engine's as well, so that every
    log-probability must be the engine's bit by bit.
    """

    aligned: tuple[Op, ...] = ()
    trainer_dtype: Dtype = "bfloat16"
    engine_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    correction: str | None = None
    exact: bool = False

    def schedule(self, target: RoundingSchedule) -> RoundingSchedule | None:
        """Where the trainer rounds if the engine rounds by `target`; None for an FP32 trainer, which does nowhere."""
        return None if self.trainer_dtype == "float32" else STOCK.moved(target, self.aligned)


ARMS: dict[str, Arm] = {
    "none": Arm(),
    "rope": Arm(("rope",)),
    "swiglu": Arm(("swiglu",)),
    "norm": Arm(("norm",)),
    "all": Arm(OPS),
    "fp16": Arm(trainer_dtype="float16", engine_dtype="float16"),
    "fp32-trainer": Arm(trainer_dtype="float32"),
    "tis": Arm(correction="token_truncate"),
    "mis": Arm(correction="token_mask"),
    "sequence-tis": Arm(correction="sequence_truncate"),
    "sequence-mis": Arm(correction="sequence_mask"),
    "bitwise": Arm(OPS, exact=True),
}


def arm_named(name: str) -> Arm:
    """Raises UsageError for an unknown name."""
    if name not in ARMS:
        raise UsageError(f"unknown arm {name!r}{suggest(name, list(ARMS))}")
    return ARMS[name]
