"""A policy under supervision: who is in charge, when that changes, and what the ledger is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.baselines import HoldPolicy, StaticPolicy
from agents.curve import CurvePolicy, OffsetPolicy
from agents.policy import Policy, Proposal
from agents.registry import load_policy, policies
from agents.supervised import Evidence, SupervisedPolicy, Supervision, weigh
from envs.action import limit_step
from envs.cache_env import FIXED, CacheTuningEnv
from envs.observation import Observation, ObservationBuilder
from envs.observation_vector import HIGH, LOW
from envs.signals import ArmSignals
from envs.simulator import SimConfig
from envs.task import Scenario
from envs.workloads import sessions
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace
from tests.agents.observations import KNOBS, PRICES, SPACE, ghost, nothing, signals
from tuner.guard import GuardLimits, judge

QUICK = Supervision(window=12, least=4, rest=5, longest_rest=15, probation=6)


class Scripted:
    """Proposes what a function says, which counts from 0."""

    def __init__(self, choose: Callable[[int, Observation], Any], name: str = "scripted") -> None:
        self._choose = choose
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.asked = 0

    def decide(self, observation: Observation) -> Proposal:
        self.asked += 1
        result = self._choose(self.asked - 1, observation)
        return result if isinstance(result, Proposal) else Proposal(result, "as the script says")


def failing(after: int, until: int = 10**9) -> Scripted:
    def choose(asked: int, observation: Observation) -> Knobs:
        if after <= asked < until:
            raise ZeroDivisionError("broken")
        return observation.space.clip(observation.knobs)

    return Scripted(choose)


def corner(observation: Observation) -> Knobs:
    return observation.space.from_steps([0.0, 0.0, 0.0])


class Loop:
    """A cache of a made ghost curve: every setting hits what the ghost says, under the knobs that were asked for."""

    def __init__(self, policy: SupervisedPolicy) -> None:
        self.policy = policy
        self.builder = ObservationBuilder(SPACE, PRICES)
        self.knobs = KNOBS
        self.proposals: list[Proposal] = []

    def turn(self, **changes: Any) -> Proposal:
        curve = ghost()
        row, column = (round(step) for step in SPACE.to_steps(self.knobs)[:2])
        ratio = float(curve.hits[row, column]) / 300.0
        misses = 300.0 * (1.0 - ratio)
        window = signals(
            hit_ratio=ratio, input_tokens=50.0 * misses, output_tokens=300.0 * misses, latency_sum=0.3 * misses,
            stale_hits=float(curve.stale_hits[row, column]), ghost=curve, p99=0.5,
        )  # fmt: skip
        proposal = self.policy.decide(self.builder.build(replace(window, **changes), self.knobs))
        self.knobs = limit_step(proposal.knobs, self.knobs, SPACE)
        self.proposals.append(proposal)
        return proposal

    def turns(self, count: int) -> list[Proposal]:
        return [self.turn() for _ in range(count)]

    def benched(self) -> list[int]:
        return [int(proposal.details["benched"]) for proposal in self.proposals]


def test_it_is_a_policy_with_the_name_of_the_one_it_runs() -> None:
    policy = SupervisedPolicy(HoldPolicy())
    assert isinstance(policy, Policy)
    assert policy.name == "hold (supervised)"


def test_a_policy_that_is_the_curve_is_never_benched_and_its_excess_is_nothing() -> None:
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: CurvePolicy().decide(seen)), supervision=QUICK))
    loop.turns(60)
    assert not any(loop.benched())
    last = loop.proposals[-1]
    assert last.details["excess"] == pytest.approx(0.0, abs=1e-9)
    assert last.details["excess_intervals"] == QUICK.window
    assert last.reason.startswith("smoothed curve is cheapest")


def test_a_policy_that_costs_more_is_benched_and_the_reason_says_by_how_much() -> None:
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: corner(seen)), supervision=QUICK))
    loop.turns(12)
    assert 1 in loop.benched()
    proposal = loop.proposals[loop.benched().index(1)]
    assert "scripted benched now" in proposal.reason
    assert "more than curve would have over" in proposal.reason
    assert "smoothed curve is cheapest" in proposal.reason
    assert proposal.details["excess"] > 0.1
    assert proposal.details["excess_t"] >= QUICK.certainty
    assert proposal.details["bench_left"] == QUICK.rest
    assert proposal.details["reference_cost"] > 0.0
    assert all(math.isfinite(value) for value in proposal.details.values())


def test_while_it_is_benched_the_cache_is_where_the_curve_wants_it() -> None:
    supervision = replace(QUICK, rest=10)
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: corner(seen)), supervision=supervision))
    while not loop.policy.benched:
        loop.turn()
    proposals = loop.turns(9)
    assert all(proposal.details["benched"] for proposal in proposals)
    observation = loop.builder.build(signals(), loop.knobs)
    assert proposals[-1].knobs == observation.anchor
    assert "benched for 9 intervals, another try in 1" in proposals[-1].reason


def test_rests_double_up_to_a_bound_while_it_keeps_failing() -> None:
    loop = Loop(SupervisedPolicy(failing(0), supervision=QUICK))
    loop.turns(60)
    # One interval's benching begins as the other ends: the fault is met again at once.
    rests = [proposal.details["bench_left"] for proposal in loop.proposals if "benched now" in proposal.reason]
    assert rests[:4] == [5.0, 10.0, 15.0, 15.0]


def test_a_policy_that_behaves_on_probation_keeps_its_place_and_its_next_rest_is_the_first_again() -> None:
    loop = Loop(SupervisedPolicy(failing(2, until=4), supervision=QUICK))
    loop.turns(30)
    benched = loop.benched()
    first = benched.index(1)
    assert benched[first : first + QUICK.rest + 1] == [1] * QUICK.rest + [0]
    assert f"on probation for {QUICK.probation} more intervals" in loop.proposals[first + QUICK.rest].reason
    assert not any(benched[first + QUICK.rest :])
    assert "probation" not in loop.proposals[-1].reason
    loop.policy.policy = failing(0)
    assert loop.turn().details["bench_left"] == QUICK.rest


def test_one_that_fails_on_probation_rests_twice_as_long() -> None:
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: corner(seen)), supervision=QUICK))
    loop.turns(60)
    rests = [proposal.details["bench_left"] for proposal in loop.proposals if "benched now" in proposal.reason]
    assert rests[:3] == [5.0, 10.0, 15.0]


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda asked, seen: 1 / 0, "ZeroDivisionError"),
        (lambda asked, seen: Proposal(None, "nothing"), "AttributeError"),  # type: ignore[arg-type]
        (lambda asked, seen: Knobs(1 << 50, 60.0), "out of the space"),
        (lambda asked, seen: Knobs(1 << 20, math.inf), "out of the space"),
        (lambda asked, seen: Knobs(1 << 20, 60.0, math.nan), "ValueError"),
        (lambda asked, seen: Knobs(1 << 20, 1e-9), "out of the space"),
    ],
)
def test_what_no_cache_can_run_is_benched_at_once(choose: Callable[[int, Observation], Any], words: str) -> None:
    loop = Loop(SupervisedPolicy(Scripted(choose), supervision=QUICK))
    proposal = loop.turn()
    assert proposal.details["benched"] == 1.0
    assert words in proposal.reason
    assert SPACE.contains(proposal.knobs)


def test_details_that_are_no_mapping_are_the_policys_fault_and_do_not_stop_the_loop() -> None:
    broken: Any = None
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: Proposal(KNOBS, "why", broken)), supervision=QUICK))
    assert "scripted benched now, another try in 5: it failed: TypeError" in loop.turn().reason


def test_a_policy_that_cannot_be_reset_is_benched_and_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Scripted(lambda asked, seen: KNOBS)
    loop = Loop(SupervisedPolicy(policy, supervision=QUICK))
    monkeypatch.setattr(policy, "reset", lambda: 1 / 0)
    loop.policy.reset()
    assert loop.policy.benched
    assert "its reset failed: ZeroDivisionError" in loop.turn().reason


def test_it_holds_where_not_even_the_fallback_can_be_asked() -> None:
    loop = Loop(SupervisedPolicy(failing(0), Scripted(lambda asked, seen: 1 / 0, "spare"), QUICK))
    proposal = loop.turn()
    assert proposal.knobs == KNOBS
    assert "held: spare it failed" in proposal.reason


def test_it_is_asked_while_it_is_benched_so_that_it_does_not_lose_the_thread() -> None:
    policy = failing(2, until=3)
    loop = Loop(SupervisedPolicy(policy, supervision=QUICK))
    loop.turns(20)
    assert policy.asked == 20


def test_a_reset_puts_the_policy_back_in_charge() -> None:
    policy = SupervisedPolicy(Scripted(lambda asked, seen: corner(seen)), supervision=QUICK)
    first, second = Loop(policy), Loop(policy)
    first.turns(20)
    policy.reset()
    assert not policy.benched
    second.turns(20)
    assert first.proposals == second.proposals


def test_windows_that_tell_nothing_are_no_evidence() -> None:
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: corner(seen)), supervision=QUICK))
    for _ in range(30):
        loop.turn(ghost=None)
    assert not any(loop.benched())
    assert loop.proposals[-1].details["excess_intervals"] == 0.0


def test_knobs_that_the_guard_held_are_not_held_against_the_policy() -> None:
    loop = Loop(SupervisedPolicy(CornerAfterAll(), supervision=QUICK))
    for _ in range(30):
        loop.turn()
        loop.knobs = KNOBS  # nothing is ever applied
    assert not any(loop.benched())
    assert loop.proposals[-1].details["excess"] == pytest.approx(0.0, abs=1e-9)


class CornerAfterAll(Scripted):
    def __init__(self) -> None:
        super().__init__(lambda asked, seen: corner(seen))


def test_knobs_that_somebody_else_set_are_no_evidence() -> None:
    loop = Loop(SupervisedPolicy(Scripted(lambda asked, seen: CurvePolicy().decide(seen)), supervision=QUICK))
    by_hand = [SPACE.from_steps([0.0, 0.0, 0.0]), SPACE.from_steps([1.0, 5.0, 0.0])]
    for number in range(30):
        loop.turn()
        loop.knobs = by_hand[number % 2]
    assert not any(loop.benched())
    assert loop.proposals[-1].details["excess_intervals"] == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"least": 2}, {"least": 145}, {"rest": 0}, {"rest": 577}, {"probation": 0}, {"margin": -0.1}, {"margin": math.nan},
        {"certainty": math.inf},
    ],
)  # fmt: skip
def test_supervision_out_of_its_range_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"supervision: {next(iter(changes))}"):
        Supervision(**changes)


def test_evidence_is_the_excess_and_how_sure_it_is_above_the_margin() -> None:
    found = weigh([(0.1, 1.0), (0.3, 1.0), (0.2, 1.0), (0.2, 1.0)], 0.05)
    assert found.excess == pytest.approx(0.2)
    assert found.t == pytest.approx(0.15 / (np.std([0.1, 0.3, 0.2, 0.2], ddof=1) / 2.0))
    assert weigh([], 0.05) == Evidence()
    assert weigh([(0.5, 1.0)], 0.05) == Evidence(1)
    assert weigh([(0.0, 0.0)] * 5, 0.05) == Evidence(5)


def test_one_burst_is_no_evidence() -> None:
    calm = [(0.001, 1.0), (-0.001, 1.0)] * 10
    assert weigh([*calm, (1e6, 1.0)], 0.03).t < 3.0


def test_a_policy_no_worse_than_the_curve_stays_and_a_bad_one_goes_on_the_real_simulator() -> None:
    space = KnobSpace(min_size=1 << 15, max_size=1 << 22, min_ttl=60.0, max_ttl=40_000.0)
    trace = sessions(12_000, 1_500, duration=24 * 3600.0, seed=3)
    prices = replace(PRICES, memory_gib_hour=20.0)
    scenario = Scenario(trace, SimConfig(space=space, prices=prices, staleness_half_life=1e5), 900.0)

    def benched(policy: Policy) -> list[float]:
        supervised = SupervisedPolicy(policy)
        env = CacheTuningEnv(scenarios=lambda rng: scenario, episode_length=90, randomise=FIXED)
        supervised.reset()
        env.reset(seed=0)
        seen, over = [], False
        while not over:
            proposal = supervised.decide(env.observation)
            seen.append(proposal.details["benched"])
            *_, over, _ = env.step_knobs(proposal.knobs)
        return seen

    assert sum(benched(OffsetPolicy((0.25, 0.0, 0.0)))) == 0
    bad = benched(Scripted(lambda asked, seen: corner(seen)))
    assert 0 < bad.index(1.0) <= 25


_ANY = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e308, -1.0, 5e-324]))
_NUMBERS = [item.name for item in fields(ArmSignals) if item.name not in ("arm", "hit_ratio_by_tier", "age", "ghost")]


@st.composite
def _garbage(draw: st.DrawFn) -> ArmSignals:
    """Draw a window in which anything may be missing or broken, its curve and its ages as well."""
    values: dict[str, Any] = {name: draw(_ANY) for name in draw(st.sets(st.sampled_from(_NUMBERS), max_size=8))}
    kind = draw(st.sampled_from(["whole", "none", "broken", "flat", "other grid"]))
    whole = ghost()
    if kind == "none":
        values["ghost"] = None
    elif kind == "broken":
        hits, stale = whole.hits.copy(), whole.stale_hits.copy()
        draw(st.sampled_from([hits, stale]))[draw(st.integers(0, 15)), draw(st.integers(0, 7))] = draw(_ANY)
        values["ghost"] = GhostCurve(whole.sizes, whole.ttls, hits, stale, draw(_ANY))
    elif kind == "flat":
        values["ghost"] = GhostCurve(whole.sizes, whole.ttls, np.full_like(whole.hits, draw(_ANY)), whole.stale_hits, 0.0)
    elif kind == "other grid":
        values["ghost"] = GhostCurve(whole.sizes[2:], whole.ttls[1:], whole.hits[2:, 1:], whole.stale_hits[2:, 1:], draw(_ANY))
    values["age"] = draw(st.dictionaries(st.sampled_from(["requests", "latency", "hits"]), _ANY, max_size=3))
    return signals(**values)


class Watched:
    """Lets a policy see only vectors that a network may see."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.seen = 0

    def reset(self) -> None:
        self._policy.reset()

    def decide(self, observation: Observation) -> Proposal:
        vector = observation.vector
        assert np.all(np.isfinite(vector))
        assert np.all((vector >= LOW) & (vector <= HIGH))
        self.seen += 1
        return self._policy.decide(observation)


