"""The benchmark of an update times both profiles, and says what the goal is."""

from __future__ import annotations

import pytest

from experiments.bench.ppo_update import GOAL, run


@pytest.mark.slow
def test_each_profile_is_timed_beside_the_goal() -> None:
    result = run(2)
    assert [row["profile"] for row in result.rows][:2] == ["default", "article"]
    assert all(row["update"] > 0 and row["update_cpu"] > 0 and row["steps"] > 0 and row["article"] == GOAL for row in result.rows)
    assert result.ratio == pytest.approx(GOAL / max(row["update"] for row in result.rows[:2]))
