"""Which of the three operations the systematic drift comes from, and where in the sequence, the vocabulary and the depth.

V(c) is the systematic variance between the engine and the trainer with the operations c moved to the engine's schedule. For
one operation: *moved alone*, V(nothing) - V(it alone); *moved away*, V(all but it) - V(all); its *Shapley value*, the mean of
what moving it removes over all orders. Shapley values add up to V(nothing) - V(all) by construction and prove nothing; the
*interaction*, that whole minus the moved-alone parts, says how far operations can be spoken of one by one. V(all) is what no
operation explains: attention, GEMMs, lm_head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import factorial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tripoint.align import align
from tripoint.align.layouts import find_decoders
from tripoint.drift.dither import Replicates
from tripoint.drift.estimate import MIN_SEQUENCES, Estimate, Systematic
from tripoint.errors import UsageError
from tripoint.schedule import OPS, Op, RoundingSchedule, diff, value_text

Moved = tuple[Op, ...]
"""The operations that were moved from the trainer's schedule to the engine's, in the order of `OPS`."""

POSITION_BINS = 4
PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class Site:
    """The part of one operation, in nats squared; `before` and `after` are its codes in the trainer and in the engine."""

    op: Op
    before: str
    after: str
    moved_alone: Estimate
    moved_away: Estimate
    shapley: Estimate
    share: Estimate


@dataclass(frozen=True)
class Bin:
    """Tokens from `low` up to (not including) `high`, in position or in probability, with their systematic variance and the
    parts that moving one operation alone removes. `total` is None where too few sequences hold such tokens."""

    low: float
    high: float
    tokens: int
    total: Estimate | None
    moved_alone: dict[Op, Estimate]


@dataclass(frozen=True)
class FieldPart:
    """The part of one field, by its name in the schedule's TOML, in nats squared: what moving it alone removes.

    `moved_alone` is None where it cannot be moved alone, because no schedule has its new value next to the others' old ones.
    """

    field: str
    op: Op
    before: str
    after: str
    moved_alone: Estimate | None


@dataclass(frozen=True)
class Attribution:
    """The systematic variance before alignment split over the operations that differ; `unexplained` remains after it."""

    total: Estimate
    sites: tuple[Site, ...]
    interaction: Estimate
    unexplained: Estimate
    by_position: tuple[Bin, ...]
    by_probability: tuple[Bin, ...]


def differing(trainer: RoundingSchedule, engine: RoundingSchedule) -> Moved:
    """The operations in which two schedules differ."""
    different = {difference.op for difference in diff(trainer, engine)}
    return tuple(op for op in OPS if op in different)


def subsets(ops: Moved) -> list[Moved]:
    """All combinations of `ops`, nothing first and everything last."""
    return [chosen for size in range(len(ops) + 1) for chosen in combinations(ops, size)]


def name(moved: Moved) -> str:
    """`rope+norm`, or `nothing`: what a combination is called as a stack of its own."""
    return "+".join(moved) or "nothing"


def attribute(
    engine: Replicates,
    trainers: Mapping[Moved, Replicates],
    schedules: tuple[RoundingSchedule, RoundingSchedule],
    steady: NDArray[np.bool_],
    *,
    seed: int = 0,
) -> Attribution:
    """Split the systematic variance between `engine` and the trainer over the operations that were moved.

    `trainers`: the trainer's replicates with each combination of the differing operations moved (see `subsets`).
    `schedules`: the trainer's and the engine's. `steady`: which tokens to look at.
    """
    whole = max(trainers, key=len)
    named = {name(moved): replicates for moved, replicates in trainers.items()}
    joint = Systematic(engine, named, tokens=steady, seed=seed)
    everything = {"nothing": 1.0, name(whole): -1.0}
    sites = tuple(
        Site(
            op,
            code(schedules[0], op),
            code(schedules[1], op),
            joint.combine(_minus("nothing", name((op,)))),
            joint.combine(_minus(name(_without(whole, op)), name(whole))),
            joint.combine(shapley(whole, op)),
            joint.ratio(shapley(whole, op), everything),
        )
        for op in whole
    )
    return Attribution(
        joint.combine({"nothing": 1.0}),
        sites,
        joint.combine(_interaction(whole)),
        joint.combine({name(whole): 1.0}),
        _by_position(engine, named, whole, steady, seed),
        _by_probability(engine, named, whole, steady, seed),
    )


def attribute_fields(
    engine: Replicates,
    trainer: Replicates,
    moved: Mapping[str, Replicates],
    schedules: tuple[RoundingSchedule, RoundingSchedule],
    steady: NDArray[np.bool_],
    *,
    seed: int = 0,
) -> tuple[FieldPart, ...]:
    """Every field in which the trainer's and the engine's `schedules` differ, with what moving it alone removes.

    `moved`: the trainer's replicates with one field moved, by field (see `field_moves`); `trainer`: with none.
    """
    joint = Systematic(engine, {"nothing": trainer, **moved}, tokens=steady, seed=seed)
    return tuple(
        FieldPart(
            difference.field,
            difference.op,
            value_text(difference.left),
            value_text(difference.right),
            joint.combine(_minus("nothing", difference.field)) if difference.field in moved else None,
        )
        for difference in diff(*schedules)
    )


@dataclass(frozen=True)
class Fit:
    """How well a candidate schedule of the engine fits: its variance against the engine, and by how much that is above the
    best candidate's (zero for the best itself)."""

    candidate: str
    variance: Estimate
    above_best: Estimate


