"""Would the cached answer have been right? Compares it with what the model answered anew.

That is what acceptance by meaning learns from (:mod:`serving.meaning.acceptance`). The comparison errs on one side: two answers
that are not seen to be the same are different, which costs hits, not wrong answers; where nothing can be said, nothing is
learned.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from serving.embedding import EmbeddingUnavailable
from serving.recording import to_json

How = Literal["exact", "embedding"]
Embed = Callable[[str], Awaitable[bytes]]
"""A text's vector, int8 bytes; ``b""`` for a text that the model does not see whole
(:meth:`serving.embedding.Embedder.embed`)."""

PIECE = 480
"""Characters that are embedded at once: well within the model's window, so that nothing of a long answer is overlooked."""

MAX_PIECES = 32
"""Answers of more pieces are not compared by their meaning."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one choice of an answer says.

    Attributes:
        text: Its text, in Unicode's composed form, runs of white space as one blank.
        refusal: Why the model refused; empty where it did not.
        calls: The tools that are called: name and arguments as canonical JSON.
    """

    text: str
    refusal: str
    calls: tuple[tuple[str, bytes], ...]


def choices_of(body: bytes) -> tuple[Choice, ...] | None:
    """Return what an answer says, by choice.

    Args:
        body: A JSON answer of chat or text completions, or its event stream.

    Returns:
        The choices by index; None where there are none, or one says nothing, or the body is something else.
    """
    parsed = _parsed(body)
    choices = parsed.get("choices") if isinstance(parsed, Mapping) else None
    if not isinstance(choices, list) or not choices:
        return None
    found = []
    for place, choice in enumerate(choices):
        if not isinstance(choice, Mapping):
            return None
        message = choice.get("message")
        said = message if isinstance(message, Mapping) else choice
        calls = _calls(said)
        if calls is None:
            return None
        made = Choice(_text(said.get("content", said.get("text"))), _text(said.get("refusal")), calls)
        if not (made.text or made.refusal or made.calls):
            return None
        index = choice.get("index")
        found.append((index if isinstance(index, int) else place, made))
    return tuple(made for _, made in sorted(found, key=lambda item: item[0]))


async def same_answer(
    cached: bytes,
    fresh: bytes,
    *,
    how: How = "exact",
    similarity: float = 0.9,
    embed: Embed | None = None,
    objection: Callable[[str, str], str] | None = None,
) -> bool | None:
    """Whether two answers say the same.

    Args:
        cached: The body that would have been served: JSON or an event stream.
        fresh: The body that the model has sent instead.
        how: ``exact``: the same text but for white space; ``embedding``: texts of nearly the same meaning. Calls of tools and
            refusals are the same only if they are equal, either way, and so are texts beside them.
        similarity: Least cosine of two texts of the same meaning, 0..1.
        embed: Embeds a text; needed by ``embedding``.
        objection: Names what keeps two texts apart whatever their cosine, ``""``: nothing
            (:meth:`serving.meaning.guards.Guards.objection`); embeddings hardly see a number.

    Returns:
        None where it cannot be told: a body says nothing or cannot be read, a text is too long or unknown to the embedder, or the
        embedder is not available.

    Raises:
        ValueError: If ``embedding`` is asked for without an embedder.
    """
    if how == "embedding" and embed is None:
        raise ValueError("same_answer: how='embedding' needs an embedder; pass embed, or how='exact'")
    one, two = choices_of(cached), choices_of(fresh)
    if one is None or two is None:
        return None
    if one == two:
        return True
    if how == "exact" or embed is None or len(one) != len(two):
        return False
    unknown = False
    for mine, other in zip(one, two, strict=True):
        if mine.calls != other.calls or mine.refusal != other.refusal or bool(mine.text) != bool(other.text):
            return False
        if mine.text == other.text:
            continue
        if mine.calls or (objection is not None and objection(mine.text, other.text)):
            return False
        likeness = await _likeness(mine.text, other.text, embed)
        if likeness is None:
            unknown = True
        elif likeness < similarity:
            return False
    return None if unknown else True


async def _likeness(one: str, two: str, embed: Embed) -> float | None:
    """Cosine of two texts; of long ones how well each piece is met by the other's best, in the worse of the two directions."""
    pieces = [_pieces(one), _pieces(two)]
    if max(map(len, pieces)) > MAX_PIECES:
        return None
    sides = []
    for side in pieces:
        try:
            vectors = [await embed(piece) for piece in side]
        except EmbeddingUnavailable:
            return None
        if not all(vectors):
            return None
        values = np.stack([np.frombuffer(vector, np.int8).astype(np.float64) for vector in vectors])
        sides.append(values / np.linalg.norm(values, axis=1, keepdims=True))
    cosines = sides[0] @ sides[1].T
    worst = float(min(cosines.max(axis=1).mean(), cosines.max(axis=0).mean()))
    return worst if math.isfinite(worst) else None


def _pieces(text: str) -> list[str]:
    """Cut a text at ends of sentences where there are any, else at blanks, else anywhere."""
    pieces = []
    while len(text) > PIECE:
        ends = [found.end() for found in re.finditer(r"[.!?。！？]\s*", text[:PIECE])]
        cut = ends[-1] if ends and ends[-1] > PIECE // 3 else text.rfind(" ", PIECE // 3, PIECE)
        cut = PIECE if cut <= 0 else cut
        pieces.append(text[:cut].strip())
        text = text[cut:].strip()
    return [piece for piece in (*pieces, text) if piece]


def _parsed(body: bytes) -> Any:
    if body.lstrip()[:1] == b"{":
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
    return to_json(body)


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        return ""
    return " ".join(unicodedata.normalize("NFC", content).split())


def _calls(said: Mapping[str, Any]) -> tuple[tuple[str, bytes], ...] | None:
    """The called tools without their ids, which are drawn anew each time; None where they cannot be read."""
    calls = said.get("tool_calls") or ()
    found = []
    for call in calls if isinstance(calls, list | tuple) else (None,):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return None
        found.append((function["name"], _canonical(function.get("arguments"))))
    function = said.get("function_call")
    if isinstance(function, Mapping):
        found.append((str(function.get("name")), _canonical(function.get("arguments"))))
    return tuple(found)


def _canonical(arguments: Any) -> bytes:
    text = arguments if isinstance(arguments, str) else ""
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        return text.encode("utf-8", "surrogatepass")
