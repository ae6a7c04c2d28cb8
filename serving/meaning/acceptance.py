"""Which answers by meaning may be served, so that at most a stated share of them is wrong.

An operator knows how many wrong answers are bearable, not which cosine that is. So for each cached question it is learned, from
outcomes that were verified, how likely its answer is wrong at a similarity (:mod:`serving.meaning.acceptance_model`). A request
whose nearest question may be trusted is answered from the cache; otherwise it is *explored*: the model is asked, as on any
miss, and what it answers tells whether the cached answer would have been right. Exploring costs nothing but the hit.

Two readings of "at most a share ``max_error`` is wrong":

* ``over="lookups"``, as in vCache: of all requests that are looked up by meaning. vCache answers each with probability ``min(1,
  max_error / p)`` where ``p`` bounds its error, which spends the same share of the bearable errors on every request. Here they
  are spent where they buy the most hits: on the surest answers, up to the ``p`` at which the lookups' sum of errors comes to
  ``max_error`` in the mix of the latest ones. An account sees to it whatever the mix becomes: each lookup is credited
  ``max_error``, each answer costs its ``p``, and nothing is served on credit.
* ``over="answers"``: of the answers that are served. The cache answers where ``p <= max_error``. Stricter, since not every
  lookup is answered: it implies the first.

A caller's tighter bound holds for each of its own lookups, whatever others ask: it is vCache's rule, on top of the operator's.
What is more likely wrong than right is never served. In all, a share ``audit`` of what could be served is explored
nevertheless: an entry that is always served is never verified again. Whether a lookup is explored never depends on the answer,
so the outcomes are a fair sample at each similarity; among them are more of the entries that were wrong before, which errs on
the safe side.

*Drift.* Outcomes count half after ``memory`` further ones, and an entry keeps its newest alone. Beside, each outcome is a bet
against the bound that was stated for it: wealth ``x (1 + 3 (wrong - p))``, never below 1. As long as the bounds hold, it takes
at least :data:`ALARM` outcomes on average until the wealth reaches :data:`ALARM` (an e-detector: Shin, Ramdas, Rinaldo, arXiv
2203.03532). When it does, the world has changed: nine tenths of the weight of what was learned is dropped, and all is explored
until it is learned anew.

What people say weighs more: an entry that got more ``bad`` than ``good`` is not served by meaning at all, and a verdict counts as
several outcomes of that entry. It does not enter the pool, since nobody reports a fair sample.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from serving.meaning.acceptance_model import BINS, Floats, PoolModel, bin_of, fit_entries, fit_pool

OUTCOMES = 16
"""Outcomes kept per entry."""

FEEDBACK_WEIGHT = 5.0
"""Outcomes that one verdict of a person counts as."""

LEAST_OUTCOMES = 30
"""Verified outcomes, of all entries together, before anything is served."""

ALARM = 1000.0
_BET = 3.0
_BET_LIMIT = 0.1
"""Bets are made on bounds up to this: where errors are expected anyway, none is surprising."""

_FORGOTTEN = 0.1
_MIX = 2_000.0
"""Lookups after which one counts half in the mix and in the account."""

_COSTS = tuple(0.5 * 10.0 ** (-step / 20) for step in range(80, -1, -1))
"""Upper edges of the classes of p in which the mix is counted."""

_REVIEW = 64
_MIX_DECAY = 0.5 ** (1.0 / _MIX)
_FIT_SAMPLE = 2048
_FIRST_FIT = 16
_OUTBOX = 10_000
_FORM = 1

Over = Literal["lookups", "answers"]


class Outcome(NamedTuple):
    """What was learned about a cached answer.

    Attributes:
        key: The entry's key.
        similarity: Cosine between its question and the one that was asked, 0..1.
        right: Whether its answer would have been right.
        feedback: Whether a person said so, not a comparison with the model's own answer.
    """

    key: bytes
    similarity: float
    right: bool
    feedback: bool = False


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """What is known, for operators.

    Attributes:
        outcomes: Verified outcomes taken in since the start, verdicts of people not counted.
        entries: Entries with outcomes.
        lapse: Expected share of wrong answers that no similarity tells, 0..1; NaN before the first fit.
        spread: Standard deviation of how the entries differ, in logits; NaN before the first fit.
        alarms: How often the bounds were found not to hold, and what was learned was dropped.
    """

    outcomes: int
    entries: int
    lapse: float
    spread: float
    alarms: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit under way: the outcomes as they were when it began. Made by :meth:`Acceptance.begin_fit`."""

    right: Floats
    wrong: Floats
    sample: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    owners: tuple[bytes | None, ...]
    bins: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float32]
    alarms: int

    def compute(self) -> tuple[PoolModel, Floats, Floats]:
        """Return the population and the entries' shifts. Pure: for a thread of an executor."""
        model = fit_pool(self.right, self.wrong, self.bins[self.sample], self.weights[self.sample])
        return (model, *fit_entries(model, self.bins, self.weights))


