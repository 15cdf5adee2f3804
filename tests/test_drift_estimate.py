"""The systematic variance is unbiased, its errors are honest, and sequences, not tokens, are what they are estimated from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tiny import VOCABULARY, tiny
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds
from tripoint.drift.estimate import Estimate, Systematic, student_tail, systematic
from tripoint.drift.systematic import aligned
from tripoint.errors import MeasurementError
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout
from tripoint.stacks.hf import HFStack

Floats = NDArray[np.float64]
REPETITIONS = 200


def draw(rng: np.random.Generator, mean: Floats, k: int, noise: float, shared: float = 0.0) -> Replicates:
    """K replicates of `mean` (sequences, tokens): noise of each token and sequence, and a share of it that is the same for the
    same word wherever it stands, since a dither moves its embedding in all sequences alike."""
    own = rng.normal(size=(k, *mean.shape)) + rng.normal(size=(k, len(mean), 1))
    words = np.arange(mean.size).reshape(mean.shape) * 7 % 31
    common = rng.normal(size=(k, 31))[:, words]
    values = mean + noise * (np.sqrt(1 - shared) * own + np.sqrt(2 * shared) * common)
    return Replicates(values.reshape(k, -1), (mean.shape[1],) * len(mean))


def truth_in_interval(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


@pytest.mark.parametrize("size", [0.0, 0.03])
def test_the_variance_is_unbiased_and_may_come_out_negative(size: float) -> None:
    rng = np.random.default_rng(0)
    difference = size * rng.normal(size=(10, 12))
    values = []
    for _ in range(500):
        a, b = draw(rng, np.zeros((10, 12)), 4, 0.05), draw(rng, difference, 3, 0.08)
        values.append(systematic(a, b).value)
    error = np.std(values) / np.sqrt(len(values))
    assert np.mean(values) == pytest.approx(np.mean(difference**2), abs=4 * error)
    # Without the correction for noise it would be off by far more.
    assert 20 * error < 2 * (0.05**2 / 4 + 0.08**2 / 3)
    if size == 0:
        assert np.min(values) < 0


@pytest.mark.parametrize(("size", "shared"), [(0.0, 0.0), (0.04, 0.0), (0.04, 0.3)])
def test_intervals_cover_the_truth_of_a_known_population(size: float, shared: float) -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for repetition in range(REPETITIONS):
        # Sequences differ in how far apart the stacks are.
        scale = rng.lognormal(sigma=0.3, size=(20, 1))
        difference = size * scale * rng.normal(size=(20, 15))
        a, b = draw(rng, np.zeros((20, 15)), 8, 0.05, shared), draw(rng, difference, 8, 0.05, shared)
        hits += truth_in_interval(systematic(a, b, seed=repetition), size**2 * np.exp(2 * 0.3**2))
    assert 0.90 <= hits / REPETITIONS <= 0.98


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Floats]:
    """Many sequences of a tiny model under many dithers: (replicates, sequences, tokens) by schedule.

    Drawn from with replacement it is a population whose truth is known exactly, with real rounding noise.
    """
    directory: Path = tmp_path_factory.mktemp("population")
    tiny("llama", tie_word_embeddings=False, max_position_embeddings=64).save_pretrained(directory)
    rng = np.random.default_rng(0)
    ids = rng.integers(VOCABULARY, size=(96, 17)).tolist()
    dithering = Dithering(read_weights(directory), [Rollout((row[0],), tuple(row[1:])) for row in ids])
    stack = HFStack(directory)
    out = {}
    for code in ("R1 S1 N1", "R3 S3 N3"):
        with aligned(stack, RoundingSchedule.parse(code)):
            out[code] = dithering.score(stack, seeds(0, code, 96)).values.reshape(96, 96, 16)
    return out


@pytest.mark.parametrize("other", ["R1 S1 N1", "R3 S3 N3"])
def test_intervals_cover_the_truth_of_a_tiny_model(population: dict[str, Floats], other: str) -> None:
    left, right = population["R1 S1 N1"], population[other]
    truth = float(((left.mean(axis=0) - right.mean(axis=0)) ** 2).mean())
    assert (truth == 0) == (other == "R1 S1 N1")
    rng = np.random.default_rng(2)
    hits, values = 0, []
    for repetition in range(REPETITIONS):
        sequences = rng.integers(96, size=24)
        a, b = (Replicates(p[rng.integers(96, size=8)][:, sequences].reshape(8, -1), (16,) * 24) for p in (left, right))
        estimate = systematic(a, b, seed=repetition)
        hits += truth_in_interval(estimate, truth)
        values.append(estimate.value)
    assert 0.90 <= hits / REPETITIONS <= 0.98
    assert np.mean(values) == pytest.approx(truth, abs=4 * np.std(values) / np.sqrt(REPETITIONS))


def test_tokens_said_twice_make_nothing_surer() -> None:
    rng = np.random.default_rng(3)
    a, b = draw(rng, np.zeros((12, 10)), 6, 0.05), draw(rng, 0.05 * rng.normal(size=(12, 10)), 6, 0.05)

    def again(x: Replicates) -> Replicates:
        return Replicates(np.repeat(x.values, 5, axis=1), (50,) * 12)

    once, five_times = systematic(a, b), systematic(again(a), again(b))
    assert five_times.value == pytest.approx(once.value)
    assert five_times.stderr == pytest.approx(once.stderr)


def test_sequences_of_one_prompt_count_as_one() -> None:
    """How far stacks are apart is a matter of the prompt here, of which each has four completions, one after the other."""
    rng = np.random.default_rng(8)
    groups = tuple(range(12)) * 4
    values, errors, naive = [], [], []
    for repetition in range(100):
        size = 0.1 * rng.lognormal(sigma=0.5, size=12)[list(groups)]
        a, b = draw(rng, np.zeros((48, 10)), 6, 0.02), draw(rng, size[:, None] * rng.normal(size=(48, 10)), 6, 0.02)
        grouped = (Replicates(x.values, x.lengths, groups) for x in (a, b))
        estimate = systematic(*grouped, seed=repetition)
        values.append(estimate.value)
        errors.append(estimate.stderr)
        naive.append(systematic(a, b, seed=repetition).stderr)
    rms = np.sqrt(np.mean(np.square([errors, naive]), axis=1))
    assert rms[0] == pytest.approx(np.std(values), rel=0.25)
    assert rms[1] < 0.65 * np.std(values)
    with pytest.raises(MeasurementError, match="only 7 prompts"):
        systematic(*(Replicates(x.values, x.lengths, tuple(i % 7 for i in range(48))) for x in (a, b)))


def test_a_dither_that_moves_all_sequences_alike_counts_once() -> None:
    rng = np.random.default_rng(4)
    values, errors = [], []
    for repetition in range(100):
        a, b = (draw(rng, np.full((40, 5), level), 6, 0.05, shared=0.8) for level in (0.0, 0.1))
        estimate = systematic(a, b, seed=repetition)
        values.append(estimate.value)
        errors.append(estimate.stderr)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.3)


def test_a_single_sample_bounds_one_variance_but_compares_two() -> None:
    rng = np.random.default_rng(5)
    near, far = 0.02 * rng.normal(size=(2, 30, 20))
    truth = float((far**2 - near**2).mean())
    noise = 0.05**2 * 2
    differences, bounds = [], []
    for repetition in range(200):
        engine = Replicates(draw(rng, np.zeros((30, 20)), 2, 0.05).values[:1], (20,) * 30)
        joint = Systematic(engine, {"near": draw(rng, near, 6, 0.03), "far": draw(rng, far, 6, 0.08)}, seed=repetition)
        assert joint.bound_only
        differences.append(joint.combine({"far": 1.0, "near": -1.0}))
        bounds.append(joint.combine({"near": 1.0}).value)
    mean = np.mean([d.value for d in differences])
    spread = np.std([d.value for d in differences])
    assert mean == pytest.approx(truth, abs=4 * spread / np.sqrt(200))
    assert 0.90 <= np.mean([truth_in_interval(d, truth) for d in differences]) <= 0.98
    assert np.mean(bounds) == pytest.approx(float((near**2).mean()) + noise, rel=0.1)


def test_ratios_carry_the_error_of_both_parts() -> None:
    rng = np.random.default_rng(6)
    hits = 0
    for repetition in range(200):
        base = rng.normal(size=(25, 20))
        engine = draw(rng, np.zeros((25, 20)), 8, 0.03)
        joint = Systematic(
            engine, {"whole": draw(rng, 0.1 * base, 8, 0.03), "rest": draw(rng, 0.05 * base, 8, 0.03)}, seed=repetition
        )
        share = joint.ratio({"whole": 1.0, "rest": -1.0}, {"whole": 1.0})
        hits += truth_in_interval(share, 0.75)
    assert 0.90 <= hits / 200 <= 0.985


def test_few_sequences_and_other_tokens_are_refused() -> None:
    rng = np.random.default_rng(7)
    a, b = (draw(rng, np.zeros((7, 20)), 4, 0.05) for _ in range(2))
    with pytest.raises(MeasurementError, match="7 sequences"):
        systematic(a, b)
    with pytest.raises(ValueError, match="same tokens"):
        systematic(a, Replicates(b.values, (10,) * 14))


@pytest.mark.parametrize(
    ("t", "df", "tail"), [(2.085963, 20, 0.025), (1.812461, 10, 0.05), (4.032143, 5, 0.005), (0.0, 3, 0.5)]
)
def test_student_s_distribution(t: float, df: float, tail: float) -> None:
    assert student_tail(t, df) == pytest.approx(tail, rel=1e-4)
    assert student_tail(-t, df) == pytest.approx(1 - tail, rel=1e-4)


def test_a_p_value_is_one_sided() -> None:
    assert Estimate(2.0, 1.0, 1e6, 0.0, 4.0).p_value == pytest.approx(0.02275, rel=1e-2)
    assert Estimate(-2.0, 1.0, 1e6, -4.0, 0.0).p_value == pytest.approx(0.97725, rel=1e-3)
