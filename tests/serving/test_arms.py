from __future__ import annotations

import pytest

from serving.arms import ArmAssignment
from tests.serving.entries import key

KEYS = [key(number) for number in range(20_000)]


@pytest.mark.parametrize("shares", [{"control": 0.5, "treatment": 0.5}, {"a": 0.1, "b": 0.2, "c": 0.7}])
def test_arms_get_their_shares_of_the_keys(shares: dict[str, float]) -> None:
    assignment = ArmAssignment("salt", shares)
    assigned = [assignment.arm(name) for name in KEYS]
    for arm, share in shares.items():
        assert assigned.count(arm) / len(KEYS) == pytest.approx(share, abs=0.02)
    assert assignment.arms == tuple(shares)


def test_every_replica_assigns_a_key_to_the_same_arm_for_good() -> None:
    shares = {"control": 0.5, "treatment": 0.5}
    one, other = ArmAssignment("salt", shares), ArmAssignment("salt", shares)
    assert [one.arm(name) for name in KEYS] == [other.arm(name) for name in KEYS]
    # A pinned sample: a change of the hash would move keys between arms of an experiment under way.
    assert [one.arm(key(number)) for number in range(8)] == PINNED


PINNED = ["treatment", "treatment", "control", "treatment", "treatment", "treatment", "treatment", "treatment"]


def test_another_salt_gives_an_independent_split() -> None:
    shares = {"control": 0.5, "treatment": 0.5}
    one, other = ArmAssignment("salt", shares), ArmAssignment("pepper", shares)
    same = sum(one.arm(name) == other.arm(name) for name in KEYS)
    assert same / len(KEYS) == pytest.approx(0.5, abs=0.02)


def test_a_single_arm_gets_everything() -> None:
    assert {ArmAssignment("salt", {"all": 1.0}).arm(name) for name in KEYS[:100]} == {"all"}


@pytest.mark.parametrize("shares", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}, {"a": float("nan")}])
def test_shares_that_are_none_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="arms: expected shares > 0 that sum to 1"):
        ArmAssignment("salt", shares)
