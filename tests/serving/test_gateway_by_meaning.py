"""Answers by meaning, with the real model of embeddings."""

from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import serving.embedding
from serving.embedding import quantise
from serving.gateway import Gateway
from serving.meaning.lsh import Signature, fit_pca
from serving.settings import GatewaySettings
from tests.serving.gateways import Model, before, gateway
from tests.waiting import until

PIN = ("How do I reset my card PIN?", "How can I reset my card PIN?")
WORDS = " ".join(["alpha beta gamma delta"] * 200)


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.embedding, "_load", _load)


_load = functools.cache(serving.embedding._load)


def semantic(**changes: Any) -> dict[str, Any]:
    """Rules under which everything that is not very different could be an answer, were it not for the checks."""
    return {"rules": {"semantic": {"enabled": True, "threshold": 0.6, "deadline": 60.0, **changes}}}


async def test_a_question_that_means_the_same_shares_the_answer_within_its_context_only(redis_url: str, namespace: str) -> None:
    settings = {"redis_url": redis_url, "namespace": namespace, **semantic(threshold=0.85)}
    async with gateway(Model(), **settings) as client:
        first, similar = [await client.ask(text) for text in PIN]
        assert (first.cache, similar.cache) == ("MISS", "SEMANTIC")
        assert (similar.headers["x-cache-tier"], similar.body) == ("vector", first.body)
        assert similar.headers["x-cache-entry"] == first.headers["x-cache-entry"]
        assert 0.85 <= float(similar.headers["x-cache-similarity"]) < 1.0
        assert (await client.ask("What is the exchange rate today?")).cache == "MISS"
        assert await client.metric('cachepilot_hits_total{arm="control",tier="vector"}') == 1
        system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PIN[1]}]
        for fields in ({"temperature": 0.9}, {"messages": system}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
            assert (await client.ask(PIN[1], **fields)).cache == "MISS"
        # key, body, context and vector of those that were stored
        held = await client.metric('cachepilot_resident_bytes{arm="control",tier="memory"}')
        assert held >= 5 * (32 + 32 + 384)


REFUSED = {
    "one digit": ("What is 2 plus 2?", "What is 2 plus 3?"),
    "another amount": ("Transfer 100 euros to my account", "Transfer 1000 euros to my account"),
    "another unit": ("How long is 5 miles in metres?", "How long is 5 kilometres in metres?"),
    "a short sum": ("7*8", "7*9"),
    "another operator": ("What is 6 + 3?", "What is 6 - 3?"),
    "on and off": ("How do I turn on the alarm?", "How do I turn off the alarm?"),
    "with and without": ("A recipe for bread with yeast", "A recipe for bread without yeast"),
    "a negation": ("Is it safe to drink this water?", "Is it not safe to drink this water?"),
    "swapped arguments": ("How do I fly from Paris to London?", "How do I fly from London to Paris?"),
    "another name": ("What is the capital of France?", "What is the capital of Germany?"),
    "a text beyond the window": (f"{WORDS} what is first?", f"{WORDS} what is last?"),
    "Chinese": ("\u4eca\u5929\u661f\u671f\u4e00\u5417\uff1f", "\u4eca\u5929\u661f\u671f\u4e8c\u5417\uff1f"),
    "emoji": ("Is this good? \U0001f44d", "Is this good? \U0001f44e"),
}


async def test_questions_that_only_look_alike_never_share_an_answer() -> None:
    async with gateway(Model(), **semantic(threshold=0.0)) as client:
        for name, (one, other) in REFUSED.items():
            first, second = await client.ask(one), await client.ask(other)
            assert (name, second.cache) == (name, "MISS")
            assert second.body != first.body


async def test_the_guards_name_themselves() -> None:
    async with gateway(Model(), **semantic()) as client:
        for text in REFUSED["on and off"]:
            reply = await client.ask(text)
        assert reply.headers["x-cache-rule"] == "objection"
        assert await client.metric('cachepilot_semantic_objections_total{arm="control",guard="polarity"}') == 1


async def test_a_threshold_of_one_takes_nothing_but_the_same_and_of_zero_takes_what_no_guard_refuses() -> None:
    async with gateway(Model(), **semantic(threshold=1.0)) as client:
        assert [(await client.ask(text)).cache for text in PIN] == ["MISS", "MISS"]
    async with gateway(Model(), **semantic(threshold=0.0)) as client:
        await client.ask("how do I reset it?")
        assert (await client.ask("how could one reset it?")).cache == "SEMANTIC"


async def test_a_caller_may_tighten_and_not_loosen() -> None:
    async with gateway(Model(), **semantic(threshold=0.9)) as client:
        await client.ask(PIN[0])
        assert (await client.ask(PIN[1], {"x-cache-threshold": "0.999"})).cache == "MISS"
    async with gateway(Model(), **semantic(threshold=0.999)) as client:
        await client.ask(PIN[0])
        assert (await client.ask(PIN[1], {"x-cache-threshold": "0.1"})).cache == "MISS"
    async with gateway(Model(), **semantic(threshold=0.8)) as client:
        await client.ask(PIN[0])
        assert (await client.ask(PIN[1], {"x-cache-max-error": "0"})).cache == "MISS"


async def test_edit_distance_is_looked_at_where_that_is_configured() -> None:
    for limit, cache in ((0.5, "SEMANTIC"), (0.01, "MISS")):
        async with gateway(Model(), **semantic(guards={"edit_distance": limit})) as client:
            await client.ask(PIN[0])
            assert (await client.ask(PIN[1])).cache == cache


async def test_a_bounded_error_is_earned_by_answers_that_were_verified() -> None:
    model = Model()
    model.message = lambda *_: {"content": "always the same"}
    async with gateway(model, **semantic(max_error=0.1)) as client:
        await client.ask(PIN[0])
        explored = await client.ask(PIN[1])
        assert (explored.cache, explored.headers["x-cache-rule"]) == ("MISS", "objection")
        meaning = client.gateway.runtime.meaning
        await meaning.verified()
        name = 'cachepilot_semantic_verifications_total{arm="control",verdict="%s"}'
        assert (await client.metric(name % "right"), await client.metric(name % "wrong")) == (1, 0)
        assert meaning.acceptance.stats().outcomes == 1
        model.message = lambda *_: {"content": "something else"}
        await client.ask("How may I reset my card PIN?")
        await meaning.verified()
        assert await client.metric(name % "wrong") == 1


async def test_what_is_trusted_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(Model(), **semantic(max_error=0.1)) as client:
        first = await client.ask(PIN[0])
        acceptance = client.gateway.runtime.meaning.acceptance
        asked: list[float | None] = []

        def accepts(key: bytes, similarity: float, *, draw: float, max_error: float | None = None) -> bool:
            asked.append(max_error)
            return True

        monkeypatch.setattr(acceptance, "accepts", accepts)
        assert (await client.ask(PIN[1])).body == first.body
        await client.ask(PIN[1], {"x-cache-max-error": "0.01"})
        await client.ask(PIN[1], {"x-cache-max-error": "0.5"})
        assert asked == [0.1, 0.01, 0.1]


async def test_one_who_has_events_of_an_answer_by_meaning_gets_the_whole_of_the_answer_to_its_own_question() -> None:
    model = Model()
    async with gateway(model, **semantic(threshold=0.85)) as client:
        await client.ask(PIN[0], stream=True)
        similar = await client.ask(PIN[1], stream=True)
        assert similar.cache == "SEMANTIC"
        own = await client.ask(PIN[1], {"cache-control": "no-cache"}, stream=True)
        back = {"x-cache-offset": "3", "if-range": similar.headers["etag"]}
        again = await client.ask(PIN[1], back, stream=True)
        assert (again.cache, again.headers["x-cache-offset"], again.body) == ("HIT", "0", own.body)


async def test_an_answer_by_meaning_is_streamed_to_one_who_wants_a_stream() -> None:
    async with gateway(Model(), **semantic()) as client:
        await client.ask(PIN[0])
        reply = await client.ask(PIN[1], stream=True)
        assert (reply.cache, reply.body.endswith(b"data: [DONE]\n\n")) == ("SEMANTIC", True)


@pytest.mark.parametrize("collapse", [True, False])
async def test_nearly_the_same_question_waits_for_the_answer_under_way(collapse: bool) -> None:
    model = Model()
    model.hold.clear()
    async with gateway(model, **semantic(collapse=collapse)) as client:
        asked = [asyncio.create_task(client.ask(PIN[0]))]
        await until(lambda: len(model.asked) == 1, "the first to be asked")
        asked += [asyncio.create_task(client.ask(text)) for text in (PIN[1], "How do I reset my card PIN on 3 May?")]
        await until(lambda: len(model.asked) == (2 if collapse else 3), "those that differ to be asked")
        if collapse:
            name = 'cachepilot_cacheable_lookups_total{arm="control"}'

            async def come() -> bool:
                return await client.metric(name) == 3 and len(client.gateway.runtime.flights) == 2

            await until(come, "all to have come")
        model.hold.set()
        first, similar, other = await asyncio.gather(*asked)
        assert similar.cache == ("COLLAPSED" if collapse else "MISS")
        assert (similar.body == first.body, other.cache) == (collapse, "MISS")


async def test_paraphrases_meet_the_same_arm_where_buckets_assign_them() -> None:
    arms = {name: {"share": 0.5} for name in ("one", "two")}
    async with gateway(Model(), arms=arms, **semantic(lsh={"buckets": 2, "arms": True})) as client:
        replies = {
            text: await client.ask(text) for text in (*PIN, "Where is my parcel?", "Tell me a joke", "Is it cold in winter?")
        }
        assert replies[PIN[0]].headers["x-cache-arm"] == replies[PIN[1]].headers["x-cache-arm"]
        assert replies[PIN[1]].cache == "SEMANTIC"
        for text, reply in replies.items():
            again = await client.ask(text)
            assert again.headers["x-cache-arm"] == reply.headers["x-cache-arm"]


async def test_buckets_may_be_cut_along_the_components_of_what_is_asked(tmp_path: Path) -> None:
    path, arms = tmp_path / "components.npz", {name: {"share": 0.5} for name in ("one", "two")}
    fit_pca(quantise(np.random.default_rng(1).normal(size=(100, 384))), 16).save(path)
    async with gateway(Model(), arms=arms, **semantic(lsh={"arms": True, "components": str(path)})) as client:
        signature = client.gateway.runtime.meaning._signature
        assert signature.of(bytes(384)) != Signature().of(bytes(384))
        assert [(await client.ask(text)).cache for text in (PIN[0], PIN[0])] == ["MISS", "HIT"]
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"components\.npz: expected"):
        Gateway(GatewaySettings.model_validate(semantic(lsh={"components": str(path)})))


