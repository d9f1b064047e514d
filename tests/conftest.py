"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pool import RankPool

os.environ["AUTOPAR_CACHE"] = "0"  # tests plan anew, in the processes that they start too


@pytest.fixture(scope="session")
def gloo2() -> Iterator[RankPool]:
    """Two gloo ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gloo4() -> Iterator[RankPool]:
    """Four gloo ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()
