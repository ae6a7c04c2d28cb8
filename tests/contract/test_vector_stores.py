"""One suite for every vector store: each must find the nearest entries of a context, whoever keeps them and wherever."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.settings import VectorSettings
from serving.tiers.base import EntryMeta
from serving.tiers.vector_store import Neighbour, VectorItem, VectorStore, Where, open_store
from tests.requirements import module
from tests.serving.entries import CONTEXT, DIM, int8, key, tilted, unit
from tests.vector_services import chroma_server

OTHER = b"o" * 32
KINDS = ("usearch", "faiss", "milvus", "chroma")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def chroma_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chroma_server(tmp_path_factory.mktemp("chroma")) as url:
        yield url


@pytest.fixture(scope="module")
def milvus_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    module("pymilvus"), module("milvus_lite")
    # A Unix socket beside the file must fit into some 100 characters.
    return str(tmp_path_factory.mktemp("m") / "lite.db")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "faiss":
        module("faiss")
    return str(request.param)


@pytest.fixture
def open_again(kind: str, request: pytest.FixtureRequest) -> Callable[[str], VectorStore]:
    """Opens one more store of this kind in the namespace given."""
    url = request.getfixturevalue(f"{kind}_url") if kind in ("milvus", "chroma") else None
    configured = VectorSettings(kind=kind, url=url, deadline=20.0)

    def opened(namespace: str) -> VectorStore:
        return open_store(configured, dim=DIM, namespace=namespace)

    return opened


def fresh_namespace() -> str:
    return f"vectors-{os.getpid()}.{next(_numbers)}"


@pytest.fixture
async def store(open_again: Callable[[str], VectorStore]) -> AsyncIterator[VectorStore]:
    opened = open_again(fresh_namespace())
    yield opened
    await opened.close()


def item(number: int, vector: bytes = b"", context: bytes = CONTEXT, **meta: object) -> VectorItem:
    return VectorItem(key(number), context, vector or int8(unit(number)), EntryMeta(**meta))  # type: ignore[arg-type]


def own(found: Sequence[Neighbour], context: bytes = CONTEXT) -> list[bytes]:
    return [each.key for each in found if each.context == context]


async def test_it_is_a_vector_store(store: VectorStore, kind: str) -> None:
    assert isinstance(store, VectorStore)
    assert (store.name, store.dim, store.shared) == (kind, DIM, kind in ("milvus", "chroma"))


async def test_an_empty_store_finds_nothing(store: VectorStore) -> None:
    assert await store.near("a", CONTEXT, int8(unit(1)), floor=-1.0) == []
    assert await store.count("a") == 0
    await store.remove("a", [key(1)])
    await store.flush("a")
    assert await store.count("a") == 0


async def test_similarities_are_the_exact_cosines_of_the_integers(store: VectorStore) -> None:
    wanted = (1.0, 0.99, 0.9, 0.7, 0.3, 0.0, -0.5)
    await store.add("a", [item(round(cosine * 100), tilted(1, cosine)) for cosine in wanted])
    found = {each.key: each.similarity for each in await store.near("a", CONTEXT, int8(unit(1)), floor=-1.0)}
    query = np.frombuffer(int8(unit(1)), np.int8).astype(float)
    for cosine in wanted:
        stored = np.frombuffer(tilted(1, cosine), np.int8).astype(float)
        exact = query @ stored / np.linalg.norm(query) / np.linalg.norm(stored)
        assert found[key(round(cosine * 100))] == pytest.approx(exact, abs=1e-6)
        assert exact == pytest.approx(cosine, abs=0.01)


async def test_the_nearest_come_first_and_nothing_is_below_the_floor(store: VectorStore) -> None:
    await store.add("a", [item(number, tilted(1, 1.0 - number / 20)) for number in range(15)])
    found = await store.near("a", CONTEXT, int8(unit(1)), floor=0.72, k=8)
    assert own(found) == [key(number) for number in range(6)]
    assert own(await store.near("a", CONTEXT, int8(unit(1)), floor=-1.0, k=3)) == [key(0), key(1), key(2)]


async def test_it_finds_what_brute_force_finds(store: VectorStore) -> None:
    vectors = np.stack([unit(seed) for seed in range(600)])
    await store.add("a", [item(number, int8(vector)) for number, vector in enumerate(vectors)])
    right = 0
    for number in range(60):
        query = vectors[number] + 0.8 * unit(5000 + number)
        query /= np.linalg.norm(query)
        found = await store.near("a", CONTEXT, int8(query), floor=-1.0)
        right += found[0].key == key(int(np.argmax(vectors @ query)))
    assert right >= 58


async def test_only_the_context_asked_for_fits(store: VectorStore) -> None:
    await store.add("a", [item(1, tilted(1, 0.95)), item(2, int8(unit(1)), OTHER)])
    assert own(await store.near("a", CONTEXT, int8(unit(1)), floor=0.9)) == [key(1)]
    assert own(await store.near("a", OTHER, int8(unit(1)), floor=0.9), OTHER) == [key(2)]
    elsewhere = await store.near("a", b"n" * 32, int8(unit(1)), floor=0.9)
    assert own(elsewhere, b"n" * 32) == []
    assert all(each.similarity >= 0.9 for each in elsewhere)


async def test_a_crowd_of_other_contexts_does_not_hide_the_one_that_fits(store: VectorStore) -> None:
    crowd = [item(number, int8(unit(1)), number.to_bytes(32, "big")) for number in range(700)]
    await store.add("a", [*crowd, item(5000, tilted(1, 0.95))])
    assert own(await store.near("a", CONTEXT, int8(unit(1)), floor=0.9)) == [key(5000)]


FILTERS: list[tuple[Where, set[int]]] = [
    (Where(), {1, 2, 3, 4}),
    (Where(model="m1"), {1, 3}),
    (Where(model="m\" or key != \""), {4}),
    (Where(model="nobody's"), set()),
    (Where(temperature=0.0), {1}),
    (Where(temperature=0.7), {3}),
    (Where(tenant=""), {1, 2, 4}),
    (Where(tenant="t"), {3}),
    (Where(namespace="n"), {4}),
    (Where(tags=("x",)), {1, 2}),
    (Where(tags=("x", "z's")), {1, 2, 3}),
    (Where(tags=("none",)), set()),
    (Where(documents=("文書/1",)), {2, 3}),
    (Where(tags=("x",), documents=("文書/1",)), {2}),
    (Where(model="m1", tenant="t", tags=("z's", "y")), {3}),
]  # fmt: skip


async def test_metadata_can_be_filtered_on(store: VectorStore) -> None:
    await store.add("a", [
        item(1, tilted(1, 0.99), text="a question", model="m1", temperature=0.0, tags=("x",)),
        item(2, tilted(1, 0.98), model="m2", tags=("x", "y"), documents=("文書/1",)),
        item(3, tilted(1, 0.97), model="m1", temperature=0.7, tenant="t", tags=("z's",), documents=("文書/1", "d2")),
        item(4, tilted(1, 0.96), model="m\" or key != \"", namespace="n"),
    ])  # fmt: skip
    for where, wanted in FILTERS:
        found = await store.near("a", CONTEXT, int8(unit(1)), floor=0.9, where=where)
        assert set(own(found)) == {key(number) for number in wanted}, where


async def test_the_filter_agrees_with_its_own_definition() -> None:
    metas = {
        1: EntryMeta("a question", "m1", 0.0, tags=("x",)),
        2: EntryMeta(model="m2", tags=("x", "y"), documents=("文書/1",)),
        3: EntryMeta(model="m1", temperature=0.7, tenant="t", tags=("z's",), documents=("文書/1", "d2")),
        4: EntryMeta(model="m\" or key != \"", namespace="n"),
    }  # fmt: skip
    for where, wanted in FILTERS:
        assert {number for number, meta in metas.items() if where.fits(meta)} == wanted, where


async def test_a_key_added_again_has_its_new_vector_context_and_metadata_only(store: VectorStore) -> None:
    await store.add(
        "a", [item(1, int8(unit(1)), model="old", temperature=0.5, tags=("old",)), item(1, int8(unit(2)), tags=("mid",))]
    )
    assert await store.count("a") == 1
    await store.add("a", [item(1, int8(unit(3)), OTHER, model="new", tags=("new",))])
    assert await store.count("a") == 1
    assert own(await store.near("a", CONTEXT, int8(unit(3)), floor=-1.0)) == []
    assert own(await store.near("a", OTHER, int8(unit(3)), floor=0.99), OTHER) == [key(1)]
    assert own(await store.near("a", OTHER, int8(unit(1)), floor=0.5), OTHER) == []
    for where, there in (
        (Where(tags=("new",)), 1),
        (Where(tags=("old", "mid")), 0),
        (Where(temperature=0.5), 0),
        (Where("old"), 0),
    ):
        assert len(own(await store.near("a", OTHER, int8(unit(3)), floor=0.9, where=where), OTHER)) == there, where


async def test_a_removed_vector_is_not_found_and_may_come_back(store: VectorStore) -> None:
    await store.add("a", [item(number) for number in range(5)])
    await store.remove("a", [key(3), key(99)])
    await store.remove("a", [key(3)])
    await store.remove("a", [])
    assert await store.count("a") == 4
    assert own(await store.near("a", CONTEXT, int8(unit(3)), floor=0.9)) == []
    await store.add("a", [item(3)])
    assert own(await store.near("a", CONTEXT, int8(unit(3)), floor=0.9)) == [key(3)]


async def test_arms_are_apart(store: VectorStore) -> None:
    await store.add("a", [item(1)])
    assert await store.near("b", CONTEXT, int8(unit(1)), floor=-1.0) == []
    await store.add("b", [item(1), item(2)])
    await store.remove("b", [key(1)])
    assert (await store.count("a"), await store.count("b")) == (1, 1)
    await store.flush("a")
    assert (await store.count("a"), await store.count("b")) == (0, 1)
    await store.add("a", [item(4)])
    assert own(await store.near("a", CONTEXT, int8(unit(4)), floor=0.9)) == [key(4)]


async def test_the_earliest_added_go_beyond_the_limit(store: VectorStore) -> None:
    await store.limit("a", 4)
    for number in range(6):
        await store.add("a", [item(number)])
    assert [n for n in range(6) if own(await store.near("a", CONTEXT, int8(unit(n)), floor=0.9))] == [2, 3, 4, 5]
    await store.limit("a", 2)
    assert [n for n in range(6) if own(await store.near("a", CONTEXT, int8(unit(n)), floor=0.9))] == [4, 5]
    await store.add("a", [item(number) for number in (6, 4, 7)])
    assert [n for n in range(8) if own(await store.near("a", CONTEXT, int8(unit(n)), floor=0.9))] == [4, 7]


async def test_a_vector_of_another_length_is_refused_and_none_of_its_batch_kept(store: VectorStore) -> None:
    with pytest.raises(ValueError, match="expected a vector of 384 int8 bytes, got 3"):
        await store.add("a", [item(1), item(2, b"abc")])
    assert await store.count("a") == 0
    with pytest.raises(ValueError, match="expected a vector of 384"):
        await store.near("a", CONTEXT, b"", floor=0.0)


async def test_zeros_find_nothing(store: VectorStore) -> None:
    await store.add("a", [item(1)])
    assert await store.near("a", CONTEXT, bytes(DIM), floor=-1.0) == []


async def test_calls_may_overlap(store: VectorStore) -> None:
    await asyncio.gather(*(store.add("a", [item(number)]) for number in range(12)))
    found = await asyncio.gather(*(store.near("a", CONTEXT, int8(unit(n)), floor=0.9) for n in range(12)))
    assert [own(each) for each in found] == [[key(number)] for number in range(12)]


async def test_a_shared_store_is_seen_and_flushed_by_every_client(open_again: Callable[[str], VectorStore]) -> None:
    namespace = fresh_namespace()
    one, two, stranger = open_again(namespace), open_again(namespace), open_again(fresh_namespace())
    try:
        await one.add("a", [item(1)])
        seen = 1 if one.shared else 0
        assert await two.count("a") == seen
        assert len(own(await two.near("a", CONTEXT, int8(unit(1)), floor=0.9))) == seen
        assert await stranger.count("a") == 0
        if one.shared:
            await two.flush("a")
            assert await one.count("a") == 0
            await one.add("a", [item(2)])
            assert own(await two.near("a", CONTEXT, int8(unit(2)), floor=0.9)) == [key(2)]
    finally:
        for each in (one, two, stranger):
            await each.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        st.tuples(st.just("flush"), st.just([])),
    ),
    max_size=12,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_it_holds_what_was_added_and_not_removed(
    open_again: Callable[[str], VectorStore], steps: list[tuple[str, list[int]]]
) -> None:
    store = open_again(fresh_namespace())
    try:
        there: set[int] = set()
        for step, numbers in steps:
            if step == "add":
                await store.add("a", [item(number) for number in numbers])
                there |= set(numbers)
            elif step == "remove":
                await store.remove("a", [key(number) for number in numbers])
                there -= set(numbers)
            else:
                await store.flush("a")
                there = set()
        assert await store.count("a") == len(there)
        probe = random.Random(0).randrange(10)
        found = own(await store.near("a", CONTEXT, int8(unit(probe)), floor=0.99))
        assert found == ([key(probe)] if probe in there else [])
        everything = await store.near("a", CONTEXT, int8(unit(probe)), floor=-1.0, k=16)
        assert {each.key for each in everything} == {key(number) for number in there}
    finally:
        await store.close()
