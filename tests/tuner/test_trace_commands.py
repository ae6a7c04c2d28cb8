"""`trace info`, `simulate` and `advise` as commands: what is printed, what is JSON, what is refused and how."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from experiments.units import InputError
from tests.requirements import trace
from tests.tuner.test_command_line_explains_faults import Cachepilot, cachepilot, failed
from tuner import trace_commands
from tuner.config import Settings, load_settings
from tuner.trace_commands import CacheOptions, TraceOptions, progress_on

__all__ = ["cachepilot"]

MADE = "made:sessions?n_requests=1500&n_keys=200&seed=5"


def test_trace_info_says_what_is_in_a_trace(cachepilot: Cachepilot) -> None:
    shown = cachepilot("trace", "info", MADE)
    assert shown.returncode == 0, shown.stderr
    for words in ("1,500", "not a real workload", "infinite cache", "reuse distance", "working set"):
        assert words in " ".join(shown.stdout.split()), words
    told = json.loads(cachepilot("trace", "info", MADE, "--json", "--window", "10m").stdout)
    assert told["requests"] == 1500
    assert told["window"] == 600.0
    assert 0 < told["infinite_hit_ratio"] < 1


def test_simulate_prints_a_summary_and_as_json_every_window(cachepilot: Cachepilot) -> None:
    setting = ("--cache-size", "100kB", "--ttl", "10m", "--warmup-ratio", "0.1")
    shown = cachepilot("simulate", MADE, *setting)
    assert shown.returncode == 0, shown.stderr
    for words in ("hit ratio", "P99", "evictions", "staleness", "sized for", "not a real workload"):
        assert words in " ".join(shown.stdout.split()), words
    told = json.loads(cachepilot("simulate", MADE, *setting, "--window", "2h", "--json").stdout)
    assert told["knobs"] == {"cache_size": 100_000, "ttl": 600.0, "warmup_ratio": 0.1}
    assert len(told["windows"]) == 12
    assert told["totals"]["requests"] == 1500
    assert set(told["totals"]["cost_per_1000"]) >= {"tokens", "memory", "latency", "total"}


def test_a_size_of_0_keeps_nothing_and_never_is_a_ttl(cachepilot: Cachepilot) -> None:
    told = json.loads(cachepilot("simulate", MADE, "--cache-size", "0", "--ttl", "never", "--json").stdout)
    assert told["totals"]["hit_ratio"] == 0.0
    assert told["knobs"]["ttl"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", MADE, "--ttl", "0"), ("ttl", "set the cache size to 0")),
        (("simulate", MADE, "--ttl", "soon"), ("--ttl", "soon", "expected")),
        (("simulate", MADE, "--cache-size", "-1MiB"), ("--cache-size", "-1MiB", "expected")),
        (("simulate", MADE, "--window", "0s"), ("--window", "> 0")),
        (("simulate", MADE, "--half-life", "0"), ("half_life", "> 0")),
        (("simulate", MADE, "--ttft", "never"), ("--ttft", "finite")),
        (("simulate", MADE, "--warmup-ratio", "2"), ("warmup-ratio",)),
        (("advise", MADE, "--current-ttl", "1h"), ("--current-cache-size",)),
        (("advise", MADE, "--max-cache-size", "10"), ("1 KiB",)),
        (("trace", "info", MADE, "--column", "time"), ("--column", "name=column")),
        (("trace", "info", MADE, "--window", "never"), ("--window", "finite")),
    ],
)
def test_what_cannot_be_used_is_named(cachepilot: Cachepilot, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    failed(cachepilot(*arguments), 2, *words)


@pytest.mark.parametrize("command", [("trace", "info"), ("simulate",), ("advise",)])
def test_what_cannot_be_read_is_named(cachepilot: Cachepilot, tmp_path: Path, command: tuple[str, ...]) -> None:
    failed(cachepilot(*command, str(tmp_path / "absent.csv")), 1, "absent.csv")
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    failed(cachepilot(*command, str(empty)), 1, "empty.csv", "empty")
    broken = tmp_path / "broken.csv"
    broken.write_text("time,key,size\n0,a,100\n1,b,many\n")
    failed(cachepilot(*command, str(broken)), 1, "broken.csv", "line 3", "many")
    torn = tmp_path / "torn.csv.gz"
    torn.write_bytes(
        gzip.compress(b"time,key,size\n" + b"".join(b"%d,%d,100\n" % (at, at * at % 997) for at in range(5000)))[:-2000]
    )
    failed(cachepilot(*command, str(torn)), 1, "torn.csv.gz", "gzip")
    failed(cachepilot(*command, "made:nothing-like-it"), 1, "nothing-like-it")


def test_bad_lines_can_be_left_out_and_are_counted(cachepilot: Cachepilot, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("when,path,n\n" + "".join(f"{at},{'x' if at % 7 else 'y'},{100 if at else 'many'}\n" for at in range(9)))
    columns = ("--column", "time=when", "--column", "key=path", "--column", "size=n")
    shown = cachepilot("simulate", str(path), *columns, "--skip-bad-lines")
    assert shown.returncode == 0, shown.stderr
    assert "1 bad line left out" in " ".join(shown.stdout.split())
    assert json.loads(cachepilot("trace", "info", str(path), *columns, "--skip-bad-lines", "--json").stdout)["skipped"] == 1


def test_advise_says_what_to_do_and_writes_the_page(cachepilot: Cachepilot, tmp_path: Path) -> None:
    page = tmp_path / "advice.html"
    options = ("--current-cache-size", "4KiB", "--current-ttl", "1m", "--html", str(page))
    shown = cachepilot("advise", MADE, *options)
    assert shown.returncode == 0, shown.stderr
    for words in ("change: ", "held out", "unlimited", "halved", "doubled", str(page), "not a real workload"):
        assert words in " ".join(shown.stdout.split()), words
    assert page.read_text().lower().startswith("<!doctype html>")
    told = json.loads(cachepilot("advise", MADE, *options, "--json").stdout)
    assert told["verdict"] == "change"
    assert told["page"] == str(page)
    assert told["savings"]["current"]["held_out"]["value"] > 0


def test_prices_come_from_a_book_and_odd_ones_are_pointed_out(cachepilot: Cachepilot, tmp_path: Path) -> None:
    failed(cachepilot("advise", MADE, "--prices", str(tmp_path / "absent.yaml")), 2, "absent.yaml")
    book = (Path(__file__).parents[2] / "envs" / "prices.yaml").read_text()
    path = tmp_path / "book.yaml"
    path.write_text(book.replace("value: 1.60", "value: 3.20"))
    told = json.loads(cachepilot("simulate", MADE, "--prices", str(path), "--json").stdout)
    plain = json.loads(cachepilot("simulate", MADE, "--json").stdout)
    assert told["prices"]["output_mtok"] == 2 * plain["prices"]["output_mtok"]
    assert told["totals"]["cost_per_1000"]["tokens"] > plain["totals"]["cost_per_1000"]["tokens"]
    odd = json.loads(
        cachepilot("advise", MADE, "--json", environ={"CACHEPILOT_ENVS__PRICES__STALE_ANSWER": "55"}).stdout
    )  # fmt: skip
    assert any("outside what somebody would pay" in text for text in odd["warnings"])


def test_prefix_blocks_are_chained_unless_told_otherwise(cachepilot: Cachepilot) -> None:
    path = str(trace("mooncake_conversation.jsonl.gz"))
    setting = ("simulate", path, "--limit", "20000", "--cache-size", "4MiB", "--ttl", "10m", "--json")
    chained, single = (json.loads(cachepilot(*setting, *more).stdout) for more in ((), ("--independent",)))
    assert (chained["prefix"], single["prefix"]) == (True, False)
    assert chained["totals"]["hit_ratio"] <= single["totals"]["hit_ratio"]


def test_the_model_is_sized_unless_it_is_given() -> None:
    plain = load_settings(None, {})
    assert CacheOptions().config(plain)[1]
    config, sized, _ = CacheOptions(slots=3, ttft="80ms", tpot="2ms").config(plain)
    assert not sized
    assert (config.upstream.slots, config.upstream.ttft, config.upstream.tpot) == (3, 0.08, 0.002)
    own = load_settings(None, {"CACHEPILOT_ENVS__SIMULATOR__UPSTREAM__SLOTS": "5"})
    config, sized, _ = CacheOptions().config(own)
    assert not sized
    assert config.upstream.slots == 5


def test_a_share_out_of_its_range_is_refused() -> None:
    with pytest.raises(InputError, match="l1_share"):
        CacheOptions(l1_share=2.0).config(Settings())
    assert TraceOptions("x", columns=("time=ts", "key= path ")).mapped() == {"time": "ts", "key": "path"}


def test_who_goes_from_memory_is_chosen_by_name_and_moves_hits_between_tiers_alone(cachepilot: Cachepilot) -> None:
    assert CacheOptions().config(Settings())[0].memory_eviction == "clock"
    path = str(trace("elastic_apache.csv.gz"))
    setting = ("simulate", path, "--limit", "5000", "--cache-size", "512KiB", "--json", "--memory-eviction")
    lru, clock = (json.loads(cachepilot(*setting, name).stdout) for name in ("lru", "clock"))
    assert (lru["memory_eviction"], clock["memory_eviction"]) == ("lru", "clock")
    assert lru["totals"]["hit_ratio"] == clock["totals"]["hit_ratio"]
    assert lru["totals"]["hit_ratio_by_tier"] != clock["totals"]["hit_ratio_by_tier"]
    with pytest.raises(InputError, match="memory_eviction: expected 'lru' or 'clock', got 'fifo'"):
        CacheOptions(memory_eviction="fifo").config(Settings())


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told() -> Callable[[list[tuple[float, float]]], str]:
    """What progress prints where there is no terminal, for moments and the share done then."""

    def run(moments: list[tuple[float, float]]) -> str:
        clock, text = Clock(), io.StringIO()
        with progress_on(Console(file=text, width=100), clock) as tell:
            for clock.now, share in moments:
                tell("reading", share, int(1000 * clock.now))
        return text.getvalue()

    return run


def test_a_later_phase_is_as_fast_as_the_time_since_the_phase_before() -> None:
    text, clock = io.StringIO(), Clock()
    with progress_on(Console(file=text, width=100), clock) as tell:
        for clock.now, phase in ((20.0, "reading"), (40.0, "simulating")):
            tell(phase, 1.0, 1000)
    assert text.getvalue().splitlines() == [
        "reading: 100%, 1,000 requests, 50 a second",
        "simulating: 100%, 1,000 requests, 50 a second",
    ]


@pytest.mark.parametrize("place", ["", "no/such/advice.html"])
def test_a_page_that_cannot_be_written_is_refused_before_the_work(cachepilot: Cachepilot, tmp_path: Path, place: str) -> None:
    shown = cachepilot("advise", "no-such-trace.csv", "--html", str(tmp_path / place))
    assert shown.returncode == 2
    assert "expected a file that can be written" in shown.stderr


def test_a_page_for_which_there_is_no_room_is_told_after_the_advice(cachepilot: Cachepilot) -> None:
    shown = cachepilot("advise", MADE, "--html", "/dev/full")
    failed(shown, 1, "/dev/full: cannot be written: No space left on device: free room there or name another file")
    assert "held out" in shown.stdout
    assert "page:" not in shown.stdout


def test_more_slots_than_can_be_are_refused(cachepilot: Cachepilot) -> None:
    shown = cachepilot("simulate", MADE, "--slots", "99999999999999999999")
    assert shown.returncode == 2
    assert "slots: expected a whole number from 1 to 1,000,000" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_short_work_shows_no_progress(told: Callable[[list[tuple[float, float]]], str]) -> None:
    assert told([(0.5, 0.3), (1.9, 1.0)]) == ""


def test_long_work_says_now_and_then_how_far_it_is_and_how_fast(told: Callable[[list[tuple[float, float]]], str]) -> None:
    lines = told([(float(second), second / 60) for second in range(1, 60)]).splitlines()
    assert len(lines) == 5
    assert lines[0] == "reading: 17%, 10,000 requests, 1,000 a second"


def test_a_terminal_gets_a_bar() -> None:
    clock, text = Clock(), io.StringIO()
    with progress_on(Console(file=text, width=100, force_terminal=True), clock) as tell:
        for clock.now, share in ((1.0, 0.2), (3.0, 0.5), (6.0, 0.9)):
            tell("reading", share, 100)
    assert "reading" in text.getvalue()
    assert "a second" in text.getvalue()


@pytest.mark.parametrize("command", [("simulate", MADE), ("advise", MADE)])
def test_who_waits_for_the_compiler_is_told(
    command: tuple[str, ...], cachepilot: Cachepilot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_commands, "compiling", lambda: "compiling the simulator first")
    assert "compiling the simulator first" in cachepilot(*command).stderr
    monkeypatch.setattr(trace_commands, "compiling", lambda: None)
    assert "compiling" not in cachepilot(*command).stderr
