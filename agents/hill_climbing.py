"""Hill climbing on the measured cost, with a bold driver's step: what needs no model of the cache at all."""

from __future__ import annotations

import math

import numpy as np

from agents.policy import Proposal
from agents.words import knob_words, parameter_words
from envs.observation import Observation
from serving.knobs import Knobs, KnobSpace

STEP = 0.0625
"""First step as a share of a knob's range (of its logarithm); Caffeine's ``HILL_CLIMBER_STEP_PERCENT``."""
RESTART = 0.05
"""Change of the cost, as a share of it, that makes the step large again; Caffeine's ``HILL_CLIMBER_RESTART_THRESHOLD``."""
DECAY = 0.98
"""Share of the step that is left after each sample; Caffeine's ``HILL_CLIMBER_STEP_DECAY_RATE``."""
PERIOD = 1
"""Windows of a sample; the best of 1, 2, 3 and 5 on training workloads of some 300 requests a window."""

_DEFAULTS = {"step": STEP, "restart": RESTART, "decay": DECAY, "period": float(PERIOD)}
_LEAST = 0.05
_ABSURD = 1e15
_KNOBS = ("cache_size", "ttl")


class HillClimbingPolicy:
    """Moves one knob at a time; goes on while the measured cost falls, takes back what made it rise.

    **Source.** Caffeine's adaptive window (``BoundedLocalCache.determineAdjustment``, and ``SimpleClimber`` of its simulator;
    Einziger, Eytan, Friedman, Manes: Adaptive Software Cache Management, Middleware 2018). There, one number, the size of the
    admission window, is moved by a step after each sample of requests; where the hit ratio fell, the step's sign turns; the step
    decays by 2 % per sample and is set back to 6.25 % of the cache when the hit ratio changed by 5 points or more.

    **Adapted.** What is climbed is the measured cost (``observation.cost.total``), all terms of it, since a larger cache always
    hits more. There are two knobs, ``cache_size`` and ``ttl``, by their logarithms, each with a step and a direction of its own.
    They move in turns, not at once: two knobs that move together leave it open which of them the change of the cost is due to. A
    turn lasts while the cost falls; a move that made it rise is taken back, and the turn passes with the next sample, which is
    the new measure: the cost from before the move would be out of date on traffic that drifts. ``warmup_ratio`` is left as it
    is. A sample is some windows, weighted by their requests: Caffeine waits for ten times as many requests as the cache has
    entries. The restart is at a change of 5 % of the cost, and at once (there, from the next sample on). Steps below 0.05 of the
    grid's are not made (Caffeine's are whole entries): then it rests until the cost changes.

    Args:
        step: First step as a share of a knob's range, (0, 1].
        restart: Change of the cost that restarts the step, as a share of it, > 0.
        decay: Share of the step that is left after each sample, (0, 1].
        period: Windows of a sample, a whole number >= 1.

    Raises:
        ValueError: If a parameter is out of its range.
    """

    def __init__(self, step: float = STEP, restart: float = RESTART, decay: float = DECAY, period: float = PERIOD) -> None:
        for name, value, fits, form in (
            ("step", step, 0.0 < step <= 1.0, "a share in (0, 1]"),
            ("restart", restart, 0.0 < restart < math.inf, "a share > 0"),
            ("decay", decay, 0.0 < decay <= 1.0, "a share in (0, 1]"),
            ("period", period, 1 <= period < 10_000 and period == int(period), "a whole number of windows from 1 to 9999"),
        ):
            if not fits:
                raise ValueError(f"hill climbing: {name}: expected {form}, got {value!r}")
        self.step = step
        self.restart = restart
        self.decay = decay
        self.period = int(period)
        self.reset()

    @property
    def name(self) -> str:
        """``hill-climbing``, with the parameters that are not their defaults: ``hill-climbing:period=5``."""
        given = {"step": self.step, "restart": self.restart, "decay": self.decay, "period": float(self.period)}
        return "hill-climbing" + parameter_words(given, _DEFAULTS)

    def reset(self) -> None:
        """Forget costs and steps; the first move is the size's, upwards."""
        self._shares = [self.step, self.step]
        """Next step of each knob, as a signed share of its range."""
        self._turn = 0
        self._made = 0.0
        """Grid steps of the last move that is not judged yet."""
        self._before: float | None = None
        self._dollars = self._requests = 0.0
        self._windows = 0

    def decide(self, observation: Observation) -> Proposal:
        """Return the next move at a sample's end, else the current knobs; a window without a cost is left out of its sample."""
        space = observation.space
        current = space.clip(observation.knobs)
        cost = observation.cost.total
        if not 0.0 <= cost < _ABSURD:
            return Proposal(current, "held: what the last window cost is not known")
        requests = observation.signals.requests
        weight = requests if 0.0 < requests < _ABSURD else 1.0
        self._dollars += cost * weight
        self._requests += weight
        self._windows += 1
        if self._windows < self.period:
            return Proposal(current, f"held: window {self._windows} of {self.period} of the sample", {"cost": cost})
        sample = self._dollars / self._requests
        self._dollars = self._requests = 0.0
        self._windows = 0
        return self._climb(sample, current, space)

    def _climb(self, sample: float, current: Knobs, space: KnobSpace) -> Proposal:
        before, self._before = self._before, sample
        details = {"sample_cost": sample}
        if before is None:
            return self._go_on(current, space, f"cost is ${sample:.4f}", details)
        change = (sample - before) / before if before > 0 else (math.inf if sample > 0 else 0.0)
        words = f"cost went from ${before:.4f} to ${sample:.4f}"
        restarts = abs(change) >= self.restart
        if restarts:
            words += ", the step starts anew"
        if self._made == 0.0:  # it rests: the change has other causes
            if not restarts:
                return Proposal(current, f"held: {words}; both steps are too small to make", details)
            self._shares = [math.copysign(self.step, share) for share in self._shares]
            return self._go_on(current, space, words, details)
        knob = self._turn
        share = self._shares[knob] if change <= 0 else -self._shares[knob]
        self._shares[knob] = math.copysign(self.step, share) if restarts else self.decay * share
        if change <= 0:
            return self._go_on(current, space, words, details)
        back = -self._made
        self._turn, self._before, self._made = 1 - knob, None, 0.0
        return self._shift(knob, back, current, space, f"{words}; taken back", details)

    def _go_on(self, current: Knobs, space: KnobSpace, words: str, details: dict[str, float]) -> Proposal:
        """Make the next step of the knob whose turn it is, or of the other one where that step is too small."""
        steps, lasts = space.to_steps(current), (space.size_steps - 1, space.ttl_steps - 1)
        for knob in (self._turn, 1 - self._turn):
            last = lasts[knob]
            if abs(self._shares[knob]) * last < _LEAST:
                continue
            if steps[knob] <= 0.0 if self._shares[knob] < 0 else steps[knob] >= last:
                self._shares[knob] = -self._shares[knob]
                words += ", turned at the bound"
            self._turn = knob
            self._made = float(np.clip(steps[knob] + self._shares[knob] * last, 0.0, last) - steps[knob])
            return self._shift(knob, self._made, current, space, words, details)
        self._made = 0.0
        return Proposal(current, f"held: {words}; both steps are too small to make", details)

    def _shift(self, knob: int, move: float, current: Knobs, space: KnobSpace, words: str, details: dict[str, float]) -> Proposal:
        shift = np.zeros(3)
        shift[knob] = move
        knobs = space.from_steps(space.to_steps(current) + shift)
        return Proposal(knobs, f"{words}; {_KNOBS[knob]} {move:+.2f} steps to {knob_words(knobs)}", {**details, "move": move})
