"""The simulator does what the running gateway does: real trace, Ray Serve, Redis, a model; shrink, TTL, warm-up, flush."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from envs.workloads import load
from experiments.bench.fidelity import GOAL, GOAL_BYTES, live_phases
from experiments.live_fidelity import compare_live, worst
from tests.requirements import trace as trace_file

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")]

SECONDS = 24.0


def test_the_simulator_hits_and_holds_in_every_window_what_the_gateway_does() -> None:
    trace = load(trace_file("elastic_apache.csv.gz"), limit=2_000)
    # One request at a time: on a machine that does other things too, the order in which a burst is served is nobody's.
    # A process of its own: Ray runs once per process, and the session's may have it.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        table = pool.submit(
            compare_live, trace, live_phases(trace, SECONDS), seconds=SECONDS, max_inflight=1
        ).result()  # fmt: skip
    assert table["requests"].sum() == len(trace)
    ratio, size = worst(table)
    assert ratio <= GOAL, table.to_string()
    assert size <= GOAL_BYTES, table.to_string()
    # The replay went through what it is about.
    filled, shrunk, expiring, warmed, flushed = table.to_dict("records")
    assert shrunk["resident_bytes_gateway"] <= shrunk["cache_size"] < filled["resident_bytes_gateway"]
    assert expiring["refreshes_gateway"] == 0
    assert warmed["refreshes_gateway"] > 20
    assert flushed["refreshes_gateway"] > 20
    assert flushed["entries_gateway"] < warmed["entries_gateway"]
    assert table["hit_ratio_gateway"].between(0.2, 0.95).all()
    # Without warm-up nothing depends on anybody's timer, and the two are the same but for a request at the very end of a TTL.
    quiet = table[table["warmup_ratio"] == 0.0]
    assert np.abs(quiet["hit_ratio_simulator"] - quiet["hit_ratio_gateway"]).max() <= 2 / 400
