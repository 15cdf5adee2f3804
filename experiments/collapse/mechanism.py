"""The systematic bias of the gradient at fixed weights, and whether it tells which runs will collapse.

A trainer that rounds differently adds to the engine's gradient a difference that varies from batch to batch. What remains of it
after averaging over batches moves the weights in one direction, update after update: that part is the systematic bias. Squared
norms of averages over few batches are inflated by their noise, so they are estimated from products of different batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.collapse import loop, pocket, sides, task
from experiments.collapse.arms import arm_named
from experiments.collapse.report import RESAMPLES, Records, summarise
from experiments.collapse.spec import Run
from numpy.typing import NDArray
from torch import Tensor

BATCHES = 32
Floats = NDArray[np.float64]

PREDICTORS: dict[str, Callable[[dict[str, Any]], float]] = {
    "k3": lambda m: m["k3"],
    "whole bias / gradient": lambda m: (m["bias2"] / m["batch2"]) ** 0.5,
    "systematic bias": lambda m: m["systematic2"],
    "systematic bias / gradient": lambda m: m["systematic2"] / m["batch2"],
    "systematic bias along the gradient": lambda m: m["along"] / m["batch2"],
}


def measure(run: Run, weights: list[Tensor]) -> dict[str, Any]:
    """The bias of `run`'s gradient at `weights`, over `BATCHES` batches as in training.

    `batch2`: squared norm of the engine's gradient, `bias2`: that of its difference to the trainer's, both means over batches.
    `gradient2`, `systematic2`: squared norms of the mean gradient and of the mean difference, `along`: the product of the two,
    with standard errors `*_stderr` (jackknife over batches); unbiased, so they can be negative. `k3`: nats per token.
    """
    arm = arm_named(run.arm)
    noise = torch.Generator().manual_seed(0)
    trainer, engine = sides.build_trainer(arm, run.shape, noise), sides.build_engine(arm, run.shape)
    for model in (trainer, engine):
        pocket.copy_weights(model, weights)
    prompts = task.training_prompts()
    generator = torch.Generator().manual_seed(10_000 + run.seed)
    differences, gradients, k3 = [], [], []
    for _ in range(BATCHES):
        chosen = prompts[torch.randperm(len(prompts), generator=generator)[: loop.PROMPTS_PER_UPDATE]]
        uniform = torch.rand(task.LENGTH, len(chosen) * loop.SAMPLES, generator=generator, dtype=torch.float64)
        completions, engine_logprobs, _ = loop.sample(engine, chosen, uniform)
        rewards = task.reward(chosen.repeat_interleave(loop.SAMPLES, dim=0), completions)
        weight = loop.advantages(run, rewards)[:, None]
        of_both = []
        for model in (trainer, engine):
            logprobs = loop.logprobs_of(loop.completion_logits(model, chosen, completions), completions)
            parts = torch.autograd.grad(-(weight * logprobs).mean(), list(model.parameters()))
            of_both.append(torch.cat([part.flatten().double() for part in parts]))
            if model is trainer:
                k3.append(loop.mismatch(logprobs.detach() - engine_logprobs)["k3"])
        differences.append(of_both[0] - of_both[1])
        gradients.append(of_both[1])
    of_difference, of_gradient = torch.stack(differences), torch.stack(gradients)
    products = {
        "systematic2": (of_difference @ of_difference.T).numpy(),
        "gradient2": (of_gradient @ of_gradient.T).numpy(),
        "along": (of_difference @ of_gradient.T).numpy(),
    }
    whole = {"batch2": "gradient2", "bias2": "systematic2"}
    out: dict[str, Any] = {name: float(np.diag(products[of]).mean()) for name, of in whole.items()}
    out["k3"] = statistics.fmean(k3)
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


def mechanism_report(finished: Iterable[tuple[Run, Records]], directory: Path) -> str:
    """The measured biases, and the rank correlation of each with how much of its reward a run kept. Empty without any."""
    rows = []
    for run, records in finished:
        if bias_path(run, directory).exists():
            measured = json.loads(bias_path(run, directory).read_text())["bias"]
            summary = summarise(run, records)
            rows.append((run, measured, summary.final_reward / summary.first_reward))
    if not rows:
        return ""
    heads = ("condition", "runs", "reward kept", "k3", "gradient², one batch", "mean gradient²", "bias², one batch")
    lines = [f"| {' | '.join(heads)} | mean bias² | along |", "|---" * 9 + "|"]
    conditions = dict.fromkeys(run.condition for run, _, _ in rows)
    for condition in conditions:
        of_condition = [(measured, kept) for run, measured, kept in rows if run.condition == condition]
        cells = [f"{statistics.fmean(kept for _, kept in of_condition):.2f}"]
        cells.append(f"{statistics.fmean(measured['k3'] for measured, _ in of_condition):.2g}")
        for name in ("batch2", "gradient2", "bias2", "systematic2", "along"):
            mean = statistics.fmean(measured[name] for measured, _ in of_condition)
            errors = [measured.get(f"{name}_stderr", 0.0) for measured, _ in of_condition]
            stderr = sum(error**2 for error in errors) ** 0.5 / len(errors)
            cells.append(f"{mean:.3g} ± {stderr:.1g}" if stderr else f"{mean:.3g}")
        lines.append(f"| {condition} | {len(of_condition)} | {' | '.join(cells)} |")
    lines += ["", "| predictor at the start | rank correlation with the reward kept | 95 % interval |", "|---|---|---|"]
    groups = [np.array([i for i, (run, _, _) in enumerate(rows) if run.condition == condition]) for condition in conditions]
    kept_all = np.array([kept for _, _, kept in rows])
    for name, predictor in PREDICTORS.items():
        values = np.array([predictor(measured) for _, measured, _ in rows])
        low, high = correlation_interval(values, kept_all, groups)
        lines.append(f"| {name} | {rank_correlation(values, kept_all):+.2f} | {low:+.2f} to {high:+.2f} |")
    return "\n".join(lines) + "\n"


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's rho, ties sharing their mean rank; 0 where either is constant."""
    ranks = [(np.searchsorted(np.sort(v), v, "left") + np.searchsorted(np.sort(v), v, "right")) / 2.0 for v in (x, y)]
    if min(np.ptp(ranks[0]), np.ptp(ranks[1])) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def correlation_interval(x: Floats, y: Floats, groups: list[NDArray[np.int64]]) -> tuple[float, float]:
    """95 % interval of the rank correlation: a bootstrap over conditions, given as the indices of their runs."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        indices = np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])
        drawn.append(rank_correlation(x[indices], y[indices]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)
