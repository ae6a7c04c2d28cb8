"""What is measured of supervision: estimates beside a real second cache, false benches, delays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from agents.curve import CurvePolicy, OffsetPolicy
from agents.supervised import Supervision
from envs.objective import Prices
from envs.simulator import SimConfig
from envs.task import Scenario
from envs.workloads import sessions
from envs.workloads.patterns import add_documents
from experiments.supervision import BREAKS_AT, Trial, main, play, sabotages, summary, text
from serving.knobs import KnobSpace

RULES = Supervision(window=20, least=5, margin=0.05, certainty=3.0)


def trial(excess: list[float], estimated: list[float] | None = None, policy: str = "some") -> Trial:
    """A trial in which the curve costs 1 in every interval."""
    ours = 1.0 + np.array(excess)
    return Trial(policy, "case", ours, np.ones(len(ours)), ours - np.array(estimated or excess))


def noise(mean: float, count: int = 60) -> list[float]:
    return list(np.random.default_rng(0).normal(mean, 0.02, count))


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    trace = sessions(4_000, 600, duration=12 * 3600.0, seed=1)
    space = KnobSpace(min_size=1 << 14, max_size=1 << 21, min_ttl=60.0, max_ttl=40_000.0)
    prices = replace(Prices(), memory_gib_hour=20.0)
    return Scenario(trace, SimConfig(space=space, prices=prices, staleness_half_life=1e5), 900.0)


def test_the_curve_beside_itself_is_estimated_without_error(scenario: Scenario) -> None:
    (played,) = play([CurvePolicy()], "small", scenario, length=40)
    assert len(played.ours) == len(played.truth) == len(played.estimate) == 39
    assert played.excess() == pytest.approx(0.0, abs=1e-9)
    assert np.nanmax(np.abs(played.estimate - played.truth)) == pytest.approx(0.0, abs=1e-9)
    assert np.isfinite(played.estimate).sum() > 30


def test_what_the_curve_would_have_cost_is_estimated_near_what_it_did_cost(scenario: Scenario) -> None:
    smaller, larger = play([OffsetPolicy((-2.0, 0.0, 0.0)), OffsetPolicy((1.0, -1.0, 0.0))], "small", scenario, length=40)
    for played in (smaller, larger):
        assert played.estimated_excess() == pytest.approx(played.excess(), abs=0.05)
    assert smaller.excess() > 0.02


def storms(stale_factor: float) -> Scenario:
    """Answers rest on documents, of which most change twice a day; the curve knows nothing of it and keeps all answers."""
    day = 86_400.0
    trace = add_documents(
        sessions(8_000, 600, duration=1.5 * day, seed=1), documents=100, alpha=0.5, updates=0.2,
        storms=[9_000.0, 52_200.0, 95_400.0], storm_share=0.6, storm_length=300.0, seed=1,
    )  # fmt: skip
    space = KnobSpace(min_size=1 << 14, max_size=1 << 21, min_ttl=900.0, max_ttl=3.0 * day)
    prices = replace(Prices(), memory_gib_hour=5.0, stale_answer=stale_factor * Prices().stale_answer)
    return Scenario(trace, SimConfig(space=space, prices=prices, staleness_half_life=math.inf), 900.0)


def test_a_policy_that_forgets_updates_sooner_than_the_curve_is_known_to_be_cheaper() -> None:
    policies = [OffsetPolicy((0.0, -3.0, 0.0)), OffsetPolicy((0.0, -4.0, 1.0))]
    for played in play(policies, "storms", storms(1.0), length=142):
        assert played.excess() < -0.5
        assert played.estimated_excess() < 0.4 * played.excess()
        assert played.benched_at(Supervision()) is None


def test_a_policy_that_is_dearer_in_spite_of_updates_is_benched() -> None:
    (smaller,) = play([OffsetPolicy((-5.0, 0.0, 0.0))], "storms", storms(0.1), length=142)
    assert smaller.excess() > 0.5
    assert smaller.estimated_excess() == pytest.approx(smaller.excess(), rel=0.1)
    assert smaller.benched_at(Supervision()) is not None


def test_a_policy_is_benched_once_the_evidence_is_there_and_not_for_noise() -> None:
    assert trial(noise(0.0)).benched_at(RULES) is None
    assert trial(noise(0.3)).benched_at(RULES) == RULES.least - 1
    at = trial([*noise(0.0, 30), *noise(0.5, 30)]).benched_at(RULES)
    assert at is not None
    assert 30 < at < 45


def test_intervals_without_an_estimate_are_left_out() -> None:
    played = trial(noise(0.3))
    played.estimate[:10] = math.nan
    assert played.benched_at(RULES) == 10 + RULES.least - 1
    assert len(played.errors()) == 50


def test_the_summary_counts_false_benches_delays_and_what_was_missed() -> None:
    calm = noise(0.0, BREAKS_AT)
    good = [trial(noise(-0.1)), trial(noise(-0.1), estimated=noise(0.3)), trial(noise(0.2))]
    bad = [
        trial([*calm, *noise(0.5, 40)], policy="worse"),
        trial([*calm, *noise(0.5, 40)], estimated=[*calm, *noise(0.0, 40)], policy="worse"),
    ]
    found = summary(good, bad, RULES)
    assert found["false_benches"]["as_good_as_the_curve"] == 2
    assert found["false_benches"]["benched"] == 1
    assert found["false_benches"]["sabotaged_before_they_broke"] == 0
    (row,) = found["detection"]
    assert (row["harmful"], row["benched"]) == (2, 1)
    assert 1 < row["median_delay"] < 20
    assert row["missed_excess"] == [pytest.approx(0.5, abs=0.05)]
    (estimator,) = found["estimator"]
    assert estimator["bias"] == pytest.approx(0.4 / 3, abs=0.02)
    shown = text(found)
    assert "2 runs, benched: 1" in shown
    assert "missed: [" in shown


def test_sabotaged_policies_are_the_curve_until_they_break(scenario: Scenario) -> None:
    kinds = sabotages()
    played = play(kinds, "small", scenario, length=30)
    assert len({kind.name for kind in kinds}) == 5
    assert all(each.excess() == pytest.approx(0.0, abs=1e-9) for each in played)


def test_traces_that_are_not_there_are_named(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path)]) == 2
    assert "servegen" in capsys.readouterr().err
