"""Acceptance by meaning keeps the stated bound, learns, forgets, listens to people and stays small."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.meaning.acceptance import LEAST_OUTCOMES, OUTCOMES, Acceptance, Outcome, Over
from serving.meaning.acceptance_feed import AcceptanceFeed
from serving.meaning.acceptance_model import BINS, bin_of, fit_pool

Right = Callable[[int, float], float]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def varied(number: int, similarity: float) -> float:
    """Entries differ in where their answers begin to be right; one in 500 is wrong whatever the similarity."""
    shift = 0.05 * math.sin(12.9898 * number)
    return 0.998 * logistic(40.0 * (similarity - 0.8 - shift))


class World:
    """Requests that meet entries at random, and whether each entry's answer would be right."""

    def __init__(self, acceptance: Acceptance, right: Right = varied, *, entries: int = 150, seed: int = 0) -> None:
        self.acceptance = acceptance
        self.right = right
        self.entries = entries
        self.random = np.random.default_rng(seed)

    def serve(self, requests: int, *, max_error: float | None = None) -> tuple[int, int]:
        """Return hits and wrong hits."""
        hits = wrong = 0
        for _ in range(requests):
            number = int(self.random.integers(self.entries))
            similarity = float(0.6 + 0.4 * self.random.beta(4, 2))
            right = bool(self.random.random() < self.right(number, similarity))
            if self.acceptance.accepts(key(number), similarity, draw=self.random.random(), max_error=max_error):
                hits += 1
                wrong += not right
            else:
                self.acceptance.observe(key(number), similarity, right)
                if self.acceptance.fit_due():
                    self.acceptance.fit()
        return hits, wrong


@pytest.mark.parametrize("bound", [0.01, 0.05])
@pytest.mark.parametrize("over", ["lookups", "answers"])
def test_the_bound_is_kept_from_a_cold_start_on_and_hits_come(bound: float, over: Over) -> None:
    lookups, hits, wrong = 0, 0, 0
    for seed in range(2):
        world = World(Acceptance(bound, over=over), seed=seed)
        got = world.serve(3000)
        lookups, hits, wrong = lookups + 3000, hits + got[0], wrong + got[1]
    assert wrong <= bound * (lookups if over == "lookups" else hits)
    assert hits > (0.15 if over == "lookups" else 0.03) * lookups


def test_a_cold_cache_serves_nothing_whatever_the_similarity() -> None:
    acceptance = Acceptance(0.05)
    for number in range(LEAST_OUTCOMES - 1):
        assert not acceptance.accepts(key(number), 1.0, draw=0.999999)
        acceptance.observe(key(number), 1.0, True)
        acceptance.fit()
    assert acceptance.wrong_bound(key(0), 1.0) == 1.0


def test_what_nobody_has_counted_is_not_promised() -> None:
    # a logistic curve through 60 right outcomes would extrapolate to errors far below 1 %
    acceptance = Acceptance(0.001, over="answers")
    for number in range(60):
        acceptance.observe(key(number), 0.95, True)
    acceptance.fit()
    assert acceptance.wrong_bound(key(999), 0.99) > 0.001
    for number in range(6000):
        acceptance.observe(key(number), 0.95, True)
    acceptance.fit()
    assert acceptance.wrong_bound(key(9999), 0.99) < 0.005


def test_an_entry_is_judged_by_its_own_record() -> None:
    def right(number: int, similarity: float) -> float:
        return 0.999 if number % 2 else 0.3

    world = World(Acceptance(0.02, over="answers"), right, entries=60)
    world.serve(3000)
    good = [world.acceptance.wrong_bound(key(number), 0.9) for number in range(1, 60, 2)]
    bad = [world.acceptance.wrong_bound(key(number), 0.9) for number in range(0, 60, 2)]
    assert max(good) < min(bad)
    assert min(bad) > 0.3
    strange = world.acceptance.wrong_bound(key(1000), 0.9)
    assert max(good) < strange < min(bad)


def test_a_wrong_outcome_counts_at_once() -> None:
    world = World(Acceptance(0.05))
    world.serve(1500)
    before = world.acceptance.wrong_bound(key(999), 0.95)
    world.acceptance.observe(key(999), 0.95, False)
    assert world.acceptance.wrong_bound(key(999), 0.95) > 1.5 * before


