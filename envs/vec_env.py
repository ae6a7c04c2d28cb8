"""``CacheTuning-v0`` for many caches at once, as a native vector environment of stable-baselines3.

One call steps every cache, prices, observes and rewards all of them with arrays. Lane ``e`` of an environment seeded with ``s``
plays what :class:`envs.cache_env.CacheTuningEnv` plays after ``reset(seed=s + e)``, episode after episode, to the last bit; how
many lanes there are does not matter. Imports torch, as stable-baselines3 does.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding
from stable_baselines3.common.vec_env import VecEnv

from envs.knob_batch import to_array
from envs.lanes import INFO_KEYS, Lanes, Windows
from envs.observation import Observation
from envs.observation_vector import DIM, HIGH, LOW
from envs.task import Reference, Task
from serving.knobs import Knobs, KnobSpace


class LaneInfo(MutableMapping[str, Any]):
    """``info`` of one lane and one step: :meth:`envs.lanes.Windows.info`, made when it is first asked for.

    To make a hundred numbers into objects for each lane and step, which learners do not look at, would take longer than to
    observe and to price. ``TimeLimit.truncated`` and, at an episode's end, ``terminal_observation`` are there at once.

    Args:
        windows: The step.
        lane: The lane.
        own: What is known beside the step.
    """

    __slots__ = ("_filled", "_lane", "_values", "_windows")

    def __init__(self, windows: Windows, lane: int, own: dict[str, Any]) -> None:
        self._windows = windows
        self._lane = lane
        self._values = own
        self._filled = False

    def _all(self) -> dict[str, Any]:
        if not self._filled:
            self._values = {**self._windows.info(self._lane), **self._values}
            self._filled = True
        return self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or ``default``."""
        # Learners ask every info of every step for keys that monitors set; these must not fill it.
        return (self._all() if key in _KEYS else self._values).get(key, default)

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return dict(self._all())

    def __getitem__(self, key: str) -> Any:
        return (self._all() if key in _KEYS else self._values)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._all()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


_KEYS = frozenset(INFO_KEYS)


class LaneView:
    """What can be asked of one lane by ``get_attr`` and ``env_method``; attributes set by ``set_attr`` are kept here.

    Attributes:
        observation_space: As the environment's.
        action_space: As the environment's.
        render_mode: None.
    """

    render_mode: str | None = None

    def __init__(self, environment: CacheTuningVecEnv, lane: int) -> None:
        self._environment = environment
        self._lane = lane
        self.observation_space = environment.observation_space
        self.action_space = environment.action_space

    @property
    def observation(self) -> Observation:
        """The whole observation behind the lane's last vector."""
        return self._environment.observation(self._lane)

    @property
    def knobs(self) -> Knobs:
        """The knobs that are in force."""
        return self.observation.knobs

    @property
    def space(self) -> KnobSpace:
        """The knob space of the lane's episode."""
        return self.observation.space


