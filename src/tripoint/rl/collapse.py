"""Collapse of a training run, defined before any run: the reward loses half of what it once had."""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 50
FRACTION = 0.5


def collapsed_at(rewards: Sequence[float]) -> int | None:
    """The update, counted from 0, at which a run with these mean rewards collapsed; None if it did not.

    That is the first at which the mean of the last `WINDOW` rewards is below `FRACTION` of the largest such mean so far.
    Rewards must not be negative.
    """
    best = 0.0
    for update in range(WINDOW - 1, len(rewards)):
        mean = sum(rewards[update - WINDOW + 1 : update + 1]) / WINDOW
        best = max(best, mean)
        if mean < FRACTION * best:
            return update
    return None
