"""A watch over the other ranks: which of them is to blame when this one waits in vain.

A thread of each rank writes every second what the rank does into the job's key-value store.  Nothing is added to a
step: the thread looks at the stack of the one that computes.  What the others wrote is read when a collective fails,
and when this rank has waited for long.  PyTorch's collectives on CPUs cannot be broken off, so a rank that waits for
one that has failed, or is gone, ends its process, as NCCL's own watchdog does.

Nor can a call of the store be broken off, whose host may be cut off from this one: a second thread looks after the
first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from autopar._compat import job_store
from autopar.runtime.standing import Board, Places, Standing, State, first_line, first_sentence, lost, place_on, verdict

BEAT_S = 1.0
LOOK_S = 5.0
"""How long a rank waits before it looks at the others, and between two looks."""
SILENT_S = 30.0
"""A rank that wrote nothing for so long is taken for gone, if another waits for it."""

_UNREACHABLE = (
    "the job's store cannot be reached: the process or host of rank 0, or of the launcher, is gone, or this host is "
    "cut off from it"
)


class Watch:
    """This rank's part in watching; one for each process group, made by `watch_job`."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank, self._board = rank, board
        self._thread_id: int = threading.main_thread().ident or 0
        self._places: Places = {}
        self._state, self._error, self._num_turns = State.ALIVE, "", 0
        self._mine, self._at, self._since_s = Standing(), (0, ""), time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        self._looked_s = time.monotonic()
        self._suspected_at: tuple[int, str] | None = None
        self._asked_s: float | None = None
        self._awake, self._closed, self._pid = threading.Event(), threading.Event(), os.getpid()
        with suppress(RuntimeError):  # the thread meets it again
            board.write(self._mine)  # now: one that dies within the first beat has been heard of, and is silent
        self._thread = threading.Thread(target=self._run, name="autopar-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="autopar-watch-guard", daemon=True).start()

    def __deepcopy__(self, memo: object) -> Watch:
        """A copied module is watched over by the one watch that a process group has."""
        return self

    @contextmanager
    def running(self, places: Places) -> Iterator[None]:
        """While active, this thread runs a compiled graph with these collectives; an error is told to the others."""
        before = self._thread_id, self._places
        self._thread_id, self._places = threading.get_ident(), places
        self.takes_part()
        try:
            yield
        except BaseException as error:
            self._tell(State.FAILED, error)
            raise
        finally:
            self._thread_id, self._places = before

    def takes_part(self) -> None:
        """This rank begins something with the others: whatever failed before, it goes on."""
        self._state, self._error, self._num_turns = State.ALIVE, "", self._num_turns + 1

    def verdict(self, error: BaseException) -> str:
        """Whom this rank waited for in vain until PyTorch raised `error`, in words; takes up to three beats, in which
        the others are to be heard, and a look more where the store does not answer."""
        self._tell(State.IN_VAIN, error)
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.append(self._ask()), name="autopar-watch-ask", daemon=True)
        asking.start()
        asking.join(3 * BEAT_S + LOOK_S)
        if self._rank == 0:
            time.sleep(BEAT_S)  # the store may be in this process, and the others read it, too
        return told[0] if told else _UNREACHABLE

    def _ask(self) -> str:
        """Read the others until somebody has failed or everybody was heard, or for three beats; the verdict."""
        deadline = time.monotonic() + 3 * BEAT_S
        try:
            first = self._board.read()
            while True:
                found = self._board.read()
                silent = [
                    rank
                    for rank, other in found.items()
                    if other.state is State.ALIVE and rank in first and other.beat == first[rank].beat
                ]
                all_heard = not silent and len(found) == len(self._board.others)
                if any(other.failed for other in found.values()) or all_heard or time.monotonic() > deadline:
                    return verdict(found, self._board.others, silent, 3 * BEAT_S)
                time.sleep(BEAT_S / 5)
        except RuntimeError:
            return _UNREACHABLE

    def close(self) -> None:
        """Tell that this rank has left, and why, and end the thread."""
        if os.getpid() == self._pid:  # and not in a child that was forked
            self._tell(State.ENDED, getattr(sys, "last_value", None))
            self._closed.set()
            self._awake.set()
            self._thread.join(2 * BEAT_S)

    def _tell(self, state: State, error: BaseException | None) -> None:
        if self._state is State.ALIVE:  # what came first counts
            says = first_sentence if state is State.IN_VAIN else first_line
            self._state, self._error = state, "" if error is None else f"{type(error).__name__}: {says(error)}"
        self._awake.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._awake.wait(BEAT_S)
            self._awake.clear()
            self._mine = mine = self._standing()
            looks = mine.waits and mine.for_s >= LOOK_S and time.monotonic() - self._looked_s >= LOOK_S
            self._asked_s = time.monotonic()
            try:
                self._board.write(mine)
                missing = self._missing() if looks else ""
            except RuntimeError:
                missing = _UNREACHABLE
            self._asked_s = None
            if looks:
                self._looked_s = time.monotonic()
                if missing and self._suspected_at == self._at:
                    self._give_up(missing)
                self._suspected_at = self._at if missing else None

    def _guard(self) -> None:
        """End the process if it waits while the store, whose answers cannot be waited for with an end, is silent."""
        before = None
        while not self._closed.wait(LOOK_S):
            place, waits = self._place()
            at = (self._num_turns, place) if waits else None
            asked_s = self._asked_s
            if at and at == before and asked_s is not None and time.monotonic() - asked_s >= SILENT_S:
                self._end_process(place, _UNREACHABLE)
            before = at

    def _place(self) -> tuple[str, bool]:
        return place_on(sys._current_frames().get(self._thread_id), self._places)

    def _standing(self) -> Standing:
        now_s = time.monotonic()
        place, waits = self._place()
        if self._at != (self._num_turns, place):
            self._at, self._since_s = (self._num_turns, place), now_s
        for_s = int(now_s - self._since_s)
        return Standing(self._mine.beat + 1, place, waits, for_s, self._state, self._error)

    def _missing(self) -> str:
        """Which ranks will never come, in words."""
        found, now_s = self._board.read(), time.monotonic()
        for rank, other in found.items():
            if self._heard.get(rank, (0, 0.0))[0] != other.beat:
                self._heard[rank] = other.beat, now_s
        silent = [rank for rank in found if now_s - self._heard[rank][1] >= SILENT_S]
        return lost(found, silent, SILENT_S)

    def _give_up(self, missing: str) -> NoReturn:
        self._tell(State.IN_VAIN, None)
        with suppress(RuntimeError):
            self._board.write(self._standing())
        self._end_process(self._mine.place, missing)

    def _end_process(self, place: str, missing: str) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.write(
            f"autopar: rank {self._rank} waits in vain in {place}: {missing}. This process ends, for the "
            "collective cannot be broken off. End all ranks, and resume from the last checkpoint\n"
        )
        sys.stderr.flush()
        if self._rank == 0:
            time.sleep(2 * LOOK_S)  # the store may be in this process, and the others read it, too
        os._exit(1)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def watch_job() -> Watch | None:
    """The watch over the ranks of the default process group; None where there are no others."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    if dist.get_backend() == "fake" or group is None:
        return None
    if group not in _watches:
        rank = dist.get_rank()
        _watches[group] = Watch(rank, Board(job_store(), rank, dist.get_world_size()))
        weakref.finalize(group, _watches[group].close)  # when it is destroyed, or the program ends
    return _watches[group]
