"""Which answers are kept and for how long, what callers may ask of the cache, and how streams are answered."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from serving.knobs import MIB
from serving.policy import CacheRules
from serving.settings.base import Settings, Share
from serving.settings.semantic import SemanticSettings


class AdmissionSettings(Settings):
    """Which answers are kept; only complete ones ever are.

    Attributes:
        tool_calls: Whether answers that call tools are kept.
        max_temperature: Answers to a higher temperature are not kept; null: any is.
        max_entry_bytes: Largest answer that is kept.
        min_logprob: Answers whose mean token log-probability is known and below this are not kept; null: any are.
        heed_no_store: Whether answers that the upstream marks ``Cache-Control: no-store`` are not kept. Some hosted models mark
            all of theirs.
    """

    tool_calls: bool = False
    max_temperature: Annotated[float, Field(ge=0.0)] | None = 1.0
    max_entry_bytes: Annotated[int, Field(gt=0)] = 4 * MIB
    min_logprob: Annotated[float, Field(le=0.0)] | None = -2.3
    heed_no_store: bool = False


class CallerSettings(Settings):
    """What callers may ask of the cache, by ``Cache-Control`` or the body's ``cache`` object.

    Attributes:
        directives: Whether they are heeded at all.
        namespaces: Whether a caller may divide its cache by a name of its own.
        min_ttl: Least TTL of an entry that a caller may ask for, seconds. The arm's TTL is the greatest.
        debug: Whether ``x-cache-...`` headers are sent; ``Cache-Status`` and ``Age`` always are.
    """

    directives: bool = True
    namespaces: bool = True
    min_ttl: Annotated[float, Field(ge=0.0)] = 0.0
    debug: bool = True


class StreamSettings(Settings):
    """Streamed answers.

    Attributes:
        usage: Whether the upstream is asked for the tokens of a stream, which the tuner needs for its prices; a client that did
            not ask does not see them.
        resume: How an interrupted stream goes on for a client that comes back: ``replay``: the model is asked again, and the
            rest is passed on if it repeats in content what the client has; ``continue``: the model continues the text
            (vLLM's ``continue_final_message``).
        grace: Seconds that a stream runs on after its last reader went away, so that one who comes back finds it.
        keep_partial: Whether interrupted streams are kept for such readers.
    """

    usage: bool = True
    resume: Literal["replay", "continue"] = "replay"
    grace: Annotated[float, Field(ge=0.0)] = 2.0
    keep_partial: bool = True


class RulesSettings(Settings):
    """Rules of the cache that are not knobs.

    Attributes:
        l1_share: Share of an arm's budget that may be resident in the memory tier.
        ttl_jitter: Width of the deterministic jitter on the TTL of each key, against expiry storms.
        staleness_half_life: Seconds after which an answer is outdated with probability one half; null means never.
        stale_while_revalidate: Seconds past its TTL that an entry is still served while it is refreshed (RFC 5861).
        stale_if_error: Seconds past its TTL that an entry is still served where the upstream fails (RFC 5861).
        hit_extends_ttl: Whether a hit begins an entry's life anew.
        semantic: Answers by meaning.
    """

    l1_share: Share = 0.25
    ttl_jitter: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    staleness_half_life: Annotated[float, Field(gt=0.0)] | None = None
    stale_while_revalidate: Annotated[float, Field(ge=0.0)] = 0.0
    stale_if_error: Annotated[float, Field(ge=0.0)] = 0.0
    hit_extends_ttl: bool = False
    semantic: SemanticSettings = SemanticSettings()

    def rules(self) -> CacheRules:
        """Return the rules as the decision core takes them."""
        return CacheRules(
            l1_share=self.l1_share,
            ttl_jitter=self.ttl_jitter,
            staleness_half_life=self.half_life,
            semantic_threshold=self.semantic.threshold,
            stale_while_revalidate=self.stale_while_revalidate,
            stale_if_error=self.stale_if_error,
            hit_extends_ttl=self.hit_extends_ttl,
        )

    @property
    def half_life(self) -> float:
        """``staleness_half_life`` as a number; ``inf`` for never."""
        return math.inf if self.staleness_half_life is None else self.staleness_half_life
