"""The simulated model's embeddings: the same for the same text, in the forms that OpenAI's client asks for, and cached."""

from __future__ import annotations

from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from serving.llm_sim import LlmSim
from serving.llm_sim_embeddings import MOST_INPUTS, BadInput, embed
from serving.settings import LlmSimSettings
from tests.serving.gateways import running, served

FAST = LlmSimSettings(ttft=0.0, tpot=0.0)
texts = st.text(min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 64))
def test_a_text_has_one_vector_of_length_one_whatever_it_is_asked_with(given: list[str], dimensions: int) -> None:
    together = embed({"input": given, "dimensions": dimensions}, FAST)
    assert together.vectors.shape == (len(given), dimensions)
    np.testing.assert_allclose(np.linalg.norm(together.vectors, axis=1), 1.0, rtol=1e-5)
    for text, vector in zip(given, together.vectors, strict=True):
        alone = embed({"input": text, "dimensions": dimensions}, FAST)
        np.testing.assert_array_equal(alone.vectors[0], vector)
    assert together.prompt_tokens == sum(-(-len(text) // 4) for text in given)


def test_other_texts_models_and_revisions_have_other_vectors_and_texts_are_not_tokens() -> None:
    first = embed({"input": "12"}, FAST).vectors
    for other in (
        embed({"input": "13"}, FAST),
        embed({"input": [12]}, FAST),
        embed({"input": "12"}, FAST.model_copy(update={"revision": "2"})),
        embed({"input": "12"}, FAST.model_copy(update={"model": "other"})),
    ):
        assert not np.array_equal(first, other.vectors)
    assert embed({"input": [[1, 2], [3]]}, FAST).vectors.shape == (2, 384)
    assert embed({"input": [1, 2, 3]}, FAST).prompt_tokens == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 7]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a"] * (MOST_INPUTS + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_has_no_vector_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadInput, match=f"^{param}: expected") as raised:
        embed(body, FAST)
    assert raised.value.param == param


async def test_refusals_and_faults_are_those_of_its_completions() -> None:
    async with served(LlmSim(FAST.model_copy(update={"failure_rate": 1.0}))) as url, aiohttp.ClientSession() as session:
        for body, status in (
            ({"model": "llm-sim", "input": ""}, 400),
            ({"model": "gpt-9", "input": "a"}, 404),
            ([], 400),
            ({"model": "llm-sim", "input": "a"}, (500, 503)),
        ):
            async with session.post(f"{url}/v1/embeddings", json=body) as reply:
                assert reply.status in (status if isinstance(status, tuple) else (status,))
                assert (await reply.json())["error"]["message"]


async def test_the_gateway_answers_openais_client_with_the_embeddings_that_it_keeps() -> None:
    model = LlmSim(FAST)
    async with served(model) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        openai = AsyncOpenAI(base_url=f"{client.url}/v1", api_key="any", max_retries=0)
        async with openai:
            labels, vectors = [], []
            for form in ("default", "float", "default", "float"):
                asked: dict[str, Any] = {} if form == "default" else {"encoding_format": form}
                answer = await openai.embeddings.with_raw_response.create(model="llm-sim", input=["one", "two"], **asked)
                labels.append(answer.headers["x-cache"])
                made = answer.parse()
                vectors.append([item.embedding for item in made.data])
                assert made.usage.prompt_tokens == 2
        assert labels == ["MISS", "MISS", "HIT", "HIT"]  # each form is an answer of its own
        np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-6)
        assert vectors[2:] == vectors[:2]
        prompt = "vllm:prompt_tokens_total"
        assert model.registry.get_sample_value(prompt, {"model_name": "llm-sim"}) == 4
