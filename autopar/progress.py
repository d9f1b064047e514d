"""What goes on, for how long, on the terminal: for work of more than a second, and nowhere else than on a terminal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DELAY_S = 1.0
"""Work that is done sooner is not shown."""

Say = Callable[[str], None]
"""Told what goes on now, in a few words."""


def silent(words: str) -> None:
    """A `Say` that shows nothing."""


@contextmanager
def progress(shown: bool = True) -> Iterator[Say]:
    """While active, shows on standard error what the function that it gives was told last, and for how long.

    Nothing is shown unless standard error is a terminal, nor where the environment has `CI`, or `AUTOPAR_PROGRESS=0`.

    Args:
        shown: False to show nothing in any case.
    """
    console = Console(stderr=True)
    if not shown or not console.is_terminal or os.environ.get("CI") or os.environ.get("AUTOPAR_PROGRESS") == "0":
        yield silent
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    # What others print stays theirs: a display that takes it over would give it back to the wrong stream.
    display = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = display.add_task("", total=None)
    timer = threading.Timer(DELAY_S, display.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda words: display.update(task, description=words)
    finally:
        timer.cancel()
        timer.join()  # it may be about to start the display
        display.stop()


__all__ = ["Say", "progress", "silent"]
