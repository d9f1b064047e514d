"""What each rank does right now, as it tells the others: read off a stack, kept in the job's key-value store."""

from __future__ import annotations

import enum
import json
import linecache
import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

Places = Mapping[str, str]
"""Name of a node of a compiled graph -> its collective in words."""

_SOURCE = re.compile(r"\[\S+\.\w+:\d+\] ")
"""A place in PyTorch's own C++ sources, with which messages of gloo begin."""

_TALKS = ("distributed_c10d.py", "_functional_collectives.py")
"""Files of PyTorch in which a thread waits for other ranks."""
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"])


class State(str, enum.Enum):
    """Whether a rank takes part."""

    ALIVE = "alive"
    FAILED = "failed"
    IN_VAIN = "waited in vain"
    """It failed because another one did."""
    ENDED = "ended"


@dataclass(frozen=True)
class Standing:
    """What a rank does.

    Attributes:
        beat: counts up while its process lives.
        place: the collective that it waits in, or a line of the user's code.
        waits: whether it waits for other ranks.
        for_s: how long it has been there.
        state: whether it takes part.
        error: why not, in a line.
    """

    beat: int = 0
    place: str = ""
    waits: bool = False
    for_s: int = 0
    state: State = State.ALIVE
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended by an error of its own."""
        return self.state is State.FAILED or (self.state is State.ENDED and bool(self.error))

    @property
    def words(self) -> str:
        """For the end of a sentence that begins with the rank."""
        if self.state in (State.FAILED, State.IN_VAIN):
            return f"{self.state.value} ({self.error})" if self.error else self.state.value
        if self.state is State.ENDED:
            return f"has left the job{f' ({self.error})' if self.error else ''}"
        return f"{'waits in' if self.waits else 'is at'} {self.place}, for {self.for_s} s"


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error of PyTorch's; what follows it there is advice."""
    return first_line(error).partition(". ")[0]


def first_line(error: BaseException) -> str:
    """What an error says first, in at most 300 characters, without the places in PyTorch's own sources."""
    return _SOURCE.sub("", str(error).strip().partition("\n")[0])[:300]


def place_on(frame: FrameType | None, places: Places) -> tuple[str, bool]:
    """Where a thread is, in words, and whether it waits there for other ranks.

    Args:
        frame: the innermost one.
        places: the collectives of the compiled graph that the thread may be in.
    """
    here, waits = "", False
    while frame is not None:
        file = frame.f_code.co_filename
        name = node_at(file, frame.f_lineno)
        if name in places:
            return places[name], True
        waits = waits or file.endswith(_TALKS)
        if not here and not file.startswith((*_LIBRARIES, "<")):
            here = f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return here or "code of a library", waits


def node_at(file: str, line_number: int) -> str:
    """The node of a compiled graph that a line of its code computes; empty if the file is none of a graph."""
    if not file.startswith("<eval_with_key>"):
        return ""
    return linecache.getline(file, line_number).partition("=")[0].partition(":")[0].strip()


class Board:
    """What each rank last wrote of itself.

    Raises:
        RuntimeError: from its methods, if the store cannot be reached.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank = store, rank
        self.others = [other for other in range(num_ranks) if other != rank]
        self._written: set[int] = set()

    def write(self, standing: Standing) -> None:
        """Tell the others."""
        self._store.set(_key(self._rank), json.dumps(asdict(standing)))

    def read(self) -> dict[int, Standing]:
        """What the others wrote; those that never did are left out."""
        self._written |= {rank for rank in self.others if rank not in self._written and self._store.check([_key(rank)])}
        ranks = sorted(self._written)
        texts = self._store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        found = (json.loads(text) for text in texts)
        return {rank: Standing(**{**one, "state": State(one["state"])}) for rank, one in zip(ranks, found, strict=True)}


def _key(rank: int) -> str:
    return f"autopar/standing/{rank}"


def lost(found: Mapping[int, Standing], silent: Iterable[int], silent_s: float) -> str:
    """Which ranks will never come, in words; empty if none is known to be lost."""
    failed = {rank: other for rank, other in found.items() if other.failed}
    in_vain = {rank: other for rank, other in found.items() if other.state is State.IN_VAIN}
    gone = _gone(found, silent, silent_s)
    return _listed([*_told(failed), *gone] or _told(in_vain))


def verdict(found: Mapping[int, Standing], others: Iterable[int], silent: Iterable[int], silent_s: float) -> str:
    """Whom a rank waits for in vain, in words: those that failed; else those that are gone; else those that are
    elsewhere; and those that were never heard.  Only if there are none of these, all that take part."""
    failed = {rank: other for rank, other in found.items() if other.failed}
    ended = {rank: other for rank, other in found.items() if other.state is State.ENDED}
    alive = {rank: other for rank, other in found.items() if other.state is State.ALIVE}
    elsewhere = {rank: other for rank, other in alive.items() if not other.waits}
    gone = [*_gone(found, silent, silent_s), *_told(ended)]
    never = "never told what it does: it has not come to autopar yet, or its process or host is gone"
    unheard = [f"rank {rank} {never}" for rank in others if rank not in found]
    return _listed([*(_told(failed) or gone or _told(elsewhere)), *unheard] or _told(alive or found))


def _gone(found: Mapping[int, Standing], silent: Iterable[int], silent_s: float) -> list[str]:
    words = f"has given no sign of life for {silent_s:.0f} s: its process or host is gone, or cut off"
    return [f"rank {rank} {words}" for rank in silent if found[rank].state is State.ALIVE]


def _told(found: Mapping[int, Standing]) -> list[str]:
    return [f"rank {rank} {other.words}" for rank, other in found.items()]


def _listed(told: list[str]) -> str:
    return "; ".join(told[:5]) + (f"; and {len(told) - 5} ranks more" if len(told) > 5 else "")
