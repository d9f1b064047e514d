"""The watch over the other ranks: what each tells of itself, and whom it names; with real faults on four ranks."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.runtime import watch
from autopar.runtime.standing import Board, Standing, State, lost, place_on, verdict
from benchmarks.faults import try_fault
from benchmarks.faults_rank import FAULTS

WAITING = Standing(place="all_reduce", waits=True, for_s=60)
LOADING = Standing(place="data.py:3 (load)", for_s=60)
FAILED = Standing(state=State.FAILED, error="IndexError: 7")


def test_a_place_is_a_line_of_the_user_or_a_collective() -> None:
    here = f"{__file__}:{sys._getframe().f_lineno + 1} (test_a_place_is_a_line_of_the_user_or_a_collective)"
    assert place_on(sys._getframe(), {}) == (here, False)
    places = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        places.append(place_on(sys._getframe(1), {"spy": "all_gather"}))
        places.append(place_on(sys._getframe(1), {}))
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(spy, (graph.placeholder("x"),)))
    fx.GraphModule(torch.nn.Module(), graph)(torch.ones(1))
    (collective, user) = places
    assert collective == ("all_gather", True)
    assert user[0].startswith(f"{__file__}:")
    assert not user[1]


def test_a_board_keeps_what_each_rank_wrote() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, 3) for rank in range(3)]
    boards[0].write(WAITING)
    boards[2].write(FAILED)
    assert boards[1].read() == {0: WAITING, 2: FAILED}
    boards[0].write(LOADING)
    assert boards[2].read() == {0: LOADING}


@pytest.mark.parametrize(
    ("found", "silent", "words"),
    [
        ({0: WAITING, 1: FAILED}, [0], "rank 1 failed (IndexError: 7)"),
        ({0: LOADING, 1: Standing(state=State.ENDED, error="E: 1")}, [0], "rank 1 has left the job (E: 1)"),
        (
            {0: WAITING, 1: LOADING},
            [0],
            "rank 0 has given no sign of life for 3 s: its process or host is gone, or cut",
        ),
        ({0: WAITING, 1: Standing(state=State.ENDED)}, [1], "rank 1 has left the job"),
        ({0: WAITING, 1: LOADING}, [], "rank 1 is at data.py:3 (load), for 60 s"),
        ({0: WAITING, 1: Standing(state=State.IN_VAIN)}, [], "rank 0 waits in all_reduce, for 60 s"),
        ({1: WAITING}, [], "rank 0 never told what it does: it has not come to autopar yet, or its process or host is"),
        ({1: LOADING}, [], "rank 1 is at data.py:3 (load), for 60 s; rank 0 never told what it does"),
        (dict.fromkeys(range(9), LOADING), [], "rank 4 is at data.py:3 (load), for 60 s; and 4 ranks more"),
    ],
)
def test_the_verdict_names_who_is_missing(found: dict[int, Standing], silent: list[int], words: str) -> None:
    told = verdict(found, range(2), silent, 3)
    assert words in told
    assert ("no sign of life" in told) == ("no sign of life" in words)


def test_who_waits_beside_one_that_was_never_heard_is_not_named() -> None:
    assert "rank 1" not in verdict({1: WAITING}, range(2), [], 3)
    assert "rank 1" not in verdict({1: Standing(state=State.IN_VAIN)}, range(2), [], 3)


def test_a_rank_is_heard_of_at_once_and_one_that_is_not_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 2.0)
    store = dist.HashStore()
    watching = watch.Watch(1, Board(store, 1, 2))
    told: list[str] = []
    asking = threading.Thread(target=lambda: told.append(watching.verdict(RuntimeError("Read error. An advice"))))
    try:
        asking.start()
        late = watch.Watch(0, Board(store, 0, 2))  # well within a beat
        asking.join()
        late.close()
        assert told[0].startswith("rank 0 ")
        assert "never told" not in told[0]
        assert "gone" not in told[0]
        assert Board(store, 0, 2).read()[1].error == "RuntimeError: Read error"
    finally:
        watching.close()


def test_one_that_has_left_is_not_listened_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    board = Board(dist.HashStore(), 1, 2)
    monkeypatch.setattr(board, "read", lambda: reads.append(0) or {0: Standing(state=State.ENDED)})
    watching = watch.Watch(1, board)
    try:
        assert watching.verdict(RuntimeError("…")) == "rank 0 has left the job"
        assert len(reads) == 2  # not for three beats
    finally:
        watching.close()


def test_only_what_can_never_come_ends_a_wait() -> None:
    assert lost({0: WAITING, 1: LOADING, 2: Standing(state=State.ENDED)}, [], 30) == ""
    assert lost({0: WAITING, 1: Standing(state=State.IN_VAIN)}, [], 30) == "rank 1 waited in vain"
    assert lost({0: WAITING, 1: FAILED}, [], 30) == "rank 1 failed (IndexError: 7)"


def test_a_store_that_is_gone_is_told() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(dist.TCPStore("127.0.0.1", server.port, is_master=False), 0, 2)
    watching = watch.Watch(0, board)
    try:
        del server
        assert "the job's store cannot be reached" in watching.verdict(RuntimeError("…"))
    finally:
        watching.close()


class Relay:
    """Stands before a store, and can be cut: then it takes what is sent and gives nothing back, as a cut link does."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._there = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._run(self._accept)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(("127.0.0.1", self._there))
            self._run(self._pass_on, near, far)
            self._run(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        while sent := source.recv(1 << 16):
            if not self.cut.is_set():
                sink.sendall(sent)


def test_a_store_that_is_cut_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls never come back: neither the verdict nor a rank that waits may hang with them."""
    for name, seconds in {"BEAT_S": 0.05, "LOOK_S": 0.2, "SILENT_S": 0.5}.items():
        monkeypatch.setattr(watch, name, seconds)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(server.port)
    ends: list[tuple[str, str]] = []
    monkeypatch.setattr(watch.Watch, "_end_process", lambda self, *told: ends.append(told))
    monkeypatch.setattr(watch, "place_on", lambda frame, places: ("all_reduce", True))
    watching = watch.Watch(1, Board(dist.TCPStore("127.0.0.1", relay.port, is_master=False), 1, 2))
    try:
        assert "rank 0 never told what it does" in watching.verdict(RuntimeError("…"))
        relay.cut.set()
        assert "or this host is cut off from it" in watching.verdict(RuntimeError("…"))
        deadline = time.monotonic() + 60
        while not ends and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ends[0] == ("all_reduce", watching.verdict(RuntimeError("…")))
    finally:
        watching.close()


def ended(fault: str, directory: Path, timeout_s: float) -> dict[int, dict[str, Any]]:
    row = try_fault(fault, directory, timeout_s)
    assert row["left_over"] == 0
    assert row["checkpoint"] is not False
    others: dict[int, dict[str, Any]] = row["others"]
    return others


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    for end in ended("killed in backward", tmp_path, 60).values():
        assert end["error"] == "CollectiveError"
        assert "along mesh axis 'dp', of module " in end["message"]
        assert "): rank 2 has given no sign of life for 3 s: its process or host is gone" in end["message"]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    for end in ended("hangs in backward", tmp_path, 5).values():
        assert end["error"] == "CollectiveError"
        assert "Timed out waiting 5000ms" in end["message"]
        assert f"): rank 2 is at {FAULTS['hangs in backward'].act.__code__.co_filename}:" in end["message"]


def test_a_rank_that_meets_nan_is_named(tmp_path: Path) -> None:
    for end in ended("NaN stops", tmp_path, 60).values():
        assert end["error"] == "NanError"
        assert "the first NaN is that of rank 2: input '1'. " in end["message"]


def test_ranks_of_other_versions_are_refused(tmp_path: Path) -> None:
    for end in ended("other versions", tmp_path, 60).values():
        assert end["error"] == "InputError"
        assert "torch is " in end["message"]
        assert "2.0.0 on rank 2" in end["message"]


@pytest.mark.slow
def test_a_wait_for_one_that_failed_and_lingers_ends(tmp_path: Path) -> None:
    for end in ended("lingers", tmp_path, 600).values():
        assert end["after_s"] < 60
        assert "rank 2 failed (IndexError: index out of range in self (on rank 2, in aten.emb" in end["message"]


@pytest.mark.slow
def test_a_wait_for_a_frozen_host_ends(tmp_path: Path) -> None:
    others = ended("frozen", tmp_path, 600).values()
    for end in others:
        assert end["after_s"] < 120
        assert "rank 2 has given no sign of life for " in end["message"]
    # Who waits for the frozen rank itself ends its process; who waits for one of those may first hear of their end.
    assert any("life for 30 s" in end["message"] and end["error"] == "process ended" for end in others)


@pytest.mark.slow
def test_a_wait_for_the_frozen_host_of_the_store_ends(tmp_path: Path) -> None:
    for end in ended("first frozen", tmp_path, 600).values():
        assert end["after_s"] < 120
        assert "the job's store cannot be reached: the process or host of rank 0" in end["message"]
