"""Training of a policy with PPO (Schulman et al., 2017) by stable-baselines3. Imports torch; inference does not.

A training is cut into segments of whole rollouts. At the start of each, environments, actions and minibatches are seeded anew
from (seed, segment), so that nothing but weights, the optimiser's state and counters passes from one segment to the next: a
training that was killed and resumed from its last checkpoint gives, to the last bit, what it would have given undisturbed.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv
from torch.utils.tensorboard import SummaryWriter

from agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from agents.extraction import check_parity, extract
from agents.familiarity import ObservationStatistics, RunningStatistics
from agents.imitation import Demonstrations, Imitator, actor_parameters, pretrain
from agents.network import Network, PolicyNetwork
from agents.settings import PPOSettings
from envs.observation_vector import schema_hash

Progress = Callable[[int, float], None]
"""Called with the steps made so far and the mean reward of the last rollout."""

Observe = Callable[[Mapping[str, float | None]], None]
"""Called after each update with its entry of the learning curve and, beside it, ``steps_per_second``, ``rollout_seconds``,
``update_seconds`` and, by this thread's own CPU time, ``rollout_cpu_seconds`` and ``update_cpu_seconds``."""

PROBES = 32
"""Observations of the last rollout that are kept to compare actions on."""

_CURVE = {
    "entropy": "train/entropy",
    "kl": "train/approx_kl",
    "clip_fraction": "train/clip_fraction",
    "explained_variance": "train/explained_variance",
    "value_loss": "train/value_loss",
    "std": "train/std",
    "learning_rate": "train/learning_rate",
}
_NEVER = 2
"""Each call of ``learn`` makes one rollout; stable-baselines3 would log before its update, and we do after it."""

_POLICY, _ADAM, _SEEN, _BEATEN, _PROBES = "policy.", "adam.", "seen.", "beaten.", "probes"


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        network: The policy.
        statistics: Of all observations that it was trained on.
        probes: Some observations of the last rollout, float32, shape (N, DIM); of a recurrent policy, one after the other.
        learning_curve: One entry per update: ``steps``, mean ``reward`` of a step, ``entropy``, ``kl``, ``clip_fraction``,
            ``explained_variance``, ``value_loss``, ``std``, ``learning_rate``; None where it is not defined.
        steps: Environment steps made.
        seconds: What it took, over all attempts but for what was lost when one was killed.
        parity: Largest difference between an action of ``network`` and torch's on the probes.
    """

    network: PolicyNetwork
    statistics: ObservationStatistics
    probes: npt.NDArray[np.float32]
    learning_curve: Sequence[Mapping[str, float | None]]
    steps: int
    seconds: float
    parity: float


class TrainingDiverged(ValueError):
    """A training whose weights or actions are no longer finite numbers; says at which update, and what to do."""


class _NotFinite(Exception):
    """Weights or actions are no longer finite numbers."""


def train_ppo(
    make_environments: Callable[[int], VecEnv],
    settings: PPOSettings,
    *,
    seed: int,
    progress: Progress | None = None,
    checkpoints: Path | None = None,
    log: Path | None = None,
    observe: Observe | None = None,
    warm_start: Demonstrations | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a policy; the same arguments give the same weights on the same machine, however often it was killed on the way.

    The action head's weights start near zero (orthogonal, gain 0.01), so an untrained policy is ``initial_action`` whatever it
    sees; by default that is the curve's optimum.

    Args:
        make_environments: Makes a vector environment of so many lanes, e.g. a :class:`envs.vec_env.CacheTuningVecEnv`.
        settings: Hyperparameters.
        seed: Seeds weights, actions and environments.
        progress: See :data:`Progress`.
        checkpoints: Folder that a checkpoint is written to after each segment, and that the training goes on from.
        log: Folder for TensorBoard's event files.
        observe: See :data:`Observe`.
        warm_start: What to imitate before the first segment.
        identity: What else the training depends on, e.g. the task; fits into JSON. Checkpoints are resumed under the same only.

    Raises:
        agents.checkpoint.CheckpointError: If the checkpoints are another training's, or damaged.
        agents.extraction.ParityError: If the network in numpy does not compute what torch does.
        agents.output_file.OutputError: If a checkpoint cannot be written.
        TrainingDiverged: If weights or actions are no longer finite numbers; checkpoints made before are kept.
        ValueError: If the demonstrations do not fit, or are given for a recurrent policy.
    """
    _one_thread()
    whole = _identity(settings, seed, warm_start, identity or {})
    found = load_checkpoint(checkpoints, whole) if checkpoints is not None else None
    environments = make_environments(settings.n_envs)
    try:
        rate = _LearningRate(settings)
        model = _model(environments, settings, rate, seed)
        run = _Run(model, settings, rate, seed, warm_start is not None)
        if found is not None:
            run.restore(found, environments)
            if progress is not None and run.curve:
                progress(model.num_timesteps, run.curve[-1]["reward"] or 0.0)
        elif warm_start is not None:
            pretrain(model, warm_start, epochs=settings.warm_start_epochs, learning_rate=settings.warm_start_learning_rate)
            if not _is_finite(model):
                raise TrainingDiverged(
                    "imitation diverged, weights are no longer finite numbers: lower ppo.warm_start_learning_rate "
                    f"(it was {settings.warm_start_learning_rate:g})"
                )
            if settings.beat == "imitation":
                imitated = extract(model)
                assert isinstance(imitated, Network)
                run.beat(imitated, environments)
        with _logging(model, log):
            for segment in range(found.segments if found else 0, settings.segments):
                try:
                    run.segment(segment, progress, observe)
                except _NotFinite:
                    raise run.diverged(segment, checkpoints) from None  # torch's own text shows all that is not finite
                if checkpoints is not None:
                    save_checkpoint(checkpoints, run.checkpoint(segment + 1), whole)
        return run.result()
    finally:
        environments.close()


