"""What an entry can be flushed by, as short digests: a store can tell whether a flush covers an answer, and learns no names.

A label is 8 bytes: BLAKE2b of a kind (``tenant``, ``namespace``, ``model``, ``tag``, ``document``) and a value, or the first of a
key, which is a digest already. An entry has one for its tenant, its namespace, its model (empty ones included), for each tag,
each document, and its key. A flush covers an entry that has all the flush's labels. Should two values have the same label, a
flush covers too much, which costs an answer that is not kept, never one that is kept in error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

from serving.tiers.base import Entry, EntryMeta

LABEL_BYTES = 8

KINDS = ("tenant", "namespace", "model", "tag", "document", "key")
"""By what a flush may choose."""

_LARGEST = 1024  # bytes of metadata that is remembered: with a question's text in it, it does not come again


def labels_of(entry: Entry, secret: bytes = b"") -> bytes:
    """Return the labels of an entry, one after another.

    Args:
        entry: The entry, its metadata in the clear.
        secret: Where names are kept from the store: at most 64 bytes, without which no label can be made or guessed.
    """
    named = _of_meta(entry.meta, secret) if len(entry.meta) <= _LARGEST else _of_meta.__wrapped__(entry.meta, secret)
    return named + entry.key[:LABEL_BYTES]


def labels_where(where: Mapping[str, str], secret: bytes = b"") -> bytes:
    """Return the labels of a flush, one after another; none: it covers everything.

    Args:
        where: Values by kind; a key as hexadecimal digits.
        secret: As for :func:`labels_of`.

    Raises:
        ValueError: If a kind is none of :data:`KINDS`, or the key is not hexadecimal.
    """
    unknown = sorted(set(where) - set(KINDS))
    if unknown:
        raise ValueError(f"flush: expected some of {', '.join(KINDS)}, got {', '.join(unknown)}")
    return b"".join(
        bytes.fromhex(value)[:LABEL_BYTES] if kind == "key" else _label(kind, value, secret) for kind, value in where.items()
    )


@lru_cache(maxsize=1 << 10)
def _of_meta(meta: bytes, secret: bytes) -> bytes:
    read = EntryMeta.load(meta)
    named = [("tenant", read.tenant), ("namespace", read.namespace), ("model", read.model)]
    named += [("tag", tag) for tag in read.tags]
    named += [("document", document) for document in read.documents]
    return b"".join(_label(kind, value, secret) for kind, value in named)


def _label(kind: str, value: str, secret: bytes) -> bytes:
    return blake2b(value.encode(), digest_size=LABEL_BYTES, key=secret, person=kind.encode()).digest()
