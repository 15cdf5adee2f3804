"""Prints the numbers of the table in README.md from the steps recorded in results/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tripoint.rl.summary import least_squares

RESULTS = Path(__file__).parent / "results"


def column(arm: str, name: str) -> np.ndarray:
    return pq.read_table(RESULTS / f"smollm2-{arm}-seed0.parquet")[name].to_numpy()


def mean(values: np.ndarray, form: str) -> str:
    return f"{values.mean():{form}} ± {values.std(ddof=1) / len(values) ** 0.5:{form.lstrip('+')}}"


def slope(rewards: np.ndarray) -> str:
    return "{:+.4f} ± {:.4f}".format(*least_squares(rewards))


rewards = {arm: column(arm, "reward") for arm in ("none", "all")}
for arm, reward in rewards.items():
    print(f"{arm}: reward {reward[:8].mean():.3f} in steps 1-8, {reward[-8:].mean():.3f} in steps 25-32, slope {slope(reward)}")
    print(f"{arm}: k3 {mean(column(arm, 'k3'), '.2e')}, {column(arm, 'seconds').mean():.0f} seconds a step")
difference = rewards["all"] - rewards["none"]
print(f"all - none, paired by step: slope {slope(difference)}, mean reward {mean(difference, '+.3f')}")
