"""A tiny real HTTP exporter, whose exposition a test scripts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

RAY_LABELS = {
    "Component": "core_worker",
    "NodeAddress": "127.0.0.1",
    "SessionName": "session_2026-01-01_00-00-00_000000_1",
    "Version": "2.60.0",
    "WorkerId": "b7d5",
    "application": "cachepilot",
    "deployment": "Gateway",
}
"""What Ray puts on every metric of a Serve replica."""


class Exporter:
    """Serves counters, gauges and histograms on a free loopback port, and can be killed.

    While :attr:`gate` is not set a scrape that has arrived (:attr:`arrived` counts them) is not answered.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()
        self.noise = ""
        self.scrapes = 0
        self.arrived = 0
        self.gate = threading.Event()
        self.gate.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.arrived += 1
                owner.gate.wait()
                body = owner.text().encode()
                owner.scrapes += 1
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self._alive = True

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def set(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._values[name, tuple(sorted({**self._labels, **labels}.items()))] = value

    def add(self, name: str, amount: float, **labels: str) -> None:
        with self._lock:
            key = (name, tuple(sorted({**self._labels, **labels}.items())))
            self._values[key] = self._values.get(key, 0.0) + amount

    def observe(self, name: str, values: Iterable[float], bounds: Iterable[float], **labels: str) -> None:
        observed = list(values)
        for bound in (*bounds, float("inf")):
            shown = "+Inf" if bound == float("inf") else repr(float(bound))
            self.add(f"{name}_bucket", sum(value <= bound for value in observed), **labels, le=shown)
        self.add(f"{name}_sum", sum(observed), **labels)
        self.add(f"{name}_count", len(observed), **labels)

    def remove(self, name: str) -> None:
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if key[0] != name}

    def scale(self, factor: float) -> None:
        """Multiply every value: 0 is what a restart does to counters."""
        with self._lock:
            self._values = {key: value * factor for key, value in self._values.items()}

    def text(self) -> str:
        with self._lock:
            values = dict(self._values)
        lines = [f"# HELP {name} A metric.\n# TYPE {name} untyped" for name in dict.fromkeys(name for name, _ in values)]
        for (name, labels), value in values.items():
            shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
            lines.append(f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}")
        return self.noise + "\n".join(lines).replace(" nan", " NaN") + "\n"

    def kill(self) -> None:
        if self._alive:
            self._alive = False
            self.gate.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()


@contextmanager
def exporters(count: int, labels: Mapping[str, str] | None = None) -> Iterator[list[Exporter]]:
    """Run several exporters, told apart by the label ``replica``."""
    started = [Exporter({**(labels or {}), "replica": f"r{index}"}) for index in range(count)]
    try:
        yield started
    finally:
        for exporter in started:
            exporter.kill()


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
