"""Which of many recorded tokens are measured, and which sequences count as one where errors are estimated: those of one
prompt are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tripoint.drift.neutral import MIN_SEQUENCES
from tripoint.stacks import Rollout

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


def group_numbers(rollouts: Sequence[Rollout]) -> tuple[int, ...]:
    """A number for each sequence, the same where `Rollout.group` is."""
    seen: dict[tuple[int, ...] | int, int] = {}
    keys = (index if rollout.group is None else rollout.group for index, rollout in enumerate(rollouts))
    return tuple(seen.setdefault(key, len(seen)) for key in keys)


def spread(rollouts: Sequence[Rollout], tokens: int, seed: int) -> list[Rollout]:
    """At most `tokens` completion tokens from all over `rollouts`, in their order; all where there are no more.

    No prompt comes in twice before all have come in once. Long completions lose their ends, so that `MIN_SEQUENCES` have room.
    """
    if sum(len(rollout.completion_ids) for rollout in rollouts) <= tokens:
        return list(rollouts)
    longest = max(tokens // min(MIN_SEQUENCES, len(rollouts)), 1)
    numbers = group_numbers(rollouts)
    drawn: Counter[int] = Counter()
    turns = []
    for index in np.random.default_rng(seed).permutation(len(rollouts)).tolist():
        turns.append((drawn[numbers[index]], index))
        drawn[numbers[index]] += 1
    chosen: dict[int, Rollout] = {}
    for _, index in sorted(turns, key=lambda turn: turn[0]):
        if not tokens:
            break
        chosen[index] = _beginning(rollouts[index], min(longest, tokens))
        tokens -= len(chosen[index].completion_ids)
    return [chosen[index] for index in sorted(chosen)]


def _beginning(rollout: Rollout, tokens: int) -> Rollout:
    return replace(
        rollout,
        completion_ids=rollout.completion_ids[:tokens],
        logprobs=rollout.logprobs and rollout.logprobs[:tokens],
        advantages=rollout.advantages and rollout.advantages[:tokens],
    )


def in_order(owners: Numbers) -> tuple[Numbers, Numbers]:
    """The order that puts the tokens of a group next to each other, and where each group then starts. `owners`: (tokens,)."""
    order = np.argsort(owners, kind="stable")
    return order, np.flatnonzero(np.diff(owners[order], prepend=-1))


def group_sums(values: Floats, owners: Numbers) -> Floats:
    """Sums over the tokens of each group that has any: (..., tokens) to (..., groups)."""
    order, starts = in_order(owners)
    sums: Floats = np.add.reduceat(values[..., order], starts, axis=-1)
    return sums
