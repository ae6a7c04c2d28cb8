"""What to do with the cache, and how sure that is: settings as they turned out, savings with their intervals, the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from agents.words import knob_words, ttl_words
from envs.objective import Prices
from envs.simulator import SimConfig
from experiments.scenarios import MEAN_SERVICE
from experiments.sensitivity import Sensitivity
from experiments.simulate import Load, Row, Totals, Usages, cost_of, gathered, jsonable, model_words, totals, vars_of
from experiments.stats import Interval
from experiments.verdict import usd
from serving.knobs import Knobs

GHOST_KEYS = 8_000
"""Keys that the ghost samples of a longer trace."""

CHOSEN_ON = 0.7
"""Share of the requests that the choice is made on; the rest is held out."""

BATCHES = 20
FEWEST_PER_BATCH = 100
"""The trace is cut into up to 20 batches of equally many requests, none smaller than 100: how much costs differ between them says
what is noise."""

FEWEST_BATCHES = 7
"""With fewer there are not two held-out batches to tell noise by."""

WORTH_IT = 0.01
"""Changes that save less than this share are not worth making: the simulator itself is held to the gateway within a point."""

CONFIDENCE = 0.95
"""Level of every interval."""


@dataclass(frozen=True)
class Outcome:
    """What one setting would have done, exactly.

    Attributes:
        knobs: The setting.
        batches: Its windows, by batch of the trace.
    """

    knobs: Knobs
    batches: tuple[tuple[Row, ...], ...]

    @cached_property
    def _usages(self) -> list[Usages]:
        return [gathered(rows) for rows in self.batches]

    def totals(self, prices: Prices, batches: slice = slice(None)) -> Totals:
        """Return the figures of some batches together."""
        return totals(list(chain.from_iterable(self.batches[batches])), prices)

    def cost(self, prices: Prices, batches: slice = slice(None)) -> float:
        """Return US dollars per 1,000 requests of some batches together."""
        return cost_of(np.vstack(self._usages[batches]), prices).total

    @property
    def hit_ratio(self) -> float:
        """Of the whole trace."""
        seen = [row.figures.signals for row in chain.from_iterable(self.batches) if row.figures.signals.requests > 0]
        return sum(item.hit_ratio * item.requests for item in seen) / max(sum(item.requests for item in seen), 1.0)

    def requests(self, batches: slice = slice(None)) -> float:
        """Return the requests of some batches together."""
        return sum(row.figures.signals.requests for row in chain.from_iterable(self.batches[batches]))


@dataclass(frozen=True)
class Grid:
    """The curve over size and TTL.

    Attributes:
        sizes: Bytes, ascending, shape (S,).
        ttls: Seconds, ascending, shape (T,); the last is infinite.
        hit_ratio: Of the whole trace, shape (S, T).
        cost: US dollars per 1,000 requests of the whole trace, shape (S, T).
        exact: Whether every setting was simulated; else both are estimated by a ghost curve.
    """

    sizes: npt.NDArray[np.int64]
    ttls: npt.NDArray[np.float64]
    hit_ratio: npt.NDArray[np.float64]
    cost: npt.NDArray[np.float64]
    exact: bool


@dataclass(frozen=True)
class Facts:
    """What is known of a trace before anything is simulated.

    Attributes:
        name: Its name.
        note: What it is and is not.
        kind: ``exact`` or ``semantic``.
        requests: Requests.
        duration: Seconds from the first to the last.
        keys: Most entries that an unlimited cache held at any one time.
        footprint: The bytes of these.
        load: What a model behind no cache would carry.
        input_tokens: Mean prompt tokens.
        changes: Updates of documents and flushes in it.
    """

    name: str
    note: str
    kind: str
    requests: int
    duration: float
    keys: int
    footprint: int
    load: Load
    input_tokens: float
    changes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it, JSON-ready."""
        values = {name: value for name, value in vars(self).items() if name != "load"}
        return {**values, "rate": self.load.rate, "output_tokens": self.load.output_tokens}


