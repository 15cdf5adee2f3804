"""Raw mismatch: how far a trainer's log-probabilities lie from the engine's on the tokens that the engine sampled.

Everything is a function of d = logp_trainer - logp_engine (nats, FP64), one value per completion token. This is what RL
frameworks log today; it holds rounding noise and systematic drift together and cannot tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tripoint.drift.groups import group_sums
from tripoint.errors import MeasurementError

Floats = NDArray[np.float64]

MIN_TOKENS = 200
MIN_SEQUENCES = 8
RESAMPLES = 2000
MAX_NATS = 300.0  # beyond, squared importance ratios leave the range of FP64


@dataclass(frozen=True)
class Mismatch:
    """Statistics of d over all tokens; w = exp(d) is the importance ratio pi_trainer / pi_engine of a token.

    `mean_abs`, `rms`, `max_abs`: of d, nats.
    `k1` = -mean(d) and `k3` = mean(exp(d) - 1 - d): estimates of KL(engine || trainer) per token, nats.
    `ess` = (sum w)^2 / (n sum w^2): effective sample size as a share of the tokens. `max_ratio` = max w.
    `exact_fraction`: share of tokens with d = 0 exactly.
    `rollout_probs_diff_mean`, `rollout_probs_diff_max`: mean and max of |exp(logp_engine) - exp(logp_trainer)|, which verl
    logs as `training/rollout_probs_diff_*` (verl/utils/debug/metrics.py, `calculate_debug_metrics`).
    `token_mult_prob_error`: mean(exp(|d|)), which NeMo-RL logs under that name (nemo_rl/algorithms/loss/loss_functions.py,
    `ClippedPGLossFn`).

    Both frameworks compute in FP32; the numbers here agree with theirs to FP32 rounding.
    """

    mean_abs: float
    rms: float
    max_abs: float
    k1: float
    k3: float
    ess: float
    max_ratio: float
    exact_fraction: float
    rollout_probs_diff_mean: float
    rollout_probs_diff_max: float
    token_mult_prob_error: float


MAXIMA = ("max_abs", "max_ratio", "rollout_probs_diff_max")
"""Largest values seen. They grow with the number of tokens and no resampling gives them an error, so they carry none."""


@dataclass(frozen=True)
class Measured:
    """A mismatch with its uncertainty.

    `stderr`: standard error of each field, by a bootstrap over sequences, those of one prompt together (their tokens are not
    independent); None for `MAXIMA`. `resampled`: the field's value in each of `RESAMPLES` resamples. Two measurements of the
    same rollouts share their resamples, so that differences between them are paired.
    """

    tokens: int
    sequences: int
    mismatch: Mismatch
    stderr: dict[str, float | None]
    resampled: dict[str, Floats] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """`{"mismatch": {...}, "mismatch_stderr": {...}}`, the same keys in both."""
        return {"mismatch": asdict(self.mismatch), "mismatch_stderr": dict(self.stderr)}


@dataclass(frozen=True)
class Change:
    """after - before of one field, with the standard error of the paired difference (None for `MAXIMA`)."""

    value: float
    stderr: float | None


def measure(
    engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], groups: Sequence[int] | None = None
) -> Measured:
    """The mismatch between log-probabilities (nats) of the same completion tokens, one inner sequence per rollout. `groups`: a
    number for each rollout, the same for those of one prompt; by default every one has its own.

    Raises MeasurementError for fewer than `MIN_TOKENS` tokens or `MIN_SEQUENCES` groups, and for values that are not
    finite or so far apart that an importance ratio overflows.
    """
    tokens, sequences = sum(map(len, engine)), len(engine)
    owners = np.repeat(np.arange(sequences) if groups is None else groups, [len(row) for row in engine])
    clusters = len(np.unique(owners))
    if [len(row) for row in engine] != [len(row) for row in trainer]:
        raise ValueError("engine and trainer must score the same tokens")
    if tokens < MIN_TOKENS or clusters < MIN_SEQUENCES:
        of = f" of {clusters} prompts" if clusters < sequences else ""
        different = " of different prompts" if of else ""
        raise MeasurementError(
            f"{tokens} tokens in {sequences} sequences{of} are too few to measure a mismatch; "
            f"give at least {MIN_TOKENS} tokens in {MIN_SEQUENCES} sequences{different}"
        )
    logp_engine, logp_trainer = (np.concatenate([np.asarray(row, np.float64) for row in rows]) for rows in (engine, trainer))
    for who, logp in (("engine", logp_engine), ("trainer", logp_trainer)):
        if bad := int(np.count_nonzero(~np.isfinite(logp))):
            raise MeasurementError(f"the {who} gave {bad} of {tokens} tokens a log-probability that is not finite")
    d = logp_trainer - logp_engine
    worst = int(np.abs(d).argmax())
    if abs(d[worst]) > MAX_NATS:
        raise MeasurementError(
            f"a token has log-probability {logp_engine[worst]:g} with the engine and {logp_trainer[worst]:g} with the trainer, "
            "too far apart to compare: is one of them a placeholder?"
        )
    w = np.exp(d)
    probs_diff = np.abs(np.exp(logp_engine) - np.exp(logp_trainer))
    # expm1 keeps the digits that exp(d) - 1 loses for small d.
    summands = [np.ones_like(d), np.abs(d), d**2, d, np.expm1(d) - d, w, w**2, d == 0, probs_diff, np.exp(np.abs(d))]
    sums = group_sums(np.stack(summands).astype(np.float64), owners).T

    rng = np.random.default_rng(0)
    counts = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=RESAMPLES)
    resampled = _means(counts @ sums)
    maxima = {"max_abs": np.abs(d).max(), "max_ratio": w.max(), "rollout_probs_diff_max": probs_diff.max()}
    values = _means(sums.sum(axis=0)) | maxima
    return Measured(
        tokens=tokens,
        sequences=sequences,
        mismatch=Mismatch(**{name: float(value) for name, value in values.items()}),
        stderr={f.name: None if f.name in MAXIMA else float(resampled[f.name].std(ddof=1)) for f in fields(Mismatch)},
        resampled=resampled,
    )


def _means(sums: Floats) -> dict[str, Floats]:
    """The fields that are functions of means, from the sums over tokens of `measure`'s summands (..., 10)."""
    n, abs_d, d2, d, k3, w, w2, exact, probs_diff, mult = np.moveaxis(sums, -1, 0)
    return {
        "mean_abs": abs_d / n,
        "rms": np.sqrt(d2 / n),
        "k1": -d / n,
        "k3": k3 / n,
        "ess": w**2 / (n * w2),
        "exact_fraction": exact / n,
        "rollout_probs_diff_mean": probs_diff / n,
        "token_mult_prob_error": mult / n,
    }


def change(before: Measured, after: Measured) -> dict[str, Change]:
    """How each field differs between two measurements of the same rollouts."""
    out = {}
    for name, old in asdict(before.mismatch).items():
        stderr = None if name in MAXIMA else float((after.resampled[name] - before.resampled[name]).std(ddof=1))
        out[name] = Change(getattr(after.mismatch, name) - old, stderr)
    return out


def plus_minus(value: float, stderr: float | None) -> str:
    """`0.0123 ± 0.0004`: a number to two digits of its standard error, with a power of ten where it is small."""
    if stderr is None or not stderr > 0:
        return f"{value:.4g}"
    exponent = math.floor(math.log10(max(abs(value), stderr)))
    decimals = max(0, 1 - math.floor(math.log10(stderr)))
    if exponent >= -4:
        return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"
    decimals, scale = max(0, decimals + exponent), 10.0**exponent
    return f"({value / scale:.{decimals}f} ± {stderr / scale:.{decimals}f})e{exponent:03d}"