class CacheTuningVecEnv(VecEnv):
    """Tune many simulated caches; see the module, and :class:`envs.cache_env.CacheTuningEnv` for one lane's contract.

    A lane whose episode is over starts the next at once: what ``step`` returns is the new episode's first observation, and its
    info holds ``terminal_observation`` and ``TimeLimit.truncated``, always true, since no episode terminates. Rewards are
    float64. ``info`` is a mapping that is filled when it is read (:class:`LaneInfo`).

    Knob spaces and prices may differ between lanes and episodes; the number of grid steps must not.

    Args:
        task: What is to be learned; see :func:`envs.cache_env.make_task`.
        num_envs: Number of lanes, at least 1.

    Raises:
        ValueError: If ``num_envs`` is below 1.
    """

    def __init__(self, task: Task, num_envs: int) -> None:
        if num_envs < 1:
            raise ValueError(f"CacheTuningVecEnv: num_envs: expected at least 1 lane, got {num_envs!r}")
        self.task = task
        self.observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._views = [LaneView(self, lane) for lane in range(num_envs)]
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._lanes: Lanes | None = None
        self._actions: npt.NDArray[np.float32] | None = None
        super().__init__(num_envs, self.observation_space, self.action_space)

    def reset(self) -> npt.NDArray[np.float32]:
        """Start an episode in every lane; lanes continue their random numbers unless :meth:`seed` came before.

        Returns:
            Observations, float32, shape (num_envs, DIM).
        """
        for lane, seed in enumerate(self._seeds):
            if seed is not None or self._generators[lane] is None:
                self._generators[lane], _ = seeding.np_random(seed)
        self._reset_seeds()
        self._reset_options()
        self._lanes = self._begin(range(self.num_envs))
        self._actions = None
        self.reset_infos = [self._lanes.windows.info(lane) for lane in range(self.num_envs)]
        return self._lanes.windows.vectors.copy()

    def step_async(self, actions: npt.NDArray[np.float32]) -> None:
        """Take the actions of the next step, shape (num_envs, 3)."""
        self._actions = actions

    def step_wait(
        self,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Run one interval in every lane.

        Returns:
            Observations (num_envs, DIM), rewards (num_envs,), whether each episode is over (num_envs,), infos.

        Raises:
            RuntimeError: Before the first ``reset``, or without actions.
            ValueError: If an action is not three finite numbers.
        """
        lanes, actions = self._running(), self._actions
        if actions is None:
            raise RuntimeError("CacheTuningVecEnv: expected step_async() before step_wait()")
        self._actions = None
        return self._told(lanes, lanes.act(actions))

    def step_knobs(
        self, wanted: Sequence[Knobs]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        """Run one interval under given knobs, one for each lane, limited like an action's; else as :meth:`step_wait`."""
        lanes = self._running()
        if len(wanted) != self.num_envs:
            raise ValueError(f"CacheTuningVecEnv: step_knobs: expected knobs for {self.num_envs} lanes, got {len(wanted)}")
        return self._told(lanes, lanes.move(to_array(wanted)))

    def beat(self, reference: Reference) -> None:
        """Let the reward be counted against another reference from the next :meth:`reset` on."""
        self.task = replace(self.task, reference=reference)

    def observation(self, lane: int) -> Observation:
        """Return the whole observation behind a lane's last vector: for policies that need more than the vector.

        Raises:
            RuntimeError: Before the first ``reset``.
        """
        return self._running().observation(lane)

    def close(self) -> None:
        """Drop the caches."""
        self._lanes = None

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of lanes' :class:`LaneView`."""
        return [getattr(view, attr_name) for view in self._chosen(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of lanes' :class:`LaneView`; it changes nothing about the caches."""
        for view in self._chosen(indices):
            setattr(view, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call what is an attribute of lanes' :class:`LaneView`."""
        return [getattr(view, method_name)(*method_args, **method_kwargs) for view in self._chosen(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        """Lanes are not environments of their own, so none is wrapped."""
        return [False for _ in self._chosen(indices)]

    def _told(
        self, lanes: Lanes, windows: Windows
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.bool_], list[dict[str, Any]]]:
        over = windows.over.tolist()
        vectors = windows.vectors.copy()
        infos: list[Any] = [LaneInfo(windows, lane, {"TimeLimit.truncated": done}) for lane, done in enumerate(over)]
        ended = [lane for lane, done in enumerate(over) if done]
        if ended:
            started = self._begin(ended)
            first = started.windows
            for place, lane in enumerate(ended):
                infos[lane] = LaneInfo(
                    windows, lane, {"TimeLimit.truncated": True, "terminal_observation": windows.vectors[lane].copy()}
                )
                vectors[lane] = first.vectors[place]
                self.reset_infos[lane] = first.info(place)
            if len(ended) == self.num_envs:
                self._lanes = started
            else:
                lanes.put(ended, started)
        return vectors, windows.rewards.copy(), windows.over.copy(), infos

    def _begin(self, lanes: Sequence[int]) -> Lanes:
        generators = [self._generators[lane] for lane in lanes]
        return Lanes(self.task, [self.task.draw(generator) for generator in generators if generator is not None])

    def _running(self) -> Lanes:
        if self._lanes is None:
            raise RuntimeError("CacheTuningVecEnv: expected reset() before anything else")
        return self._lanes

    def _chosen(self, indices: Any) -> list[LaneView]:
        return [self._views[index] for index in self._get_indices(indices)]