@pytest.mark.parametrize("over", ["lookups", "answers"])
def test_a_caller_may_only_tighten(over: Over) -> None:
    world = World(Acceptance(0.05, over=over))
    world.serve(1500)
    candidates = [(key(number), similarity / 100) for number in range(60) for similarity in range(70, 101, 3)]
    draws = np.random.default_rng(1).random(len(candidates))

    def accepted(max_error: float | None) -> int:
        acceptance = copy.deepcopy(world.acceptance)
        return sum(
            acceptance.accepts(entry, similarity, draw=draw, max_error=max_error)
            for (entry, similarity), draw in zip(candidates, draws, strict=True)
        )

    assert accepted(0.5) == accepted(0.05) == accepted(None)
    assert 0 < accepted(0.02) < accepted(None)
    assert accepted(0.0) == 0


def test_a_callers_own_bound_holds_for_each_of_its_lookups() -> None:
    world = World(Acceptance(0.2))
    world.serve(1500)
    acceptance, entry = world.acceptance, key(3)
    similarity = next(place / 512 for place in range(512) if acceptance.wrong_bound(entry, place / 512) < 0.15)
    wrong = acceptance.wrong_bound(entry, similarity)
    served = sum(acceptance.accepts(entry, similarity, draw=draw / 500, max_error=wrong / 4) for draw in range(500))
    assert 0 < served <= 125


def test_however_the_mix_changes_the_account_is_never_overdrawn() -> None:
    world = World(Acceptance(0.02), lambda number, similarity: 0.9 if number % 2 else 0.1)
    world.serve(1500)
    acceptance = copy.deepcopy(world.acceptance)
    # nothing but hopeless lookups, then nothing but doubtful ones
    risked = served = 0.0
    for lookup in range(3000):
        entry = key(2 * (lookup % 70) + (lookup >= 1500))
        bound = acceptance.wrong_bound(entry, 0.95)
        if acceptance.accepts(entry, 0.95, draw=0.5):
            risked, served = risked + bound, served + 1
        assert risked <= 0.02 * (lookup + 1501)
    assert served > 20


def test_what_is_served_is_still_verified_now_and_then() -> None:
    world = World(Acceptance(0.05, audit=0.1), lambda *_: 1.0)
    world.serve(2000)
    before = world.acceptance.stats().outcomes
    hits, _ = world.serve(2000)
    assert world.acceptance.stats().outcomes - before > 0.05 * 2000
    assert hits > 0.8 * 2000


def test_a_world_that_changes_is_noticed_and_learned_anew() -> None:
    world = World(Acceptance(0.02, over="answers", audit=0.05), lambda number, similarity: 0.999)
    world.serve(3000)
    assert world.acceptance.stats().alarms == 0
    world.right = lambda number, similarity: 0.4
    hits, _ = world.serve(3000)
    assert world.acceptance.stats().alarms >= 1
    assert hits < 0.3 * 3000
    late, _ = world.serve(1000)
    assert late == 0


def test_a_world_that_stays_raises_no_alarm() -> None:
    alarms = 0
    for seed in range(2):
        world = World(Acceptance(0.02), seed=seed)
        world.serve(2000)
        alarms += world.acceptance.stats().alarms
    assert alarms == 0


def test_a_persons_bad_outweighs_many_automatic_verdicts_and_a_good_one_takes_it_back() -> None:
    world = World(Acceptance(0.05), lambda *_: 1.0)
    world.serve(2000)
    acceptance = world.acceptance
    assert acceptance.accepts(key(5), 0.95, draw=0.99)
    others = acceptance.wrong_bound(key(1000), 0.95)
    acceptance.feedback(key(5), good=False)
    assert not acceptance.accepts(key(5), 1.0, draw=0.999999)
    assert acceptance.wrong_bound(key(1000), 0.95) == others
    for _ in range(10):
        acceptance.observe(key(5), 0.95, True)
    acceptance.fit()
    assert not acceptance.accepts(key(5), 0.95, draw=0.999999)
    acceptance.feedback(key(5), good=True)
    acceptance.fit()
    assert acceptance.wrong_bound(key(5), 0.95) < 1.0


def test_one_good_verdict_says_more_than_one_automatic_outcome() -> None:
    world = World(Acceptance(0.02))
    world.serve(2000)
    fresh = world.acceptance.wrong_bound(key(900), 0.85)
    world.acceptance.observe(key(900), 0.85, True)
    world.acceptance.feedback(key(901), True, similarity=0.85)
    world.acceptance.fit()
    assert world.acceptance.wrong_bound(key(901), 0.85) < world.acceptance.wrong_bound(key(900), 0.85) < fresh


