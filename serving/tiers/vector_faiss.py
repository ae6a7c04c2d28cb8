"""Vectors in the process, compressed: FAISS' IVF-PQ, for arms of a million entries and more.

The index holds about 60 bytes per vector; the int8 vectors themselves lie in an unlinked temporary file that is mapped into
memory, of which a search reads the few rows that it compares exactly. Until there are enough vectors to train on, the index is a
flat one. Training takes seconds to minutes of one core and goes on in a thread; the old index answers meanwhile. What is removed
stays in the index as a hole, until so much of it is holes that it is built anew.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.tiers.base import EntryMeta
from serving.tiers.vector_store import Neighbour, VectorItem, Where, components, cosines, deduplicated, load_ray_first

_log = logging.getLogger(__name__)

TRAIN_AT = 20_000
"""Vectors from which on the index is compressed; a flat search of so many takes about 2 ms."""
GROWTH = 8
"""An index is trained anew when it has so many times the vectors that it was trained on."""
MOST_TRAINED_ON = 65_536
"""Most vectors that an index is trained on, drawn at random."""
LEAST_HOLES = 1024
"""Holes below which an index is never built anew for their sake."""
SCAN_LIMIT = 256
"""A context with at most so many entries is compared one by one."""
SEARCH_FIRST, SEARCH_LIMIT = 64, 4096
"""Neighbours by the compressed vectors that are compared exactly, at first and at most."""
_STEP = 65_536


class FaissStore:
    """Approximate neighbours with exact similarities; see :class:`serving.tiers.vector_store.VectorStore`.

    Adding and searching do not await; the search of a flat index grows with its size, that of a compressed one with its root.

    Args:
        dim: Components of a vector, at least 8.
        max_entries: Most vectors per arm until :meth:`limit` says otherwise.
        train_at: Vectors from which on an index is compressed, at least 256.
        seed: Draws what is trained on.

    Raises:
        RuntimeError: If faiss is not installed.
        ValueError: If a value is out of its range.
    """

    name = "faiss"
    shared = False

    def __init__(self, *, dim: int = 384, max_entries: int = 20_000_000, train_at: int = TRAIN_AT, seed: int = 0) -> None:
        if dim < 8 or max_entries < 1 or train_at < 256:
            raise ValueError(
                "faiss store: expected dim >= 8, max_entries >= 1 and train_at >= 256, got "
                f"{dim!r}, {max_entries!r} and {train_at!r}"
            )
        load_ray_first()
        try:
            faiss = importlib.import_module("faiss")
        except ImportError as error:
            raise RuntimeError(f"faiss cannot be imported: {error}; pip install 'cachepilot[faiss]'") from error
        # One query is too little work for several threads, and training must leave the others a core.
        faiss.omp_set_num_threads(1)
        self._faiss: Any = faiss
        self.dim = dim
        self.max_entries = max_entries
        self._train_at = train_at
        self._seed = seed
        self._arms: dict[str, _Arm] = {}
        self._limits: dict[str, int] = {}
        self._rebuilding: dict[str, asyncio.Task[None]] = {}

    async def add(self, arm: str, items: Sequence[VectorItem]) -> None:
        """Keep vectors; see :meth:`serving.tiers.vector_store.VectorStore.add`.

        Raises:
            ValueError: If a vector does not have ``dim`` bytes; then none is kept.
        """
        held = self._arm(arm)
        kept = deduplicated(items, self.dim)
        fresh = [item for item in kept if not held.has(item)]
        for item in fresh:
            held.kill(item.key)
        held.extend(fresh)
        for item in kept:
            held.slots.move_to_end(item.key)
        self._trim(arm, held)
        self._rebuild_if_due(arm, held)

    async def remove(self, arm: str, keys: Sequence[bytes]) -> None:
        """Remove the keys' vectors."""
        held = self._arms.get(arm)
        if held is not None:
            for key in keys:
                held.kill(key)
            self._rebuild_if_due(arm, held)

    async def near(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        """Return the nearest entries; :meth:`near_now` does the same without awaiting.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        return self.near_now(arm, context, vector, floor=floor, k=k, where=where)

    def near_now(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        """Return the nearest entries; see :meth:`serving.tiers.vector_store.VectorStore.near`.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        query = components(vector, self.dim)
        held = self._arms.get(arm)
        if held is None or not held.slots or not query.any():
            return []
        return held.near(context, query, floor, k, where)

    async def count(self, arm: str) -> int:
        """Return how many vectors the arm has."""
        held = self._arms.get(arm)
        return len(held.slots) if held is not None else 0

    async def limit(self, arm: str, entries: int) -> None:
        """Set how many vectors the arm may have; the earliest added beyond that are removed."""
        self._limits[arm] = min(entries, self.max_entries)
        held = self._arms.get(arm)
        if held is not None:
            self._trim(arm, held)
            self._rebuild_if_due(arm, held)

    async def flush(self, arm: str) -> None:
        """Remove every vector of the arm."""
        self._arms.pop(arm, None)

    async def close(self) -> None:
        """Drop everything; a training under way ends by itself, for nobody."""
        tasks = list(self._rebuilding.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._arms.clear()

    def is_compressed(self, arm: str) -> bool:
        """Whether the arm's index has been trained."""
        held = self._arms.get(arm)
        return held is not None and held.trained_on > 0

    async def settled(self) -> None:
        """Wait until no index is being built."""
        while self._rebuilding:
            await asyncio.wait(list(self._rebuilding.values()))

    def _arm(self, arm: str) -> _Arm:
        held = self._arms.get(arm)
        if held is None:
            held = self._arms[arm] = _Arm(self._faiss, self.dim)
        return held

    def _trim(self, arm: str, held: _Arm) -> None:
        limit = self._limits.get(arm, self.max_entries)
        while len(held.slots) > limit:
            held.kill(next(iter(held.slots)))

    def _rebuild_if_due(self, arm: str, held: _Arm) -> None:
        live = len(held.slots)
        untrained = live >= self._train_at and live >= GROWTH * held.trained_on
        holes = len(held.keys) - live
        if arm not in self._rebuilding and len(held.keys) >= held.wait_for and (untrained or holes > max(LEAST_HOLES, live)):
            task = asyncio.get_running_loop().create_task(self._rebuild(arm, held), name=f"faiss-{arm}")
            self._rebuilding[arm] = task
            task.add_done_callback(lambda _: self._rebuilding.pop(arm, None))

    async def _rebuild(self, arm: str, held: _Arm) -> None:
        """Build the arm's index anew beside the old one, then let it take over, with what happened meanwhile."""
        slots = np.fromiter(held.slots.values(), np.int64, len(held.slots))
        last = len(held.keys)
        killed = held.killed = []
        compressed = len(slots) >= self._train_at

        def build() -> _Arm:
            return held.rebuilt(slots, compressed=compressed, seed=self._seed)

        try:
            fresh = await _in_thread(build)
        except Exception:  # noqa: BLE001 - whatever FAISS raises, the old index still answers
            _log.exception("faiss store: arm %s: the index could not be built anew; the old one stays", arm)
            held.wait_for = 2 * len(held.keys)
            return
        finally:
            held.killed = None
        if self._arms.get(arm) is not held:
            return  # flushed meanwhile
        for key in killed:
            fresh.kill(key)
        newer = [slot for slot in held.slots.values() if slot >= last]
        fresh.extend([held.item(slot) for slot in newer])
        self._arms[arm] = fresh


class _Arm:
    """One index with its rows; a row's slot is its number in the index, and is never used again."""

    def __init__(self, faiss: Any, dim: int, *, index: Any = None, trained_on: int = 0) -> None:
        self._faiss = faiss
        self._dim = dim
        self._index = index if index is not None else _flat(faiss, dim)
        self.trained_on = trained_on
        self.wait_for = 0
        self._rows = _Rows(dim)
        self.keys: list[bytes] = []
        self._contexts: list[bytes] = []
        self._metas: list[EntryMeta] = []
        self._alive = bytearray()
        self._known: dict[EntryMeta, EntryMeta] = {}
        self._members: dict[bytes, dict[int, None]] = {}
        self.slots: OrderedDict[bytes, int] = OrderedDict()
        """Slot by key, the earliest added first."""
        self.killed: list[bytes] | None = None
        """Keys removed since a rebuilding began; None where there is none."""

    def has(self, item: VectorItem) -> bool:
        """Whether exactly this is kept."""
        slot = self.slots.get(item.key)
        return slot is not None and self.item(slot) == item

    def item(self, slot: int) -> VectorItem:
        return VectorItem(self.keys[slot], self._contexts[slot], self._rows.get(slot), self._metas[slot])

    def kill(self, key: bytes) -> None:
        slot = self.slots.pop(key, None)
        if slot is None:
            return
        self._alive[slot] = 0
        members = self._members[self._contexts[slot]]
        del members[slot]
        if not members:
            del self._members[self._contexts[slot]]
        if self.killed is not None:
            self.killed.append(key)

    def extend(self, items: Sequence[VectorItem]) -> None:
        """Add items whose keys are not there."""
        if not items:
            return
        vectors = np.frombuffer(b"".join(item.vector for item in items), np.int8).reshape(-1, self._dim)
        self._append([item.key for item in items], [item.context for item in items], [item.meta for item in items], vectors)

    def near(self, context: bytes, query: npt.NDArray[np.int8], floor: float, k: int, where: Where | None) -> list[Neighbour]:
        members = self._members.get(context, {})
        if 0 < len(members) <= SCAN_LIMIT:
            own = self._compared(query, list(members), floor, where)
            if own:
                return own[:k]
        fetched = max(SEARCH_FIRST, k)
        while True:
            fetched = min(fetched, len(self.keys))
            _, found = self._index.search(self._scaled(query[None]), fetched)
            met = self._compared(query, [slot for slot in found[0].tolist() if slot >= 0 and self._alive[slot]], floor, where)
            own = [each for each in met if each.context == context]
            # Where most of what was met is no use, the right ones may be behind it.
            if own or len(members) <= SCAN_LIMIT or fetched >= min(SEARCH_LIMIT, len(self.keys)):
                return own[:k] or met[:k]
            fetched *= 8

    def rebuilt(self, slots: npt.NDArray[np.int64], *, compressed: bool, seed: int) -> _Arm:
        """Return a new arm of these slots; reads only what does not change, so another thread may run it."""
        index = self._trained(slots, seed) if compressed else _flat(self._faiss, self._dim)
        fresh = _Arm(self._faiss, self._dim, index=index, trained_on=len(slots) if compressed else 0)
        for begin in range(0, len(slots), _STEP):
            part = slots[begin : begin + _STEP]
            rows = part.tolist()
            fresh._append(
                [self.keys[slot] for slot in rows],
                [self._contexts[slot] for slot in rows],
                [self._metas[slot] for slot in rows],
                self._rows.many(part),
            )
        return fresh

    def _trained(self, slots: npt.NDArray[np.int64], seed: int) -> Any:
        drawn = np.random.default_rng(seed).permutation(slots)[:MOST_TRAINED_ON]
        # Four lists per square root of the size is FAISS' own advice; each wants some 30 vectors to be trained on.
        lists = int(max(1, min(4 * np.sqrt(len(slots)), len(drawn) / 39)))
        parts = next(count for count in range(self._dim // 8, 0, -1) if self._dim % count == 0)
        faiss = self._faiss
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(self._dim), self._dim, lists, parts, 8, faiss.METRIC_INNER_PRODUCT)
        index.pq.cp.niter = 10
        index.pq.cp.max_points_per_centroid = 64
        index.cp.max_points_per_centroid = 64
        index.nprobe = max(8, lists // 16)
        index.train(_unit(self._rows.many(np.sort(drawn))))
        return index

    def _append(self, keys: list[bytes], contexts: list[bytes], metas: list[EntryMeta], vectors: npt.NDArray[np.int8]) -> None:
        first = len(self.keys)
        self._rows.append(vectors)
        self._index.add(self._scaled(vectors))
        self.keys += keys
        self._contexts += contexts
        self._metas += [self._known.setdefault(meta, meta) for meta in metas]
        self._alive += b"\1" * len(keys)
        for slot, (key, context) in enumerate(zip(keys, contexts, strict=True), first):
            self.slots[key] = slot
            self._members.setdefault(context, {})[slot] = None

    def _scaled(self, vectors: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
        return _unit(vectors) if self.trained_on else vectors.astype(np.float32)

    def _compared(self, query: npt.NDArray[np.int8], slots: Sequence[int], floor: float, where: Where | None) -> list[Neighbour]:
        """Return those that pass floor and filter, the most similar first."""
        if where is not None:
            slots = [slot for slot in slots if where.fits(self._metas[slot])]
        similarities = cosines(query, self._rows.many(np.array(slots, np.int64))).tolist()
        met = [
            Neighbour(self.keys[slot], self._contexts[slot], similarity)
            for slot, similarity in zip(slots, similarities, strict=True)
            if similarity >= floor
        ]
        return sorted(met, key=lambda each: -each.similarity)


class _Rows:
    """int8 vectors by slot in an unlinked file: the pages that nobody reads need no memory."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        # Closed, and so gone, with the last reference to it.
        self._file = tempfile.TemporaryFile(prefix="cachepilot-vectors-")  # noqa: SIM115
        self._length = 0
        self._mapped: npt.NDArray[np.int8] = np.zeros((0, dim), np.int8)

    def append(self, vectors: npt.NDArray[np.int8]) -> None:
        end = self._length + len(vectors)
        if end > len(self._mapped):
            capacity = max(1024, end, 2 * len(self._mapped))
            self._file.truncate(capacity * self._dim)
            # A thread that still reads the old mapping sees the same file.
            self._mapped = np.memmap(self._file, np.int8, "r+", shape=(capacity, self._dim))
        self._mapped[self._length : end] = vectors
        self._length = end

    def get(self, slot: int) -> bytes:
        return bytes(self._mapped[slot].tobytes())

    def many(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
        return np.asarray(self._mapped[slots])


def _flat(faiss: Any, dim: int) -> Any:
    """Return an exact index that keeps int8 components as they are."""
    return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit_direct_signed, faiss.METRIC_INNER_PRODUCT)


def _unit(vectors: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    values = vectors.astype(np.float32)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = np.divide(values, norms, out=np.zeros_like(values), where=norms > 0)
    return unit


async def _in_thread(work: Callable[[], _Arm]) -> _Arm:
    """Return what the work returns; unlike a pool's, the thread does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Arm] = loop.create_future()

    def settle(result: _Arm | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to who waits
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="faiss-build", daemon=True).start()
    return await future
