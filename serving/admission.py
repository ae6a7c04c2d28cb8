"""Which answers are kept: only complete ones that ended by themselves. No I/O.

RFC 9111 makes an answer to POST cacheable only by its own explicit word, which no model server gives; that this cache keeps
answers at all is the operator's configuration, and what follows is its condition. For the same reason the upstream's own
``no-store`` counts only where the operator wants it heeded: some hosted models send it with every answer. The first refusal in
this order counts:

==================  ==============================================================================================================
refusal             when
==================  ==============================================================================================================
``no_store``        the caller wants it not kept (RFC 9111, 5.2.1.5)
``expired``         the caller wants it kept for no time at all, and the operator does not for longer
``status``          not 2xx, or 206: a part of an answer. RFC 9111, 3.3: an incomplete response is not stored as a complete one
``upstream``        the model's server wants it not stored (RFC 9111, 5.2.2.5), and that is heeded (``heed_no_store``)
``too_large``       more bytes than ``max_entry_bytes``
``interrupted``     the stream broke off before ``[DONE]``
``not_json``        not a JSON object, or a stream that does not make up one
``error_body``      an error in a body whose status says success
``no_choices``      no answer in it, fewer than were asked for, or one of another shape than this endpoint's
``unfinished``      a choice without a ``finish_reason``
``cut``             a choice that did not end by itself: ``length``, ``content_filter``, ``error``, ...
``empty``           a choice that says nothing: no content, refusal, audio or tool call (reasoning alone is no answer), or that
                    ended in order to call a tool and calls none; an embedding without numbers
``tool_calls``      it calls tools, and such answers are not kept (``tool_calls``)
``temperature``     it was asked for at a higher temperature than ``max_temperature``
``low_logprob``     a choice whose mean token log-probability is known and below ``min_logprob``
==================  ==============================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from serving.policy import Asked, CacheRules, entry_ttl

Endpoint = Literal["chat", "completions", "embeddings"]

FINISHED = frozenset({"stop", "tool_calls", "function_call"})
"""Reasons with which a model ends an answer by itself."""

DEFAULT_TEMPERATURE = 1.0
"""What an absent temperature means, by OpenAI's reference of the API."""


class Refusal(StrEnum):
    """Why an answer is not kept; the module's table says when."""

    NO_STORE = "no_store"
    EXPIRED = "expired"
    STATUS = "status"
    UPSTREAM = "upstream"
    TOO_LARGE = "too_large"
    INTERRUPTED = "interrupted"
    NOT_JSON = "not_json"
    ERROR_BODY = "error_body"
    NO_CHOICES = "no_choices"
    UNFINISHED = "unfinished"
    CUT = "cut"
    EMPTY = "empty"
    TOOL_CALLS = "tool_calls"
    TEMPERATURE = "temperature"
    LOW_LOGPROB = "low_logprob"


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What the operator keeps; the fields of :class:`serving.settings.AdmissionSettings`.

    Attributes:
        tool_calls: Whether answers that call tools are kept.
        max_temperature: Answers to a higher temperature are not kept; None: any is.
        max_entry_bytes: Largest answer that is kept, bytes.
        min_logprob: Least mean token log-probability, where it is known; None: any.
        heed_no_store: Whether answers that the upstream marks ``no-store`` are not kept.
    """

    tool_calls: bool = False
    max_temperature: float | None = 1.0
    max_entry_bytes: int = 4 << 20
    min_logprob: float | None = -2.3
    heed_no_store: bool = False


@dataclass(frozen=True, slots=True)
class CompletedAnswer:
    """What came from the model, to its end.

    Attributes:
        status: HTTP status.
        parsed: The answer as a JSON object, a stream put together; None where it is not one.
        endpoint: What was asked.
        size: Bytes of the body.
        interrupted: Whether it is a stream that broke off before its end.
        no_store: Whether the upstream would not have it stored.
    """

    status: int
    parsed: Mapping[str, Any] | None
    endpoint: Endpoint = "chat"
    size: int = 0
    interrupted: bool = False
    no_store: bool = False


def admit(answer: CompletedAnswer, asked: Asked, admission: AdmissionRules, rules: CacheRules) -> Refusal | None:
    """Return why the answer is not kept; None: it is.

    Args:
        answer: What came from the model.
        asked: The request that it answers.
        admission: What the operator keeps.
        rules: The cache's settings.
    """
    if asked.directives.no_store:
        return Refusal.NO_STORE
    if not entry_ttl(asked.directives, rules) > 0.0:
        return Refusal.EXPIRED
    if not 200 <= answer.status < 300 or answer.status == 206:
        return Refusal.STATUS
    if answer.no_store and admission.heed_no_store:
        return Refusal.UPSTREAM
    if answer.size > admission.max_entry_bytes:
        return Refusal.TOO_LARGE
    if answer.interrupted:
        return Refusal.INTERRUPTED
    parsed = answer.parsed
    if parsed is None:
        return Refusal.NOT_JSON
    if parsed.get("error") or parsed.get("object") == "error":
        return Refusal.ERROR_BODY
    if answer.endpoint == "embeddings":
        return _refused_embeddings(parsed, asked)
    return _refused_choices(parsed, answer.endpoint, asked, admission)


def mean_logprob(choice: Mapping[str, Any]) -> float | None:
    """Return the mean token log-probability of a choice, of either endpoint's form; None where it is not known."""
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        return None
    found = [value for value in _logprobs(given) if isinstance(value, (int, float)) and math.isfinite(value)]
    return math.fsum(found) / len(found) if found else None


