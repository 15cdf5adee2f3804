"""The picture of a drift measurement: the difference against position and token probability, and the share per operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tripoint.drift.attribution import POSITION_BINS, PROBABILITY_EDGES
from tripoint.drift.result import DriftResult
from tripoint.errors import UsageError

Floats = NDArray[np.float64]


def check_plots() -> None:
    """Raise UsageError where there is nothing to plot with, before minutes of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--out draws a plot, and matplotlib is not installed: `pip install matplotlib`") from None


def plot(result: DriftResult, path: Path) -> None:
    """Draw drift.png: mean difference of every neutral token over the dithers, with its mean and standard error in bins."""
    from matplotlib.figure import Figure

    found = result.systematic
    trainer, engine = found.scores["trainer"], found.scores["engine"]
    steady = ~found.wild
    difference = (trainer.mean - engine.mean)[steady]
    owners = np.repeat(np.arange(len(engine.lengths)), engine.lengths)[steady]
    position = np.concatenate([np.arange(length) for length in engine.lengths])[steady]
    probability = np.exp((trainer.mean + engine.mean) / 2)[steady]

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    axes: Sequence[Any] = figure.subplots(1, 3)
    edges = np.linspace(0, max(engine.lengths), POSITION_BINS + 1)
    _scatter(axes[0], position, difference, owners, edges)
    axes[0].set(xlabel="position in the completion", ylabel="dlogp, mean over dithers (nats)")
    _scatter(axes[1], probability, difference, owners, np.array(PROBABILITY_EDGES))
    axes[1].set(xlabel="token probability")
    _shares(axes[2], result)
    figure.suptitle(f"{result.model}: {result.trainer.stack} against {result.engine.stack}")
    figure.savefig(path, dpi=100)


def _scatter(axis: Any, where: Floats, difference: Floats, owners: Floats, edges: Floats) -> None:
    """Every token, and in each bin the mean over sequences with its standard error and the root mean square."""
    axis.scatter(where, difference, s=3, color="0.7", label="token")
    centres, means, errors, rms = [], [], [], []
    for low, high in pairwise(edges):
        inside = (where >= low) & ((where < high) | (high == edges[-1]))
        sums = np.bincount(owners[inside], difference[inside])
        sums = sums[np.bincount(owners[inside]) > 0]
        if len(sums) < 2:
            continue
        count = inside.sum()
        centres.append((low + high) / 2)
        means.append(sums.sum() / count)
        errors.append(sums.std(ddof=1) * np.sqrt(len(sums)) / count)
        rms.append(np.sqrt((difference[inside] ** 2).mean()))
    axis.errorbar(centres, means, errors, fmt="o", color="C3", capsize=3, label="mean ± standard error")
    axis.plot(centres, rms, "s", color="C0", label="rms, with the noise left in the means")
    axis.axhline(0, color="black", linewidth=0.5)
    axis.legend(fontsize="small")


def _shares(axis: Any, result: DriftResult) -> None:
    """The variances of the table with their 95 % intervals."""
    found = result.systematic
    bars = {"systematic": found.total}
    if found.attribution:
        bars |= {site.op: site.shapley for site in found.attribution.sites}
        bars["interaction"] = found.attribution.interaction
    if found.aligned:
        bars["left when aligned"] = found.aligned
    bars["control"] = found.controls.zero
    values = np.array([bar.value for bar in bars.values()])
    ends = np.array([[bar.value - bar.low, bar.high - bar.value] for bar in bars.values()]).T
    axis.bar(range(len(bars)), values, yerr=ends.clip(min=0), capsize=3, color=["C0", *["C1"] * (len(bars) - 1)])
    axis.set_xticks(range(len(bars)), list(bars), rotation=30, ha="right")
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set(ylabel="variance (nats², 95 % interval)", title=result.withheld or "per operation: Shapley value")
