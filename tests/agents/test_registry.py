"""Policies are found by name, and a name that means nothing says what would."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from agents.artifact import save
from agents.baselines import StaticPolicy
from agents.curve import CurvePolicy
from agents.ppo import PPOPolicy
from agents.registry import load_policy
from envs.observation import DIM
from serving.knobs import Knobs
from tests.agents.observations import network


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("static:1048576,30,0", Knobs(1 << 20, 30.0, 0.0)),
        ("static:1 MiB,30", Knobs(1 << 20, 30.0, 0.0)),
        ("static:1.5gib,inf,0.25", Knobs(3 << 29, math.inf, 0.25)),
        ("static:10MB,1e3,0", Knobs(10_000_000, 1000.0, 0.0)),
    ],
)
def test_static_settings_are_read(name: str, knobs: Knobs) -> None:
    policy = load_policy(name)
    assert isinstance(policy, StaticPolicy)
    assert policy.knobs == knobs
    again = load_policy(policy.name)
    assert isinstance(again, StaticPolicy)
    assert again.knobs == knobs


def test_the_curve_takes_a_hysteresis() -> None:
    policy = load_policy("curve:0.05")
    assert isinstance(policy, CurvePolicy)
    assert policy.hysteresis == 0.05
    assert (policy.name, load_policy("curve").name) == ("curve:0.05", "curve")


def test_a_directory_is_a_trained_policy(tmp_path: Path) -> None:
    save(
        tmp_path,
        name="mine",
        network=network(1),
        radius=(3.0, 2.0, 2.0),
        probe=np.zeros(DIM, np.float32),
        training={},
        evaluation={},
    )
    policy = load_policy(str(tmp_path))
    assert isinstance(policy, PPOPolicy)
    assert policy.name == "ppo:mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best", "expected curve, curve:<hysteresis>, last-curve, static"),
        ("static:", "expected static:<size>,<ttl>"),
        ("static:ten,30", "size 'ten': expected bytes or a number"),
        ("static:1MiB,-1", "expected seconds > 0"),
        ("static:1MiB,nan", "expected a finite number"),
        ("static:1MiB,30,2", "between 0 and 1"),
        ("curve:x", "expected a number"),
        ("curve:2", "expected a share"),
        ("ppo:nobody", "no such shipped policy"),
        ("/nowhere/at/all", "expected curve"),
    ],
)
def test_a_name_that_means_nothing_says_what_would(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_policy(name)
