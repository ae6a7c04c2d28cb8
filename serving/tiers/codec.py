"""The stored form of an entry: a fixed header of 32 bytes, then context, vector and body.

The header is as long as a key, so the length of the stored form is :attr:`serving.tiers.base.Entry.size`: a store can account for
entries by their length alone, whatever version wrote them. Little-endian::

    offset  0  uint8   version of the format, 1
            1  uint8   bytes of context
            2  uint16  bytes of vector
            4  uint32  input tokens
            8  uint32  output tokens
           12  float64 written at, seconds
           20  12 zero bytes
           32  context, vector, body
"""

from __future__ import annotations

import struct

from serving.tiers.base import KEY_BYTES, Entry

VERSION = 1
HEADER = struct.Struct("<BBHIId12x")
assert HEADER.size == KEY_BYTES


def pack(entry: Entry) -> bytes:
    """Return the stored form; ``len`` of it is ``entry.size``.

    Raises:
        ValueError: If the key does not have 32 bytes, or a part is too large for the format.
    """
    if len(entry.key) != KEY_BYTES:
        raise ValueError(f"entry: expected a key of {KEY_BYTES} bytes, got {len(entry.key)}")
    try:
        header = HEADER.pack(
            VERSION, len(entry.context), len(entry.vector), entry.input_tokens, entry.output_tokens, entry.written_at
        )
    except struct.error as error:
        raise ValueError(
            f"entry: expected at most 255 bytes of context, 65535 of vector and 2**32 tokens; got {len(entry.context)}, "
            f"{len(entry.vector)} and {entry.input_tokens}, {entry.output_tokens}"
        ) from error
    return b"".join((header, entry.context, entry.vector, entry.body))


def unpack(key: bytes, stored: bytes) -> Entry | None:
    """Return the entry, or None where the form is of another version or cut short: that is a miss."""
    head = unpack_head(stored)
    if head is None:
        return None
    written_at, input_tokens, output_tokens, context, vector, end = head
    return Entry(key, stored[end:], written_at, input_tokens, output_tokens, context, vector)


def header_time(header: bytes) -> float | None:
    """Return ``written_at`` of a header (32 bytes), or None where it is of another version."""
    if len(header) != HEADER.size or header[0] != VERSION:
        return None
    return float(HEADER.unpack(header)[-1])


def unpack_head(stored: bytes) -> tuple[float, int, int, bytes, bytes, int] | None:
    """Return (written_at, input tokens, output tokens, context, vector, offset of the body), or None as :func:`unpack` does."""
    if len(stored) < HEADER.size or stored[0] != VERSION:
        return None
    _, context_size, vector_size, input_tokens, output_tokens, written_at = HEADER.unpack_from(stored)
    middle = HEADER.size + context_size
    end = middle + vector_size
    if len(stored) < end:
        return None
    return written_at, input_tokens, output_tokens, stored[HEADER.size : middle], stored[middle:end], end
