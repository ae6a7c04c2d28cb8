"""The two forms in which the simulated model says a text: a chat's, and that of OpenAI's legacy ``/v1/completions``.

Both say the same to the same words: a legacy prompt is answered as a chat whose only message it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is put.

    Attributes:
        prefix: What its ``id`` begins with.
        chunk: The ``object`` of a stream's chunks.
        opening: The choice of a stream's first chunk, before there is any text; None: there is no such chunk.
        piece: Gives the choice that says a piece of the text.
        closing: The choice that says the ``finish_reason``.
    """

    prefix: str
    chunk: str
    opening: Mapping[str, Any] | None
    piece: Callable[[str], Mapping[str, Any]]
    closing: Mapping[str, Any]


CHAT = Form(
    prefix="chatcmpl-",
    chunk="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    piece=lambda text: {"delta": {"content": text}},
    closing={"delta": {}},
)
LEGACY = Form(
    prefix="cmpl-",
    chunk="text_completion",
    opening=None,
    piece=lambda text: {"text": text, "logprobs": None},
    closing={"text": "", "logprobs": None},
)


def messages_of(prompt: object) -> list[dict[str, str]] | None:
    """Return the chat that a legacy prompt stands for; None unless it is one text, as such or as the only one of a list."""
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else None
