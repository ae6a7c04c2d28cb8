"""Profiles: what is given beats them, and they beat the defaults."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agents.settings import PPOSettings


def test_the_articles_profile_has_the_articles_values() -> None:
    article = PPOSettings(profile="article")
    assert (article.learning_rate, article.learning_rate_end) == (3e-5, 3e-5)
    assert (article.clip_range, article.batch_size, article.n_epochs) == (0.1, 512, 10)


def test_what_is_given_overrides_the_profile() -> None:
    mixed = PPOSettings(profile="article", clip_range=0.3)
    assert (mixed.clip_range, mixed.learning_rate) == (0.3, 3e-5)


def test_another_profile_replaces_what_it_says_and_keeps_the_rest() -> None:
    own = PPOSettings(learning_rate=5e-4, gamma=0.9, n_envs=4)
    article = own.with_profile("article")
    assert (article.learning_rate, article.gamma, article.n_envs, article.profile) == (3e-5, 0.9, 4, "article")
    assert PPOSettings.model_validate(article.model_dump()) == article


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"profile": "best"}, "profile"),
        ({"profile": ["article"]}, "profile"),
        ({"n_envs": 3, "n_steps": 100, "batch_size": 64}, "expected a divisor of n_steps x n_envs = 300"),
        ({"hysteresis": 1}, "hysteresis"),
        ({"learning_rate": 1e30}, r"learning_rate\n.*less than or equal to 1 "),
        ({"learning_rate_end": 1.5}, r"learning_rate_end\n.*less than or equal to 1 "),
        ({"warm_start_learning_rate": 2}, r"warm_start_learning_rate\n.*less than or equal to 1 "),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PPOSettings.model_validate(values)


def test_rollouts_and_segments_are_rounded_up() -> None:
    settings = PPOSettings(total_steps=100, n_envs=2, n_steps=8, batch_size=16, segment=3)
    assert (settings.rollout, settings.rollouts, settings.segments) == (16, 7, 3)
