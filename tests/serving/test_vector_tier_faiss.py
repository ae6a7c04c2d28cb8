"""The compressed index: it trains itself beside the traffic, and loses nothing by it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from serving.tiers.base import EntryMeta
from serving.tiers.vector_faiss import LEAST_HOLES, FaissStore
from serving.tiers.vector_store import VectorItem, Where
from tests.requirements import module
from tests.serving.entries import CONTEXT, key

module("faiss")
DIM = 32
OTHER = b"o" * 32


def vector(number: int) -> bytes:
    values = np.random.default_rng(number).normal(size=DIM)
    return bytes(np.rint(values / np.linalg.norm(values) * 127).astype(np.int8))


def items(*numbers: int, context: bytes = CONTEXT) -> list[VectorItem]:
    meta = EntryMeta(model="m", tags=("t",))
    return [VectorItem(key(number), context, vector(number), meta) for number in numbers]


async def found(store: FaissStore, number: int, **options: Any) -> bool:
    near = await store.near("a", CONTEXT, vector(number), floor=0.99, **options)
    return [each.key for each in near] == [key(number)]


class Held:
    """Lets a store's building begin, and go on when told."""

    def __init__(self, store: FaissStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()
        arm = type(store._arm("a"))
        build = arm.rebuilt

        def rebuilt(*arguments: Any, **options: Any) -> Any:
            self.began.set()
            assert self.may_go_on.wait(60.0)
            return build(*arguments, **options)

        monkeypatch.setattr(arm, "rebuilt", rebuilt)


@pytest.fixture
async def store() -> Any:
    opened = FaissStore(dim=DIM, train_at=600)
    yield opened
    await opened.close()


async def test_it_is_flat_until_there_is_enough_to_train_on(store: FaissStore) -> None:
    await store.add("a", items(*range(599)))
    await store.settled()
    assert not store.is_compressed("a")
    await store.add("a", items(599))
    await store.settled()
    assert store.is_compressed("a")
    assert await store.count("a") == 600
    assert sum([await found(store, number) for number in range(0, 600, 7)]) >= 84
    assert await found(store, 7, where=Where(model="m", tags=("t",)))
    assert not await found(store, 7, where=Where(model="another"))


async def test_what_happens_while_it_trains_is_not_lost(store: FaissStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(store, monkeypatch)
    await store.add("a", items(*range(600)))
    await asyncio.to_thread(held.began.wait, 60.0)
    assert await found(store, 3), "the old index answers while the new one is built"
    await store.remove("a", [key(5), key(6)])
    await store.add("a", items(700, 701))
    await store.remove("a", [key(701)])
    await store.add("a", [VectorItem(key(8), OTHER, vector(9000))])
    held.may_go_on.set()
    await store.settled()
    assert store.is_compressed("a")
    assert await store.count("a") == 599
    there = {number: await found(store, number) for number in (3, 5, 6, 8, 700, 701)}
    assert there == {3: True, 5: False, 6: False, 8: False, 700: True, 701: False}
    assert [each.key for each in await store.near("a", OTHER, vector(9000), floor=0.9)] == [key(8)]


async def test_a_flush_while_it_trains_is_final(store: FaissStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(store, monkeypatch)
    await store.add("a", items(*range(600)))
    await asyncio.to_thread(held.began.wait, 60.0)
    await store.flush("a")
    await store.add("a", items(1))
    held.may_go_on.set()
    await store.settled()
    assert await store.count("a") == 1
    assert await found(store, 1)
    assert not await found(store, 2)


async def test_a_failed_training_leaves_the_old_index(
    store: FaissStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory for it")

    monkeypatch.setattr(type(store._arm("a")), "_trained", refuse)
    await store.add("a", items(*range(600)))
    await store.settled()
    await store.add("a", items(600))
    assert not store.is_compressed("a")
    assert await found(store, 3)
    assert await found(store, 600)
    assert caplog.text.count("could not be built anew") == 1


async def test_holes_are_cleared_away(store: FaissStore) -> None:
    for begin in range(0, 3 * LEAST_HOLES, 100):
        await store.add("a", items(*range(begin, begin + 100)))
        await store.limit("a", 200)
        await store.settled()
    held = store._arms["a"]
    assert await store.count("a") == 200
    assert len(held.keys) <= 200 + LEAST_HOLES + 100
    last = 3 * LEAST_HOLES // 100 * 100 + 99
    assert all([await found(store, number) for number in range(last - 50, last)])


async def test_a_large_context_is_searched_by_the_index_and_a_small_one_exactly(store: FaissStore) -> None:
    await store.add("a", items(*range(700)))
    await store.add("a", items(*range(700, 720), context=OTHER))
    await store.settled()
    for number in range(700, 720):
        near = await store.near("a", OTHER, vector(number), floor=-1.0, k=20)
        assert near[0].key == key(number)
        assert {each.key for each in near} == {key(other) for other in range(700, 720)}


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="train_at >= 256"):
        FaissStore(dim=DIM, train_at=10)
