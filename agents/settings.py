"""Settings of the policies and of their training."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Action = Annotated[float, Field(ge=-1, le=1)]


class PPOSettings(BaseModel):
    """Hyperparameters of PPO; the defaults are the recipe that beat the smoothed curve on real drift.

    ``n_steps x n_envs`` must be a multiple of ``batch_size`` or smaller than it (a rest would make a noisy last minibatch).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    total_steps: int = Field(default=120_000, ge=1, description="environment steps in all")
    n_envs: int = Field(default=8, ge=1, le=256, description="environments stepped side by side")
    n_steps: int = Field(default=256, ge=2, description="steps per environment between two updates")
    batch_size: int = Field(default=512, ge=2)
    n_epochs: int = Field(default=10, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0, description="at the start; falls linearly to 0")
    gamma: float = Field(default=0.97, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0)
    entropy_coefficient: float = Field(default=0.0, ge=0)
    log_std_init: float = Field(default=-1.5, ge=-10, le=2)
    initial_action: tuple[Action, Action, Action] = Field(
        default=(0.0, 0.0, 0.0), description="where the policy starts: a constant residual; 0 is the curve's optimum"
    )
    hidden: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(default=(64, 64), min_length=1, max_length=4)


class AgentSettings(BaseModel):
    """The policies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hysteresis: float = Field(
        0.0, ge=0, lt=1, description="share of the cost that a move must save before the curve policy makes it"
    )
    ppo: PPOSettings = PPOSettings()
