"""A policy under supervision: benched in favour of the curve when it does worse than the curve would have done.

After every interval the curve's cost on the same requests is estimated from the measured window and its ghost curve
(:mod:`agents.counterfactual`), along the path that the curve policy itself would have taken, limited in its steps like ours. The
policy is benched when, over the last intervals, it cost more than the curve by more than a margin, and by more than chance
explains (a paired t statistic); at once when it fails or proposes what no cache can run. It is given another try after a rest,
which doubles each time that the policy fails while on probation.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from agents.counterfactual import ServiceMeter, counterfactual, refilled
from agents.curve import CurvePolicy
from agents.policy import Policy, Proposal
from agents.update_hazard import oldest_age
from envs.action import MAX_STEPS, limit_step
from envs.objective import Cost
from envs.observation import Observation
from serving.knobs import Knobs, KnobSpace

MOST_EXCESS = 3.0
"""One interval's excess counts for at most this many mean intervals of the curve's cost: a burst is not evidence by itself."""

_ABSURD = 1e100
"""Dollars beyond which broken signals were priced."""

_SAME = 0.3
"""Grid steps within which knobs are taken for those that were asked for: a little more than the guard's dead band."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """When a policy is benched and for how long.

    The defaults are measured by ``python -m experiments.supervision``. The window should be as long as what the workload repeats,
    such as a day: a policy that holds more through the night to be ready for the morning is worse than the curve all night.

    Attributes:
        window: Most intervals that the policy is judged by.
        least: Fewest intervals that it is judged by.
        margin: Share of the curve's cost by which it may do worse: what the estimate may be wrong by.
        certainty: The t statistic of its excess over the margin at which it is benched.
        rest: Intervals for which it is benched the first time; doubled each time that it fails while on probation.
        longest_rest: Most intervals for which it is benched.
        probation: Intervals after a rest at whose end its rest is the first one again.

    Raises:
        ValueError: If a value is out of its range.
    """

    window: int = 144
    least: int = 12
    margin: float = 0.05
    certainty: float = 3.5
    rest: int = 36
    longest_rest: int = 576
    probation: int = 72

    def __post_init__(self) -> None:
        if not 3 <= self.least <= self.window:
            raise ValueError(f"supervision: least: expected 3 to window ({self.window!r}) intervals, got {self.least!r}")
        if not 1 <= self.rest <= self.longest_rest:
            raise ValueError(f"supervision: rest: expected 1 to longest_rest ({self.longest_rest!r}), got {self.rest!r}")
        if self.probation < 1:
            raise ValueError(f"supervision: probation: expected at least 1 interval, got {self.probation!r}")
        for name in ("margin", "certainty"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"supervision: {name}: expected a finite number >= 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What some intervals say of a policy against the curve.

    Attributes:
        intervals: How many.
        excess: Its cost over the estimate of the curve's, as a share of it; below 0 it did better.
        t: By how many standard errors the excess lies above the margin.
    """

    intervals: int = 0
    excess: float = 0.0
    t: float = 0.0


def weigh(pairs: list[tuple[float, float]], margin: float) -> Evidence:
    """Weigh the intervals' evidence.

    Args:
        pairs: Dollars of excess, and dollars that the curve would have cost, of each interval.
        margin: Share of the curve's cost by which the policy may do worse.
    """
    excess, reference = np.array(pairs, np.float64).reshape(-1, 2).T
    count, total = len(excess), float(reference.sum())
    if count < 2 or not 0 < total < _ABSURD:
        return Evidence(count)
    most = MOST_EXCESS * total / count
    over = np.clip(excess, -most, most) - margin * reference
    mean, error = float(over.mean()), float(over.std(ddof=1)) / math.sqrt(count)
    # Intervals that are all alike leave no doubt; the floor keeps t finite.
    error = max(error, 1e-6 * total / count)
    return Evidence(count, float(excess.sum()) / total, mean / error)


