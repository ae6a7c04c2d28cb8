"""Ports for what is told beforehand where to listen are nobody else's until it does."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from serving import ports


def test_ports_differ_and_can_be_listened_on_and_are_none_of_the_systems_choice() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    given = [ports.free_port() for _ in range(50)]
    assert len(set(given)) == 50
    for port in given:
        with socket.create_server(("127.0.0.1", port)):
            assert not first <= port <= last


def test_ports_that_ray_serve_gives_its_replicas_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT, not imported: Ray would read its environment here, too early for other tests."""
    monkeypatch.setattr("serving.ports.random.randrange", lambda first, end: end - 1)
    monkeypatch.setattr(ports, "_given", set())
    assert ports._bound("127.0.0.1", 29_999)
    assert ports.free_port() == 29_999


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ports.free_port()
    free = ports.free_port()
    with socket.create_server(("127.0.0.1", taken)):
        drawn = iter([taken, free])
        monkeypatch.setattr(ports, "_given", set())
        monkeypatch.setattr("serving.ports.random.randrange", lambda *_: next(drawn))
        assert ports.free_port() == free


def test_where_the_system_chooses_from_almost_all_ports_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_systems_first", lambda: 1024)
    with socket.create_server(("127.0.0.1", ports.free_port())) as listening:
        assert listening.getsockname()[1] > 0


def test_an_address_that_is_not_this_machines_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")
