"""Answers by meaning: what has to agree, where vectors are kept, how sure an answer has to be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_serializer, field_validator, model_validator

from serving.settings.base import Seconds, Settings, Share


class GuardSettings(Settings):
    """What two questions must have in common, beside their embedding, to share an answer; each can be turned off.

    Attributes:
        numbers: The same numbers with the same units, in the same order.
        negation: The same negations.
        polarity: The same of opposite words: on or off, with or without, before or after.
        entities: The same named entities.
        words: More in common than all but one word, unless the two words mean the same.
        order: The same order of what is compared or moved: "from A to B" is not "from B to A".
        edit_distance: Greatest edit distance over the longer text's length, 0..1; null: not looked at.
    """

    numbers: bool = True
    negation: bool = True
    polarity: bool = True
    entities: bool = True
    words: bool = True
    order: bool = True
    edit_distance: Share | None = None


class VectorSettings(Settings):
    """Where the vectors are kept.

    Attributes:
        kind: ``usearch`` in process; ``faiss`` in process, compressed, for above a million entries; ``milvus`` and ``chroma``
            are services that all replicas share.
        url: Of the service: ``http://...``, or a file for Milvus Lite; null for those in process.
        token: Sent to the service.
        deadline: Seconds that a call may take before the lookup goes on as a miss.
    """

    kind: Literal["usearch", "faiss", "milvus", "chroma"] = "usearch"
    url: str | None = None
    token: SecretStr | None = None
    deadline: Seconds = 0.25

    @model_validator(mode="after")
    def _located(self) -> VectorSettings:
        service = self.kind in ("milvus", "chroma")
        if service and self.url is None:
            raise ValueError(f"url: expected the address of {self.kind}, got null")
        if not service and self.url is not None:
            raise ValueError(f"url: {self.kind} runs in process and has none; got {self.url!r}")
        return self

    @field_serializer("token", when_used="json")
    def _reveal(self, value: SecretStr | None) -> str | None:
        return None if value is None else value.get_secret_value()


class LshSettings(Settings):
    """The semantic bucket: a signature of the embedding by random hyperplanes.

    Attributes:
        bits: Length of the signature.
        buckets: Number of buckets, a power of two.
        seed: Draws the hyperplanes.
        components: File of principal components that vectors are projected on first (``serving.meaning.lsh``), the same for all
            replicas; null: none. Questions of one field then fall into more buckets.
        arms: Whether the bucket, not the key, assigns a request to an arm, so that paraphrases meet the same arm. Each request
            then needs its embedding before it can be looked up.
    """

    bits: Annotated[int, Field(ge=8, le=64, multiple_of=8)] = 64
    buckets: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    seed: int = 0
    components: Path | None = None
    arms: bool = False

    @field_validator("buckets")
    @classmethod
    def _power(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"expected a power of two, got {value}")
        return value


class SemanticSettings(Settings):
    """Answers by meaning.

    Attributes:
        enabled: Whether a miss on the exact key is looked up by meaning. Costs an embedding per miss.
        threshold: Least cosine similarity of two questions that may share an answer.
        max_error: Largest share of wrong answers by meaning, 0..1: each entry's own acceptance is then learned from verified
            outcomes, and ``threshold`` is a floor. null: the threshold alone decides.
        error_over: Of what ``max_error`` is a share: ``lookups``: all that were looked up by meaning; ``answers``: those
            that were answered by meaning, which is stricter.
        verify: How an answer given anew is compared with the one that would have been served: ``exact``: the same text;
            ``embedding``: cosine of at least ``verify_similarity``.
        verify_similarity: See ``verify``.
        deadline: Seconds an embedding may take before the lookup goes on as a miss.
        collapse: Whether a miss waits for the answer to a near-identical question that is under way.
        guards: What has to agree beside the embedding.
        lsh: The semantic bucket.
        vectors: Where the vectors are kept.
    """

    enabled: bool = False
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    max_error: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    error_over: Literal["lookups", "answers"] = "lookups"
    verify: Literal["exact", "embedding"] = "exact"
    verify_similarity: Share = 0.9
    deadline: Seconds = 0.5
    collapse: bool = True
    guards: GuardSettings = GuardSettings()
    lsh: LshSettings = LshSettings()
    vectors: VectorSettings = VectorSettings()
