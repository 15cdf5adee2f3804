"""The command: makes the runs that are missing, then writes the report of all there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from experiments.collapse.spec import Run, studies

from tripoint.errors import UsageError
from tripoint.schedule import suggest

HERE = Path(__file__).parent
CORES = os.cpu_count() or 1
app = typer.Typer(add_completion=False, no_args_is_help=True)

Runs = Annotated[Path, typer.Option(help="Where runs are kept, one file each.")]
Workers = Annotated[int, typer.Option(help="Processes, one core each.")]
Results = Annotated[Path, typer.Option(help="Where the report goes.")]


@app.command()
def run(
    study: Annotated[list[str], typer.Argument(help="Studies of config.toml, in this order.")],
    workers: Workers = CORES,
    runs: Runs = HERE / "runs",
    results: Results = HERE / "results",
) -> None:
    """Make the runs of STUDY... that are not there yet, and report. Start it again to go on where it was stopped."""
    from experiments.collapse.records import execute, missing

    complete = _execute_all(missing(_runs_of(study), runs), runs, workers, execute)
    report(runs, results)
    if not complete:
        raise typer.Exit(3)


@app.command()
def bias(
    study: Annotated[list[str], typer.Argument(help="Studies of config.toml.")],
    workers: Workers = CORES,
    runs: Runs = HERE / "runs",
    results: Results = HERE / "results",
) -> None:
    """Measure the systematic bias of the gradient at the start of the runs of STUDY... and report."""
    from experiments.collapse.mechanism import bias_path, execute

    # That of `all` is zero.
    wanted = [one for one in dict.fromkeys(_runs_of(study)) if one.arm != "all" and not bias_path(one, runs).exists()]
    complete = _execute_all(wanted, runs, workers, execute)
    report(runs, results)
    if not complete:
        raise typer.Exit(3)


@app.command()
def report(runs: Runs = HERE / "runs", results: Results = HERE / "results") -> None:
    """Write the report of the runs that are there."""
    from experiments.collapse.mechanism import mechanism_report
    from experiments.collapse.records import load
    from experiments.collapse.report import write_report

    finished = load(runs)
    if not finished:
        print(f"{runs} holds no finished run; make some with `python -m experiments.collapse run quick`", file=sys.stderr)
        raise typer.Exit(3)
    print(write_report(finished, results))
    if mechanism := mechanism_report(finished, runs):
        (results / "mechanism.md").write_text(mechanism)
        print(mechanism)


def _runs_of(names: list[str]) -> list[Run]:
    try:
        known = studies()
        for name in names:
            if name not in known:
                raise UsageError(f"unknown study {name!r}{suggest(name, list(known))}")
    except UsageError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None
    return [one for name in names for one in known[name]]


def _execute_all(wanted: list[Run], directory: Path, workers: int, what: Callable[[Run, Path], None]) -> bool:
    """Do `what` for every run, with a line for each; whether all succeeded."""
    from experiments.collapse.records import execute_all

    # One thread per worker: read by OpenMP when a worker imports torch.
    os.environ["OMP_NUM_THREADS"] = "1"
    failures = 0
    for done, (finished, seconds, error) in enumerate(execute_all(wanted, directory, workers, what), start=1):
        failures += error is not None
        outcome = "done" if error is None else f"failed: {type(error).__name__}: {error}"
        print(f"{done}/{len(wanted)} {seconds:7.0f} s  {finished.name}: {outcome}", file=sys.stderr, flush=True)
    return not failures


if __name__ == "__main__":
    app()
