"""Systematic variance between stacks from dithered replicates, and how sure it is.

Let a_kt be stack A's log-probability of token t under dither k. Its mean over dithers m_t estimates the expected
log-probability under rounding noise, its variance v_t is the noise. Between stacks A and B

    V = mean over t of (mA_t - mB_t)^2 - vA_t / K_A - vB_t / K_B

estimates the mean squared difference of the expected log-probabilities without bias, and may come out negative.

Errors are by a two-way bootstrap. Sequences are resampled, never tokens: those of one sequence share their context. Replicates
are resampled too, because one dither acts on all sequences at once. Resampling both at a time would count the noise of each
(sequence, replicate) cell twice, so the two variances are taken apart, and of the replicates' only what sequences have in
common is added (the covariance between different sequences), as in multiway clustering (Cameron, Gelbach and Miller 2011).
Whoever compares several stacks with one gets all their errors jointly, so that differences between them are paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tripoint.drift.dither import Floats, Replicates
from tripoint.errors import MeasurementError

RESAMPLES = 1000
REPLICATE_RESAMPLES = 300
MIN_SEQUENCES = 8


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error, whose own precision is that of `df` degrees of freedom."""

    value: float
    stderr: float
    df: float

    @property
    def p_value(self) -> float:
        """Probability of a value as large as this if the truth were zero (one-sided Student t)."""
        if self.stderr == 0:
            return 0.0 if self.value > 0 else 1.0
        return student_tail(self.value / self.stderr, self.df)

    @property
    def rms(self) -> float:
        """Root of the value, of the same sign: a negative one says that zero is the best guess."""
        return math.copysign(math.sqrt(abs(self.value)), self.value)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval at `level`."""
        half = student_quantile((1 - level) / 2, self.df) * self.stderr
        return self.value - half, self.value + half


class Systematic:
    """Systematic variances of several stacks against one reference, on the same tokens.

    `names`: the stacks, which are addressed by name in `combine` and `ratio`.
    """

    def __init__(
        self,
        reference: Replicates,
        others: Mapping[str, Replicates],
        *,
        tokens: NDArray[np.bool_] | None = None,
        seed: int = 0,
    ) -> None:
        """`tokens`: which to look at, all by default.

        A reference of a single replicate has no noise estimate: each variance then includes the reference's noise and is
        only an upper bound, while differences between them are as good as ever. The others need two replicates at least.

        Raises MeasurementError for fewer than `MIN_SEQUENCES` sequences with tokens.
        """
        self.names = list(others)
        self.bound_only = len(reference) < 2
        if any(other.lengths != reference.lengths for other in others.values()):
            raise ValueError("all stacks must score the same tokens")
        if any(len(other) < 2 for other in others.values()):
            raise ValueError("a systematic variance needs two replicates or more")
        lengths = np.asarray(reference.lengths)
        chosen = np.ones(lengths.sum(), bool) if tokens is None else tokens
        owners = np.repeat(np.arange(len(lengths)), lengths)[chosen]
        counts = np.bincount(owners, minlength=len(lengths)).astype(np.float64)
        self._starts = np.flatnonzero(np.diff(owners, prepend=-1))
        self._counts = counts[counts > 0]
        if len(self._counts) < MIN_SEQUENCES:
            raise MeasurementError(
                f"only {len(self._counts)} sequences hold tokens to measure on; an error takes at least {MIN_SEQUENCES}"
            )
        self._reference = reference.values[:, chosen]
        self._others = [other.values[:, chosen] for other in others.values()]
        self._rng = np.random.default_rng(seed)
        everything = [np.ones((1, len(values))) for values in (self._reference, *self._others)]
        self._sums = self._squared(everything)[0]

    def combine(self, coefficients: Mapping[str, float]) -> Estimate:
        """The sum of coefficient * variance over the named stacks: one variance, a difference, a Shapley value."""
        return self._estimate(self._vector(coefficients), None)

    def ratio(self, numerator: Mapping[str, float], denominator: Mapping[str, float]) -> Estimate:
        """One such sum over another, its error by linearisation."""
        return self._estimate(self._vector(numerator), self._vector(denominator))

    def per_sequence(self, coefficients: Mapping[str, float]) -> tuple[Floats, Floats]:
        """The sum over the tokens of each sequence, and how many there are."""
        return self._sums @ self._vector(coefficients), self._counts

    def _vector(self, coefficients: Mapping[str, float]) -> Floats:
        vector = np.zeros(len(self.names))
        for name, coefficient in coefficients.items():
            vector[self.names.index(name)] = coefficient
        return vector

    def _estimate(self, numerator: Floats, denominator: Floats | None) -> Estimate:
        tokens = self._counts.sum()
        value = float(self._sums.sum(axis=0) @ numerator / tokens)
        if denominator is not None:
            whole = float(self._sums.sum(axis=0) @ denominator / tokens)
            value /= whole
            numerator = (numerator - value * denominator) / whole
        by_sequence = self._sequence_variance(self._sums @ numerator)
        shared = self._shared_variance(self._resampled @ numerator)
        total = by_sequence + shared
        fewest = min(len(values) for values in (self._reference, *self._others) if len(values) > 1)
        squares = by_sequence**2 / (len(self._counts) - 1) + shared**2 / (fewest - 1)
        df = total**2 / squares if squares else len(self._counts) - 1.0
        return Estimate(value, math.sqrt(total), df)

    def _sequence_variance(self, sums: Floats) -> float:
        """Of the mean over tokens, by resampling sequences; corrected for the one degree of freedom that it loses."""
        n = len(self._counts)
        means = (self._sequence_counts @ sums) / (self._sequence_counts @ self._counts)
        return float(means.var(ddof=1)) * n / (n - 1)

    def _shared_variance(self, sums: Floats) -> float:
        """What resampling replicates moves in all sequences alike: the covariance between sequences. `sums`: (draws, n)."""
        tokens = self._counts.sum()
        together = float((sums.sum(axis=1) / tokens).var(ddof=1))
        alone = float((sums / tokens).var(axis=0, ddof=1).sum())
        return max(0.0, together - alone)

    @cached_property
    def _sequence_counts(self) -> Floats:
        n = len(self._counts)
        return self._rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)

    @cached_property
    def _resampled(self) -> Floats:
        """The per-sequence sums with every stack's replicates resampled: (draws, sequences, stacks)."""
        draws = []
        for values in (self._reference, *self._others):
            k = len(values)
            counts = self._rng.multinomial(k, np.full(k, 1 / k), size=4 * REPLICATE_RESAMPLES)
            # A draw of one replicate only has no pair to estimate a square from.
            usable = counts[counts.max(axis=1) < max(k, 2)]
            draws.append(usable[:REPLICATE_RESAMPLES].astype(np.float64))
        return self._squared(draws)

    def _squared(self, draws: list[Floats]) -> Floats:
        """Sums over each sequence's tokens of the unbiased squared difference: (draws, sequences, stacks).

        `draws` says how often each replicate of the reference and of each stack is used: (draws, K). Squares of means are
        means over pairs of different replicates: a replicate that was drawn twice and paired with itself would add its noise.
        """
        centre = self._reference.mean(axis=0)
        means, squares = [], []
        for values, counts in zip((self._reference, *self._others), draws, strict=True):
            deviations = values - centre
            total = counts @ deviations
            size = counts.sum(axis=1, keepdims=True)
            means.append(total / size)
            if len(values) == 1:
                squares.append(means[-1] ** 2)
            else:
                pairs = size**2 - (counts**2).sum(axis=1, keepdims=True)
                squares.append((total**2 - counts**2 @ deviations**2) / pairs)
        out = [
            np.add.reduceat(squares[0] - 2 * means[0] * mean + square, self._starts, axis=1)
            for mean, square in zip(means[1:], squares[1:], strict=True)
        ]
        return np.stack(out, axis=2)


def systematic(a: Replicates, b: Replicates, *, tokens: NDArray[np.bool_] | None = None, seed: int = 0) -> Estimate:
    """The systematic variance between two stacks (nats squared)."""
    return Systematic(a, {"": b}, tokens=tokens, seed=seed).combine({"": 1.0})


def student_tail(t: float, df: float) -> float:
    """P(T > t) for Student's distribution: in theta = atan(T / sqrt(df)) its density is proportional to cos(theta)^(df - 1)."""
    if t < 0:
        return 1.0 - student_tail(-t, df)

    def integral(start: float) -> float:
        # theta = pi/2 - u: the mass of a small tail lies where u is not small, and the grid is even there.
        u = np.linspace(0.0, math.pi / 2 - start, 20001)
        return float(np.trapezoid(np.sin(u) ** (df - 1), u))

    return 0.5 * integral(math.atan(t / math.sqrt(df))) / integral(0.0)


def student_quantile(tail: float, df: float) -> float:
    """The t with P(T > t) = `tail`, for tails below one half."""
    low, high = 0.0, 1.0
    while student_tail(high, df) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, df) > tail else (low, middle)
    return high
