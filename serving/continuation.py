"""Going on with a stream that broke off: the model is asked again, and only what lies beyond is passed on.

A model that answers the same again (temperature 0, or a seed) does so in words, not in bytes: each call has an ``id`` and a time
of its own, and tokens may be cut into chunks elsewhere. So the new stream is compared by what its chunks say. Chunks that repeat
what is known are dropped, the one that goes beyond it is trimmed, and the old ``id`` and time are put into what follows: both
parts are one valid stream. Where the new stream says something else, it :class:`Diverged`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from serving.recording import TOLD_ONCE, assemble, chunk_of
from serving.sse import Event, EventParser, events

Path = tuple[str | int, ...]
"""Where something is said: the number of the choice, then names, and numbers of items."""

_CREATED = re.compile(rb'("created"\s*:\s*)[0-9]+')
_ID = re.compile(rb'"id"\s*:\s*("[^"\\]*")')
_TIME = re.compile(rb'"created"\s*:\s*([0-9]+)[^0-9]')


class Diverged(RuntimeError):
    """The new stream does not repeat what the old one said. Its message has no word of either: it may be logged."""


class Continuation:
    """What a new stream says beyond an old one that broke off.

    Args:
        partial: The old stream as far as it came, from its beginning. Where it ends within an event, the new stream has to have
            the same event, to the byte but for id and time.

    Raises:
        Diverged: If the old stream has an error in it, or cannot be put together.
    """

    def __init__(self, partial: bytes) -> None:
        found = events(partial)
        end = found[-1].end if found else 0
        old = assemble(partial[:end])
        if old.failed:
            raise Diverged("continuation: the stream that broke off has an error in it, and cannot be continued")
        self._torn = partial[end:]
        self._had_done = old.done
        self._had_usage = old.top.get("usage") is not None
        self._anew = not partial
        self._id, self._created = old.top.get("id"), old.top.get("created")
        if not found:  # the first event itself was torn: it may have told them already
            told, at = _ID.search(self._torn), _TIME.search(self._torn)
            self._id = orjson.loads(told[1]) if told is not None else None
            self._created = int(at[1]) if at is not None else None
        self._known = {(index, *path): value for index, choice in old.choices.items() for path, value in _leaves(choice, ())}
        self._said: dict[Path, int] = {}
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the new stream; return what is passed on.

        Raises:
            Diverged: If it says something else than the old one did.
        """
        if self._anew:
            return chunk
        return self._pass(self._parser.pairs(chunk))

    def close(self) -> bytes:
        """Take the end of the new stream; return what is still passed on.

        Raises:
            Diverged: If it ended before it had repeated what the old one said.
        """
        if self._anew:
            return b""
        written = self._pass(self._parser.last_pairs())
        self._all_said()
        if self._torn:
            raise Diverged("continuation: the new stream ended before the event within which the old one broke off")
        return written

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _pass(self, pairs: list[tuple[Event, bytes]]) -> bytes:
        return b"".join(self._take(event, raw) for event, raw in pairs)

    def _take(self, event: Event, raw: bytes) -> bytes:
        if event.done:
            self._all_said()
            return b"" if self._had_done else self._joined(raw)
        chunk = chunk_of(event)
        if chunk is None or chunk.get("error"):
            what = "an error" if chunk is not None else f"{len(event.data)} bytes that are no JSON object"
            raise Diverged(f"continuation: expected a chunk of an answer, got {what}")
        if not chunk.get("choices"):
            return b"" if self._had_usage or chunk.get("usage") is None else self._joined(self._as_before(raw, chunk))
        changed = new = False
        choices = []
        for choice in chunk["choices"]:
            trimmed, differs, beyond = self._trim_choice(choice)
            choices.append(trimmed)
            changed, new = changed or differs, new or beyond
        if not new:
            return b""
        if not changed:
            return self._joined(self._as_before(raw, chunk))
        return self._joined(self._as_before(b"data: " + orjson.dumps({**chunk, "choices": choices}) + b"\n\n", chunk))

    def _joined(self, raw: bytes) -> bytes:
        """Join the first event that is passed on to the one within which the old stream broke off."""
        torn, self._torn = self._torn, b""
        lines = torn.lstrip(b"\r\n")
        if not lines:
            return raw
        if all(line.startswith(b":") for line in lines.splitlines()):
            return b"\n" + raw
        if not raw.startswith(torn):
            raise Diverged("continuation: the old stream broke off within an event that the new one does not have")
        return raw[len(torn) :]

    def _as_before(self, raw: bytes, chunk: Mapping[str, Any]) -> bytes:
        """Put the old stream's id and time into an event."""
        own = chunk.get("id")
        if isinstance(own, str) and isinstance(self._id, str) and own != self._id:
            before = orjson.dumps(self._id)
            raw = re.sub(rb'("id"\s*:\s*)' + re.escape(orjson.dumps(own)), lambda found: found[1] + before, raw, count=1)
        created = self._created
        if isinstance(created, int) and chunk.get("created") != created:
            raw = _CREATED.sub(lambda found: found[1] + b"%d" % created, raw, count=1)
        return raw

    def _trim_choice(self, choice: Any) -> tuple[Any, bool, bool]:
        if not isinstance(choice, dict):
            raise Diverged(f"continuation: expected choices that are objects, got {type(choice).__name__}")
        index = choice.get("index", 0)
        trimmed: dict[str, Any] = {}
        changed = new = False
        for name, value in choice.items():
            if name == "index":
                trimmed[name] = value
                continue
            path = (index, "message" if name == "delta" else name)
            trimmed[name], differs, beyond = self._trim(value, path)
            changed, new = changed or differs, new or beyond
        return trimmed, changed, new

    def _trim(self, value: Any, path: Path) -> tuple[Any, bool, bool]:
        """Return what a value says beyond the old stream, whether that differs from it, and whether it says anything new."""
        if isinstance(value, dict):
            parts = {name: self._trim(inner, (*path, name)) for name, inner in value.items() if name != "index"}
            kept = {name: value[name] if name == "index" else parts[name][0] for name in value}
            return kept, any(part[1] for part in parts.values()), any(part[2] for part in parts.values())
        if isinstance(value, list):
            return self._trim_list(value, path)
        before = self._known.get(path)
        if isinstance(value, str) and _grows(path):
            return self._trim_text(value, before if isinstance(before, str) else "", path)
        if value is None or value == before:
            return value, False, False
        if path not in self._known or before is None:
            return value, False, value != ""
        if path[-1] == "finish_reason":
            raise Diverged(f"continuation: the old stream finished with {before!r}, the new one with {value!r}")
        return before, True, False

    def _trim_text(self, piece: str, before: str, path: Path) -> tuple[str, bool, bool]:
        said = self._said.get(path, 0)
        self._said[path] = said + len(piece)
        repeated = before[said : said + len(piece)]
        if not piece.startswith(repeated):
            raise Diverged(f"continuation: the new stream says something else after {said} characters of {path[-1]}")
        rest = piece[len(repeated) :]
        return rest, bool(repeated), bool(rest)

    def _trim_list(self, items: list[Any], path: Path) -> tuple[list[Any], bool, bool]:
        if items and all(isinstance(item, dict) and isinstance(item.get("index"), int) for item in items):
            parts = [self._trim(item, (*path, item["index"])) for item in items]
            return [part[0] for part in parts], any(part[1] for part in parts), any(part[2] for part in parts)
        known = self._known.get(path)
        said = self._said.get(path, 0)
        self._said[path] = said + len(items)
        repeated = min(max(0, (known if isinstance(known, int) else 0) - said), len(items))
        return items[repeated:], repeated > 0, len(items) > repeated

    def _all_said(self) -> None:
        for path, value in self._known.items():
            if isinstance(value, str) and _grows(path) and self._said.get(path, 0) < len(value):
                raise Diverged(f"continuation: the new stream ended before it had repeated the old one's {path[-1]}")


def _grows(path: Path) -> bool:
    """Whether a text is told in pieces: all that is said in a message, and the text of a completion."""
    return (path[1] == "message" and path[-1] not in TOLD_ONCE) or path[1:] == ("text",)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield what a choice holds by its path; of a list whose items are not numbered, their number."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "index":
                yield from _leaves(inner, (*path, name))
    elif isinstance(value, list):
        if value and all(isinstance(item, dict) and isinstance(item.get("index"), int) for item in value):
            for item in value:
                yield from _leaves(item, (*path, item["index"]))
        else:
            yield path, len(value)
    else:
        yield path, value
