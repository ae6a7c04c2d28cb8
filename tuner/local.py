"""Where the parts of one machine find each other: the embedded Redis and the metrics of `cachepilot serve`."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from serving.redis_url import address
from serving.run_folders import make, owned, remove_unheld
from serving.settings import GatewaySettings
from tuner.errors import CommandError


def run_directory(namespace: str) -> Path:
    """Return the folder of a namespace's sockets on this machine, of this user alone; not made yet."""
    root = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(root) / f"cachepilot-{os.getuid()}" / namespace


@contextlib.contextmanager
def own_run_directory(namespace: str) -> Iterator[Path]:
    """Make a namespace's folder, which goes with the context; those that killed processes have left go first.

    Raises:
        CommandError: If the folder above it belongs to somebody else or may be written to by others, who would be the Redis.
        serving.run_folders.FolderHeld: If another process has the namespace.
    """
    folder = run_directory(namespace)
    root = folder.parent
    found = _made(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CommandError(
            f"{root}: expected a folder that this user alone may write to, for the sockets of cachepilot serve; "
            "remove it, or set XDG_RUNTIME_DIR to another place"
        )
    with contextlib.suppress(FileNotFoundError):  # the last of the others takes it along: it is made anew
        for left in root.iterdir():
            remove_unheld(left)
    try:
        with owned(folder):
            yield folder
    finally:
        with contextlib.suppress(OSError):  # others have theirs in it
            root.rmdir()


def _made(root: Path) -> os.stat_result:
    """Make the folder; return what it is."""
    while True:
        make(root)
        with contextlib.suppress(FileNotFoundError):
            return root.lstat()


def redis_url(settings: GatewaySettings) -> str:
    """Return the URL of the settings' Redis, certificates included, else of the one that `cachepilot serve` brings."""
    return address(settings) or f"unix://{run_directory(settings.namespace) / 'redis.sock'}"


def metrics_url(settings: GatewaySettings) -> str:
    """Return where `cachepilot serve` exports metrics on this machine."""
    return f"http://127.0.0.1:{settings.metrics_port}/metrics"
