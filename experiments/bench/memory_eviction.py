"""Which eviction a memory tier should have: the hit ratio per byte of CLOCK, SIEVE and S3-FIFO beside LRU's on the real traces.

Each policy is written here once more in its simplest form, from its paper, so that the choice can be checked without the arena:
CLOCK (second chance) and GCLOCK (up to three of them), SIEVE (Zhang et al., NSDI 2024), S3-FIFO (Yang et al., SOSP 2023; a tenth
of the bytes for what is new).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from envs.workloads import Trace, load

SHARES = (0.01, 0.05, 0.1, 0.2, 0.4)
"""Budgets, in shares of the bytes of all that a trace asks for."""

TRACES = (
    "mooncake_conversation.jsonl.gz", "elastic_apache.csv.gz", "banking77.csv.gz", "servegen_m_large.csv.gz",
    "azure2023_conv.csv.gz",
)  # fmt: skip


class Policy(Protocol):
    """A cache of ids under a byte budget."""

    def ask(self, key: int, size: int) -> bool:
        """Whether the key was held; it is afterwards, unless it is larger than the budget."""
        ...


class LRU:
    """The least recently used goes first."""

    def __init__(self, budget: int) -> None:
        self.budget, self.used = budget, 0
        self.held: OrderedDict[int, int] = OrderedDict()

    def ask(self, key: int, size: int) -> bool:
        """Whether the key was held; it is afterwards."""
        if key in self.held:
            self.held.move_to_end(key)
            return True
        if size > self.budget:
            return False
        while self.used + size > self.budget:
            self.used -= self.held.popitem(last=False)[1]
        self.held[key] = size
        self.used += size
        return False


class Clock:
    """First in, first out, with one more round for what was asked for meanwhile; or several, for what was asked for often.

    Args:
        budget: Bytes.
        most: Rounds that an entry can be ahead; 1: CLOCK, more: GCLOCK.
    """

    def __init__(self, budget: int, most: int = 1) -> None:
        self.budget, self.used, self.most = budget, 0, most
        self.held: OrderedDict[int, int] = OrderedDict()
        self.rounds: dict[int, int] = {}

    def ask(self, key: int, size: int) -> bool:
        """Whether the key was held; it is afterwards."""
        if key in self.held:
            self.rounds[key] = min(self.most, self.rounds.get(key, 0) + 1)
            return True
        if size > self.budget:
            return False
        while self.used + size > self.budget:
            oldest = next(iter(self.held))
            left = self.rounds.pop(oldest, 0)
            if left:
                self.held.move_to_end(oldest)
                if left > 1:
                    self.rounds[oldest] = left - 1
            else:
                self.used -= self.held.pop(oldest)
        self.held[key] = size
        self.used += size
        return False


class Sieve:
    """A hand goes from the oldest to the newest, spares once what was asked for, and nothing ever moves."""

    def __init__(self, budget: int) -> None:
        self.budget, self.used = budget, 0
        self.held: dict[int, int] = {}
        self.visited: set[int] = set()
        self.newer: dict[int, int | None] = {}
        self.older: dict[int, int | None] = {}
        self.newest: int | None = None
        self.oldest: int | None = None
        self.hand: int | None = None

    def ask(self, key: int, size: int) -> bool:
        """Whether the key was held; it is afterwards."""
        if key in self.held:
            self.visited.add(key)
            return True
        if size > self.budget:
            return False
        while self.used + size > self.budget:
            self._evict()
        self.held[key] = size
        self.used += size
        self.older[key], self.newer[key] = self.newest, None
        if self.newest is not None:
            self.newer[self.newest] = key
        else:
            self.oldest = key
        self.newest = key
        return False

    def _evict(self) -> None:
        at = self.hand if self.hand is not None else self.oldest
        while at is not None and at in self.visited:
            self.visited.discard(at)
            at = self.newer[at]
            if at is None:
                at = self.oldest
        assert at is not None
        older, newer = self.older.pop(at), self.newer.pop(at)
        if older is not None:
            self.newer[older] = newer
        else:
            self.oldest = newer
        if newer is not None:
            self.older[newer] = older
        else:
            self.newest = older
        self.hand = newer
        self.used -= self.held.pop(at)


class S3Fifo:
    """A small queue for what is new, a main one for what was asked for again, and a memory of what was dropped too soon."""

    def __init__(self, budget: int, small: float = 0.1) -> None:
        self.budget, self.small_budget = budget, int(budget * small)
        self.small_used = self.main_used = self.ghost_used = 0
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghost: OrderedDict[int, int] = OrderedDict()
        self.held: dict[int, int] = {}
        self.times: dict[int, int] = {}

    def ask(self, key: int, size: int) -> bool:
        """Whether the key was held; it is afterwards."""
        if key in self.held:
            self.times[key] = min(3, self.times[key] + 1)
            return True
        if size > self.budget:
            return False
        while self.small_used + self.main_used + size > self.budget:
            if self.small and (self.small_used > self.small_budget or not self.main):
                self._from_small()
            else:
                self._from_main()
        self.held[key], self.times[key] = size, 0
        if key in self.ghost:
            self.ghost_used -= self.ghost.pop(key)
            self.main.append(key)
            self.main_used += size
        else:
            self.small.append(key)
            self.small_used += size
        return False

    def _from_small(self) -> None:
        key = self.small.popleft()
        size = self.held[key]
        self.small_used -= size
        if self.times[key] > 1:
            self.times[key] = 0
            self.main.append(key)
            self.main_used += size
            return
        del self.held[key], self.times[key]
        self.ghost[key] = size
        self.ghost_used += size
        while self.ghost_used > self.budget - self.small_budget:
            self.ghost_used -= self.ghost.popitem(last=False)[1]

    def _from_main(self) -> None:
        while True:
            key = self.main.popleft()
            if self.times[key] == 0:
                self.main_used -= self.held.pop(key)
                del self.times[key]
                return
            self.times[key] -= 1
            self.main.append(key)


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "LRU": LRU, "CLOCK": Clock, "GCLOCK": lambda budget: Clock(budget, 3), "SIEVE": Sieve, "S3-FIFO": S3Fifo,
}  # fmt: skip


def hit_ratio(trace: Trace, policy: Policy) -> float:
    """Return the share of the trace's requests that the policy has when they come; each takes the bytes of its answer."""
    ids, sizes = _numbered(trace)
    return sum(policy.ask(key, sizes[key]) for key in ids) / max(1, len(ids))


def _numbered(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the requests' keys as numbers from 0 on, and the bytes of each key: those of its first answer."""
    _, first, ids = np.unique(trace.key, return_index=True, return_inverse=True)
    return ids.tolist(), trace.size[first].tolist()


def compare(traces: Path, *, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Return a row for each trace and budget: ``trace``, ``budget_share``, ``budget_mib`` and each policy's hit ratio.

    Args:
        traces: Folder of the traces; those that are not there, or in which nothing recurs, are left out.
        say: Told what happens.
    """
    rows = []
    for name in TRACES:
        if not (traces / name).is_file():
            continue
        trace = load(traces / name)
        ids, sizes = _numbered(trace)
        if len(sizes) == len(ids):
            continue
        say(f"eviction on {name}: {len(trace):,} requests")
        whole = sum(sizes)
        for share in SHARES:
            budget = int(whole * share)
            row: dict[str, Any] = {"trace": name.partition(".")[0], "budget_share": share, "budget_mib": budget / 2**20}
            for label, make in POLICIES.items():
                ask = make(budget).ask
                row[label] = sum(ask(key, sizes[key]) for key in ids) / len(ids)
            rows.append(row)
    return rows
