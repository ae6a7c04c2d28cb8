"""A real Prometheus for tests: Debian's package, in a temporary directory, on a free loopback port."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.ports import free_port
from tests.requirements import program

START_DEADLINE = 30.0


@contextmanager
def prometheus_server(
    directory: Path,
    *,
    targets: Sequence[str] = (),
    file_sd: Path | None = None,
    scrape_interval: str = "1s",
    openmetrics: str = "",
) -> Iterator[str]:
    """Run a Prometheus and give its URL.

    Args:
        directory: An empty temporary directory for its configuration and data.
        targets: ``host:port`` to scrape.
        file_sd: A service-discovery file to scrape from, such as Ray's.
        scrape_interval: How often, in Prometheus' notation.
        openmetrics: Past samples, OpenMetrics text with time stamps, to be in its storage from the start.
    """
    binary = program("prometheus")
    data = directory / "data"
    jobs: list[dict[str, object]] = []
    if targets:
        jobs.append({"job_name": "tests", "static_configs": [{"targets": list(targets)}]})
    if file_sd is not None:
        jobs.append({"job_name": "ray", "file_sd_configs": [{"files": [str(file_sd)], "refresh_interval": "1s"}]})
    config = directory / "prometheus.yml"  # JSON is YAML
    config.write_text(
        json.dumps({"global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_interval}, "scrape_configs": jobs})
    )
    if openmetrics:
        source = directory / "past.om"
        source.write_text(openmetrics)
        command = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(source), str(data)]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (directory / "log").open("w+") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--storage.tsdb.retention.time=30d",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + START_DEADLINE
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise AssertionError(f"Prometheus did not start within {START_DEADLINE} s: {log.read()[-2000:]}")
                time.sleep(0.05)
            yield url
        finally:
            process.kill()
            process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
