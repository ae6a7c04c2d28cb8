"""The article's dynamic TTL: answers live longer under load, and shorter where they turn out wrong."""

from __future__ import annotations

import math

from agents.policy import Proposal
from agents.words import parameter_words, ttl_words
from envs.observation import Observation
from serving.knobs import Knobs

LOWEST, HIGHEST = 0.5, 2.0
_ABSURD = 1e15


def ttl_factor(error_rate: float, qps: float) -> float:
    """Return the article's factor on the TTL: ``clip(1.5 - 2 x error_rate + 0.3 x log10(qps + 1), 0.5, 2)``.

    Args:
        error_rate: Share of the answers that are wrong, 0..1.
        qps: Requests per second, >= 0.
    """
    return min(max(1.5 - 2.0 * error_rate + 0.3 * math.log10(qps + 1.0), LOWEST), HIGHEST)


class TTLRulePolicy:
    """A base TTL times :func:`ttl_factor`.

    **Source.** The dynamic TTL rule of the article behind the product (a Qwen-7B service), as a formula; it has no code.

    **Adapted.** The rule's error rate is that of a service; the signals here know no such rate. What errs in a cache is an answer
    that is no longer true, so the error rate is the measured stale share of hits (expected stale hits over hits; without hits
    there is no wrong answer: 0). Requests per second are those of the workload's own time, which a compressed replay runs
    through faster. The base is given, or the TTL in force when the policy is first asked: the operator's. The other knobs are
    left as they are. What to expect of it: without errors the factor is never below 1.5, and from 46 requests per second on it
    is 2; it looks neither at prices nor at what a longer TTL brings.

    Args:
        base: The base TTL, seconds; None: the one in force when it is first asked.

    Raises:
        ValueError: If ``base`` is not a finite number > 0.
    """

    def __init__(self, base: float | None = None) -> None:
        if base is not None and not 0.0 < base < math.inf:
            raise ValueError(f"ttl rule: base: expected a finite number of seconds > 0, got {base!r}")
        self.base = base
        self.reset()

    @property
    def name(self) -> str:
        """``ttl-rule``, with the base where one is given: ``ttl-rule:base=3600``."""
        return "ttl-rule" + (parameter_words({"base": self.base}, {"base": math.nan}) if self.base is not None else "")

    def reset(self) -> None:
        """Forget the TTL that was in force at first."""
        self._base = self.base

    def decide(self, observation: Observation) -> Proposal:
        """Return the rule's TTL, or the current knobs where load or staleness are not known."""
        space, signals = observation.space, observation.signals
        current = space.clip(observation.knobs)
        if self._base is None:
            self._base = current.ttl
        qps, hits = signals.qps / observation.prices.time_scale, signals.requests * signals.hit_ratio
        if not 0.0 <= qps < _ABSURD:
            return Proposal(current, "held: the requests per second are not known")
        if not (0.0 <= hits < _ABSURD and 0.0 <= signals.stale_hits < _ABSURD):
            return Proposal(current, "held: the stale share of hits is not known")
        error_rate = min(signals.stale_hits / hits, 1.0) if hits > 0 else 0.0
        factor = ttl_factor(error_rate, qps)
        ttl = self._base * factor
        knobs = Knobs(current.cache_size, min(max(ttl, space.min_ttl), space.max_ttl), current.warmup_ratio)
        bounded = "" if knobs.ttl == ttl else f", bounded to {ttl_words(knobs.ttl)}"
        return Proposal(
            knobs,
            f"ttl {ttl_words(self._base)} x {factor:.2f} = {ttl_words(ttl)}{bounded}: {error_rate:.1%} of hits stale, {qps:.3g} "
            "requests/s",
            {"factor": factor, "error_rate": error_rate, "qps": qps, "base_ttl": self._base},
        )
