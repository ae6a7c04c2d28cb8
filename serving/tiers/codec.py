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
           22  uint8   flags: 1 an event stream, 2 interrupted
           23  zero
           24  float32 seconds that it may live at most; inf: no limit
           28  float32 seconds after ``written at`` at which its life began anew
           32  context, vector, metadata, body
"""

from __future__ import annotations

import struct
from dataclasses import replace

from serving.tiers.base import KEY_BYTES, Entry

VERSION = 2
HEADER = struct.Struct("<BBHIIdHBxff")
assert HEADER.size == KEY_BYTES
_STREAM, _INTERRUPTED = 1, 2


def pack(entry: Entry) -> bytes:
    """Return the stored form; ``len`` of it is ``entry.size``.

    Raises:
        ValueError: If the key does not have 32 bytes, or a part is too large for the format.
    """
    if len(entry.key) != KEY_BYTES:
        raise ValueError(f"entry: expected a key of {KEY_BYTES} bytes, got {len(entry.key)}")
    flags = (_STREAM if entry.form == "sse" else 0) | (0 if entry.complete else _INTERRUPTED)
    try:
        header = HEADER.pack(
            VERSION, len(entry.context), len(entry.vector), entry.input_tokens, entry.output_tokens, entry.written_at,
            len(entry.meta), flags, entry.ttl, entry.renewed,
        )  # fmt: skip
    except (struct.error, OverflowError) as error:
        raise ValueError(
            "entry: expected at most 255 bytes of context, 65535 of vector and of metadata, and 2**32 tokens; got "
            f"{len(entry.context)}, {len(entry.vector)}, {len(entry.meta)} and {entry.input_tokens}, {entry.output_tokens}"
        ) from error
    return b"".join((header, entry.context, entry.vector, entry.meta, entry.body))


def unpack(key: bytes, stored: bytes) -> Entry | None:
    """Return the entry, or None where the form is of another version or cut short: that is a miss."""
    head = unpack_head(key, stored)
    if head is None:
        return None
    start = HEADER.size + len(head.context) + len(head.vector) + len(head.meta)
    return replace(head, body=stored[start:])


def header_time(header: bytes) -> float | None:
    """Return ``written_at`` of a header (32 bytes), or None where it is of another version."""
    if len(header) != HEADER.size or header[0] != VERSION:
        return None
    return float(HEADER.unpack(header)[5])


def unpack_head(key: bytes, stored: bytes) -> Entry | None:
    """Return the entry without its body, from a stored form that may lack it; None as :func:`unpack` does."""
    if len(stored) < HEADER.size or stored[0] != VERSION:
        return None
    _, context_size, vector_size, input_tokens, output_tokens, written_at, meta_size, flags, ttl, renewed = HEADER.unpack_from(
        stored
    )
    middle = HEADER.size + context_size
    end = middle + vector_size
    if len(stored) < end + meta_size:
        return None
    return Entry(
        key, b"", written_at, input_tokens, output_tokens, stored[HEADER.size : middle], stored[middle:end],
        stored[end : end + meta_size], "sse" if flags & _STREAM else "json", not flags & _INTERRUPTED, ttl, renewed,
    )  # fmt: skip
