"""The whole data plane, started once per session: Redis, the simulated model, Ray Serve with two gateway replicas and two arms.

For any test::

    from tests.e2e.stack import Stack

    def test_something(stack: Stack) -> None:          # the fixture is in tests/e2e/conftest.py
        answer = stack.ask("a question")               # POST /v1/chat/completions
        stack.gateway.metrics_targets()                # URLs for the embedded scraper
        stack.gateway.service_discovery                # file for a real Prometheus (Ray's dashboard runs for it)
        stack.model.metrics_url                        # the model's vLLM-named metrics
        stack.redis.url, stack.settings.namespace      # for RedisConfigStore

The stack is shared: use questions of your own (:meth:`Stack.question`), and leave the knobs as you found them or do not depend on
them. Tests outside this folder import the fixture: ``from tests.e2e.conftest import stack  # noqa: F401``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.app import Running
from serving.arms import ArmAssignment
from serving.keys import fingerprint
from serving.llm_sim import LlmSimProcess
from serving.redis_server import RedisServer
from serving.settings import GatewaySettings

MODEL = "llm-sim"
_numbers = itertools.count()


@dataclass(frozen=True)
class Reply:
    """What the gateway answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    @property
    def cache(self) -> str | None:
        """``HIT``, ``SEMANTIC``, ``MISS``, ``BYPASS``, or None."""
        return self.headers.get("x-cache")


@dataclass(frozen=True)
class Stack:
    """The running parts."""

    gateway: Running
    model: LlmSimProcess
    redis: RedisServer
    settings: GatewaySettings
    access_log: Path

    def question(self, arm: str | None = None) -> str:
        """A question that nobody asked before, assigned to ``arm`` if given."""
        while True:
            text = f"question {os.getpid()}-{next(_numbers)}"
            if arm is None or self.arm_of(text) == arm:
                return text

    def arm_of(self, text: str) -> str:
        """The arm of a question."""
        key = fingerprint(chat(text), namespace=self.settings.namespace).key
        return ArmAssignment(self.settings.salt, self.settings.shares).arm(key)

    def ask(self, text: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        """Ask the gateway a question."""
        return self.post(json.dumps(chat(text, **fields)).encode(), headers)

    def post(self, body: bytes, headers: Mapping[str, str] | None = None) -> Reply:
        """Send any body to the gateway's chat completions."""
        return fetch(f"{self.gateway.url}/v1/chat/completions", body, headers)

    def get(self, path: str) -> Reply:
        """Get a path of the gateway."""
        return fetch(self.gateway.url + path)

    def exposition(self) -> str:
        """The text of every metrics port of the cluster."""
        return "\n".join(fetch(target).body.decode() for target in self.gateway.metrics_targets())

    def total(self, metric: str, **labels: str) -> float:
        """The sum of a metric over all series with these labels; ``metric`` as Ray exports it."""
        return sum(
            value for name, found, value in samples(self.exposition()) if name == metric and labels.items() <= found.items()
        )


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A request body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def fetch(url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Reply:
    """One HTTP exchange; an error status is a reply too."""
    request = urllib.request.Request(url, body, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, {name.lower(): value for name, value in error.headers.items()}, error.read())


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """The samples of an exposition: name, labels, value."""
    found = []
    for line in text.splitlines():
        match = _SAMPLE.match(line) if "cachepilot" in line else None
        if match is not None:
            found.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found
