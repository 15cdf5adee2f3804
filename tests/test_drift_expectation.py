"""What noise alone would show, and which tokens are too noisy to measure on."""

from __future__ import annotations

import numpy as np
import pytest

from tripoint.drift.dither import Replicates
from tripoint.drift.expectation import noise_only, steady


def noisy(rng: np.random.Generator, k: int, sd: float, sequences: int = 40, length: int = 50) -> Replicates:
    mean = rng.normal(size=sequences * length)
    return Replicates(mean + sd * rng.normal(size=(k, sequences * length)), (length,) * sequences)


def test_expected_k3_is_that_of_independent_noise() -> None:
    rng = np.random.default_rng(0)
    found = noise_only(noisy(rng, 3, 0.1), noisy(rng, 5, 0.2))
    variance = 0.1**2 + 0.2**2
    # E exp(d) - 1 - d of a Gaussian d. The means of the two stacks, which are far apart here, do not enter.
    assert found.k3 == pytest.approx(np.expm1(variance / 2), rel=0.05)
    assert found.rms == pytest.approx(np.sqrt(variance), rel=0.03)


def test_noise_seldom_passes_the_limit() -> None:
    rng = np.random.default_rng(1)
    limit = noise_only(noisy(rng, 4, 0.1), noisy(rng, 4, 0.2)).k3_limit
    d = np.sqrt(0.1**2 + 0.2**2) * rng.normal(size=(2000, 2000))
    k3 = (np.expm1(d) - d).mean(axis=1)
    assert (k3 > limit).mean() < 0.01
    assert limit < 1.25 * k3.mean()


def test_a_token_that_falls_either_way_is_not_in_the_limit() -> None:
    rng = np.random.default_rng(4)
    a, b = noisy(rng, 3, 0.1), noisy(rng, 3, 0.1)
    plain = noise_only(a, b)
    a.values[:, 7] += (3.0, -3.0, 3.0)
    found = noise_only(a, b)
    assert list(np.flatnonzero(~found.steady)) == [7]
    assert (found.k3, found.k3_limit, found.rms) == pytest.approx((plain.k3, plain.k3_limit, plain.rms), rel=0.02)


def test_sequences_of_one_prompt_widen_the_limit() -> None:
    """Noise that is as large in all sequences of a prompt does not average out over them."""
    rng = np.random.default_rng(5)
    size = np.repeat(rng.lognormal(sigma=0.7, size=10), 4 * 50)
    groups = tuple(np.repeat(np.arange(10), 4).tolist())
    values = [0.1 * size * rng.normal(size=(3, 2000)) for _ in range(2)]
    apart, together = (noise_only(*(Replicates(v, (50,) * 40, g) for v in values)) for g in ((), groups))
    assert together.k3 == pytest.approx(apart.k3)
    assert together.k3_limit - together.k3 > 1.4 * (apart.k3_limit - apart.k3)


def test_noise_needs_two_replicates() -> None:
    rng = np.random.default_rng(2)
    with pytest.raises(ValueError, match="two replicates"):
        noise_only(noisy(rng, 1, 0.1), noisy(rng, 4, 0.1))


def test_tokens_that_fall_either_way_are_left_out() -> None:
    rng = np.random.default_rng(3)
    a, b = noisy(rng, 8, 0.05), noisy(rng, 8, 0.05)
    assert steady([a, b]).all()
    a.values[:, 7] += 2.0 * rng.choice([-1, 1], size=8)
    b.values[:, 9] += 30.0 * rng.choice([-1, 1], size=8)
    # The second drowns the first at the first look.
    assert set(np.flatnonzero(~steady([a, b]))) == {7, 9}
