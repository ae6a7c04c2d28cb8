"""What a request's answer takes in the cache, known before it is asked."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from serving.keys import key64
from serving.llm_sim import CHARS_PER_TOKEN, answer_size
from serving.tiers.base import KEY_BYTES, EntryMeta

VECTOR_BYTES = 384
"""An int8 embedding of all-MiniLM-L6-v2."""


def entry_bytes(output_tokens: npt.ArrayLike, vector: bool) -> npt.NDArray[np.int64]:
    """Return the bytes of the entry that the gateway stores for an answer of the simulated model, without its metadata.

    What the gateway keeps beside the answer depends on who asks for which model (:func:`metadata_bytes`); a trace knows neither,
    and its sizes are what policies were trained on.

    Args:
        output_tokens: Completion tokens, any shape.
        vector: Whether the entry has an embedding (and with it the fingerprint of its context).

    Returns:
        Bytes of key, body and vector, same shape.
    """
    tokens = np.asarray(output_tokens, dtype=np.int64)
    fixed = KEY_BYTES + answer_size(0) + (KEY_BYTES + VECTOR_BYTES if vector else 0)
    return fixed + CHARS_PER_TOKEN * tokens


def metadata_bytes(model: str) -> int:
    """Return the bytes that the gateway stores beside an answer of that model, for a caller who says nothing else of himself."""
    return len(EntryMeta(model=model).dump())


def prompt_tokens(prompts: list[str]) -> npt.NDArray[np.int32]:
    """Return the prompt tokens that the simulated model bills for each text: a quarter of its characters, rounded up."""
    return np.array([max(1, -(-len(text) // CHARS_PER_TOKEN)) for text in prompts], dtype=np.int32)


def text_key(text: str) -> int:
    """Return the 64-bit name of a prompt's text."""
    return key64(hashlib.sha256(text.encode()).digest())
