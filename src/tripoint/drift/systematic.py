"""One measurement of the part of the drift that does not average out: replicates of both stacks, controls, attribution.

The engine may be a running stack, which is dithered like the trainer, or a recording (a single sample of its roundings).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tripoint.align import align
from tripoint.align.model import Alignment
from tripoint.drift.attribution import (
    Attribution,
    FieldPart,
    Fit,
    Moved,
    attribute,
    attribute_fields,
    differing,
    field_moves,
    fits,
    name,
    subsets,
)
from tripoint.drift.dither import Dithering, How, Replicates, permutable, seeds
from tripoint.drift.estimate import Estimate, Systematic, systematic
from tripoint.drift.expectation import steady
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Progress, Stack
from tripoint.stacks.emulated import EmulatedStack
from tripoint.stacks.hf import HFStack

MIN_REPLICATES, MAX_REPLICATES = 4, 32
QUICK_SECONDS, FULL_SECONDS = 240.0, 720.0
CONTROLS_AGREE = 3.0  # standard errors within which zero is
CONTROLS_TELL = 2.0  # standard errors from which on a difference that must be seen is

# Far from every trainer's: no stack is known to round like this.
ODD = RoundingSchedule.parse("R4 S5 N6 qk=none")
ODD_WITHOUT_SILU = RoundingSchedule.parse("R4 S3 N6 qk=none")

Stage = Callable[[str, int], AbstractContextManager[Progress]]


@contextmanager
def unwatched(what: str, total: int) -> Iterator[Progress]:
    yield lambda done: None


@dataclass(frozen=True)
class Controls:
    """`zero`: the trainer against itself with fresh dithers. `positive`: against itself under a deliberately odd schedule."""

    zero: Estimate
    positive: Estimate

    @property
    def problem(self) -> str | None:
        """What a control says against the measurement, None if nothing."""
        if abs(self.zero.value) > CONTROLS_AGREE * self.zero.stderr:
            return (
                f"the trainer against itself gives {self.zero.value:.2g} ± {self.zero.stderr:.1g} nats², which is not zero: "
                "its dithers are not exchangeable"
            )
        if self.positive.value <= CONTROLS_TELL * self.positive.stderr:
            return (
                f"a deliberately different schedule gives {self.positive.value:.2g} ± {self.positive.stderr:.1g} nats², not "
                "told from zero: the measurement is too coarse, so give it more replicates or tokens"
            )
        return None


@dataclass(frozen=True)
class Ranged:
    """The same variance by the two ways of decorrelating roundings; `left`: once the trainer is aligned, by permutation, None
    where nothing had to be."""

    dither: Estimate
    permutation: Estimate
    left: Estimate | None

    @property
    def disagree(self) -> bool:
        """Whether they differ by more than two standard errors of their difference: then they are a range."""
        error = np.hypot(self.dither.stderr, self.permutation.stderr)
        return bool(abs(self.dither.value - self.permutation.value) > 2 * error)


@dataclass(frozen=True)
class SystematicDrift:
    """The result. `aligned`: the variance once the trainer rounds like the engine, None without a target; `removed`: what that
    takes off, also None where the trainer rounds like the engine as it is. `ranged`: None unless `full`, for a recorded engine,
    and for weights that nobody knows how to permute.

    `bound_only`: the engine was a single sample, so that `total` and `aligned` include its noise and only bound the
    systematic variance; their difference does not depend on that. `fits`: the schedules that the trainer was scored under,
    the one nearest to the engine first; empty unless several were. `fields`: the attribution to single fields, None where it
    was not asked for and empty where nothing was attributed. `passes`: how often the tokens were scored, by the trainer
    and by the engine.
    """

    tokens: int
    sequences: int
    replicates: int
    wild: NDArray[np.bool_]
    noise_rms: dict[str, float]
    total: Estimate
    aligned: Estimate | None
    removed: Estimate | None
    attribution: Attribution | None
    fields: tuple[FieldPart, ...] | None
    fits: tuple[Fit, ...]
    ranged: Ranged | None
    controls: Controls
    bound_only: bool
    passes: dict[str, int]
    seconds: dict[str, float]
    scores: dict[str, Replicates] = field(repr=False)


def measure_systematic(
    engine: Stack | Replicates,
    trainer: HFStack,
    dithering: Dithering,
    schedules: tuple[RoundingSchedule, RoundingSchedule] | None,
    *,
    full: bool,
    fields: bool = False,
    candidates: Sequence[RoundingSchedule] = (),
    replicates: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    stage: Stage = unwatched,
) -> SystematicDrift:
    """Measure the systematic drift between `engine` and `trainer` on the tokens of `dithering`.

    `schedules`: the trainer's and the engine's, None if the latter is not known. `full`: also attribute it to the
    operations, and compare dithering with permutation. `fields`: then to each field as well. `candidates`: schedules to be
    compared by how well they fit an engine of which none is known. `replicates`: how many of each stack; by default as many as
    the time `budget` (seconds) allows, and that is `QUICK_SECONDS` or `FULL_SECONDS`. `engine` may be one recorded sample.

    The trainer ends as it was. Raises MeasurementError where the tokens are too few.
    """
    recorded = engine if isinstance(engine, Replicates) else None
    whole = differing(*schedules) if schedules else ()
    moves = [moved for moved in subsets(whole) if moved and (full or moved == whole)]
    alone = field_moves(*schedules) if schedules and full and fields else {}
    both_ways = full and recorded is None and permutable(dithering.weights)
    everything = name(whole) if whole else None
    clock = _Clock()
    if replicates is None:
        budget = budget or (FULL_SECONDS if full else QUICK_SECONDS)
        # Two halves of the trainer, the odd schedule, every move (at most); permuted both again, and the trainer aligned.
        weights = {
            "trainer": 3 + len(moves) + len(alone) + len(candidates) + both_ways * (1 + bool(whole)),
            "engine": (1 + both_ways) * (recorded is None),
        }
        per_replicate = weights["trainer"] * clock.probe("trainer", trainer, dithering)
        if recorded is None:
            per_replicate += weights["engine"] * clock.probe("engine", engine, dithering)  # type: ignore[arg-type]
        replicates = int(min(max(budget / per_replicate, MIN_REPLICATES), MAX_REPLICATES))

    def score(stack: Stack, who: str, what: str, count: int, how: How = "dither") -> Replicates:
        with clock.timed(who, count), stage(f"{what}, {count} {how}s" if how == "dither" else f"{what}, permuted", 0):
            return dithering.score(stack, seeds(seed, f"{what}/{how}", count), how=how)

    scores: dict[str, Replicates] = {}
    if recorded is None:
        assert isinstance(engine, Stack)
        scores["engine"] = score(engine, "engine", "engine", replicates)
        if both_ways:
            scores["engine, permuted"] = score(engine, "engine", "engine", replicates, "permutation")
    else:
        scores["engine"] = recorded
    scores["trainer"] = score(trainer, "trainer", "trainer", 2 * replicates)
    if both_ways:
        scores["trainer, permuted"] = score(trainer, "trainer", "trainer", replicates, "permutation")
    for moved in moves:
        with aligned(trainer, schedules[0].moved(schedules[1], moved)):  # type: ignore[index]
            scores[name(moved)] = score(trainer, "trainer", f"trainer with {name(moved)} moved", replicates)
            if both_ways and moved == whole:
                scores["aligned, permuted"] = score(
                    trainer, "trainer", f"trainer with {name(moved)} moved", replicates, "permutation"
                )
    ranked = {str(schedules[0].moved(schedules[1], moved)): scores[name(moved)] for moved in moves} if schedules else {}
    field_scores: dict[str, Replicates] = {}
    for field_name, schedule in alone.items():
        if str(schedule) in ranked:  # the only field in which an operation differs
            field_scores[field_name] = ranked[str(schedule)]
            continue
        with aligned(trainer, schedule):
            field_scores[field_name] = score(trainer, "trainer", f"trainer with {field_name} moved", replicates)
    for candidate in candidates:
        with aligned(trainer, candidate):
            ranked[str(candidate)] = score(trainer, "trainer", f"trainer as {candidate}", replicates)
    with aligned(trainer, odd_schedule(trainer.model.config)):
        scores["odd"] = score(trainer, "trainer", "trainer, odd schedule", replicates)

    kept = steady([scores["engine"], scores["trainer"], *(scores[name(moved)] for moved in moves), *field_scores.values()])
    joint = Systematic(
        scores["engine"], {"nothing": scores["trainer"]} | {name(m): scores[name(m)] for m in moves}, tokens=kept, seed=seed
    )
    halves = [Replicates(scores["trainer"].values[part::2], dithering.lengths, dithering.groups) for part in (0, 1)]
    attribution = None
    field_parts: tuple[FieldPart, ...] | None = () if fields else None
    if full and whole:
        trainers: dict[Moved, Replicates] = {(): scores["trainer"]} | {moved: scores[name(moved)] for moved in moves}
        assert schedules is not None
        attribution = attribute(scores["engine"], trainers, schedules, kept, seed=seed)
        if fields:
            field_parts = attribute_fields(scores["engine"], scores["trainer"], field_scores, schedules, kept, seed=seed)
    ranged = None
    if both_ways:
        permuted = {
            what: systematic(scores["engine, permuted"], scores[f"{what}, permuted"], tokens=kept, seed=seed)
            for what in ("trainer", "aligned")
            if f"{what}, permuted" in scores
        }
        ranged = Ranged(joint.combine({"nothing": 1.0}), permuted["trainer"], permuted.get("aligned"))
    if schedules:
        ranked[str(schedules[0])] = scores["trainer"]
    return SystematicDrift(
        tokens=len(kept),
        sequences=len(dithering.lengths),
        replicates=replicates,
        wild=~kept,
        noise_rms={who: scores[who].noise_rms(kept) for who in ("trainer", "engine")},
        total=joint.combine({"nothing": 1.0}),
        aligned=joint.combine({everything or "nothing": 1.0}) if schedules else None,
        removed=joint.combine({"nothing": 1.0, everything: -1.0}) if everything else None,
        attribution=attribution,
        fields=field_parts,
        fits=tuple(fits(scores["engine"], ranked, kept, seed=seed)) if full or candidates else (),
        ranged=ranged,
        controls=Controls(
            systematic(halves[0], halves[1], tokens=kept, seed=seed),
            systematic(scores["trainer"], scores["odd"], tokens=kept, seed=seed),
        ),
        bound_only=joint.bound_only,
        passes=clock.passes,
        seconds=clock.seconds,
        scores=scores,
    )


@contextmanager
def aligned(trainer: HFStack, to: str | RoundingSchedule) -> Iterator[Alignment]:
    """`trainer` aligned to `to` inside, and as before afterwards."""
    record = align(trainer.model, to=to)
    try:
        yield record
    finally:
        if isinstance(trainer, EmulatedStack):
            align(trainer.model, to=trainer.alignment.schedule)
        else:
            record.undo()


@contextmanager
def as_transformers(trainer: HFStack) -> Iterator[Any]:
    """The trainer's model as transformers made it, without any alignment, which it has again afterwards."""
    if isinstance(trainer, EmulatedStack):
        trainer.alignment.undo()
        try:
            yield trainer.model
        finally:
            align(trainer.model, to=trainer.alignment.schedule)
    else:
        yield trainer.model


def odd_schedule(config: Any) -> RoundingSchedule:
    """A schedule unlike any trainer's, of those that the gate of a model with this `config` can have."""
    return ODD if getattr(config, "hidden_act", None) in ("silu", "swish") else ODD_WITHOUT_SILU


@dataclass
class _Clock:
    """How often the tokens were scored and how long it took, by side."""

    passes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, who: str, passes: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.passes[who] = self.passes.get(who, 0) + passes
        self.seconds[who] = self.seconds.get(who, 0.0) + time.perf_counter() - start

    def probe(self, who: str, stack: Stack, dithering: Dithering) -> float:
        """Seconds that one dithered pass takes, after one to warm up."""
        dithering.score_once(stack)
        start = time.perf_counter()
        with self.timed(who, 2):
            dithering.score(stack, [0])
        return time.perf_counter() - start
