"""The control loop beside a live cache: every interval observe, decide, guard, apply, verify, record.

A fault of any part makes the loop hold and say so; it never guesses. A loop that dies leaves the gateways on their last knobs.
Of several loops on one arm the one that has the arm's lease writes (:mod:`tuner.lease`); the others hold, and take over from it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from agents.policy import Policy, Proposal
from envs.live_signals import read_signals
from envs.objective import Cost, Prices, price
from envs.observation import ObservationBuilder
from envs.signals import ArmSignals
from envs.smoothing import SMOOTHING
from envs.sources import SignalSource, SourceUnavailable
from experiments.ledger import LedgerError
from experiments.records import DecisionRecord, signals_to_dict
from serving.config_store import ConfigStore, ConfigStoreUnavailable, DesiredState, LeaseLost, VersionConflict
from serving.knobs import Knobs, KnobSpace
from tuner.guard import GuardLimits, Verdict, judge
from tuner.lease import LeaseKeeper, lasts_for, owner_name

_log = logging.getLogger(__name__)

CONFIRM_POLL = 0.1
"""Seconds between two looks at what the replicas report."""

MOST_WAITING = 1000
"""Decisions that wait for a ledger that cannot be written; the oldest are given up first."""

_AUTHOR = "tuner"


class Recorder(Protocol):
    """Where decisions go; the ledger is one."""

    def record_decision(self, record: DecisionRecord) -> object:
        """Store one decision durably; may block, and is called from other threads than the loop's.

        Raises:
            LedgerError: If it cannot be stored now.
        """
        ...


@dataclass(frozen=True)
class LoopSettings:
    """What the loop needs to know beside its parts.

    Attributes:
        namespace: The cache's namespace.
        interval: Seconds between two decisions.
        window: Seconds of signals that a decision looks at, at least two scrapes long.
        confirm_timeout: Seconds that the replicas have to report a new version.
        space: The knob space.
        prices: What things cost.
        limits: The guard's limits.
        smoothing: Weight of the newest window in the moving averages that a policy sees, (0, 1]; the environment's, since
            policies are trained there.
    """

    namespace: str
    interval: float
    window: float
    confirm_timeout: float
    space: KnobSpace
    prices: Prices
    limits: GuardLimits = field(default_factory=GuardLimits)
    smoothing: float = SMOOTHING


@dataclass(frozen=True)
class ArmStep:
    """One arm in one interval: what was seen, what it cost, and, where a policy rules the arm, what was decided."""

    arm: str
    knobs: Knobs
    signals: ArmSignals
    cost: Cost
    proposal: Proposal | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Interval:
    """One turn of the loop.

    Attributes:
        index: Number of the turn, from 1.
        at: When the signals were read, seconds since the epoch.
        state: The desired state after the turn.
        arms: What happened by arm.
        expected: Replicas that report to the config store.
        confirmed: Those of them that run the desired version.
        fault: What went wrong, or ``""``.
        news: What changed about which tuner may write, or ``""``.
    """

    index: int
    at: float
    state: DesiredState
    arms: Mapping[str, ArmStep]
    expected: int
    confirmed: int
    fault: str = ""
    news: str = ""


class Tuner:
    """Runs the loop over one namespace.

    Args:
        store: The config store.
        source: Where signals come from.
        policies: The policy of every arm that is tuned; other arms are only observed.
        recorder: The ledger.
        settings: See :class:`LoopSettings`.
        clock: Seconds since the epoch.
        wait: Waits so many seconds; returns True if the loop should end.
        owner: This tuner's name among those on the namespace, without white space; None: one that no other has.
    """

    def __init__(
        self,
        *,
        store: ConfigStore,
        source: SignalSource,
        policies: Mapping[str, Policy],
        recorder: Recorder,
        settings: LoopSettings,
        clock: Callable[[], float],
        wait: Callable[[float], Awaitable[bool]],
        owner: str | None = None,
    ) -> None:
        self._store = store
        self._source = source
        self._policies = dict(policies)
        self._recorder = recorder
        self._settings = settings
        self._clock = clock
        self._wait = wait
        self._builders = {arm: ObservationBuilder(settings.space, settings.prices, settings.smoothing) for arm in policies}
        self._change_steps = dict.fromkeys(policies, 0.0)
        self._state: DesiredState | None = None
        self._index = 0
        self._written_at = -math.inf
        self._lasts = lasts_for(settings.interval, settings.confirm_timeout)
        self._leases = LeaseKeeper(store, policies, owner=owner or owner_name(), lasts=self._lasts, clock=clock)
        self._unleased_at: float | None = None
        self._unleased = ""
        self._waiting: deque[DecisionRecord] = deque(maxlen=MOST_WAITING)
        self._given_up = 0

    async def start(self, initial: Mapping[str, Knobs]) -> DesiredState:
        """Take over the desired state, or write the first one from ``initial``.

        Raises:
            ConfigStoreUnavailable: If the store cannot be reached: a loop that cannot apply anything does not start.
            ValueError: If the state in the store lacks an arm that is to be tuned, or its leases cannot be read.
        """
        for policy in self._policies.values():
            policy.reset()
        state = await self._store.read()
        if state is None:
            try:
                state = await self._store.write(
                    initial, expected_version=0, author=_AUTHOR, reason="initial knobs from the settings", now=self._clock()
                )
            except VersionConflict:
                state = await self._store.read()
        if state is None:
            raise ConfigStoreUnavailable("the config store lost the desired state just written; is its Redis evicting keys?")
        absent = sorted(set(self._policies) - set(state.arms))
        if absent:
            raise ValueError(f"tune: arm {absent[0]!r} is not in the config store; it has {sorted(state.arms)}")
        await self._leases.renew()
        self._state = state
        return state

    async def end(self) -> None:
        """Let another tuner take over at once; :meth:`run` does so when it ends."""
        await self._leases.give_back()

    def news(self) -> str:
        """Return what changed about which tuner may write and was not told with a turn yet, or ``""``."""
        return self._leases.told()

    async def run(
        self, *, max_intervals: int | None = None, on_interval: Callable[[Interval], Awaitable[None] | None] | None = None
    ) -> int:
        """Turn until told to stop or ``max_intervals`` is reached; :meth:`start` comes first.

        Returns:
            The number of turns made.
        """
        turns = 0
        due = self._clock() + self._settings.interval
        try:
            while max_intervals is None or turns < max_intervals:
                # A clock that was set back must not make the loop wait until it is there again.
                if await self._wait(min(max(0.0, due - self._clock()), self._settings.interval)):
                    break
                # A slow turn is not followed by a burst: turns that were missed are left out.
                due = self._clock() + self._settings.interval
                turn = await self.step()
                turns += 1
                if on_interval is not None:
                    result = on_interval(turn)
                    if result is not None:
                        await result
        finally:
            await self.end()
        lost = await self._write_records()
        if lost:
            _log.error("ended with decisions that were not recorded: %s", lost)
        return turns

    async def step(self) -> Interval:
        """Make one turn now."""
        state = self._state
        if state is None:
            raise RuntimeError("start() comes before step()")
        self._index += 1
        now = self._clock()
        fault = ""
        before = self._leases.held
        try:
            await self._leases.renew()
            read = await self._store.read() or await self._put_back(state)
        except ConfigStoreUnavailable as error:
            fault = str(error)
        except (VersionConflict, LeaseLost, ValueError) as error:
            fault = f"config store: {error}"
        else:
            absent = sorted(set(self._policies) - set(read.arms))
            if absent:
                fault = f"config store: version {read.version} has no arm {absent[0]!r}, only {sorted(read.arms)}"
            else:
                ours = {arm for arm, lease in self._leases.held.items() if arm in before and before[arm].since == lease.since}
                fault = self._written_without_lease(state, read, ours)
                state = read
        signals, unreadable = await asyncio.to_thread(self._observe, state, now)
        # No new knobs while there are decisions that the ledger does not have.
        unwritten = await self._write_records()
        fault = "; ".join(part for part in (fault or unreadable, unwritten) if part)
        steps = {arm: self._decide(arm, state.arms[arm], seen) for arm, seen in signals.items()}
        others = self._leases.others
        steps = {arm: _standing_by(step, others[arm].owner) if arm in others else step for arm, step in steps.items()}
        # Several tuners may find a lease to be had, and it may have gone from one to the next again when this one looks.
        missing = sorted(set(self._policies) - set(self._leases.held) - set(others))
        if missing and not fault:
            fault = f"lease of arm {missing[0]!r}: not to be had yet; held until the next interval"
        wanted = {arm: step.verdict.knobs for arm, step in steps.items() if step.verdict and step.verdict.changes}
        if wanted and not fault:
            state, fault = await self._apply(state, wanted, steps)
        if fault:
            steps = {arm: _held(step) if arm in wanted else step for arm, step in steps.items()}
        # The version that another tuner is about to write is not ours to wait for.
        expected, confirmed, silent = (0, 0, fault) if fault else await self._verify(state, patient=not others)
        self._state = state
        turn = Interval(self._index, now, state, steps, expected, confirmed, fault or silent, self._leases.told())
        self._record(turn, wanted if not fault else {})
        unwritten = "" if unwritten else await self._write_records()
        return replace(turn, fault="; ".join(part for part in (turn.fault, unwritten) if part))

    async def _put_back(self, state: DesiredState) -> DesiredState:
        """Write the last known knobs as a first version: a Redis that restarted empty has none, and new replicas need them.

        Who has no lease does not know the last ones.
        """
        if set(self._policies) - set(self._leases.held):
            raise VersionConflict(f"it has lost version {state.version}; the tuner that has the lease writes it again")
        reason = f"the config store had lost version {state.version}: the same knobs again"
        return await self._store.write(
            state.arms,
            expected_version=0,
            author=_AUTHOR,
            reason=reason,
            now=self._clock(),
            leases=self._leases.held.values(),
        )

    def _written_without_lease(self, state: DesiredState, read: DesiredState, ours: Collection[str]) -> str:
        """Return why to hold where a tuner that knows no leases writes the arms that are ours, or ``""``.

        It holds for as long as a lease lasts: that the other one is still for an interval does not mean that it has gone.
        """
        now = self._clock()
        # A write of ours whose answer was lost is newer, too: its time tells it from another's.
        foreign = read.version > state.version and read.author == _AUTHOR and read.written_at != self._written_at
        if foreign and any(read.arms[arm] != state.arms.get(arm) for arm in ours):
            self._unleased_at = now
            self._unleased = f"another tuner writes here too, without the lease (version {read.version})"
        if self._unleased_at is None:
            return ""
        self._unleased_at = min(self._unleased_at, now)  # the clock may have been set back
        if now - self._unleased_at >= self._lasts:
            self._unleased_at = None
            return ""
        return f"{self._unleased}; held for {self._lasts:g} s from its last write: end one of the two"

    def _observe(self, state: DesiredState, now: float) -> tuple[dict[str, ArmSignals], str]:
        settings = self._settings
        try:
            self._source.refresh()
            return {
                arm: read_signals(
                    self._source, arm, window=settings.window, now=now, knobs=knobs, space=settings.space, prices=settings.prices
                )
                for arm, knobs in state.arms.items()
            }, ""
        except SourceUnavailable as error:
            return {arm: ArmSignals(arm, now, settings.window) for arm in state.arms}, f"signals: {error}"

    def _decide(self, arm: str, knobs: Knobs, signals: ArmSignals) -> ArmStep:
        cost = price(signals.usage(knobs.cache_size, self._change_steps.get(arm, 0.0)), self._settings.prices)
        policy = self._policies.get(arm)
        if policy is None:
            return ArmStep(arm, knobs, signals, cost)
        observation = self._builders[arm].build(signals, knobs)
        try:
            proposal = policy.decide(observation)
        except Exception as error:  # noqa: BLE001 - a policy that fails must not end the loop; the ledger has it
            _log.exception("policy %s failed", policy.name)
            why = f"policy failed: {type(error).__name__}: {error}"
            return ArmStep(arm, knobs, signals, cost, Proposal(knobs, why), Verdict(knobs, "hold", "held"))
        verdict = judge(proposal, knobs, signals, self._settings.space, self._settings.limits)
        return ArmStep(arm, knobs, signals, cost, proposal, verdict)

    async def _apply(
        self, state: DesiredState, wanted: Mapping[str, Knobs], steps: Mapping[str, ArmStep]
    ) -> tuple[DesiredState, str]:
        reason = "; ".join(f"{arm}: {step.proposal.reason}" for arm, step in steps.items() if arm in wanted and step.proposal)
        try:
            self._written_at = self._clock()
            written = await self._store.write(
                {**state.arms, **wanted},
                expected_version=state.version,
                author=_AUTHOR,
                reason=reason,
                now=self._written_at,
                leases=[self._leases.held[arm] for arm in wanted],
            )
        except LeaseLost:
            return state, "another tuner took the lease meanwhile; held"
        except VersionConflict:
            return state, "somebody else wrote newer knobs; held until the next interval"
        except ConfigStoreUnavailable as error:
            return state, str(error)
        space = self._settings.space
        for arm in self._policies:
            move = space.to_steps(written.arms[arm]) - space.to_steps(state.arms[arm])
            self._change_steps[arm] = float(np.sqrt(np.sum(move**2)))
        return written, ""

    async def _verify(self, state: DesiredState, *, patient: bool) -> tuple[int, int, str]:
        """Wait until every replica that reports runs the desired version, or, if not ``patient``, count those that do."""
        deadline = self._clock() + self._settings.confirm_timeout
        while True:
            try:
                replicas = await self._store.applied()
            except ConfigStoreUnavailable as error:
                return 0, 0, str(error)
            behind = sorted(item.replica for item in replicas if item.version != state.version)
            confirmed = len(replicas) - len(behind)
            if (replicas and not behind) or not patient:
                return len(replicas), confirmed, ""
            if self._clock() >= deadline or await self._wait(CONFIRM_POLL):
                if not replicas:
                    return 0, 0, "no replica reports its knobs: is the gateway running in this namespace?"
                return len(replicas), confirmed, f"version {state.version} not confirmed by {', '.join(behind)}"

    async def _write_records(self) -> str:
        """Write the decisions that wait, the oldest first; returns why some still do, or ``""``."""
        if not self._waiting:
            return ""
        try:
            await asyncio.to_thread(self._write_waiting)
        except LedgerError as error:
            given_up = f", {self._given_up} older ones are given up" if self._given_up else ""
            return f"ledger: {str(error).removeprefix('ledger ')} ({len(self._waiting)} decisions wait{given_up})"
        return ""

    def _write_waiting(self) -> None:
        while self._waiting:
            self._recorder.record_decision(self._waiting[0])
            self._waiting.popleft()

    def _record(self, turn: Interval, written: Mapping[str, Knobs]) -> None:
        """Queue what happened for the ledger."""
        for arm, step in turn.arms.items():
            proposal, verdict = step.proposal, step.verdict
            policy = self._policies.get(arm)
            reason = "observed only" if verdict is None else f"{verdict.reason} ({proposal.reason if proposal else ''})"
            self._given_up += len(self._waiting) == MOST_WAITING
            self._waiting.append(
                DecisionRecord(
                    at=turn.at,
                    namespace=self._settings.namespace,
                    arm=arm,
                    policy=policy.name if policy else "static",
                    signals=signals_to_dict(step.signals),
                    current=step.knobs,
                    proposal=proposal.knobs if proposal else None,
                    verdict=verdict.action if verdict else "observe",
                    reason=f"{reason}; {turn.fault}" if turn.fault else reason,
                    applied=written.get(arm, step.knobs),
                    version=turn.state.version,
                    replicas_expected=turn.expected,
                    replicas_confirmed=turn.confirmed,
                    cost=step.cost.to_dict() if math.isfinite(step.cost.total) else {},
                )
            )
            if arm not in written and arm in self._change_steps:
                self._change_steps[arm] = 0.0


def _held(step: ArmStep) -> ArmStep:
    """The step of an arm whose new knobs a fault of the turn kept from being written."""
    return replace(step, verdict=Verdict(step.knobs, "hold", "not applied"))


def _standing_by(step: ArmStep, owner: str) -> ArmStep:
    """The step of an arm whose lease another tuner has."""
    return replace(step, verdict=Verdict(step.knobs, "hold", f"standing by: {owner} has the lease"))
