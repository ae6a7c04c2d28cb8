"""What a tier is: a byte-bounded store of entries, one budget per arm.

A tier decides nothing about expiry or similarity: it returns what it holds, in recency order it evicts what does not fit, and it
says what it dropped. Expiry is a rule of :mod:`serving.policy`, made from the entry, the knobs and the clock.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import orjson

KEY_BYTES = 32
"""Bytes of a fingerprint (SHA-256); every entry pays for its key."""

Form = Literal["json", "sse"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached answer.

    Attributes:
        key: Fingerprint of the request, 32 bytes.
        body: The answer's bytes, as the upstream sent them.
        written_at: When the answer was stored or last refreshed, seconds since the epoch (or the virtual clock's).
        input_tokens: Prompt tokens that the answer was billed for.
        output_tokens: Completion tokens that the answer was billed for.
        context: Fingerprint of everything but the last user text, 32 bytes; empty where the entry has no vector.
        vector: Embedding of the last user text, int8 bytes; empty where it has none.
        meta: What is known of it besides (:class:`EntryMeta`, as JSON); empty where nothing is.
        form: ``json``: the body is a JSON object; ``sse``: it is an event stream, as it came.
        complete: False for a stream that was interrupted: it may be continued, never served as an answer.
        ttl: Seconds that the entry may live at most, whatever the arm's TTL; inf: no limit of its own.
        renewed: Seconds after ``written_at`` at which its life began anew, where hits extend it.
        overhead: Bytes that it takes beside its parts: of encryption, or of parts that were left out of a head.
    """

    key: bytes
    body: bytes
    written_at: float
    input_tokens: int = 0
    output_tokens: int = 0
    context: bytes = b""
    vector: bytes = b""
    meta: bytes = b""
    form: Form = "json"
    complete: bool = True
    ttl: float = math.inf
    renewed: float = 0.0
    overhead: int = field(default=0, compare=False)

    @property
    def size(self) -> int:
        """Bytes that the entry takes from its arm's budget: key, body, context, vector, metadata and overhead."""
        return KEY_BYTES + len(self.body) + len(self.context) + len(self.vector) + len(self.meta) + self.overhead

    def head(self) -> Entry:
        """Return it without its body and vector; its size stays what it was."""
        return replace(self, body=b"", vector=b"", overhead=self.overhead + len(self.body) + len(self.vector))


@dataclass(frozen=True, slots=True)
class EntryMeta:
    """What can be asked of entries beside their answers: filters, flushes and the checks of an answer by meaning read it.

    Attributes:
        text: The last user text; only where the entry may answer by meaning.
        model: The model asked for.
        temperature: As given in the request; None where it was absent.
        tenant: Who may see it; ``""``: those without a tenant.
        namespace: The caller's own division of the tenant's cache.
        tags: Names by which it can be flushed.
        documents: Documents that the answer was made from, by which it can be flushed.
    """

    text: str = ""
    model: str = ""
    temperature: float | None = None
    tenant: str = ""
    namespace: str = ""
    tags: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    def dump(self) -> bytes:
        """Return it as JSON without what is empty; ``b""`` for nothing at all."""
        given = {name: value for name in _META if (value := getattr(self, name)) not in ("", None, ())}
        return orjson.dumps(given) if given else b""

    @classmethod
    def load(cls, meta: bytes) -> EntryMeta:
        """Return what :meth:`dump` wrote; what cannot be read is nothing."""
        try:
            given = orjson.loads(meta) if meta else {}
        except orjson.JSONDecodeError:
            return cls()
        if not isinstance(given, dict):
            return cls()
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in _META
        }
        return cls(**known)


_META = tuple(item.name for item in fields(EntryMeta))


@dataclass(frozen=True, slots=True)
class TierStats:
    """What one arm holds in a tier.

    Attributes:
        entries: Number of entries, expired ones included (they keep their bytes until read, evicted or collected).
        bytes: Their bytes.
        budget: The byte budget.
        evictions: Entries dropped for want of room since the tier was opened.
    """

    entries: int
    bytes: int
    budget: int
    evictions: int


OnEvict = Callable[[str, Sequence[bytes]], None]
"""Told the arm and the keys that a tier dropped for want of room."""


