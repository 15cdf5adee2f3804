"""Runs on disk and in worker processes: one JSONL file per finished run, its first line saying what it is."""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from experiments.collapse.spec import Run


def path_of(run: Run, directory: Path) -> Path:
    return directory / f"{run.name}.jsonl"


def missing(wanted: Iterable[Run], directory: Path) -> list[Run]:
    """The runs without a finished record, in order, each once."""
    return [run for run in dict.fromkeys(wanted) if not path_of(run, directory).exists()]


def execute(run: Run, directory: Path) -> None:
    """Make one run. Its file appears when it is complete; until then what there is ends in `.unfinished`."""
    import torch
    import transformers
    from experiments.collapse import loop

    torch.set_num_threads(1)
    weights = loop.warmed_up(run, directory / "warm-up")
    path = path_of(run, directory)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", buffering=1) as file:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": _processor()}
        file.write(json.dumps({"run": run.to_dict(), "versions": versions}) + "\n")
        for record in loop.train(run, weights):
            file.write(json.dumps(record) + "\n")
    unfinished.rename(path)


def execute_all(
    wanted: list[Run], directory: Path, workers: int, what: Callable[[Run, Path], None] = execute
) -> Iterator[tuple[Run, float, Exception | None]]:
    """Do `what` for each of `wanted` in worker processes, yielding the run when it ends, seconds since the start, and why it
    failed if it did."""
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # Forking a process that holds torch's threads is not safe.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(what, run, directory): run for run in wanted}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield futures[future], time.monotonic() - started, error
    finally:  # on Ctrl-C, what has not begun does not begin
        pool.shutdown(cancel_futures=True)


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load(directory: Path) -> list[tuple[Run, list[dict[str, Any]]]]:
    """Every finished run with its records."""
    out = []
    for path in sorted(directory.glob("*.jsonl")):
        head, *records = map(json.loads, path.read_text().splitlines())
        out.append((Run(**head["run"]), records))
    return out