def _logprobs(given: Mapping[str, Any]) -> Iterator[object]:
    for name in ("content", "refusal"):
        tokens = given.get(name)
        if isinstance(tokens, list):
            yield from (token.get("logprob") for token in tokens if isinstance(token, Mapping))
    values = given.get("token_logprobs")
    if isinstance(values, list):
        yield from values


def _refused_embeddings(parsed: Mapping[str, Any], asked: Asked) -> Refusal | None:
    data = parsed.get("data")
    if not isinstance(data, list) or len(data) < max(asked.choices, 1):
        return Refusal.NO_CHOICES
    for item in data:
        vector = item.get("embedding") if isinstance(item, Mapping) else None
        if not isinstance(vector, (list, str)):  # base64 where it was asked for
            return Refusal.NO_CHOICES
        if not vector:
            return Refusal.EMPTY
    return None


def _refused_choices(parsed: Mapping[str, Any], endpoint: Endpoint, asked: Asked, admission: AdmissionRules) -> Refusal | None:
    choices = parsed.get("choices")
    if not isinstance(choices, list) or len(choices) < max(asked.choices, 1):
        return Refusal.NO_CHOICES
    if not all(_is_choice(choice, endpoint) for choice in choices):
        return Refusal.NO_CHOICES
    reasons = [choice.get("finish_reason") for choice in choices]
    if not all(reasons):
        return Refusal.UNFINISHED
    if not all(isinstance(reason, str) and reason in FINISHED for reason in reasons):
        return Refusal.CUT
    if not all(_says_something(choice, endpoint) for choice in choices):
        return Refusal.EMPTY
    if not admission.tool_calls and any(_calls_tools(choice) for choice in choices):
        return Refusal.TOOL_CALLS
    temperature = DEFAULT_TEMPERATURE if asked.temperature is None else asked.temperature
    if admission.max_temperature is not None and not temperature <= admission.max_temperature:
        return Refusal.TEMPERATURE
    if admission.min_logprob is not None and _least_likely(choices) < admission.min_logprob:
        return Refusal.LOW_LOGPROB
    return None


def _is_choice(choice: object, endpoint: Endpoint) -> bool:
    if not isinstance(choice, Mapping):
        return False
    return isinstance(choice.get("text"), str) if endpoint == "completions" else isinstance(choice.get("message"), Mapping)


def _says_something(choice: Mapping[str, Any], endpoint: Endpoint) -> bool:
    if endpoint == "completions":
        return bool(choice["text"].strip())
    if choice["finish_reason"] != "stop":  # it ended in order to call a tool: without one, that was lost
        return _calls_tools(choice)
    message = choice["message"]
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("refusal") or message.get("audio") or _calls_tools(choice))


def _calls_tools(choice: Mapping[str, Any]) -> bool:
    message = choice.get("message")
    return isinstance(message, Mapping) and bool(message.get("tool_calls") or message.get("function_call"))


def _least_likely(choices: Sequence[Mapping[str, Any]]) -> float:
    return min((mean for choice in choices if (mean := mean_logprob(choice)) is not None), default=math.inf)
