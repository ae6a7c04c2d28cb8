"""A vector service that is away, hangs or answers nonsense costs a bounded time and never more than a miss."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.ports import free_port
from serving.settings import VectorSettings
from serving.tiers.base import TierUnavailable
from serving.tiers.vector import UsearchStore
from serving.tiers.vector_chroma import condition
from serving.tiers.vector_milvus import expression
from serving.tiers.vector_service import ServiceStore, collection_name
from serving.tiers.vector_store import VectorItem, VectorStore, Where, open_store
from tests.requirements import module
from tests.serving.entries import CONTEXT, key
from tests.vector_services import silent_server
from tests.waiting import until

DIM = 8
QUERY = bytes(range(1, DIM + 1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted(ServiceStore):
    """A service in this process that fails, hangs or answers as told."""

    name = "scripted"

    def __init__(self, clock: Clock, deadline: float = 20.0) -> None:
        super().__init__(dim=DIM, namespace="n", deadline=deadline, clock=clock)
        self.failure: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self.calls = 0
        self.opened = 0
        self.collections: dict[int, dict[str, VectorItem]] = {}

    def _connect(self) -> object:
        return object()

    def _disconnect(self, client: Any) -> None:
        pass

    def _open(self, client: Any, name: str) -> int:
        self.opened += 1
        self.collections[self.opened] = {}
        return self.opened

    def _is_gone(self, error: Exception) -> bool:
        return isinstance(error, KeyError)

    def _held(self, collection: int) -> dict[str, VectorItem]:
        self.calls += 1
        assert self.go_on.wait(60.0)
        if self.failure is not None:
            raise self.failure
        return self.collections[collection]

    def _write(self, collection: int, items: Sequence[VectorItem], added: int) -> None:
        self._held(collection).update({item.key.hex(): item for item in items})

    def _delete(self, collection: int, ids: Sequence[str]) -> None:
        for each in ids:
            self._held(collection).pop(each, None)

    def _search(
        self, collection: int, context: bytes, query: npt.NDArray[np.float32], limit: int, where: Where | None
    ) -> list[tuple[str, npt.NDArray[np.float32]]]:
        held = self._held(collection)
        return [(each, np.frombuffer(item.vector, np.int8).astype(np.float32) - 1e-5) for each, item in held.items()]

    def _count(self, collection: int) -> int:
        return len(self._held(collection))

    def _ages(self, collection: int) -> Iterator[tuple[int, str]]:
        yield from enumerate(self._held(collection))

    def _clear(self, client: Any, name: str, collection: int) -> None:
        self._held(collection).clear()


async def near(store: VectorStore) -> list[bytes]:
    return [each.key for each in await store.near("a", CONTEXT, QUERY, floor=0.9)]


async def test_after_some_failures_nothing_is_asked_until_a_probe_succeeds() -> None:
    clock = Clock()
    store = Scripted(clock)
    await store.add("a", [VectorItem(key(1), CONTEXT, QUERY)])
    store.failure = OSError("connection refused")
    for _ in range(5):
        with pytest.raises(TierUnavailable, match="scripted: OSError: connection refused"):
            await near(store)
    asked = store.calls
    with pytest.raises(TierUnavailable, match="not asked"):
        await near(store)
    assert store.calls == asked
    clock.now = 10.0
    store.failure = None
    assert await near(store) == [key(1)]
    assert await near(store) == [key(1)]
    await store.close()


async def test_a_call_that_hangs_is_given_up_at_its_deadline_and_its_late_failure_is_nobodys() -> None:
    store = Scripted(Clock(), deadline=0.02)
    store.go_on.clear()
    store.failure = OSError("late")
    with pytest.raises(TierUnavailable, match=r"no answer within 0\.02 s"):
        await near(store)
    store.go_on.set()
    await store.close()


async def test_a_cancelled_call_says_nothing_of_the_service() -> None:
    store = Scripted(Clock())
    store.go_on.clear()
    for _ in range(8):
        task = asyncio.create_task(near(store))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    store.go_on.set()
    assert await near(store) == []
    await store.close()


async def test_a_collection_dropped_by_somebody_is_made_anew() -> None:
    store = Scripted(Clock())
    await store.add("a", [VectorItem(key(1), CONTEXT, QUERY)])
    store.collections.clear()
    assert await near(store) == []
    await store.add("a", [VectorItem(key(2), CONTEXT, QUERY)])
    assert await near(store) == [key(2)]
    assert store.opened == 2
    await store.close()


async def test_floats_that_a_service_rounded_are_the_integers_again() -> None:
    store = Scripted(Clock())
    await store.add("a", [VectorItem(key(1), CONTEXT, QUERY)])
    (only,) = await store.near("a", CONTEXT, QUERY, floor=-1.0)
    assert only.similarity == pytest.approx(1.0, abs=1e-6)
    await store.close()


async def test_the_limit_is_looked_after_only_when_it_may_be_reached() -> None:
    store = Scripted(Clock())
    await store.limit("a", 50)
    before = store.calls
    for number in range(50):
        await store.add("a", [VectorItem(key(number), CONTEXT, QUERY)])
    assert store.calls - before == 50
    await store.add("a", [VectorItem(key(number), CONTEXT, QUERY) for number in range(50, 60)])
    assert await store.count("a") == 50
    await store.close()


@pytest.mark.parametrize("kind", ["milvus", "chroma"])
async def test_a_service_that_is_not_there_is_unavailable(kind: str) -> None:
    module({"milvus": "pymilvus", "chroma": "chromadb"}[kind])
    url = f"http://127.0.0.1:{free_port()}"
    store = open_store(VectorSettings(kind=kind, url=url, deadline=0.2), dim=DIM, namespace="n")
    with pytest.raises(TierUnavailable, match=kind):
        await near(store)
    with pytest.raises(TierUnavailable, match=kind):
        await store.add("a", [VectorItem(key(1), CONTEXT, QUERY)])
    await store.close()


@pytest.mark.parametrize("kind", ["milvus", "chroma"])
async def test_a_service_that_never_says_a_word_costs_its_deadline(kind: str) -> None:
    module({"milvus": "pymilvus", "chroma": "chromadb"}[kind])
    with silent_server() as port:
        url = f"http://127.0.0.1:{port}"
        store = open_store(VectorSettings(kind=kind, url=url, deadline=0.05), dim=DIM, namespace="n")
        for _ in range(5):
            with pytest.raises(TierUnavailable, match=r"no answer within 0\.05 s"):
                await near(store)
        with pytest.raises(TierUnavailable, match="not asked"):
            await near(store)
        await store.close()


@pytest.mark.parametrize(("kind", "package"), [("milvus", "pymilvus"), ("chroma", "chromadb"), ("faiss", "faiss")])
def test_a_package_that_is_missing_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    url = "http://127.0.0.1:1" if kind != "faiss" else None
    with pytest.raises(RuntimeError, match=rf"{package} cannot be imported.*install"):
        open_store(VectorSettings(kind=kind, url=url), dim=DIM, namespace="n")


def test_an_address_that_is_none_is_refused() -> None:
    for kind in ("milvus", "chroma"):
        with pytest.raises(ValueError, match=f"{kind}: url: expected http://"):
            open_store(VectorSettings(kind=kind, url="nowhere"), dim=DIM, namespace="n")
    assert isinstance(open_store(VectorSettings(), dim=DIM, namespace="n"), UsearchStore)


NAMES = st.text("ab._-", min_size=1, max_size=5)


@given(st.tuples(NAMES, NAMES, st.integers(1, 3)), st.tuples(NAMES, NAMES, st.integers(1, 3)))
def test_no_two_arms_share_a_collection(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    assert (collection_name(*one) == collection_name(*other)) == (one == other)


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=3))
def test_no_text_of_a_caller_gets_into_a_milvus_expression(text: str, tags: list[str]) -> None:
    made = expression(CONTEXT, Where(model=text, tenant=text, namespace=text, tags=tuple(tags), documents=tuple(tags)))
    assert set(made) <= set('abcdefghijklmnopqrstuvwxyz0123456789ARRAY_CONTAINS_ANY(), []="'), made


def test_a_chroma_condition_joins_only_what_is_several() -> None:
    context = {"context": CONTEXT.hex()}
    assert condition(CONTEXT, None) == context
    assert condition(CONTEXT, Where(tags=("x",))) == {"$and": [context, {"tag:x": True}]}
    both = {"$or": [{"document:x": True}, {"document:y": True}]}
    assert condition(CONTEXT, Where(tenant="", documents=("x", "y"))) == {"$and": [context, {"tenant": ""}, both]}


async def test_a_service_that_comes_back_is_found_again() -> None:
    clock = Clock()
    store = Scripted(clock, deadline=0.05)
    store.go_on.clear()
    for _ in range(6):
        with pytest.raises(TierUnavailable):
            await near(store)
    store.go_on.set()

    async def answered() -> bool:
        clock.now += 10.0
        try:
            return await near(store) == []
        except TierUnavailable:
            return False

    await until(answered, "an answer of the service that is back")
    await store.close()
