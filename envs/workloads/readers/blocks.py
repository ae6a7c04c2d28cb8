"""JSON lines of prefix blocks: Mooncake (512 tokens) and Qwen-Bailian (16 tokens)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from envs.workloads.entry import entry_bytes
from envs.workloads.readers.batch import LATEST, Batch, Input, make_batch
from serving.keys import mix64_array

BLOCK_TOKENS = 512
"""Tokens of one prefix block of the Mooncake trace."""

BAILIAN_BLOCK_TOKENS = 16
"""Tokens of one prefix block of the Qwen-Bailian traces."""


class BlockNames(Sequence[str]):
    """Prompts of a block trace, made when asked for: ``block <id>``."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return BlockNames(self._ids[index])
        return f"block {int(self._ids[index])}"


class BlockLines:
    """Requests as lists of prefix blocks, each reference to a block one row.

    Args:
        given: The file.
        tokens: Tokens of a block.
        per_second: Units of ``timestamp`` in a second.
        typed: Whether lines have a ``type``, which becomes the tenant.
        note: What the trace is.
    """

    def __init__(self, given: Input, *, tokens: int, per_second: float, typed: bool, note: str) -> None:
        self._given = given
        self._tokens = tokens
        self._per_second = per_second
        self._typed = typed
        self._number_of: dict[str, int] = {}
        self.note = note
        unit = "milliseconds" if per_second == 1000.0 else "seconds"
        self._form = f"a JSON object with timestamp ({unit}) and hash_ids (a list of whole numbers >= 0)"

    @property
    def tenants(self) -> list[str]:
        """The types of request by number, as far as they were met."""
        return list(self._number_of)

    def batches(self) -> Iterator[Batch]:
        """Yield a row for each reference to a block; :class:`envs.workloads.readers.batch.Reader`."""
        for rows in self._given.rows(self._row):
            yield self._batch(*zip(*rows, strict=True))

    def _row(self, number: int, line: bytes) -> tuple[float, int, int, list[int]] | None:
        """Return time, tenant, line and blocks of a request; None for an empty line."""
        if line.isspace():
            return None
        try:
            row = orjson.loads(line)
            moment, blocks = float(row["timestamp"]), row["hash_ids"]
            kind = str(row.get("type", "")) if self._typed else ""
            good = _whole(blocks) and 0.0 <= moment / self._per_second <= LATEST
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as caught:
            reason = f"{self._form} ({type(caught).__name__}: {caught})"
            raise self._given.error(reason, number, line.decode(errors="replace")) from caught
        if not good:
            raise self._given.error(self._form, number, line.decode())
        tenant = self._number_of.setdefault(kind, len(self._number_of)) if self._typed else 0
        return moment / self._per_second, tenant, number, blocks

    def _batch(self, times: Sequence[float], tenants: Sequence[int], lines: Sequence[int], ids: Sequence[list[int]]) -> Batch:
        lengths = np.array([len(blocks) for blocks in ids], np.int64)
        block = np.array([number for blocks in ids for number in blocks], np.uint64)
        chain = np.arange(len(block)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = np.full(len(block), self._tokens, np.int64)
        return make_batch(
            time=np.repeat(times, lengths),
            line=np.repeat(lines, lengths),
            key=mix64_array(block),
            size=entry_bytes(tokens, False),
            input_tokens=-(-(len("block ") + _digits(block)) // 4),
            output_tokens=tokens,
            tenant=np.repeat(tenants, lengths),
            chain=chain,
            reference=block.astype(np.int64),
        )

    def prompts(self, reference: npt.NDArray[np.int64]) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
        """Return the texts and each row's place among them."""
        ids, place = np.unique(reference, return_inverse=True)
        return BlockNames(ids), place.astype(np.int64)


def mooncake(given: Input) -> BlockLines:
    """Read Mooncake JSON lines (kvcache-ai/Mooncake, FAST'25)."""
    return BlockLines(
        given,
        tokens=BLOCK_TOKENS,
        per_second=1000.0,
        typed=False,
        note="References to 512-token prefix blocks of a chat service (Mooncake, FAST'25): each reference is one request, all of "
        "one conversation turn at the same time. A block stands for an answer of 512 tokens; real arrivals and repeats.",
    )


def bailian(given: Input) -> BlockLines:
    """Read Qwen-Bailian JSON lines (alibaba-edu/qwen-bailian-usagetraces-anon, USENIX ATC'25)."""
    return BlockLines(
        given,
        tokens=BAILIAN_BLOCK_TOKENS,
        per_second=1.0,
        typed=True,
        note="References to 16-token prefix blocks of a Qwen service (Aliyun Bailian, ATC'25): each reference is one request, "
        "all of one conversation turn at the same time. A block stands for an answer of 16 tokens, a tenant is a type of request "
        "(text, search, image, file); real arrivals and repeats.",
    )


def _whole(blocks: Any) -> bool:
    if type(blocks) is not list:
        return False
    if not blocks:
        return True
    return all(type(number) is int for number in blocks) and min(blocks) >= 0 and max(blocks) < 2**63


def _digits(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return how many decimal digits each number has."""
    powers = np.array([10**power for power in range(1, 20)], np.uint64)
    return np.searchsorted(powers, numbers, side="right").astype(np.int64) + 1


def looks_like(row: dict[str, Any]) -> str:
    """Return ``mooncake`` or ``bailian`` for a line of theirs, else ``""``."""
    if "hash_ids" not in row or "timestamp" not in row:
        return ""
    return "bailian" if {"chat_id", "parent_chat_id", "turn"} & row.keys() else "mooncake"
