"""One comparison of an engine with a trainer: sample, score the same tokens, align the trainer, score them again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripoint.align import Alignment, align
from tripoint.drift.mismatch import Change, Measured, change, measure
from tripoint.drift.prompts import prompt_ids
from tripoint.drift.verdict import verdict
from tripoint.errors import UsageError
from tripoint.profiles import Target, resolve_target
from tripoint.stacks import Progress, Rollout, Stack, StackName, open_stack, parse_stack

MAX_COMPLETION = 128
ALIGNABLE = ("hf", "emulated")
PROFILE_MODES = {"": "", "eager": "/eager", "compile": "/compiled", "autocast": "/autocast"}

Stage = Callable[[str, int], AbstractContextManager[Progress]]
"""Opens one stretch of long work, given what it is and how many sequences it has; yields what to call as they finish."""


@contextmanager
def unwatched(what: str, total: int) -> Iterator[Progress]:
    yield lambda done: None


@dataclass(frozen=True)
class Side:
    """One of the two stacks: as named by the user, with what its rounding may depend on and the versions that computed."""

    stack: str
    conditions: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Aligned:
    """The trainer after alignment: to what, which modules changed, the mismatch then, and its paired change."""

    target: Target
    alignment: Alignment
    measured: Measured
    change: dict[str, Change]

    def ops(self) -> list[dict[str, Any]]:
        """What alignment changed, by op: rounding points before and after, and at how many modules."""
        counts = Counter((site.op, site.before, site.after) for site in self.alignment.sites)
        return [{"op": op, "before": before, "after": after, "sites": n} for (op, before, after), n in counts.items()]


@dataclass(frozen=True)
class Drift:
    """The result of `drift` and `diagnose`. `aligned` is None where no target is known (recorded rollouts, no `--to`)."""

    model: str
    engine: Side
    trainer: Side
    source: str
    before: Measured
    aligned: Aligned | None
    summary: str
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `drift`. What needs dithered replicates (noise, systematic part, attribution) is not in it."""
        out = {
            "model": self.model,
            "engine": vars(self.engine),
            "trainer": vars(self.trainer),
            "source": self.source,
            "tokens": self.before.tokens,
            "sequences": self.before.sequences,
            **self.before.to_dict(),
            "aligned": None,
            "summary": self.summary,
            "seconds": self.seconds,
        }
        if self.aligned is not None:
            out["aligned"] = {
                "target": self.aligned.target.name,
                "detail": self.aligned.target.detail,
                "schedule_before": str(self.aligned.alignment.before),
                "schedule": str(self.aligned.alignment.schedule),
                "ops": self.aligned.ops(),
                "notes": list(self.aligned.alignment.notes),
                **self.aligned.measured.to_dict(),
                "change": {name: vars(change) for name, change in self.aligned.change.items()},
            }
        return out


def compare(
    model: Path,
    engine: str,
    trainer: str = "hf",
    *,
    to: str | None = None,
    tokens: int = 8000,
    seed: int = 0,
    stage: Stage = unwatched,
) -> Drift:
    """Measure the mismatch of `trainer` against `engine` on about `tokens` completion tokens, before and after alignment.

    `model`: a checkpoint's directory. `engine`, `trainer`: STACKs; the engine may be `rollouts:FILE`, whose tokens are all
    used. `to`: the target of the alignment; by default what is documented for the engine (`emulated:X`: X). Only one of the
    two stacks is loaded at a time. Raises UsageError for bad input and MeasurementError where nothing can be measured.
    """
    engine_name, trainer_name = parse_stack(engine), parse_stack(trainer)
    if trainer_name.kind not in ALIGNABLE:
        raise UsageError(f"trainer `{trainer}` cannot be aligned: it must be hf, hf:compile, hf:autocast or emulated:TARGET")
    target = _target(engine_name, to)
    seconds: dict[str, float] = {}
    with _timed(seconds, "engine"):
        rollouts, source, engine_side = _rollouts(model, engine_name, tokens, seed, stage)

    logprobs = [rollout.logprobs for rollout in rollouts if rollout.logprobs is not None]
    with _timed(seconds, "trainer"), stage(f"loading {trainer}", 0):
        stack = open_stack(trainer, model)
    with stack:
        with _timed(seconds, "trainer"):
            before = measure(logprobs, _score(stack, rollouts, f"scoring with {trainer}", stage))
        aligned = None
        if target is not None:
            alignment = align(stack.model, to=target.schedule)
            with _timed(seconds, "aligned trainer"):
                after = measure(logprobs, _score(stack, rollouts, f"scoring with {trainer}, aligned", stage))
            aligned = Aligned(target, alignment, after, change(before, after))
        trainer_side = Side(trainer, stack.conditions(), stack.versions())
    summary = verdict(before, aligned.measured if aligned else None).sentence
    return Drift(str(model), engine_side, trainer_side, source, before, aligned, summary, seconds)


def _target(engine: StackName, to: str | None) -> Target | None:
    """What the trainer is to be aligned to, or None where nobody said."""
    if to is not None:
        return resolve_target(to)
    match engine.kind:
        case "rollouts":
            return None
        case "emulated":
            return resolve_target(engine.detail)
    return resolve_target(engine.kind + PROFILE_MODES[engine.detail])
