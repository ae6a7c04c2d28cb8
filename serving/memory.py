"""Which memory tier a replica has: its node's arena, or memory of its own where that cannot be opened."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from serving.arena.layout import H_SUM, ArenaError, Geometry
from serving.crypto import Sealer
from serving.settings import GatewaySettings
from serving.tiers.arena import ArenaBusy, ArenaTier
from serving.tiers.local import LocalTier
from serving.tiers.memory import MemoryTier

SHARED_MEMORY = Path("/dev/shm")

LARGEST_SHARE = 0.5
"""Of the file system on which the arena is: others live there too, Ray's object store among them."""

FIRM = 0.05
"""Seconds that a budget waits for another writer; it is tried again each second, and the event loop waits with it."""

_MIB = 1 << 20
_BESIDES = 1.25
"""What an arena takes for the bytes of its budgets, with the records' heads and the index."""

_HEAD_BYTES = 8 * (H_SUM + 1)
_LOCK = struct.Struct("hhqqi4x")  # struct flock
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """A replica's memory tier.

    Attributes:
        tier: The tier.
        name: The same for all replicas that share it, and for no other.
        place: Where it is, for operators: the arena's path, or ``own``.
        refused: Why it is not the arena that the settings ask for; ``""`` where it is, or none is asked for.
    """

    tier: LocalTier
    name: str
    place: str
    refused: str = ""

    @property
    def state(self) -> str:
        """``shared``; ``own``; ``refused``: own, since the arena could not be opened."""
        return "refused" if self.refused else "shared" if self.tier.shared else "own"


def open_memory(settings: GatewaySettings, *, replica: str, told: str = "") -> Memory:
    """Open the memory tier that the settings ask for; never fails: without the arena the replica has memory of its own.

    Args:
        settings: The data plane's settings.
        replica: Name of this replica.
        told: Why it was refused before: that is not said again.
    """
    if not settings.memory.shared:
        return Memory(MemoryTier(), replica, "own")
    path, size = arena_path(settings), arena_size(settings)
    try:
        arena = ArenaTier(
            path,
            size,
            entry_bytes=settings.memory.entry_bytes,
            firm=FIRM,
            namespace=settings.namespace,
            sealer=Sealer.of(settings.storage),
        )
        try:
            arena.begin_now(store_of(settings), list(settings.arms))
        except ArenaBusy:
            pass  # they are made with their budgets
        except ArenaError:
            arena.close_now()
            raise
    except (ArenaError, OSError) as error:
        if str(error) != told:
            _log.warning("this replica has memory of its own, since its node's arena cannot be used: %s", error)
        return Memory(MemoryTier(), replica, "own", str(error))
    now = sum(int(_share(settings) * arm.knobs.cache_size) for arm in settings.arms.values())
    if arena.mapping.geometry.bytes < _BESIDES * now:
        _log.warning(
            "arena %s: %d MiB are not enough for budgets of %d MiB in memory: entries go before their time; set memory.size",
            path,
            arena.mapping.geometry.bytes // _MIB,
            now // _MIB,
        )
    return Memory(arena, f"{arena.mapping.geometry.epoch:x}", str(path))


def describe_arena(path: Path) -> str:
    """Return in words what there is at an arena's path; changes nothing and waits for nobody.

    Raises:
        ArenaError: If what is there cannot be used, or there is no folder for it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.access(path.parent, os.W_OK):
            return "not made yet"
        raise ArenaError(f"arena {path}: {path.parent} is not there or cannot be written to; set memory.path") from None
    except OSError as error:
        raise ArenaError(f"arena {path}: cannot be opened ({error.strerror}); remove it, or set memory.path") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ArenaError(f"arena {path}: expected a file of this user alone, mode 0600; remove it, or set memory.path")
        head = os.pread(descriptor, _HEAD_BYTES, 0).ljust(_HEAD_BYTES, b"\0")
        Geometry.read(np.frombuffer(head, np.int64), str(path), found.st_size)
        users = "in use" if _locked(descriptor) else "used by nobody"
        return f"{found.st_size // _MIB} MiB, of which {found.st_blocks * 512 // _MIB} have memory, {users}"
    finally:
        os.close(descriptor)


def in_use(path: Path) -> bool:
    """Whether a process uses the file at an arena's path, whatever it is; False where there is none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def store_of(settings: GatewaySettings) -> str:
    """Return what names the Redis of whose entries the arena holds copies, and the cache there; empty where there is none."""
    if settings.redis_url is None:
        return ""
    parts = urlsplit(settings.redis_url)
    database = dict(parse_qsl(parts.query)).get("db", "")
    return f"{settings.namespace} {parts.netloc.rpartition('@')[2]} {parts.path} {database}"


def arena_path(settings: GatewaySettings) -> Path:
    """Return the path of the arena."""
    if settings.memory.path is not None:
        return settings.memory.path
    return SHARED_MEMORY / f"cachepilot-{settings.namespace}-{os.geteuid()}"


def budgets(settings: GatewaySettings) -> int:
    """Return the bytes that the arms may hold together in one node's memory, with the largest ``cache_size`` that is allowed."""
    return sum(int(_share(settings) * max(settings.space.max_size, arm.knobs.cache_size)) for arm in settings.arms.values())


def _share(settings: GatewaySettings) -> float:
    return settings.rules.l1_share if settings.redis_url is not None else 1.0


def arena_size(settings: GatewaySettings) -> int:
    """Return the size of the arena's file, bytes: what the settings say, else what the budgets need.

    That is a quarter more than :func:`budgets`, and no more than :data:`LARGEST_SHARE` of the file system.
    """
    if settings.memory.size is not None:
        return settings.memory.size
    wanted = int(_BESIDES * budgets(settings))
    try:
        system = os.statvfs(arena_path(settings).parent)
        wanted = min(wanted, int(LARGEST_SHARE * system.f_frsize * system.f_blocks))
    except OSError:
        pass  # opening says what is wrong with it
    return max(_MIB, wanted // _MIB * _MIB)
