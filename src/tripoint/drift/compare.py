"""One comparison of an engine with a trainer: sample, score the same tokens, align the trainer, score them again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tripoint.align import align
from tripoint.align.model import Alignment
from tripoint.drift.mismatch import Change, Measured, change, measure
from tripoint.drift.prompts import prompt_ids
from tripoint.drift.verdict import verdict
from tripoint.errors import UsageError
from tripoint.models import resolve_model
from tripoint.stacks import Progress, Rollout, Stack, StackName, open_stack, parse_stack
from tripoint.stacks.base import vocab_size
from tripoint.stacks.hf import HFStack
from tripoint.stacks.rollouts import read_rollouts

SAMPLED_TOKENS = 8000
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
    """The trainer after alignment: the record of what changed, the mismatch then, and its paired change."""

    alignment: Alignment
    measured: Measured
    change: dict[str, Change]

    def ops(self) -> list[dict[str, Any]]:
        """What alignment changed, by op: rounding points before and after, and at how many modules."""
        counts = Counter((site.op, site.before, site.after) for site in self.alignment.sites)
        return [{"op": op, "before": before, "after": after, "sites": n} for (op, before, after), n in counts.items()]


@dataclass(frozen=True)
class Drift:
    """The result of `drift` and `diagnose`. `aligned` is None where no target is known (no `--to`)."""

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
                "target": self.aligned.alignment.target.name,
                "detail": self.aligned.alignment.target.detail,
                "schedule_before": str(self.aligned.alignment.before),
                "schedule": str(self.aligned.alignment.schedule),
                "ops": self.aligned.ops(),
                "notes": list(self.aligned.alignment.notes),
                **self.aligned.measured.to_dict(),
                "change": {name: vars(change) for name, change in self.aligned.change.items()},
            }
        return out


def compare(
    model: str,
    engine: str,
    trainer: str = "hf",
    *,
    to: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    stage: Stage = unwatched,
) -> Drift:
    """Measure the mismatch of `trainer` against `engine` on the engine's own tokens, before and after alignment.

    `model`: a directory, a hub id, or `smollm2`. `engine`, `trainer`: STACKs; the engine may be `rollouts:FILE`. `tokens`:
    about how many completion tokens; by default `SAMPLED_TOKENS`, or all that are recorded. `to`: the target of the
    alignment; by default what is documented for the engine (`emulated:X`: X). Only one of the two stacks is loaded at a
    time. Raises UsageError for bad input and MeasurementError where nothing can be measured.
    """
    engine_name, trainer_name = parse_stack(engine), parse_stack(trainer)
    if trainer_name.kind not in ALIGNABLE:
        raise UsageError(f"trainer `{trainer}` cannot be aligned: it must be hf, hf:compile, hf:autocast or emulated:TARGET")
    if to is None:
        to = _documented_target(engine_name)
    checkpoint = resolve_model(model)
    if to is not None:
        _check_alignable(checkpoint, to)  # before minutes of sampling
    seconds: dict[str, float] = {}
    with _timed(seconds, "engine"):
        rollouts, source, engine_side = _rollouts(checkpoint, engine_name, tokens, seed, stage)
    logprobs = [rollout.logprobs for rollout in rollouts if rollout.logprobs is not None]

    with _timed(seconds, "trainer"):
        stack = open_stack(trainer, checkpoint)
    assert isinstance(stack, HFStack)
    with stack:
        with _timed(seconds, "trainer"):
            before = measure(logprobs, _score(stack, rollouts, f"scoring with {trainer}", stage))
        aligned = None
        if to is not None:
            alignment = align(stack.model, to=to)
            with _timed(seconds, "aligned trainer"):
                after = measure(logprobs, _score(stack, rollouts, f"scoring with {trainer}, aligned", stage))
            aligned = Aligned(alignment, after, change(before, after))
        trainer_side = Side(trainer, stack.conditions(), stack.versions())
    summary = verdict(before, aligned.measured if aligned else None).sentence
    return Drift(model, engine_side, trainer_side, source, before, aligned, summary, seconds)


def _documented_target(engine: StackName) -> str | None:
    """What is documented for an engine, as a target; None for recorded rollouts and servers, which do not say what they run."""
    match engine.kind:
        case "rollouts" | "http":
            return None
        case "emulated":
            return engine.detail
    return engine.kind + PROFILE_MODES[engine.detail]


def _check_alignable(model: Path, to: str) -> None:
    """Raise the UsageError that `align` will raise for this checkpoint and target, without loading a weight."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        align(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), to=to)  # type: ignore[no-untyped-call]


def _rollouts(
    checkpoint: Path, engine: StackName, tokens: int | None, seed: int, stage: Stage
) -> tuple[list[Rollout], str, Side]:
    """Rollouts with the engine's logprobs, where their prompts come from, and the engine."""
    rollouts: list[Rollout] = []
    found = 0
    if engine.kind == "rollouts":
        for rollout in read_rollouts(Path(engine.detail), vocab_size(checkpoint)):
            rollouts.append(rollout)
            found += len(rollout.completion_ids)
            if tokens is not None and found >= tokens:
                break
        return rollouts, f"recorded in {engine.detail}", Side(str(engine), {}, {})
    wanted = tokens or SAMPLED_TOKENS
    with open_stack(str(engine), checkpoint) as stack:
        prompts, source = prompt_ids(checkpoint, stack.vocab_size)
        length = min(MAX_COMPLETION, -(-wanted // len(prompts)))
        while found < wanted:
            batch = prompts[: -(-(wanted - found) // length)]
            with stage(f"sampling from {engine}", len(batch)) as progress:
                sampled = stack.sample(batch, max_tokens=length, seed=seed + len(rollouts), progress=progress)
            rollouts += sampled
            found += sum(len(rollout.completion_ids) for rollout in sampled)
        return rollouts, f"sampled at temperature 1 from {source}", Side(str(engine), stack.conditions(), stack.versions())


def _score(stack: Stack, rollouts: list[Rollout], what: str, stage: Stage) -> list[list[float]]:
    with stage(what, len(rollouts)) as progress:
        return stack.score(rollouts, progress=progress)


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - start
