"""The systematic bias of the gradient at fixed weights, and whether it tells which runs will collapse.

A trainer that rounds differently adds to the engine's gradient a difference that varies from batch to batch. What remains of it
after averaging over batches moves the weights in one direction, update after update: that part is the systematic bias. Squared
norms of averages over few batches are inflated by their noise, so they are estimated from products of different batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.collapse import loop, pocket, sides, task
from experiments.collapse.arms import arm_named
from experiments.collapse.report import RESAMPLES, Records, Summary, collapsed_of, summarise
from experiments.collapse.spec import Run
from numpy.typing import NDArray
from torch import Tensor

from tripoint.rl.watch import mismatch

BATCHES = 32
FP16_SCALE = 1024.0
"""Of the loss where gradients are FP16: no batch at a run's start overflows with it."""
LARGE = 8
"""Runs of a condition from which on they are compared with each other."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PRIMARY = "mean bias² / gradient²"
PREDICTORS: dict[str, Callable[[dict[str, Any]], float]] = {
    PRIMARY: lambda m: m["systematic2"] / m["batch2"],
    "bias², one batch / gradient²": lambda m: m["bias2"] / m["batch2"],
    "along / gradient²": lambda m: m["along"] / m["batch2"],
    "k3": lambda m: m["k3"],
    "mean advantage": lambda m: m["advantage"],
    "size of the keys": lambda m: m["key_size"],
}
"""What may tell how much a run will lose. `gradient²` is that of one batch, by which Adam's steps are scaled."""


def measure(run: Run, weights: list[Tensor]) -> dict[str, Any]:
    """The bias of `run`'s gradient at `weights`, over `BATCHES` batches as in training.

    `batch2`: squared norm of the engine's gradient, `bias2`: that of its difference to the trainer's, both means over batches.
    `gradient2`, `systematic2`: squared norms of the mean gradient and of the mean difference, `along`: the product of the two,
    with standard errors `*_stderr` (jackknife over batches); unbiased, so they can be negative. `k3`: nats per token.
    `advantage`: the mean over completions.
    """
    arm = arm_named(run.arm)
    noise = sides.noise_of(run)
    trainer, engine = sides.build_trainer(arm, run.shape, noise), sides.build_engine(arm, run.shape)
    for model in (trainer, engine):
        pocket.copy_weights(model, weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=FP16_SCALE, enabled=arm.trainer_dtype == "float16")
    prompts = task.training_prompts()
    generator = torch.Generator().manual_seed(10_000 + run.seed)
    differences, gradients, k3, advantages = [], [], [], []
    for _ in range(BATCHES):
        batch = loop.draw(run, engine, prompts, generator)
        loss, d, carrier = loop.policy_loss(arm, trainer, engine, noise, batch)
        gradients.append(loop.engine_gradient(engine, batch, scaler).double())
        differences.append(loop.gradient_of(loss, carrier, scaler).double() - gradients[-1])
        k3.append(mismatch(d.flatten().numpy())["k3"])
        advantages.append(batch.advantages.mean().item())
    of_difference, of_gradient = torch.stack(differences), torch.stack(gradients)
    products = {
        "systematic2": (of_difference @ of_difference.T).numpy(),
        "gradient2": (of_gradient @ of_gradient.T).numpy(),
        "along": (of_difference @ of_gradient.T).numpy(),
    }
    whole = {"batch2": "gradient2", "bias2": "systematic2"}
    out: dict[str, Any] = {name: float(np.diag(products[of]).mean()) for name, of in whole.items()}
    out |= {"k3": statistics.fmean(k3), "advantage": statistics.fmean(advantages)}
    for name, product in products.items():
        out[name], out[f"{name}_stderr"] = between_batches(product)
    return out


def between_batches(product: Floats) -> tuple[float, float]:
    """Mean of the off-diagonal elements of [batches, batches], with its standard error by a jackknife over batches."""
    n = len(product)
    off = product - np.diag(np.diag(product))
    total, without = off.sum(), off.sum() - off.sum(0) - off.sum(1)
    left_out = without / ((n - 1) * (n - 2))
    stderr = ((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()) ** 0.5
    return float(total / (n * (n - 1))), float(stderr)


def execute(run: Run, directory: Path) -> None:
    """Measure the bias at the start of `run`, once, into `directory / "bias"`."""
    torch.set_num_threads(1)
    path = bias_path(run, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"run": run.to_dict(), "bias": measure(run, loop.warmed_up(run, directory / "warm-up"))}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(measured))
    unfinished.rename(path)


def bias_path(run: Run, directory: Path) -> Path:
    return directory / "bias" / f"{run.name}.json"


# -- what it predicts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run with what was measured at its start, and its twin: the aligned run from the same weights and seed."""

    run: Run
    measured: dict[str, Any]
    summary: Summary
    twin: Summary

    @property
    def lost(self) -> float:
        """Final reward that the twin has and this run has not."""
        return self.twin.final_reward - self.summary.final_reward


