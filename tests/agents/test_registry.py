"""Policies are found by name, and a name that means nothing says what would."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agents.baselines import HoldPolicy, MiddlePolicy, StaticPolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.hill_climbing import HillClimbingPolicy
from agents.marginal_hits import MarginalHitsPolicy
from agents.policy import Policy
from agents.ppo import DEFAULT, PPOPolicy
from agents.registry import EXPECTED, load_policy, policies, pretrained
from agents.ttl_approximation import TTLApproximationPolicy
from agents.ttl_rule import TTLRulePolicy
from serving.knobs import Knobs
from tests.agents.observations import store


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
    assert (policy.hysteresis, policy.smoothing) == (0.05, None)
    assert (policy.name, load_policy("curve").name) == ("curve:0.05", "curve")


def test_the_curve_takes_a_smoothing() -> None:
    policy = load_policy("curve:hysteresis=0.02, smoothing=0.1")
    assert isinstance(policy, CurvePolicy)
    assert (policy.hysteresis, policy.smoothing) == (0.02, 0.1)
    assert policy.name == "curve:smoothing=0.1,hysteresis=0.02"
    assert load_policy("curve:smoothing=1").name == "curve:smoothing=1"
    assert load_policy("curve:hysteresis=0.02").name == "curve:0.02"


@pytest.mark.parametrize(
    ("name", "kind", "full_name"),
    [
        ("hold", HoldPolicy, "hold"),
        ("mid-grid", MiddlePolicy, "mid-grid"),
        ("last-curve", LastCurvePolicy, "last-curve"),
        ("curve+2.0-0.5+0", OffsetPolicy, "curve+2-0.5+0"),
        ("hill-climbing", HillClimbingPolicy, "hill-climbing"),
        ("hill-climbing:period=5,step=0.0625", HillClimbingPolicy, "hill-climbing:period=5"),
        ("hill-climbing:decay=0.9,restart=0.2,step=0.1", HillClimbingPolicy, "hill-climbing:step=0.1,restart=0.2,decay=0.9"),
        ("marginal-hits:band=0.2", MarginalHitsPolicy, "marginal-hits:band=0.2"),
        ("ttl-rule", TTLRulePolicy, "ttl-rule"),
        ("ttl-rule:base=3600", TTLRulePolicy, "ttl-rule:base=3600"),
        ("ttl-approximation:smoothing=0.3,gain=5", TTLApproximationPolicy, "ttl-approximation:gain=5,smoothing=0.3"),
    ],
)
def test_policies_are_found_by_name_and_parameters(name: str, kind: type[Policy], full_name: str) -> None:
    policy = load_policy(name)
    assert isinstance(policy, kind)
    assert policy.name == full_name


def test_all_policies_are_listed_once_with_a_line_each() -> None:
    listed = policies()
    names = [entry.name for entry in listed]
    assert len(set(names)) == len(names)
    assert {"static", "curve", "last-curve", "hill-climbing", "marginal-hits", "ttl-rule", "ttl-approximation", "ppo"} <= {*names}
    for entry in listed:
        assert entry.usage.startswith(entry.name)
        assert entry.usage in EXPECTED
        assert entry.summary
        assert "\n" not in entry.summary
        assert entry.example.partition(":")[0] == entry.name
        if entry.name != "ppo":
            assert load_policy(entry.example).name.startswith(entry.name)
    assert all(f"ppo:{name}" in listed[-1].summary for name in pretrained())


def test_the_shipped_policy_is_one_of_those_there_are() -> None:
    assert DEFAULT in pretrained()


def test_a_directory_is_a_trained_policy(tmp_path: Path) -> None:
    policy = load_policy(str(store(tmp_path / "policy", name="mine")))
    assert isinstance(policy, PPOPolicy)
    assert policy.name == "ppo:mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("best", r"expected static:<size>,<ttl>\[,<warm-up ratio>\], hold, mid-grid, curve\[:<hysteresis>\]"),
        ("hill-climbng:period=2", r"did you mean hill-climbing:period=2\? expected"),
        ("ttl-aproximation", r"did you mean ttl-approximation\?"),
        ("marginal_hits", r"did you mean marginal-hits\?"),
        ("last-curve:1", "expected no parameters, got '1'"),
        ("curve:smothing=0.1", r"no parameter 'smothing': did you mean smoothing\?"),
        ("curve:smoothing=0", r"smoothing: expected a weight in \(0, 1\]"),
        ("curve:smoothing=0.1,smoothing=0.2", "smoothing is given twice"),
        ("curve:smoothing=0.1,0.02", "'0.02': expected <parameter>=<number> with smoothing or hysteresis"),
        ("hill-climbing:5", "expected <parameter>=<number> with step or restart or decay or period"),
        ("hill-climbing:period=1.5", "period: expected a whole number"),
        ("hill-climbing:step=2", r"step: expected a share in \(0, 1\]"),
        ("hill-climbing:decay=nan", "expected a finite number"),
        ("marginal-hits:average=1", r"average: expected a weight in \[0, 1\)"),
        ("marginal-hits:weight=1", "no parameter 'weight': expected average or band or step"),
        ("ttl-rule:base=-1", "base: expected a finite number of seconds > 0"),
        ("ttl-rule:base=inf", "expected a finite number"),
        ("ttl-approximation:coverage=0", r"coverage: expected a share in \(0, 1\]"),
        ("static:1e999,30", "size '1e999': expected a finite number"),
        ("static:1e308GiB,30", "size '1e308GiB': expected a finite number of bytes"),
        ("static:", "expected static:<size>,<ttl>"),
        ("static:ten,30", "size 'ten': expected bytes or a number"),
        ("static:1MiB,-1", "expected seconds > 0"),
        ("static:1MiB,nan", "expected a finite number"),
        ("static:1MiB,30,2", "between 0 and 1"),
        ("curve:x", "expected a number"),
        ("curve:2", "expected a share"),
        ("ppo:nobody", "no such shipped policy"),
        ("ppo:siutes", "did you mean ppo:suites"),
        ("/nowhere/at/all", "or a directory"),
    ],
)
def test_a_name_that_means_nothing_says_what_would(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_policy(name)
    assert str(caught.value).startswith(f"policy {name!r}: ")
