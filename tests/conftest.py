"""Fixtures shared by all tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from serving.redis_server import RedisServer

_numbers = itertools.count()

# An example may take long where other work goes on: that says nothing of what is tested. A change is judged by the same examples
# each time; `make fuzz` draws new ones.
settings.register_profile("cachepilot", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("cachepilot")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One real Redis for the whole session; tests keep apart by :func:`namespace`."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the session's Redis."""
    return redis_server.url


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"
