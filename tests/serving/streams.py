"""Streams as models write them, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

ID = "chatcmpl-1"
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def event(payload: Any) -> bytes:
    """One event with a JSON value."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def chunk(*choices: Mapping[str, Any], name: str = ID, created: int = 1_700_000_000, **fields: Any) -> bytes:
    """One ``chat.completion.chunk``."""
    head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": "m", "system_fingerprint": "fp_1"}
    return event({**head, "choices": list(choices), **fields})


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """One choice of a chunk."""
    return {"index": index, "delta": fields, "finish_reason": finish}


def spoken(pieces: Sequence[str], *, usage: bool = True, done: bool = True, finish: str | None = "stop", **head: Any) -> bytes:
    """A stream that says the pieces one after another."""
    written = [chunk(delta(role="assistant", content=""), **head)]
    written += [chunk(delta(content=piece), **head) for piece in pieces]
    if finish is not None:
        written.append(chunk(delta(finish=finish), **head))
    if usage:
        written.append(chunk(usage=USAGE, **head))
    if done:
        written.append(b"data: [DONE]\n\n")
    return b"".join(written)


def pieces_of(stream: bytes, size: int) -> list[bytes]:
    """The stream in pieces of so many bytes."""
    return [stream[start : start + size] for start in range(0, len(stream), size)]
