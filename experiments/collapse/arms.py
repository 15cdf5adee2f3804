"""The arms: how each one's trainer differs from the engine it learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tripoint.errors import UsageError
from tripoint.schedule import suggest

STOCK = "R1 S1 N1"
ENGINE = "R3 S3 N3"


@dataclass(frozen=True)
class Arm:
    """`trainer` and `engine`: their schedules; `layers` from the first round like `trainer`, the others like `STOCK`.

    `correction`: "tis" weighs each token by its importance ratio, truncated at 2.
    `noise`: "rope" moves every element of the trainer's rotated queries and keys by as much as R1 and R3 differ there, the
    sign fresh at random each time; "rope fixed" draws the signs once for a run, for every layer, head, place in the pass and
    element; "logits" moves the logits by the difference between a `STOCK` trainer and the engine, in fresh directions.
    `split`: whose logits the loss sees and whose backward pass carries the gradient, where these are two: the engine's
    schedule (aligned) in one, the trainer's in the other.
    """

    trainer: str = STOCK
    engine: str = ENGINE
    trainer_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    engine_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    layers: int | None = None
    correction: Literal["tis"] | None = None
    noise: Literal["rope", "rope fixed", "logits"] | None = None
    split: Literal["aligned forward", "aligned backward"] | None = None

    @property
    def bitwise(self) -> bool:
        """Whether trainer and engine must give every log-probability bit for bit."""
        same = self.trainer == self.engine and self.trainer_dtype == self.engine_dtype and self.layers is None
        return (same and self.noise is None) or self.split == "aligned forward"


ARMS: dict[str, Arm] = {
    "none": Arm(),
    "rope": Arm(trainer="R3 S1 N1"),
    "swiglu": Arm(trainer="R1 S3 N1"),
    "norm": Arm(trainer="R1 S1 N3"),
    "all": Arm(trainer=ENGINE),
    "fp16": Arm(trainer_dtype="float16", engine_dtype="float16"),
    "fp32-trainer": Arm(trainer_dtype="float32"),
    "tis": Arm(correction="tis"),
    # Only RoPE differs: the stock one, a more precise one equally far away, and noise of the stock one's size, which averages
    # out over updates or does not.
    "all-but-rope": Arm(trainer="R1 S3 N3"),
    "wrong": Arm(trainer="R4 S3 N3"),
    "placebo": Arm(trainer=ENGINE, noise="rope"),
    "placebo-fixed": Arm(trainer=ENGINE, noise="rope fixed"),
    "placebo-logits": Arm(noise="logits"),
    "swapped": Arm(trainer=ENGINE, engine=STOCK),
    "aligned-forward": Arm(split="aligned forward"),
    "aligned-backward": Arm(split="aligned backward"),
    "dose-25": Arm(trainer=ENGINE, layers=1),
    "dose-50": Arm(trainer=ENGINE, layers=2),
    "dose-75": Arm(trainer=ENGINE, layers=3),
}


def arm_named(name: str) -> Arm:
    """Raises UsageError for an unknown name."""
    if name not in ARMS:
        raise UsageError(f"unknown arm {name!r}{suggest(name, list(ARMS))}")
    return ARMS[name]