class _LearningRate:
    """Falls linearly over the updates, whatever part of them stable-baselines3 thinks is left.

    Attributes:
        update: Number of the update that comes next.
    """

    def __init__(self, settings: PPOSettings) -> None:
        self._settings = settings
        self.update = 0

    def __call__(self, remaining: float) -> float:
        start, end = self._settings.learning_rate, self._settings.learning_rate_end
        return start + (end - start) * self.update / self._settings.rollouts


class _Rollout(BaseCallback):
    """Notes what a rollout gave before the update overwrites it.

    Attributes:
        reward: Mean reward of a step, without the value that stable-baselines3 adds where an episode is cut off.
        observations: Shape (n_steps, n_envs, DIM).
        ended: When it ended: by the performance counter, and this thread's CPU time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reward = math.nan
        self.ended = (math.nan, math.nan)
        self.observations: npt.NDArray[np.float32] = np.zeros((0, 0, 0), np.float32)
        self._rewards: list[float] = []

    def _on_rollout_start(self) -> None:
        _one_thread()
        self._rewards = []

    def _on_step(self) -> bool:
        self._rewards.append(float(np.mean(self.locals["rewards"])))
        return True

    def _on_rollout_end(self) -> None:
        self.reward = float(np.mean(self._rewards))
        self.observations = np.array(self.locals["rollout_buffer"].observations, np.float32)
        _one_thread()
        self.ended = _now()


class _Run:
    """One training: the model, and what is counted beside it."""

    def __init__(self, model: PPO | RecurrentPPO, settings: PPOSettings, rate: _LearningRate, seed: int, warm: bool) -> None:
        self._model, self._settings, self._rate, self._seed, self._warm = model, settings, rate, seed, warm
        self._rollout = _Rollout()
        self._statistics = RunningStatistics()
        self._probes: npt.NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._seconds = 0.0
        self._beaten: Network | None = None
        self.curve: list[dict[str, float | None]] = []

    def beat(self, network: Network, environments: VecEnv) -> None:
        """Count the reward against what a network does."""
        self._beaten = network
        environments.beat(Imitator(network))  # type: ignore[attr-defined]

    def segment(self, number: int, progress: Progress | None, observe: Observe | None) -> None:
        """Make the rollouts and updates of a segment."""
        model, started = self._model, time.perf_counter()
        environments, draws = (int(word) for word in np.random.SeedSequence([self._seed, number]).generate_state(2))
        set_random_seed(draws)
        assert model.env is not None
        model.env.seed(environments >> 1)  # some environments add the lane's number and want 32 bits
        model._last_obs = None  # stable-baselines3's own sign that the environments are to be reset
        for _ in range(min(self._settings.segment, self._settings.rollouts - number * self._settings.segment)):
            entry, timing = self._update()
            self.curve.append(entry)
            if progress is not None:
                progress(model.num_timesteps, self._rollout.reward)
            if observe is not None:
                observe({**entry, **timing})
        self._probes = self._chosen()
        self._seconds += time.perf_counter() - started

    def _update(self) -> tuple[dict[str, float | None], dict[str, float]]:
        """Make one rollout and one update; return its entry of the learning curve and its timing."""
        model, rollout, started = self._model, self._rollout, _now()
        self._rate.update = len(self.curve)
        # A value function that knows nothing yet would unlearn what was imitated.
        model.policy.requires_grad_(True)
        if self._warm and len(self.curve) < self._settings.critic_rollouts:
            for parameter in actor_parameters(model):
                parameter.requires_grad_(False)
        try:
            model.learn(self._settings.rollout, callback=rollout, log_interval=_NEVER, reset_num_timesteps=False)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            if _of_distributions(error) or not _is_finite(model):
                raise _NotFinite from error
            raise
        if not _is_finite(model):
            raise _NotFinite
        values = model.logger.name_to_value
        model.logger.record("train/entropy", -values["train/entropy_loss"])
        entry = {name: _finite(values[key]) for name, key in _CURVE.items()}
        self._statistics.add(rollout.observations)
        model.logger.record("rollout/reward", rollout.reward)
        ended = _now()
        timing = {"steps_per_second": self._settings.rollout / (ended[0] - started[0])}
        for clock, name in enumerate(("seconds", "cpu_seconds")):
            timing[f"rollout_{name}"] = rollout.ended[clock] - started[clock]
            timing[f"update_{name}"] = ended[clock] - rollout.ended[clock]
        for name, value in timing.items():
            model.logger.record(f"time/{name}", value)
        model.logger.dump(model.num_timesteps)
        return {"steps": model.num_timesteps, "reward": rollout.reward, **entry}, timing

    def diverged(self, segment: int, checkpoints: Path | None) -> TrainingDiverged:
        """Return the error that tells at which update of a segment the training diverged, and what to do."""
        settings, update = self._settings, len(self.curve)
        kept = ""
        if checkpoints is not None and not segment:
            kept = "; no checkpoint had been made yet"
        elif checkpoints is not None:
            kept = (
                f"; the checkpoint after update {segment * settings.segment} is kept ({checkpoints}), but goes on with the same "
                "settings only: with others begin anew (--fresh)"
            )
        return TrainingDiverged(
            f"training diverged in update {update + 1} of {settings.rollouts}, weights or actions are no longer finite numbers: "
            f"lower ppo.learning_rate (it was {self._rate(1.0):g} in this update, {settings.learning_rate:g} in the first){kept}"
        )

    def _chosen(self) -> npt.NDArray[np.float32]:
        seen = self._rollout.observations
        if self._settings.recurrent:
            return seen[:PROBES, 0]
        flat = seen.reshape(-1, seen.shape[-1])
        return flat[np.unique(np.linspace(0, len(flat) - 1, PROBES).astype(np.int64))]

    def checkpoint(self, segments: int) -> Checkpoint:
        """Return all that passes to the next segment."""
        policy = self._model.policy
        tensors = {_POLICY + name: value.numpy() for name, value in policy.state_dict().items()}
        for index, state in policy.optimizer.state_dict()["state"].items():
            tensors |= {f"{_ADAM}{index}.{name}": value.numpy() for name, value in state.items()}
        tensors |= {_SEEN + name: np.asarray(value) for name, value in vars(self._statistics).items()}
        if self._beaten is not None:
            tensors |= {_BEATEN + name: value for name, value in self._beaten.tensors().items()}
        values = {
            "steps": self._model.num_timesteps,
            "updates": self._model._n_updates,
            "seconds": self._seconds,
            "learning_curve": self.curve,
        }
        return Checkpoint(segments, values, {**tensors, _PROBES: self._probes})

    def restore(self, found: Checkpoint, environments: VecEnv) -> None:
        """Take over what :meth:`checkpoint` returned."""
        if beaten := {name.removeprefix(_BEATEN): value for name, value in _named(found.tensors, _BEATEN)}:
            self.beat(Network.from_tensors(beaten), environments)
        policy = self._model.policy
        policy.load_state_dict(
            {name.removeprefix(_POLICY): torch.from_numpy(value) for name, value in _named(found.tensors, _POLICY)}
        )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in _named(found.tensors, _ADAM):
            index, key = name.removeprefix(_ADAM).split(".")
            state.setdefault(int(index), {})[key] = torch.from_numpy(value.copy())
        policy.optimizer.load_state_dict({"state": state, "param_groups": policy.optimizer.state_dict()["param_groups"]})
        vars(self._statistics).update(
            {name.removeprefix(_SEEN): value if value.ndim else value.item() for name, value in _named(found.tensors, _SEEN)}
        )
        self._model.num_timesteps, self._model._n_updates = int(found.values["steps"]), int(found.values["updates"])
        self._probes, self._seconds = found.tensors[_PROBES], float(found.values["seconds"])
        self.curve = list(found.values["learning_curve"])

    def result(self) -> Trained:
        """Return what the training gave."""
        network = extract(self._model)
        return Trained(
            network,
            self._statistics.statistics(),
            self._probes,
            self.curve,
            self._model.num_timesteps,
            self._seconds,
            check_parity(self._model, network, self._probes),
        )


def _model(environments: VecEnv, settings: PPOSettings, rate: _LearningRate, seed: int) -> PPO | RecurrentPPO:
    """Return the untrained policy."""
    kwargs: dict[str, Any] = {
        "net_arch": {"pi": list(settings.hidden), "vf": list(settings.hidden)},
        "activation_fn": torch.nn.Tanh,
        "log_std_init": settings.log_std_init,
    }
    if settings.recurrent:
        kwargs["lstm_hidden_size"] = settings.lstm_size
    make, policy = (RecurrentPPO, "MlpLstmPolicy") if settings.recurrent else (PPO, "MlpPolicy")
    model = make(
        policy,
        environments,
        learning_rate=rate,
        n_steps=settings.n_steps,
        batch_size=min(settings.batch_size, settings.rollout),
        n_epochs=settings.n_epochs,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        clip_range=settings.clip_range,
        ent_coef=settings.entropy_coefficient,
        vf_coef=settings.vf_coef,
        max_grad_norm=settings.max_grad_norm,
        target_kl=settings.target_kl,
        use_sde=settings.hold_noise > 0,
        sde_sample_freq=settings.hold_noise or -1,
        policy_kwargs=kwargs,
        seed=seed,
        device="cpu",
    )
    with torch.no_grad():
        bias = model.policy.action_net.bias
        assert isinstance(bias, torch.Tensor)
        bias.copy_(torch.tensor(settings.initial_action))
    return model


class _TensorBoard(TensorBoardOutputFormat):
    """Event files that go on where a resumed training does: what was written beyond that is taken back."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.writer = SummaryWriter(str(folder), purge_step=steps + 1 if steps else None)
        self._is_closed = False


