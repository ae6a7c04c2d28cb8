"""Strong validators of streams (RFC 9110, 8.8.1): which stream the events are of that a client has.

A number of events alone names no stream: the same question may have been answered twice, in other words, in the same words cut
into other events, or by the answer to another question. So every stream has a tag. It is the ``ETag`` of its answer, and part of
the ids of its events where the client wants those. Whoever comes back says it (``If-Range``, or within ``Last-Event-ID``), and
gets the rest of that very stream, or the whole of another one.

========================  ================================================================================================
a tag                     is of
========================  ================================================================================================
16 hexadecimal digits     one call of the model, drawn when its stream began; kept with the entry that it became
``j`` and 16 digits       an answer that was kept without one, as JSON: the beginning of its SHA-256
``<tag>.<n>~<digits>``    a stream that begins with the first n events of the stream ``<tag>``, which broke off, and goes on
========================  ================================================================================================

A client has a tag with the form of its stream in front: ``p`` or ``u`` (with the usage), and ``n`` where events have ids. Strong
validators tell these apart, since their bytes differ.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from serving import sse
from serving.sse import Event
from serving.tiers.base import Entry

HEADER = "etag"
"""Where the head of an answer under way has its tag, for the other replicas as well."""

LONGEST = 200
"""Characters of a tag; a stream that broke off more often than fits is known by a new one."""

_STAMP = re.compile(rb',?"stream":"([0-9a-f.~]+)"}$')
_STRONG = re.compile(r'"([\x21\x23-\x7e]{1,300})"')
_EVENT_ID = re.compile(r"([0-9]{1,20})(?:-([0-9a-z.~]{1,300}))?")
_NEXT = re.compile(r"\.([0-9]+)~")


def new_tag() -> str:
    """Return the tag of a stream that begins."""
    return secrets.token_hex(8)


def extended(tag: str, events: int, by: str = "") -> str:
    """Return the tag of a stream that goes on where another broke off.

    Args:
        tag: Of the one that broke off.
        events: How many events both have in common.
        by: The tag of the answer it goes on with, if that is there already: the same two make the same stream again.
    """
    rest = hashlib.sha256(by.encode()).hexdigest()[:8] if by else secrets.token_hex(4)
    made = f"{tag}.{events}~{rest}"
    return made if len(made) <= LONGEST else new_tag()


def stamped(meta: bytes, tag: str) -> bytes:
    """Return an entry's metadata with the tag of its stream, in the place of one that it had."""
    bare = _bare(meta)
    return (bare[:-1] + b"," if len(bare) > 2 else b"{") + b'"stream":"%b"}' % tag.encode()


def tag_of(entry: Entry) -> str:
    """Return the tag of an entry's stream."""
    found = _stamp(entry.meta)
    return found[1].decode() if found is not None else content_tag(entry.body)


def content_tag(body: bytes) -> str:
    """Return the tag of an answer that was given none when it began."""
    return "j" + hashlib.sha256(body).hexdigest()[:16]


def holds(validator: str, current: str, events: int) -> bool:
    """Whether the first events of the stream that a client names are those of the current one, to the byte.

    Args:
        validator: What the client has; ``""``: it did not say.
        current: The same of the stream that it would get the rest of; ``""``: it has none.
        events: How many events the client has.
    """
    if not validator or not current.startswith(validator):
        return False
    if validator == current:
        return True
    beyond = _NEXT.match(current, len(validator))
    return beyond is not None and events <= int(beyond[1])


def header(validator: str) -> list[tuple[bytes, bytes]]:
    """Return the header that names a stream; none for one without a validator."""
    return [(b"etag", b'"%b"' % validator.encode())] if validator else []


def of_if_range(value: str | None) -> str:
    """Return the validator that ``If-Range`` gives (RFC 9110, 13.1.5); ``""`` for none, and for a weak one or a date.

    Those two never hold.
    """
    found = _STRONG.fullmatch(value.strip()) if value is not None else None
    return found[1] if found is not None else ""


def of_event_id(value: str) -> tuple[int, str] | None:
    """Return the number of an event and the validator of its stream, ``""`` where the id has none; None: it is no id of ours."""
    found = _EVENT_ID.fullmatch(value)
    return (int(found[1]), found[2] or "") if found is not None else None


class EventIds(sse.Numbers):
    """Writes an ``id`` into each event of a stream that comes in pieces: its number, and the validator of the stream.

    Args:
        validator: The stream's; ``""``: it cannot be gone on with, the number stands alone.
    """

    def __init__(self, validator: str) -> None:
        super().__init__()
        self._stream = b"-" + validator.encode() if validator else b""

    def _write(self, pairs: list[tuple[Event, bytes]]) -> bytes:
        written: list[bytes] = []
        for event, raw in pairs:
            blank = event.blank - event.start
            written += (raw[:blank], b"id: %d%b\n" % (self._next, self._stream), raw[blank:])
            self._next += 1
        return b"".join(written)


def _stamp(meta: bytes) -> re.Match[bytes] | None:
    return _STAMP.search(meta, max(0, len(meta) - LONGEST - len(b',"stream":""}')))


def _bare(meta: bytes) -> bytes:
    found = _stamp(meta)
    return meta if found is None else meta[: found.start()] + b"}"
