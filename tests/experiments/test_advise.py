"""The choice is made on one part and judged on another; noise is called noise; prices move it as they should."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.objective import Prices
from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import TraceError
from experiments import advise as module
from experiments.advice import CHOSEN_ON, WORTH_IT, judge, saving_of, worth_it
from experiments.advise import NO_CACHE, advise
from experiments.stats import Interval
from experiments.trace_source import TraceSource
from experiments.units import InputError
from serving.knobs import Knobs
from tests.experiments.samples import finite

CONFIG = SimConfig(ghost_keys=0)
SPEC = "made:sessions?n_requests=2500&n_keys=300&seed=5&drift=0"
TINY = Knobs(4096, 30.0)


@pytest.fixture(scope="module")
def advice():
    return advise(TraceSource(SPEC), config=CONFIG, current=TINY)


def test_every_setting_of_the_grid_is_simulated_exactly(advice):
    grid = advice.grid
    assert grid.exact
    assert grid.cost.shape == grid.hit_ratio.shape == (16, 8)
    assert math.isinf(grid.ttls[-1])
    made = TraceSource(SPEC).open().trace
    for row, column in ((0, 0), (7, 4), (15, 7)):
        knobs = Knobs(int(grid.sizes[row]), float(grid.ttls[column]))
        window = CacheSimulator(made, advice.config, knobs).step(made.duration + 1e-6)
        assert grid.hit_ratio[row, column] == pytest.approx(window.signals.hit_ratio)
    assert np.all(np.diff(grid.hit_ratio[:, -1]) >= 0)


def test_the_choice_is_the_cheapest_of_the_first_part_alone(advice):
    first = advice.chosen_on
    least = advice.recommended.cost(advice.prices, first)
    for other in (*advice.compared.values(), advice.hindsight):
        if other is not advice.references["unlimited cache"]:
            assert least <= other.cost(advice.prices, first) * (1 + 1e-9)
    assert advice.hindsight.cost(advice.prices) <= advice.recommended.cost(advice.prices) * (1 + 1e-9)
    early, late = advice.recommended.requests(first), advice.recommended.requests(advice.held_out)
    assert early + late == advice.facts.requests
    assert early / advice.facts.requests == pytest.approx(CHOSEN_ON, abs=0.05)


def test_a_clear_saving_is_a_change_and_its_figures_agree(advice):
    assert advice.verdict == "change"
    saving = advice.saving(advice.current)
    late = advice.current.cost(advice.prices, advice.held_out) - advice.recommended.cost(advice.prices, advice.held_out)
    assert saving.held_out.value == pytest.approx(late)
    assert saving.held_out.low > 0
    assert saving.share == pytest.approx(late / advice.current.cost(advice.prices, advice.held_out))
    assert "held-out" in advice.reason


def test_what_is_told_to_scripts_is_json_and_complete(advice):
    told = advice.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert finite(told)
    assert {"trace", "verdict", "recommended", "current", "settings", "savings", "sensitivity", "curve", "prices"} <= set(told)
    assert set(told["settings"]["current"]) == {"knobs", "chosen_on", "held_out", "whole"}
    assert "not a real workload" in told["trace"]["note"]
    assert told["savings"]["current"]["held_out"]["low"] > 0


def test_the_best_setting_in_force_is_kept(advice):
    again = advise(TraceSource(SPEC), config=CONFIG, current=advice.recommended.knobs)
    assert again.verdict == "keep"
    assert again.recommended.knobs == advice.recommended.knobs
    assert "keep what you have" in again.reason


def test_a_setting_about_as_good_is_kept_too(advice):
    best = advice.recommended.knobs
    near = replace(best, cache_size=round(best.cache_size * 1.02))
    again = advise(TraceSource(SPEC), config=CONFIG, current=near)
    assert again.verdict == "keep"


def test_without_a_current_setting_it_is_compared_with_the_best_without_expiry():
    found = advise(TraceSource(SPEC), config=CONFIG)
    assert found.verdict == "use"
    assert found.current is None
    assert set(found.compared) == {"best without expiry", "no cache", "unlimited cache"}
    assert found.to_dict()["current"] is None


def test_dear_memory_makes_the_cache_small_and_very_dear_memory_makes_it_go():
    def size(price):
        config = replace(CONFIG, prices=Prices(memory_gib_hour=price))
        return advise(TraceSource(SPEC), config=config).recommended.knobs.cache_size

    cheap, dear, ruinous = size(1e-6), size(50.0), size(1e7)
    assert cheap > dear > ruinous == 0


def test_answers_that_age_ask_for_a_shorter_ttl(advice):
    never = advice.recommended.knobs.ttl
    found = advise(TraceSource(SPEC), config=replace(CONFIG, staleness_half_life=7200.0))
    assert never > found.recommended.knobs.ttl
    assert found.recommended.knobs.cache_size > 0
    assert any("a TTL can only cost here" in text for text in advice.warnings)
    assert not any("a TTL can only cost here" in text for text in found.warnings)


def test_the_choice_moves_with_prices_and_the_rows_say_how(advice):
    rows = advice.to_dict()["sensitivity"]
    assert rows[0]["price"] is None
    assert rows[0]["knobs"] == advice.recommended.knobs.to_dict()
    assert {(row["price"], row["factor"]) for row in rows[1:]} >= {("memory_gib_hour", 0.5), ("memory_gib_hour", 2.0)}


def test_warm_up_is_tried_on_what_is_best_under_moved_prices_too():
    found = advise(TraceSource(SPEC), config=replace(CONFIG, staleness_half_life=7200.0))
    rest = replace(found.prices, stale_answer=2.0 * found.prices.stale_answer)
    again = advise(TraceSource(SPEC), config=replace(CONFIG, staleness_half_life=7200.0, prices=rest))
    (row,) = (row for row in found.outlook.moved if (row.price, row.factor) == ("stale_answer", 2.0))
    assert row.outcome.knobs == again.recommended.knobs


def test_it_is_said_what_a_trace_and_a_made_model_cannot_tell(advice):
    def said(found, words):
        return any(words in text for text in found.warnings)

    # The trace is an hour long; its cheapest setting never expires anything.
    assert advice.recommended.knobs.ttl > advice.facts.duration
    assert said(advice, "No entry gets older than the trace is long")
    assert said(advice, "The model is made up")
    short = advise(TraceSource(SPEC), config=replace(CONFIG, staleness_half_life=600.0), sized=False)
    assert short.recommended.knobs.ttl < short.facts.duration
    assert not said(short, "No entry gets older")
    assert not said(short, "The model is made up")


def test_no_cache_and_an_unlimited_one_are_what_they_are_called(advice):
    none, unlimited = advice.references["no cache"], advice.references["unlimited cache"]
    assert none.knobs == NO_CACHE
    assert none.hit_ratio == 0.0
    assert unlimited.hit_ratio == pytest.approx(advice.grid.hit_ratio.max())
    assert unlimited.totals(advice.prices).evictions == 0
    held = unlimited.batches[0][0].figures.usage.budget_bytes
    assert held == advice.facts.footprint


def test_a_long_trace_is_sampled_and_the_settings_that_matter_are_simulated(monkeypatch, advice):
    monkeypatch.setattr(module, "GHOST_KEYS", 64)
    found = advise(TraceSource(SPEC), config=CONFIG, current=TINY, exact_requests=0)
    assert not found.grid.exact
    assert "sample" in found.method
    assert found.simulated < 40
    assert found.verdict == "change"
    assert np.abs(found.grid.hit_ratio - advice.grid.hit_ratio).max() < 0.15
    # Savings are never the ghost's: the same setting has the same exact cost, however it was found.
    assert found.current.cost(found.prices) == pytest.approx(advice.current.cost(advice.prices))
    assert found.recommended.cost(found.prices) <= 1.1 * advice.recommended.cost(advice.prices)


def test_the_largest_size_can_be_bounded():
    found = advise(TraceSource(SPEC), config=CONFIG, max_size=20_000)
    assert found.grid.sizes[-1] == 20_000
    assert found.recommended.knobs.cache_size <= 20_000
    assert any("largest that was allowed" in text for text in found.warnings)
    with pytest.raises(InputError, match="at least 1 KiB"):
        advise(TraceSource(SPEC), config=CONFIG, max_size=10)


def test_too_few_requests_are_said_to_be_too_few():
    found = advise(TraceSource("made:sessions?n_requests=150&n_keys=20"), config=CONFIG, current=TINY)
    assert found.verdict == "not enough data"
    assert finite(found.to_dict())


def test_where_nothing_costs_anything_there_is_an_advice_still():
    free = Prices(
        input_mtok=0.0,
        output_mtok=0.0,
        memory_gib_hour=0.0,
        latency_second=0.0,
        stale_answer=0.0,
        slo_second=0.0,
        change_step=0.0,
    )
    found = advise(TraceSource(SPEC), config=replace(CONFIG, prices=free))
    assert found.recommended.cost(free) == 0
    assert found.verdict == "use"


def test_a_pipe_that_would_be_read_twice_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "time,key,size\n" + "".join(f"{at},{at % 7},100\n" for at in range(2000))
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    with pytest.raises(TraceError, match="a pipe gives its content once"):
        advise(TraceSource(str(pipe)), config=CONFIG, exact_requests=0)
    writer.join()


def test_requests_all_at_one_time_are_refused(tmp_path):
    path = tmp_path / "once.csv"
    path.write_text("time,key,size\n1,a,100\n1,b,100\n")
    with pytest.raises(InputError, match="at two times at least"):
        advise(TraceSource(str(path)), config=CONFIG)


def test_equal_inputs_give_equal_advice_and_progress_goes_from_reading_to_warm_up(advice):
    seen = []
    again = advise(TraceSource(SPEC), config=CONFIG, current=TINY, progress=lambda *what: seen.append(what))
    assert again.to_dict() == advice.to_dict()
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["reading", "simulating the grid", "trying warm-up"]
    assert all(0.0 <= share <= 1.0 for _, share, _ in seen)


class Batch:
    """An outcome of which only the cost by batch is known."""

    def __init__(self, costs):
        self.costs = costs
        self.batches = [()] * len(costs)

    def cost(self, prices, batches=slice(None)):
        return float(np.mean(self.costs[batches]))

    def requests(self, batches=slice(None)):
        return 100.0 * len(self.costs[batches])


@given(st.lists(st.floats(0.1, 10.0), min_size=6, max_size=20), st.floats(0.0, 5.0))
@settings(max_examples=40, deadline=None)
def test_a_saving_that_is_equal_everywhere_is_certain(costs, difference):
    best, other = Batch(np.array(costs)), Batch(np.array(costs) + difference)
    saving = saving_of(best, other, Prices(), slice(0, 3), slice(3, None))
    assert saving.held_out.value == pytest.approx(difference)
    assert saving.held_out.low == pytest.approx(difference, abs=1e-9)
    assert saving.held_out.high == pytest.approx(difference, abs=1e-9)


def test_an_interval_is_that_of_students_t():
    # Four batches that differ by 0, 1, 2 and 3: mean 1.5, standard error 0.6455, t(3) = 3.1824.
    best, other = Batch(np.zeros(6)), Batch(np.array([9.0, 9.0, 0.0, 1.0, 2.0, 3.0]))
    interval = saving_of(best, other, Prices(), slice(0, 2), slice(2, None)).held_out
    assert interval.value == 1.5
    assert interval.high - interval.value == pytest.approx(3.1824 * 0.6455, rel=1e-3)
    assert interval.value - interval.low == pytest.approx(3.1824 * 0.6455, rel=1e-3)


@pytest.mark.parametrize(
    ("low", "share", "worth"), [(0.1, 2 * WORTH_IT, True), (-0.1, 2 * WORTH_IT, False), (0.1, WORTH_IT / 2, False)]
)
def test_a_change_is_worth_making_if_it_is_clear_of_noise_and_not_small(advice, low, share, worth):
    saving = replace(advice.saving(advice.current), held_out=Interval(0.2, low, 0.3), share=share)
    assert worth_it(saving) is worth


def test_the_verdict_is_keep_when_the_rest_says_otherwise(advice):
    # The advice turned round: the tiny cache recommended against the good one.
    wrong = replace(advice, recommended=advice.current, current=advice.recommended)
    verdict, reason = judge(wrong)
    assert verdict == "keep"
    assert "costs" in reason
    assert "more on the rest" in reason
