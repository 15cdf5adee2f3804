"""A plan keeps what it promises: the error it predicts is the one that is then measured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from test_drift_estimate import draw
from tripoint.drift.estimate import systematic
from tripoint.drift.plan import plan


def measured(k: int, sequences: int, size: float, seed: int) -> Any:
    """What `plan` looks at, of stacks whose noise and differences are known; 20 tokens a sequence."""
    rng = np.random.default_rng(seed)
    shape = (sequences, 20)
    trainer, again = draw(rng, np.zeros(shape), 2 * k, 0.05), draw(rng, np.zeros(shape), k, 0.05)
    halves = replace(trainer, values=trainer.values[:k])
    total = systematic(draw(rng, size * rng.normal(size=shape), k, 0.05), trainer)
    controls = SimpleNamespace(zero=systematic(halves, again))
    return SimpleNamespace(replicates=k, tokens=20 * sequences, total=total, controls=controls)


@pytest.mark.parametrize("size", [0.0, 0.03, 0.2])
def test_the_error_promised_is_the_error_found(size: float) -> None:
    """On average over pilots: a single small one knows the errors it plans with to a fifth or so."""
    pilots = [measured(4, 30, size, seed) for seed in range(10)]
    wanted = 0.3 * float(np.mean([pilot.total.stderr for pilot in pilots]))
    planned = [plan(pilot, most_tokens=100000, stderr=wanted) for pilot in pilots]
    assert all(p.stderr <= wanted * 1.001 for p in planned)
    found = [measured(p.replicates, p.tokens // 20, size, 100 + i).total.stderr for i, p in enumerate(planned)]
    assert np.mean(found) == pytest.approx(wanted, rel=0.25)


def test_noise_wants_replicates_and_differences_want_tokens() -> None:
    noisy, different = (
        plan(pilot, most_tokens=10**6, stderr=pilot.total.stderr / 8)
        for pilot in (measured(4, 30, size, 0) for size in (0.0, 0.5))
    )
    assert noisy.replicates > 3 * different.replicates
    assert noisy.tokens < different.tokens / 3


def test_what_cannot_be_reached_is_said() -> None:
    planned = plan(measured(4, 30, 0.3, 0), most_tokens=1000, stderr=1e-9)
    assert planned.tokens == 1000
    assert planned.stderr > 1e-9
    assert planned.sentence(1e-9).endswith("nats²: the 1e-09 asked for are out of reach")
    assert planned.sentence(planned.stderr).endswith("nats²")