@runtime_checkable
class Tier(Protocol):
    """A byte-bounded store of entries with one budget per arm, evicting the least recently used first.

    Every method is safe to call concurrently from one event loop. An unreachable store raises :class:`TierUnavailable`; the cache
    turns that into a miss.

    Attributes:
        name: ``memory``, ``redis``, ...: the label of its metrics.
        on_evict: Called, before the method that evicted returns, with what this client's own calls dropped for want of room.
    """

    name: str
    on_evict: OnEvict | None

    async def get(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """Return the entry, expired or not, and make it the most recently used if ``touch``."""
        ...

    async def put(self, arm: str, entry: Entry) -> int:
        """Store the entry as the most recently used and evict what no longer fits.

        An entry larger than the whole budget is not stored, and an older one under its key is removed.

        Returns:
            The number of other entries evicted.
        """
        ...

    def charged(self, entry: Entry) -> Entry:
        """Return the entry with the overhead that it would have in this tier, so that its size is what it is charged."""
        ...

    async def touch(self, arm: str, key: bytes) -> None:
        """Make the entry the most recently used, if it is there."""
        ...

    def touch_soon(self, arm: str, key: bytes) -> None:
        """Like :meth:`touch` without waiting: in effect at the latest when this client's next call on the arm evicts."""
        ...

    async def renew(self, arm: str, key: bytes, at: float) -> bool:
        """Begin the entry's life anew at ``at`` (the clock of ``written_at``), if it is there and that is later than it did.

        It does not become recently used by that. Times are kept to a float32 of the seconds since it was written.

        Returns:
            Whether the entry was there.
        """
        ...

    async def heads(self, arm: str, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entries without body and vector (:meth:`Entry.head`), None where there is none, using none of them."""
        ...

    def scan(self, arm: str) -> AsyncIterator[list[Entry]]:
        """Yield the heads of all entries, in steps and in no order; what is put or dropped meanwhile may be among them or not."""
        ...

    async def delete(self, arm: str, key: bytes) -> bool:
        """Remove the entry; whether it was there."""
        ...

    async def delete_many(self, arm: str, keys: Sequence[bytes]) -> int:
        """Remove the entries; how many of them were there."""
        ...

    async def resize(self, arm: str, budget: int) -> int:
        """Set the arm's byte budget. Shrinking evicts at once, oldest first; growing never drops.

        Returns:
            The number of entries evicted.
        """
        ...

    async def flush(self, arm: str) -> int:
        """Remove every entry of the arm; how many there were."""
        ...

    async def stats(self, arm: str) -> TierStats:
        """Return what the arm holds."""
        ...

    async def close(self) -> None:
        """Release connections and memory. The tier is not usable afterwards."""
        ...


class TierUnavailable(RuntimeError):
    """The store behind a tier did not answer in time or refused."""


class Outdated(RuntimeError):
    """What was to be stored was asked for before a flush that covers it; the store has not taken it."""


@dataclass(frozen=True, slots=True)
class Change:
    """What another client of a shared tier did.

    Attributes:
        kind: ``put`` (``keys`` holds the one key), ``evict`` (dropped or deleted), ``flush`` (the arm is empty), ``outdated``:
            entries are being flushed by what they are, and what is under way may be of their kind, ``lost``: nothing is heard
            until the next gap, ``gap``: the feed was interrupted, or has just begun, and changes may have been missed.
        arm: The arm; empty for what concerns all.
        keys: The entries' keys.
        context: Context of the entry that was put.
        vector: Vector of the entry that was put, int8 bytes; empty where it has none.
        written_at: When the entry that was put was written.
        removal: Its number among the arm's removals, which follow each other without a gap; 0 where nothing was removed.
        own: Whether this client did it.
    """

    kind: Literal["put", "evict", "flush", "outdated", "lost", "gap"]
    arm: str = ""
    keys: tuple[bytes, ...] = ()
    context: bytes = b""
    vector: bytes = b""
    written_at: float = 0.0
    removal: int = 0
    own: bool = False


@runtime_checkable
class SharedTier(Protocol):
    """What a tier shared by several replicas offers beside :class:`Tier`.

    It numbers an arm's removals (what was evicted, deleted, flushed or replaced) one after another, so that who keeps copies of
    its entries can tell by one number whether they are still right.
    """

    def changes(self) -> AsyncGenerator[Change, None]:
        """Yield what clients did, this one included, as it happens. Never ends: cut off, it yields ``lost``, reconnects, and
        then yields a gap.
        """
        ...

    async def until_all_listen(self) -> None:
        """Wait until every client has had the time to listen again, where the store came up but now; else for nothing."""
        ...

    async def removals(self, arm: str) -> int:
        """Return the number of the arm's last removal; 0: the store knows nothing of the arm."""
        ...

    async def renumber(self, arm: str) -> None:
        """Number the arm's removals on from more than any so far: they went back, where a copy took the store's place."""
        ...

    async def get_numbered(self, arm: str, key: bytes, *, touch: bool = True) -> tuple[Entry | None, int]:
        """:meth:`Tier.get`, and the number of the arm's last removal at that moment."""
        ...

    async def put_numbered(self, arm: str, entry: Entry, *, since: int | None = None) -> tuple[int, int]:
        """:meth:`Tier.put`, and the number of the arm's last removal at that moment.

        Args:
            arm: The arm.
            entry: The entry.
            since: Number of one of the arm's removals that was known before the answer was asked for; None: it is stored in
                any case.

        Raises:
            Outdated: If a flush later than ``since`` covers the entry, or may: nothing is stored, and what is there stays.
        """
        ...

    async def recent_vectors(self, arm: str, limit: int) -> list[tuple[bytes, bytes, bytes]]:
        """Return (key, context, vector) of the most recently used entries that have a vector, among the newest ``limit``."""
        ...

    async def outdate(self, arm: str, where: Mapping[str, str], *, told: bool = True) -> None:
        """Begin a flush: refuse from now on what was asked for before and is covered by it. It counts as a removal.

        Args:
            arm: The arm.
            where: What the flush chooses by (:func:`serving.tiers.labels.labels_where`).
            told: Whether other clients are told that what they have under way in the arm is outdated.
        """
        ...
