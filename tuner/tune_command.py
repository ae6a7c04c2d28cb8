"""`cachepilot tune`: builds the loop from settings and runs it until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from envs.prometheus_source import PrometheusSource
from envs.scrape_source import ScrapeSource
from envs.sources import SignalSource, window_for
from experiments.ledger import Ledger
from serving.audit import RedisAudit
from serving.redis_config_store import RedisConfigStore
from tuner.audit_drain import AuditDrain
from tuner.config import Settings
from tuner.demo_view import knobs_text, shown
from tuner.errors import CommandError
from tuner.local import metrics_url, redis_url
from tuner.loop import ArmStep, Interval, LoopSettings, Tuner
from tuner.policies import ruling_policy
from tuner.serving_commands import check_redis
from tuner.stopping import set_within, signals_to


async def tune_gateway(settings: Settings, *, intervals: int | None, show: Callable[[dict[str, Any]], None]) -> None:
    """Tune until SIGINT, SIGTERM, or so many intervals.

    Args:
        settings: Everything.
        intervals: Decisions to make; None: no end.
        show: Takes one JSON-ready mapping per interval, its ``text`` for people.

    Raises:
        CommandError: If Redis does not answer, or the arm to tune is not one of the gateway's.
        envs.sources.SourceUnavailable: If no signals can be read at the start.
    """
    tuner, gateway = settings.tuner, settings.gateway
    if tuner.arm not in gateway.arms:
        raise CommandError(
            f"tune: tuner.arm = {tuner.arm!r}: expected one of the gateway's arms {sorted(gateway.arms)}: set tuner.arm to "
            "one of them, or add that arm to gateway.arms as examples/two-arms.yaml has it"
        )
    policy = ruling_policy(tuner.policy, tuner, lambda text: show({"text": text, "warning": text}))
    url = redis_url(gateway)
    check_redis(url, hint="start `cachepilot serve` first, which brings its own, or" if gateway.redis_url is None else "")
    over = asyncio.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(over.set))
        source = signal_source(settings)
        stack.callback(source.close)
        ledger = stack.enter_context(Ledger(settings.experiments.ledger.url, timeout=settings.experiments.ledger.timeout))
        store, audit = RedisConfigStore(url, gateway.namespace), RedisAudit(url, gateway.namespace)
        changes = AuditDrain(audit, ledger, gateway.namespace)

        def warn(text: str) -> None:
            if text:
                show({"text": text, "warning": text})

        async def record_changes() -> None:
            count, fault = await changes.drain()
            if count:
                show(
                    {
                        "text": f"{count} {'entry' if count == 1 else 'entries'} of the admin API's audit recorded",
                        "audited": count,
                    }
                )
            warn(fault)

        async def after_turn(turn: Interval) -> None:
            warn(turn.news)
            show(line_of(turn))
            await record_changes()

        running = Tuner(
            store=store,
            source=source,
            policies={tuner.arm: policy},
            recorder=ledger,
            settings=LoopSettings(
                namespace=gateway.namespace,
                interval=tuner.interval,
                window=tuner.window or window_for(tuner.interval, tuner.signals.scrape_interval),
                confirm_timeout=tuner.confirm_timeout,
                space=gateway.space.space(),
                prices=settings.prices,
                limits=tuner.guard.limits(),
                smoothing=tuner.smoothing,
            ),
            clock=time.time,
            wait=lambda seconds: set_within(over, seconds),
        )
        try:
            state = await running.start(gateway.initial_knobs)
            arms = "; ".join(f"{arm} {knobs_text(knobs)}" for arm, knobs in state.arms.items())
            show({"text": f"tuning {tuner.arm} by {policy.name} every {tuner.interval:g} s from version {state.version}: {arms}"})
            warn(running.news())
            await record_changes()
            await running.run(max_intervals=intervals, on_interval=after_turn)
        finally:
            await running.end()
            await store.close()
            await audit.close()


def signal_source(settings: Settings) -> SignalSource:
    """Return the source of signals that the settings name.

    Raises:
        envs.sources.SourceUnavailable: If it cannot be read.
    """
    signals = settings.tuner.signals
    if signals.kind == "prometheus":
        return PrometheusSource(signals.prometheus_url)
    targets = list(signals.targets) or [metrics_url(settings.gateway)]
    if signals.model_metrics is not None:
        targets.append(signals.model_metrics)
    return ScrapeSource(targets, scrape_interval=signals.scrape_interval)


def line_of(turn: Interval) -> dict[str, Any]:
    """Return a turn as one JSON-ready line."""
    arms: dict[str, Any] = {}
    texts = []
    for arm, step in turn.arms.items():
        knobs = turn.state.arms[arm]
        arms[arm] = {
            "hit_ratio": _finite(step.signals.hit_ratio),
            "p99": _finite(step.signals.p99),
            "cost": _finite(step.cost.total),
            "regret": _finite(step.signals.regret),
            "knobs": knobs.to_dict(),
            "verdict": step.verdict.action if step.verdict else "observe",
            "reason": step.verdict.reason if step.verdict else "observed only",
            "proposal": step.proposal.reason if step.proposal else "",
            "details": {name: _finite(value) for name, value in step.proposal.details.items()} if step.proposal else {},
        }
        hits, p99 = shown(step.signals.hit_ratio, "{:.1%}"), shown(step.signals.p99, "{:.2f} s")
        seen = f"hits {hits}, P99 {p99}, cost {shown(step.cost.total, '${:.4f}')}"
        texts.append(f"{arm}: {seen}, {knobs_text(knobs)}" + (f", {_said(step)}" if step.verdict else ""))
    confirmed = f"{turn.confirmed}/{turn.expected} replicas on version {turn.state.version}"
    return {
        "text": f"{turn.index}: {'; '.join(texts)}; {confirmed}{'; ' + turn.fault if turn.fault else ''}",
        "interval": turn.index,
        "at": turn.at,
        "version": turn.state.version,
        "expected": turn.expected,
        "confirmed": turn.confirmed,
        "fault": turn.fault,
        "arms": arms,
    }


def _said(step: ArmStep) -> str:
    """What a person should read of a decision: the guard's reason, and who decided if that was not the policy."""
    reason = step.verdict.reason if step.verdict else ""
    benched = step.proposal is not None and step.proposal.details.get("benched")
    return f"{reason} ({step.proposal.reason})" if benched and step.proposal else reason


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
