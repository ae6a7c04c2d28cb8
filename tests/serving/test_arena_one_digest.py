"""An arena whose hash gives every entry the same digest, in a process of its own, since compiled code has its hash built in."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from tests.requirements import ROOT

_PATCHED = """
import sys

import numba

from serving.arena import layout


def digest(key: int, arm: int) -> int:
    return 0x123456789ABCDEF


layout.digest = numba.njit("int64(int64, int64)", _nrt=False)(digest)

from tests.serving.test_arena_one_digest import check_one_digest

check_one_digest(sys.argv[1])
"""


def check_one_digest(path: str) -> None:
    """Any history of an arena in which all entries of all arms collide; it has room for two buckets of seven."""
    from serving.arena import layout, writer
    from serving.tiers.arena import ArenaTier
    from tests.serving.arenas import MIB, answer, key

    assert layout.digest(1, 0) == layout.digest(2, 1)
    assert vars(writer)["digest"] is layout.digest, "it was put in its place before others were compiled with it"
    tier, other = ArenaTier(path, MIB), ArenaTier(path, MIB)
    stored: dict[tuple[str, int], int] = {}
    gone: set[tuple[str, bytes]] = set()
    for client in (tier, other):
        client.on_evict = lambda arm, keys: gone.update((arm, name) for name in keys)
    for arm in "ab":
        tier.resize_now(arm, MIB // 4)
    dice = random.Random(1)
    most = 0
    for version in range(3000):
        arm, number, client = dice.choice("ab"), dice.randrange(20), dice.choice([tier, other])
        choice = dice.random()
        if choice < 0.5:
            client.put_now(arm, answer(number, version, dice.choice([10, 100, 3000])))
            stored[arm, number] = version
            assert client.get_now(arm, key(number)) is not None, "the newest is there"
        elif choice < 0.7:
            assert client.delete_now(arm, key(number)) is ((arm, number) in stored)
            stored.pop((arm, number), None)
        elif choice < 0.71:
            client.mapping.words[layout.H_OWNER] = 1  # a writer was killed
        elif choice < 0.715:
            assert client.flush_now(arm) == sum(1 for held, _ in stored if held == arm)
            stored = {name: kept for name, kept in stored.items() if name[0] != arm}
        stored = {(held, of): kept for (held, of), kept in stored.items() if (held, key(of)) not in gone}
        gone.clear()
        for held in "ab":
            for of in range(20):
                entry = client.get_now(held, key(of), touch=False)
                assert (entry is not None) is ((held, of) in stored)
                assert entry is None or entry == answer(of, stored[held, of], len(entry.body) - 8)
        assert tier.stats_now("a").entries + tier.stats_now("b").entries == len(stored) <= 14
        most = max(most, len(stored))
    assert most == 14, "both buckets were full"
    assert tier.repairs + other.repairs > 10


def test_entries_that_all_have_the_same_digest_do_not_answer_for_each_other(tmp_path: Path) -> None:
    # Compiled anew, and kept apart: the cache of compiled code must not give this hash to others.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "compiled"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _PATCHED, str(tmp_path / "arena")],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
