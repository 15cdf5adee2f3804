"""What one run is, and which runs a study asks for (`config.toml`)."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from experiments.collapse.arms import arm_named
from experiments.collapse.pocket import SHAPES

from tripoint.errors import UsageError
from tripoint.schedule import suggest

CONFIG = Path(__file__).with_name("config.toml")

GROUP_BASELINES = ("mean", "group")
"""Baselines other than a number: the mean reward over the samples of a prompt, and that with the difference divided by their
standard deviation (GRPO)."""


@dataclass(frozen=True)
class Run:
    """One training run. Two runs of the same `sft_seed` start from the same weights; two of the same `seed` also see the same
    prompts and the same random numbers when sampling.

    The advantage is r - `baseline`, with rewards r of 0 and 1: at 1 only failures count, at 0 only successes, and 0.5 means
    rewards of +-1 (up to a factor, which Adam ignores). `key_size`: see `pocket.initialise`.
    """

    arm: str
    sft_seed: int
    seed: int
    shape: str = "qwen2"
    key_size: float = 100.0
    baseline: float | str = 1.0
    lr: float = 1e-4
    updates: int = 400

    def __post_init__(self) -> None:
        arm_named(self.arm)
        for name in ("key_size", "baseline", "lr"):  # 1 and 1.0 are one setting, in a file's name and in the loop
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, float(value))
        if self.shape not in SHAPES:
            raise UsageError(f"unknown shape {self.shape!r}{suggest(self.shape, list(SHAPES))}")
        if isinstance(self.baseline, str) and self.baseline not in GROUP_BASELINES:
            raise UsageError(f"baseline={self.baseline!r}: give a number, {' or '.join(GROUP_BASELINES)}")

    @property
    def condition(self) -> str:
        """The arm with every setting that is not the default: runs of one condition differ in their seeds only."""
        settings = [
            f"{f.name}={value:g}" if isinstance(value, float) else f"{f.name}={value}"
            for f in fields(self)[3:]
            if (value := getattr(self, f.name)) != f.default
        ]
        return " ".join([self.arm, *settings])

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.condition} sft{self.sft_seed} seed{self.seed}".replace(" ", "_")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def studies(path: Path = CONFIG) -> dict[str, list[Run]]:
    """The runs of every study. Seeds turn slowest, so that what is there after half the time is balanced over arms.

    Raises UsageError for a setting that does not exist.
    """
    out = {}
    for name, table in tomllib.loads(path.read_text()).items():
        known = [*(f.name for f in fields(Run)), "seeds"]
        for key in table:
            if key not in known:
                raise UsageError(f"{path}: [{name}]: unknown setting {key!r}{suggest(key, known)}")
        out[name] = list(_expand(table))
    return out


def _expand(table: dict[str, Any]) -> Iterator[Run]:
    """Every combination of a study's settings, a list standing for several values. `seeds` holds pairs [sft_seed, seed]."""
    settings = {key: value if isinstance(value, list) else [value] for key, value in table.items() if key != "seeds"}
    for sft_seed, seed in table["seeds"]:
        for values in itertools.product(*settings.values()):
            yield Run(**dict(zip(settings, values, strict=True)), sft_seed=sft_seed, seed=seed)
