"""What the soak makes of an answer: right, the model's or the client's fault, or a violation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from experiments.soak.model import CallOutcome
from experiments.soak.questions import Ask, Oracle
from serving.sse import events

BY_MEANING = "vector"
"""``x-cache-tier`` of an answer to another question."""

FROM_CACHE = frozenset(("HIT", "SEMANTIC", "STALE"))

Ended = Literal["whole", "left", "broken", "nothing"]


@dataclass(frozen=True)
class Reply:
    """What a client got.

    Attributes:
        status: HTTP status; 0: nothing came.
        headers: Its headers, lower-case names.
        body: The bytes that came.
        ended: ``whole``: the connection ended in order; ``left``: the client went away; ``broken``: the connection was lost;
            ``nothing``: no answer in time.
        began: When it was asked, seconds by ``time.monotonic``.
        until: When it ended.
        at: The same as ``until``, seconds since the epoch.
        error: What went wrong with the connection.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: Ended = "whole"
    began: float = 0.0
    until: float = 0.0
    at: float = 0.0
    error: str = ""

    @property
    def label(self) -> str:
        """How the gateway says that the answer came about."""
        return self.headers.get("x-cache", "")

    @property
    def by_meaning(self) -> bool:
        """Whether it is the answer to another question."""
        return self.headers.get("x-cache-tier") == BY_MEANING


@dataclass(frozen=True)
class Verdict:
    """What an answer is.

    Attributes:
        counted: Under which name it is counted.
        violation: Which rule it breaks; ``""``: none.
        detail: What was expected and what came.
        excuse: The fault of the model without which it is a violation after all; ``""``: it needs none.
    """

    counted: str
    violation: str = ""
    detail: str = ""
    excuse: CallOutcome | Literal[""] = ""


@dataclass(frozen=True)
class Streamed:
    """What a stream says.

    Attributes:
        text: Its text.
        finished: Whether every choice said why it ended.
        done: Whether it ended with ``[DONE]``.
        error: The error by which it says that it broke off; None: it does not.
        usage: Tokens, where it says them.
    """

    text: str
    finished: bool
    done: bool
    error: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None


def read_stream(body: bytes) -> Streamed:
    """Return what the events of a chat stream say.

    Raises:
        ValueError: If an event is not a chunk.
    """
    text, finished, done, error, usage = "", False, False, None, None
    for event in events(body):
        if done:
            raise ValueError("an event after [DONE]")
        if event.done:
            done = True
            continue
        chunk = orjson.loads(event.data)
        if "error" in chunk:
            error = chunk["error"]
            continue
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            finished = finished or choice.get("finish_reason") is not None
    return Streamed(text, finished, done, error, usage)


def judge(ask: Ask, reply: Reply, oracle: Oracle, before: bytes = b"") -> Verdict:
    """Return what an answer is.

    Args:
        ask: The request.
        reply: What came.
        oracle: Says what is right.
        before: Of a stream that the client came back for: what it had before, of which the reply is the rest.
    """
    if reply.status == 0:
        return Verdict("left") if reply.ended == "left" else Verdict("unanswered", "unanswered", reply.error)
    if reply.ended in ("broken", "nothing"):
        return Verdict(reply.label, "broken_connection", f"status {reply.status}: {reply.error}")
    if reply.status >= 400:
        return _judge_error(ask, reply)
    return _judge_entry(ask, reply, oracle) or _judge_directive(ask, reply) or _judge_words(ask, reply, oracle, before)


def _judge_error(ask: Ask, reply: Reply) -> Verdict:
    status, said = reply.status, reply.body[:200].decode(errors="replace")
    if ask.directive == "only-if-cached" and status == 504 and b'"only_if_cached"' in reply.body:
        return Verdict("FORBIDDEN")
    if status in (500, 503) and b"failure_rate" in reply.body:
        return Verdict("upstream error", "server_error", f"{status} {said}", "error")
    if status == 504 and b"upstream_timeout" in reply.body:
        return Verdict("upstream timeout", "server_error", f"{status} {said}", "silent")
    return Verdict("error", "server_error" if status >= 500 else "refused", f"{status} {said}")


def _judge_entry(ask: Ask, reply: Reply, oracle: Oracle) -> Verdict | None:
    if reply.label not in ("HIT", "SEMANTIC", "STALE", "COLLAPSED", "MISS", "REFRESH", "BYPASS"):
        return Verdict("?", "unlabelled", f"x-cache: {reply.label!r}")
    named = reply.headers.get("x-cache-entry", "")
    allowed = {oracle.entry(ask, text) for text in (ask.question.alike if reply.by_meaning else (ask.question.text,))}
    if named not in allowed:
        return Verdict(reply.label, "wrong_entry", f"entry {named!r}, expected one of {sorted(allowed)}")
    return None