def test_an_entry_whose_answer_was_replaced_starts_anew() -> None:
    world = World(Acceptance(0.05))
    world.serve(1500)
    for _ in range(5):
        world.acceptance.observe(key(7), 0.95, False)
    world.acceptance.feedback(key(7), good=False)
    world.acceptance.forget(key(7))
    world.acceptance.forget(b"never seen")
    assert world.acceptance.wrong_bound(key(7), 0.95) == world.acceptance.wrong_bound(key(1000), 0.95)


def test_memory_is_bounded_and_the_entries_observed_last_stay() -> None:
    acceptance = Acceptance(0.05, max_entries=100)
    for number in range(1000):
        for _ in range(2 * OUTCOMES if number == 999 else 1):
            acceptance.observe(key(number), 0.9, number % 3 > 0)
    acceptance.fit()
    assert acceptance.stats().entries == 100
    state = acceptance.dump()
    assert list(state["entries"]) == [key(number).hex() for number in range(900, 1000)]
    assert len(state["entries"][key(999).hex()]["bins"]) == OUTCOMES
    assert len(acceptance.drain()) == 1000 + 2 * OUTCOMES - 1
    assert acceptance.drain() == []


def test_the_state_survives_json() -> None:
    world = World(Acceptance(0.05))
    world.serve(1500)
    world.acceptance.feedback(key(3), good=False)
    world.acceptance.fit()
    again = Acceptance(0.05)
    again.load(json.loads(json.dumps(world.acceptance.dump())))
    assert again.wrong_bound(key(5), 0.99) == 1.0  # not fitted yet
    assert again.fit_due()
    again.fit()
    for number in (0, 3, 5, 1000):
        assert again.wrong_bound(key(number), 0.9) == pytest.approx(world.acceptance.wrong_bound(key(number), 0.9), abs=2e-3)
    assert again.stats().outcomes == world.acceptance.stats().outcomes


@pytest.mark.parametrize(
    "change",
    [
        {"form": 0}, {"right": [1.0]}, {"wrong": [-1.0] * BINS}, {"count": "many"}, {"entries": []}, {"right": ["x"] * BINS},
        {"entries": {"zz": {"bins": [1], "weights": [1.0], "verdicts": 0}}},
        {"entries": {"00": {"bins": [BINS], "weights": [1.0], "verdicts": 0}}},
        {"entries": {"00": {"bins": [1] * 99, "weights": [1.0] * 99, "verdicts": 0}}},
    ],
    ids=lambda change: str(change)[:30],
)  # fmt: skip
def test_a_state_that_is_none_is_refused_and_changes_nothing(change: dict[str, object]) -> None:
    acceptance = Acceptance(0.05)
    acceptance.observe(key(1), 0.9, True)
    before = acceptance.dump()
    with pytest.raises(ValueError, match="expected a state written by dump"):
        acceptance.load({**before, **change})
    assert acceptance.dump() == before


async def test_a_fit_in_a_thread_loses_nothing_that_comes_meanwhile() -> None:
    world = World(Acceptance(0.05))
    world.serve(1000)
    acceptance = world.acceptance
    with ThreadPoolExecutor(1) as pool:
        fitting = asyncio.create_task(acceptance.refit(pool))
        await asyncio.sleep(0)
        acceptance.observe(key(7), 0.95, False)
        acceptance.forget(key(8))
        acceptance.observe(key(5000), 0.95, True)
        await fitting
    alone = Acceptance(0.05)
    alone.load(acceptance.dump())
    alone.fit()
    acceptance.fit()
    for number in (7, 8, 5000):
        assert acceptance.wrong_bound(key(number), 0.95) == pytest.approx(alone.wrong_bound(key(number), 0.95), abs=2e-3)


@pytest.mark.parametrize("values", [{"max_error": 0.0}, {"max_error": 1.0}, {"over": "hits"}, {"audit": 0.0}, {"memory": 1.0}])
def test_impossible_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="acceptance: "):
        Acceptance(**{"max_error": 0.05, **values})  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-1.0, 1.0), st.booleans()), min_size=LEAST_OUTCOMES, max_size=80),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_whatever_was_observed_bounds_are_probabilities_and_the_more_alike_is_never_trusted_less(
    outcomes: list[tuple[int, float, bool]], draw: float
) -> None:
    acceptance = Acceptance(0.1)
    for number, similarity, right in outcomes:
        acceptance.observe(key(number), similarity, right)
    acceptance.fit()
    for number in (0, 99):
        bounds = [acceptance.wrong_bound(key(number), place / 50) for place in range(51)]
        assert all(0.0 <= bound <= 1.0 for bound in bounds)
        assert all(after <= before + 1e-9 for before, after in itertools.pairwise(bounds))
        if acceptance.accepts(key(number), 0.9, draw=draw):
            assert acceptance.wrong_bound(key(number), 0.9) <= 0.5
    assert not acceptance.accepts(key(0), math.nan, draw=0.999)


