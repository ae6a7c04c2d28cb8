"""The curve that ghosts are measured against is the simulator's, also where an answer changes in size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace
from experiments.bench.exact_curve import exact_hits
from serving.knobs import Knobs

SIZES, TTLS = np.array([120, 400, 1_000]), np.array([3.0, 20.0, 1e6])
REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300), st.floats(0.0, 9.0)), min_size=4, max_size=120)


@given(REQUESTS, st.sampled_from([0.0, 0.1, 0.5]), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_setting_has_the_simulators_hits(requests: list[tuple[int, int, float]], jitter: float, windows: int) -> None:
    keys, sizes, gaps = (np.array(column) for column in zip(*requests, strict=True))
    ones = np.ones(len(keys), np.int32)
    trace = Trace(
        name="drawn",
        time=np.cumsum(gaps),
        key=keys.astype(np.uint64),
        size=sizes.astype(np.int64),
        group=np.full(len(keys), -1, np.int64),
        input_tokens=ones,
        output_tokens=ones,
    )
    hits = exact_hits(trace, SIZES, TTLS, ttl_jitter=jitter, windows=windows)
    assert hits.shape == (windows, 3, 3)
    config = replace(SimConfig(ghost_keys=0), ttl_jitter=jitter)
    for row, size in enumerate(SIZES.tolist()):
        for column, ttl in enumerate(TTLS.tolist()):
            signals = CacheSimulator(trace, config, Knobs(size, ttl)).step(trace.duration + 1.0).signals
            assert hits[:, row, column].sum() == round(signals.hit_ratio * len(trace))
