"""A run that is killed and resumed gives the losses of one that was not, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    found = soak(tmp_path, num_ranks=2, num_steps=25, num_kills=1)
    assert found["kills"] == 1
    assert found["equal"]
    assert found["last_loss"] < found["first_loss"]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    found = soak(tmp_path, num_ranks=4, num_steps=300, num_kills=8, seed=1)
    assert found["kills"] == 8
    assert found["repeated_steps"] > 0
    assert found["equal"]