@dataclass(frozen=True)
class Choice:
    """What would be recommended under given prices.

    Attributes:
        knobs: The cheapest setting on the part of the trace that is chosen on.
        saving: What it saves against the current setting, or the best without expiry where there is none, on the held-out part;
            a share of that one's cost.
        change: Whether the current setting should be given up for it; True where there is none.
    """

    knobs: Knobs
    saving: float
    change: bool


@dataclass(frozen=True)
class Saving:
    """What the recommended setting saves against another, US dollars per 1,000 requests.

    Attributes:
        chosen_on: On the part that it was chosen on: too good by nature.
        held_out: On the rest, with a 95 % interval by batches.
        whole: On the whole trace.
        share: ``held_out`` as a share of the other's cost there.
        share_whole: ``whole`` as a share of the other's cost there.
    """

    chosen_on: float
    held_out: Interval
    whole: float
    share: float
    share_whole: float


@dataclass(frozen=True)
class Advice:
    """What to do with the cache, and why.

    Attributes:
        facts: The trace.
        config: The simulator's settings.
        sized: Whether the model was sized for the trace's load.
        prices: What things cost.
        grid: The curve.
        recommended: The cheapest setting on the first part.
        current: The setting in force, None where it was not told.
        references: Other settings to compare with, by name: ``best without expiry``, ``no cache``, ``unlimited cache`` (priced at
            what it held).
        hindsight: The cheapest setting of the whole trace, which nobody could have known.
        chosen_on: Batches that the choice was made on.
        held_out: The others.
        outlook: The choice under each price halved and doubled.
        verdict: ``change``, ``keep``, ``use`` (no current setting is known) or ``not enough data``.
        reason: Why, in words.
        warnings: What a reader of the numbers has to know.
        simulated: Settings that were simulated exactly.
    """

    facts: Facts
    config: SimConfig
    sized: bool
    prices: Prices
    grid: Grid
    recommended: Outcome
    current: Outcome | None
    references: Mapping[str, Outcome]
    hindsight: Outcome
    chosen_on: slice
    held_out: slice
    outlook: Sensitivity[Choice]
    verdict: str
    reason: str
    warnings: Sequence[str]
    simulated: int

    @property
    def method(self) -> str:
        """How the numbers came about, in one sentence."""
        if self.grid.exact:
            return f"every setting of the grid was simulated exactly, {self.simulated} runs in all"
        return (
            f"the curve is a ghost's estimate from a sample of at most {GHOST_KEYS:,} keys; the {self.simulated} settings that "
            "matter were simulated exactly, and savings are between these"
        )

    @property
    def compared(self) -> dict[str, Outcome]:
        """The settings that the recommended one is compared with, by name; the current one first."""
        return {**({"current": self.current} if self.current is not None else {}), **self.references}

    def saving(self, other: Outcome) -> Saving:
        """Return what the recommended setting saves against another."""
        return saving_of(self.recommended, other, self.prices, self.chosen_on, self.held_out)

    @property
    def model(self) -> str:
        """The model behind the cache, in words."""
        return model_words(self.config.upstream, self.facts.load if self.sized else None)

    @property
    def per_day(self) -> float:
        """Thousands of requests in a day at the trace's mean rate: what turns a cost into dollars a day."""
        return self.facts.load.rate * 86.4

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-ready: what is not known, and an infinite duration, is None."""
        settings = {"recommended": self.recommended, **self.compared, "hindsight": self.hindsight}
        return {
            "trace": self.facts.to_dict(),
            "method": self.method,
            "exact": self.grid.exact,
            "verdict": self.verdict,
            "reason": self.reason,
            "recommended": self.recommended.knobs.to_dict(),
            "current": None if self.current is None else self.current.knobs.to_dict(),
            "settings": {name: self._figures(outcome) for name, outcome in settings.items()},
            "savings": {name: self._saving_dict(outcome) for name, outcome in self.compared.items()},
            "sensitivity": jsonable(
                self.outlook.to_rows(
                    lambda choice: {
                        "knobs": choice.knobs.to_dict(),
                        "saving_held_out": choice.saving,
                        "change": choice.change,
                    }
                )
            ),
            "curve": jsonable(
                {
                    "sizes": self.grid.sizes.tolist(),
                    "ttls": self.grid.ttls.tolist(),
                    "hit_ratio": self.grid.hit_ratio.tolist(),
                    "cost_per_1000": self.grid.cost.tolist(),
                }
            ),
            "model": {**jsonable(vars_of(self.config.upstream)), "words": self.model},
            "prices": vars_of(self.prices),
            "prefix": self.config.prefix,
            "staleness_half_life": jsonable(self.config.staleness_half_life),
            "held_out_share": round(1 - CHOSEN_ON, 2),
            "warnings": list(self.warnings),
        }

    def _figures(self, outcome: Outcome) -> dict[str, Any]:
        parts = {"chosen_on": self.chosen_on, "held_out": self.held_out, "whole": slice(None)}
        return {
            "knobs": outcome.knobs.to_dict(),
            **{name: outcome.totals(self.prices, part).to_dict() for name, part in parts.items()},
        }

    def _saving_dict(self, other: Outcome) -> dict[str, Any]:
        saving = self.saving(other)
        return {
            "chosen_on": jsonable(saving.chosen_on),
            "held_out": saving.held_out.to_dict(),
            "held_out_share": jsonable(saving.share),
            "whole": jsonable(saving.whole),
            "whole_share": jsonable(saving.share_whole),
            "held_out_dollars_a_day": jsonable(saving.held_out.value * self.per_day),
        }


def saving_of(best: Outcome, other: Outcome, prices: Prices, chosen_on: slice, held_out: slice) -> Saving:
    """Return what one setting saves against another.

    Args:
        best: The one.
        other: The other.
        prices: What things cost.
        chosen_on: Batches that the choice was made on.
        held_out: The others.
    """

    def difference(part: slice) -> float:
        return other.cost(prices, part) - best.cost(prices, part)

    whole = slice(None)
    late, all_of_it = other.cost(prices, held_out), other.cost(prices, whole)
    each = [
        other.cost(prices, slice(place, place + 1)) - best.cost(prices, slice(place, place + 1))
        for place in range(*held_out.indices(len(best.batches)))
    ]
    weights = np.array([best.requests(slice(place, place + 1)) for place in range(*held_out.indices(len(best.batches)))])
    value = difference(held_out)
    return Saving(
        chosen_on=difference(chosen_on),
        held_out=_interval(value, np.array(each), weights),
        whole=difference(whole),
        share=value / late if late > 0 else math.nan,
        share_whole=difference(whole) / all_of_it if all_of_it > 0 else math.nan,
    )


def _interval(value: float, each: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> Interval:
    """Return a 95 % interval by batch means: Student's t over the batches' differences, weighted by their requests."""
    count = len(each)
    if count < 2 or not np.all(np.isfinite(each)) or not weights.sum() > 0:
        return Interval(value)
    share = weights / weights.sum()
    error = math.sqrt(float((share**2 @ (each - share @ each) ** 2) * count / (count - 1)))
    margin = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
    return Interval(value, value - margin, value + margin)


def worth_it(saving: Saving) -> bool:
    """Whether a change that saves this should be made: clear of noise on the held-out part, and not too small."""
    return saving.held_out.known and saving.held_out.low > 0 and saving.share >= WORTH_IT


def judge(advice: Advice) -> tuple[str, str]:
    """Return the verdict and its reason, both as :class:`Advice` has them."""
    best = knob_words(advice.recommended.knobs)
    if len(advice.recommended.batches) < FEWEST_BATCHES:
        return "not enough data", (
            f"{advice.facts.requests:,} requests are too few to hold any out (about {FEWEST_BATCHES * FEWEST_PER_BATCH} are "
            f"needed): keep what you have. The cheapest setting of these requests is {best}."
        )
    if advice.current is None:
        static = advice.references["best without expiry"]
        saving = advice.saving(static)
        if static is advice.recommended:
            return "use", f"{best} is the cheapest setting; it is the best without expiry."
        return "use", (
            f"{best} is the cheapest setting. Against the best without expiry ({knob_words(static.knobs)}) it saves "
            f"{_amount(saving)} on the held-out rest of the trace."
        )
    now = knob_words(advice.current.knobs)
    if advice.recommended is advice.current:
        return "keep", f"keep what you have: no setting that was tried is cheaper than {now}."
    saving = advice.saving(advice.current)
    if worth_it(saving):
        return "change", f"{best} instead of {now} saves {_amount(saving)} on the held-out rest of the trace."
    if saving.held_out.value <= 0:
        why = f"{best} was cheaper on the part that it was chosen on, but costs {usd(-saving.held_out.value)} more on the rest"
    elif saving.held_out.known and saving.held_out.low > 0:
        why = f"{best} saves {_amount(saving)} on the held-out rest: less than {WORTH_IT:.0%} is not worth a change"
    else:
        why = f"{best} saves {_amount(saving)} on the held-out rest: within noise"
    return "keep", f"keep what you have ({now}): {why}."


def _amount(saving: Saving) -> str:
    low, high = saving.held_out.low, saving.held_out.high
    bounds = f", {CONFIDENCE:.0%} interval {_signed(low)} to {_signed(high)}" if saving.held_out.known else ""
    return f"{usd(saving.held_out.value)} per 1,000 requests ({saving.share:.1%}{bounds})"


def _signed(value: float) -> str:
    return ("−" if value < 0 else "") + usd(abs(value))


def remarks(advice: Advice, outcomes: Mapping[Knobs, Outcome]) -> list[str]:
    """Return what a reader of an advice has to know.

    Args:
        advice: The advice.
        outcomes: Every setting that was simulated.
    """
    found = []
    facts, knobs, grid = advice.facts, advice.recommended.knobs, advice.grid
    if knobs.cache_size == 0:
        found.append("Under these prices no cache is the cheapest: what hits save is less than memory and outdated answers cost.")
    elif knobs.cache_size == int(grid.sizes[-1]) and int(grid.sizes[-1]) < facts.footprint:
        found.append("The recommended size is the largest that was allowed: a larger one may be cheaper still.")
    if math.isinf(advice.config.staleness_half_life) and not facts.changes:
        text = (
            "Nothing in this run makes answers outdated (no half-life was given, and the trace has no updates), so a TTL can "
            "only cost here."
        )
        shortest = _shortest_ttl(advice, outcomes)
        if shortest is not None:
            text += f" The shortest that costs at most 1% more at the recommended size is {ttl_words(shortest)}."
        found.append(text)
    if knobs.cache_size > 0 and knobs.ttl > facts.duration:
        found.append(
            f"No entry gets older than the trace is long ({ttl_words(facts.duration)}), so ttl {ttl_words(knobs.ttl)} means: no "
            "shorter than that. Whether entries that live longer would pay, or be outdated, this trace cannot tell."
        )
    if advice.sized:
        found.append(
            f"The model is made up: {MEAN_SERVICE:g} s for a mean answer of {facts.load.output_tokens:,.0f} tokens. Waiting and "
            "P99 follow from it; behind a slower one hits are worth more, so larger caches and longer TTLs pay. Give --slots, "
            "--ttft and --tpot."
        )
    least = advice.hindsight.cost(advice.prices)
    gap = advice.recommended.cost(advice.prices) / least - 1 if least > 0 else 0.0
    if advice.hindsight is not advice.recommended and gap > 0.001:
        found.append(
            f"With hindsight over the whole trace {knob_words(advice.hindsight.knobs)} would have been the cheapest; the choice "
            f"costs {gap:.1%} more."
        )
    turned = advice.outlook.changed(lambda choice: choice.change)
    if turned:
        found.append("Another price turns the verdict round: " + "; ".join(move.words for move in turned) + ".")
    return found


def _shortest_ttl(advice: Advice, outcomes: Mapping[Knobs, Outcome]) -> float | None:
    knobs = advice.recommended.knobs
    best = advice.recommended.cost(advice.prices, advice.chosen_on)
    for ttl in advice.grid.ttls:
        other = outcomes.get(replace(knobs, ttl=float(ttl)))
        if other is not None and ttl < knobs.ttl and other.cost(advice.prices, advice.chosen_on) <= 1.01 * best:
            return float(ttl)
    return None
