"""What takes seconds to compile is compiled before a gateway is ready, and not on its event loop."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from serving import runtime
from serving.gateway import Gateway
from serving.settings import GatewaySettings
from tests.requirements import ROOT

USED = """
import json
import numpy as np
from serving import ghost_kernel
from serving.ghost import Ghost, compile_ghost

def compiled():
    found = {name: getattr(value, "signatures", None) for name, value in vars(ghost_kernel).items()}
    return {name: len(signatures) for name, signatures in found.items() if signatures is not None}

before = compiled()
compile_ghost()
after = compiled()
ghost = Ghost(np.array([100, 10_000, 100_000], np.int64), np.array([1.0, 60.0]), max_keys=16, rotate_every=50.0, rate=0.9)
generator = np.random.default_rng(7)
for start in range(20):
    keys = generator.integers(0, 1 << 63, 200, np.uint64)
    ghost.access_many(keys, np.full(200, 50), np.linspace(start * 10.0, start * 10.0 + 9.0, 200))
    ghost.access(1, 10, start * 10.0 + 9.5)
    ghost.take()
ghost.flush()
assert ghost.rotations > 0
print(json.dumps([before, after, compiled()]))
"""


def test_a_ghost_needs_nothing_compiled_that_was_not_before_its_first_request() -> None:
    done = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, cwd=ROOT, check=True)
    before, after, used = json.loads(done.stdout)
    assert before["distribution"] == before["access_many"] == 0
    assert after["distribution"] == after["access_many"] == 1
    assert used == after


@pytest.mark.parametrize("enabled", [True, False])
async def test_it_is_compiled_off_the_event_loop_where_there_is_a_ghost(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(runtime, "compile_ghost", lambda: threads.append(threading.get_ident()))
    gateway = Gateway(GatewaySettings.model_validate({"ghost": {"enabled": enabled}, "memory": {"shared": False}}))
    await gateway.start()
    try:
        assert len(threads) == enabled
        assert threading.get_ident() not in threads
    finally:
        await gateway.stop()
