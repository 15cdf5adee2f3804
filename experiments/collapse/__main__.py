"""The command: makes the runs that are missing, then writes the report of all there are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, no_args_is_help=True)

Runs = Annotated[Path, typer.Option(help="Where runs are kept, one file each.")]
Results = Annotated[Path, typer.Option(help="Where the report goes.")]


@app.command()
def run(
    study: Annotated[list[str], typer.Argument(help="Studies of config.toml, in this order.")],
    workers: Annotated[int, typer.Option(help="Processes, one core each.")] = os.cpu_count() or 1,
    runs: Runs = HERE / "runs",
    results: Results = HERE / "results",
) -> None:
    """Make the runs of STUDY... that are not there yet, and report. Start it again to go on where it was stopped."""
    # One thread per worker: read by OpenMP when a worker imports torch.
    os.environ["OMP_NUM_THREADS"] = "1"
    from experiments.collapse.records import execute_all, missing
    from experiments.collapse.spec import studies

    from tripoint.errors import UsageError
    from tripoint.schedule import suggest

    try:
        known = studies()
        for name in study:
            if name not in known:
                raise UsageError(f"unknown study {name!r}{suggest(name, list(known))}")
    except UsageError as mistake:
        print(mistake, file=sys.stderr)
        raise typer.Exit(2) from None
    wanted = missing([one for name in study for one in known[name]], runs)
    failures = 0
    for done, (finished, seconds, error) in enumerate(execute_all(wanted, runs, workers), start=1):
        failures += error is not None
        outcome = "done" if error is None else f"failed: {type(error).__name__}: {error}"
        print(f"{done}/{len(wanted)} {seconds:7.0f} s  {finished.name}: {outcome}", file=sys.stderr)
    report(runs, results)
    if failures:
        raise typer.Exit(3)


@app.command()
def report(runs: Runs = HERE / "runs", results: Results = HERE / "results") -> None:
    """Write the report of the runs that are there."""
    from experiments.collapse.records import load
    from experiments.collapse.report import write_report

    finished = load(runs)
    if not finished:
        print(f"{runs} holds no finished run; make some with `python -m experiments.collapse run quick`", file=sys.stderr)
        raise typer.Exit(3)
    print(write_report(finished, results))


if __name__ == "__main__":
    app()
