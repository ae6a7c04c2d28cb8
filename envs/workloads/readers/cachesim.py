"""Traces of cache research: libCacheSim's binary oracleGeneral and its CSV."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from envs.workloads.errors import TraceError
from envs.workloads.readers.batch import SIZE_EXPECTED, Batch, Input, Verdict, good_sizes, make_batch
from serving.keys import mix64_array

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""One request of an oracleGeneral file: seconds, object, bytes, and the place of the object's next request (-1: none)."""

_NEVER = 2**63 - 1


class OracleGeneral:
    """libCacheSim's ``oracleGeneral``: 24 bytes a request, little-endian, unpadded. Requests of no bytes are left out."""

    note = (
        "Requests to a cache (libCacheSim oracleGeneral) with their real sizes: an object stands for an answer, a quarter of its "
        "bytes for its tokens. Not of a language model."
    )

    def __init__(self, given: Input) -> None:
        self._given = given
        self.tenants: list[str] = []

    def batches(self) -> Iterator[Batch]:
        """Yield the requests; :class:`envs.workloads.readers.batch.Reader`."""
        for first, block in self._given.source.records(RECORD.itemsize):
            records = np.frombuffer(block, RECORD)
            size = records["size"].astype(np.int64)
            line = np.arange(first, first + len(records), dtype=np.int64)
            verdict = Verdict(len(records))
            verdict.require(good_sizes(size), self._explain(line, size))
            batch = make_batch(
                time=records["time"], line=line, key=mix64_array(records["object"]), size=size, output_tokens=object_tokens(size)
            )
            yield from verdict.sift(self._given, batch)

    def _explain(self, line: npt.NDArray[np.int64], size: npt.NDArray[np.int64]):  # type: ignore[no-untyped-def]
        return lambda row: TraceError(self._given.path, SIZE_EXPECTED, line=int(line[row]), excerpt=str(size[row]), unit="record")


def object_tokens(size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the completion tokens that objects of ``size`` bytes stand for: a quarter of them, at least one."""
    return np.maximum(size // 4, 1)


def looks_like(head: bytes) -> bool:
    """Tell whether the first bytes of a file are records of oracleGeneral: ascending times, sizes, and a future that is one."""
    records = np.frombuffer(head[: len(head) // RECORD.itemsize * RECORD.itemsize], RECORD)[:4096]
    if not len(records):
        return False
    following = records["next"]
    known = (following == -1) | (following == _NEVER) | ((following > 0) & (following < 2**48))
    ascending = np.diff(records["time"].astype(np.int64)) >= -60
    return bool(known.all() and ascending.all() and (records["size"] < 2**31).all())