def cases(finished: Iterable[tuple[Run, Records]], directory: Path) -> list[Case]:
    """The runs at the default learning rate and length whose bias has been measured and whose twin has been made."""
    summaries = {run: summarise(run, records) for run, records in finished}
    out = []
    for run, summary in summaries.items():
        twin = replace(run, arm="all")
        usual = Run(run.arm, run.sft_seed, run.seed, run.shape, run.key_size, run.baseline)
        if run == usual and run != twin and twin in summaries and bias_path(run, directory).exists():
            measured = json.loads(bias_path(run, directory).read_text())["bias"] | {"key_size": run.key_size}
            out.append(Case(run, measured, summary, summaries[twin]))
    return out


def mechanism_report(finished: Iterable[tuple[Run, Records]], directory: Path) -> str:
    """The measured biases, and the rank correlation of each with the reward that was lost. Empty without any."""
    measured = cases(finished, directory)
    if not measured:
        return ""
    conditions = list(dict.fromkeys(case.run.condition for case in measured))
    gradients = ("gradient², one batch", "mean gradient²", "bias², one batch", "mean bias²", "along")
    heads = ("condition", "runs", "collapsed", "reward lost", f"{PRIMARY}, median", "k3", *gradients)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for condition in conditions:
        of_condition = [case for case in measured if case.run.condition == condition]
        cells = [
            f"{collapsed_of([case.summary for case in of_condition])}",
            f"{statistics.fmean(case.lost for case in of_condition):+.2f}",
            f"{statistics.median(PREDICTORS[PRIMARY](case.measured) for case in of_condition):.4f}",
            f"{statistics.fmean(case.measured['k3'] for case in of_condition):.2g}",
        ]
        for name in ("batch2", "gradient2", "bias2", "systematic2", "along"):
            mean = statistics.fmean(case.measured[name] for case in of_condition)
            errors = [case.measured.get(f"{name}_stderr", 0.0) for case in of_condition]
            stderr = sum(error**2 for error in errors) ** 0.5 / len(errors)
            cells.append(f"{mean:.3g} ± {stderr:.1g}" if stderr else f"{mean:.3g}")
        lines.append(f"| {condition} | {len(of_condition)} | {' | '.join(cells)} |")

    lost = np.array([case.lost for case in measured])
    condition_of = np.array([conditions.index(case.run.condition) for case in measured])
    warm_up_of = np.array([case.run.sft_seed for case in measured])
    large = np.bincount(condition_of)[condition_of] >= LARGE
    lines += [
        "",
        f"Rank correlation with the reward lost, and its 95 % interval: over all {len(measured)} runs (conditions and warm-ups",
        f"drawn anew), with how much larger that of {PRIMARY} is; and within conditions of at least {LARGE} runs,",
        f"{large.sum()} in all (warm-ups drawn anew).",
        "",
        "| measured at the start | over all runs | | primary's lead | within conditions | |",
        "|---|---|---|---|---|---|",
    ]
    values_of = {name: np.array([predictor(case.measured) for case in measured]) for name, predictor in PREDICTORS.items()}
    drawn = {name: correlations_drawn(values, lost, condition_of, warm_up_of) for name, values in values_of.items()}
    for name, values in values_of.items():
        cells = [f"{rank_correlation(values, lost):+.2f}", interval_text(drawn[name])]
        cells.append("" if name == PRIMARY else interval_text(drawn[PRIMARY] - drawn[name]))
        if large.any():
            x, y = (ranks_within(column[large], condition_of[large]) for column in (values, lost))
            cells += [f"{rank_correlation(x, y):+.2f}", interval_text(correlations_drawn(x, y, warm_up_of[large]))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def interval_text(drawn: Floats) -> str:
    """95 % of the draws of a bootstrap."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{low:+.2f} to {high:+.2f}"


def ranks(x: Floats) -> Floats:
    """Ties share their mean rank."""
    ordered = np.sort(x)
    return (np.searchsorted(ordered, x, "left") + np.searchsorted(ordered, x, "right")) / 2.0


def ranks_within(x: Floats, group_of: Ints) -> Floats:
    """Each element's rank in its group, from -1 to 1."""
    out = np.zeros(len(x))
    for group in np.unique(group_of):
        mine = group_of == group
        out[mine] = 2 * ranks(x[mine]) / mine.sum() - 1
    return out


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's rho; 0 where either is constant."""
    if min(np.ptp(x), np.ptp(y)) == 0:
        return 0.0
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def correlations_drawn(x: Floats, y: Floats, *clusterings: Ints) -> Floats:
    """The rank correlation in each draw of a bootstrap over clusters of runs; the same draws for every `x` and `y`.

    Each of `clusterings` gives every run's cluster. Of several, clusters of each are drawn, and a run counts as often as all of
    its own were drawn.
    """
    rng = np.random.default_rng(0)
    cluster_of = [np.unique(clustering, return_inverse=True)[1] for clustering in clusterings]
    drawn = []
    for _ in range(RESAMPLES):
        times = np.ones(len(x), np.int64)
        for of in cluster_of:
            clusters = int(of.max()) + 1
            times *= np.bincount(rng.integers(clusters, size=clusters), minlength=clusters)[of]
        chosen = np.repeat(np.arange(len(x)), times)
        if len(chosen) > 0:
            drawn.append(rank_correlation(x[chosen], y[chosen]))
    return np.array(drawn)
