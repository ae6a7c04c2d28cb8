"""Recorded answers: one answer, read as an event stream and as one JSON object.

What the model sent is kept as it came, and replayed to the byte. Only a client that asks for the other form gets a translation:
:func:`to_json` assembles a stream of ``chat.completion.chunk`` or ``text_completion`` events, :func:`to_sse` writes an object as
a stream. Both keep fields that they do not know.

How deltas are assembled: text is appended, whatever its field is called (``content``, ``reasoning_content``, ``refusal``,
``arguments``); ``id``, ``type`` and ``role`` are told whole, and may be repeated, as ``name`` may; lists grow, those whose items
have an ``index`` item by item; other values are replaced. Choices, tool calls and other numbered parts may come interleaved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from serving.sse import DONE, Event, EventParser, events
from serving.tiers.base import Entry

_END = b"data: [DONE]\n\n"
TOLD_ONCE = ("id", "type", "role", "object", "format")
"""Fields of a delta that are told whole."""

_CHUNK = "chat.completion.chunk"
_WHOLE = "chat.completion"
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


def chunk_of(event: Event) -> dict[str, Any] | None:
    """Return the JSON object that an event carries; None for ``[DONE]`` and for what is none."""
    if event.data == DONE:
        return None
    try:
        parsed = orjson.loads(event.data)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


# -- a stream as one object --------------------------------------------------------------------------------------------------


class Assembly:
    """The object that a stream's chunks amount to so far.

    Attributes:
        failed: Whether something came that cannot be a part of it: an error, what is not JSON, audio.
        done: Whether ``[DONE]`` came.
    """

    def __init__(self) -> None:
        self.failed = False
        self.done = False
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, event: Event) -> None:
        """Take the next event."""
        if event.done:
            self.done = True
            return
        chunk = chunk_of(event)
        if chunk is None or chunk.get("error") or event.event == "error":
            self.failed = True
            return
        choices = chunk.pop("choices", None)
        for name, value in chunk.items():
            if name not in self._top or (value is not None and name not in ("id", "created", "object")):
                self._top[name] = value
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choose(choice)
            else:
                self.failed = True

    def _choose(self, choice: dict[str, Any]) -> None:
        index = choice.pop("index", 0)
        if not isinstance(index, int):
            self.failed = True
            return
        known = self._choices.setdefault(index, {})
        for part in ("delta", "message"):
            delta = choice.pop(part, None)
            if isinstance(delta, dict):
                self.failed |= delta.get("audio") is not None  # base64 in pieces: to be played, not put together
                merge(known.setdefault("message", {}), delta)
        text = choice.pop("text", None)
        if isinstance(text, str):
            known["text"] = known.get("text", "") + text
        for name, value in choice.items():
            if isinstance(value, dict | list):
                merge(known, {name: value})
            elif value is not None or name not in known:
                known[name] = value

    @property
    def choices(self) -> dict[int, dict[str, Any]]:
        """What is known of each choice, by index: ``message`` or ``text``, ``finish_reason`` and so on."""
        return self._choices

    @property
    def top(self) -> Mapping[str, Any]:
        """The fields beside the choices: ``id``, ``model``, ``usage`` and so on."""
        return self._top

    def finished(self, choices: int = 1) -> bool:
        """Whether the answer is whole: ``[DONE]`` came, and each of at least so many choices has a ``finish_reason``."""
        known = self._choices.values()
        return self.done and not self.failed and len(known) >= choices and all(one.get("finish_reason") for one in known)

    def whole(self) -> dict[str, Any] | None:
        """Return the object, whether the stream is finished or not; None where there is nothing, or something does not fit."""
        if self.failed or not self._choices:
            return None
        top = dict(self._top)
        if top.get("object") == _CHUNK:
            top["object"] = _WHOLE
        usage = {"usage": top.pop("usage")} if top.get("usage") is not None else {}
        top.pop("usage", None)
        return {**top, "choices": [_finished_choice(index, self._choices[index]) for index in sorted(self._choices)], **usage}


def _finished_choice(index: int, known: Mapping[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, **known}
    choice.setdefault("finish_reason", None)
    if "message" in choice:
        message = {"role": "assistant", "content": None, **choice["message"]}
        if isinstance(message.get("tool_calls"), list):
            # Their number is how a stream tells them apart; an object has them in order.
            message["tool_calls"] = [_without(call, "index") for call in message["tool_calls"]]
        choice["message"] = message
    elif "text" not in choice:
        choice["message"] = {"role": "assistant", "content": None}
    return choice


def _without(value: Any, name: str) -> Any:
    return {key: inner for key, inner in value.items() if key != name} if isinstance(value, dict) else value


def merge(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta to what is known, in place; how is told at the top of the module."""
    for name, value in delta.items():
        before = known.get(name)
        if before is None:
            known[name] = _numbered(value) if isinstance(value, list) else value
        elif value is None:
            continue
        elif isinstance(before, str) and isinstance(value, str):
            known[name] = _text(name, before, value)
        elif isinstance(before, dict) and isinstance(value, dict):
            merge(before, value)
        elif isinstance(before, list) and isinstance(value, list):
            _extend(before, value)
        else:
            known[name] = value


