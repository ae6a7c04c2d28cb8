"""What keeps a gateway from starting is told in words, with what can be done about it."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving import app, memory
from serving.settings import GatewaySettings


def _start_with_a_ray_that_times_out(folder: Path) -> str:
    """Start a gateway; returns what is said of it."""
    import ray

    def times_out(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as stack:
        patched.setattr(ray, "init", times_out)
        patched.setattr(memory, "SHARED_MEMORY", folder)
        patched.setattr(app, "_short_temporary", lambda: str(folder))
        try:
            stack.enter_context(app.start(GatewaySettings.model_validate({"port": 0, "metrics_port": 0})))
        except app.GatewayNotStarted as error:
            return str(error)
    return "it started"


def test_a_ray_that_does_not_come_up_is_told_of_and_leaves_nothing(tmp_path: Path) -> None:
    # In a process of its own: this one may have a Ray already, of other tests.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        said = pool.submit(_start_with_a_ray_that_times_out, tmp_path).result()
    assert "Ray did not start on this machine: The current node timed out during startup" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
def test_a_port_in_use_is_told_of_with_its_setting(setting: str) -> None:
    with socket.create_server(("0.0.0.0" if setting == "metrics_port" else "127.0.0.1", 0)) as taken:
        settings = GatewaySettings.model_validate({"port": 0, "metrics_port": 0, setting: taken.getsockname()[1]})
        with pytest.raises(app.PortInUse, match=f"choose another gateway.{setting} "), app.start(settings):
            pass