def fits(engine: Replicates, candidates: Mapping[str, Replicates], steady: NDArray[np.bool_], *, seed: int = 0) -> list[Fit]:
    """The candidates, best first: the trainer's replicates under each schedule that the engine might have.

    The differences are paired and hold for an engine that is a single sample as well, whose noise the variances include.
    """
    joint = Systematic(engine, candidates, tokens=steady, seed=seed)
    ranked = sorted(candidates, key=lambda candidate: joint.combine({candidate: 1.0}).value)
    return [
        Fit(candidate, joint.combine({candidate: 1.0}), joint.combine(_minus(candidate, ranked[0]))) for candidate in ranked
    ]


def shapley(whole: Moved, op: Op) -> dict[str, float]:
    """The Shapley value of `op` as coefficients of the variances, by name of combination."""
    coefficients: dict[str, float] = {}
    n = len(whole)
    for others in subsets(_without(whole, op)):
        weight = factorial(len(others)) * factorial(n - len(others) - 1) / factorial(n)
        joined = tuple(o for o in whole if o in others or o == op)
        coefficients[name(others)] = coefficients.get(name(others), 0.0) + weight
        coefficients[name(joined)] = coefficients.get(name(joined), 0.0) - weight
    return coefficients


def code(schedule: RoundingSchedule, op: Op) -> str:
    """What `schedule` says about one operation: `R3`, or `N3 carry=layer`."""
    words = str(schedule).split()
    if op != "norm":
        return words[OPS.index(op)]
    return " ".join(word for word in words if word[0] == "N" or word.startswith(("carry", "qk")))


def field_moves(trainer: RoundingSchedule, engine: RoundingSchedule) -> dict[str, RoundingSchedule]:
    """`trainer` with one field moved to `engine`'s value, by field; without the fields that cannot be moved alone."""
    moves = {}
    for difference in diff(trainer, engine):
        moved = trainer.to_dict()
        *parents, field = difference.field.split(".")
        part: dict[str, Any] = moved
        for parent in parents:
            part = part[parent]
        part[field] = difference.right
        try:
            moves[difference.field] = RoundingSchedule.from_dict(moved)
        except UsageError:
            continue
    return moves


def _without(whole: Moved, op: Op) -> Moved:
    return tuple(other for other in whole if other != op)


def _minus(left: str, right: str) -> dict[str, float]:
    return {left: 1.0, right: -1.0} if left != right else {left: 0.0}


def _interaction(whole: Moved) -> dict[str, float]:
    coefficients = {"nothing": 1.0 - len(whole)}
    for op in whole:
        coefficients[name((op,))] = 1.0
    coefficients[name(whole)] = coefficients.get(name(whole), 0.0) - 1.0
    return coefficients


def _by_position(
    engine: Replicates, named: Mapping[str, Replicates], whole: Moved, steady: NDArray[np.bool_], seed: int
) -> tuple[Bin, ...]:
    position = np.concatenate([np.arange(length) for length in engine.lengths])
    edges = np.linspace(0, max(engine.lengths), POSITION_BINS + 1).round()
    return _bins(engine, named, whole, steady, position, edges, seed)


