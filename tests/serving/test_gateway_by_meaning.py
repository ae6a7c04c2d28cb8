"""Answers by meaning, with the real model of embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from serving.llm_sim import LlmSimProcess
from serving.settings import LlmSimSettings
from tests.serving.gateways import Client, running


@pytest.fixture(scope="module")
def model() -> Iterator[LlmSimProcess]:
    with LlmSimProcess(LlmSimSettings(port=0, ttft=0.0, tpot=0.0)) as process:
        yield process


@pytest.fixture
async def client(model: LlmSimProcess, redis_url: str, namespace: str) -> AsyncIterator[Client]:
    semantic = {"enabled": True, "threshold": 0.85, "deadline": 30.0}
    settings = {
        "redis_url": redis_url,
        "namespace": namespace,
        "upstream": {"base_url": model.base_url},
        "rules": {"semantic": semantic},
    }
    async with running(settings) as started:
        yield started


async def test_a_question_that_means_the_same_shares_the_answer_within_its_context_only(client: Client) -> None:
    first = await client.ask("How do I reset my card PIN?")
    similar = await client.ask("How can I reset my card PIN?")
    assert (first.cache, similar.cache) == ("MISS", "SEMANTIC")
    assert (similar.headers["x-cache-tier"], similar.body) == ("vector", first.body)
    assert (await client.ask("What is the exchange rate today?")).cache == "MISS"
    assert (await client.ask("How can I reset my card PIN?", temperature=0.9)).cache == "MISS"
    assert await client.metric('cachepilot_hits_total{arm="control",tier="vector"}') == 1
    # key, body, context and vector of the three that were stored
    held = await client.metric('cachepilot_resident_bytes{arm="control",tier="memory"}')
    assert held >= 3 * (32 + 32 + 384)
