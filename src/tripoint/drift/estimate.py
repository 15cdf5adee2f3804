"""Systematic variance between stacks from dithered replicates, and how sure it is.

Let a_kt be stack A's log-probability of token t under dither k. Its mean over dithers m_t estimates the expected
log-probability under rounding noise, its variance v_t is the noise. Between stacks A and B

    V = mean over t of (mA_t - mB_t)^2 - vA_t / K_A - vB_t / K_B

estimates the mean squared difference of the expected log-probabilities without bias, and may come out negative.

Errors are clustered both ways (Cameron, Gelbach and Miller 2011). Sequences are bootstrapped, never tokens: those of one
sequence share their context. (Sequences of one prompt count as one sequence.) One dither acts on all sequences at once, so
what they have in common through it is added: the covariance between different sequences. It is put together from products of
different replicates; resampling those with replacement would count the noise of a square up to three times. Whoever compares
several stacks with one gets all their errors jointly, so that differences between them are paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tripoint.drift.dither import Floats, Replicates
from tripoint.drift.groups import in_order
from tripoint.errors import MeasurementError

RESAMPLES = 2000
MIN_SEQUENCES = 8


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error, whose own precision is that of `df` degrees of freedom, and its 95 % interval.

    The interval is not symmetric: a mean of squares that came out small by chance also has an error that came out small.
    """

    value: float
    stderr: float
    df: float
    low: float
    high: float

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

        Raises MeasurementError for fewer than `MIN_SEQUENCES` sequences of different prompts with tokens.
        """
        self.names = list(others)
        self.bound_only = len(reference) < 2
        if any(other.lengths != reference.lengths for other in others.values()):
            raise ValueError("all stacks must score the same tokens")
        if any(len(other) < 2 for other in others.values()):
            raise ValueError("a systematic variance needs two replicates or more")
        owners = reference.owners
        chosen = np.arange(len(owners)) if tokens is None else np.flatnonzero(tokens)
        order, self._starts = in_order(owners[chosen])
        chosen = chosen[order]
        self._counts = np.diff([*self._starts, len(chosen)]).astype(np.float64)
        if len(self._counts) < MIN_SEQUENCES:
            what = "sequences" if len(reference.lengths) == len(np.unique(owners)) else "prompts"
            raise MeasurementError(
                f"only {len(self._counts)} {what} hold tokens to measure on; an error takes at least {MIN_SEQUENCES}"
            )
        self._reference = reference.values[:, chosen]
        self._others = [other.values[:, chosen] for other in others.values()]
        self._bootstrap = np.random.default_rng(seed).multinomial(n := len(self._counts), np.full(n, 1 / n), size=RESAMPLES)
        mean = self._reference.mean(axis=0)
        error = _error(self._reference)
        columns = [(other.mean(axis=0) - mean) ** 2 - error - _error(other) for other in self._others]
        self._sums = np.stack([np.add.reduceat(column, self._starts) for column in columns], axis=1)

    def combine(self, coefficients: Mapping[str, float]) -> Estimate:
        """The sum of coefficient * variance over the named stacks: one variance, a difference, a Shapley value."""
        return self._estimate(self._vector(coefficients), None)

    def ratio(self, numerator: Mapping[str, float], denominator: Mapping[str, float]) -> Estimate:
        """One such sum over another, its error by linearisation."""
        return self._estimate(self._vector(numerator), self._vector(denominator))

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
        by_sequence, quantiles = self._resample(self._sums @ numerator)
        shared = self._shared_variance(numerator)
        total = by_sequence + shared
        fewest = min(len(values) for values in (self._reference, *self._others) if len(values) > 1)
        squares = by_sequence**2 / (len(self._counts) - 1) + shared**2 / (fewest - 1)
        df = total**2 / squares if squares else len(self._counts) - 1.0
        stderr = math.sqrt(total)
        return Estimate(value, stderr, df, value - quantiles[1] * stderr, value - quantiles[0] * stderr)

    def _resample(self, sums: Floats) -> tuple[float, tuple[float, float]]:
        """From sums over each sequence: the variance of the mean over tokens, and where 95 % of its studentized errors lie.

        Both by resampling sequences (the latter is the bootstrap-t, each resample with an error of its own).
        """
        n, tokens = len(self._counts), self._bootstrap @ self._counts
        means = self._bootstrap @ sums / tokens
        residuals = sums - means[:, None] * self._counts
        errors = np.sqrt((self._bootstrap * residuals**2).sum(axis=1) * n / (n - 1)) / tokens
        # A variance of n values loses a degree of freedom, and so does the bootstrap's.
        variance = float(means.var(ddof=1)) * n / (n - 1)
        if variance == 0:
            return 0.0, (0.0, 0.0)
        # A resample of one sequence again and again has no error.
        usable = errors > 0
        studentized = (means - sums.sum() / self._counts.sum())[usable] / errors[usable]
        low, high = np.quantile(studentized, (0.025, 0.975))
        return variance, (float(low), float(high))

    def _shared_variance(self, coefficients: Floats) -> float:
        """What all sequences have in common because they were scored under the same dithers.

        With d the difference of two stacks' true means and e the mean noise of each, a square is d^2 + 2 d e + e^2. Of the
        term in d e the variance is taken at the estimated d, which holds the noise once more and so adds twice that of the
        term in e^2: that is taken off. It is the noisier of the two where d is small, and cannot be negative.
        """
        square = float(coefficients.sum()) ** 2 * self._squares[0] if not self.bound_only else 0.0
        linear = _between(self._linear_reference @ coefficients) if not self.bound_only else 0.0
        for index, coefficient in enumerate(coefficients):
            linear += coefficient**2 * _between(self._linear[index])
            square += coefficient**2 * (self._squares[1 + index] + self._crossed[index])
        return (max(0.0, square) + max(0.0, linear - 2 * square)) / float(self._counts.sum()) ** 2

    @cached_property
    def _noise(self) -> list[Floats]:
        return [values - values.mean(axis=0) for values in (self._reference, *self._others)]

    @cached_property
    def _linear_reference(self) -> Floats:
        """(sequences, K, stacks): 2 d e summed over each sequence, for each replicate of the reference."""
        columns = [self._by_sequence(-2 * self._apart(other) * self._noise[0]) for other in self._others]
        return np.stack(columns, axis=2)

    @cached_property
    def _linear(self) -> list[Floats]:
        """The same for the replicates of each other stack: (sequences, K)."""
        return [
            self._by_sequence(2 * self._apart(other) * noise)
            for other, noise in zip(self._others, self._noise[1:], strict=True)
        ]

    @cached_property
    def _squares(self) -> list[float]:
        """Covariance between sequences of each stack's own e^2, times tokens squared."""
        out = []
        for noise in self._noise:
            k = len(noise)
            if k < 3:
                out.append(0.0)
                continue
            products = self._products(noise, noise)[:, ~np.eye(k, dtype=bool)]
            # Deviations from a mean of k are a little alike.
            products -= products.mean(axis=1, keepdims=True)
            pairs = k * (k - 1)
            out.append(2 / pairs * float(_between_sequences(products).sum()) / (pairs - 2))
        return out

    @cached_property
    def _crossed(self) -> list[float]:
        """The same for the product of the reference's e and each other stack's."""
        reference = self._noise[0]
        out = []
        for noise in self._noise[1:]:
            sizes = len(reference) * len(noise)
            free = (len(reference) - 1) * (len(noise) - 1)
            products = _between_sequences(self._products(reference, noise))
            out.append(4 / sizes * float(products.sum()) / free if free else 0.0)
        return out

    def _apart(self, other: Floats) -> Floats:
        return other.mean(axis=0) - self._reference.mean(axis=0)

    def _by_sequence(self, values: Floats) -> Floats:
        """Sums over the tokens of each sequence: (K, tokens) to (sequences, K)."""
        return np.add.reduceat(values, self._starts, axis=1).T

    def _products(self, left: Floats, right: Floats) -> Floats:
        """Sums over each sequence of the products of every pair of replicates: (sequences, K left, K right)."""
        ends = [*self._starts[1:], left.shape[1]]
        return np.stack([left[:, s:e] @ right[:, s:e].T for s, e in zip(self._starts, ends, strict=True)])


def _error(values: Floats) -> Floats:
    """The variance of the mean over replicates: (tokens,); nothing is known of a single one."""
    return values.var(axis=0, ddof=1) / len(values) if len(values) > 1 else np.zeros(values.shape[1])


def _between_sequences(values: Floats) -> Floats:
    """Sum over pairs of different sequences (first axis) of the products of their values."""
    return values.sum(axis=0) ** 2 - (values**2).sum(axis=0)


def _between(values: Floats) -> float:
    """The variance of a mean over replicates, as far as sequences share it: from (sequences, K)."""
    k = values.shape[1]
    return float(_between_sequences(values).sum()) / (k * (k - 1))


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
