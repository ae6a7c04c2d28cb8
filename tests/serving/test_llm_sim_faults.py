"""The simulated model fails as often as it is told, and gives up what nobody waits for."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.llm_sim import LlmSim, LlmSimProcess, fault
from serving.settings import LlmSimSettings
from tests.e2e.stack import chat
from tests.serving.gateways import served

FAST = LlmSimSettings(ttft=0.0, tpot=0.0)
COMPLETIONS = "/v1/chat/completions"


def sim(**settings: Any) -> LlmSimSettings:
    return LlmSimSettings.model_validate({**FAST.model_dump(), **settings})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_its_slot_and_leaves_the_queue(stream: bool) -> None:
    simulated = LlmSim(sim(slots=1, ttft=3600.0))
    engine = simulated.engine
    async with served(simulated) as url, aiohttp.ClientSession() as session:

        async def ask() -> None:
            async with session.post(url + COMPLETIONS, json=chat("hello", stream=stream)) as reply:
                await reply.read()

        running = asyncio.create_task(ask())
        await until(lambda: engine.running == 1)
        queued = [asyncio.create_task(ask()) for _ in range(3)]
        await until(lambda: engine.waiting == 3)
        for task in queued[:2]:
            task.cancel()
        await until(lambda: engine.waiting == 1)
        running.cancel()
        await until(lambda: engine.waiting == 0)  # the last of them has the slot now
        assert engine.running == 1
        queued[2].cancel()
        await until(lambda: engine.running == 0)
        await asyncio.gather(running, *queued, return_exceptions=True)


async def test_a_client_that_disconnects_within_a_stream_frees_its_slot() -> None:
    simulated = LlmSim(sim(slots=1, tpot=3600.0))
    async with served(simulated) as url, aiohttp.ClientSession() as session:
        async with session.post(url + COMPLETIONS, json=chat("hello", stream=True)) as reply:
            assert (await reply.content.readline()).startswith(b"data: ")
            assert simulated.engine.running == 1
        await until(lambda: simulated.engine.running == 0)


async def test_a_request_that_hangs_is_given_up_with_its_client() -> None:
    async with served(LlmSim(sim(hang_rate=1.0))) as url, aiohttp.ClientSession() as session:
        hanging = asyncio.create_task(session.post(url + COMPLETIONS, json=chat("hello")))
        async with session.get(url + "/health") as reply:  # what is no completion does not hang
            assert reply.status == 200
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_failures_come_as_often_as_asked_for_and_in_the_same_order_again() -> None:
    settings = sim(failure_rate=0.5, fault_seed=3)
    seen = []
    for _ in range(2):
        async with served(LlmSim(settings)) as url, aiohttp.ClientSession() as session:
            statuses = []
            for number in range(20):
                async with session.post(url + COMPLETIONS, json=chat("hello")) as reply:
                    statuses.append(reply.status)
                    body = await reply.json()
                wrong = fault(number, settings)
                assert reply.status == {"error": 500, "unavailable": 503, "": 200}[wrong]
                assert ("error" in body) == bool(wrong)
            seen.append(statuses)
    assert seen[0] == seen[1]
    assert set(seen[0]) == {200, 500, 503}


async def test_what_is_cut_lacks_its_second_half() -> None:
    async with served(LlmSim(sim(cut_rate=1.0))) as url, aiohttp.ClientSession() as session:
        headers = {"x-llm-sim-output-tokens": "10"}
        async with session.post(url + COMPLETIONS, json=chat("hello", stream=True), headers=headers) as reply:
            stream = (await reply.read()).decode()
        assert stream.count("data: ") == 1 + 5
        assert "[DONE]" not in stream
        assert '"stop"' not in stream
        async with session.post(url + COMPLETIONS, json=chat("hello"), headers=headers) as reply:
            assert reply.status == 200
            with pytest.raises(ValueError, match="Unterminated string"):
                json.loads(await reply.read())


async def test_a_stream_says_what_it_cost_where_that_is_asked_for() -> None:
    async with served(LlmSim(FAST)) as url, aiohttp.ClientSession() as session:
        body = chat("hello", stream=True, stream_options={"include_usage": True})
        async with session.post(url + COMPLETIONS, json=body, headers={"x-llm-sim-output-tokens": "3"}) as reply:
            lines = [line[6:] for line in (await reply.text()).splitlines() if line]
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@given(st.integers(0, 10), st.floats(0, 0.3), st.floats(0, 0.3), st.floats(0, 0.3))
def test_shares_of_faults_are_those_asked_for(seed: int, failure: float, hang: float, cut: float) -> None:
    settings = sim(failure_rate=failure, hang_rate=hang, cut_rate=cut, fault_seed=seed)
    drawn = [fault(number, settings) for number in range(2000)]
    for share, kinds in ((failure, ("error", "unavailable")), (hang, ("hang",)), (cut, ("cut",))):
        # five standard deviations of 2,000 draws
        assert sum(kind in kinds for kind in drawn) / 2000 == pytest.approx(share, abs=5 * (0.25 / 2000) ** 0.5)


def test_shares_beyond_the_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"failure_rate \+ hang_rate \+ cut_rate <= 1, got 1\.1"):
        sim(failure_rate=0.5, hang_rate=0.5, cut_rate=0.1)


async def test_requests_that_never_end_do_not_keep_the_process_from_ending() -> None:
    with LlmSimProcess(sim(port=0, tpot=3600.0)) as process:
        running = process._process
        assert running is not None
        async with aiohttp.ClientSession() as session:
            async with session.post(process.base_url + "/chat/completions", json=chat("hello", stream=True)) as reply:
                assert (await reply.content.readline()).startswith(b"data: ")
                await asyncio.to_thread(process.stop)
        assert running.returncode not in (None, -signal.SIGKILL)
