"""Progress bars on stderr, so that stdout holds nothing but results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def stage(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show one stretch of long work: a bar over `total` sequences, or a spinner where `total` is 0.

    Yields what to call with the number of sequences just finished. Where stderr is no terminal, one line when it is done.
    """
    count = (BarColumn(), MofNCompleteColumn()) if total else ()
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), *count, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total or None)
        yield lambda done: progress.advance(task, done)
        progress.update(task, total=max(total, 1), completed=max(total, 1))
