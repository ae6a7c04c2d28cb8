"""What the vector services have in common: threads, deadlines, a circuit breaker, limits.

Their clients block, so each call takes a thread of a small pool. A call that is not answered within the deadline is given up; its
thread ends when the client's own timeout does.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from serving.breaker import CircuitBreaker
from serving.tiers.base import TierUnavailable
from serving.tiers.vector_store import Neighbour, VectorItem, Where, components, cosines, deduplicated

T = TypeVar("T")

THREADS = 4
"""Calls of one replica at the same time."""
OPENING_SECONDS = 10.0
"""What connecting, making and loading a collection may take; its thread goes on when the call that began it has given up."""
RECOUNT = 100
"""Vectors written by this replica after which the limit is looked after, since others write too."""
STEP = 1000
"""Vectors of one call."""
OVERSAMPLING = 16
"""Least number of neighbours asked for, to be compared exactly here."""


class ServiceStore(ABC):
    """A service with a collection per arm; see :class:`serving.tiers.vector_store.VectorStore`.

    Vectors are stored as float32 with the int8 values, so that their cosine can be computed exactly here. After some failures in
    a row nothing is asked for a second, then one call is let through as a probe.

    Args:
        dim: Components of a vector.
        namespace: Separates caches on one service.
        deadline: Seconds that a call may take.
        clock: A monotonic clock, seconds.
    """

    name: str
    shared = True

    def __init__(self, *, dim: int, namespace: str, deadline: float = 0.25, clock: Callable[[], float] = time.monotonic) -> None:
        self.dim = dim
        self.namespace = namespace
        self.deadline = deadline
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=self.name)
        self._opening = threading.Lock()
        self._client: Any = None
        self._collections: dict[str, Any] = {}
        self._limits: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._counted: dict[str, int] = {}

    # -- what differs: all of it runs in a thread ----------------------------------------------------------------------------

    @abstractmethod
    def _connect(self) -> Any:
        """Return the client."""

    @abstractmethod
    def _disconnect(self, client: Any) -> None:
        """Close the client."""

    @abstractmethod
    def _open(self, client: Any, name: str) -> Any:
        """Return the collection, made if it is not there."""

    @abstractmethod
    def _is_gone(self, error: Exception) -> bool:
        """Whether the error says that the collection is not there any more."""

    @abstractmethod
    def _write(self, collection: Any, items: Sequence[VectorItem], added: int) -> None:
        """Write at most :data:`STEP` items; the first is as of ``added``, nanoseconds, each next one a nanosecond later."""

    @abstractmethod
    def _delete(self, collection: Any, ids: Sequence[str]) -> None:
        """Delete at most :data:`STEP` different keys in hex; some may not be there."""

    @abstractmethod
    def _search(
        self, collection: Any, context: bytes, query: npt.NDArray[np.float32], limit: int, where: Where | None
    ) -> list[tuple[str, npt.NDArray[np.float32]]]:
        """Return key in hex and vector of the nearest."""

    @abstractmethod
    def _count(self, collection: Any) -> int:
        """Return how many vectors there are."""

    @abstractmethod
    def _ages(self, collection: Any) -> Iterator[tuple[int, str]]:
        """Yield when each vector was added, and its key in hex."""

    @abstractmethod
    def _clear(self, client: Any, name: str, collection: Any) -> None:
        """Remove every vector."""

    # -- the protocol --------------------------------------------------------------------------------------------------------

    async def add(self, arm: str, items: Sequence[VectorItem]) -> None:
        """Keep vectors; see :meth:`serving.tiers.vector_store.VectorStore.add`.

        Raises:
            ValueError: If a vector does not have ``dim`` bytes; then none is kept.
            TierUnavailable: If the service did not answer.
        """
        added = time.time_ns()
        kept = deduplicated(items, self.dim)
        for begin in range(0, len(kept), STEP):
            await self._call(arm, _partial(self._write, kept[begin : begin + STEP], added + begin))
        self._written[arm] = self._written.get(arm, 0) + len(kept)
        await self._trim(arm)

    async def remove(self, arm: str, keys: Sequence[bytes]) -> None:
        """Remove the keys' vectors.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        await self._remove(arm, [key.hex() for key in dict.fromkeys(keys)])

    async def near(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        """Return the nearest entries of the context; see :meth:`serving.tiers.vector_store.VectorStore.near`.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
            TierUnavailable: If the service did not answer.
        """
        query = components(vector, self.dim)
        if not query.any():
            return []
        limit = max(2 * k, OVERSAMPLING)
        found = await self._call(arm, _partial(self._search, context, query.astype(np.float32), limit, where))
        # A service may keep its own form of the floats: 126.99999 is 127.
        vectors = np.rint(np.array([each for _, each in found], np.float32).reshape(-1, self.dim)).astype(np.int8)
        near = [
            Neighbour(bytes.fromhex(key), context, similarity)
            for (key, _), similarity in zip(found, cosines(query, vectors).tolist(), strict=True)
            if similarity >= floor
        ]
        return sorted(near, key=lambda each: -each.similarity)[:k]

    async def count(self, arm: str) -> int:
        """Return how many vectors the arm has.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        return await self._call(arm, self._count)

    async def limit(self, arm: str, entries: int) -> None:
        """Set how many vectors the arm may have; see :meth:`serving.tiers.vector_store.VectorStore.limit`.

        Raises:
            TierUnavailable: If the service did not answer; the limit is kept to from then on all the same.
        """
        self._limits[arm] = entries
        self._counted.pop(arm, None)
        await self._trim(arm)

    async def flush(self, arm: str) -> None:
        """Remove every vector of the arm.

        Raises:
            TierUnavailable: If the service did not answer.
        """
        name = self._name(arm)
        await self._call(arm, lambda collection: self._clear(self._client, name, collection))
        self._counted.pop(arm, None)

    async def close(self) -> None:
        """Disconnect; a call that hangs is left to the client's own timeout."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        client, self._client = self._client, None
        self._collections.clear()
        if client is not None:
            await asyncio.to_thread(self._disconnect, client)

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _name(self, arm: str) -> str:
        return collection_name(self.namespace, arm, self.dim)

    async def _remove(self, arm: str, ids: Sequence[str]) -> None:
        for begin in range(0, len(ids), STEP):
            await self._call(arm, _partial(self._delete, ids[begin : begin + STEP]))

    async def _trim(self, arm: str) -> None:
        """Remove the earliest beyond the limit, where there may be some."""
        limit = self._limits.get(arm)
        if limit is None:
            return
        known, written = self._counted.get(arm), self._written.get(arm, 0)
        if known is not None and known + written <= limit and written < RECOUNT:
            return
        count = await self._call(arm, self._count)
        self._counted[arm], self._written[arm] = min(count, limit), 0
        if count > limit:
            ages = await self._call(arm, lambda collection: sorted(self._ages(collection)), deadline=OPENING_SECONDS)
            await self._remove(arm, [key for _, key in ages[: max(0, len(ages) - limit)]])

    async def _call(self, arm: str, work: Callable[[Any], T], *, deadline: float | None = None) -> T:
        """Return what the work on the arm's collection returns.

        Raises:
            TierUnavailable: If the breaker is open, the deadline passed, or the call failed.
        """
        if not self._breaker.allow(self._clock()):
            raise TierUnavailable(f"{self.name}: not asked: it failed several times in a row")
        seconds = self.deadline if deadline is None else deadline
        name = self._name(arm)
        call = asyncio.get_running_loop().run_in_executor(self._pool, self._work, name, work)
        try:
            done, _ = await asyncio.wait({call}, timeout=seconds)
        except asyncio.CancelledError:
            _give_up(call)
            self._breaker.abandoned()
            raise
        if not done:
            _give_up(call)
            self._breaker.failed(self._clock())
            raise TierUnavailable(f"{self.name}: no answer within {seconds:g} s")
        failure = call.exception()
        if failure is not None:
            self._breaker.failed(self._clock())
            raise TierUnavailable(f"{self.name}: {type(failure).__name__}: {failure}") from failure
        self._breaker.succeeded()
        return call.result()

    def _work(self, name: str, work: Callable[[Any], T]) -> T:
        known = self._collections.get(name)
        try:
            return work(known if known is not None else self._opened(name))
        except Exception as error:
            if not self._is_gone(error):
                raise
        # Dropped by somebody since it was opened, with all that was in it.
        with self._opening:
            self._collections.pop(name, None)
        return work(self._opened(name))

    def _opened(self, name: str) -> Any:
        with self._opening:
            if self._client is None:
                self._client = self._connect()
            known = self._collections.get(name)
            if known is None:
                known = self._collections[name] = self._open(self._client, name)
            return known


def _partial(work: Callable[..., T], *arguments: Any) -> Callable[[Any], T]:
    return lambda collection: work(collection, *arguments)


def _give_up(call: asyncio.Future[Any]) -> None:
    """Let a call end unheard, or asyncio would complain of what it raises."""
    call.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
    call.cancel()


def digest(text: str) -> str:
    """Return a text's name in a service, 32 hex digits: of a fixed length, and harmless in any filter expression."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def collection_name(namespace: str, arm: str, dim: int) -> str:
    """Return the name of an arm's collection: letters, digits and ``_``; no two arms of any namespaces share one.

    Args:
        namespace: Of the cache.
        arm: The arm.
        dim: Components of a vector.
    """
    # Readable names may meet once characters are replaced; the digest of the framed names keeps them apart.
    readable = re.sub(r"[^A-Za-z0-9_]", "_", f"cachepilot_{namespace}_{arm}")
    return f"{readable}_{digest(f'{len(namespace)}:{namespace}{arm}:{dim}')[:12]}"
