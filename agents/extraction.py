"""From a policy that stable-baselines3 trained to its network in numpy, and the proof that both act alike. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO

from agents.network import Network, PolicyNetwork, RecurrentNetwork

TOLERANCE = 1e-4
"""Most by which an action, within [-1, 1], may differ: the rounding of float32, no more."""


class ParityError(RuntimeError):
    """The numpy network does not compute what the trained one does."""


def extract(model: PPO | RecurrentPPO) -> PolicyNetwork:
    """Return the policy's layers, without the value function and the exploration noise."""
    head = Network(_linear([*model.policy.mlp_extractor.policy_net, model.policy.action_net]))
    if not isinstance(model, RecurrentPPO):
        return head
    lstm = model.policy.lstm_actor
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return RecurrentNetwork(**{name: _array(getattr(lstm, f"{name}_l0")) for name in names}, head=head)


def check_parity(model: PPO | RecurrentPPO, network: PolicyNetwork, observations: npt.NDArray[np.float32]) -> float:
    """Compare the numpy network with the trained policy's deterministic action.

    Args:
        model: The trained policy.
        network: What :func:`extract` made of it.
        observations: Observations to compare on, shape (N, DIM); to a recurrent policy, one after the other.

    Returns:
        The largest difference of an action.

    Raises:
        ParityError: If it is more than rounding.
    """
    memory, state = None, network.initial()
    worst = 0.0
    for number, row in enumerate(observations):
        theirs, memory = model.predict(row[None], state=memory, episode_start=np.array([number == 0]), deterministic=True)
        ours, state = network.step(row, state)
        difference = np.abs(theirs[0] - np.clip(ours, -1.0, 1.0)).max()
        worst = float(difference) if not difference <= worst else worst  # a NaN stays
    if not worst <= TOLERANCE:
        raise ParityError(f"numpy inference differs from torch by {worst:g} in an action, expected at most {TOLERANCE:g}")
    return worst


def _linear(modules: Iterable[torch.nn.Module]) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    return [(_array(module.weight), _array(module.bias)) for module in modules if isinstance(module, torch.nn.Linear)]


def _array(parameter: torch.Tensor) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = parameter.detach().numpy().astype(np.float32)
    return values