def _judge_directive(ask: Ask, reply: Reply) -> Verdict | None:
    label, headers, kind = reply.label, reply.headers, ask.directive
    broken = ""
    if kind == "no-store" and label != "BYPASS":
        broken = "no-store was answered from the cache or kept"
    elif kind == "no-cache" and label != "REFRESH":
        broken = "no-cache was answered without asking the model"
    elif kind == "max-age" and label in FROM_CACHE and int(headers.get("age", "0")) > 2:
        broken = f"max-age=2, age {headers.get('age')}"
    elif kind == "only-if-cached" and label not in FROM_CACHE:
        broken = "only-if-cached was answered by the model"
    elif kind == "threshold" and label == "SEMANTIC" and float(headers.get("x-cache-similarity", "0")) < 0.9895:
        broken = f"threshold 0.99, similarity {headers.get('x-cache-similarity')}"
    return Verdict(label, "directive_ignored", broken) if broken else None


def _judge_words(ask: Ask, reply: Reply, oracle: Oracle, before: bytes) -> Verdict:
    texts = ask.question.alike if reply.by_meaning else (ask.question.text,)
    right = [oracle.answer(ask, text) for text in texts]
    if not ask.stream:
        return _judge_json(ask, reply, oracle, texts)
    try:
        said = read_stream(before + reply.body)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Verdict(reply.label, "broken_stream", f"{type(error).__name__}: {error}")
    whole = said.done and said.finished and said.error is None
    if whole and reply.ended == "whole":
        if said.text not in [answer.text for answer in right]:
            return Verdict(reply.label, "wrong_answer", _differs(said.text, right[0].text))
        if ask.usage and said.usage not in [answer.usage() for answer in right]:
            return Verdict(reply.label, "wrong_answer", f"usage {said.usage}, expected {right[0].usage()}")
        if not ask.usage and said.usage is not None:
            return Verdict(reply.label, "wrong_answer", "usage that nobody asked for")
        return Verdict(reply.label)
    if not any(answer.text.startswith(said.text) for answer in right):
        return Verdict(reply.label, "wrong_answer", "before it broke off: " + _differs(said.text, right[0].text))
    if reply.ended == "left":
        return Verdict("left")
    what = f"a stream ended after {len(said.text)} of {len(right[0].text)} characters; error event: {said.error}"
    if reply.label in FROM_CACHE:
        return Verdict(reply.label, "incomplete_answer", what)
    code = (said.error or {}).get("code")
    return Verdict("upstream cut", "broken_stream", what, "left" if code == "upstream_timeout" else "cut")


def _judge_json(ask: Ask, reply: Reply, oracle: Oracle, texts: tuple[str, ...]) -> Verdict:
    right = [oracle.answer(ask, text) for text in texts]
    try:
        body = orjson.loads(reply.body)
        choice = body["choices"][0]
        text, finish, usage = choice["message"].get("content") or "", choice.get("finish_reason"), body.get("usage")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if reply.label not in FROM_CACHE and any(oracle.whole(ask, each).startswith(reply.body) for each in texts):
            return Verdict("upstream cut", "broken_json", f"{len(reply.body)} bytes of an answer", "cut")
        return Verdict(reply.label, "broken_json", f"{type(error).__name__}: {reply.body[:200]!r}")
    if finish is None:  # half of a stream is no answer to one who did not ask for a stream
        return Verdict(reply.label, "incomplete_answer", f"finish_reason null after {len(text)} characters")
    if text not in [answer.text for answer in right]:
        return Verdict(reply.label, "wrong_answer", _differs(text, right[0].text))
    if usage not in [answer.usage() for answer in right]:
        return Verdict(reply.label, "wrong_answer", f"usage {usage}, expected {right[0].usage()}")
    return Verdict(reply.label)


def _differs(text: str, right: str) -> str:
    at = next(
        (place for place, pair in enumerate(zip(text, right, strict=False)) if pair[0] != pair[1]), min(len(text), len(right))
    )
    return (
        f"{len(text)} characters, expected {len(right)}; they differ from {at} on: {text[at : at + 24]!r}, "
        f"expected {right[at : at + 24]!r}"
    )
