"""The whole line on one machine: traffic, gateway, tiers, signals, policy, knobs, A/B report, on embedded defaults.

Everything is started here and ended here, whichever way the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agents.output_file import write_output
from envs.scrape_source import ScrapeSource
from envs.sources import window_for
from envs.workloads.generators import sessions
from envs.workloads.readers import load
from envs.workloads.trace import Trace
from experiments.access import read_access_log
from experiments.design import Experiment
from experiments.ledger import Ledger
from experiments.replay import ReplayedRequest, replay
from experiments.report import build_report
from serving.app import start as start_gateway
from serving.llm_sim import LlmSimProcess
from serving.redis_config_store import RedisConfigStore
from serving.redis_server import RedisServer
from serving.settings import (
    ArmSettings,
    GatewaySettings,
    KnobSettings,
    LlmSimSettings,
    RulesSettings,
    SemanticSettings,
    SpaceSettings,
    UpstreamSettings,
)
from tuner.config import Settings
from tuner.demo_plan import DemoPlan, plan
from tuner.errors import CommandError
from tuner.loop import Interval, LoopSettings, Tuner
from tuner.policies import ruling_policy
from tuner.stopping import remembered_interrupts, set_within, signals_to

_log = logging.getLogger(__name__)

ARMS = ("control", "treatment")
INTERVAL = 5.0
"""Seconds between two decisions: the run is short, so the loop is fast."""

SCRAPE_INTERVAL = 1.0
START_UP = 30.0
"""Seconds of a run that starting takes, expected; the traffic gets what is left."""

REPORT_TIME = 12.0
"""Seconds kept for the last requests to be answered and for the report."""

SHORTEST = 20.0
"""Seconds of traffic below which there is nothing to see."""


class DemoError(CommandError):
    """The demo cannot run as asked; says why and what to do."""


@dataclass(frozen=True)
class DemoOptions:
    """What the command line asks for.

    Attributes:
        trace: A real trace, or None for the generator.
        minutes: Length of the whole run, starting and reporting included.
        directory: Where ledger, access log and report go.
        policy: The policy of the tuned arm; see :func:`agents.registry.load_policy`.
        seed: Seed of the generator and salt of the assignment.
        command: The command line, for the report.
    """

    trace: Path | None
    minutes: float
    directory: Path
    policy: str
    seed: int = 0
    command: str = "cachepilot demo"


@dataclass(frozen=True)
class DemoResult:
    """How a run ended.

    Attributes:
        summary: The report's summary and what the run was, JSON-ready.
        report: The page.
        complete: False if it was interrupted; the report then is of what was seen.
    """

    summary: dict[str, Any]
    report: Path
    complete: bool


class DemoView(Protocol):
    """Shows a run while it goes on."""

    def stage(self, text: str) -> None:
        """Something begins that takes a while."""
        ...

    def planned(self, planned: DemoPlan, policy: str) -> None:
        """The workload is known and traffic begins."""
        ...

    def interval(self, turn: Interval) -> None:
        """The tuner made a turn."""
        ...

    def answered(self, request: ReplayedRequest, seconds: float) -> None:
        """A request was answered, so many seconds after the traffic began."""
        ...


def generated(seed: int, seconds: float) -> Trace:
    """Return the demo's own workload: one day of user sessions with drift and two changes of what is popular.

    Args:
        seed: Of the generator.
        seconds: Length of the traffic that it will be squeezed into.
    """
    count = int(60 * max(seconds, SHORTEST))
    day = 24 * 3600.0
    return sessions(
        count, max(200, count // 5), alpha=0.9, drift=0.5, duration=day, diurnal=0.5, hot_swaps=(0.4 * day, 0.7 * day), seed=seed
    )


def run_demo(options: DemoOptions, settings: Settings, view: DemoView) -> DemoResult:
    """Run the demo to its end, to its first SIGINT or SIGTERM, or to its first fault.

    Raises:
        DemoError: If the time is too short.
        envs.workloads.errors.TraceError: If the trace cannot be read.
    """
    began = time.monotonic()
    ends = began + options.minutes * 60.0
    if options.minutes * 60.0 < START_UP + REPORT_TIME + SHORTEST:
        least = math.ceil((START_UP + REPORT_TIME + SHORTEST) / 6.0) / 10.0
        raise DemoError(f"demo: --minutes {options.minutes:g}: starting and reporting take time; expected at least {least:.1f}")
    warnings: list[str] = []
    policy = ruling_policy(options.policy, settings.tuner, warnings.append)
    for warning in warnings:
        _log.warning(warning)
    traffic_estimate = ends - began - START_UP - REPORT_TIME
    view.stage("reading the workload")
    trace = load(options.trace) if options.trace is not None else generated(options.seed, traffic_estimate)
    planned = plan(trace, traffic_estimate)
    options.directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(remembered_interrupts())
        view.stage("starting Redis")
        redis = stack.enter_context(RedisServer())
        view.stage("starting the simulated model")
        sized = LlmSimSettings(port=0, **asdict(planned.model))
        model = stack.enter_context(LlmSimProcess(sized))
        view.stage("starting the gateway on Ray Serve")
        gateway_settings = _gateway_settings(planned, redis.url, model.base_url, options)
        interrupts.check()
        gateway = stack.enter_context(start_gateway(gateway_settings, metrics_interval=SCRAPE_INTERVAL))
        interrupts.check()
        prices = replace(settings.prices, time_scale=planned.compression)
        ledger = stack.enter_context(Ledger(f"sqlite:///{options.directory / 'ledger.db'}"))
        experiment = Experiment(
            name="demo",
            namespace=gateway_settings.namespace,
            control=ARMS[0],
            treatment=ARMS[1],
            salt=gateway_settings.salt,
            shares=gateway_settings.shares,
            started_at=time.time(),
            prices=prices,
            note=planned.note,
            knobs=dict.fromkeys(ARMS, planned.static),
            space=planned.space,
        )
        ledger.add_experiment(experiment)
        view.planned(planned, policy.name)
        source = ScrapeSource(lambda: [*gateway.metrics_targets(), model.metrics_url], scrape_interval=SCRAPE_INTERVAL)
        stack.callback(source.close)
        run = _Run(
            planned=planned,
            deadline=max(SHORTEST, ends - time.monotonic() - REPORT_TIME),
            url=gateway.url,
            model=model.settings.model,
            redis_url=redis.url,
            namespace=gateway_settings.namespace,
            tuner_parts={"source": source, "policies": {ARMS[1]: policy}, "recorder": ledger},
            loop_settings=LoopSettings(
                namespace=gateway_settings.namespace,
                interval=INTERVAL,
                window=window_for(INTERVAL, SCRAPE_INTERVAL),
                confirm_timeout=INTERVAL / 2,
                space=planned.space,
                prices=prices,
                limits=replace(settings.tuner.guard.limits(), max_age=4 * INTERVAL),
                smoothing=settings.tuner.smoothing,
            ),
            view=view,
        )
        complete = asyncio.run(run.traffic())
        # One Ctrl-C ends the traffic; further ones must not cost the report of what was seen.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        ended = time.time()
        view.stage("ending the gateway and writing the report")
        source.close()
        gateway.shutdown()  # the access log is whole only when its writers have closed it
        ledger.update_experiment("demo", ended_at=ended)
        report = build_report(
            ledger.get_experiment("demo"),
            ledger.decisions(namespace=gateway_settings.namespace),
            read_access_log(options.directory / "access"),
            title=f"cachepilot demo: static LRU against {policy.name} on {trace.name}",
            command=options.command,
            caveats=[*warnings, *run.caveats],
        )
        path = options.directory / "report.html"
        write_output(path, report.html)
        summary = {
            **report.summary,
            "complete": complete,
            "report": str(path.resolve()),
            "seconds": round(time.monotonic() - began, 1),
            "workload": {
                "name": trace.name,
                "kind": trace.kind,
                "requests": len(planned.trace),
                "compression": planned.compression,
                "note": planned.note,
            },
            "replay": run.replayed,
            "policy": policy.name,
            "command": options.command,
        }
        return DemoResult(summary, path, complete)


class _Run:
    """The traffic and the loop beside it, on one event loop."""

    def __init__(
        self,
        *,
        planned: DemoPlan,
        deadline: float,
        url: str,
        model: str,
        redis_url: str,
        namespace: str,
        tuner_parts: dict[str, Any],
        loop_settings: LoopSettings,
        view: DemoView,
    ) -> None:
        self._planned = planned
        self._deadline = deadline
        self._url = url
        self._model = model
        self._redis_url = redis_url
        self._namespace = namespace
        self._tuner_parts = tuner_parts
        self._loop_settings = loop_settings
        self._view = view
        self.replayed: dict[str, Any] = {}
        self.caveats: list[str] = []

    async def traffic(self) -> bool:
        """Replay and tune until the traffic is over; whether it was all sent."""
        over, interrupted, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        # A slow start must not make the run longer than was asked for.
        loop.call_later(self._deadline, stop.set)

        def interrupt() -> None:
            interrupted.set()
            stop.set()

        signals = contextlib.ExitStack()
        signals.enter_context(signals_to(interrupt))
        store = RedisConfigStore(self._redis_url, self._namespace)
        tuner = Tuner(
            store=store,
            settings=self._loop_settings,
            clock=time.time,
            wait=lambda seconds: set_within(over, seconds),
            **self._tuner_parts,
        )
        try:
            await tuner.start(dict.fromkeys(ARMS, self._planned.static))
            began = time.monotonic()
            tuning = asyncio.create_task(tuner.run(on_interval=self._view.interval))
            result = await replay(
                self._planned.trace,
                self._url,
                model=self._model,
                stop=stop,
                on_result=lambda request: self._view.answered(request, time.monotonic() - began),
            )
            over.set()
            await tuning
            self.replayed = result.summary()
            self.caveats = [result.caveat()] if result.caveat() else []
        finally:
            over.set()
            signals.close()
            await store.close()
        return not interrupted.is_set()


def _gateway_settings(planned: DemoPlan, redis_url: str, base_url: str, options: DemoOptions) -> GatewaySettings:
    knobs = KnobSettings(cache_size=planned.static.cache_size, ttl=planned.static.ttl, warmup_ratio=planned.static.warmup_ratio)
    space = {name: getattr(planned.space, name) for name in SpaceSettings.model_fields}
    return GatewaySettings(
        namespace="demo",
        redis_url=redis_url,
        arms={arm: ArmSettings(share=1 / len(ARMS), knobs=knobs) for arm in ARMS},
        salt=f"demo-{options.seed}",
        space=SpaceSettings(**space),
        rules=RulesSettings(
            staleness_half_life=planned.staleness_half_life, semantic=SemanticSettings(enabled=planned.trace.kind == "semantic")
        ),
        upstream=UpstreamSettings(base_url=base_url),
        port=0,
        metrics_port=0,
        access_log=(options.directory / "access").resolve(),
    )
