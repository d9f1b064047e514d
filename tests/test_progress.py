"""What is shown while planning: on a terminal, after a second, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.progress import progress, silent

ROOT = Path(__file__).parent.parent

WORK = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("shown", "autopar/progress.py")  # without torch, which takes seconds
shown = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shown)
shown.DELAY_S = float(sys.argv[1])
with shown.progress(shown=sys.argv[2] == "shown") as say:
    say("searching: 7 plans simulated")
    time.sleep(0.5)
    print("the answer")
"""


def on_terminal(delay_s: float, *, shown: bool = True, **environment: str) -> tuple[str, str]:
    """What work of half a second writes to a pipe as its standard output, and to a terminal as its standard error."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "AUTOPAR_PROGRESS")}
    command = [sys.executable, "-c", WORK, str(delay_s), "shown" if shown else "quiet"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, env={**clean, "TERM": "xterm", **environment}, check=True,
        text=True, cwd=ROOT,
    )  # fmt: skip
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # the other end is closed: that is how a terminal says so
        pass
    os.close(ours)
    return done.stdout, written.decode()


def test_a_terminal_shows_what_goes_on_and_the_answer_stays_apart() -> None:
    out, err = on_terminal(0.05)
    assert out == "the answer\n"
    assert "searching: 7 plans simulated" in err
    assert "0:00:00" in err


def test_quick_work_shows_nothing() -> None:
    assert on_terminal(60.0) == ("the answer\n", "")


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"AUTOPAR_PROGRESS": "0"}])
def test_the_environment_can_forbid_it(environment: dict[str, str]) -> None:
    assert on_terminal(0.05, **environment) == ("the answer\n", "")


def test_a_flag_can_forbid_it() -> None:
    assert on_terminal(0.05, shown=False) == ("the answer\n", "")


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as say:
        assert say is silent
    assert capsys.readouterr().err == ""


def test_a_failure_ends_the_display() -> None:
    with pytest.raises(ValueError, match="mine"), progress():
        raise ValueError("mine")
