"""The tiered cache: what it answers, from where, and what it never mixes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.cache import CacheRules, TieredCache
from serving.keys import key64, ttl_jitter
from serving.knobs import Knobs
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier
from serving.tiers.vector import VectorTier
from tests.serving.entries import entry, int8, key, request, tilted, unit
from tests.waiting import until

PLAIN = CacheRules(ttl_jitter=0.0)
Open = Callable[..., TieredCache]


@pytest.fixture
async def opened(redis_url: str, namespace: str) -> AsyncIterator[Open]:
    """Opens replicas of one cache over one Redis; ``store=False``: over memory alone."""
    caches: list[TieredCache] = []

    def open_cache(*, store: bool = True, vectors: bool = True, rules: CacheRules = PLAIN, memories: int = 1) -> TieredCache:
        tier = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5) if store else None
        cache = TieredCache(
            memory=MemoryTier(), store=tier, vectors=VectorTier() if vectors else None, rules=rules, memories=memories
        )
        caches.append(cache)
        return cache

    yield open_cache
    for cache in caches:
        await cache.close()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "redis")


class Embedder:
    """Gives each text its vector; counts what it was asked."""

    def __init__(self, **vectors: bytes) -> None:
        self.vectors = vectors
        self.asked: list[str] = []

    async def __call__(self, text: str) -> bytes:
        self.asked.append(text)
        return self.vectors[text]


# -- exact ---------------------------------------------------------------------------------------------------------------------


async def test_what_was_put_is_a_hit_from_memory(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    await cache.apply({"a": Knobs(10_000, 100.0)})
    miss = await cache.lookup("a", request(1), now=0.0)
    assert (miss.outcome, miss.entry, miss.tier, miss.rule, miss.expired) == ("miss", None, "", "miss", False)
    assert await cache.put("a", entry(1, written_at=0.0), now=0.0) == 0
    hit = await cache.lookup("a", request(1), now=40.0)
    assert (hit.outcome, hit.entry, hit.tier, hit.rule) == ("hit", entry(1), "memory", "exact_hit")
    assert (hit.age, hit.stale, hit.similarity, hit.vector) == (40.0, 0.0, 1.0, b"")
    assert cache.lookup_now("a", request(1), now=40.0) == hit


async def test_expected_staleness_follows_the_half_life(opened: Open) -> None:
    cache = opened(store=False, rules=CacheRules(ttl_jitter=0.0, staleness_half_life=20.0))
    await cache.apply({"a": Knobs(10_000, 100.0)})
    await cache.put("a", entry(1), now=0.0)
    assert (await cache.lookup("a", request(1), now=40.0)).stale == 0.75


async def test_the_ttl_is_decided_at_read_time(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    await cache.apply({"a": Knobs(10_000, 100.0)})
    await cache.put("a", entry(1), now=0.0)
    for ttl, now, outcome in ((100.0, 101.0, "miss"), (200.0, 101.0, "hit"), (50.0, 51.0, "miss"), (math.inf, 1e9, "hit")):
        await cache.apply({"a": Knobs(10_000, ttl)})
        found = await cache.lookup("a", request(1), now=now)
        assert (found.outcome, found.expired) == (outcome, outcome == "miss")
    await cache.apply({"a": Knobs(10_000, 50.0)})
    assert (await cache.lookup("a", request(1), now=51.0)).rule == "exact_expired"


async def test_each_key_has_its_own_share_of_the_ttl(opened: Open) -> None:
    cache = opened(store=False, rules=CacheRules(ttl_jitter=0.5))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    for number in range(50):
        await cache.put("a", entry(number), now=0.0)
        end = 100.0 * ttl_jitter(key64(key(number)), 0.5)
        assert (await cache.lookup("a", request(number), now=end * 0.999)).outcome == "hit"
        assert (await cache.lookup("a", request(number), now=end * 1.001)).outcome == "miss"


async def test_another_replica_answers_from_redis_and_then_from_its_memory(opened: Open) -> None:
    one, other = opened(), opened()
    for cache in (one, other):
        await cache.apply({"a": Knobs(10_000, 100.0)})
    await one.put("a", entry(1), now=0.0)
    tiers = [(await other.lookup("a", request(1), now=1.0)).tier for _ in range(2)]
    assert tiers == ["redis", "memory"]


async def test_a_memory_copy_that_expired_does_not_hide_a_fresher_answer_in_redis(opened: Open) -> None:
    one, other = opened(), opened()
    for cache in (one, other):
        await cache.apply({"a": Knobs(10_000, 100.0)})
    await one.put("a", entry(1, written_at=0.0), now=0.0)
    assert (await other.lookup("a", request(1), now=50.0)).age == 50.0
    await one.put("a", entry(1, written_at=101.0), now=101.0)
    found = await other.lookup("a", request(1), now=102.0)
    assert (found.outcome, found.age, found.expired) == ("hit", 1.0, False)


async def test_an_answer_overwritten_by_another_replica_leaves_memory(opened: Open) -> None:
    one, other = opened(), opened()
    for cache in (one, other):
        await cache.apply({"a": Knobs(10_000, 100.0)})
    await one.put("a", entry(1, written_at=0.0), now=0.0)
    await other.lookup("a", request(1), now=1.0)

    async def fresh() -> bool:
        await one.put("a", entry(1, written_at=5.0), now=5.0)
        return (await other.lookup("a", request(1), now=6.0)).age == 1.0

    await until(fresh, "the other replica to serve the newer answer")


async def test_arms_share_neither_entries_nor_budgets(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    embed = Embedder(one=int8(unit(1)))
    await cache.apply({"a": Knobs(2_000, 100.0), "b": Knobs(50_000, 100.0)})
    await cache.put("a", entry(1, vector=int8(unit(1))), now=0.0)
    found = await cache.lookup("b", request(1, "one"), now=1.0, embed=embed)
    assert (found.outcome, found.rule) == ("miss", "miss")
    for number in range(10, 40):
        await cache.put("b", entry(number), now=0.0)
    assert (await cache.lookup("a", request(1), now=1.0)).outcome == "hit"
    assert await cache.flush("b") == 30
    assert (await cache.lookup("a", request(1), now=1.0)).outcome == "hit"
    assert (await cache.lookup("b", request(10), now=1.0)).outcome == "miss"
    await cache.apply({"b": Knobs(1_000, 1.0)})
    assert (await cache.lookup("a", request(1), now=50.0)).outcome == "hit"
    assert cache.knobs("a") == Knobs(2_000, 100.0)


async def test_an_arm_without_knobs_is_an_error_that_names_it(opened: Open) -> None:
    cache = opened()
    await cache.apply({"a": Knobs(1_000, 1.0)})
    for call in (lambda: cache.lookup("c", request(1), now=0.0), lambda: cache.put("c", entry(1), now=0.0)):
        with pytest.raises(KeyError, match=r"arm 'c' has no knobs; apply\(\) gave some to \['a'\]"):
            await call()


# -- budgets -------------------------------------------------------------------------------------------------------------------


async def test_memory_holds_a_share_of_the_budget_and_redis_everything(opened: Open) -> None:
    cache = opened(rules=CacheRules(l1_share=0.5), memories=2)
    await cache.apply({"a": Knobs(20_000, 100.0)})
    for number in range(30):
        await cache.put("a", entry(number), now=0.0)
    stats = await cache.stats("a")
    assert (stats["memory"].bytes, stats["memory"].budget) == (5_000, 5_000)
    assert (stats["redis"].bytes, stats["redis"].budget, stats["redis"].evictions) == (20_000, 20_000, 10)
    assert (await cache.lookup("a", request(15), now=1.0)).tier == "redis"
    assert (await cache.lookup("a", request(29), now=1.0)).tier == "memory"


async def test_without_a_store_memory_has_the_whole_budget(opened: Open) -> None:
    cache = opened(store=False)
    await cache.apply({"a": Knobs(20_000, 100.0)})
    evicted = [await cache.put("a", entry(number), now=0.0) for number in range(30)]
    assert sum(evicted) == 10
    stats = await cache.stats("a")
    assert set(stats) == {"memory"}
    assert stats["memory"].bytes == 20_000


async def test_memory_hits_keep_an_entry_from_being_evicted_in_redis(opened: Open) -> None:
    cache = opened()
    await cache.apply({"a": Knobs(10_000, 100.0)})
    for number in range(10):
        await cache.put("a", entry(number), now=0.0)
    for number in (8, 9):  # the last two are in memory; make 8 the most recently used
        assert (await cache.lookup("a", request(number), now=1.0)).tier == "memory"
    assert (await cache.lookup("a", request(8), now=1.0)).tier == "memory"
    for number in range(20, 29):
        await cache.put("a", entry(number), now=1.0)
    assert await cache.are_live("a", [key(8), key(9)], now=1.0) == [True, False]


async def test_what_redis_evicts_leaves_memory_and_the_index(opened: Open) -> None:
    cache = opened(rules=CacheRules(l1_share=1.0, ttl_jitter=0.0))
    await cache.apply({"a": Knobs(10_000, 100.0)})
    for number in range(12):
        await cache.put("a", entry(number, vector=int8(unit(number))), now=0.0)
    assert cache.vectors is not None
    assert await cache.vectors.count("a") == 10
    await cache.apply({"a": Knobs(4_000, 100.0)})
    assert await cache.vectors.count("a") == 4
    assert (await cache.lookup("a", request(7), now=1.0)).outcome == "miss"


async def test_what_one_replica_evicts_or_flushes_leaves_the_memory_of_the_others(opened: Open) -> None:
    one, other = opened(), opened()
    for cache in (one, other):
        await cache.apply({"a": Knobs(10_000, 100.0)})

    async def in_other_memory() -> bool:
        await one.put("a", entry(1), now=0.0)
        await other.lookup("a", request(1), now=1.0)
        return other.lookup_now("a", request(1), now=1.0) is not None

    await until(in_other_memory, "the entry to be in the other replica's memory")
    await one.apply({"a": Knobs(0, 100.0)})
    await until(lambda: other.lookup_now("a", request(1), now=1.0) is None, "the eviction to be heard of")
    await one.apply({"a": Knobs(10_000, 100.0)})
    await until(in_other_memory, "the entry to be back")
    await one.flush("a")
    await until(lambda: other.lookup_now("a", request(1), now=1.0) is None, "the flush to be heard of")
    assert (await other.lookup("a", request(1), now=1.0)).outcome == "miss"


async def test_an_entry_larger_than_the_budget_is_stored_nowhere(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    await cache.apply({"a": Knobs(2_000, 100.0)})
    await cache.put("a", entry(1), now=0.0)
    assert await cache.put("a", entry(1, size=2_001, vector=int8(unit(1))), now=0.0) == 0
    assert (await cache.lookup("a", request(1), now=0.0)).outcome == "miss"
    assert cache.vectors is not None
    assert await cache.vectors.count("a") == 0


async def test_an_entry_that_is_already_expired_evicts_nobody(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    await cache.apply({"a": Knobs(1_000, 100.0)})
    await cache.put("a", entry(1, written_at=200.0), now=200.0)
    assert await cache.put("a", entry(2, written_at=0.0), now=200.0) == 0
    assert (await cache.lookup("a", request(1), now=200.0)).outcome == "hit"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(st.integers(0, 30), min_size=1, max_size=150), memories=st.sampled_from([1, 3]))
async def test_redis_and_memory_together_hit_exactly_where_one_lru_of_the_whole_budget_does(
    redis_url: str, requests: list[int], memories: int
) -> None:
    """The fidelity that the simulator relies on: one LRU, whatever tier answers and however touches travel."""
    namespace = f"fidelity-{next(_numbers)}"
    tier = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5)
    tiered = TieredCache(memory=MemoryTier(), store=tier, vectors=None, rules=PLAIN, memories=memories)
    single = TieredCache(memory=MemoryTier(), store=None, vectors=None, rules=PLAIN)
    outcomes: dict[str, list[str]] = {"tiered": [], "single": []}
    for name, cache in (("tiered", tiered), ("single", single)):
        await cache.apply({"a": Knobs(10_500, 25.0)})
        for now, number in enumerate(requests):
            found = await cache.lookup("a", request(number), now=float(now))
            outcomes[name].append(found.rule)
            if found.outcome == "miss":
                await cache.put("a", entry(number, size=500 + 37 * number, written_at=float(now)), now=float(now))
    held = [(await cache.stats("a"))[name] for cache, name in ((tiered, "redis"), (single, "memory"))]
    await tiered.close()
    await single.close()
    assert outcomes["tiered"] == outcomes["single"]
    assert held[0] == held[1]


_numbers = iter(range(1_000_000))


# -- by meaning ----------------------------------------------------------------------------------------------------------------


async def test_a_similar_question_of_the_same_context_is_answered_by_meaning(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    embed = Embedder(near=tilted(1, 0.95), far=tilted(1, 0.5))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    stored = entry(1, vector=int8(unit(1)))
    await cache.put("a", stored, now=0.0)
    hit = await cache.lookup("a", request(2, "near"), now=10.0, embed=embed)
    assert (hit.outcome, hit.entry, hit.tier, hit.rule, hit.age) == ("semantic_hit", stored, "vector", "semantic_hit", 10.0)
    assert hit.similarity == pytest.approx(0.95, abs=0.01)
    assert hit.vector == tilted(1, 0.95)
    far = await cache.lookup("a", request(3, "far"), now=10.0, embed=embed)
    assert (far.outcome, far.rule, far.vector) == ("miss", "below_threshold", tilted(1, 0.5))
    other = await cache.lookup("a", request(4, "near", context=b"o" * 32), now=10.0, embed=embed)
    assert (other.outcome, other.rule) == ("miss", "context_differs")


async def test_nothing_is_embedded_without_need(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    embed = Embedder(text=int8(unit(1)))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    await cache.put("a", entry(1, vector=int8(unit(1))), now=0.0)
    await cache.lookup("a", request(1, "text"), now=1.0, embed=embed)  # an exact hit
    await cache.lookup("a", request(2, ""), now=1.0, embed=embed)  # no text to compare
    expired = await cache.lookup("a", request(1, "text"), now=200.0, embed=embed)  # its vector is stored with the expired answer
    assert embed.asked == []
    assert (expired.rule, expired.vector) == ("exact_expired", int8(unit(1)))
    assert (await cache.lookup("a", request(2, "text"), now=1.0)).rule == "miss"  # nobody embeds


async def test_an_expired_entry_drops_its_vector_when_it_is_met(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    embed = Embedder(text=int8(unit(1)))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    assert cache.vectors is not None
    await cache.put("a", entry(1, vector=int8(unit(1))), now=0.0)
    found = await cache.lookup("a", request(2, "text"), now=200.0, embed=embed)
    assert (found.outcome, found.rule, found.expired) == ("miss", "semantic_expired", True)
    assert not cache.vectors.has("a", key(1))


async def test_an_entry_that_is_gone_drops_its_vector_when_it_is_met(opened: Open, store: bool) -> None:
    # Nothing else is stored: what the store has is indexed in the background, and would be met again.
    cache = opened(store=store)
    embed = Embedder(text=int8(unit(1)))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    assert cache.vectors is not None
    cache.vectors.add("a", key(9), request(9).context, int8(unit(1)))
    found = await cache.lookup("a", request(2, "text"), now=1.0, embed=embed)
    assert (found.outcome, found.rule, found.expired) == ("miss", "miss", False)
    assert not cache.vectors.has("a", key(9))


async def test_the_next_best_answers_where_the_best_expired(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    embed = Embedder(text=int8(unit(1)))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    await cache.put("a", entry(1, vector=int8(unit(1)), written_at=0.0), now=0.0)
    await cache.put("a", entry(2, vector=tilted(1, 0.93), written_at=90.0), now=90.0)
    found = await cache.lookup("a", request(3, "text"), now=150.0, embed=embed)
    assert (found.outcome, found.entry and found.entry.key) == ("semantic_hit", key(2))


async def test_a_semantic_hit_makes_the_answer_recently_used(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    embed = Embedder(text=int8(unit(1)))
    await cache.apply({"a": Knobs(3_000, 100.0)})
    await cache.put("a", entry(1, vector=int8(unit(1))), now=0.0)
    for number in (2, 3):
        await cache.put("a", entry(number), now=0.0)
    assert (await cache.lookup("a", request(9, "text"), now=1.0, embed=embed)).outcome == "semantic_hit"
    await cache.put("a", entry(4), now=1.0)
    assert await cache.are_live("a", [key(1), key(2)], now=1.0) == [True, False]


async def test_replicas_learn_each_others_vectors_and_a_new_one_reads_them_from_redis(opened: Open) -> None:
    one, other = opened(), opened()
    embed = Embedder(text=int8(unit(1)))
    for cache in (one, other):
        await cache.apply({"a": Knobs(100_000, 100.0)})
    assert other.vectors is not None
    vectors = other.vectors

    async def announced() -> bool:
        await one.put("a", entry(1, vector=int8(unit(1))), now=0.0)
        return vectors.has("a", key(1))

    await until(announced, "the announcement")
    found = await other.lookup("a", request(2, "text"), now=1.0, embed=embed)
    assert (found.outcome, found.tier) == ("semantic_hit", "vector")
    late = opened()
    await late.apply({"a": Knobs(100_000, 100.0)})
    assert late.vectors is not None
    index = late.vectors
    await until(lambda: index.has("a", key(1)), "the index to be built from Redis")


# -- warmth --------------------------------------------------------------------------------------------------------------------


async def test_what_is_live_is_told_from_memory_and_redis_alike_and_ahead_of_time(opened: Open, store: bool) -> None:
    cache = opened(store=store)
    await cache.apply({"a": Knobs(20_000, 100.0)})
    for number in range(20):
        await cache.put("a", entry(number, written_at=float(number)), now=float(number))
    keys = [key(number) for number in (0, 19, 99)]
    assert await cache.are_live("a", keys, now=100.5) == [False, True, False]
    assert await cache.are_live("a", keys, now=90.0, ahead=0.2) == [False, True, False]
    assert await cache.is_live("a", key(0), now=90.0)
    assert not await cache.is_live("a", key(0), now=90.0, ahead=0.2)
    assert await cache.are_live("a", [], now=0.0) == []


def test_a_cache_of_no_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="memories: expected at least 1"):
        TieredCache(memory=MemoryTier(), store=None, vectors=None, rules=PLAIN, memories=0)
