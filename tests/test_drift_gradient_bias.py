"""The gradient bias against gradients taken in full, and its systematic part against a known one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import Table
from pyarrow.parquet import write_table

from tiny import VOCABULARY, tiny
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds
from tripoint.drift.gradient_bias import GradientBias, _bias, gradient_bias
from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks import Rollout
from tripoint.stacks.hf import HFStack
from tripoint.stacks.rollouts import read_rollouts

K = 6


class Setup:
    def __init__(self, directory: Path) -> None:
        tiny("llama", num_hidden_layers=1, tie_word_embeddings=False, max_position_embeddings=64).save_pretrained(directory)
        self.directory = directory
        rng = np.random.default_rng(0)
        ids = rng.integers(VOCABULARY, size=(8, 13)).tolist()
        self.rollouts = [Rollout((row[0],), tuple(row[1:])) for row in ids]
        self.advantages = rng.normal(size=8).tolist()
        self.stack = HFStack(directory)
        self.dithering = Dithering(read_weights(directory), self.rollouts)
        self.seeds = seeds(0, "trainer", K)
        # The engine holds exactly what the trainer does in the same replicate: no noise, no drift.
        self.same = self.dithering.score(self.stack, self.seeds)

    def bias(self, engine: Replicates) -> GradientBias:
        return gradient_bias(self.stack, engine, self.dithering, self.advantages, self.seeds)

    def full(self, weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> torch.Tensor:
        """Gradient of the mean over tokens of advantage * weight * log-probability, undithered, all parameters in a row."""
        model = self.stack.model
        model.zero_grad()
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids] for r in self.rollouts])
        logprobs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        each = torch.tensor(self.advantages)[:, None] * torch.tensor(weights.reshape(8, 12))
        (each * logprobs).mean().backward()
        grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return torch.cat(grads)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("model"))


def test_an_engine_without_drift_biases_nothing(setup: Setup) -> None:
    found = setup.bias(setup.same)
    assert found.total.one_step < 1e-5
    assert abs(found.total.systematic) < 1e-5


def test_a_known_drift_has_the_bias_of_full_gradients(setup: Setup) -> None:
    drift = 0.2 * np.sin(np.arange(96))
    found = setup.bias(Replicates(setup.same.values - drift, setup.same.lengths))
    expected = setup.full(np.expm1(drift)).norm() / setup.full(np.ones(96)).norm()
    assert found.total.systematic == pytest.approx(expected.item(), rel=0.05)
    late = np.where(np.arange(96) % 12 >= 9, 1.0, 0.0)
    by_hand = setup.full(np.expm1(drift) * late).norm() / setup.full(late).norm()
    assert (found.by_position[-1].low, found.by_position[-1].high) == (9, 12)
    assert found.by_position[-1].systematic == pytest.approx(by_hand.item(), rel=0.05)


def test_noise_is_large_in_one_step_and_not_systematic(setup: Setup) -> None:
    rng = np.random.default_rng(1)
    squares = []
    for _ in range(8):
        noisy = Replicates(setup.same.values + 0.2 * rng.normal(size=setup.same.values.shape), setup.same.lengths)
        total = setup.bias(noisy).total
        squares.append(np.copysign(total.systematic**2, total.systematic))
        assert total.one_step > 0.1
        # exp of a zero-mean d has a mean above one by half its variance: that is systematic, and small.
        assert abs(squares[-1]) < 0.1 * total.one_step**2
    assert np.mean(squares) == pytest.approx(0.02**2, abs=4 * np.std(squares) / np.sqrt(8))


def test_the_difference_of_two_biases_is_paired(setup: Setup) -> None:
    drift = 0.2 * np.sin(np.arange(96))
    small, large = (setup.bias(Replicates(setup.same.values - size * drift, setup.same.lengths)).total for size in (1.0, 1.5))
    lowered, stderr = large.less(small)
    assert lowered == pytest.approx(large.systematic**2 - small.systematic**2)
    assert 0 < stderr < large.stderr + small.stderr


def test_positions_with_a_gradient_in_few_replicates_are_left_out() -> None:
    b, g = np.ones((3, 4)), np.zeros((3, 4))
    g[0] = 1.0
    assert _bias(0, 1, b, g) is None
    g[1] = -1.0
    assert _bias(0, 1, b, g) is None
    assert _bias(0, 1, b, np.ones((3, 4))) is not None


def test_weights_and_gradients_are_left_as_they_were(setup: Setup) -> None:
    before = setup.stack.score(setup.rollouts)
    setup.bias(setup.same)
    assert setup.stack.score(setup.rollouts) == before
    assert all(parameter.grad is None for parameter in setup.stack.model.parameters())


def test_a_trainer_under_autocast_is_differentiated_as_it_scores(setup: Setup) -> None:
    trainer = HFStack(setup.directory, mode="autocast")
    same = setup.dithering.score(trainer, setup.seeds[:3])
    found = gradient_bias(trainer, same, setup.dithering, setup.advantages, setup.seeds[:3])
    assert found.total.one_step < 1e-5


def test_advantages_may_differ_by_token(setup: Setup) -> None:
    engine = Replicates(setup.same.values[:3] - 0.2, setup.same.lengths)

    def bias(advantages: list[Any]) -> GradientBias:
        return gradient_bias(setup.stack, engine, setup.dithering, advantages, setup.seeds[:3])

    # Of a length of twelve, the first half only: what is later has no gradient.
    halves = bias([[advantage] * 6 + [0.0] * 6 for advantage in setup.advantages])
    assert [(part.low, part.high) for part in halves.by_position] == [(0, 3), (3, 6)]
    whole = bias(setup.advantages)
    for part, same in zip(halves.by_position, whole.by_position, strict=False):
        assert part.systematic == pytest.approx(same.systematic, rel=1e-5)
    with pytest.raises(MeasurementError, match="zero"):
        bias([0.0] * 8)


ROW = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "logprobs": [-0.5, -1.25, 0.0], "tool_mask": [1, 0, 1]}
TRL = {
    "prompt_ids": [0, 5],
    "prompt_mask": [0, 1],
    "completion_ids": [7, 8, 0],
    "completion_mask": [1, 1, 0],
    "sampling_per_token_logps": [-0.5, -1.0, 0.0],
}
VERL = {"prompts": [5], "responses": [7, 8, 0], "rollout_log_probs": [-0.5, -1.0, 0.0], "attention_mask": [1, 1, 1, 0]}


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROW | {"advantage": -2}, [(-2.0,), (-2.0,)]),
        (ROW | {"advantage": [0.5, 1.0, 1.5]}, [(0.5,), (1.5,)]),
        (ROW, [None, None]),
        (TRL | {"advantages": 0.5}, [(0.5, 0.5)]),
        (VERL | {"advantages": [0.5, 0.25, 0.0]}, [(0.5, 0.25)]),
    ],
)
def test_advantages_are_read_from_every_layout(tmp_path: Path, row: dict[str, Any], expected: list[Any], parquet: bool) -> None:
    file = tmp_path / "run"
    if parquet:
        write_table(Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row))
    assert [rollout.advantages for rollout in read_rollouts(file, VOCABULARY)] == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "line 2: advantage null is no finite number"),
        ({"advantage": float("nan")}, "advantage NaN is no finite number"),
        ({"advantage": "1"}, 'advantage "1" is no finite number'),
        ({"advantage": [1.0]}, "3 tokens in `completion_ids`, but 1 in `advantage`"),
    ],
)
def test_a_wrong_advantage_is_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    file = tmp_path / "run"
    file.write_text(f"{json.dumps(ROW | {'advantage': 1.0})}\n{json.dumps(ROW | wrong)}\n")
    with pytest.raises(UsageError, match=re.escape(message)):
        list(read_rollouts(file, VOCABULARY))


def test_replicates_that_do_not_match_are_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match="as many engine replicates"):
        setup.bias(Replicates(setup.same.values[:4], setup.same.lengths))