async def test_replicas_answer_by_meaning_what_another_was_asked(redis_url: str, namespace: str) -> None:
    async with before(Model(), replicas=2, redis_url=redis_url, namespace=namespace, **semantic()) as (one, other):
        first = await one.ask(PIN[0])

        async def heard() -> bool:
            return (await other.ask(PIN[1], {"cache-control": "only-if-cached"})).body == first.body

        await until(heard, "the vector to be heard of")


async def test_an_embedder_that_hangs_costs_its_deadline_a_few_times_and_then_nothing() -> None:
    model = Model()
    async with gateway(model, **semantic(deadline=0.05)) as client:
        embedder = client.gateway.runtime.meaning.embedder
        assert embedder is not None
        release, asked = await _hang(embedder)
        try:
            for number in range(8):
                reply = await client.ask(f"question {number}")
                assert (reply.status, reply.cache) == (200, "MISS")
            assert await client.metric("cachepilot_embedding_failures_total") == 8
            assert len(asked) == 1
            assert (await client.ask("question 0")).cache == "HIT"
        finally:
            release()


async def _hang(embedder: serving.embedding.Embedder) -> tuple[Any, list[int]]:
    gate, asked = threading.Event(), []

    def hang(texts: list[str]) -> Any:
        asked.append(len(texts))
        gate.wait(60.0)
        raise RuntimeError("released")

    embedder._encode = hang  # type: ignore[method-assign]
    return gate.set, asked


async def test_a_vector_store_that_is_away_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = semantic(vectors={"kind": "chroma", "url": "http://127.0.0.1:1", "deadline": 0.2})
    async with gateway(Model(), **settings) as client:
        assert [(await client.ask(text)).cache for text in PIN] == ["MISS", "MISS"]
        assert (await client.ask(PIN[0])).cache == "HIT"
        assert await client.metric("cachepilot_vector_failures_total") == 2


async def test_without_an_embedder_there_are_no_answers_by_meaning_and_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(threads: int) -> Any:
        raise serving.embedding.EmbeddingUnavailable("not installed")

    monkeypatch.setattr(serving.embedding, "_load", missing)
    async with gateway(Model(), **semantic()) as client:
        assert [(await client.ask(text)).cache for text in (*PIN, PIN[0])] == ["MISS", "MISS", "HIT"]
        assert not client.gateway.runtime.meaning.enabled