class Acceptance:
    """Learns which answers by meaning may be served. One event loop; only :meth:`Fit.compute` may run elsewhere. No clock, no
    chance.

    Memory is bounded: about 300 bytes per entry with outcomes, of which the ``max_entries`` that were observed last are kept.

    Args:
        max_error: Largest share of wrong answers, 0..1.
        over: Of which whole that is a share; see the module.
        audit: Share of what could be served that is explored nevertheless, 0..1.
        max_entries: Entries whose outcomes are kept.
        memory: Outcomes after which one counts half.

    Raises:
        ValueError: If a value is out of its range.
    """

    def __init__(
        self,
        max_error: float,
        *,
        over: Over = "lookups",
        audit: float = 0.02,
        max_entries: int = 32_768,
        memory: float = 20_000.0,
    ) -> None:
        if not 0.0 < max_error < 1.0:
            raise ValueError(f"acceptance: max_error: expected a share above 0 and below 1, got {max_error!r}")
        if over not in ("lookups", "answers"):
            raise ValueError(f"acceptance: over: expected 'lookups' or 'answers', got {over!r}")
        if not 0.0 < audit < 1.0:
            raise ValueError(f"acceptance: audit: expected a share above 0 and below 1, got {audit!r}")
        if max_entries < 1 or not memory >= LEAST_OUTCOMES:
            raise ValueError(
                f"acceptance: expected max_entries >= 1 and memory >= {LEAST_OUTCOMES}, got {max_entries!r} and {memory!r}"
            )
        self._max_error = max_error
        self._over = over
        self._audit = audit
        self._max_entries = max_entries
        self._decay = 0.5 ** (1.0 / memory)
        self._model: PoolModel | None = None
        # weights grow instead of all older ones shrinking: adding an outcome is O(1)
        self._unit = 1.0
        self._right = np.zeros(BINS)
        self._wrong = np.zeros(BINS)
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._owners: list[bytes | None] = []
        self._bins = np.zeros((0, OUTCOMES), np.int16)
        self._weights = np.zeros((0, OUTCOMES), np.float32)
        self._next = np.zeros(0, np.int64)
        self._verdicts = np.zeros(0, np.int32)
        self._mean = np.zeros(0)
        self._deviation = np.zeros(0)
        self._fitted = np.zeros(0, bool)
        self._dirty: set[int] = set()
        self._turn = 0
        self._count = 0
        self._evidence = 0
        self._since_fit = 0
        self._wealth = 1.0
        self._alarms = 0
        self._outbox: deque[Outcome] = deque(maxlen=_OUTBOX)
        self._mix = [0.0] * (len(_COSTS) + 1)
        self._mix_unit = 1.0
        self._lookups = 0
        self._granted = 0.0
        self._spent = 0.0
        self._dearest = max_error

    def accepts(self, entry_key: bytes, similarity: float, *, draw: float, max_error: float | None = None) -> bool:
        """Whether the entry may answer. False: ask the model, and tell :meth:`observe` what came of it.

        O(1). To be called once per lookup, with the nearest entry that has passed the guards: to go on to the next after a
        refusal would be to try again until luck has it, and would count the lookup twice.

        Args:
            entry_key: The entry's key.
            similarity: Cosine between its question and the one asked.
            draw: Uniform in [0, 1), drawn anew for each lookup.
            max_error: The caller's own bound; counts where it is tighter.
        """
        wrong = self.wrong_bound(entry_key, similarity)
        if self._over == "answers":
            return wrong <= (self._max_error if max_error is None else min(self._max_error, max_error)) and draw >= self._audit
        self._count_lookup(wrong)
        if wrong > self._dearest or self._spent + wrong > self._max_error * self._granted:
            return False
        explored = self._audit
        if max_error is not None and max_error < self._max_error:
            explored = max(explored, 1.0 - max_error / max(wrong, 1e-12))
        if draw < explored:
            return False
        self._spent += wrong
        return True

    def wrong_bound(self, entry_key: bytes, similarity: float) -> float:
        """Return the upper bound of the probability that the entry's answer would be wrong; 1 where too little is known."""
        model = self._model
        if model is None or self._evidence < LEAST_OUTCOMES or not math.isfinite(similarity):
            return 1.0
        slot = self._slots.get(entry_key)
        if slot is None:
            return model.wrong(bin_of(similarity), 0.0, model.spread)
        if self._verdicts[slot] < 0:
            return 1.0
        if not self._fitted[slot]:
            return model.wrong(bin_of(similarity), 0.0, model.spread)
        return model.wrong(bin_of(similarity), float(self._mean[slot]), float(self._deviation[slot]))

    def observe(self, entry_key: bytes, similarity: float, right: bool) -> None:
        """Take in whether an explored entry's answer would have been right. A wrong one counts at once, others with the next fit.

        Args:
            entry_key: The entry's key.
            similarity: Cosine of the two questions, as it was given to :meth:`accepts`.
            right: Whether the model answered the same (:func:`serving.meaning.verification.same_answer`).
        """
        self._tell(Outcome(entry_key, similarity, right))

    def feedback(self, entry_key: bytes, good: bool, similarity: float = 1.0) -> None:
        """Take in a person's verdict on an entry's answer.

        Args:
            entry_key: The entry's key.
            good: The verdict.
            similarity: Of the question that it answered, where known. 1: the answer as such.
        """
        self._tell(Outcome(entry_key, similarity, good, feedback=True))

    def forget(self, entry_key: bytes) -> None:
        """Drop an entry's record: its answer was replaced by another, or is gone."""
        slot = self._slots.pop(entry_key, None)
        if slot is not None:
            self._release(slot)

    def drain(self) -> list[Outcome]:
        """Return what was observed here since the last time, for other replicas; of very many the newest."""
        told = list(self._outbox)
        self._outbox.clear()
        return told

    def merge(self, outcomes: Iterable[Outcome]) -> None:
        """Take in what other replicas observed."""
        for outcome in outcomes:
            self._take(outcome)

    def fit_due(self) -> bool:
        """Whether enough was observed since the last fit for another to be worth it: a tenth more, and 16 at least."""
        return self._since_fit >= max(_FIRST_FIT, min(self._count / 10, 500)) or (self._model is None and self._since_fit > 0)

    def begin_fit(self) -> Fit:
        """Copy what a fit needs: the pool, and of the entries those with news and some others in turn."""
        taken = len(self._slots)
        rest: list[int] = []
        if taken:
            live = list(self._slots.values())
            start = self._turn % taken
            rest = (live[start:] + live[:start])[:_FIT_SAMPLE]
            self._turn = start + len(rest)
        slots = np.array(sorted({*self._dirty, *rest}), np.int64)
        sample = np.searchsorted(slots, np.array(rest, np.int64))
        self._dirty.clear()
        self._since_fit = 0
        return Fit(
            self._right / self._unit, self._wrong / self._unit, sample, slots, tuple(self._owners[slot] for slot in slots),
            self._bins[slots], self._weights[slots], self._alarms,
        )  # fmt: skip

    def apply_fit(self, fit: Fit, result: tuple[PoolModel, Floats, Floats]) -> None:
        """Decide by what a fit has found from now on; one that began before an alarm is dropped."""
        if fit.alarms != self._alarms:
            return
        model, means, deviations = result
        self._model = model
        for slot, owner, mean, deviation in zip(fit.slots.tolist(), fit.owners, means, deviations, strict=True):
            # observed again or given to another entry meanwhile: fitted next time
            if self._owners[slot] == owner and owner is not None and slot not in self._dirty:
                self._mean[slot], self._deviation[slot], self._fitted[slot] = mean, deviation, True
        self._fit_now([slot for slot in self._dirty if self._owners[slot] is not None])

    def fit(self) -> None:
        """Fit now and here: milliseconds. On a request path use :meth:`refit`."""
        fit = self.begin_fit()
        self.apply_fit(fit, fit.compute())

    async def refit(self, executor: Executor | None = None) -> None:
        """Fit in a thread of the executor, None: the loop's own, while requests go on being decided by the last fit."""
        fit = self.begin_fit()
        self.apply_fit(fit, await asyncio.get_running_loop().run_in_executor(executor, fit.compute))

    def stats(self) -> AcceptanceStats:
        """Return what is known."""
        model = self._model
        lapse, spread = (math.nan, math.nan) if model is None else (model.lapse, model.spread)
        return AcceptanceStats(self._count, len(self._slots), lapse, spread, self._alarms)

    def dump(self, max_entries: int = 4096) -> dict[str, Any]:
        """Return the state as JSON-ready values, with the records of the entries observed last."""
        entries = {}
        for key, slot in list(self._slots.items())[-max_entries:]:
            order = np.roll(np.arange(OUTCOMES), -int(self._next[slot] % OUTCOMES))
            order = order[self._weights[slot, order] != 0]
            entries[key.hex()] = {
                "bins": self._bins[slot, order].tolist(),
                "weights": [round(weight, 3) for weight in self._weights[slot, order].tolist()],
                "verdicts": int(self._verdicts[slot]),
            }
        return {
            "form": _FORM,
            "right": [round(value, 4) for value in (self._right / self._unit).tolist()],
            "wrong": [round(value, 4) for value in (self._wrong / self._unit).tolist()],
            "count": self._count,
            "evidence": self._evidence,
            "entries": entries,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the state by what :meth:`dump` returned. Nothing is served until it is fitted, which is due at once.

        Raises:
            ValueError: If it is not such a state; nothing is changed then.
        """
        try:
            if state["form"] != _FORM:
                raise ValueError(f"form {state['form']!r}")
            right, wrong = (np.asarray(state[name], float) for name in ("right", "wrong"))
            if right.shape != (BINS,) or wrong.shape != (BINS,) or not (np.isfinite(right + wrong).all()):
                raise ValueError("bins of another shape")
            if min(right.min(), wrong.min()) < 0:
                raise ValueError("a negative weight")
            count, evidence = int(state["count"]), int(state["evidence"])
            entries = [
                (bytes.fromhex(key), *_record(entry["bins"], entry["weights"]), int(entry["verdicts"]))
                for key, entry in list(state["entries"].items())[-self._max_entries :]
            ]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"acceptance: expected a state written by dump(), form {_FORM}; found {error}") from error
        for slot in self._slots.values():
            self._release(slot)
        self._slots.clear()
        self._unit, self._right, self._wrong = 1.0, right, wrong
        self._count, self._evidence, self._wealth = count, evidence, 1.0
        for key, bins, weights, verdicts in entries:
            slot = self._slot(key)
            self._bins[slot, : len(bins)], self._weights[slot, : len(bins)] = bins, weights
            self._next[slot], self._verdicts[slot] = len(bins), verdicts
            self._dirty.add(slot)
        self._model = None
        self._fitted[:] = False
        self._since_fit = max(1, self._count)

    def _count_lookup(self, wrong: float) -> None:
        """Credit the account, and now and then find the p up to which the surest answers of such lookups may be served."""
        self._granted = self._granted * _MIX_DECAY + 1.0
        self._spent *= _MIX_DECAY
        self._mix_unit /= _MIX_DECAY
        self._mix[bisect_left(_COSTS, wrong)] += self._mix_unit
        self._lookups += 1
        if self._lookups % _REVIEW:
            return
        self._mix = [count / self._mix_unit for count in self._mix]
        self._mix_unit = 1.0
        left = self._max_error * sum(self._mix)
        self._dearest = self._max_error
        for cost, count in zip(_COSTS, self._mix, strict=False):
            left -= cost * count
            if left < 0.0:
                break
            self._dearest = max(cost, self._max_error)

    def _tell(self, outcome: Outcome) -> None:
        self._outbox.append(outcome)
        self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        key, similarity, right, feedback = outcome
        if not math.isfinite(similarity):
            return
        place = bin_of(similarity)
        if not feedback and self._bet(key, similarity, right):
            self._alarm()
        slot = self._slot(key)
        weight = FEEDBACK_WEIGHT if feedback else 1.0
        column = int(self._next[slot] % OUTCOMES)
        self._next[slot] += 1
        self._bins[slot, column] = place
        self._weights[slot, column] = weight if right else -weight
        self._dirty.add(slot)
        self._since_fit += 1
        if feedback:
            self._verdicts[slot] += 1 if right else -1
        else:
            self._count += 1
            self._evidence += 1
            self._unit /= self._decay
            (self._right if right else self._wrong)[place] += self._unit
            if self._unit > 1e12:
                self._right /= self._unit
                self._wrong /= self._unit
                self._unit = 1.0
        if not right:
            self._fit_now([slot])

    def _bet(self, key: bytes, similarity: float, right: bool) -> bool:
        bound = self.wrong_bound(key, similarity)
        if bound > _BET_LIMIT:
            return False
        self._wealth = max(1.0, self._wealth * (1.0 + _BET * ((not right) - bound)))
        return self._wealth >= ALARM

    def _alarm(self) -> None:
        self._alarms += 1
        self._wealth = 1.0
        self._model = None
        self._evidence = 0
        self._right *= _FORGOTTEN
        self._wrong *= _FORGOTTEN
        self._weights *= np.float32(_FORGOTTEN)
        self._fitted[:] = False
        self._mix = [0.0] * len(self._mix)
        self._dearest = self._max_error

    def _fit_now(self, slots: list[int]) -> None:
        if self._model is None or not slots:
            return
        self._mean[slots], self._deviation[slots] = fit_entries(self._model, self._bins[slots], self._weights[slots])
        self._fitted[slots] = True

    def _slot(self, key: bytes) -> int:
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
            return slot
        if len(self._slots) >= self._max_entries:
            self._release(self._slots.popitem(last=False)[1])
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[key] = slot
        self._owners[slot] = key
        return slot

    def _release(self, slot: int) -> None:
        self._owners[slot] = None
        self._weights[slot] = 0.0
        self._next[slot] = self._verdicts[slot] = 0
        self._fitted[slot] = False
        self._dirty.discard(slot)
        self._free.append(slot)

    def _grow(self) -> None:
        have = len(self._owners)
        more = min(max(have, 64), self._max_entries - have)
        self._bins = np.concatenate([self._bins, np.zeros((more, OUTCOMES), np.int16)])
        self._weights = np.concatenate([self._weights, np.zeros((more, OUTCOMES), np.float32)])
        self._next = np.concatenate([self._next, np.zeros(more, np.int64)])
        self._verdicts = np.concatenate([self._verdicts, np.zeros(more, np.int32)])
        self._mean = np.concatenate([self._mean, np.zeros(more)])
        self._deviation = np.concatenate([self._deviation, np.zeros(more)])
        self._fitted = np.concatenate([self._fitted, np.zeros(more, bool)])
        self._owners += [None] * more
        self._free += range(have + more - 1, have - 1, -1)


def _record(bins: Any, weights: Any) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    places, values = np.asarray(bins, np.int64), np.asarray(weights, np.float32)
    if places.ndim != 1 or places.shape != values.shape or len(places) > OUTCOMES:
        raise ValueError("a record of another shape")
    if len(places) and not (places.min() >= 0 and places.max() < BINS and np.isfinite(values).all()):
        raise ValueError("a record out of range")
    return places.astype(np.int16), values