def _text(name: str, before: str, piece: str) -> str:
    if name in TOLD_ONCE:
        return piece or before
    # Some models repeat the name of a function in each delta, others tell it in pieces.
    return before if name == "name" and piece == before else before + piece


def _numbered(items: list[Any]) -> list[Any]:
    collected: list[Any] = []
    _extend(collected, items)
    return collected


def _extend(known: list[Any], items: list[Any]) -> None:
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        if not isinstance(index, int):  # else it is no number: of the most likely tokens one may be called "index"
            known.append(item)
            continue
        same = next((one for one in known if isinstance(one, dict) and one.get("index") == index), None)
        if same is None:
            known.append(item)
        else:
            merge(same, item)
    if known and all(isinstance(one, dict) and isinstance(one.get("index"), int) for one in known):
        known.sort(key=lambda one: int(one["index"]))


def assemble(stream: bytes) -> Assembly:
    """Return what a stream amounts to, whole or not."""
    assembly = Assembly()
    parser = EventParser()
    for event in parser.feed(stream) + parser.close():
        assembly.add(event)
    # Some servers end without the last blank line.
    if parser.rest.strip() == b"data: [DONE]":
        assembly.done = True
    return assembly


def to_json(sse: bytes) -> dict[str, Any] | None:
    """Return the object that a stream amounts to, as the same request without ``stream`` would have been answered.

    A stream that was cut gives what there is of it; ask :func:`finished`.

    Returns:
        The object; None where the stream has no choices, or has what an object cannot: an error, what is not JSON, audio.
    """
    return assemble(sse).whole()


def finished(sse: bytes, *, choices: int = 1) -> bool:
    """Whether a stream is whole: it ends with ``[DONE]``, and each of at least so many choices says why it finished."""
    return assemble(sse).finished(choices)


# -- an object as a stream ---------------------------------------------------------------------------------------------------


def to_sse(json_body: bytes, *, usage: bool) -> bytes:
    """Return a completion as a stream: a chunk with each choice's content, one with its end, the usage if asked, ``[DONE]``.

    Args:
        json_body: A ``chat.completion`` or ``text_completion`` object.
        usage: Whether the stream tells the tokens, as with ``stream_options: {"include_usage": true}``.

    Raises:
        ValueError: If it is none.
    """
    try:
        body = orjson.loads(json_body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"recording: expected a completion as a JSON object, got what is not JSON: {error}") from error
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("recording: expected a completion with at least one choice, got an object without")
    top = {name: value for name, value in body.items() if name not in ("choices", "usage")}
    if top.get("object") == _WHOLE:
        top["object"] = _CHUNK
    written = [_event({**top, "choices": [choice]}) for given in choices for choice in _pieces(given)]
    if usage and isinstance(body.get("usage"), dict):
        written.append(_event({**top, "choices": [], "usage": body["usage"]}))
    return b"".join(written) + _END


