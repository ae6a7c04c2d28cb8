"""Supervised warm start of a policy: it learns to act as somebody else did, before PPO goes on from there. Imports torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO

from agents.network import Network
from agents.output_file import write_output

BATCH = 1024
WEIGHT_DECAY = 1e-3


@dataclass(frozen=True)
class Demonstrations:
    """Observations and the actions that were right for them, e.g. an oracle's on training traces.

    Attributes:
        observations: float32, shape (N, DIM).
        actions: Within [-1, 1], float32, shape (N, 3).
        weights: How much each counts, >= 0, float32, shape (N,).

    Raises:
        ValueError: If the shapes do not fit each other, there is none, or a value is out of its range.
    """

    observations: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        for name in ("observations", "actions", "weights"):
            value = np.ascontiguousarray(getattr(self, name), np.float32)
            object.__setattr__(self, name, value)
            if not np.all(np.isfinite(value)):
                raise ValueError(f"demonstrations: {name}: expected finite numbers")
        count = len(self.weights)
        if self.observations.ndim != 2 or self.actions.ndim != 2 or self.weights.ndim != 1 or not count:
            raise ValueError("demonstrations: expected observations (N, DIM), actions (N, 3) and weights (N,) with N >= 1")
        if len(self.observations) != count or len(self.actions) != count:
            raise ValueError(
                f"demonstrations: expected as many observations and actions as weights, got {len(self.observations)}, "
                f"{len(self.actions)} and {count}"
            )
        if np.abs(self.actions).max() > 1.0 or self.weights.min() < 0 or not self.weights.sum() > 0:
            raise ValueError("demonstrations: expected actions within [-1, 1], weights >= 0 and not all of them 0")

    @property
    def digest(self) -> str:
        """SHA-256 of the content: a training that began with others is another training."""
        digest = hashlib.sha256()
        for value in (self.observations, self.actions, self.weights):
            digest.update(repr(value.shape).encode() + value.tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write a safetensors file; the file is there as a whole or not at all."""
        write_output(path, save({"observations": self.observations, "actions": self.actions, "weights": self.weights}))

    @classmethod
    def load(cls, path: Path) -> Demonstrations:
        """Read a safetensors file of ``observations``, ``actions`` and ``weights``.

        Raises:
            ValueError: If it cannot be read or is not as expected; the text names the file.
        """
        try:
            tensors = load_file(path)
            return cls(tensors["observations"], tensors["actions"], tensors["weights"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"demonstrations {path}: expected a safetensors file of observations, actions and weights: {error}"
            ) from error


@dataclass(frozen=True)
class Imitator:
    """What was learned by imitation, as somebody to beat: PPO is rewarded for what it saves beyond that on the same requests.

    Against the curve most of a reward is what imitation has won already, and its noise drowns what PPO could still find.

    Attributes:
        network: The policy after imitation.
    """

    network: Network

    def act(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return actions, shape (E, 3); lane by lane, so that none depends on its company, to the last bit."""
        return np.clip(np.stack([self.network(vector) for vector in vectors]), -1.0, 1.0)


def actor_parameters(model: PPO | RecurrentPPO) -> list[torch.nn.Parameter]:
    """Return what decides on actions: the actor's layers and, last, the exploration noise; not the value function."""
    policy = model.policy
    parts = [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]
    if isinstance(model, RecurrentPPO):
        lstm = policy.lstm_actor
        assert isinstance(lstm, torch.nn.Module)
        parts = [*lstm.parameters(), *parts]
    noise = policy.log_std
    assert isinstance(noise, torch.nn.Parameter)
    return [*parts, noise]


def pretrain(model: PPO | RecurrentPPO, demonstrations: Demonstrations, *, epochs: int, learning_rate: float) -> list[float]:
    """Fit a policy's mean action to demonstrated ones by weighted mean-squared error; the value function is left alone.

    Repeats from torch's generator. PPO's own optimiser does not notice.

    Args:
        model: A feed-forward policy.
        demonstrations: What to imitate.
        epochs: Passes over all of them.
        learning_rate: Of AdamW in the first epoch; falls linearly.

    Returns:
        The mean loss of each epoch.

    Raises:
        ValueError: If the demonstrations are of another observation or action than the policy's, or the policy is recurrent.
    """
    if isinstance(model, RecurrentPPO):
        raise ValueError("warm_start: expected none with recurrent: demonstrations are not sequences")
    wanted = (model.observation_space.shape, model.action_space.shape)
    given = (demonstrations.observations.shape[1:], demonstrations.actions.shape[1:])
    if wanted != given:
        raise ValueError(f"demonstrations: expected observations and actions of shapes {wanted}, got {given}")
    optimiser = torch.optim.AdamW(actor_parameters(model)[:-1], lr=learning_rate, weight_decay=WEIGHT_DECAY)
    observations, actions = torch.from_numpy(demonstrations.observations), torch.from_numpy(demonstrations.actions)
    weights = torch.from_numpy(demonstrations.weights / demonstrations.weights.mean())
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * (1.0 - epoch / epochs)
        for batch in torch.split(torch.randperm(len(weights)), BATCH):
            means = model.policy.action_net(model.policy.mlp_extractor.forward_actor(observations[batch]))
            loss = (weights[batch] * ((means - actions[batch]) ** 2).mean(dim=1)).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch)
        losses.append(total / len(weights))
    return losses
