"""The report of finished runs: a row per run, tables of conditions and pairs, the verdict on the criterion, curves, plots."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from experiments.collapse.spec import Run
from numpy.typing import NDArray

from tripoint.rl.collapse import WINDOW, collapsed_at

Records = list[dict[str, Any]]
Interval = tuple[float, float]
RESAMPLES = 1000
ENOUGH = 10
"""Runs, or pairs of runs, from which on a claim is judged."""

CURVES = ("reward", "k3", "bias", "bias_cosine")
SMOOTH = 20
PLOTTED = ("none", "rope", "all", "placebo", "placebo-fixed", "all-but-rope", "swapped", "wrong", "fp16", "tis")


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Mismatch and bias are medians over its first `WINDOW` updates, when few runs have changed much;
    `first_reward` is the mean over the first `SMOOTH`, `final_reward` that over the last `WINDOW`."""

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
    def lost_half(self) -> bool:
        """Whether it ended below half of what it began with."""
        return self.final_reward < self.first_reward / 2

    @property
    def pair(self) -> tuple[int, int]:
        return self.sft_seed, self.seed


def summarise(run: Run, records: Records) -> Summary:
    def column(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    def early(name: str) -> float:
        return statistics.median([record[name] for record in records[:WINDOW] if name in record])

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
        k3=early("k3"),
        bias=early("bias"),
        bias_cosine=early("bias_cosine"),
        max_abs=max(column("max_abs")),
        entropy=statistics.fmean(column("entropy")[-WINDOW:]),
        overflows=records[-1].get("overflows", 0),
        seconds=sum(column("seconds")),
    )


# -- statistics -------------------------------------------------------------------------------------------------------


def by_sft_seed(values: dict[tuple[int, int], float]) -> list[NDArray[np.float64]]:
    """The `values`, by (warm-up, seed), of each warm-up."""
    out: dict[int, list[float]] = defaultdict(list)
    for (sft_seed, _), value in values.items():
        out[sft_seed].append(value)
    return [np.array(of_one) for of_one in out.values()]


def interval(values: dict[tuple[int, int], float]) -> Interval:
    """95 % interval of the mean of `values`, by (warm-up, seed): a bootstrap over warm-ups and over the runs of each."""
    groups = by_sft_seed(values)
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


@dataclass(frozen=True)
class Claim:
    """`holds` and `fails` take the share of collapsed runs of `arm` and the interval of its difference to `against`, if that is
    given; a claim of which neither is true is undecided."""

    text: str
    arm: str
    holds: Callable[[float, Interval], bool]
    fails: Callable[[float, Interval], bool]
    against: str | None = None


def collapses(text: str, arm: str) -> Claim:
    return Claim(text, arm, lambda share, _: share >= 0.8, lambda share, _: share < 0.5)


def survives(text: str, arm: str) -> Claim:
    return Claim(text, arm, lambda share, _: share <= 0.1, lambda share, _: share >= 0.5)


def cures(text: str, arm: str) -> Claim:
    return Claim(
        text, arm, lambda share, more: share <= 0.1 and more[0] > 0, lambda share, more: share >= 0.5 or more[0] <= 0, "none"
    )


def harms(text: str, arm: str, against: str) -> Claim:
    return Claim(text, arm, lambda _, more: more[1] < 0, lambda _, more: more[1] >= 0, against)


CLAIMS = (
    collapses("stock collapses", "none"),
    cures("alignment cures", "all"),
    cures("RoPE alone suffices", "rope"),
    survives("not the size of the mismatch", "placebo"),
    collapses("same points, not more precision", "wrong"),
    collapses("it does not matter which side is stock", "swapped"),
    harms("noise that does not average out harms", "placebo-fixed", against="placebo"),
    harms("RoPE's difference harms where noise of its size does not", "all-but-rope", against="placebo"),
    collapses("stock collapses within 1000 updates", "none updates=1000"),
)


def verdicts(conditions: dict[str, list[Summary]]) -> list[tuple[str, str, str]]:
    """The criterion of the README: claim, verdict (holds, fails, undecided, too few runs, not run), the numbers behind it."""
    return [(claim.text, *_judge(claim, conditions)) for claim in CLAIMS]