def _pieces(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    index = choice.get("index", 0)
    message = choice.get("message")
    if not isinstance(message, dict):
        yield {**choice, "index": index}
        return
    delta = dict(message)
    if isinstance(delta.get("tool_calls"), list):
        delta["tool_calls"] = [
            {"index": number, **call} if isinstance(call, dict) else call for number, call in enumerate(delta["tool_calls"])
        ]
    first: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
    if "logprobs" in choice:
        first["logprobs"] = choice["logprobs"]
    yield first
    rest = {name: value for name, value in choice.items() if name not in ("index", "message", "logprobs")}
    yield {"index": index, "delta": {}, **rest}


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


# -- the usage of a stream ---------------------------------------------------------------------------------------------------


def _only_usage(event: Event) -> bool:
    """Whether the event tells the tokens and nothing else."""
    if _USAGE.search(event.data) is None:
        return False
    chunk = chunk_of(event)
    return chunk is not None and not chunk.get("choices") and isinstance(chunk.get("usage"), dict)


class UsageFilter:
    """Takes the chunk that only tells the tokens out of a stream that comes in pieces, for a client that did not ask for it.

    An event is passed on when it is complete. What else a model writes because it was asked for the usage (``"usage": null`` in
    each chunk) stays: clients take it for what it is.
    """

    def __init__(self) -> None:
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return those that are passed on."""
        return self._pass(self._parser.pairs(chunk))

    def close(self) -> bytes:
        """Take the end of the stream; return what is left of it."""
        return self._pass(self._parser.last_pairs()) + self._parser.rest

    def _pass(self, pairs: list[tuple[Event, bytes]]) -> bytes:
        return b"".join(raw for event, raw in pairs if not _only_usage(event))


def without_usage(sse: bytes) -> bytes:
    """Return a stream without the chunk that only tells the tokens, otherwise to the byte."""
    if b"\r" not in sse:
        # Nearly always: one event at the end, found without reading the others.
        kept, start = [], 0
        for told in _USAGE.finditer(sse):
            first, last = sse.rfind(b"\n\n", start, told.start()) + 2, sse.find(b"\n\n", told.end()) + 2
            found = events(sse[first:last]) if first >= 2 and last >= 2 else []
            if len(found) != 1 or found[0].end != last - first:
                break
            if _only_usage(found[0]):
                kept.append(sse[start:first])
                start = last
        else:
            return b"".join(kept) + sse[start:] if kept else sse
    wanted = UsageFilter()
    return wanted.feed(sse) + wanted.close()


def with_usage(sse: bytes, input_tokens: int, output_tokens: int) -> bytes:
    """Return a stream with a chunk that tells the tokens before ``[DONE]``; as it is where it has one, or no chunk at all."""
    found = events(sse)
    chunks = [event for event in found if not event.done]
    if not chunks or any(_only_usage(event) for event in chunks):
        return sse
    first = chunk_of(chunks[0])
    if first is None:
        return sse
    usage = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    place = chunks[-1].end
    return sse[:place] + _event({**first, "choices": [], "usage": usage}) + sse[place:]


def usage_in(sse: bytes) -> tuple[int, int] | None:
    """Return the prompt and completion tokens that a stream tells; None where it tells none."""
    usage = assemble(sse).top.get("usage") if b'"usage"' in sse else None
    if not isinstance(usage, dict):
        return None
    given = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return tuple(value if isinstance(value, int) and 0 <= value < 1 << 32 else 0 for value in given)  # type: ignore[return-value]


# -- the text ----------------------------------------------------------------------------------------------------------------


def text_of(answer: bytes | Entry) -> str:
    """Return the text of an answer in either form, for comparing answers: content, refusal, and tool calls with their arguments.

    Reasoning does not count. Several choices are joined by blank lines. What is no completion has no text.
    """
    body = answer.body if isinstance(answer, Entry) else answer
    parsed: Any
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = to_json(body)
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    texts = [_text_of_choice(choice) for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    return "\n\n".join(texts)


def _text_of_choice(choice: Mapping[str, Any]) -> str:
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    message = choice.get("message")
    if not isinstance(message, dict):
        return ""
    parts = [message[name] for name in ("content", "refusal") if isinstance(message.get(name), str) and message[name]]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(parts)
