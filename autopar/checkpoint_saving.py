"""A save of a checkpoint that goes on in a thread of its own."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path


class Saving:
    """A checkpoint that is being written, or has been.

    A failure that nobody asked for, by `wait` or the next save, is told when the program ends.  Until then the program
    waits for it: what was begun is written.

    Attributes:
        path: the directory of the checkpoint.
    """

    # PyTorch's `async_save` is not used: it returns before the directory gets its name, and its stagers and executors
    # are for tensors that it knows.

    def __init__(self, path: Path, write: Callable[[], None], wait: bool) -> None:
        """Run `write`, now with `wait`, else in a thread."""
        self.path, self._asked = path, False
        self._future: Future[None] | None = None
        if wait:
            write()
            return
        executor = ThreadPoolExecutor(1, thread_name_prefix="autopar-save")
        self._future = executor.submit(write)
        executor.shutdown(wait=False)
        atexit.register(self.wait)

    def done(self) -> bool:
        """Whether it has ended, well or not, on this rank."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is complete and has its name.

        Raises:
            CheckpointError: on every rank, if it could not be written; the checkpoint that was there is as it was.
        """
        self._asked = True
        if self._future is not None:
            atexit.unregister(self.wait)
            self._future.result()

    def finish(self) -> None:
        """As `wait`, but what a `wait` has told is not told again."""
        if not (self._asked and self.done()):
            self.wait()
