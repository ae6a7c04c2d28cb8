"""Answers by meaning: embeds questions, says which neighbours may answer them, and learns from those that may not yet.

A neighbour that is similar enough (:mod:`serving.cache` finds it) answers if no guard objects and, where the operator or the
caller bounds the share of wrong answers, its acceptance trusts it. Where acceptance does not, the model answers, and what it says
is compared afterwards, off the request path, with what would have been served. Nothing here makes a request fail: an embedder
that is slow, hangs or is missing means that there are no answers by meaning.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from serving.cache import Judge
from serving.embedding import DIMENSIONS, Embedder, EmbeddingUnavailable
from serving.ending import end
from serving.flights import Flight
from serving.lookup import ACCEPTANCE
from serving.meaning.acceptance import Acceptance
from serving.meaning.guards import Guards
from serving.meaning.lsh import Projection, Signature
from serving.meaning.verification import same_answer
from serving.metrics import GatewayMetrics
from serving.policy import Asked, Candidate
from serving.settings import SemanticSettings
from serving.tiers.base import Entry, EntryMeta
from serving.tiers.vector_store import components, cosines

_log = logging.getLogger(__name__)

UNKNOWN_TEXT = "unknown_text"
"""Objection to an entry whose question is not known, so that nothing can be checked."""

FIT_SECONDS = 1.0
"""How often it is looked whether acceptance has learned enough to be fitted anew."""

MOST_VERIFICATIONS = 64
"""Comparisons under way; more are left out, which costs only what would have been learned."""

_REMEMBERED = 4096


class ByMeaning:
    """What one replica knows of meaning.

    Args:
        settings: How answers by meaning are given.
        metrics: Where failures, objections and verdicts are counted.
        draw: Uniform random numbers from 0 to 1.

    Raises:
        ValueError: If the file of principal components cannot be used.
    """

    def __init__(self, settings: SemanticSettings, metrics: GatewayMetrics, *, draw: Callable[[], float] = random.random) -> None:
        self._settings, self._metrics, self._draw = settings, metrics, draw
        self.embedder: Embedder | None = None
        self.guards = Guards(settings.guards)
        self.acceptance = Acceptance(settings.max_error if settings.max_error is not None else 0.5, over=settings.error_over)
        lsh = settings.lsh
        projection = Projection.load(lsh.components) if lsh.components is not None else None
        self._signature = Signature(DIMENSIONS, lsh.bits, lsh.buckets, lsh.seed, projection)
        self._vectors: OrderedDict[bytes, bytes] = OrderedDict()
        self._verifying: set[asyncio.Task[None]] = set()
        self._fitting: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        """Whether there are answers by meaning at all: they are asked for, and the embedder could be loaded."""
        return self.embedder is not None

    @property
    def assigns_arms(self) -> bool:
        """Whether a question's bucket assigns it to an arm."""
        return self.enabled and self._settings.lsh.arms

    async def open(self) -> None:
        """Load the embedder, if answers by meaning are asked for; without it they are off, and that is said."""
        if not self._settings.enabled:
            return
        embedder = Embedder(deadline=self._settings.deadline)
        try:
            await embedder.load()
        except EmbeddingUnavailable as error:
            _log.error("answers by meaning are off: %s", error)
            await embedder.close()
            return
        self.embedder = embedder
        self._fitting = asyncio.create_task(self._fit(), name="fit-acceptance")

    async def close(self) -> None:
        """Stop the background work; harmless when not opened."""
        await end([*self._verifying, *([self._fitting] if self._fitting is not None else [])])
        if self.embedder is not None:
            await self.embedder.close()

    # -- vectors -------------------------------------------------------------------------------------------------------------

    def known(self, text: str) -> bytes | None:
        """Return a text's embedding where it was computed lately, without awaiting."""
        return self._vectors.get(_name(text))

    async def embed(self, text: str) -> bytes:
        """Return a text's embedding, int8 bytes; ``b""`` where it has none, or not in time. Never raises."""
        name = _name(text)
        known = self._vectors.get(name)
        if known is not None:
            self._vectors.move_to_end(name)
            return known
        if self.embedder is None:
            return b""
        try:
            vector = await self.embedder.embed(text)
        except EmbeddingUnavailable:
            self._metrics.count("cachepilot_embedding_failures_total")
            return b""
        self._vectors[name] = vector
        if len(self._vectors) > _REMEMBERED:
            self._vectors.popitem(last=False)
        return vector

    def bucket(self, vector: bytes) -> bytes:
        """Return the name of a vector's semantic bucket, by which arms are assigned."""
        return b"bucket" + self._signature.bucket(self._signature.of(vector)).to_bytes(4, "big")

    # -- who may answer ------------------------------------------------------------------------------------------------------

    def judge(self, arm: str, asked: Asked) -> Judge:
        """Return the check of a request's neighbours."""
        bound = asked.directives.error_bound(self._settings.max_error)

        def objection(entry: Entry, similarity: float) -> str:
            text = EntryMeta.load(entry.meta).text
            found = self.guards.objection(asked.fp.text, text) if text else UNKNOWN_TEXT
            if not found and bound is not None:
                trusted = self.acceptance.accepts(entry.key, similarity, draw=self._draw(), max_error=bound)
                found = "" if trusted else ACCEPTANCE
            if found:
                self._metrics.count("cachepilot_semantic_objections_total", arm, found)
            return found

        return objection

    def alike(self, asked: Asked, vector: bytes) -> Callable[[Flight], bool] | None:
        """Return what tells whether the answer under way to another question may be waited for; None: none may.

        Where the share of wrong answers is bounded none may: nothing is known yet of an answer that is not there.
        """
        settings, text = self._settings, asked.fp.text
        if not settings.collapse or not vector or not asked.directives.by_meaning:
            return None
        if asked.directives.error_bound(settings.max_error) is not None:
            return None
        least = max(settings.threshold, asked.directives.threshold or 0.0)
        mine = components(vector, len(vector))

        def accept(flight: Flight) -> bool:
            about = flight.about
            if not isinstance(about, tuple) or len(about) != 2 or len(about[1]) != len(vector):
                return False
            other, theirs = about
            similarity = float(cosines(mine, np.frombuffer(theirs, np.int8).reshape(1, -1))[0])
            return similarity >= least and not self.guards.objection(text, other)

        return accept

    # -- learning ------------------------------------------------------------------------------------------------------------

    def verify_soon(self, arm: str, refused: Candidate, fresh: bytes) -> None:
        """Compare the model's answer with the one that acceptance did not let be served; in the background.

        Args:
            arm: The arm.
            refused: The neighbour, with its entry.
            fresh: The model's answer, JSON or event stream.
        """
        if refused.entry is None or len(self._verifying) >= MOST_VERIFICATIONS:
            return
        task = asyncio.create_task(self._verify(arm, refused, refused.entry.body, fresh), name="verify-answer")
        self._verifying.add(task)
        task.add_done_callback(self._verifying.discard)

    async def verified(self) -> None:
        """Wait for the comparisons under way."""
        await asyncio.gather(*self._verifying, return_exceptions=True)

    async def _verify(self, arm: str, refused: Candidate, cached: bytes, fresh: bytes) -> None:
        settings = self._settings
        try:
            right = await same_answer(
                cached,
                fresh,
                how=settings.verify,
                similarity=settings.verify_similarity,
                embed=self.embedder.embed if self.embedder is not None else None,
                objection=self.guards.objection,
            )
        except Exception:  # noqa: BLE001 - what cannot be compared teaches nothing
            _log.exception("an answer by meaning could not be verified")
            return
        if right is not None:
            self.acceptance.observe(refused.key, refused.similarity, right)
            self._metrics.count("cachepilot_semantic_verifications_total", arm, "right" if right else "wrong")

    async def _fit(self) -> None:
        while True:
            await asyncio.sleep(FIT_SECONDS)
            if self.acceptance.fit_due():
                try:
                    await self.acceptance.refit()
                except Exception:  # noqa: BLE001 - the last fit stays; the next may succeed
                    _log.exception("acceptance could not be fitted")


def _name(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
