"""The numbers of a mismatch, their errors, and the sentence that says what they mean."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tripoint.drift.mismatch import MAXIMA, Measured, change, measure, plus_minus
from tripoint.drift.verdict import Outcome, verdict
from tripoint.errors import MeasurementError

Rows = list[list[float]]


def rollouts(sequences: int = 20, length: int = 30, seed: int = 0) -> Rows:
    """Log-probabilities as an engine reports them: FP32 values."""
    rng = np.random.default_rng(seed)
    return [np.log(rng.uniform(0.05, 1.0, length)).astype(np.float32).astype(float).tolist() for _ in range(sequences)]


def shifted(rows: Rows, scale: float, seed: int = 1) -> Rows:
    rng = np.random.default_rng(seed)
    return [[logp + scale * float(rng.normal()) for logp in row] for row in rows]


# -- the numbers ------------------------------------------------------------------------------------------------------


def test_every_statistic_by_hand() -> None:
    """Half of the tokens twice as likely with the trainer, a quarter half as likely, a quarter equal."""
    engine = [[math.log(0.25)] * 40 for _ in range(8)]
    trainer = [[math.log(0.5)] * 20 + [math.log(0.125)] * 10 + [math.log(0.25)] * 10 for _ in range(8)]
    found = measure(engine, trainer)
    ln2 = math.log(2)
    assert (found.tokens, found.sequences) == (320, 8)
    assert asdict(found.mismatch) == pytest.approx(
        {
            "mean_abs": 0.75 * ln2,
            "rms": math.sqrt(0.75) * ln2,
            "max_abs": ln2,
            "k1": -0.25 * ln2,
            "k3": (0.5 * 2 + 0.25 * 0.5 + 0.25) - 1 - 0.25 * ln2,
            "ess": (0.5 * 2 + 0.25 * 0.5 + 0.25) ** 2 / (0.5 * 4 + 0.25 * 0.25 + 0.25),
            "max_ratio": 2,
            "exact_fraction": 0.25,
            "rollout_probs_diff_mean": 0.5 * 0.25 + 0.25 * 0.125,
            "rollout_probs_diff_max": 0.25,
            "token_mult_prob_error": 0.75 * 2 + 0.25,
        },
        rel=1e-12,
    )


def test_numbers_are_those_that_verl_and_nemo_rl_log() -> None:
    """Their formulas, in FP32 on padded batches as they compute them."""
    lengths = [12 + 3 * i for i in range(12)]
    engine = [row[:n] for row, n in zip(rollouts(12, 60), lengths, strict=True)]
    trainer = shifted(engine, 0.05)
    mask = torch.tensor([[position < n for position in range(60)] for n in lengths])
    padded = [torch.tensor([row + [0.0] * (60 - len(row)) for row in rows], dtype=torch.float32) for rows in (engine, trainer)]

    probs_diff = torch.masked_select((padded[1].exp() - padded[0].exp()).abs(), mask)
    mult_prob_error = (torch.exp((padded[0] - padded[1]).abs() * mask) * mask).sum() / mask.sum()

    found = measure(engine, trainer).mismatch
    assert found.rollout_probs_diff_mean == pytest.approx(probs_diff.mean().item(), rel=1e-5)
    assert found.rollout_probs_diff_max == pytest.approx(probs_diff.max().item(), rel=1e-5)
    assert found.token_mult_prob_error == pytest.approx(mult_prob_error.item(), rel=1e-6)


def test_small_k3_keeps_its_digits() -> None:
    """exp(d) - 1 - d is d^2 / 2 for small d; taken literally in FP64 it would be noise at d = 1e-8."""
    engine = [[-1.0] * 30 for _ in range(10)]
    trainer = [[-1.0 + 1e-8] * 30 for _ in range(10)]
    assert measure(engine, trainer).mismatch.k3 / 0.5e-16 == pytest.approx(1, rel=1e-6)


def test_one_ulp_is_not_exact() -> None:
    engine = rollouts()
    trainer = [[float(np.nextafter(np.float32(row[0]), np.float32(0))), *row[1:]] for row in engine]
    assert measure(engine, trainer).mismatch.exact_fraction == 1 - 20 / 600


# -- their errors -----------------------------------------------------------------------------------------------------


def test_standard_errors_are_the_spread_over_repetitions() -> None:
    """Tokens of one sequence share most of their difference, so that a bootstrap over tokens would be far too sure."""

    def repetition(seed: int) -> Measured:
        rng = np.random.default_rng(seed)
        engine = rollouts(40, 25, seed)
        common = rng.normal(0, 0.05, 40)
        trainer = [[logp + common[i] + 0.01 * rng.normal() for logp in row] for i, row in enumerate(engine)]
        return measure(engine, trainer)

    repetitions = [repetition(seed) for seed in range(150)]
    for name in asdict(repetitions[0].mismatch).keys() - set(MAXIMA) - {"exact_fraction"}:
        spread = np.std([getattr(found.mismatch, name) for found in repetitions], ddof=1)
        stated = np.median([found.stderr[name] for found in repetitions])
        assert stated == pytest.approx(spread, rel=0.25), name


def test_maxima_carry_no_error() -> None:
    found = measure(rollouts(), shifted(rollouts(), 0.1))
    assert {name for name, stderr in found.stderr.items() if stderr is None} == {
        "max_abs",
        "max_ratio",
        "rollout_probs_diff_max",
    }


def test_stretches_of_one_row_are_not_independent() -> None:
    """Ten stretches of each of twelve rows, whose differences are of one size within a row."""
    rng = np.random.default_rng(0)
    engine = [[-2.0] * 20 for _ in range(120)]
    groups = np.arange(120) // 10
    values, errors, naive = [], [], []
    for _ in range(200):
        sizes = 0.05 * rng.lognormal(sigma=0.5, size=12)[groups]
        trainer = (-2.0 + sizes[:, None] * rng.normal(size=(120, 20))).tolist()
        found = measure(engine, trainer, groups.tolist())
        values.append(found.mismatch.mean_abs)
        errors.append(found.stderr["mean_abs"])
        naive.append(measure(engine, trainer).stderr["mean_abs"])
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.2)
    assert np.mean(naive) < np.std(values) / 2


def test_rows_of_few_prompts_are_refused_however_many() -> None:
    engine = rollouts(40, 25)
    measure(engine, engine, [i % 8 for i in range(40)])
    with pytest.raises(MeasurementError, match="1000 tokens in 40 sequences of 7 prompts are too few"):
        measure(engine, engine, [i % 7 for i in range(40)])


def test_change_is_paired() -> None:
    """The same addition to every |d| is no uncertainty, however different the sequences are."""
    engine = rollouts()
    before = [[logp + 0.01 * (i + 1) for logp in row] for i, row in enumerate(engine)]
    after = [[logp + 0.01 * (i + 1) + 0.05 for logp in row] for i, row in enumerate(engine)]
    first, second = measure(engine, before), measure(engine, after)
    moved = change(first, second)["mean_abs"]
    assert moved.value == pytest.approx(0.05)
    assert moved.stderr == pytest.approx(0, abs=1e-12)
    assert first.stderr["mean_abs"] > 0.01


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (0.041234, 0.00231, "0.0412 ± 0.0023"),
        (-0.0055, 0.00192, "-0.0055 ± 0.0019"),
        (0.0000812, 0.0000123, "(8.1 ± 1.2)e-05"),
        (1.0437, 0.0025, "1.0437 ± 0.0025"),
        (1.207, None, "1.207"),
        (0.0, 0.0, "0"),
        (123.4, 17.0, "123 ± 17"),
    ],
)
def test_numbers_are_printed_to_two_digits_of_their_error(value: float, stderr: float | None, text: str) -> None:
    assert plus_minus(value, stderr) == text


# -- what cannot be measured ------------------------------------------------------------------------------------------


def test_too_few_sequences_or_tokens() -> None:
    measure(rollouts(8, 25), rollouts(8, 25))
    with pytest.raises(MeasurementError, match="199 tokens in 8 sequences are too few"):
        measure([*rollouts(7, 25), [-1.0] * 24], [*rollouts(7, 25), [-1.0] * 24])
    with pytest.raises(MeasurementError, match="700 tokens in 7 sequences are too few"):
        measure(rollouts(7, 100), rollouts(7, 100))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_trainer_that_gives_no_number(bad: float) -> None:
    trainer = rollouts()
    trainer[3][4] = bad
    with pytest.raises(MeasurementError, match="the trainer gave 1 of 600 tokens"):
        measure(rollouts(), trainer)


@pytest.mark.parametrize("placeholder", [-9999.0, -1000.0])
def test_a_placeholder_for_a_logprob(placeholder: float) -> None:
    for broken in (0, 1):
        sides = [rollouts(), rollouts()]
        sides[broken][3][4] = placeholder
        with pytest.raises(MeasurementError, match=f"{placeholder:g} with the {('engine', 'trainer')[broken]}"):
            measure(*sides)


# -- what it means ----------------------------------------------------------------------------------------------------


def judged(before_scale: float, after_scale: float | None) -> tuple[Outcome, str]:
    engine = rollouts(40, 50)
    before = measure(engine, shifted(engine, before_scale, seed=1))
    after = None if after_scale is None else measure(engine, shifted(engine, after_scale, seed=2))
    found = verdict(before, after)
    return found.outcome, found.sentence


@pytest.mark.parametrize(
    ("before", "after", "outcome", "words"),
    [
        (0.04, 0.02, Outcome.LOWERED, "Alignment lowered the mean |dlogp| from 0.03"),
        (0.04, 0.04, Outcome.UNCHANGED, "did not measurably move"),
        (0.02, 0.04, Outcome.RAISED, "Alignment raised the mean |dlogp| from 0.01"),
        (0.04, 0.0, Outcome.VANISHED, "now all 2000 tokens agree to the last bit"),
        (0.0, 0.0, Outcome.IDENTICAL, "agree on all 2000 tokens to the last bit, with and without alignment"),
        (0.0, 0.04, Outcome.RAISED, "Alignment raised the mean |dlogp| from 0 to 0.03"),
        (0.04, None, Outcome.NOT_ALIGNED, "give --to"),
        (0.0, None, Outcome.IDENTICAL, "agree on all 2000 tokens to the last bit."),
    ],
)
def test_the_sentence_follows_the_numbers(before: float, after: float | None, outcome: Outcome, words: str) -> None:
    found, sentence = judged(before, after)
    assert found is outcome
    assert words in sentence


def test_one_changed_token_is_enough_where_all_were_equal() -> None:
    engine = rollouts()
    trainer = [list(row) for row in engine]
    trainer[5][5] -= 1e-6
    found = verdict(measure(engine, engine), measure(engine, trainer))
    assert found.outcome is Outcome.RAISED


def test_no_false_alarm_beyond_what_three_standard_errors_allow() -> None:
    """Noise redrawn at the same size: a change is claimed in about 0.3 % of the cases."""
    engine = rollouts(20, 20)

    def redrawn(seed: int) -> Measured:
        return measure(engine, shifted(engine, 0.03, seed))

    claimed = [verdict(redrawn(seed), redrawn(seed + 1000)).outcome is not Outcome.UNCHANGED for seed in range(200)]
    assert sum(claimed) <= 5


def test_an_rms_that_moved_the_other_way_is_said() -> None:
    """Most tokens come closer, a few in every sequence go far off."""
    engine = rollouts(40, 50)
    before = shifted(engine, 0.04)
    after = [[logp + 0.3 * (i < 2) for i, logp in enumerate(row)] for row in shifted(engine, 0.004)]
    found = verdict(measure(engine, before), measure(engine, after))
    assert found.outcome is Outcome.LOWERED
    assert "The rms, ruled by a few large differences, moved the other way." in found.sentence
    assert "rms" not in judged(0.04, 0.02)[1]
