"""Policies by name: what a setting or a command line calls them."""

from __future__ import annotations

import math
import re
from pathlib import Path

from agents.artifact import ArtifactError
from agents.baselines import StaticPolicy
from agents.curve import CurvePolicy, LastCurvePolicy
from agents.policy import Policy
from agents.ppo import DEFAULT, PRETRAINED, PPOPolicy
from serving.knobs import Knobs

_FACTORS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

EXPECTED = (
    "expected curve, curve:<hysteresis>, last-curve, static:<size>,<ttl>,<warm-up ratio>, ppo, ppo:<name>, "
    "or the directory of an artifact"
)


def pretrained() -> list[str]:
    """Return the names of the shipped policies."""
    return sorted(path.parent.name for path in PRETRAINED.glob("*/card.json"))


def load_policy(name: str) -> Policy:
    """Return a policy by name.

    Args:
        name: ``curve``; ``curve:0.02`` (moves only to save more than 2 %); ``last-curve`` (no smoothing);
            ``static:64MiB,3600,0.1`` (size in bytes or with a unit, TTL in seconds or ``inf``); ``ppo`` (the shipped one) or
            ``ppo:<name>``; or the directory of a trained policy.

    Raises:
        ValueError: If the name means nothing or its numbers are out of range.
        agents.artifact.ArtifactError: If the trained policy cannot be used (a ``ValueError`` too).
    """
    kind, _, rest = name.partition(":")
    if kind == "curve":
        return CurvePolicy(_number(name, rest) if rest else 0.0)
    if name == "last-curve":
        return LastCurvePolicy()
    if kind == "static":
        return StaticPolicy(_static(name, rest))
    if kind == "ppo":
        wanted = rest or DEFAULT
        if wanted not in pretrained():
            raise ArtifactError(f"policy {name!r}: no such shipped policy; there are: {', '.join(pretrained()) or 'none'}")
        return PPOPolicy.from_directory(PRETRAINED / wanted)
    if Path(name).is_dir():
        return PPOPolicy.from_directory(Path(name))
    raise ValueError(f"policy {name!r}: {EXPECTED}")


def _static(name: str, text: str) -> Knobs:
    parts = text.split(",")
    if len(parts) not in (2, 3):
        raise ValueError(f"policy {name!r}: expected static:<size>,<ttl>[,<warm-up ratio>], for example static:64MiB,3600,0.1")
    size, unit = _split_size(name, parts[0])
    ttl = math.inf if parts[1].strip() == "inf" else _number(name, parts[1])
    try:
        return Knobs(round(size * unit), ttl, _number(name, parts[2]) if len(parts) == 3 else 0.0)
    except ValueError as error:
        raise ValueError(f"policy {name!r}: {error}") from error


def _split_size(name: str, text: str) -> tuple[float, int]:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"policy {name!r}: size {text!r}: expected bytes or a number with KiB, MiB or GiB")
    return float(match[1]), _FACTORS[match[2].lower()]


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"policy {name!r}: {text!r}: expected a number") from None
    if not math.isfinite(value):
        raise ValueError(f"policy {name!r}: {text!r}: expected a finite number")
    return value
