"""Settings of the training of policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Action = Annotated[float, Field(ge=-1, le=1)]
LearningRate = Annotated[float, Field(le=1)]
"""Adam moves each weight by about as much in a step: beyond 1, a thousand times what anybody trains with, nothing is learned."""
Profile = Literal["default", "article"]

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "article": {"learning_rate": 3e-5, "learning_rate_end": 3e-5, "clip_range": 0.1, "batch_size": 512, "n_epochs": 10},
}
"""Values by profile, for what is not given by itself; ``default`` is what the fields' own defaults say."""


class PPOSettings(BaseModel):
    """Hyperparameters of PPO; the defaults are the recipe that beat the smoothed curve on real drift.

    ``n_steps x n_envs`` must be a multiple of ``batch_size`` or smaller than it (a rest would make a noisy last minibatch).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: Profile = Field(default="default", description="see PROFILES; what is given beside it overrides it")
    total_steps: int = Field(default=120_000, ge=1, description="environment steps in all; rounded up to whole rollouts")
    n_envs: int = Field(default=8, ge=1, le=256, description="environments stepped side by side")
    n_steps: int = Field(default=256, ge=2, description="steps per environment between two updates")
    segment: int = Field(
        default=16, ge=1, description="rollouts between two checkpoints, after each of which the environments start anew"
    )
    batch_size: int = Field(default=512, ge=2)
    n_epochs: int = Field(default=10, ge=1)
    learning_rate: LearningRate = Field(default=1e-3, gt=0, description="of the first update")
    learning_rate_end: LearningRate = Field(default=0.0, ge=0, description="where it falls to, linearly, over all updates")
    gamma: float = Field(default=0.97, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0)
    target_kl: float | None = Field(default=None, gt=0, description="ends an update's epochs early beyond 1.5 times this")
    entropy_coefficient: float = Field(default=0.0, ge=0)
    vf_coef: float = Field(default=0.5, ge=0, description="weight of the value function's loss")
    max_grad_norm: float = Field(default=0.5, gt=0)
    log_std_init: float = Field(default=-1.5, ge=-10, le=2)
    hold_noise: int = Field(
        default=0,
        ge=0,
        description="steps for which exploration is one function of the state (gSDE, Raffin et al., 2021): knobs that jitter "
        "cost refilling, and what a size is worth shows only after a while; 0: noise of its own in every step",
    )
    initial_action: tuple[Action, Action, Action] = Field(
        default=(0.0, 0.0, 0.0), description="where the policy starts: a constant residual; 0 is the curve's optimum"
    )
    hidden: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(default=(64, 64), min_length=1, max_length=4)
    recurrent: bool = Field(default=False, description="an LSTM before the hidden layers (sb3-contrib's RecurrentPPO)")
    lstm_size: int = Field(default=32, ge=1, le=1024, description="cells of that LSTM")
    warm_start_epochs: int = Field(default=20, ge=1, description="epochs of imitation, where there is something to imitate")
    warm_start_learning_rate: LearningRate = Field(default=1e-3, gt=0, description="of the first epoch; falls linearly to 0")
    beat: Literal["task", "imitation"] = Field(
        default="task",
        description="whom the reward is counted against: the task's own reference (the curve), or what imitation gave",
    )
    critic_rollouts: int = Field(
        default=0, ge=0, description="after imitation: first updates in which only the value function learns"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_profile(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name = values.get("profile", "default")
        return {**PROFILES[name], **values} if isinstance(name, str) and name in PROFILES else values

    @model_validator(mode="after")
    def _whole_minibatches(self) -> PPOSettings:
        rollout = self.n_steps * self.n_envs
        if rollout > self.batch_size and rollout % self.batch_size:
            raise ValueError(
                f"batch_size: expected a divisor of n_steps x n_envs = {rollout}, or at least that, got {self.batch_size}"
            )
        return self

    @property
    def rollout(self) -> int:
        """Environment steps between two updates."""
        return self.n_steps * self.n_envs

    @property
    def rollouts(self) -> int:
        """Rollouts, and updates, in all."""
        return -(-self.total_steps // self.rollout)

    @property
    def segments(self) -> int:
        """Segments in all; the last may be shorter."""
        return -(-self.rollouts // self.segment)

    def with_profile(self, profile: Profile) -> PPOSettings:
        """Return these settings under another profile, whose values replace what was given for them."""
        kept = self.model_dump(include=self.model_fields_set - set(PROFILES[profile]) - {"profile"})
        return PPOSettings(**kept, profile=profile)