def _by_probability(
    engine: Replicates, named: Mapping[str, Replicates], whole: Moved, steady: NDArray[np.bool_], seed: int
) -> tuple[Bin, ...]:
    # The mean of both sides: a token that one side favours must not end up in a higher bin for it.
    probability = np.exp((engine.mean + named["nothing"].mean) / 2)
    return _bins(engine, named, whole, steady, probability, PROBABILITY_EDGES, seed)


def _bins(
    engine: Replicates,
    named: Mapping[str, Replicates],
    whole: Moved,
    steady: NDArray[np.bool_],
    where: NDArray[Any],
    edges: Iterable[float],
    seed: int,
) -> tuple[Bin, ...]:
    edges = [float(edge) for edge in edges]
    owners = engine.owners
    bins = []
    for low, high in pairwise(edges):
        inside = steady & (where >= low) & ((where < high) | (high == edges[-1]))
        total, alone = None, {}
        if len(np.unique(owners[inside])) >= MIN_SEQUENCES:
            joint = Systematic(engine, named, tokens=inside, seed=seed)
            total = joint.combine({"nothing": 1.0})
            alone = {op: joint.combine(_minus("nothing", name((op,)))) for op in whole}
        bins.append(Bin(low, high, int(inside.sum()), total, alone))
    return tuple(bins)


@dataclass(frozen=True)
class LocalError:
    """What one decoder layer, given the same input, puts out under two schedules.

    `changed`: share of output elements that differ. `ulps`: median distance of those, in BF16 steps of the larger one's size.
    `relative`: root mean square difference over root mean square output. `op` is the operation moved, None for all that differ.
    """

    layer: int
    op: Op | None
    changed: float
    ulps: float
    relative: float


@torch.no_grad()
def local_errors(model: Any, ids: torch.Tensor, trainer: RoundingSchedule, engine: RoundingSchedule) -> list[LocalError]:
    """Run each layer of `model` (BF16) on the input it has under `trainer`, rounded to BF16, with the operations moved to
    `engine` one by one and all at once. `ids`: (sequences, tokens), on any device.

    The model's alignment is undone afterwards.
    """
    whole = differing(trainer, engine)
    record = align(model, to=trainer)
    try:
        calls = _layer_calls(model, ids)
        before = _layer_outputs(calls)
        errors = []
        for moved, op in [*(((op,), op) for op in whole), (whole, None)]:
            align(model, to=trainer.moved(engine, moved))
            errors += [
                _distance(index, op, *pair) for index, pair in enumerate(zip(before, _layer_outputs(calls), strict=True))
            ]
    finally:
        record.undo()
    return sorted(errors, key=lambda error: error.layer)


def _layer_calls(model: Any, ids: torch.Tensor) -> list[tuple[Any, torch.Tensor, dict[str, Any]]]:
    """Each layer, its input rounded to BF16, and what else it was given."""
    calls = []

    def remember(layer: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        # In FP32, because a schedule that carries unrounded sums asks for that; the values are BF16's.
        calls.append((layer, args[0].bfloat16().float(), kwargs))

    layers = [place.module for place in find_decoders(model)[0].places if place.kind == "layer"]
    hooks = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in layers]
    try:
        model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _layer_outputs(calls: list[tuple[Any, torch.Tensor, dict[str, Any]]]) -> list[torch.Tensor]:
    return [layer(hidden, **kwargs).bfloat16() for layer, hidden, kwargs in calls]


def _distance(layer: int, op: Op | None, before: torch.Tensor, after: torch.Tensor) -> LocalError:
    before32, after32 = before.float(), after.float()
    apart = (before32 - after32).abs()
    changed = apart > 0
    # The step between BF16 numbers of the larger one's size.
    exponent = torch.frexp(torch.maximum(before32.abs(), after32.abs())).exponent
    ulps = torch.ldexp(apart, 8 - exponent)[changed]
    return LocalError(
        layer,
        op,
        changed.float().mean().item(),
        ulps.median().item() if len(ulps) else 0.0,
        (apart.pow(2).mean().sqrt() / before32.pow(2).mean().sqrt()).item(),
    )
