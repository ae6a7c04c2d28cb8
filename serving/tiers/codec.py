"""The stored form of an entry: a fixed header of 32 bytes, then context, vector, metadata and body.

The header is as long as a key, so the length of the stored form is :attr:`serving.tiers.base.Entry.size`: a store can account for
entries by their length alone, whatever version wrote them. Little-endian::

    offset  0  uint8   version of the format, 2
            1  uint8   bytes of context
            2  uint16  bytes of vector
            4  uint32  input tokens
            8  uint32  output tokens
           12  float64 written at, seconds
           20  uint16  bytes of metadata
           22  uint8   flags: 1 an event stream, 2 interrupted, 4 sealed
           23  zero
           24  float32 seconds that it may live at most; inf: no limit
           28  float32 seconds after ``written at`` at which its life began anew
           32  context, vector, metadata, body

Sealed (:class:`serving.crypto.Sealer`), metadata (unless empty) and body are each :data:`serving.crypto.OVERHEAD` bytes longer,
which the entry's ``overhead`` accounts for. All else is authenticated with them but the last field, which the store itself sets.
A reader with a key takes what is not sealed for a forgery, one without cannot read what is: to both it is a miss.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from serving.crypto import OVERHEAD, Sealer
from serving.tiers.base import KEY_BYTES, Entry

VERSION = 2
HEADER = struct.Struct("<BBHIIdHBxff")
assert HEADER.size == KEY_BYTES
_STREAM, _INTERRUPTED, _SEALED = 1, 2, 4
_FIXED = HEADER.size - 4  # the header without the time of the last renewal


class Seal(NamedTuple):
    """How the entries of one place are sealed.

    Attributes:
        sealer: Holds the key.
        scope: Names the place, the same to all who share it; an entry moved to another place does not open.
    """

    sealer: Sealer
    scope: bytes

    @classmethod
    def of(cls, sealer: Sealer | None, namespace: str, arm: str) -> Seal | None:
        """Return how an arm's entries are sealed; None where they are not."""
        if sealer is None:
            return None
        return cls(sealer, f"{namespace}:{arm}:".encode())  # a name has no colon: no two places share a scope


def pack(entry: Entry, seal: Seal | None = None) -> bytes:
    """Return the stored form; ``len`` of it is the size of the entry that :func:`unpack` makes of it.

    Args:
        entry: The entry; its ``overhead`` is not looked at.
        seal: Seals metadata and body; None: they are stored in the clear.

    Raises:
        ValueError: If the key does not have 32 bytes, or a part is too large for the format.
    """
    if len(entry.key) != KEY_BYTES:
        raise ValueError(f"entry: expected a key of {KEY_BYTES} bytes, got {len(entry.key)}")
    flags = (_STREAM if entry.form == "sse" else 0) | (0 if entry.complete else _INTERRUPTED) | (_SEALED if seal else 0)
    meta_size = len(entry.meta) + (OVERHEAD if seal and entry.meta else 0)
    try:
        header = HEADER.pack(
            VERSION, len(entry.context), len(entry.vector), entry.input_tokens, entry.output_tokens, entry.written_at,
            meta_size, flags, entry.ttl, entry.renewed,
        )  # fmt: skip
    except (struct.error, OverflowError) as error:
        raise ValueError(
            "entry: expected at most 255 bytes of context, 65535 of vector and of metadata, and 2**32 tokens; got "
            f"{len(entry.context)}, {len(entry.vector)}, {meta_size} and {entry.input_tokens}, {entry.output_tokens}"
        ) from error
    meta, body = entry.meta, entry.body
    if seal is not None:
        place = seal.scope + entry.key
        meta = seal.sealer.seal(place, meta, _beside_meta(header, entry.context)) if meta else b""
        body = seal.sealer.seal(place, body, _beside_body(header, entry.context, entry.vector))
    return b"".join((header, entry.context, entry.vector, meta, body))


def overhead(entry: Entry, seal: Seal | None) -> int:
    """Return how much longer the stored form is than the entry's parts, bytes."""
    return 0 if seal is None else OVERHEAD * (2 if entry.meta else 1)


def unpack(key: bytes, stored: bytes, seal: Seal | None = None) -> Entry | None:
    """Return the entry, or None where the form is of another version, cut short or does not open: that is a miss."""
    split = _split(stored)
    if split is None:
        return None
    context_end, vector_end, meta_end = split
    if len(stored) < meta_end:
        return None
    context, vector = stored[HEADER.size : context_end], stored[context_end:vector_end]
    body: bytes | None = stored[meta_end:]
    if seal is not None:
        body = seal.sealer.open(seal.scope + key, stored[meta_end:], _beside_body(stored, context, vector))
    if body is None:
        return None
    return _entry(key, stored, context, vector, stored[vector_end:meta_end], body, len(stored), seal)


def unpack_head(key: bytes, head: bytes, size: int, seal: Seal | None = None) -> Entry | None:
    """Return the entry's head (:meth:`serving.tiers.base.Entry.head`); None as :func:`unpack` does.

    Args:
        key: The entry's key.
        head: Header, context and metadata of the stored form, one after another.
        size: Bytes of the whole stored form.
        seal: As in :func:`pack`.
    """
    split = _split(head)
    if split is None:
        return None
    end = split[0]
    if len(head) != end + split[2] - split[1]:
        return None
    return _entry(key, head, head[HEADER.size : end], b"", head[end:], b"", size, seal)


def unpack_vector(stored: bytes) -> tuple[bytes, bytes] | None:
    """Return context and vector, from a stored form that may lack what follows them; None as :func:`unpack` does.

    Also None for an interrupted stream, which answers nobody.
    """
    split = _split(stored)
    if split is None or len(stored) < split[1] or stored[22] & _INTERRUPTED:
        return None
    return stored[HEADER.size : split[0]], stored[split[0] : split[1]]


def _split(stored: bytes) -> tuple[int, int, int] | None:
    """Return where context, vector and metadata end; None where the header is cut short or of another version."""
    if len(stored) < HEADER.size or stored[0] != VERSION:
        return None
    context_end = HEADER.size + stored[1]
    vector_end = context_end + int.from_bytes(stored[2:4], "little")
    return context_end, vector_end, vector_end + int.from_bytes(stored[20:22], "little")


def _entry(
    key: bytes, header: bytes, context: bytes, vector: bytes, meta: bytes, body: bytes, size: int, seal: Seal | None
) -> Entry | None:
    """Return the entry of ``size`` bytes; None where its metadata does not open. ``header`` may be longer than the header."""
    _, _, _, input_tokens, output_tokens, written_at, _, flags, ttl, renewed = HEADER.unpack_from(header)
    if bool(flags & _SEALED) != (seal is not None):
        return None
    if seal is not None and meta:
        opened = seal.sealer.open(seal.scope + key, meta, _beside_meta(header, context))
        if opened is None:
            return None
        meta = opened
    return Entry(
        key, body, written_at, input_tokens, output_tokens, context, vector, meta, "sse" if flags & _STREAM else "json",
        not flags & _INTERRUPTED, ttl, renewed, size - KEY_BYTES - len(body) - len(context) - len(vector) - len(meta),
    )  # fmt: skip


def _beside_meta(stored: bytes, context: bytes) -> bytes:
    return b"meta" + stored[:_FIXED] + context


def _beside_body(stored: bytes, context: bytes, vector: bytes) -> bytes:
    return b"body" + stored[:_FIXED] + context + vector