class SupervisedPolicy:
    """Runs a policy, and the curve in its place while it is benched.

    The policy is asked while it is benched, too, so that one with a memory does not lose the thread; what it says then is not
    used.

    Args:
        policy: The policy.
        fallback: Whom it is compared with, and who takes over: the smoothed curve's optimum.
        supervision: When it is benched and for how long.
        max_steps: Most that one interval may move each knob, grid steps, as the guard has it.
    """

    def __init__(
        self,
        policy: Policy,
        fallback: Policy | None = None,
        supervision: Supervision = Supervision(),
        *,
        max_steps: tuple[float, float, float] = MAX_STEPS,
    ) -> None:
        self.policy = policy
        self.fallback = fallback or CurvePolicy()
        self.supervision = supervision
        self._max_steps = max_steps
        # The curve's path beside ours is walked by a copy: a policy may have a memory.
        self._walker = copy.deepcopy(self.fallback)
        self._meter = ServiceMeter()
        self._start()

    @property
    def name(self) -> str:
        """The policy's own name, and that it is supervised: ``ppo:suites (supervised)``."""
        return f"{self.policy.name} (supervised)"

    @property
    def benched(self) -> bool:
        """Whether the fallback is in charge."""
        return self._left > 0

    def reset(self) -> None:
        """Forget everything: the policy is in charge again; benched if it cannot even do that."""
        self.fallback.reset()
        self._walker.reset()
        self._meter.reset()
        self._start()
        try:
            self.policy.reset()
        except Exception as error:  # noqa: BLE001 - as when it is asked
            self._bench(f"its reset failed: {type(error).__name__}: {error}")

    def _start(self) -> None:
        self._evidence: deque[tuple[float, float]] = deque(maxlen=self.supervision.window)
        self._found = Evidence()
        self._reference: Cost | None = None
        self._left = 0  # intervals of rest to come
        self._benched_for = 0  # intervals of rest so far
        self._why = ""
        self._next_rest = self.supervision.rest
        self._probation = 0  # intervals of probation to come
        self._applied: Knobs | None = None  # in force in the interval before
        self._asked: Knobs | None = None  # what was proposed for this one
        self._path: Knobs | None = None  # where the curve would be in this one
        self._path_before: Knobs | None = None
        self._held = math.nan  # measured at the end of the interval before, bytes
        self._filled = (math.inf, math.inf)  # what our cache and the curve's could hold by then, bytes
        self._oldest = (0.0, 0.0)  # age of the oldest entry of our cache and of the curve's by then, seconds

    def decide(self, observation: Observation) -> Proposal:
        """Return the policy's proposal, or the fallback's while it is benched; the reason and the details say which and why."""
        self._judge(observation)
        own, fault = _ask(self.policy, observation)
        spare, spare_fault = _ask(self.fallback, observation)
        if spare is None:
            spare = Proposal(observation.space.clip(observation.knobs), f"held: {self.fallback.name} {spare_fault}")
        if not self.benched:
            if own is None:
                self._bench(fault)
            elif self._found.intervals >= self.supervision.least and self._found.t >= self.supervision.certainty:
                self._bench(
                    f"it cost {self._found.excess:.1%} more than {self.fallback.name} would have over "
                    f"{self._found.intervals} intervals (estimated, t {self._found.t:.1f})"
                )
        if self.benched or own is None:
            proposal = Proposal(spare.knobs, f"{self._bench_words()}; {spare.reason}", {**spare.details, **self._details(1.0)})
        else:
            words = f"on probation for {self._probation} more intervals; " if self._probation else ""
            proposal = Proposal(own.knobs, f"{words}{own.reason}", {**own.details, **self._details(0.0)})
        self._walk(observation, proposal.knobs)
        return proposal

    def _judge(self, observation: Observation) -> None:
        """Take in what the interval that has ended says."""
        signals, space = observation.signals, observation.space
        self._reference = None
        in_charge = self._count_down()
        path, before, applied, asked = self._path, self._path_before, self._applied, self._asked
        foreign = False
        if path is None or before is None or applied is None or asked is None:
            path = before = observation.knobs
        elif _apart(observation.knobs, asked, space):
            foreign = observation.knobs != applied
            # Somebody else's knobs are nobody's merit or fault, and the curve would start from them, too; where the guard held
            # us, it would have held the curve.
            path = before = observation.knobs if foreign else before
        ours, theirs = self._fill(observation, path)
        self._meter.update(signals, observation.knobs, ours, self._oldest[0])
        if self._path is None or foreign:
            self._path, self._filled = observation.knobs, (self._filled[0], self._filled[0])
            self._oldest = (self._oldest[0], self._oldest[0])
            return
        self._path = path
        self._reference = counterfactual(
            signals,
            observation.knobs,
            path,
            self._meter.service,
            observation.prices,
            change_steps=float(np.sqrt(np.sum((space.to_steps(path) - space.to_steps(before)) ** 2))),
            filled=(ours, theirs),
            oldest=self._oldest,
        )
        cost, requests = observation.cost.total, signals.requests
        if self._reference is None or not in_charge or not abs(cost - self._reference.total) < _ABSURD:
            return
        dollars = self._reference.total * requests / 1000.0
        self._evidence.append((cost * requests / 1000.0 - dollars, dollars))
        self._found = weigh(list(self._evidence), self.supervision.margin)

    def _fill(self, observation: Observation, path: Knobs) -> tuple[float, float]:
        """Return what our cache and the curve's could hold in the interval that has ended, bytes; follow the ages of both."""
        signals, service = observation.signals, self._meter.service
        held, before = signals.resident_bytes, self._held
        if not math.isfinite(before) or held < 0.5 * min(before, observation.knobs.cache_size):
            # The first interval, or a flush, which empties both and the ghost's as well: its own refilling is in the curve.
            self._filled = (math.inf, math.inf)
            self._oldest = (0.0, 0.0)
        ours, our_end = refilled(self._filled[0], observation.knobs.cache_size, signals, service)
        theirs, their_end = refilled(self._filled[1], path.cache_size, signals, service)
        self._held, self._filled = held, (our_end, their_end)
        self._oldest = (
            oldest_age(self._oldest[0], observation.knobs, signals.window),
            oldest_age(self._oldest[1], path, signals.window),
        )
        return ours, theirs

    def _count_down(self) -> bool:
        """Count the interval that has ended; return whether the policy was in charge of it."""
        if self._left:
            self._left -= 1
            self._benched_for += 1
            if not self._left:
                self._probation = self.supervision.probation
                self._evidence.clear()
                self._found = Evidence()
                self._path = None  # from here on the curve's path starts where we are
            return False
        if self._probation:
            self._probation -= 1
            if not self._probation:
                self._next_rest = self.supervision.rest
        return True

    def _bench(self, why: str) -> None:
        self._left, self._benched_for, self._why = self._next_rest, 0, why
        self._next_rest = min(2 * self._next_rest, self.supervision.longest_rest)
        self._probation = 0

    def _bench_words(self) -> str:
        since = f"for {self._benched_for} intervals" if self._benched_for else "now"
        return f"{self.policy.name} benched {since}, another try in {self._left}: {self._why}"

    def _details(self, benched: float) -> dict[str, float]:
        details = {
            "benched": benched,
            "excess": self._found.excess,
            "excess_t": self._found.t,
            "excess_intervals": float(self._found.intervals),
            "bench_left": float(self._left),
            "probation_left": float(self._probation),
        }
        if self._reference is not None:
            details["reference_cost"] = self._reference.total
        return details

    def _walk(self, observation: Observation, proposed: Knobs) -> None:
        """Note what was asked for, and take the curve's own next step on its path."""
        space = observation.space
        here = observation.knobs if self._path is None else self._path
        cost = observation.current_cost
        if self._reference is not None:
            cost = self._reference.tokens + self._reference.latency + self._reference.memory + self._reference.staleness
        there, _ = _ask(self._walker, replace(observation, knobs=here, current_cost=cost))
        self._path_before = here
        self._path = here if there is None else self._limited(there.knobs, here, space)
        self._applied = observation.knobs
        self._asked = self._limited(proposed, observation.knobs, space)

    def _limited(self, wanted: Knobs, here: Knobs, space: KnobSpace) -> Knobs:
        return here if wanted == here else limit_step(wanted, here, space, self._max_steps)


def _ask(policy: Policy, observation: Observation) -> tuple[Proposal | None, str]:
    """Return a policy's proposal, or None and what is wrong with it."""
    try:
        proposal = policy.decide(observation)
        knobs, space = proposal.knobs, observation.space
        if not (math.isfinite(knobs.ttl) and space.contains(knobs)):
            return None, f"it proposed knobs that are out of the space: {knobs}"
        return replace(proposal, details=dict(proposal.details)), ""
    except Exception as error:  # noqa: BLE001 - whatever a policy fails with, the cache has to be tuned on
        return None, f"it failed: {type(error).__name__}: {error}"


def _apart(one: Knobs, other: Knobs, space: KnobSpace) -> bool:
    return bool(np.any(np.abs(space.to_steps(one) - space.to_steps(other)) > _SAME))
