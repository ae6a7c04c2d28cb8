"""The simulated model ends in order when it is told to: with status 0, and without a word."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

import aiohttp
import pytest

from serving.settings import LlmSimSettings
from tests.e2e.stack import chat


async def running(session: aiohttp.ClientSession, base_url: str) -> bool:
    """Whether a request runs."""
    async with session.get(base_url.removesuffix("/v1") + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return any(line.startswith("vllm:num_requests_running") and float(line.rsplit(" ", 1)[1]) > 0 for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_model_that_is_ended_ends_with_status_0_and_says_nothing(number: signal.Signals) -> None:
    settings = LlmSimSettings(port=0, ttft=3600.0)
    model = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "serving.llm_sim", settings.model_dump_json(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert model.stdout is not None
        base_url = (await model.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession() as session:

            async def ask() -> None:
                async with session.post(f"{base_url}/chat/completions", json=chat("hello")) as reply:
                    await reply.read()

            asking = asyncio.create_task(ask())
            async with asyncio.timeout(60.0):
                while not await running(session, base_url):
                    await asyncio.sleep(0.01)
            model.send_signal(number)
            printed, complained = await model.communicate()
            with suppress(aiohttp.ClientError):
                await asking
    finally:
        with suppress(ProcessLookupError):
            model.kill()
    assert (model.returncode, printed, complained) == (0, b"", b"")
