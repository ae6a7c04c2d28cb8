"""The gateway's access log: one JSON line per request, without a word of any prompt or answer.

Reports cluster by key, so they need single requests; metrics only have sums. The log is also a workload that can be simulated.

An outcome says who answered: the cache or the model. How it came to that (an entry past its TTL, the answer to an identical
request, a caller who would not have the cache's answer) is the rule's to say (:class:`serving.policy.Rule`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import orjson

_log = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Records that wait in memory while the disk is full."""

Outcome = Literal["hit", "semantic_hit", "miss", "bypass", "error", "left"]
"""``hit``: the cache answered, with an entry of the same question or with the answer that an identical request was waiting for;
``semantic_hit``: with the answer to another question; ``miss``: the model; ``bypass``: the model, and the cache was not asked;
``error``: the model failed, or could not be asked; ``left``: the client went away before the end of its answer (status 499,
latency until then); it is in no figure about answered requests."""


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """One request.

    Attributes:
        at: Arrival, seconds since the epoch.
        key: 64-bit name of the request's fingerprint (:func:`serving.keys.key64`).
        arm: The arm that it was assigned to.
        outcome: What happened.
        tier: The tier that answered: ``memory``, ``redis``, ``vector``, or ``""``.
        latency: Seconds from arrival to the complete answer.
        size: Bytes of the entry (key, body, vector).
        input_tokens: Prompt tokens of the answer, as originally billed.
        output_tokens: Completion tokens of the answer, as originally billed.
        age: Age of the entry that answered, seconds; 0 for a miss.
        stale: Expected staleness of the answer, 0..1.
        version: Version of the knobs that were applied.
        status: HTTP status of the answer.
    """

    at: float
    key: int
    arm: str
    outcome: Outcome
    tier: str
    latency: float
    size: int
    input_tokens: int
    output_tokens: int
    age: float
    stale: float
    version: int
    status: int


@dataclass(frozen=True, slots=True)
class DetailedRecord(AccessRecord):
    """One request, as it is written: with what only people ask for.

    Attributes:
        rule: The rule that decided (:class:`serving.policy.Rule`).
        similarity: 1 for the same question, the cosine for an answer by meaning, 0 for a miss.
        endpoint: ``chat``, ``completions`` or ``embeddings``.
        tenant: Who asked; ``""`` where there are no tenants.
        key_hex: The key as headers and the admin API have it, 16 hexadecimal digits: ``x-litellm-cache-key`` begins with it, and
            it is the ``x-cache-entry`` of the entry that answers this question by being its own.
    """

    rule: str = ""
    similarity: float = 0.0
    endpoint: str = "chat"
    tenant: str = ""
    key_hex: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_hex", f"{self.key:016x}")


_FIELDS = tuple(item.name for item in fields(AccessRecord))


class AccessLogWriter:
    """Appends records to ``access-<replica>.jsonl``.

    Records are buffered and written in whole lines by one ``write`` each time: a reader sees complete lines, but for the tail
    that a killed machine may leave. The owner calls :meth:`flush` at least once a second.

    Args:
        directory: Folder of the logs; made if it is missing.
        replica: Name of this replica, unique in the folder.
        limit: Records after which it is written without waiting for a flush.

    Raises:
        OSError: If the folder or the file cannot be made or written.
    """

    def __init__(self, directory: Path, replica: str, *, limit: int = 1024) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"access-{replica}.jsonl"
        self._limit = limit
        self._lines: list[bytes] = []
        self._rest = b""  # of a write that was not taken whole
        self._failing = False
        self.lost = 0
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: AccessRecord) -> None:
        """Append one record; lost (and counted as such) while the file cannot be written and too much waits already."""
        if len(self._lines) >= MOST_WAITING:
            self.lost += 1
            return
        self._lines.append(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        if len(self._lines) >= self._limit and not self._failing:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. What a full disk does not take waits, so that a line begun is ended when there is room."""
        try:
            while self._rest or self._lines:
                if not self._rest:
                    self._rest = b"".join(self._lines)
                    self._lines.clear()
                self._rest = self._rest[os.write(self._file, self._rest) :]
        except OSError as error:
            if not self._failing:
                _log.error("access log: %s: %s; up to %d records wait, then they are lost", self.path, error, MOST_WAITING)
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        """Write what is buffered and close the file; harmless when closed already."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1


def read_records(path: Path) -> Iterator[AccessRecord]:
    """Yield the records of one file; a last line without its end is left out, since it is still being written.

    Raises:
        ValueError: If a complete line is not a record; names the file, the line and what was expected.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                values = orjson.loads(line)
                yield AccessRecord(**{name: values[name] for name in _FIELDS})
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with {', '.join(_FIELDS)}; got {line[:80]!r}"
                ) from error
