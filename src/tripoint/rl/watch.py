"""What is watched during a run beyond what TRL logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tripoint.drift.dither import Dithering, seeds
from tripoint.drift.gradient_bias import gradient_bias
from tripoint.drift.systematic import measure_systematic
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout, Stack
from tripoint.stacks.emulated import EmulatedStack

REPLICATES = 4


def mismatch(differences: Sequence[float]) -> dict[str, float]:
    """`k1`, `k3`, `ess`, `max_ratio` and `max_abs` of d = logp_trainer - logp_engine (nats), one for each token.

    As defined in `tripoint.drift.mismatch`, without its uncertainties: a step has too few tokens for those.
    """
    d = np.asarray(differences, np.float64)
    ratio = np.exp(d)
    return {
        "k1": float(-d.mean()),
        "k3": float((np.expm1(d) - d).mean()),
        "ess": float(ratio.sum() ** 2 / (len(d) * (ratio**2).sum())),
        "max_ratio": float(ratio.max()),
        "max_abs": float(np.abs(d).max()),
    }


def systematic(
    engine: Stack,
    model: Path,
    weights: Mapping[str, torch.Tensor],
    schedule: RoundingSchedule,
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    seed: int,
) -> dict[str, float]:
    """Systematic drift and gradient bias on `rollouts` with their `advantages`, at the `weights` that `engine` holds.

    Where all advantages are zero there is no gradient, and no bias among the results.

    `weights`: by name, untied, as are those of the checkpoint in directory `model`, which `engine` runs. `schedule`: the
    trainer's. The columns are described in `tripoint.rl.records`. The engine ends as it was.
    """
    dithering = Dithering(weights, rollouts)
    with EmulatedStack(model, target=str(schedule)) as trainer:
        trainer.load_weights(weights.items())
        found = measure_systematic(engine, trainer, dithering, None, full=False, replicates=REPLICATES, seed=seed)
        variance = found.total.value
        measured = {
            "systematic_rms": float(np.sqrt(max(variance, 0.0))),
            "systematic_variance": variance,
            "systematic_stderr": found.total.stderr,
        }
        if any(advantages):
            bias = gradient_bias(trainer, found.scores["engine"], dithering, advantages, seeds(seed, "bias", REPLICATES)).total
            measured["gradient_bias"] = bias.one_step
            measured["gradient_bias_systematic"] = bias.systematic
            measured["gradient_bias_stderr"] = bias.stderr
    return measured