@given(st.floats(-1.0, 1.0))
def test_no_question_counts_as_more_alike_than_it_is(similarity: float) -> None:
    place = bin_of(similarity)
    assert 0 <= place < BINS
    assert place / (BINS - 1) <= max(similarity, 0.0) + 1e-8


def test_the_pool_finds_the_curve_that_the_outcomes_were_drawn_from() -> None:
    random = np.random.default_rng(3)
    similarity = np.arange(BINS) / (BINS - 1)
    share = 0.98 / (1.0 + np.exp(-25.0 * (similarity - 0.8)))
    trials = np.where(similarity > 0.5, 400, 0)
    right = random.binomial(trials, share).astype(float)
    none = np.zeros((0, OUTCOMES))
    model = fit_pool(right, trials - right, none.astype(np.int16), none.astype(np.float32))
    assert model.lapse == pytest.approx(0.02, abs=0.005)
    for place in (410, 440, 470, 512):
        wrong = model.wrong(place, 0.0, model.spread)
        assert 1.0 - share[place] < wrong < 1.0 - share[place] + 0.02


async def test_replicas_learn_from_each_other(redis_url: str, namespace: str) -> None:
    one, two = Acceptance(0.05), Acceptance(0.05)
    feeds = [AcceptanceFeed(one, redis_url, namespace, "one"), AcceptanceFeed(two, redis_url, namespace, "two")]
    for feed in feeds:
        await feed.exchange()
    for number in range(1200):
        (one if number % 2 else two).observe(key(number % 50), 0.9, number % 7 > 0)
    one.feedback(key(3), good=False)
    for feed in (*feeds, *feeds):
        await feed.exchange()
    assert one.stats().outcomes == two.stats().outcomes == 1200
    one.fit()
    two.fit()
    assert two.wrong_bound(key(3), 0.9) == 1.0
    assert one.wrong_bound(key(4), 0.9) == pytest.approx(two.wrong_bound(key(4), 0.9), abs=0.02)
    for feed in feeds:
        await feed.close()


async def test_a_replica_that_starts_again_knows_what_was_learned(redis_url: str, namespace: str) -> None:
    first = Acceptance(0.05)
    feed = AcceptanceFeed(first, redis_url, namespace, "one", store_every=0.001)
    for number in range(200):
        first.observe(key(number % 20), 0.9, True)
    await feed.exchange()
    await asyncio.sleep(0.002)
    await feed.exchange()
    first.observe(key(1), 0.9, False)  # told, but in no stored state
    feed._store_every = 60.0
    await feed.exchange()
    await feed.close()
    again = Acceptance(0.05)
    feed = AcceptanceFeed(again, redis_url, namespace, "one")
    again.observe(key(2), 0.9, True)
    await feed.exchange()
    await feed.exchange()
    assert again.stats().outcomes == 202
    await feed.close()


async def test_without_redis_a_replica_learns_alone(tmp_path: object) -> None:
    acceptance = Acceptance(0.05)
    feed = AcceptanceFeed(acceptance, f"unix://{tmp_path}/nobody.sock", "alone", "one")
    acceptance.observe(key(1), 0.9, True)
    await feed.exchange()
    assert acceptance.stats().outcomes == 1
    await feed.close()


async def test_what_others_wrote_wrongly_is_ignored(redis_url: str, namespace: str) -> None:
    acceptance = Acceptance(0.05)
    feed = AcceptanceFeed(acceptance, redis_url, namespace, "one")
    await feed._redis.set(f"cachepilot:{{{namespace}}}:acceptance:state", b'{"last": "0-0", "acceptance": {"count": 5}}')
    await feed._redis.xadd(
        f"cachepilot:{{{namespace}}}:acceptance:outcomes", {"from": "two", "told": b'[["zz", 1, true, false]]'}
    )
    acceptance.observe(key(1), 0.9, True)
    await feed.exchange()
    assert acceptance.stats().outcomes == 1
    assert acceptance.drain() == []
    await feed.close()


def test_outcomes_of_others_are_not_told_on() -> None:
    acceptance = Acceptance(0.05)
    acceptance.merge([Outcome(key(1), 0.9, True), Outcome(key(1), math.nan, True)])
    assert acceptance.stats().outcomes == 1
    assert acceptance.drain() == []
