"""What a run came to: how the reward moved, with its error, and whether it collapsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tripoint.rl.collapse import collapsed_at
from tripoint.rl.config import TrainConfig


def summarise(config: TrainConfig, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A run in numbers, JSON values.

    `slope`, `slope_stderr`: of the reward against the step, see `least_squares`. `reward_first`, `reward_last`: means over the
    first and last quarter. `collapsed_at`: see `tripoint.rl.collapse`, the step counted from 1. `k3`: median over steps.
    """
    rewards = np.array([step["reward"] for step in steps])
    quarter = max(1, len(steps) // 4)
    slope, stderr = least_squares(rewards)
    collapse = collapsed_at(rewards.tolist())
    k3 = [step["k3"] for step in steps if step["k3"] is not None]
    return {
        "run": config.name,
        "arm": config.arm,
        "seed": config.seed,
        "directory": str(config.directory),
        "steps": len(steps),
        "reward_first": float(rewards[:quarter].mean()),
        "reward_last": float(rewards[-quarter:].mean()),
        "slope": slope,
        "slope_stderr": stderr,
        "collapsed_at": None if collapse is None else collapse + 1,
        "k3": float(np.median(k3)) if k3 else None,
        "overflows": steps[-1]["overflows"],
    }


def least_squares(rewards: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float | None, float | None]:
    """The slope per step and its standard error, rewards being independent given their trend; None for fewer than three."""
    if len(rewards) < 3:
        return None, None
    x = np.arange(len(rewards)) - (len(rewards) - 1) / 2
    slope = float(x @ rewards / (x @ x))
    residuals = rewards - rewards.mean() - slope * x
    return slope, float(np.sqrt(residuals @ residuals / (len(rewards) - 2) / (x @ x)))


def summary_table(summaries: Sequence[dict[str, Any]]) -> str:
    """One line for each run, under a head."""
    rows = [["run", "steps", "reward, first quarter", "last quarter", "slope per step", "median k3", "collapsed", "overflows"]]
    for s in summaries:
        slope = "" if s["slope"] is None else f"{s['slope']:+.4f} ± {s['slope_stderr']:.4f}"
        collapsed = "no" if s["collapsed_at"] is None else f"at step {s['collapsed_at']}"
        overflows = "" if s["overflows"] is None else str(s["overflows"])
        k3 = "" if s["k3"] is None else f"{s['k3']:.1e}"
        numbers = [f"{s['reward_first']:.3f}", f"{s['reward_last']:.3f}", slope, k3]
        rows.append([s["run"], str(s["steps"]), *numbers, collapsed, overflows])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
