"""How what runs once per request is compiled, and where the compiled code is kept.

Numba keeps compiled code by the file of each function, and does not notice that a function or a constant of *another* module,
which was compiled into it, has changed: after an update it would go on to run old code. So the folder of the compiled code is
named after the content of all sources that may be part of it; see :func:`cache_folder`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
_PREFIX = "numba-"


def compiled(
    signature: str | None = None, *, allocates: bool = True, parallel: bool = False, error_model: str = "python"
) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function when it is first called, and keeps what it compiled.

    Args:
        signature: Types, to compile at import; None: those of the first call.
        allocates: Whether the function makes arrays. One that makes none is compiled without numba's runtime for allocations, and
            so without counting references: where a state has many arrays, that took two thirds of the time of an access.
        parallel: Whether its ``prange`` loops are shared out to threads.
        error_model: ``numpy``: dividing by zero gives inf or NaN; ``python``: it raises.
    """
    options: dict[str, Any] = {"cache": True, "parallel": parallel, "error_model": error_model}
    if not allocates:
        options["_nrt"] = False

    def decorate(function: Function) -> Function:
        config: Any = numba.config
        given = config.CACHE_DIR
        # Numba takes the folder when it decorates, so that it can be given back at once.
        config.CACHE_DIR = str(cache_folder(Path(function.__code__.co_filename).parent, given))
        try:
            made: Any = numba.njit(signature, **options)(function) if signature else numba.njit(**options)(function)
        finally:
            config.CACHE_DIR = given
        return cast(Function, made)

    return decorate


@functools.cache
def cache_folder(sources: Path, given: str = "") -> Path:
    """Return the folder for the compiled code of a folder of modules; those of earlier versions beside it are removed.

    Args:
        sources: The folder; its modules, those of the folders above it in the package, and those of ``serving`` count.
        given: ``NUMBA_CACHE_DIR``, which is kept to where it is set.
    """
    here = Path(__file__).parent
    folders = {here, sources, *(parent for parent in sources.parents if (parent / "__init__.py").is_file())}
    digest = hashlib.sha256(numba.__version__.encode())
    for module in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(module.name.encode() + b"\0" + module.read_bytes())
    name = _PREFIX + digest.hexdigest()[:16]
    if given:
        return Path(given) / name
    own = hashlib.sha256(str(sources).encode()).hexdigest()[:16]
    for root in (sources / "__pycache__", Path.home() / ".cache" / "cachepilot" / own):
        try:
            (root / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root / name, os.W_OK):
            for other in root.glob(f"{_PREFIX}*"):
                if other.name != name:
                    shutil.rmtree(other, ignore_errors=True)
            return root / name
    # Never a name that others could have taken: compiled code is run as it is found.
    return Path(tempfile.mkdtemp(prefix="cachepilot-"))


def is_kept(sources: Path) -> bool:
    """Return whether compiled code of a folder of modules is kept from an earlier use of what they are now."""
    given: Any = numba.config
    return any(cache_folder(sources, given.CACHE_DIR).rglob("*.nbi"))
