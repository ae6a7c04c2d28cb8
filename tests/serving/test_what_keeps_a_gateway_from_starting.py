"""What keeps a gateway from starting is told in words, with what can be done about it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from serving import app
from serving.settings import GatewaySettings


def test_a_ray_that_does_not_come_up_is_told_of_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def times_out(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", times_out)
    monkeypatch.setattr(app, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(app, "_short_temporary", lambda: str(tmp_path))
    settings = GatewaySettings.model_validate({"port": 0, "metrics_port": 0})
    expected = "Ray did not start on this machine: The current node timed out during startup"
    with pytest.raises(app.GatewayNotStarted, match=expected), contextlib.ExitStack() as stack:
        stack.enter_context(app.start(settings))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
def test_a_port_in_use_is_told_of_with_its_setting(setting: str) -> None:
    with socket.create_server(("0.0.0.0" if setting == "metrics_port" else "127.0.0.1", 0)) as taken:
        settings = GatewaySettings.model_validate({"port": 0, "metrics_port": 0, setting: taken.getsockname()[1]})
        with pytest.raises(app.PortInUse, match=f"choose another gateway.{setting} "), app.start(settings):
            pass