def _examples() -> list[str]:
    return [listed.example for listed in policies() if not listed.example.startswith("ppo") or _loads(listed.example)]


def _loads(name: str) -> bool:
    try:
        load_policy(name)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", _examples())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(windows=st.lists(_garbage(), min_size=2, max_size=5), size=st.integers(0, 1 << 62), ttl=st.floats(1e-300, math.inf))
def test_whatever_is_measured_the_knobs_that_come_out_are_legal(
    name: str, windows: list[ArmSignals], size: int, ttl: float
) -> None:
    watched = Watched(load_policy(name))
    policy = SupervisedPolicy(watched, supervision=Supervision(window=3, least=3, rest=1))
    policy.reset()
    builder, knobs = ObservationBuilder(SPACE, PRICES), Knobs(size, ttl, 0.9)
    for window in [*windows, nothing(), signals()]:
        proposal = policy.decide(builder.build(window, knobs))
        assert SPACE.contains(proposal.knobs)
        assert math.isfinite(proposal.knobs.ttl)
        assert all(math.isfinite(value) for key, value in proposal.details.items() if key in ("benched", "excess", "excess_t"))
        assert "AssertionError" not in proposal.reason
        verdict = judge(proposal, knobs, window, SPACE, GuardLimits())
        assert verdict.knobs == knobs or SPACE.contains(verdict.knobs)
        knobs = verdict.knobs
    assert watched.seen == len(windows) + 2


def test_a_setting_by_hand_that_is_worse_would_be_benched_like_any_other() -> None:
    loop = Loop(SupervisedPolicy(StaticPolicy(SPACE.from_steps([0.0, 0.0, 0.0])), supervision=QUICK))
    loop.turns(20)
    assert any(loop.benched())
