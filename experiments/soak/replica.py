"""A gateway replica for the soak: the product's own, which says what it holds, and whose embedder can be made to hang.

The fault injection is here and not in the product: with the environment variable :data:`FAULTS` naming a folder, the embedder
hangs while that folder has a file :data:`EMBEDDER_HANGS`. Nothing but the soak deploys this class.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

import serving
from serving.app import GatewayReplica
from serving.embedding import Embedder
from serving.gateway import Gateway
from serving.inbound import Receive, Scope, Send
from serving.replies import JSON_TYPE, respond
from serving.settings import GatewaySettings

FAULTS = "CACHEPILOT_SOAK_FAULTS"
EMBEDDER_HANGS = "embedder-hangs"
STATE = "/soak/state"
"""Path that answers with the replica's name, process, tasks, flights and calls under way."""

_PRODUCT = str(Path(serving.__file__).parent)


def hang_while(embedder: Embedder, hangs: Callable[[], bool]) -> None:
    """Make an embedder's worker hang for as long as it is told to; a fault injection.

    Args:
        embedder: A loaded embedder.
        hangs: Whether it hangs now.
    """
    encode = embedder._encode

    def hanging(texts: list[str]) -> Any:
        while hangs():
            time.sleep(0.02)
        return encode(texts)

    embedder._encode = hanging  # type: ignore[method-assign]


class SoakedGateway(Gateway):
    """The gateway with the fault injection and :data:`STATE`."""

    async def start(self) -> None:
        """Open everything, as the product does."""
        await super().start()
        folder, embedder = os.environ.get(FAULTS), self.runtime.meaning.embedder
        if folder is not None and embedder is not None:
            hang_while(embedder, Path(folder, EMBEDDER_HANGS).exists)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http" and scope["path"] == STATE:
            await respond(send, 200, [JSON_TYPE], orjson.dumps(self.state()))
        else:
            await super().__call__(scope, receive, send)

    def state(self) -> dict[str, Any]:
        """Return what the replica holds, JSON-ready; ``tasks`` are those of the product, by coroutine."""
        tasks: Counter[str] = Counter()
        for task in asyncio.all_tasks():
            code = getattr(task.get_coro(), "cr_code", None)
            if code is not None and code.co_filename.startswith(_PRODUCT):
                tasks[code.co_qualname] += 1
        runtime = self.runtime
        return {
            "replica": runtime.replica,
            "pid": os.getpid(),
            "tasks": dict(sorted(tasks.items())),
            "flights": len(runtime.flights),
            "calls": runtime.upstream.inflight + runtime.upstream.waiting,
            "version": runtime.version,
        }


class SoakedReplica(GatewayReplica):
    """The deployment's class; give it to :func:`serving.app.start`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._given = GatewaySettings.model_validate(settings)

    def __serve_build_asgi_app__(self) -> Gateway:
        """Return the ASGI application; Ray Serve calls it within the replica."""
        from ray import serve

        from serving.metrics import RaySink

        return SoakedGateway(self._given, replica=serve.get_replica_context().replica_id.unique_id, sink=RaySink())