def _judge(claim: Claim, conditions: dict[str, list[Summary]]) -> tuple[str, str]:
    runs, others = conditions.get(claim.arm, []), conditions.get(claim.against or "", [])
    differences = paired(runs, others)
    if not runs or (claim.against and not differences):
        return "not run", f"no runs of {claim.arm}" if not runs else f"none that {claim.against} has as well"
    collapsed = collapsed_of(runs)
    low, high = (f"{100 * bound:.0f}" for bound in share_interval(collapsed, len(runs)))
    text = f"{claim.arm} collapsed in {collapsed} of {len(runs)} ({low} to {high} %)"
    more = (0.0, 0.0)
    if claim.against:
        more = interval(differences)
        mean = statistics.fmean(differences.values())
        text += f"; {claim.arm} - {claim.against}: {mean:+.3f} [{more[0]:+.3f}, {more[1]:+.3f}] over {len(differences)} pairs"
        by_warm_up = by_sft_seed(differences)
        text += f", above 0 for {sum(np.mean(of_one) > 0 for of_one in by_warm_up)} of {len(by_warm_up)} warm-ups"
    if len(differences if claim.against else runs) < ENOUGH:
        return "too few runs", text
    share = collapsed / len(runs)
    return "holds" if claim.holds(share, more) else "fails" if claim.fails(share, more) else "undecided", text


def collapsed_of(runs: Sequence[Summary]) -> int:
    return sum(run.collapsed_at is not None for run in runs)


def share_interval(count: int, of: int) -> Interval:
    """95 % interval of a share, Wilson's. Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209."""
    z = statistics.NormalDist().inv_cdf(0.975)
    centre = (count + z**2 / 2) / (of + z**2)
    half = z / (of + z**2) * (count * (of - count) / of + z**2 / 4) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


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
    text = _markdown(conditions)
    (directory / "report.md").write_text(text)
    _plot(bands, directory / "curves.png")
    return text


def band(runs: Sequence[Records], name: str) -> list[tuple[float, float, float, float]]:
    """(update, mean, lowest, highest) over `runs`, each averaged over stretches of `SMOOTH` updates first."""
    smoothed = []
    for records in runs:
        stretches = [records[start : start + SMOOTH] for start in range(0, len(records), SMOOTH)]
        smoothed.append([[r[name] for r in stretch if name in r] for stretch in stretches])
    out = []
    for index, of_runs in enumerate(zip(*smoothed, strict=True)):
        if means := [statistics.fmean(values) for values in of_runs if values]:  # a run that diverged has none any more
            out.append((index * SMOOTH + SMOOTH / 2, statistics.fmean(means), min(means), max(means)))
    return out


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
        f"Medians over runs, spread in brackets. k3 and gradient bias are each run's median over its first {WINDOW} updates,",
        "the cosine is the bias's with the gradient. *Halved*: ended below half of the reward it began with. Intervals of",
        "shares take runs for independent of each other, though some share a warm-up.",
        "",
        "| condition | runs | collapsed | halved | final reward | 95 % interval of the mean | k3 | gradient bias | cosine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in sorted(conditions.items(), key=lambda item: -statistics.median(run.final_reward for run in item[1])):
        final = [run.final_reward for run in runs]
        low, high = interval({run.pair: run.final_reward for run in runs})
        k3, bias, cosine = (statistics.median(getattr(run, field) for run in runs) for field in ("k3", "bias", "bias_cosine"))
        lines.append(
            f"| {name} | {len(runs)} | {collapsed_of(runs)} | {sum(run.lost_half for run in runs)} "
            f"| {statistics.median(final):.3f} ({min(final):.3f} to {max(final):.3f}) | {low:.3f} to {high:.3f} "
            f"| {k3:.2g} | {bias:.2g} | {cosine:+.2f} |"
        )
    lines += [
        "",
        "The same, less the stock trainer's run from the same warm-up and seed, where both were made. Intervals of fewer than",
        f"{ENOUGH} pairs are too narrow: a bootstrap cannot draw what it has not seen.",
        "",
        "| condition | pairs | collapsed, and stock | final reward, less stock's | 95 % interval of the mean | above 0 |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs, stock in with_stock(conditions):
        differences = paired(runs, stock)
        low, high = interval(differences)
        both = [collapsed_of([run for run in side if run.pair in differences]) for side in (runs, stock)]
        lines.append(
            f"| {name} | {len(differences)} | {both[0]} and {both[1]} | {statistics.fmean(differences.values()):+.3f} "
            f"({min(differences.values()):+.3f} to {max(differences.values()):+.3f}) | {low:+.3f} to {high:+.3f} "
            f"| {sum(difference > 0 for difference in differences.values())} |"
        )
    return "\n".join(lines) + "\n"


def with_stock(conditions: dict[str, list[Summary]]) -> Iterator[tuple[str, list[Summary], list[Summary]]]:
    """Every other arm's condition with its runs and those of the stock trainer in the same setting, setting by setting."""
    for name in sorted(conditions, key=lambda name: name.partition(" ")[::-1]):
        arm, _, settings = name.partition(" ")
        stock = conditions.get(f"none {settings}".rstrip(), [])
        if arm != "none" and paired(conditions[name], stock):
            yield name, conditions[name], stock


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
    if bands.keys() & set(PLOTTED):
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle("Mean and range over runs")
    figure.savefig(path, dpi=130)
    plt.close(figure)
