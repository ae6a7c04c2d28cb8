"""Ports for what is told beforehand on which port to listen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
"""Above the ports that ``ray start`` gives its workers."""

_LAST = 29_999
"""Below the ports that Ray Serve gives its replicas, from 30,000 on: the first few are taken as soon as a gateway starts."""

_SYSTEMS_FIRST = 32_768
"""First port of the system's own choice on Linux, where it does not say."""

_TRIES = 1000

_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of the host that is free, that was not given before, and that no connection is given meanwhile.

    What is to listen there may take seconds until it does, and a port of the system's own choice be another program's by then:
    Ray alone takes some dozens at its start. Where the system chooses from almost all ports, it is of its choice all the same.

    Args:
        host: An address of this machine.

    Raises:
        OSError: If the host is none of this machine's addresses.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        end = min(_systems_first(), _LAST + 1)
        for _ in range(_TRIES if end > _FIRST + 1000 else 0):
            port = random.randrange(_FIRST, end)
            if port not in _given and _bound(host, port):
                _given.add(port)
                return port
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _bound(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _systems_first() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _SYSTEMS_FIRST
