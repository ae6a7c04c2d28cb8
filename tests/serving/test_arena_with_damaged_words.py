"""Any word of an arena that is not what it should be: no exception, no end of the process, no wrong answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from serving.arena.eviction import arm_word
from serving.arena.layout import (
    A_BUDGET,
    A_NEWEST,
    A_OLDEST,
    A_USED_BY,
    ARM_WORDS,
    H_DIRTY,
    H_FREE,
    H_RESERVED,
    H_STORE,
    H_TOP,
    P_EDGES,
    P_VALUES,
    UNIT_WORDS,
)
from serving.arena.reader import bucket_word, has_memory, locate
from serving.arena.space import is_block, put_block, set_edge
from serving.memory import open_memory
from serving.settings import GatewaySettings
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import ARM, MIB, Worker, answer, check, key

VALUES = (-(2**63), -(2**62), -1, 1, 3, 2**31, 2**57, 2**62, 2**63 - 2, 2**63 - 1)
KEYS = 12


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "arena")


@pytest.fixture
def tier(path: str) -> Iterator[ArenaTier]:
    opened = ArenaTier(path, MIB)
    opened.resize_now(ARM, MIB // 4)
    for number in range(KEYS):  # small ones beside their bucket, large ones in room that blocks between them are free of
        opened.put_now(ARM, answer(number, 1, 10 if number % 3 == 0 else 3000))
    opened.delete_now(ARM, key(4))
    opened.delete_now(ARM, key(7))
    yield opened
    opened.close_now()


def operations(tier: ArenaTier) -> dict[str, Callable[[], object]]:
    return {
        "get": lambda: [tier.get_now(ARM, key(number)) for number in range(KEYS)],
        "put anew": lambda: tier.put_now(ARM, answer(KEYS, 2, 2000)),
        "put again": lambda: tier.put_now(ARM, answer(1, 3, 4000)),
        "renew": lambda: tier.renew_now(ARM, key(2), 9.0),
        "delete": lambda: tier.delete_now(ARM, key(5)),
        "removal": lambda: tier.remove_now(ARM, [key(8)], removal=5),
        "mark": lambda: tier.update_mark_now(ARM, lambda mark: -abs(mark)),
        "resize": lambda: tier.resize_now(ARM, MIB // 8),
        "stats": lambda: tier.stats_now(ARM),
        "flush": lambda: tier.flush_now(ARM),
    }


def places(tier: ArenaTier) -> list[int]:
    """The words that say where something is, each kind at least once: header, arm, buckets, records, free blocks, edges."""
    words, private = tier._words, tier._private
    found = [H_DIRTY, *range(H_TOP, H_STORE), *(H_FREE + int(free) for free in np.flatnonzero(words[H_FREE : H_FREE + 256]))]
    found += [arm_word(0) + word for word in range(A_USED_BY, ARM_WORDS)]
    for number in (1, 3):
        tier._key[:] = key(number)
        slot = locate(words, private, tier._arms[ARM])
        assert slot
        found.append(slot)
        found += range((int(words[slot]) & 0xFFFFFFFF) * UNIT_WORDS, (int(words[slot]) & 0xFFFFFFFF) * UNIT_WORDS + 10)
    found.append(bucket_word(private, 0))
    free = [int(words[head]) for head in range(H_FREE, H_FREE + 256) if words[head]]
    assert free, "the deleted ones left blocks"
    for unit in free:
        found += range(unit * UNIT_WORDS, unit * UNIT_WORDS + 3)
        found.append(int(private[P_EDGES]) + (unit >> 6))
    return found


def damage(connection: Connection, path: str, dirty: bool) -> None:
    """Set each word to each value, and do everything to the arena then; tells what raised, or was wrong."""
    logging.disable()
    tier = ArenaTier(path, MIB)
    tier._find_arm(ARM)
    whole = tier._words.copy()
    faults = []
    for place in places(tier):
        for value in VALUES:
            for name, act in operations(tier).items():
                tier._words[:] = whole
                tier._revoked.clear()
                if dirty:
                    tier._words[H_DIRTY] = 1
                tier._words[place] = value
                try:
                    act()
                    for number in range(KEYS + 1):
                        entry = tier.get_now(ARM, key(number))
                        if entry is not None:
                            check(number, replace(entry, renewed=0.0))
                except Exception as error:  # noqa: BLE001 - told
                    faults.append(f"word {place} = {value}, {name}: {type(error).__name__}: {error}")
    connection.send(faults)


@pytest.mark.parametrize("dirty", [False, True], ids=["as it is", "to be repaired"])
def test_nothing_raises_or_ends_the_process(tier: ArenaTier, path: str, dirty: bool) -> None:
    worker = Worker(damage, path, dirty)
    assert worker.answer() == []


def test_an_end_that_is_too_great_for_a_word_is_not_inside(tier: ArenaTier) -> None:
    assert not has_memory(tier._words, tier._private, 2**63 - 1, 2)
    assert not has_memory(tier._words, tier._private, 2**63 - 1, 2**63 - 1)
    for word in (A_NEWEST, A_OLDEST):
        tier._words[arm_word(0) + word] = 2**63 - 1
    assert tier.put_now(ARM, answer(20, 1, 2000)) == 0
    assert tier.get_now(ARM, key(20)) == answer(20, 1, 2000)
    assert tier.flush_now(ARM) > 0


def test_a_free_block_whose_end_is_too_great_for_a_word_is_none(tier: ArenaTier) -> None:
    unit = int(tier._private[P_VALUES])
    tier._words[H_TOP] = tier._words[H_RESERVED]
    set_edge(tier._words, tier._private, unit, True)
    tier._words[unit * UNIT_WORDS] = 2**63 - 1
    assert not is_block(tier._words, tier._private, unit)
    before = tier._words.copy()
    put_block(tier._words, tier._private, unit, 2**63 - 1)
    np.testing.assert_array_equal(tier._words, before)


@pytest.mark.parametrize("value", VALUES)
def test_a_replica_starts_on_an_arena_that_says_anything_of_its_memory(tier: ArenaTier, path: str, value: int) -> None:
    tier._words[H_RESERVED], tier._words[H_DIRTY] = value, 1
    memory = open_memory(GatewaySettings.model_validate({"memory": {"path": path, "size": MIB}}), replica="r")
    try:
        assert memory.state == "shared"
        assert tier._words[arm_word(0) + A_BUDGET] == MIB // 4
    finally:
        memory.tier.close_now()


def test_a_repair_that_fails_keeps_nobody_else_from_writing(tier: ArenaTier, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise MemoryError

    tier._words[H_DIRTY] = 1
    with monkeypatch.context() as patched:
        patched.setattr(tier.mapping, "bring_in", fails)
        with pytest.raises(MemoryError):
            tier.put_now(ARM, answer(20, 1, 100))
    other = ArenaTier(path, MIB)
    try:
        other.put_now(ARM, answer(21, 1, 100))
        assert (other.repairs, other.dropped) == (1, 0)
        assert tier.get_now(ARM, key(21)) == answer(21, 1, 100)
    finally:
        other.close_now()
