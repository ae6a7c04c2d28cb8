"""Policies by name: what a setting or a command line calls them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.artifact import ArtifactError
from agents.baselines import HoldPolicy, MiddlePolicy, StaticPolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.hill_climbing import HillClimbingPolicy
from agents.marginal_hits import MarginalHitsPolicy
from agents.policy import Policy
from agents.ppo import DEFAULT, PRETRAINED, PPOPolicy
from agents.ttl_approximation import TTLApproximationPolicy
from agents.ttl_rule import TTLRulePolicy
from serving.knobs import Knobs

_FACTORS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_STEP = r"([+-][0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)"
_OFFSET = re.compile("curve" + 3 * _STEP)


@dataclass(frozen=True, slots=True)
class Listed:
    """A policy that can be asked for by name.

    Attributes:
        name: What its name starts with.
        usage: How the whole name is written, optional parts in brackets.
        summary: One line on what it does.
        example: A name that :func:`load_policy` takes.
    """

    name: str
    usage: str
    summary: str
    example: str


_LISTED: tuple[Listed, ...] = (
    Listed(
        "static", "static:<size>,<ttl>[,<warm-up ratio>]", "always the same knobs: static:64MiB,3600,0.1", "static:64MiB,3600,0.1"
    ),
    Listed("hold", "hold", "leaves the knobs as they are", "hold"),
    Listed("mid-grid", "mid-grid", "the middle of every knob's range", "mid-grid"),
    Listed(
        "curve",
        "curve[:<hysteresis>] or curve:smoothing=<weight>[,hysteresis=<share>]",
        "the cheapest setting of the smoothed ghost curve",
        "curve",
    ),
    Listed("last-curve", "last-curve", "the cheapest setting of the last window's own ghost curve", "last-curve"),
    Listed(
        "hill-climbing",
        "hill-climbing[:step=<share>,restart=<share>,decay=<share>,period=<windows>]",
        "steps on while the measured cost falls, as Caffeine's climber; size and ttl in turns",
        "hill-climbing",
    ),
    Listed(
        "marginal-hits",
        "marginal-hits[:average=<weight>,band=<share>,step=<grid steps>]",
        "grows while the next step of memory saves more than it costs, as CacheLib's; size only",
        "marginal-hits",
    ),
    Listed(
        "ttl-rule",
        "ttl-rule[:base=<seconds>]",
        "the article's rule: a longer ttl under load, a shorter one where answers are stale",
        "ttl-rule",
    ),
    Listed(
        "ttl-approximation",
        "ttl-approximation[:gain=<steps>,coverage=<share>,smoothing=<weight>]",
        "stochastic approximation of the cheapest ttl (Carra, Neglia, Michiardi); the size covers what it keeps",
        "ttl-approximation",
    ),
    Listed("ppo", "ppo[:<name>] or a directory", "a policy trained with PPO: a shipped one by name, or your own", "ppo"),
)

EXPECTED = "expected " + ", ".join(entry.usage for entry in _LISTED)
"""What a name may be, for messages."""


def pretrained() -> list[str]:
    """Return the names of the shipped policies."""
    return sorted(path.parent.name for path in PRETRAINED.glob("*/card.json"))


def policies() -> tuple[Listed, ...]:
    """Return all policies that can be asked for by name, simplest first; ``ppo`` names those that are shipped."""
    shipped = ", ".join(f"ppo:{name}" for name in pretrained()) or "none is shipped"
    return (*_LISTED[:-1], Listed("ppo", _LISTED[-1].usage, f"{_LISTED[-1].summary} ({shipped})", _LISTED[-1].example))


def load_policy(name: str) -> Policy:
    """Return a policy by name; the name of any policy but one from a directory loads an equal one.

    Args:
        name: One of :func:`policies`: ``curve``; ``curve:0.02`` (moves only to save more than 2 %); ``curve:smoothing=0.1`` (a
            smoothing of its own); ``curve+2-1+0`` (so many grid steps from the curve's optimum: size, TTL, warm-up);
            ``last-curve``; ``static:64MiB,3600,0.1`` (size in bytes or with a unit, TTL in seconds or ``inf``);
            ``hill-climbing``, ``marginal-hits``, ``ttl-rule`` and ``ttl-approximation``, with parameters where wanted
            (``hill-climbing:period=5``); ``hold``; ``mid-grid``; ``ppo`` (the shipped one) or ``ppo:<name>``; or the directory of
            a trained policy.

    Raises:
        ValueError: If the name means nothing or its numbers are out of range.
        agents.artifact.ArtifactError: If the trained policy cannot be used (a ``ValueError`` too).
    """
    offset = _OFFSET.fullmatch(name)
    if offset is not None:
        return OffsetPolicy((_number(name, offset[1]), _number(name, offset[2]), _number(name, offset[3])))
    kind, colon, rest = name.partition(":")
    make = _MAKERS.get(kind)
    if make is not None:
        try:
            return make(name, rest)
        except ArtifactError:
            raise
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith("policy ") else f"policy {name!r}: {text}") from error
    if Path(name).is_dir():
        return PPOPolicy.from_directory(Path(name))
    near = difflib.get_close_matches(kind, _MAKERS, n=1)
    meant = f"did you mean {near[0] + colon + rest}? " if near else ""
    raise ValueError(f"policy {name!r}: {meant}{EXPECTED}")


def _curve(name: str, text: str) -> Policy:
    if not text:
        return CurvePolicy()
    if "=" not in text:
        return CurvePolicy(_number(name, text))
    given = _parameters(name, text, ("smoothing", "hysteresis"))
    return CurvePolicy(given.get("hysteresis", 0.0), given.get("smoothing"))


def _hill_climbing(name: str, text: str) -> Policy:
    return HillClimbingPolicy(**_parameters(name, text, ("step", "restart", "decay", "period")))


def _marginal_hits(name: str, text: str) -> Policy:
    return MarginalHitsPolicy(**_parameters(name, text, ("average", "band", "step")))


def _ttl_rule(name: str, text: str) -> Policy:
    return TTLRulePolicy(**_parameters(name, text, ("base",)))


def _ttl_approximation(name: str, text: str) -> Policy:
    return TTLApproximationPolicy(**_parameters(name, text, ("gain", "coverage", "smoothing")))


def _ppo(name: str, text: str) -> Policy:
    wanted = text or DEFAULT
    shipped = pretrained()
    if wanted not in shipped:
        near = difflib.get_close_matches(wanted, shipped, n=1)
        meant = f"; did you mean ppo:{near[0]}?" if near else ""
        raise ArtifactError(f"policy {name!r}: no such shipped policy; there are: {', '.join(shipped) or 'none'}{meant}")
    return PPOPolicy.from_directory(PRETRAINED / wanted)


def _plain(make: Callable[[], Policy]) -> Callable[[str, str], Policy]:
    def load(name: str, text: str) -> Policy:
        if text:
            raise ValueError(f"policy {name!r}: expected no parameters, got {text!r}")
        return make()

    return load


def _static(name: str, text: str) -> Policy:
    parts = text.split(",")
    if len(parts) not in (2, 3):
        raise ValueError(f"policy {name!r}: expected static:<size>,<ttl>[,<warm-up ratio>], for example static:64MiB,3600,0.1")
    size, unit = _split_size(name, parts[0])
    ttl = math.inf if parts[1].strip() == "inf" else _number(name, parts[1])
    if not math.isfinite(size * unit):
        raise ValueError(f"policy {name!r}: size {parts[0]!r}: expected a finite number of bytes")
    return StaticPolicy(Knobs(round(size * unit), ttl, _number(name, parts[2]) if len(parts) == 3 else 0.0))


_MAKERS: Mapping[str, Callable[[str, str], Policy]] = {
    "static": _static,
    "hold": _plain(HoldPolicy),
    "mid-grid": _plain(MiddlePolicy),
    "curve": _curve,
    "last-curve": _plain(LastCurvePolicy),
    "hill-climbing": _hill_climbing,
    "marginal-hits": _marginal_hits,
    "ttl-rule": _ttl_rule,
    "ttl-approximation": _ttl_approximation,
    "ppo": _ppo,
}


def _parameters(name: str, text: str, known: tuple[str, ...]) -> dict[str, float]:
    """Read ``key=number`` parts, separated by commas."""
    values: dict[str, float] = {}
    for part in text.split(",") if text else []:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"policy {name!r}: {part!r}: expected <parameter>=<number> with {' or '.join(known)}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"policy {name!r}: no parameter {key!r}: {meant}expected {' or '.join(known)}")
        if key in values:
            raise ValueError(f"policy {name!r}: {key} is given twice")
        values[key] = _number(name, value)
    return values


def _split_size(name: str, text: str) -> tuple[float, int]:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"policy {name!r}: size {text!r}: expected bytes or a number with KiB, MiB or GiB")
    size = float(match[1])
    if not math.isfinite(size):
        raise ValueError(f"policy {name!r}: size {text!r}: expected a finite number")
    return size, _FACTORS[match[2].lower()]


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"policy {name!r}: {text!r}: expected a number") from None
    if not math.isfinite(value):
        raise ValueError(f"policy {name!r}: {text!r}: expected a finite number")
    return value
