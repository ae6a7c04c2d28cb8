"""The policy that rules a live cache: loaded by name, supervised, and the curve where the shipped one cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable

from agents.artifact import ArtifactError
from agents.baselines import HoldPolicy, StaticPolicy
from agents.curve import CurvePolicy
from agents.policy import Policy
from agents.registry import load_policy
from agents.supervised import SupervisedPolicy
from tuner.config import TunerSettings
from tuner.errors import CommandError

SHIPPED = "ppo"
"""The name that stands for the shipped policy, whichever that is."""


def policy_named(name: str) -> Policy:
    """Return a policy by the name that a command was given.

    Raises:
        CommandError: If the name means nothing or its policy cannot be used.
    """
    try:
        return load_policy(name)
    except ValueError as error:
        raise CommandError(str(error)) from error


def ruling_policy(name: str, settings: TunerSettings, warn: Callable[[str], None]) -> Policy:
    """Return the policy that is to rule an arm.

    Where the shipped policy (:data:`SHIPPED`) cannot be loaded, the curve takes its place and a warning says so; one that was
    asked for by its own name or directory has to load. A setting made by hand (``static``, ``hold``) and the curve itself are not
    supervised: there is nobody to take over from the one, and nobody better for the other.

    Args:
        name: What a command or the settings call it; see :func:`agents.registry.load_policy`.
        settings: Whether it is supervised, and how; the guard's step limit.
        warn: Takes a text for people.

    Raises:
        CommandError: If the name means nothing or its policy cannot be used.
    """
    try:
        policy = load_policy(name)
    except ArtifactError as error:
        if name != SHIPPED:
            raise CommandError(str(error)) from error
        policy = CurvePolicy()
        warn(f"warning: the shipped policy cannot be used ({error}); the curve, which needs no training, tunes in its place")
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not settings.supervise or isinstance(policy, (CurvePolicy, StaticPolicy, HoldPolicy)):
        return policy
    return SupervisedPolicy(policy, supervision=settings.supervision.supervision(), max_steps=settings.guard.max_steps)
