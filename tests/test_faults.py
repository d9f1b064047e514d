"""The table of faults with ranks on emulated hosts; a script stands in for the tool that emulates them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.netlab import Hosts

HOSTS = """\
import os, socket, subprocess, sys

flags, program = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
joined = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
ranks = [subprocess.Popen(program, env={**os.environ, **joined, "RANK": str(rank)}) for rank in range(4)]
for rank in ranks:
    rank.wait()
"""


def emulator(directory: Path, text: str) -> Hosts:
    """Two hosts of two ranks by a script with this text."""
    path = directory / "emulator"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return Hosts(str(path), 2, 2, "none")


def empty(directory: Path) -> Path:
    (directory / "row").mkdir()
    return directory / "row"


def test_the_command_says_where_ranks_run(tmp_path: Path) -> None:
    program = ["-m", "program", "--flag"]
    assert Hosts("netlab", 3, 2, "1gbit", real_time=True).command(program, "--grace", "9") == [
        "netlab", "run", "--hosts", "3", "--ranks-per-host", "2", "--rate", "1gbit", "--rt", "--grace", "9",
        "--", sys.executable, *program,
    ]  # fmt: skip


def test_hosts_that_cannot_be_emulated_are_told(tmp_path: Path) -> None:
    hosts = emulator(tmp_path, "raise SystemExit('needs root')")
    with pytest.raises(RuntimeError, match="emulator ended with 1: needs root"):
        faults.try_fault("killed", empty(tmp_path), 60, hosts)


def test_links_fail_between_hosts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["faults", "--only", "killed,link cut", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit):
        faults.main()
    assert "links fail between hosts only: give --netlab" in capsys.readouterr().err


def test_a_process_of_anyone_is_seen_to_end_and_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os.read(os.pipe()[0], 1)  # for ever
    process = faults.Process(pid)
    assert not process.ended()
    process.kill()
    os.waitpid(pid, 0)
    assert process.ended()
    assert faults.Process(pid).ended()  # which is gone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("user error", {"CollectiveError", "process ended"}, "rank 2 has left the job (ValueError: a record of the "),
        ("other shape", {"BatchError"}, "is i64[4] on ranks 0-1, 3, i64[3] on rank 2"),
    ],
)
def test_programs_on_hosts_end_when_one_has_failed(fault: str, error: set[str], message: str, tmp_path: Path) -> None:
    row = faults.try_fault(fault, empty(tmp_path), 60, emulator(tmp_path, HOSTS))
    assert row["left_over"] == 0
    assert row["checkpoint"] is True
    assert sorted(row["others"]) == [0, 1, 3]
    for end in row["others"].values():
        assert end["error"] in error
        assert message in end["message"]
