"""Made workloads have the properties that they were asked for."""

from __future__ import annotations

import inspect
import math
import re
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from envs.settings import EnvsSettings
from envs.workloads import WORKLOADS, Trace, TraceError, concat, draw_workload, make, mix, sessions, zipf_ranks
from envs.workloads.catalogue import find
from envs.workloads.patterns import alternate


def top(trace_keys: np.ndarray, count: int = 50) -> set[int]:
    keys, counts = np.unique(trace_keys, return_counts=True)
    return set(keys[np.argsort(-counts)][:count].tolist())


def test_equal_arguments_give_equal_traces_and_seeds_differ() -> None:
    first, again, other = (sessions(2_000, 300, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.key, again.key)
    assert np.array_equal(first.time, again.time)
    assert not np.array_equal(first.key, other.key)


def test_requests_are_as_many_as_asked_and_within_the_duration() -> None:
    trace = sessions(1_234, 100, duration=500.0)
    assert len(trace) == 1_234
    assert 0 <= trace.time[0] <= trace.time[-1] < 500.0


def test_ranks_follow_zipfs_law() -> None:
    ranks = zipf_ranks(np.random.default_rng(0), 100, 1.0, 200_000)
    counts = np.bincount(ranks, minlength=100)
    expected = 1 / np.arange(1, 101)
    assert counts[:20] / 200_000 == pytest.approx((expected / expected.sum())[:20], rel=0.05)


def test_load_follows_the_hour() -> None:
    counts, _ = np.histogram(sessions(40_000, 100, duration=1_000.0, diurnal=0.8).time, 4)
    assert counts[1:3].sum() > 2 * counts[[0, 3]].sum()
    flat, _ = np.histogram(sessions(40_000, 100, duration=1_000.0, diurnal=0.0).time, 4)
    assert flat.max() < 1.1 * flat.min()


def test_drift_replaces_popular_keys() -> None:
    kept = {}
    for drift in (0.0, 3.0):
        trace = sessions(40_000, 1_000, drift=drift, duration=1_000.0, seed=4)
        kept[drift] = len(top(trace.key[:10_000]) & top(trace.key[-10_000:]))
    assert kept[0.0] > 35
    assert kept[3.0] < 10


def test_a_hot_swap_changes_what_is_popular_at_once() -> None:
    trace = sessions(40_000, 1_000, drift=0.0, duration=1_000.0, hot_swaps=[500.0], seed=4)
    before, after = trace.key[trace.time < 500], trace.key[trace.time >= 500]
    assert len(top(before) & top(after)) < 15
    assert len(top(before[: len(before) // 2]) & top(before[len(before) // 2 :])) > 30


def test_one_key_has_one_answer() -> None:
    for text in (False, True):
        trace = sessions(5_000, 300, text=text)
        _, first, inverse = np.unique(trace.key, return_index=True, return_inverse=True)
        for column in (trace.size, trace.output_tokens, trace.input_tokens, trace.group):
            assert np.array_equal(column, column[first][inverse])


def test_wordings_of_one_meaning_share_a_group() -> None:
    trace = sessions(5_000, 50, text=True)
    assert trace.kind == "semantic"
    wordings = {group: {trace.prompt(row) for row in np.flatnonzero(trace.group == group)} for group in set(trace.group.tolist())}
    assert max(len(texts) for texts in wordings.values()) > 1
    everything = [text for texts in wordings.values() for text in texts]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_requests": 0}, {"n_keys": 0}, {"alpha": -1.0}, {"drift": float("nan")}, {"duration": 0.0}, {"diurnal": 2.0},
        {"day": 0.0}, {"repeat": 1.0}, {"session_length": 0.5}, {"think_time": -1.0},
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_named(wrong: dict[str, float]) -> None:
    arguments = {"n_requests": 10, "n_keys": 10, **wrong}
    with pytest.raises(ValueError, match=f"sessions: {next(iter(wrong))}: expected"):
        sessions(**arguments)  # type: ignore[arg-type]


SMALL = {"n_requests": 4_000, "n_keys": 400}


def same(one: Trace, other: Trace) -> bool:
    columns = [item.name for item in fields(Trace) if isinstance(getattr(one, item.name), np.ndarray)]
    return all(np.array_equal(getattr(one, column), getattr(other, column)) for column in columns)


def hits_of_lru(trace: Trace, capacity: float) -> np.ndarray:
    """Which requests an LRU of so many bytes answers that is emptied at releases."""
    held: OrderedDict[int, int] = OrderedDict()
    hit = np.zeros(len(trace), bool)
    used, releases = 0, np.searchsorted(trace.flush_time, trace.time, side="right").tolist()
    for row, (key, size) in enumerate(zip(trace.key.tolist(), trace.size.tolist(), strict=True)):
        if row and releases[row] > releases[row - 1]:
            held.clear()
            used = 0
        hit[row] = key in held
        if hit[row]:
            held.move_to_end(key)
            continue
        held[key] = size
        used += size
        while used > capacity:
            used -= held.popitem(last=False)[1]
    return hit


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_repeats_with_its_seed_has_as_many_requests_as_asked_and_says_that_it_is_made(name: str) -> None:
    first, again, other = (WORKLOADS[name](**SMALL, seed=seed) for seed in (5, 5, 6))
    assert same(first, again)
    assert not same(first, other)
    assert len(first) == SMALL["n_requests"]
    assert "not a real workload" in first.note
    assert first.name == f"{name}-5"
    assert first.time[0] >= 0
    for moments in (first.update_time, first.flush_time):
        assert np.all((moments >= 0) & (moments <= first.duration))


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_key_has_one_answer_in_every_workload(name: str) -> None:
    trace = WORKLOADS[name](**SMALL, seed=1)
    _, first, inverse = np.unique(trace.key, return_index=True, return_inverse=True)
    for column in (trace.size, trace.output_tokens, trace.input_tokens, trace.group, trace.document, trace.tenant):
        assert np.array_equal(column, column[first][inverse])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_drawn_workloads_are_of_the_size_for_training_and_repeat(seed: int) -> None:
    trace, again = (draw_workload(np.random.default_rng(seed)) for _ in range(2))
    assert same(trace, again)
    assert 2_000 <= len(trace) <= 6_000
    assert 3_000 < trace.duration <= 96 * 3600
    assert len(np.unique(trace.key)) > 50
    assert np.all(np.isin(trace.update_document, trace.document))


def test_every_pattern_is_drawn() -> None:
    drawn = {draw_workload(np.random.default_rng(seed)).name.rsplit("-", 1)[0] for seed in range(80)}
    assert drawn == set(WORKLOADS)


@pytest.mark.parametrize("ratio", [1.0, 3.0, 8.0])
def test_noon_has_as_much_more_load_than_midnight_as_asked(ratio: float) -> None:
    trace = WORKLOADS["diurnal"](60_000, 500, days=2.0, peak_to_trough=ratio, seed=2)
    hour = trace.time / 3600.0 % 24.0
    noon, midnight = (np.sum(np.abs((hour - middle + 12) % 24 - 12) < 1.0) for middle in (12.0, 0.0))
    assert noon / midnight == pytest.approx(ratio, rel=0.15)


def test_day_and_night_ask_for_different_things_and_the_next_day_for_the_same_again() -> None:
    trace = WORKLOADS["diurnal"](60_000, 1_000, days=2.0, contrast=1.0, share=1.0, drift=0.0, seed=2)
    hour = trace.time / 3600.0
    noon, night, next_noon = (top(trace.key[np.abs(hour - middle) < 2.0]) for middle in (12.0, 24.0, 36.0))
    assert len(noon & next_noon) > 35
    assert len(noon & night) < 10


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_flash_crowd_takes_its_share_with_a_few_new_keys_and_fades(share: float) -> None:
    start, half_life = 20_000.0, 2_000.0
    trace = WORKLOADS["flash-crowd"](
        40_000, 1_000, share=share, start=start, half_life=half_life, ramp=100.0, crowd_keys=4, seed=3
    )
    crowd = set(np.unique(trace.key[(trace.time > start) & (trace.time < start + half_life)])) - set(
        np.unique(trace.key[trace.time < start])
    )
    hottest = [key for key in crowd if np.sum(trace.key == key) > 50]
    assert len(hottest) == 4
    of_crowd = np.isin(trace.key, hottest)
    assert not np.any(of_crowd[trace.time < start])
    window = (trace.time >= start) & (trace.time < start + half_life + 100.0)
    assert of_crowd[window].mean() == pytest.approx(share, abs=0.03)
    since = trace.time[of_crowd] - start
    early, late = (np.sum((since > low) & (since <= low + half_life)) for low in (100.0, 100.0 + 2 * half_life))
    assert late == pytest.approx(early / 4, rel=0.35)


def test_hot_sets_take_turns_and_come_back() -> None:
    trace = WORKLOADS["hot-set-swap"](40_000, 1_000, period=3_600.0, share=1.0, drift=0.0, duration=4 * 3_600.0, seed=3)
    first, second, third, fourth = (top(trace.key[trace.time // 3_600.0 == turn]) for turn in range(4))
    assert len(first & third) > 35
    assert len(second & fourth) > 35
    assert not first & second


def test_a_scan_lowers_what_lru_answers_of_the_other_traffic() -> None:
    ratios = {}
    for share in (0.0, 0.4):
        trace = WORKLOADS["scan"](20_000, 500, share=share, scans=4, drift=0.0, seed=7)
        _, inverse, counts = np.unique(trace.key, return_inverse=True, return_counts=True)
        once = counts[inverse] == 1
        ratios[share] = hits_of_lru(trace, 100_000)[~once].mean()
        assert once.mean() >= share
    assert ratios[0.4] < ratios[0.0] - 0.02


def test_a_scan_can_come_again_with_the_same_keys() -> None:
    fresh, again = (WORKLOADS["scan"](9_000, 50, share=0.5, scans=3, again=again, seed=7) for again in (False, True))
    assert len(np.unique(again.key)) < len(np.unique(fresh.key)) - 2_900
    counts = np.unique(again.key, return_counts=True)[1]
    assert np.sum(counts == 3) > 1_400


def test_a_release_flushes_or_changes_every_key_or_both() -> None:
    stay = WORKLOADS["model-release"](**SMALL, releases=3, seed=2)
    assert len(stay.flush_time) == 3
    change = WORKLOADS["model-release"](**SMALL, releases=1, keys="change", seed=2)
    (release,) = change.flush_time
    assert not set(change.key[change.time < release]) & set(change.key[change.time >= release])
    squatting = WORKLOADS["model-release"](**SMALL, releases=1, keys="change", flush=False, seed=2)
    assert np.array_equal(squatting.key, change.key)
    assert not len(squatting.flush_time)
    with pytest.raises(ValueError, match="releases: flush: expected true where keys stay"):
        WORKLOADS["model-release"](**SMALL, flush=False)


def test_updates_hit_documents_that_are_asked_for_and_come_in_storms() -> None:
    trace = WORKLOADS["document-storm"](**SMALL, documents=100, updates=1.0, storms=2, storm_share=0.5, storm_length=60.0, seed=4)
    assert np.all(np.isin(trace.update_document, trace.document))
    asked = len(np.unique(trace.document))
    assert len(trace.update_time) == pytest.approx(2 * asked, rel=0.3)
    per_minute, _ = np.histogram(trace.update_time, np.arange(0.0, trace.duration + 60.0, 60.0))
    assert np.sort(per_minute)[-4:].sum() >= asked  # two storms, each in at most two minutes
    popular = np.sort(np.unique(trace.document, return_counts=True)[1])[::-1]
    assert popular[:10].sum() > 3 * popular[-50:].sum()
    quiet = WORKLOADS["document-storm"](**SMALL, updates=0.0, storms=0, seed=4)
    assert not len(quiet.update_time)


def test_tenants_differ_and_the_noisy_one_is_loud_for_a_while() -> None:
    trace = WORKLOADS["multi-tenant"](20_000, 500, tenants=4, noisy=0.3, noisy_start=0.5, noisy_length=0.1, duration=1e5, seed=1)
    assert set(trace.tenant) == {0, 1, 2, 3, 4}
    counts = np.bincount(trace.tenant)
    assert counts[0] > 2 * counts[3]
    noisy = trace.tenant == 4
    assert noisy.mean() == pytest.approx(0.3, abs=0.001)
    assert 0.49e5 < trace.time[noisy].min() <= trace.time[noisy].max() < 0.61e5
    assert len(np.unique(trace.key[noisy])) == noisy.sum()
    assert trace.size[noisy].mean() > 2 * np.median(trace.size[~noisy])
    keys = [set(np.unique(trace.key[trace.tenant == tenant])) for tenant in range(5)]
    assert sum(len(own) for own in keys) == len(set.union(*keys))
    reuse = [len(trace.key[trace.tenant == tenant]) / len(own) for tenant, own in enumerate(keys)]
    assert max(reuse[:4]) > 1.3 * min(reuse[:4])
    quiet = WORKLOADS["multi-tenant"](2_000, 100, tenants=2, noisy=0.0)
    assert set(quiet.tenant) == {0, 1}


def test_paraphrases_have_texts_and_the_probability_that_meaning_answers() -> None:
    trace = make("paraphrases?n_requests=500&match_probability=0.6")
    assert (trace.kind, trace.match_probability) == ("semantic", 0.6)
    assert trace.prompt(0).endswith("?")


def test_a_mix_holds_every_request_in_order_of_time() -> None:
    one, other = (WORKLOADS["sessions"](500, 50, text=True, seed=seed) for seed in (1, 2))
    both = mix([one, other])
    assert len(both) == 1_000
    assert sorted(both.key.tolist()) == sorted([*one.key.tolist(), *other.key.tolist()])
    assert sorted(both.prompt(row) for row in range(1_000)) == sorted(
        trace.prompt(row) for trace in (one, other) for row in range(500)
    )
    assert (both.kind, both.note) == ("semantic", one.note)


def test_a_mix_keeps_chains_of_prefix_blocks_whole() -> None:
    chained = [
        Trace(
            name, np.array([0.0, 0.0, 1.0, 1.0]), np.arange(start, start + 4).astype(np.uint64), np.full(4, 10),
            np.full(4, -1), np.ones(4, np.int32), np.ones(4, np.int32), chain=np.array([0, 1, 0, 1], np.int32),
        )
        for name, start in (("a", 0), ("b", 100))
    ]  # fmt: skip
    both = mix(chained)
    assert both.key.tolist() == [0, 1, 100, 101, 2, 3, 102, 103]
    assert both.chain.tolist() == [0, 1] * 4
    with pytest.raises(ValueError, match="without prefix blocks"):
        alternate(both, period=0.5)


def test_traces_one_after_the_other_keep_their_events() -> None:
    part = WORKLOADS["model-release"](500, 50, releases=1, seed=1)
    twice = concat([part, part], gap=100.0)
    assert twice.duration == pytest.approx(2 * part.duration + 100.0)
    assert twice.flush_time.tolist() == pytest.approx([part.flush_time[0], part.flush_time[0] + part.duration + 100.0])
    assert np.array_equal(twice.key[:500], twice.key[500:])


def test_mixes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="mix: traces: expected at least one"):
        mix([])
    unlike = [WORKLOADS["paraphrases"](100, 10, match_probability=chance) for chance in (0.5, 0.6)]
    with pytest.raises(ValueError, match="match_probability: expected one for all"):
        mix(unlike)
    with pytest.raises(ValueError, match="gap"):
        concat(unlike[:1], gap=-1.0)


def test_a_spec_is_a_name_with_parameters() -> None:
    assert same(make("made:flash-crowd?n_requests=1e3&n_keys=50&start=none&seed=3"), WORKLOADS["flash-crowd"](1_000, 50, seed=3))
    assert same(
        make("sessions?n_requests=500&hot_swaps=100,200&text=true"),
        WORKLOADS["sessions"](500, hot_swaps=[100.0, 200.0], text=True),
    )
    assert len(make("made:model-release?keys=change&n_requests=700").flush_time) == 2


@given(st.integers(min_value=0))
def test_a_whole_number_is_taken_with_all_its_digits(seed: int) -> None:
    assert find(f"made:scan?seed={seed}")[1] == {"seed": seed}


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_seed_beyond_what_a_float_holds_is_another_seed(name: str) -> None:
    seed = 99999999999999999999999
    made = make(f"made:{name}?n_requests=300&seed={seed}")
    assert made.name.endswith(f"-{seed}")
    assert same(made, WORKLOADS[name](300, seed=seed))
    assert not same(made, WORKLOADS[name](300, seed=int(float(seed))))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("made:flash-crowds", "one of sessions, .*did you mean flash-crowd.*got 'flash-crowds'"),
        ("made:", "expected a made workload, one of sessions"),
        ("made:scan?shares=0.3", r"a parameter of scan, one of n_requests, .*did you mean share\?.*got 'shares'"),
        ("made:scan?share=lots", "expected share: a number; got 'lots'"),
        ("made:scan?share=nan", "share: a finite number"),
        ("made:scan?share=1.5", "scan: share: expected a share from 0 to below 1, got 1.5"),
        ("made:scan?scans=1.5", "scans: a whole number"),
        ("made:scan?scans=0.9999999999999999999", "scans: a whole number"),
        ("made:scan?scans=lots", "scans: a number"),
        ("made:scan?seed=inf", "seed: a finite number"),
        ("made:scan?seed=nan", "seed: a finite number"),
        ("made:scan?seed=1e999999999", "seed: a whole number of at most 1,000 digits"),
        ("made:scan?seed=-1", "expected non-negative integer"),
        ("made:scan?scans=99999999999999999999999", "scans: a whole number of at most 100,000,000"),
        ("made:scan?again=perhaps", "again: true or false"),
        ("made:scan?again", "expected again=<value> once"),
        ("made:scan?share=0.1&share=0.2", "expected share=<value> once"),
        ("made:model-release?keys=lost", "keys: stay or change"),
        ("made:sessions?n_requests=0", "sessions: n_requests: expected from 1 to 100,000,000"),
        ("made:sessions?hot_swaps=1,x", "hot_swaps: a number"),
        ("made:diurnal?peak_to_trough=0.5", "diurnal: peak_to_trough: expected a finite ratio >= 1"),
        ("made:diurnal?contrast=2", "contrast: expected a share between 0 and 1"),
        ("made:flash-crowd?start=1e9", "start: expected seconds before the end"),
        ("made:hot-set-swap?sets=1", "sets: expected at least 2"),
        ("made:document-storm?documents=0", "documents: expected at least 1"),
        ("made:multi-tenant?n_requests=1e15", "n_requests: a whole number of at most 100,000,000"),
        ("made:multi-tenant?tenants=0", "tenants: expected at least 1"),
    ],
)
def test_a_spec_with_a_fault_is_refused_with_what_is_known(spec: str, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        make(spec)
    assert str(caught.value).startswith(f"trace {spec}: expected ")


def test_a_workload_is_named_by_its_spec_or_by_single_values_but_not_by_both() -> None:
    named = EnvsSettings.model_validate({"workload": {"spec": "made:scan?n_requests=300&n_keys=20"}})
    assert len(named.workload.generate()) == 300
    assert EnvsSettings.model_validate(named.model_dump()) == named
    with pytest.raises(ValidationError, match="expected either spec or single values, got spec 'scan' and alpha"):
        EnvsSettings.model_validate({"workload": {"spec": "scan", "alpha": 0.3}})
    with pytest.raises(ValidationError, match="did you mean flash-crowd"):
        EnvsSettings.model_validate({"workload": {"spec": "flash-crowds"}})


def test_the_page_on_workloads_has_every_made_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text("utf-8").partition("## Made workloads")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == set(WORKLOADS)
    for name, text in re.findall(r"^\| `([\w-]+)` \| \D.*\| (.*) \|$", page, re.MULTILINE):
        parameters = inspect.signature(WORKLOADS[name]).parameters
        named = set(re.findall(r"`(\w+)`", text)) - {"stay", "change"}
        assert named <= set(parameters), name


def test_the_page_tells_the_figures_of_every_made_workload() -> None:
    page = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text("utf-8").partition("## Made workloads")[2]
    for name, workload in WORKLOADS.items():
        trace = workload()
        _, first = np.unique(trace.key, return_index=True)
        footprint = int(trace.size[first].sum())
        hits = [hits_of_lru(trace, capacity).mean() for capacity in (math.inf, footprint / 16)]
        assert (
            f"| `{name}` | {len(trace):,} | {trace.duration / 3600:.0f} h | {len(first):,} | {footprint / 2**20:.1f} MiB "
            f"| {hits[0]:.0%} | {hits[1]:.0%} |"
        ) in page
