"""Training of the residual policy with PPO (Schulman et al., 2017) by stable-baselines3. Imports torch; inference does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from agents.artifact import TOLERANCE, Network
from agents.settings import PPOSettings

Progress = Callable[[int, float], None]
"""Called with the steps made so far and the mean reward of the last rollout."""


class ParityError(RuntimeError):
    """The numpy network does not compute what the trained one does."""


def train_ppo(
    make_environments: Callable[[int], VecEnv],
    settings: PPOSettings,
    *,
    seed: int,
    progress: Progress | None = None,
) -> PPO:
    """Train a policy; the same arguments give the same weights on the same machine.

    The action head's weights start near zero (orthogonal, gain 0.01), so an untrained policy is ``initial_action`` whatever it
    sees; by default that is the curve's optimum.

    Args:
        make_environments: Makes a vector environment of so many lanes, e.g. a :class:`envs.vec_env.CacheTuningVecEnv`.
        settings: Hyperparameters.
        seed: Seeds weights, actions and environments.
        progress: See :data:`Progress`.
    """
    torch.set_num_threads(1)  # two trainings side by side on two cores run eight times slower otherwise
    environments = make_environments(settings.n_envs)
    try:
        rollout = settings.n_steps * settings.n_envs
        model = PPO(
            "MlpPolicy",
            environments,
            learning_rate=lambda left: settings.learning_rate * left,
            n_steps=settings.n_steps,
            batch_size=min(settings.batch_size, rollout),
            n_epochs=settings.n_epochs,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
            clip_range=settings.clip_range,
            ent_coef=settings.entropy_coefficient,
            policy_kwargs={
                "net_arch": {"pi": list(settings.hidden), "vf": list(settings.hidden)},
                "activation_fn": torch.nn.Tanh,
                "log_std_init": settings.log_std_init,
            },
            seed=seed,
            device="cpu",
        )
        with torch.no_grad():
            bias = model.policy.action_net.bias
            assert isinstance(bias, torch.Tensor)
            bias.copy_(torch.tensor(settings.initial_action))
        model.learn(settings.total_steps, callback=_Report(progress) if progress is not None else None)
    finally:
        environments.close()
    return model


def extract(model: PPO) -> Network:
    """Return the policy's layers, without the value function and the exploration noise."""
    modules = [*model.policy.mlp_extractor.policy_net, model.policy.action_net]
    linear = [module for module in modules if isinstance(module, torch.nn.Linear)]
    return Network(
        [(layer.weight.detach().numpy().astype(np.float32), layer.bias.detach().numpy().astype(np.float32)) for layer in linear]
    )


def check_parity(model: PPO, network: Network, observations: npt.NDArray[np.float32]) -> float:
    """Compare the numpy network with the trained policy's deterministic action.

    Args:
        model: The trained policy.
        network: What :func:`extract` made of it.
        observations: Observations to compare on, shape (N, DIM).

    Returns:
        The largest difference of an action.

    Raises:
        ParityError: If it is more than rounding.
    """
    theirs, _ = model.predict(observations, deterministic=True)
    ours = np.clip(np.stack([network(row) for row in observations]), -1.0, 1.0)
    worst = float(np.abs(theirs - ours).max())
    if not worst <= TOLERANCE:
        raise ParityError(f"numpy inference differs from torch by {worst:g} in an action, expected at most {TOLERANCE:g}")
    return worst


class _Report(BaseCallback):
    """Tells a function how far the training is, once per rollout."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._progress(self.num_timesteps, float(self.locals["rollout_buffer"].rewards.mean()))
