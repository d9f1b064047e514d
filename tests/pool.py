"""A pool of gloo ranks: processes started once and reused by every test that needs several of them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autopar._compat import forget_meshes

_START_S = 300.0  # importing torch several times at once on a busy machine


class RankError(AssertionError):
    """A function failed on some rank, or a rank gave no answer in time; the text has the tracebacks."""


class RankPool:
    """`num_ranks` processes with a gloo process group, waiting for functions to run."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._store: dist.TCPStore | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank; returns the results in rank order.

        `function` must be importable by module and name, and results must pickle.  After a failure, or `timeout_s`
        after the ranks began, the processes are ended, so a rank that hangs does not reach the next test.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(job)
        answers = self._collect(timeout_s)
        failures = [f"--- rank {rank} ---\n{answer[1]}" for rank, answer in answers.items() if not answer[0]]
        silent = [rank for rank in range(self.num_ranks) if rank not in answers]
        if failures or silent:
            self.close()
            missing = f"\nranks {silent} gave no answer and were ended" if silent else ""
            raise RankError(f"{function.__module__}.{function.__qualname__} failed\n" + "\n".join(failures) + missing)
        return [answers[rank][1] for rank in range(self.num_ranks)]

    def _collect(self, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        while ranks and time.monotonic() < deadline:
            for ready in wait(list(ranks), timeout=max(0.0, deadline - time.monotonic())):
                rank = ranks.pop(ready)  # type: ignore[call-overload]
                try:
                    answers[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, f"the process ended with exit code {self._processes[rank].exitcode}")
                if not answers[rank][0]:  # the others may wait for this one: leave them a moment to say so
                    deadline = min(deadline, time.monotonic() + 3.0)
        return answers

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            arguments = (rank, self.num_ranks, self._store.port, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _environment(OMP_NUM_THREADS="1"):
                process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        answers = self._collect(_START_S)
        if len(answers) < self.num_ranks or not all(ok for ok, _ in answers.values()):
            self.close()
            raise RankError(f"the ranks did not start: {answers}")

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
            connection.close()
        for process in self._processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections, self._store = [], [], None


def _serve(rank: int, num_ranks: int, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send_bytes(pickle.dumps((True, "started")))
    with contextlib.suppress(EOFError):
        for number in itertools.count():
            job = connection.recv_bytes()
            if dist.is_initialized():
                dist.destroy_process_group()  # only now, when every rank has answered and needs no other any more
                forget_meshes()
            if not job:
                return
            # Groups of its own for each job: every group has threads, which stay as long as the default group does.
            # Keys of its own: those of the job before hold the addresses of its groups.
            _join(dist.PrefixStore(f"job {number}", store), rank, num_ranks)
            try:
                function, args = pickle.loads(job)
                answer = pickle.dumps((True, function(*args)))
            except BaseException:  # noqa: BLE001 (it travels to the test as text)
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)


def _join(store: dist.Store, rank: int, num_ranks: int) -> None:
    """Make the default process group.  It waits less long than the pool, so that a rank left alone says where."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))


@contextlib.contextmanager
def _environment(**variables: str) -> Any:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
