"""The report of finished runs: a row per run, a table of conditions, the verdict on the criterion, curves and plots."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from experiments.collapse.spec import Run

from tripoint.rl.collapse import WINDOW, collapsed_at

Records = list[dict[str, Any]]
RESAMPLES = 1000
CURVES = ("reward", "k3", "bias", "bias_cosine")
SMOOTH = 20
PLOTTED = ("none", "rope", "all", "placebo", "swapped", "wrong", "fp16", "tis")


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Medians are over its updates; `final_reward` is the mean over the last `WINDOW` of them."""

    condition: str
    sft_seed: int
    seed: int
    updates: int
    first_reward: float
    final_reward: float
    best_reward: float
    collapsed_at: int | None
    k3: float
    bias: float
    bias_cosine: float
    max_abs: float
    entropy: float
    overflows: int
    seconds: float

    @property
    def pair(self) -> tuple[int, int]:
        return self.sft_seed, self.seed


def summarise(run: Run, records: Records) -> Summary:
    def column(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    rewards = column("reward")
    windows = np.convolve(rewards, np.ones(WINDOW) / WINDOW, mode="valid") if len(rewards) >= WINDOW else np.array(rewards)
    return Summary(
        condition=run.condition,
        sft_seed=run.sft_seed,
        seed=run.seed,
        updates=len(records),
        first_reward=statistics.fmean(rewards[:SMOOTH]),
        final_reward=statistics.fmean(rewards[-WINDOW:]),
        best_reward=float(windows.max()),
        collapsed_at=collapsed_at(rewards),
        k3=statistics.median(column("k3")),
        bias=statistics.median(column("bias")),
        bias_cosine=statistics.median(column("bias_cosine")),
        max_abs=max(column("max_abs")),
        entropy=statistics.fmean(column("entropy")[-WINDOW:]),
        overflows=records[-1].get("overflows", 0),
        seconds=sum(column("seconds")),
    )


# -- statistics -------------------------------------------------------------------------------------------------------


def interval(values: dict[tuple[int, int], float]) -> tuple[float, float]:
    """95 % interval of the mean of `values`, by (warm-up, seed): a bootstrap over warm-ups and over the runs of each."""
    by_sft: dict[int, list[float]] = defaultdict(list)
    for (sft_seed, _), value in values.items():
        by_sft[sft_seed].append(value)
    groups = [np.array(group) for group in by_sft.values()]
    rng = np.random.default_rng(0)
    means = []
    for _ in range(RESAMPLES):
        drawn = [rng.choice(groups[i], len(groups[i])) for i in rng.integers(len(groups), size=len(groups))]
        means.append(np.concatenate(drawn).mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def paired(left: Sequence[Summary], right: Sequence[Summary]) -> dict[tuple[int, int], float]:
    """Final reward of `left` less that of `right`, where both have a run of the same warm-up and seed."""
    other = {summary.pair: summary.final_reward for summary in right}
    return {summary.pair: summary.final_reward - other[summary.pair] for summary in left if summary.pair in other}


def collapsed_share(runs: Sequence[Summary]) -> float:
    return sum(run.collapsed_at is not None for run in runs) / len(runs)


def verdicts(conditions: dict[str, list[Summary]]) -> list[tuple[str, str, str]]:
    """The criterion of the README: claim, verdict (holds, fails, undecided, not run), and the numbers behind it."""

    def collapses(arm: str) -> tuple[str, str]:
        share = collapsed_share(conditions[arm])
        return "holds" if share >= 0.8 else "fails" if share < 0.5 else "undecided", _share_text(arm, conditions[arm])

    def survives(arm: str) -> tuple[str, str]:
        share = collapsed_share(conditions[arm])
        return "holds" if share <= 0.1 else "fails" if share >= 0.5 else "undecided", _share_text(arm, conditions[arm])

    def cures(arm: str) -> tuple[str, str]:
        outcome, text = survives(arm)
        differences = paired(conditions[arm], conditions["none"])
        if not differences:
            return "not run", "no pairs"
        low, high = interval(differences)
        mean = statistics.fmean(differences.values())
        text += f"; {arm} - none: {mean:+.3f} [{low:+.3f}, {high:+.3f}] over {len(differences)} pairs"
        return "fails" if low <= 0 else outcome, text

    rows: list[tuple[str, Callable[[str], tuple[str, str]], str]] = [
        ("stock collapses", collapses, "none"),
        ("alignment cures", cures, "all"),
        ("RoPE alone suffices", cures, "rope"),
        ("not the size of the mismatch", survives, "placebo"),
        ("same points, not more precision", collapses, "wrong"),
        ("it does not matter which side is stock", collapses, "swapped"),
    ]
    out = []
    for claim, judge, arm in rows:
        there = arm in conditions and (judge is not cures or "none" in conditions)
        out.append((claim, *(judge(arm) if there else ("not run", f"no runs of {arm}"))))
    return out


def _share_text(arm: str, runs: Sequence[Summary]) -> str:
    return f"{arm} collapsed in {sum(run.collapsed_at is not None for run in runs)} of {len(runs)}"


# -- writing ----------------------------------------------------------------------------------------------------------


def write_report(finished: Iterable[tuple[Run, Records]], directory: Path) -> str:
    """Write `runs.csv`, `curves.csv`, `report.md` and `curves.png` into `directory`; returns the text of `report.md`."""
    finished = list(finished)
    directory.mkdir(parents=True, exist_ok=True)
    conditions: dict[str, list[Summary]] = defaultdict(list)
    curves: dict[str, list[Records]] = defaultdict(list)
    for run, records in finished:
        conditions[run.condition].append(summarise(run, records))
        curves[run.condition].append(records)
    _write_rows(directory / "runs.csv", [vars(summary) for name in sorted(conditions) for summary in conditions[name]])
    bands = {name: {curve: band(runs, curve) for curve in CURVES} for name, runs in sorted(curves.items())}
    _write_rows(
        directory / "curves.csv",
        [
            {
                "condition": name,
                "curve": curve,
                "update": int(x),
                "mean": f"{mean:.4g}",
                "low": f"{low:.4g}",
                "high": f"{high:.4g}",
            }
            for name, of_condition in bands.items()
            for curve, points in of_condition.items()
            for x, mean, low, high in points
        ],
    )
    _plot(bands, directory / "curves.png")
    text = _markdown(conditions)
    (directory / "report.md").write_text(text)
    return text


def band(runs: Sequence[Records], name: str) -> list[tuple[float, float, float, float]]:
    """(update, mean, lowest, highest) over `runs`, each averaged over stretches of `SMOOTH` updates first."""
    smoothed = []
    for records in runs:
        stretches = [records[start : start + SMOOTH] for start in range(0, len(records), SMOOTH)]
        smoothed.append([statistics.fmean(r[name] for r in stretch if name in r) for stretch in stretches])
    return [
        (index * SMOOTH + SMOOTH / 2, statistics.fmean(values), min(values), max(values))
        for index, values in enumerate(zip(*smoothed, strict=True))
    ]


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )


def _markdown(conditions: dict[str, list[Summary]]) -> str:
    lines = ["| claim | verdict | |", "|---|---|---|"]
    lines += [f"| {claim} | **{verdict}** | {text} |" for claim, verdict, text in verdicts(conditions)]
    lines += [
        "",
        "Medians over runs, spread in brackets. k3 and gradient bias are each run's median over its updates; the cosine is the",
        "bias's with the gradient.",
        "",
        "| condition | runs | collapsed | final reward | 95 % interval of the mean | k3 | gradient bias | cosine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in sorted(conditions.items(), key=lambda item: -statistics.median(run.final_reward for run in item[1])):
        final = [run.final_reward for run in runs]
        low, high = interval({run.pair: run.final_reward for run in runs})
        k3, bias, cosine = (statistics.median(getattr(run, field) for run in runs) for field in ("k3", "bias", "bias_cosine"))
        lines.append(
            f"| {name} | {len(runs)} | {sum(run.collapsed_at is not None for run in runs)} "
            f"| {statistics.median(final):.3f} ({min(final):.3f} to {max(final):.3f}) | {low:.3f} to {high:.3f} "
            f"| {k3:.2g} | {bias:.2g} | {cosine:+.2f} |"
        )
    return "\n".join(lines) + "\n"


def _plot(bands: dict[str, dict[str, list[tuple[float, float, float, float]]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    titles = {
        "reward": "reward",
        "k3": "k3 (nats per token)",
        "bias": "gradient bias / gradient",
        "bias_cosine": "cosine of bias and gradient",
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharex=True, layout="constrained")
    for axis, (curve, title) in zip(axes.flat, titles.items(), strict=True):
        for name in PLOTTED:
            if name in bands:
                x, mean, low, high = zip(*bands[name][curve], strict=True)
                (line,) = axis.plot(x, mean, label=name)
                axis.fill_between(x, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0, 1].set_yscale("symlog", linthresh=1e-4)
    axes[0, 1].set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("update")
    axes[0, 0].legend(fontsize="small")
    figure.suptitle("Mean and range over runs")
    figure.savefig(path, dpi=130)
    plt.close(figure)
