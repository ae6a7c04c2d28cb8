"""Everything fails at once, while clients of two tenants ask on: no wrong answer, no error that the model did not make."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

import serving.embedding
from serving.redis_server import RedisServer
from serving.sse import events
from tests.e2e.stack import Reply
from tests.serving.gateways import Client, Model, before

KEYS = {"acme": "a1", "beta": "b1"}
PIN = ("How do I reset my card PIN?", "How can I reset my card PIN?")
TEXTS = [f"What is {number} plus {number % 3}?" for number in range(12)] + [
    *PIN,
    "How do I turn on the alarm?",
    "How do I turn off the alarm?",
]
SAME = {PIN[1]: PIN[0]}
"""The one pair of questions that may share an answer, and does."""

_load = functools.cache(serving.embedding._load)


class Failing(Model):
    """Answers every question with what only that question is answered with, and fails one call in ten."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.failed = 0
        self._draw = random.Random(seed)
        self.message = lambda _, asked: {"content": right(asked)}

    async def _chat(self, request: Request) -> Response:
        if self._draw.random() < 0.1:
            self.failed += 1
            return Response(self.error, 500, media_type="application/json")
        return await super()._chat(request)


def right(asked: dict[str, Any]) -> str:
    """The answer to a request: of its text, its system prompt and its tenant, told by a field that is not of its identity."""
    texts = [message["content"] for message in asked["messages"]]
    texts[-1] = SAME.get(texts[-1], texts[-1])
    return "answer " + hashlib.sha256(json.dumps([texts, asked["user"]]).encode()).hexdigest()


def said(reply: Reply) -> str:
    if reply.headers["content-type"].startswith("text/event-stream"):
        chunks = [json.loads(event.data) for event in events(reply.body) if not event.done]
        assert not any("error" in chunk for chunk in chunks), reply.body
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]).strip()
    return str(reply.json["choices"][0]["message"]["content"]).strip()


class Asking:
    """One client that asks at random, and counts what it got."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.draw = client, random.Random(seed)
        self.caches: dict[str, int] = {}
        self.errors = 0

    async def run(self, requests: int) -> None:
        for _ in range(requests):
            await self.ask()

    async def ask(self, text: str = "") -> None:
        """Ask that question, or any of those that there are, in any way."""
        draw = self.draw
        tenant = "acme" if text else draw.choice(list(KEYS))
        system = [] if text else [{"role": "system", "content": draw.choice(("Be brief.", "Be kind."))}] * draw.randrange(2)
        messages = [*system, {"role": "user", "content": text or draw.choice(TEXTS)}]
        asked = {"model": "m", "messages": messages, "user": tenant, "stream": draw.random() < 0.5}
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        if not text and draw.random() < 0.1:
            headers["cache-control"] = draw.choice(("no-cache", "no-store", "max-age=1"))
        reply = await self.client.request("POST", "/v1/chat/completions", json=asked, headers=headers)
        if reply.status == 500:
            self.errors += 1
            return
        assert reply.status == 200, (reply.status, reply.body)
        assert said(reply) == right(asked), (asked, dict(reply.headers))
        cache = str(reply.cache)
        self.caches[cache] = self.caches.get(cache, 0) + 1


async def test_with_everything_failing_no_answer_is_wrong_and_no_error_is_the_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.embedding, "_load", _load)
    model, gate = Failing(1), threading.Event()
    hashes = {name: [hashlib.sha256(key.encode()).hexdigest()] for name, key in KEYS.items()}
    semantic = {"enabled": True, "threshold": 0.7, "deadline": 60.0}
    with RedisServer(tmp_path) as first:
        settings: dict[str, Any] = {
            "redis_url": first.url,
            "redis_deadline": 0.1,
            "auth": {"required": True, "tenants": hashes},
            "rules": {"semantic": semantic, "l1_share": 0.1},
            "arms": {"control": {"knobs": {"cache_size": 30_000, "ttl": 20.0}}},
        }
        async with before(model, replicas=2, **settings) as clients:
            asking = [Asking(clients[number % 2], number) for number in range(8)]

            async def all_ask(requests: int) -> None:
                await asyncio.gather(*(each.run(requests) for each in asking))

            for text in PIN:
                await asking[0].ask(text)
            await all_ask(10)
            first.__exit__(None, None, None)  # Redis is killed
            await all_ask(10)
            with RedisServer(tmp_path):  # and comes back, empty
                await all_ask(10)
                for client in clients:  # the embedder hangs
                    embedder = client.gateway.runtime.meaning.embedder
                    assert embedder is not None
                    monkeypatch.setattr(embedder, "_encode", lambda texts: gate.wait(60.0))
                    monkeypatch.setattr(embedder, "_deadline", 0.1)
                await all_ask(10)
                gate.set()
                counted = [await client.metric('cachepilot_requests_total{arm="control",outcome="error"}') for client in clients]
    caches = {cache for each in asking for cache in each.caches}
    assert {"HIT", "MISS", "SEMANTIC", "BYPASS", "REFRESH"} <= caches
    assert sum(counted) == sum(each.errors for each in asking)
    # Those who waited for a call that failed are told of it, too.
    assert model.failed <= sum(each.errors for each in asking) <= 3 * model.failed
