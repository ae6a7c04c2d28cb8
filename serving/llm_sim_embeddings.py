"""The simulated model's ``/v1/embeddings``: vectors that are a function of (model, revision, input), in OpenAI's form.

They mean nothing: two texts that are alike have vectors that are not. They are there to try what is in front of a model on.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from serving.settings import LlmSimSettings

DIMENSIONS = 384
"""Of a vector whose request does not say."""

MOST_DIMENSIONS = 4096
MOST_INPUTS = 2048
"""As many as OpenAI takes at once."""

CHARS_PER_TOKEN = 4

Input = str | tuple[int, ...]
"""A text, or its tokens."""


class BadInput(ValueError):
    """A request that has no vectors.

    Attributes:
        param: The field at fault.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The answer to one request.

    Attributes:
        vectors: One row for each input, float32, of length 1.
        prompt_tokens: What is billed.
        packed: Whether vectors are told as base64 of their little-endian bytes, as OpenAI's own client asks for.
    """

    vectors: npt.NDArray[np.float32]
    prompt_tokens: int
    packed: bool

    def to_json(self, model: str) -> bytes:
        """Return the body."""
        told = [base64.b64encode(row.astype("<f4").tobytes()).decode() if self.packed else row.tolist() for row in self.vectors]
        return orjson.dumps(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(told)],
                "model": model,
                "usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens},
            }
        )


def embed(body: Mapping[str, Any], settings: LlmSimSettings) -> Embeddings:
    """Return the vectors that a request asks for.

    Args:
        body: The request's JSON object.
        settings: The server's settings; ``model`` and ``revision`` are used.

    Raises:
        BadInput: If there are none.
    """
    inputs = _inputs(body.get("input"))
    dimensions = body.get("dimensions", DIMENSIONS)
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 1 <= dimensions <= MOST_DIMENSIONS:
        raise BadInput("dimensions", f"expected a whole number from 1 to {MOST_DIMENSIONS}, got {dimensions!r}")
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise BadInput("encoding_format", f"expected float or base64, got {form!r}")
    vectors = np.stack([vector_of(each, dimensions, settings) for each in inputs])
    return Embeddings(vectors, sum(map(_tokens, inputs)), form == "base64")


def vector_of(what: Input, dimensions: int, settings: LlmSimSettings) -> npt.NDArray[np.float32]:
    """Return the vector of one input, float32[dimensions], of length 1."""
    seed = orjson.dumps([settings.model, settings.revision, what, dimensions])
    drawn = np.frombuffer(hashlib.shake_128(seed).digest(4 * dimensions), "<i4").astype(np.float64)
    drawn[0] += drawn[0] == 0.0  # no vector is all zeros
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def _inputs(given: object) -> list[Input]:
    if isinstance(given, str) or _are_tokens(given):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_INPUTS:
        raise BadInput("input", f"expected a text or its tokens, or a list of 1 to {MOST_INPUTS} of them")
    found: list[Input] = []
    for number, each in enumerate(given):
        if isinstance(each, str) and each:
            found.append(each)
        elif _are_tokens(each):
            found.append(tuple(each))
        else:
            raise BadInput("input", f"expected texts that are not empty, or lists of tokens; number {number} is neither")
    return found


def _are_tokens(given: object) -> bool:
    return isinstance(given, Sequence) and len(given) > 0 and all(type(token) is int for token in given)


def _tokens(what: Input) -> int:
    return len(what) if isinstance(what, tuple) else math.ceil(len(what) / CHARS_PER_TOKEN)
