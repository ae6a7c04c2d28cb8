"""The command line. Each command is thin: it reads settings, calls the part that does the work, and shows the result.

Exit codes: 0 ok, 1 failed, 2 wrong usage or settings.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tuner.evaluate_command import evaluate
from tuner.policy_commands import policy_app
from tuner.soak_command import soak

app = typer.Typer(
    name="cachepilot",
    help="Tunes the cache in front of a large language model, and proves that it helps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
experiment_app = typer.Typer(help="A/B experiments: start, watch, end, report.", no_args_is_help=True)
app.add_typer(experiment_app, name="experiment")
trace_app = typer.Typer(help="Traces: what is in one.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(policy_app, name="policy")
app.command()(evaluate)
app.command()(soak)

out = Console()
err = Console(stderr=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="settings file (YAML); default: $CACHEPILOT_CONFIG")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="ppo, curve, static:<size>,<ttl>,<warmup>, or a directory")]

API_KEY = "CACHEPILOT_API_KEY"
"""The variable that holds the key to ask with."""

TraceArgument = Annotated[
    str, typer.Argument(metavar="TRACE", help="a trace file, or made:<workload>?<option>=<value>, for instance made:flash-crowd")
]
LimitOption = Annotated[int | None, typer.Option(help="requests to read at most, from the start", min=1)]
FormatOption = Annotated[str | None, typer.Option("--format", help="the file's format; default: told by its content")]
ColumnOption = Annotated[
    list[str] | None, typer.Option("--column", help="what a column of a CSV or Parquet file is: time=ts, key=path; repeatable")
]
SkipOption = Annotated[bool, typer.Option("--skip-bad-lines", help="count lines that cannot be read and leave them out")]
IndependentOption = Annotated[bool, typer.Option("--independent", help="answer prefix blocks one by one, not as chains")]
HalfLifeOption = Annotated[str | None, typer.Option(help="age at which half of the answers are outdated, for instance 12h")]
SlotsOption = Annotated[int | None, typer.Option(help="requests that the model runs at the same time", min=1)]
TtftOption = Annotated[str | None, typer.Option(help="the model's time to the first token, for instance 80ms")]
TpotOption = Annotated[str | None, typer.Option(help="the model's time per output token, for instance 2ms")]
L1Option = Annotated[float | None, typer.Option(help="share of the budget that may be resident in memory", min=0.0, max=1.0)]
EvictionOption = Annotated[
    str | None,
    typer.Option(
        "--memory-eviction", help="who goes from memory: clock, as in the arena of a node, or lru, as in a replica's own"
    ),
]
PricesOption = Annotated[Path | None, typer.Option("--prices", help="a price book (YAML); default: the one that comes with us")]
SeedOption = Annotated[int, typer.Option(help="of what is drawn", min=0)]


@app.command()
def demo(
    trace: Annotated[Path | None, typer.Option(help="a real trace; without one a generator of user sessions is used")] = None,
    minutes: Annotated[float, typer.Option(help="length of the whole run", min=1.1, max=60.0)] = 3.5,
    output: Annotated[Path | None, typer.Option(help="folder of the run; default: runs/demo-<time>")] = None,
    policy: Annotated[str, typer.Option(help="policy of the tuned arm")] = "ppo",
    seed: Annotated[int, typer.Option(help="seed of the generator and salt of the split", min=0)] = 0,
    headless: Annotated[bool, typer.Option("--headless", help="plain lines instead of a live display")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the summary to this file; - for stdout")] = None,
    config: ConfigOption = None,
) -> None:
    """Run the whole line on this machine: traffic, gateway, tiers, signals, PPO, knobs, A/B report."""
    from agents.output_file import write_output
    from tuner.demo import DemoOptions, run_demo
    from tuner.demo_view import LiveView, PlainView, summary_panel
    from tuner.outputs import refuse_unwritable

    if json_file != Path("-"):
        refuse_unwritable("--json", json_file)
    settings = _settings(config)
    directory = output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    options = DemoOptions(trace, minutes, directory, policy, seed, _command())
    # With the JSON on standard output, everything else goes to standard error.
    console = err if json_file == Path("-") else out
    try:
        with PlainView(console) if headless or not console.is_terminal else LiveView(console) as view:
            result = run_demo(options, settings, view)
    except KeyboardInterrupt:
        err.print("interrupted before there was anything to report; nothing was left running", style="yellow")
        raise typer.Exit(130) from None
    text = json.dumps(result.summary, indent=2, allow_nan=False)
    if json_file == Path("-"):
        sys.stdout.write(text + "\n")
    console.print(summary_panel(result.summary))
    console.print(f"report: {result.summary['report']}", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None and json_file != Path("-"):
        # Last: should it fail, the summary was shown.
        write_output(json_file, text + "\n")
    if not result.complete:
        raise typer.Exit(130)


@app.command()
def serve(
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="port of the ingress; 0 takes a free one", min=0, max=65535)] = None,
    dashboard: Annotated[bool, typer.Option(help="run Ray's dashboard too; Prometheus' discovery file needs it")] = False,
) -> None:
    """Run the gateway on a Ray of its own until Ctrl-C. Without gateway.redis_url it brings an embedded Redis."""
    from tuner.serving_commands import serve_gateway

    serve_gateway(_settings(config), port=port, dashboard=dashboard, say=_say)


@app.command("llm-sim")
def llm_sim(
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="port; 0 takes a free one", min=0, max=65535)] = None,
    slots: Annotated[int | None, typer.Option(help="requests that run at the same time", min=1)] = None,
) -> None:
    """Run the simulated model server (OpenAI's chat and legacy completions and embeddings, vLLM's metrics) until Ctrl-C."""
    from serving.llm_sim import run

    chosen = {name: value for name, value in (("port", port), ("slots", slots)) if value is not None}
    settings = _settings(config).llm_sim.model_copy(update=chosen)
    run(settings, on_start=lambda url: out.print(f"llm-sim: {settings.model} on {url}", markup=False))


@app.command()
def tune(
    config: ConfigOption = None,
    policy: PolicyOption = None,
    intervals: Annotated[int | None, typer.Option(help="end after so many decisions; default: run until Ctrl-C", min=1)] = None,
    as_json: JsonOption = False,
) -> None:
    """Tune a running gateway: every interval observe, decide, guard, apply, verify, record."""
    from tuner.tune_command import tune_gateway

    settings = _settings(config)
    if policy is not None:
        settings = settings.model_copy(update={"tuner": settings.tuner.model_copy(update={"policy": policy})})

    def show(line: dict[str, Any]) -> None:
        if as_json:
            sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
            sys.stdout.flush()
        else:
            out.print(line["text"], markup=False, soft_wrap=True, highlight=False)

    asyncio.run(tune_gateway(settings, intervals=intervals, show=show))


@app.command()
def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="training settings (YAML), as in experiments/configs")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="folder that the artifacts' folders are made in")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="instead of the settings' seeds; repeatable", min=0)] = None,
    variant: Annotated[list[str] | None, typer.Option(help="instead of the settings' variants; repeatable")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="folder of the real traces", envvar="CACHEPILOT_TRACES", file_okay=False, exists=True)
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="on a Ray cluster: trainings and their rollouts side by side")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="begin anew instead of going on from checkpoints")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train PPO policies in simulation; writes artifacts and says how they do against the curve on what is held out.

    Given again, it goes on where it was interrupted.
    """
    from experiments.train import train as run_training
    from experiments.train_settings import changed, load_train_settings
    from tuner.errors import CommandError

    settings = changed(load_train_settings(config), output=output, seeds=seed, variants=variant, traces_dir=traces)
    try:
        paths = run_training(settings, command=_command(), console=err, fresh=fresh, ray=ray or None)
    except KeyboardInterrupt:
        err.print(
            "interrupted: the same command goes on from its last checkpoint, if it has made one; with --fresh it begins anew",
            style="yellow",
        )
        raise typer.Exit(130) from None
    except ValueError as error:
        # Checkpoints of another training, demonstrations or traces that cannot be used: told as python -m experiments.train does.
        raise CommandError(f"train: {error}") from error
    if as_json:
        found = [{"artifact": str(path), "card": json.loads((path / "card.json").read_text(encoding="utf-8"))} for path in paths]
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        for path in paths:
            out.print(f"policy: {path}\nuse it: cachepilot tune --policy {path}", markup=False)


