"""A display that something is being done, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(what: str, progressbar: bool) -> Iterator[None]:
    """Show what is being done, and for how long."""
    bar = Progress(
        TextColumn(what),
        SpinnerColumn(finished_text=""),
        TimeElapsedColumn(),
        disable=not progressbar,
    )
    task = bar.add_task("", total=1.0)
    with bar:
        yield
        bar.update(task, completed=1.0)
