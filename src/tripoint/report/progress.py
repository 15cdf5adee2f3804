"""Progress bars on stderr, so that stdout holds nothing but results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def stage(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over one stretch of long work on `total` sequences. Yields what to call with the number just finished.

    Where stderr is no terminal, one line when the work is done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
