"""The gradient bias against gradients taken in full, and its systematic part against a known one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import VOCABULARY, tiny
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds
from tripoint.drift.gradient_bias import GradientBias, gradient_bias
from tripoint.stacks import Rollout
from tripoint.stacks.hf import HFStack

K = 6


class Setup:
    def __init__(self, directory: Path) -> None:
        tiny("llama", num_hidden_layers=1, tie_word_embeddings=False, max_position_embeddings=64).save_pretrained(directory)
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


def test_weights_and_gradients_are_left_as_they_were(setup: Setup) -> None:
    before = setup.stack.score(setup.rollouts)
    setup.bias(setup.same)
    assert setup.stack.score(setup.rollouts) == before
    assert all(parameter.grad is None for parameter in setup.stack.model.parameters())


def test_replicates_that_do_not_match_are_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match="as many engine replicates"):
        setup.bias(Replicates(setup.same.values[:4], setup.same.lengths))