@contextmanager
def _logging(model: PPO | RecurrentPPO, folder: Path | None) -> Iterator[None]:
    writers: list[KVWriter] = [] if folder is None else [_TensorBoard(folder, model.num_timesteps)]
    logger = Logger(None, writers)
    model.set_logger(logger)
    try:
        yield
    finally:
        logger.close()


def _identity(settings: PPOSettings, seed: int, warm_start: Demonstrations | None, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ppo": settings.model_dump(mode="json"),
        "seed": seed,
        "observation": schema_hash(),
        "warm_start": None if warm_start is None else warm_start.digest,
        "versions": {name: version(name) for name in ("torch", "stable-baselines3", "sb3-contrib", "numpy")},
        **more,
    }


def _is_finite(model: PPO | RecurrentPPO) -> bool:
    """Whether actions can still be drawn: all weights are finite, and the exploration noise is neither 0 nor endless."""
    noise = model.policy.log_std
    assert isinstance(noise, torch.Tensor)
    deviation = noise.detach().exp()
    weights = all(bool(torch.isfinite(parameter).all()) for parameter in model.policy.parameters())
    return weights and bool((torch.isfinite(deviation) & (deviation > 0)).all())


def _of_distributions(error: Exception) -> bool:
    """Whether an error is torch's refusal of a distribution's parameters: weights can be finite whose sums are not."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).startswith("torch.distributions")


def _named(tensors: Mapping[str, npt.NDArray[Any]], prefix: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    return ((name, value) for name, value in tensors.items() if name.startswith(prefix))


def _one_thread() -> None:
    """Keep torch to one thread.

    The matrices are small: with two threads an update takes eight times the CPU time. Numba's pool, which the environments start
    when they first run, sets the threads of the OpenMP library that torch uses too: so it is said again before each rollout and
    each update, not only once.
    """
    torch.set_num_threads(1)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
