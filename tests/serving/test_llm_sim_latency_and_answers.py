"""The simulated model: a function of its input, slower under load, sized as promised."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.latency import UpstreamModel
from serving.llm_sim import LlmSim, LlmSimProcess, answer, answer_size, prompt_tokens_of, run, text_of
from serving.settings import LlmSimSettings
from tests.e2e.stack import chat
from tests.serving.gateways import served

FAST = LlmSimSettings(ttft=0.0, tpot=0.0)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served(LlmSim(FAST)) as base:
        yield base


async def _post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            return reply.status, await reply.json()


@given(st.binary(max_size=40), st.integers(1, 3000))
def test_a_text_has_four_characters_per_token_and_needs_no_escapes(seed: bytes, tokens: int) -> None:
    text = text_of(seed, tokens)
    assert len(text) == 4 * tokens
    assert json.loads(f'"{text}"') == text == text_of(seed, tokens)


@given(st.text(max_size=100), st.text(min_size=1, max_size=20), st.integers(1, 2000), st.text(max_size=5))
def test_the_size_of_an_answer_follows_from_its_tokens_and_its_model(text: str, model: str, tokens: int, revision: str) -> None:
    settings = FAST.model_copy(update={"model": model, "revision": revision})
    made = answer(chat(text), settings, output_tokens=tokens)
    body = made.to_json(model, revision)
    assert len(body) == answer_size(tokens, model)
    parsed = json.loads(body)
    assert parsed["usage"]["completion_tokens"] == tokens
    assert parsed["model"] == model


def test_answers_depend_on_model_revision_and_messages_alone() -> None:
    first = answer(chat("hello"), FAST)
    assert answer({**chat("hello"), "temperature": 1.9, "user": "x"}, FAST) == first
    for other in (
        answer(chat("hello!"), FAST),
        answer(chat("hello"), FAST.model_copy(update={"revision": "2"})),
        answer(chat("hello"), FAST.model_copy(update={"model": "other"})),
    ):
        assert other.text != first.text


@given(st.text(max_size=50))
def test_the_length_of_an_answer_lies_within_its_bounds(text: str) -> None:
    settings = FAST.model_copy(update={"min_output_tokens": 5, "max_output_tokens": 9})
    assert 5 <= answer(chat(text), settings).output_tokens <= 9


def test_max_tokens_cuts_an_answer_and_says_so() -> None:
    cut = answer({**chat("hello"), "max_tokens": 3}, FAST, output_tokens=10)
    assert (cut.output_tokens, cut.finish_reason) == (3, "length")
    whole = answer({**chat("hello"), "max_completion_tokens": 10}, FAST, output_tokens=10)
    assert (whole.output_tokens, whole.finish_reason) == (10, "stop")


def test_prompt_tokens_count_text_in_either_form_of_content() -> None:
    assert prompt_tokens_of([{"role": "user", "content": "12345678"}]) == 2
    parts = [{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {}}]
    assert prompt_tokens_of([{"role": "user", "content": parts}]) == 1


async def test_the_header_sets_the_length(url: str) -> None:
    status, body = await _post(url, chat("hello"), **{"x-llm-sim-output-tokens": "77"})
    assert (status, body["usage"]["completion_tokens"]) == (200, 77)
    status, body = await _post(url, chat("hello"), **{"x-llm-sim-output-tokens": "many"})
    assert status == 400
    assert "'many'" in body["error"]["message"]


async def test_a_stream_says_the_same_as_the_whole_answer(url: str) -> None:
    _, whole = await _post(url, chat("hello"))
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=chat("hello", stream=True)) as reply:
            lines = [line[6:].strip() async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


async def test_bad_requests_are_refused_in_the_shape_of_openai(url: str) -> None:
    assert (await _post(url, {"model": "llm-sim", "messages": []}))[0] == 400
    status, body = await _post(url, chat("x", stream="false"))
    assert (status, body["error"]["param"]) == (400, "stream")
    status, body = await _post(url, {**chat("x"), "model": "gpt-9"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "'gpt-9'" in body["error"]["message"]


async def test_a_legacy_completion_says_what_the_chat_of_its_prompt_says_whole_and_streamed(url: str) -> None:
    said = (await _post(url, chat("hello")))[1]["choices"][0]["message"]["content"]
    ask = {"model": "llm-sim", "prompt": "hello"}
    async with aiohttp.ClientSession() as session:
        for prompt in ("hello", ["hello"]):
            async with session.post(f"{url}/v1/completions", json={**ask, "prompt": prompt}) as reply:
                whole = await reply.json()
            assert (reply.status, whole["object"], whole["id"][:5]) == (200, "text_completion", "cmpl-")
            assert whole["choices"] == [{"index": 0, "text": said, "logprobs": None, "finish_reason": "stop"}]
            assert whole["usage"] == {
                "prompt_tokens": 2, "completion_tokens": len(said) // 4, "total_tokens": 2 + len(said) // 4
            }  # fmt: skip
        streamed = {**ask, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{url}/v1/completions", json=streamed) as reply:
            lines = [line[6:].strip() async for line in reply.content if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    *chunks, usage = map(json.loads, lines[:-1])
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


@pytest.mark.parametrize("prompt", [None, 5, [], ["one", "two"], [1, 2, 3]])
async def test_a_legacy_prompt_that_is_not_one_text_is_refused_by_name(url: str, prompt: Any) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json={"model": "llm-sim", "prompt": prompt}) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/responses", 404, "not_found"),
        ("GET", "/v1/models/llm-sim/x", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_supported"),
    ],
)
async def test_a_path_that_it_does_not_have_is_told_in_the_shape_of_openai_with_those_it_has(
    url: str, method: str, path: str, status: int, code: str
) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url + path) as reply:
            error = (await reply.json())["error"]
    assert (reply.status, error["type"], error["param"], error["code"]) == (status, "invalid_request_error", None, code)
    assert f"the simulated model (cachepilot llm-sim) has no {method} {path}; it has" in error["message"]
    for known in ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "GET /v1/models"):
        assert known in error["message"]
    assert reply.headers.get("allow") == ("POST" if status == 405 else None)


async def test_p99_rises_with_load_and_the_queue_is_seen() -> None:
    settings = FAST.model_copy(update={"slots": 2, "ttft": 0.004, "tpot": 0.0004, "contention": 1.0})
    simulated = LlmSim(settings)
    async with served(simulated) as url, aiohttp.ClientSession() as session:

        async def ask() -> float:
            sent = time.perf_counter()
            headers = {"x-llm-sim-output-tokens": "20"}
            async with session.post(f"{url}/v1/chat/completions", json=chat("hello"), headers=headers) as reply:
                await reply.read()
            return time.perf_counter() - sent

        alone = [await ask() for _ in range(10)]
        crowd = [asyncio.create_task(ask()) for _ in range(40)]
        while simulated.engine.waiting < 10:
            await asyncio.sleep(0)
        assert simulated.engine.running == settings.slots
        exported = await (await session.get(f"{url}/metrics")).text()
        together = await asyncio.gather(*crowd)
    # 40 requests over 2 slots: the last waits for about 19 others, so even a busy machine sees a multiple
    assert np.quantile(together, 0.99) > 5 * np.median(alone)
    assert _value(exported, "vllm:num_requests_running") == settings.slots
    assert _value(exported, "vllm:num_requests_waiting") >= 1
    assert 0 < _value(exported, "vllm:gpu_cache_usage_perc") < 1


async def test_waiting_requests_are_served_in_order_of_arrival() -> None:
    simulated = LlmSim(FAST.model_copy(update={"slots": 1, "ttft": 0.001}))
    order: list[int] = []

    async def one(number: int) -> None:
        async with simulated.engine.slot(answer(chat(str(number)), FAST)):
            order.append(number)

    await asyncio.gather(*(one(number) for number in range(8)))
    assert order == list(range(8))
    assert (simulated.engine.running, simulated.engine.waiting) == (0, 0)


async def test_a_client_that_goes_away_frees_its_slot() -> None:
    simulated = LlmSim(FAST.model_copy(update={"slots": 1, "ttft": 3600.0}))

    async def hold() -> None:
        async with simulated.engine.slot(answer(chat("x"), FAST)):
            pytest.fail("an hour has passed")

    tasks = [asyncio.create_task(hold()) for _ in range(2)]
    while simulated.engine.running < 1 or simulated.engine.waiting < 1:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (simulated.engine.running, simulated.engine.waiting) == (0, 0)


@given(st.integers(1, 64), st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 4), st.integers(0, 4000))
def test_service_time_grows_with_tokens_and_with_company(
    slots: int, ttft: float, tpot: float, contention: float, tokens: int
) -> None:
    model = UpstreamModel(slots, ttft, tpot, contention)
    assert model.service_time(0, 0) == ttft
    times = [model.service_time(tokens, running) for running in range(slots)]
    assert times == sorted(times)
    assert model.service_time(tokens + 1, slots - 1) >= times[-1]
    assert model.token_time(slots) == pytest.approx(tpot * (1 + contention))


@pytest.mark.parametrize(("field", "value"), [("slots", 0), ("ttft", -1.0), ("tpot", float("nan")), ("contention", float("inf"))])
def test_an_impossible_model_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"upstream model: {field}: expected"):
        UpstreamModel(**{field: value})  # type: ignore[arg-type]


def test_it_runs_as_a_process_that_ends_with_its_context_and_names_a_port_in_use() -> None:
    with LlmSimProcess(LlmSimSettings(port=0)) as process:
        with urllib.request.urlopen(process.base_url + "/models", timeout=10.0) as reply:
            assert json.load(reply)["data"][0]["id"] == "llm-sim"
        port = int(process.base_url.split(":")[2].split("/")[0])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            run(LlmSimSettings(port=port))
        with pytest.raises(RuntimeError, match="did not start"):
            LlmSimProcess(LlmSimSettings(port=port)).start()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(process.base_url + "/models", timeout=1.0)


def _value(exposition: str, name: str) -> float:
    return next(float(line.rsplit(" ", 1)[1]) for line in exposition.splitlines() if line.startswith(name + "{"))
