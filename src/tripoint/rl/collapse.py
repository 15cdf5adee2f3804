"""Collapse of a training run, defined before any run: the reward loses half of what it once had."""

from __future__ import annotations

from collections import deque

WINDOW = 50
FRACTION = 0.5


class CollapseDetector:
    """A run has collapsed at the first update at which the mean reward of the last `window` updates is below `fraction` of the
    largest such mean so far. Rewards must not be negative. `collapsed_at` is that update, counted from 0, None until then."""

    def __init__(self, window: int = WINDOW, fraction: float = FRACTION) -> None:
        self.fraction = fraction
        self.collapsed_at: int | None = None
        self._recent: deque[float] = deque(maxlen=window)
        self._best = 0.0
        self._updates = 0

    def add(self, reward: float) -> None:
        """Take in the mean reward of the next update."""
        self._recent.append(reward)
        if len(self._recent) == self._recent.maxlen:
            mean = sum(self._recent) / len(self._recent)
            self._best = max(self._best, mean)
            if self.collapsed_at is None and mean < self.fraction * self._best:
                self.collapsed_at = self._updates
        self._updates += 1


def collapsed_at(rewards: list[float]) -> int | None:
    """The update at which a recorded run collapsed, None if it did not."""
    detector = CollapseDetector()
    for reward in rewards:
        detector.add(reward)
    return detector.collapsed_at
