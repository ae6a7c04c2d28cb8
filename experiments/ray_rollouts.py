"""A vector environment whose lanes are split over the actors of a Ray cluster; an actor that dies is replaced on the spot.

Environments repeat from their seed, lane by lane, whatever company a lane has: so it does not matter how many actors there are,
and a new actor that plays the recorded actions since the last reset stands, to the last bit, where the one that died stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayActorError
from stable_baselines3.common.vec_env import VecEnv

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stepped:
    """What one step of an actor's lanes gave.

    Attributes:
        observations: Shape (lanes, DIM).
        rewards: Shape (lanes,).
        dones: Shape (lanes,).
        last: Of the lanes whose episode is over, by place: whether it was cut off, and its last observation.
    """

    observations: npt.NDArray[np.float32]
    rewards: Floats
    dones: npt.NDArray[np.bool_]
    last: dict[int, tuple[bool, npt.NDArray[np.float32]]]


class RolloutActor:
    """Holds some lanes; lives in a process of its own.

    Args:
        make: Makes a vector environment of so many lanes; reads what it needs here.
        lanes: How many.
    """

    def __init__(self, make: Callable[[int], VecEnv], lanes: int) -> None:
        self._environments = make(lanes)

    def spaces(self) -> tuple[Any, Any]:
        """Return observation and action space."""
        return self._environments.observation_space, self._environments.action_space

    def beat(self, reference: Any) -> None:
        """Count rewards against another reference from the next start on."""
        self._environments.beat(reference)  # type: ignore[attr-defined]

    def start(self, seed: int) -> npt.NDArray[np.float32]:
        """Seed the lanes with ``seed``, ``seed + 1``, ... and return their first observations."""
        self._environments.seed(seed)
        first: npt.NDArray[np.float32] = np.asarray(self._environments.reset())
        return first

    def step(self, actions: npt.NDArray[Any]) -> Stepped:
        """Run one step."""
        observations, rewards, dones, infos = self._environments.step(actions)
        last = {
            int(lane): (bool(infos[lane].get("TimeLimit.truncated", False)), np.asarray(infos[lane]["terminal_observation"]))
            for lane in np.flatnonzero(dones)
        }
        return Stepped(np.asarray(observations), rewards, dones, last)

    def replay(self, seed: int, recorded: Sequence[npt.NDArray[Any]]) -> None:
        """Start anew and run recorded actions."""
        self.start(seed)
        for actions in recorded:
            self._environments.step(actions)

    def attribute(self, name: str, lanes: Sequence[int]) -> list[Any]:
        """Return an attribute of lanes."""
        return list(self._environments.get_attr(name, lanes))

    def call(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any], lanes: Sequence[int]) -> list[Any]:
        """Call a method of lanes."""
        return list(self._environments.env_method(name, *arguments, indices=lanes, **keywords))


@dataclass
class _Share:
    """The lanes of one actor.

    Attributes:
        first: Number of its first lane.
        lanes: How many it has.
        actor: Its handle.
        seed: Of its first lane, since the last reset.
        recorded: The actions since then.
    """

    first: int
    lanes: int
    actor: Any
    seed: int | None = None
    recorded: list[npt.NDArray[Any]] = field(default_factory=list)


class RayVecEnv(VecEnv):
    """Plays what ``make(lanes)`` plays in one process, on actors.

    Each reset needs a seed before it: what an actor does since then can be repeated. State that is set from outside could not, so
    ``set_attr`` is refused, and methods that change something must not be called.

    Args:
        make: Makes a vector environment of so many lanes; it is sent to the actors, and called there.
        lanes: Number of lanes.
        actors: Number of actors, at most one for each lane.
        cpus: CPUs that Ray reserves for each.
        deaths: How many actors may die between two resets.
        say: Prints a line about what goes on.

    Raises:
        ValueError: If there is not at least one lane and one actor.
    """

    def __init__(
        self,
        make: Callable[[int], VecEnv],
        lanes: int,
        *,
        actors: int = 2,
        cpus: float = 0.25,
        deaths: int = 5,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if lanes < 1 or actors < 1:
            raise ValueError(f"RayVecEnv: expected at least one lane and one actor, got {lanes} and {actors}")
        self._make, self._deaths, self._died, self._say = make, deaths, 0, say
        self._class = ray.remote(num_cpus=cpus, max_restarts=0)(RolloutActor)
        parts = np.array_split(np.arange(lanes), min(actors, lanes))
        self._shares = [_Share(int(part[0]), len(part), self._class.remote(make, len(part))) for part in parts]
        self._pending: list[Any] = []
        self._reference: Any = None
        observation_space, action_space = ray.get(self._shares[0].actor.spaces.remote())
        super().__init__(lanes, observation_space, action_space)

    def reset(self) -> npt.NDArray[np.float32]:
        """Start an episode in every lane and return the first observations, shape (lanes, DIM).

        Raises:
            RuntimeError: If ``seed`` was not called since the last one, or too many actors died.
        """
        if self._seeds[0] is None:
            raise RuntimeError("RayVecEnv: expected seed() before each reset()")
        self._died = 0
        for share in self._shares:
            share.seed, share.recorded = int(self._seeds[share.first] or 0), []
        self._reset_seeds()
        pending = [share.actor.start.remote(share.seed) for share in self._shares]
        return np.concatenate([self._first(share, reference) for share, reference in zip(self._shares, pending, strict=True)])

    def beat(self, reference: Any) -> None:
        """Count rewards against another reference from the next reset on; what replaces an actor does so too."""
        self._reference = reference
        for share in self._shares:
            share.actor.beat.remote(reference)  # an actor's calls run in order

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Begin a step of all lanes, shape (lanes, 3)."""
        for share in self._shares:
            share.recorded.append(np.array(actions[share.first : share.first + share.lanes]))
        self._pending = [share.actor.step.remote(share.recorded[-1]) for share in self._shares]

    def step_wait(
        self,
    ) -> tuple[npt.NDArray[np.float32], Floats, npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Return what the step gave; infos hold what learners need, ``TimeLimit.truncated`` and ``terminal_observation``.

        Raises:
            RuntimeError: If too many actors died.
        """
        found = [self._stepped(share, reference) for share, reference in zip(self._shares, self._pending, strict=True)]
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for share, stepped in zip(self._shares, found, strict=True):
            for lane, (truncated, observation) in stepped.last.items():
                infos[share.first + lane] = {"TimeLimit.truncated": truncated, "terminal_observation": np.array(observation)}
        return (
            np.concatenate([stepped.observations for stepped in found]),
            np.concatenate([stepped.rewards for stepped in found]),
            np.concatenate([stepped.dones for stepped in found]),
            infos,
        )

    def close(self) -> None:
        """End the actors."""
        for share in self._shares:
            ray.kill(share.actor)
        self._shares = []

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of lanes."""
        if attr_name == "render_mode":
            return [None for _ in self._get_indices(indices)]
        return [ray.get(share.actor.attribute.remote(attr_name, [lane]))[0] for share, lane in self._chosen(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("RayVecEnv: set_attr: what is set from outside would be lost with an actor")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of lanes, which must not change them."""
        return [
            ray.get(share.actor.call.remote(method_name, method_args, method_kwargs, [lane]))[0]
            for share, lane in self._chosen(indices)
        ]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Lanes are not environments of their own, so none is wrapped."""
        return [False for _ in self._get_indices(indices)]

    def _first(self, share: _Share, reference: Any) -> npt.NDArray[np.float32]:
        while True:
            try:
                first: npt.NDArray[np.float32] = ray.get(reference)
                return first
            except RayActorError as error:
                self._replace(share, error)
                reference = share.actor.start.remote(share.seed)

    def _stepped(self, share: _Share, reference: Any) -> Stepped:
        while True:
            try:
                stepped: Stepped = ray.get(reference)
                return stepped
            except RayActorError as error:
                self._replace(share, error)
                *before, actions = share.recorded
                share.actor.replay.remote(share.seed, before)  # an actor's calls run in order
                reference = share.actor.step.remote(actions)

    def _replace(self, share: _Share, error: RayActorError) -> None:
        self._died += 1
        if self._died > self._deaths:
            raise RuntimeError(f"rollouts: {self._died} actors died since the last reset, the last with: {error}") from error
        if self._say is not None:
            self._say(
                f"the rollout actor of lanes {share.first} to {share.first + share.lanes - 1} died; "
                f"another replays the {max(0, len(share.recorded) - 1)} steps since the segment began"
            )
        share.actor = self._class.remote(self._make, share.lanes)
        if self._reference is not None:
            share.actor.beat.remote(self._reference)

    def _chosen(self, indices: Any) -> list[tuple[_Share, int]]:
        return [
            (share, lane - share.first)
            for lane in self._get_indices(indices)
            for share in self._shares
            if share.first <= lane < share.first + share.lanes
        ]
