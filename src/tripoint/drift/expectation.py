"""What rounding noise alone would show in the numbers that RL frameworks log: a threshold of this model's own.

Two stacks that compute the same function and round independently differ on every token. The k3 that this gives follows from
each stack's own spread over its dithers. A measured k3 far above it is not rounding noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tripoint.drift.dither import Floats, Replicates
from tripoint.drift.groups import group_sums

DRAWS = 4000
LIMIT_QUANTILE = 0.999
WILD = 100.0


@dataclass(frozen=True)
class NoiseOnly:
    """What a measurement of this size would give if trainer and engine differed by noise alone.

    `k3`: its expectation. `k3_limit`: exceeded by noise once in a thousand such measurements. `rms`: of d, nats. All three are
    of the `steady` tokens, True in (tokens,): one that the model may see either way would decide them alone.
    """

    k3: float
    k3_limit: float
    rms: float
    steady: NDArray[np.bool_]

    def at(self, temperature: float) -> NoiseOnly:
        """The same of logits divided by `temperature`: their noise with them, k3 with its square."""
        square = temperature**2
        return NoiseOnly(self.k3 / square, self.k3_limit / square, self.rms / temperature, self.steady)


def noise_only(trainer: Replicates, engine: Replicates, *, seed: int = 0) -> NoiseOnly:
    """The expectation from replicates of both stacks on the same tokens; two or more of each.

    Every replicate of one stack is paired with every one of the other, each as its deviation from its stack's mean, widened
    by what a mean over few replicates hides.
    """
    deviations = [_deviations(trainer), _deviations(engine)]
    kept = steady([trainer, engine])
    d = deviations[0][:, None, kept] - deviations[1][None, :, kept]
    d = d.reshape(-1, d.shape[-1])
    owners = trainer.owners[kept]
    sums = group_sums(np.expm1(d) - d, owners)  # (pairs, groups)
    lengths = group_sums(np.ones(len(owners)), owners)
    rng = np.random.default_rng(seed)
    groups = len(lengths)
    # A measurement sees one pair of roundings in each of the sequences it happens to hold.
    who = rng.integers(groups, size=(DRAWS, groups))
    pair = rng.integers(len(d), size=(DRAWS, groups))
    drawn = sums[pair, who].sum(axis=1) / lengths[who].sum(axis=1)
    limit = float(np.quantile(drawn, LIMIT_QUANTILE))
    return NoiseOnly(float(sums.sum() / d.size), limit, float(np.sqrt((d**2).mean())), kept)


def steady(stacks: Sequence[Replicates]) -> NDArray[np.bool_]:
    """Which tokens to measure on: all but those whose noise would drown everything else.

    A token at which a model is about to fall one way or the other has a noise of whole nats, and one of them among thousands
    decides the mean of squares and its error. A token is left out if its noise variance, averaged over the stacks, is more
    than `WILD` times the mean over those left in. Whether it is depends on spreads only, not on the differences measured.
    """
    variance = np.mean([stack.values.var(axis=0, ddof=1) for stack in stacks if len(stack) > 1], axis=0)
    kept = np.ones(len(variance), bool)
    while True:
        next_kept = variance <= WILD * variance[kept].mean()
        if (next_kept == kept).all():
            return kept
        kept &= next_kept


def _deviations(stack: Replicates) -> Floats:
    k = len(stack)
    if k < 2:
        raise ValueError("noise needs two replicates or more")
    return (stack.values - stack.mean) * np.sqrt(k / (k - 1))