@app.command()
def replay(
    trace: TraceArgument,
    url: Annotated[
        str, typer.Option(help="base URL of a gateway or any OpenAI-compatible server, without /v1")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="model name in the requests")] = "llm-sim",
    limit: Annotated[int | None, typer.Option(help="requests at most", min=1)] = None,
    speed: Annotated[float, typer.Option(help="times faster than the trace's own time", min=0.001)] = 1.0,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="key to ask with; other users see command lines: better by the variable", envvar=API_KEY),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a trace's requests to a gateway at their own times."""
    from experiments.replay import ReplayedRequest
    from experiments.replay import replay as run_replay
    from experiments.trace_source import TraceSource

    settings = _settings(config).experiments.replay
    workload = TraceSource(trace, limit).whole().compress(speed)
    rate = f": {len(workload) / workload.duration:,.1f} a second" if workload.duration > 0 else ""
    counts: Counter[int] = Counter()

    async def send(show: Callable[[str], None]) -> Any:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)

        def count(request: ReplayedRequest) -> None:
            counts[request.status] += 1
            others = [(status, many) for status, many in sorted(counts.items()) if not 200 <= status < 300]
            failed = "".join(
                f", {many:,} {f'with status {status}' if status else 'without an answer'}" for status, many in others
            )
            show(f"{counts.total():,} sent{failed}; Ctrl-C ends it")

        def begun() -> None:
            requests = f"{len(workload):,} request{'s' * (len(workload) != 1)}"
            err.print(f"sending {requests} in {workload.duration:,.0f} s{rate}", markup=False)

        return await run_replay(
            workload, url, model=model, api_key=api_key, on_start=begun, on_result=count, stop=stop, **settings.model_dump()
        )

    with err.status("replaying") as status:
        result = asyncio.run(send(status.update))
    _show(result.summary(), as_json)
    if caveat := result.caveat():
        err.print(caveat, style="yellow", markup=False, soft_wrap=True)
    if result.stopped:
        raise typer.Exit(130)


