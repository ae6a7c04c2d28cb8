"""One suite for every link to a neighbour; over RDMA it runs where there is a device (tests/rdma)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.neighbour_checks import CHECKS, Bench


@pytest.mark.parametrize("checked", CHECKS, ids=lambda checked: checked.__name__)
async def test_tcp(checked: Callable[[Bench], Awaitable[None]], tmp_path: Path) -> None:
    await checked(Bench(tmp_path))
