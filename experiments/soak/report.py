"""What a soak saw, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Resident bytes of one replica.

    Attributes:
        first: Mean over the first third.
        last: Mean over the last third.
        most: The most.
    """

    first: float
    last: float
    most: float

    @property
    def growth(self) -> float:
        """From the first to the last third."""
        return self.last - self.first

    @classmethod
    def of(cls, samples: Sequence[int]) -> Memory:
        """Return the figures of samples taken at equal distances; zeros without any."""
        if not samples:
            return cls(0.0, 0.0, 0.0)
        third = max(1, len(samples) // 3)
        return cls(sum(samples[:third]) / third, sum(samples[-third:]) / third, float(max(samples)))


@dataclass(frozen=True)
class SoakReport:
    """What a soak saw.

    Attributes:
        command: What reproduces it.
        seconds: For how long clients asked.
        answers: Answers by what they were: the header ``x-cache``, or how they failed.
        events: What else happened, counted.
        upstream: The model's calls by how they went.
        hit_seconds: How long each answer from the cache took, ascending.
        longest: The longest that a client waited for an answer.
        memory: By the replica's process.
        max_growth: Bytes by which a replica may grow.
        leaks: What was left at the end that should not be.
        violations: Violations by rule.
        examples: Some of them, in detail.
    """

    command: str
    seconds: float
    answers: Mapping[str, int]
    events: Mapping[str, int]
    upstream: Mapping[str, int]
    hit_seconds: tuple[float, ...]
    longest: float
    memory: Mapping[int, Memory]
    max_growth: int
    leaks: Mapping[str, Any]
    violations: Mapping[str, int]
    examples: tuple[Mapping[str, Any], ...]

    @property
    def requests(self) -> int:
        """Requests sent."""
        return sum(self.answers.values())

    @property
    def growth(self) -> float:
        """Bytes by which the replica grew that grew most."""
        return max((held.growth for held in self.memory.values()), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations and self.growth <= self.max_growth

    def broken(self, *rules: str) -> int:
        """Return how often these rules were broken."""
        return sum(self.violations.get(rule, 0) for rule in rules)

    def hit_quantile(self, share: float) -> float:
        """Return how long so many of the answers from the cache took at most, seconds; 0 without any."""
        return self.hit_seconds[min(len(self.hit_seconds) - 1, int(share * len(self.hit_seconds)))] if self.hit_seconds else 0.0

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the table: what, how much, and what is allowed (``""``: anything)."""
        faults = sum(count for kind, count in self.upstream.items() if kind in ("error", "cut", "silent"))
        calls = max(1, sum(self.upstream.values()))
        named = {
            "wrong answers": ("wrong_answer", "wrong_entry", "incomplete_answer", "wrong_offset"),
            "5xx that the model did not cause": ("server_error",),
            "broken streams and bodies that neither model nor client caused": (
                "broken_stream",
                "broken_json",
                "broken_connection",
            ),
            "requests without an answer": ("unanswered",),
            "directives not heeded": ("directive_ignored",),
            "answers served after their flush": ("flushed_answer",),
            "tasks, flights and Redis keys left": ("leaked",),
        }
        rows = [("seconds", f"{self.seconds:,.0f}", ""), ("requests", f"{self.requests:,}", "")]
        rows += [(f"  {name}", f"{count:,}", "") for name, count in self.answers.items()]
        rows += [(name, f"{count:,}", "") for name, count in self.events.items()]
        rows += [(f"model calls: {name}", f"{count:,}", "") for name, count in self.upstream.items()]
        rows += [
            ("model calls that failed", f"{faults / calls:.1%}", ""),
            ("answers from the cache, P50", f"{self.hit_quantile(0.5) * 1e3:.1f} ms", ""),
            ("answers from the cache, P99", f"{self.hit_quantile(0.99) * 1e3:.1f} ms", ""),
            ("longest wait", f"{self.longest:.1f} s", ""),
        ]
        for pid, held in self.memory.items():
            rows.append(
                (
                    f"memory of replica {pid}, first to last third",
                    f"{held.first / 2**20:.0f} to {held.last / 2**20:.0f} MiB ({held.growth / 2**20:+.1f})",
                    f"+{self.max_growth / 2**20:.0f} MiB",
                )
            )
        rows += [(name, f"{self.broken(*rules):,}", "0") for name, rules in named.items()]
        others = set(self.violations) - {rule for rules in named.values() for rule in rules}
        rows.append(("other violations", f"{self.broken(*others):,}", "0"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        return {
            "command": self.command,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "requests": self.requests,
            "answers": dict(self.answers),
            "events": dict(self.events),
            "upstream": dict(self.upstream),
            "hit_p50_seconds": self.hit_quantile(0.5),
            "hit_p99_seconds": self.hit_quantile(0.99),
            "longest_seconds": self.longest,
            "memory": {
                str(pid): {"first": held.first, "last": held.last, "most": held.most, "growth": held.growth}
                for pid, held in self.memory.items()
            },
            "max_growth": self.max_growth,
            "leaks": dict(self.leaks),
            "violations": dict(self.violations),
            "examples": [dict(example) for example in self.examples],
        }