@app.command()
def bench(
    which: Annotated[
        str,
        typer.Argument(
            help="http, gateway, memory, sim, ghost, decision, ppo-update, fidelity, fidelity-live, semantic-errors, "
            "semantic-lookup, all"
        ),
    ] = "all",
    traces: Annotated[Path | None, typer.Option(help="folder of the real traces; default: $CACHEPILOT_TRACES")] = None,
    seconds: Annotated[float, typer.Option(help="length of each HTTP measurement", min=1.0)] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Measure us and the peers in one run, as ratios."""
    from tuner.bench_command import run_benchmarks, tables
    from tuner.pipes import widen

    results = run_benchmarks(which, traces=traces, seconds=seconds, say=lambda text: err.print(text, markup=False))
    if as_json:
        sys.stdout.write(json.dumps([result.to_dict() for result in results], indent=2, allow_nan=False) + "\n")
        return
    widen(out)
    for table in tables(results):
        out.print(table)


@app.command()
def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Say what is installed, what is missing, and what takes its place, for the settings that serve would have."""
    from tuner.doctor import examine, healthy
    from tuner.pipes import widen

    checks = examine(config)
    if as_json:
        fields = ("name", "status", "detail", "remedy")
        sys.stdout.write(json.dumps([{name: getattr(check, name) for name in fields} for check in checks], indent=2) + "\n")
    else:
        widen(out)
        table = Table(box=None)
        for heading in ("", "part", "found", "what to do, or what takes its place"):
            table.add_column(heading, overflow="fold")
        marks = {"ok": "[green]ok[/]", "absent": "[yellow]-[/]", "failed": "[red]failed[/]"}
        for check in checks:
            table.add_row(marks[check.status], escape(check.name), escape(check.detail), escape(check.remedy))
        out.print(table)
    if not healthy(checks):
        raise typer.Exit(1)


@trace_app.command("info")
def trace_info(
    trace: TraceArgument,
    window: Annotated[str | None, typer.Option(help="length of the windows: 10m; default: a part of the trace")] = None,
    limit: LimitOption = None,
    format: FormatOption = None,
    column: ColumnOption = None,
    skip_bad_lines: SkipOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is in a trace: load, keys, working set, reuse, change over time, what an infinite cache would hit."""
    from tuner.trace_commands import TraceOptions, show_info

    show_info(TraceOptions(trace, limit, format, column or (), skip_bad_lines), window=window, as_json=as_json, out=out, err=err)


@app.command()
def simulate(
    trace: TraceArgument,
    cache_size: Annotated[str, typer.Option(help="byte budget: 64MiB, 1.5GiB; 0 keeps nothing")] = "64MiB",
    ttl: Annotated[str, typer.Option(help="time to live: 5m, 1h30m, never")] = "1h",
    warmup_ratio: Annotated[float, typer.Option(help="share of the hot set that is kept warm", min=0.0, max=1.0)] = 0.0,
    window: Annotated[str | None, typer.Option(help="length of the windows; default: at most 200 of them")] = None,
    l1_share: L1Option = None,
    memory_eviction: EvictionOption = None,
    half_life: HalfLifeOption = None,
    slots: SlotsOption = None,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    independent: IndependentOption = False,
    prices: PricesOption = None,
    limit: LimitOption = None,
    format: FormatOption = None,
    column: ColumnOption = None,
    skip_bad_lines: SkipOption = False,
    seed: SeedOption = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what one setting of the cache would have done on a trace."""
    from tuner.trace_commands import CacheOptions, TraceOptions, show_simulation

    show_simulation(
        TraceOptions(trace, limit, format, column or (), skip_bad_lines),
        CacheOptions(l1_share, half_life, slots, ttft, tpot, independent, prices, memory_eviction),
        _settings(config),
        cache_size=cache_size,
        ttl=ttl,
        warmup_ratio=warmup_ratio,
        window=window,
        seed=seed,
        as_json=as_json,
        out=out,
        err=err,
    )


@app.command()
def advise(
    trace: TraceArgument,
    current_cache_size: Annotated[str | None, typer.Option(help="the budget in force, to compare with: 64MiB")] = None,
    current_ttl: Annotated[str | None, typer.Option(help="the time to live in force: 1h; default: never")] = None,
    current_warmup_ratio: Annotated[float, typer.Option(help="the warm-up ratio in force", min=0.0, max=1.0)] = 0.0,
    max_cache_size: Annotated[str | None, typer.Option(help="largest budget to consider: 8GiB")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with the heat map to this file")] = None,
    exact_requests: Annotated[
        int, typer.Option(help="longer traces are sampled, and only the few settings that matter simulated", min=0)
    ] = 2_000_000,
    l1_share: L1Option = None,
    half_life: HalfLifeOption = None,
    slots: SlotsOption = None,
    ttft: TtftOption = None,
    tpot: TpotOption = None,
    independent: IndependentOption = False,
    prices: PricesOption = None,
    limit: LimitOption = None,
    format: FormatOption = None,
    column: ColumnOption = None,
    skip_bad_lines: SkipOption = False,
    seed: SeedOption = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which cache size and TTL a trace asks for, what they would save, and how sure that is."""
    from tuner.trace_commands import CacheOptions, TraceOptions, show_advice

    show_advice(
        TraceOptions(trace, limit, format, column or (), skip_bad_lines),
        CacheOptions(l1_share, half_life, slots, ttft, tpot, independent, prices),
        _settings(config),
        current_cache_size=current_cache_size,
        current_ttl=current_ttl,
        current_warmup_ratio=current_warmup_ratio,
        max_cache_size=max_cache_size,
        exact_requests=exact_requests,
        seed=seed,
        html=html,
        command=_command(),
        as_json=as_json,
        out=out,
        err=err,
    )


@experiment_app.command("start")
def experiment_start(
    name: Annotated[str, typer.Argument(help="a name that the ledger does not have yet")],
    control: Annotated[str, typer.Option(help="the arm that is compared against")] = "control",
    treatment: Annotated[str, typer.Option(help="the arm whose effect is asked for")] = "treatment",
    note: Annotated[str, typer.Option(help="what a reader of the report has to know")] = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record that an experiment begins now; requests before it do not count."""
    from tuner.experiment_commands import start_experiment
    from tuner.experiment_view import with_moments

    found = start_experiment(_settings(config), name, control=control, treatment=treatment, note=note, now=time.time())
    _show(found if as_json else with_moments(found), as_json)


@experiment_app.command("status")
def experiment_status(
    name: Annotated[str | None, typer.Argument(help="an experiment; without it all are listed")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how an experiment stands: decisions, requests, the latest knobs; without a name, what there is and what was changed."""
    from tuner.experiment_commands import status
    from tuner.experiment_view import moment, status_rows, with_moments

    found = status(_settings(config), name, now=time.time())
    if as_json or name is not None:
        _show(found if as_json else status_rows(found), as_json)
        return
    _show([with_moments(item) for item in found["experiments"]] or {"experiments": "none"}, as_json)
    if found["changes"]:
        earlier = f", and {found['earlier_changes']:,} earlier ones" if found["earlier_changes"] else ""
        _say(f"changed by operators (the latest {len(found['changes'])}{earlier}):")
    for change in found["changes"]:
        _say(f"  {moment(change['at'])}  {change['message']}")


@experiment_app.command("stop")
def experiment_stop(
    name: Annotated[str, typer.Argument()],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record that an experiment ends now; later requests do not count. Knobs stay as they are."""
    from tuner.experiment_commands import stop_experiment
    from tuner.experiment_view import with_moments

    found = stop_experiment(_settings(config), name, now=time.time())
    _show(found if as_json else with_moments(found), as_json)


@experiment_app.command("report")
def experiment_report(
    name: Annotated[str, typer.Argument()],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the page; default: <name>.html")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an experiment's report as one self-contained HTML page."""
    from tuner.experiment_commands import write_report

    settings = _settings(config)
    with err.status("making the report") as status:  # which shows nothing where there is no terminal
        page = output or Path(f"{name}.html")
        summary = write_report(settings, name, page, command=_command(), progress=lambda text: status.update(escape(text)))
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    else:
        out.print(f"{summary['verdict']}: {summary['reason']}\nreport: {summary['report']}", markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line; an expected fault is one clear message and exit code 1 or 2, never a traceback."""
    try:
        app()
    except KeyboardInterrupt:
        err.print("interrupted", style="yellow")
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        err.print("error:", style="red", end=" ")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """Return 2 for faults of usage and settings, 1 for faults of the world, None for faults of ours."""
    from agents.artifact import ArtifactError
    from envs.price_book import PriceBookError
    from envs.sources import SourceUnavailable
    from envs.workloads.errors import TraceError
    from experiments.access import AccessLogError
    from experiments.design import DesignError
    from experiments.ledger import LedgerError
    from experiments.replay import ReplayError
    from experiments.units import InputError
    from serving.app import GatewayNotStarted
    from serving.config_store import ConfigStoreUnavailable
    from serving.redis_server import RedisServerError
    from tuner.config import SettingsError
    from tuner.errors import CommandError

    if isinstance(error, (SettingsError, DesignError, InputError, PriceBookError)):
        return 2
    known = (
        ArtifactError, TraceError, AccessLogError, LedgerError, ReplayError, SourceUnavailable, ConfigStoreUnavailable,
        GatewayNotStarted, RedisServerError, CommandError, OSError,
    )  # fmt: skip
    return 1 if isinstance(error, known) else None


def _settings(path: Path | None) -> Any:
    from tuner.config import load_settings

    return load_settings(path)


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True, highlight=False)


def _command() -> str:
    """Return the command line as one would type it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _show(value: Any, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    elif isinstance(value, list):
        for item in value:
            _show(item, as_json=False)
    else:
        table = Table(box=None, show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, item in value.items():
            table.add_row(escape(str(name)), escape(item if isinstance(item, str) else json.dumps(item)))
        out.print(table)


if __name__ == "__main__":
    main()
