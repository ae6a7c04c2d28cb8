"""Embeddings by the real model, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serving.embedding import DIMENSIONS, Embedder, EmbeddingUnavailable, quantise


@pytest.fixture
async def embedder() -> AsyncIterator[Embedder]:
    made = Embedder(deadline=60.0)
    yield made
    await made.close()


async def test_texts_become_unit_vectors_that_tell_meaning(embedder: Embedder) -> None:
    texts = ["How do I reset my card PIN?", "How can I reset the PIN of my card?", "It rains in the mountains."]
    raw = await asyncio.gather(*(embedder.embed(text) for text in texts))
    assert [len(vector) for vector in raw] == [DIMENSIONS] * 3
    vectors = np.stack([np.frombuffer(vector, np.int8) for vector in raw]).astype(float) / 127.0
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=0.02)
    cosine = vectors @ vectors.T
    assert cosine[0, 1] > 0.85 > 0.5 > cosine[0, 2]
    assert raw[0] == await embedder.embed(texts[0])


async def test_texts_that_arrive_together_are_computed_together(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, threads = [], set()

    def count(texts: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
        sizes.append(len(texts))
        threads.add(threading.get_ident())
        return np.zeros((len(texts), DIMENSIONS), np.int8)

    monkeypatch.setattr(embedder, "_encode", count)
    await asyncio.gather(*(embedder.embed(str(number)) for number in range(50)))
    assert sum(sizes) == 50
    assert len(sizes) <= 4
    assert threads.isdisjoint({threading.get_ident()})
    assert len(threads) == 1


async def test_a_deadline_that_passes_says_so_and_spares_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(deadline=0.5)
    release, asked = threading.Event(), []

    def slow(texts: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
        asked.append(len(texts))
        release.wait(30.0)
        return np.zeros((len(texts), DIMENSIONS), np.int8)

    monkeypatch.setattr(embedder, "_encode", slow)
    results = await asyncio.gather(*(embedder.embed(str(number)) for number in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [EmbeddingUnavailable] * 5
    release.set()
    while embedder._worker is not None and not embedder._worker.done():
        await asyncio.sleep(0.002)
    assert len(asked) == 1  # those whose deadline had passed were not computed
    await embedder.close()


async def test_a_failing_model_fails_those_who_wait_and_not_the_next(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(texts: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(embedder, "_encode", fail)
    with pytest.raises(EmbeddingUnavailable, match="embedding failed: out of memory"):
        await embedder.embed("x")
    monkeypatch.setattr(embedder, "_encode", lambda texts: np.ones((len(texts), DIMENSIONS), np.int8))
    assert await embedder.embed("x") == b"\1" * DIMENSIONS


@given(hnp.arrays(np.float32, (3, 8), elements=st.floats(-1e3, 1e3, width=32)))
def test_quantising_keeps_directions_and_leaves_zero_alone(vectors: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    quantised = quantise(vectors).astype(float)
    for before, after in zip(vectors.astype(float), quantised, strict=True):
        norm = np.linalg.norm(before)
        if norm < 1e-3:
            assert np.all(np.abs(after) <= 127)
        else:
            assert np.abs(after / 127.0 - before / norm).max() <= 0.5 / 127.0 + 1e-4
    assert not quantise(np.zeros((1, 8))).any()


@pytest.mark.parametrize(
    "text",
    ["The quick brown fox jumps over the lazy dog. " * 40 + "What is the capital of France?", "x" * 9000, "\U0001f984\U0001f984"],
    ids=["longer than the window", "longer than is looked at", "unknown words"],
)
async def test_a_text_that_the_model_would_not_see_whole_has_no_embedding(embedder: Embedder, text: str) -> None:
    assert await embedder.embed(text) == b""
    assert len(await embedder.embed("What is the capital of France?")) == DIMENSIONS
