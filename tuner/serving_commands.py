"""`cachepilot serve`: the gateway on a Ray of its own, with an embedded Redis where none is named."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

import redis

from experiments.soak.stack import environment
from serving.app import GatewayNotStarted, start
from serving.redis_server import RedisServer
from serving.redis_url import shown
from serving.run_folders import FolderHeld
from serving.settings import GatewaySettings
from serving.tiers.vector_store import missing_package
from tuner.config import Settings
from tuner.errors import CommandError
from tuner.kept_logs import RUNS, kept_logs, why_not
from tuner.local import own_run_directory, redis_url


def serve_gateway(settings: Settings, *, port: int | None, dashboard: bool, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; returns when everything has ended, also where one comes before it has started.

    Requests under way get ``gateway.drain`` seconds, or until a second signal.

    Args:
        settings: Everything; ``gateway`` is used.
        port: Overrides ``gateway.port``.
        dashboard: Whether Ray's dashboard runs too.
        say: Prints a line.

    Raises:
        CommandError: If Redis does not answer, or another gateway serves the namespace with its embedded Redis.
        serving.app.PortInUse: If the port is taken.
        serving.app.GatewayNotStarted: If Ray or the gateway does not come up.
    """
    gateway = settings.gateway
    url = redis_url(gateway)
    over, hurry, stdout = threading.Event(), threading.Event(), sys.stdout

    def tell(text: str) -> None:
        with contextlib.redirect_stdout(stdout):
            say(text)

    def listen() -> None:
        # Nothing is raised: in a library's callback that would be lost, or leave a lock taken.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: (hurry if over.is_set() else over).set())

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.getsignal(number))
        listen()
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, _Hushed(stdout, over))))
        logs = stack.enter_context(kept_logs(gateway.namespace))
        if logs is not None:
            say(f"logs: {logs}/replica_*.log; those of the last {RUNS} runs are kept")
        if gateway.redis_url is None:
            try:
                if redis_answers(url):
                    raise FolderHeld
                directory = stack.enter_context(own_run_directory(gateway.namespace))
            except FolderHeld:
                raise CommandError(
                    f"serve: another gateway with an embedded Redis runs in namespace {gateway.namespace!r} ({url}): "
                    "end it, choose another gateway.namespace, or name a shared gateway.redis_url"
                ) from None
            if logs is not None:
                stack.callback(_keep_log, directory / "redis.log", logs)
            url = stack.enter_context(RedisServer(directory)).url
            say(f"redis: embedded, {url}")
        else:
            check_redis(url)
        check_access_log(gateway.access_log)
        check_vectors(gateway)
        changed = {"redis_url": url, **({} if port is None else {"port": port})}
        # Of its own accord Ray answers SIGTERM with a dump of its stack, and ends at once with everything still running.
        stack.enter_context(environment("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1"))
        try:
            running = stack.enter_context(start(gateway.model_copy(update=changed), dashboard=dashboard, logs=logs))
        except SystemExit:  # what Ray makes of SIGTERM while it starts
            over.set()
        except GatewayNotStarted as error:
            if logs is not None and any(log.stat().st_size for log in logs.glob("*.log")):
                raise GatewayNotStarted(f"{error}. What its parts said is in {logs}") from error
            raise
        listen()  # Ray has set a handler of its own for SIGTERM
        if over.is_set():
            tell("ended before the gateway was up")
            return
        say(f"gateway: {running.url}/v1, {running.replicas} replica(s), model at {gateway.upstream.base_url}")
        say(f"metrics: {', '.join(running.metrics_targets())}")
        if logs is None:
            say(f"logs: {running.logs}/replica_*.log, until it ends, since {why_not()}")
        if _memory(running.url) == "refused":
            say("memory: the arena cannot be used, so each replica has memory of its own; the log says why")
        if running.service_discovery is not None:
            say(f"prometheus file_sd: {running.service_discovery}")
        say("Ctrl-C ends it")
        over.wait()
        tell("ending")
        left = running.drain(gateway.drain, hurry)
        if left:
            tell(f"{left} request(s) cut off: no answer within gateway.drain, {gateway.drain:g} s, or before the second signal")


def _keep_log(log: Path, folder: Path) -> None:
    """Keep Redis' log beside those of replicas, if there are any."""
    with contextlib.suppress(OSError):
        if any(folder.glob("*.log")):
            shutil.copyfile(log, folder / log.name)


def _memory(url: str) -> str | None:
    """Return what the replica that answers says of its memory; None if none does."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5.0) as answer:
            return str(json.load(answer)["memory"])
    except (OSError, ValueError, KeyError):
        return None


class _Hushed(io.TextIOBase):
    """Passes on what is printed until everything is being ended: from then on Ray tells of each part that it has ended."""

    def __init__(self, out: TextIO, over: threading.Event) -> None:
        self._out, self._over = out, over

    def write(self, text: str) -> int:
        return len(text) if self._over.is_set() else self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()


def check_access_log(folder: Path | None) -> None:
    """Make sure that the access log can be written, before Ray is started in vain.

    Raises:
        CommandError: If it cannot; says why.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(
            f"serve: gateway.access_log = {str(folder)!r}: expected a folder that can be written, but: {error.strerror}"
        ) from error


def check_vectors(gateway: GatewaySettings) -> None:
    """Make sure that the package of the vector store is there, before Ray is started in vain.

    Raises:
        CommandError: If it is not; says what to install.
    """
    semantic = gateway.rules.semantic
    if semantic.enabled and (missing := missing_package(semantic.vectors)):
        raise CommandError(f"serve: gateway.rules.semantic.vectors.kind = {semantic.vectors.kind!r}: {': '.join(missing)}")


def redis_answers(url: str) -> bool:
    """Whether a Redis answers at a URL."""
    with contextlib.closing(redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)) as client:
        try:
            client.ping()
        except redis.RedisError:
            return False
    return True


def check_redis(url: str, *, hint: str = "") -> None:
    """Make sure that Redis answers.

    Args:
        url: Its address.
        hint: What may be done before all else.

    Raises:
        CommandError: If it does not; says what was tried.
    """
    if not redis_answers(url):
        raise CommandError(
            f"redis: nothing answers PING at {shown(url)} within 2 s: {hint + ' ' if hint else ''}start it, correct "
            "gateway.redis_url, or leave gateway.redis_url out: `cachepilot serve` then brings its own"
        )
