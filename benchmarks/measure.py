"""Interleaved timing, memory counting, and the record of a run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the rounds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.lower:.3f}, {self.upper:.3f}]"


@dataclass(frozen=True)
class Comparison:
    """Aligned against unaligned: seconds or bytes of both, and their ratio (of each round's two, where there are rounds)."""

    name: str
    unit: str
    unaligned: Spread
    aligned: Spread
    ratio: Spread
    rounds: int
    at_most: float

    @property
    def holds(self) -> bool:
        return self.ratio.median <= self.at_most

    def row(self) -> str:
        scale, unit = (1e3, "ms") if self.unit == "seconds" else (2**-20, "MiB")
        cells = (
            self.name,
            f"{scale * self.unaligned.median:.1f} {unit}",
            f"{scale * self.aligned.median:.1f} {unit}",
            str(self.ratio) if self.rounds > 1 else f"{self.ratio.median:.3f}",
            f"{self.at_most:.2f}",
            "yes" if self.holds else "no",
        )
        return f"| {' | '.join(cells)} |"


def count(name: str, unaligned: int, aligned: int, at_most: float) -> Comparison:
    """A comparison of bytes, which do not vary."""
    before, after, ratio = (Spread(x, x, x) for x in (unaligned, aligned, aligned / unaligned))
    return Comparison(name, "bytes", before, after, ratio, rounds=1, at_most=at_most)


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int, warmups: int = 1) -> dict[str, list[float]]:
    """Seconds of every run in every round. The runs of a round follow each other directly and change places every round, so
    that whatever else the machine does hits all of them alike."""
    for _ in range(warmups):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        names = list(runs)
        for name in names if number % 2 == 0 else reversed(names):
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(
    name: str, unaligned: Callable[[], object], aligned: Callable[[], object], rounds: int, at_most: float
) -> Comparison:
    """Wall time of `aligned` over `unaligned`."""
    seconds = interleaved({"unaligned": unaligned, "aligned": aligned}, rounds)
    ratios = [a / u for a, u in zip(seconds["aligned"], seconds["unaligned"], strict=True)]
    before, after, ratio = (Spread.of(values) for values in (seconds["unaligned"], seconds["aligned"], ratios))
    return Comparison(name, "seconds", before, after, ratio, rounds=rounds, at_most=at_most)


def saved_bytes(forward: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """Bytes that `forward` keeps for its backward pass: every storage once, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storages.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """Largest number of bytes that PyTorch's CPU allocator held during `run` beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class Row(Protocol):
    """What a record holds: a dataclass that prints itself as a row of a table."""

    @property
    def holds(self) -> bool: ...

    def row(self) -> str: ...


@dataclass
class Record:
    """A run: where, with what, and what came out. `header` heads the table of `rows`."""

    title: str
    command: str
    settings: dict[str, Any]
    header: tuple[str, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = {"processor": _processor(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
        for package in ("torch", "transformers", "triton", "liger-kernel"):
            try:
                self.versions[package] = version(package)
            except PackageNotFoundError:
                continue
        self.versions["python"] = platform.python_version()

    @property
    def holds(self) -> bool:
        return all(row.holds for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.row(), flush=True)

    def write(self, path: Path) -> None:
        """`path`.json and `path`.md."""
        self.machine["load_at_end"] = os.getloadavg()[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        lines = [f"# {self.title}", "", f"`{self.command}`", ""]
        for part in (self.settings, self.machine, self.versions):
            lines.append("- " + ", ".join(f"{key} {value}" for key, value in part.items()))
        lines += ["", *self.header, *(row.row() for row in self.rows)]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


HEADER = (
    "| | unaligned | aligned | ratio, median [quartiles] | goal | reached |",
    "|---|---|---|---|---|---|",
)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
