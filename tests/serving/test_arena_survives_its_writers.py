"""Writers that are killed at any instruction, and two that write at once by mistake: no wrong answer, no hang, all repaired."""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from serving.arena.eviction import arm_word
from serving.arena.layout import (
    A_OLDEST,
    H_FREE,
    H_OWNER,
    H_RESERVED,
    H_TOP,
    P_VALUES,
    R_VERSION,
    UNIT_WORDS,
    slot_at,
    slot_tag,
    slot_units,
    slot_word,
)
from serving.arena.reader import locate
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from tests.serving.arenas import ARM, MIB, Worker, answer, check, key

SIZE = 2 * MIB
BUDGET = MIB
KILLS = 20
KEYS = 300
GROWING = 64 * MIB


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "arena")


@pytest.fixture
def tier(path: str) -> Iterator[ArenaTier]:
    opened = ArenaTier(path, SIZE)
    opened.resize_now(ARM, BUDGET)
    yield opened
    opened.close_now()


def write(connection: Connection, path: str, seed: int) -> None:
    """Change the arena without end, in every way there is."""
    tier = ArenaTier(path, SIZE)
    dice = random.Random(seed)
    connection.send("ready")
    for version in itertools.count(1):
        number = dice.randrange(KEYS)
        choice = dice.random()
        if choice < 0.8:
            tier.put_now(ARM, answer(number, version, dice.choice([10, 60, 500, 4000, 20_000])))
        elif choice < 0.9:
            tier.delete_now(ARM, key(number))
        elif choice < 0.95:
            tier.renew_now(ARM, key(number), version + dice.random())
        elif choice < 0.99:
            tier.resize_now(ARM, dice.choice([BUDGET // 2, BUDGET]))
        else:
            tier.flush_now(ARM)


def read_all(tier: ArenaTier) -> int:
    """Check every answer that is there; how many there are."""
    count = 0
    for number in range(KEYS):
        entry = tier.get_now(ARM, key(number), touch=False)
        if entry is not None:
            check_whole(number, entry)
            count += 1
    return count


def check_whole(number: int, entry: Entry) -> None:
    """Check all but the time of the last renewal."""
    check(number, replace(entry, renewed=0.0))


def accounts_agree(tier: ArenaTier, unreadable: int = 1) -> None:
    """What the arm says it holds is what is found; those whose renewal was cut off may have become unreadable."""
    found = [entry for number in range(KEYS) if (entry := tier.get_now(ARM, key(number), touch=False)) is not None]
    stats = tier.stats_now(ARM)
    assert stats.bytes <= stats.budget
    assert 0 <= stats.entries - len(found) <= unreadable
    assert stats.entries > len(found) or stats.bytes == sum(entry.size for entry in found)


def test_a_writer_killed_at_any_instruction_leaves_a_readable_arena_that_the_next_repairs(tier: ArenaTier, path: str) -> None:
    dice = random.Random(7)
    for round_ in range(KILLS):
        writer = Worker(write, path, round_)
        assert writer.answer() == "ready"
        until = time.monotonic() + dice.uniform(0.0, 0.05)
        while time.monotonic() < until:
            read_all(tier)
        writer.kill()
        read_all(tier)  # before anybody repairs
        tier.put_now(ARM, answer(round_, 1, 100))
        assert tier.get_now(ARM, key(round_)) == answer(round_, 1, 100), "writing goes on at once"
        accounts_agree(tier)
    assert tier.resize_now(ARM, 0) >= 0
    assert tier.stats_now(ARM).bytes == 0
    assert not np.any(tier.mapping.words[H_FREE : H_FREE + 256]), "all free room has become one"
    assert tier.mapping.words[H_TOP] == tier._private[P_VALUES]


def _begin(connection: Connection, path: str, size: int = SIZE) -> ArenaTier:
    logging.disable()  # one line for each repair
    tier = ArenaTier(path, size)
    connection.send("ready")
    return tier


def _put(connection: Connection, path: str) -> None:
    tier = _begin(connection, path)
    for version in itertools.count(1):
        tier.put_now(ARM, answer(version * 7 % KEYS, version, [10, 500, 20_000][version % 3]))


def _delete(connection: Connection, path: str) -> None:
    tier = _begin(connection, path)
    for version in itertools.count(1):
        for number in range(KEYS):
            tier.put_now(ARM, answer(number, version, 10))
        for number in range(KEYS):
            tier.delete_now(ARM, key(number))


def _renew(connection: Connection, path: str) -> None:
    tier = _begin(connection, path)
    for version in itertools.count(1):
        for number in range(KEYS):
            if not tier.renew_now(ARM, key(number), version):
                tier.put_now(ARM, answer(number, 1, 10))


def _resize(connection: Connection, path: str) -> None:
    tier = _begin(connection, path)
    for version in itertools.count(1):
        for number in range(KEYS):
            tier.put_now(ARM, answer(number, version, 1000))
        for budget in range(BUDGET, 0, -BUDGET // 16):
            tier.resize_now(ARM, budget)
        tier.resize_now(ARM, BUDGET)


def _flush(connection: Connection, path: str) -> None:
    tier = _begin(connection, path)
    for version in itertools.count(1):
        for number in range(KEYS):
            tier.put_now(ARM, answer(number, version, 10))
        tier.flush_now(ARM)


def _repair(connection: Connection, path: str) -> None:
    tier = _begin(connection, path)
    assert tier._lease(10.0)
    for number in itertools.count():
        tier.mapping.words[H_FREE + number % 200] = 10**15
        tier._repair()


def _reserve(connection: Connection, path: str) -> None:
    tier = _begin(connection, path, GROWING)
    for number in itertools.count():
        tier.put_now(ARM, answer(number % KEYS, 1, 300_000))


@pytest.mark.parametrize("work", [_put, _delete, _renew, _resize, _flush, _repair, _reserve])
def test_a_writer_killed_in_whatever_it_does_leaves_it_readable_and_whole_after_a_repair(
    tmp_path: Path, work: Callable[[Connection, str], None]
) -> None:
    size = GROWING if work is _reserve else SIZE
    dice = random.Random(work.__name__)
    amid = 0

    def another(number: int) -> tuple[str, ArenaTier]:
        path = str(tmp_path / f"arena-{number}")
        tier = ArenaTier(path, size)
        tier.resize_now(ARM, size // 2)
        return path, tier

    path, tier = another(0)
    for round_ in range(9):
        if round_ and work is _reserve:  # what has grown does not grow again
            tier.close_now()
            path, tier = another(round_)
        writer = Worker(work, path)
        assert writer.answer() == "ready"
        until = time.monotonic() + dice.uniform(0.0, 0.02)
        while time.monotonic() < until:
            read_all(tier)
        if round_ % 3:
            writer.kill_amid(lambda: bool(tier.mapping.words[H_OWNER]), dice)  # noqa: B023 - called at once
        else:
            writer.kill()
        was_amid = bool(tier.mapping.words[H_OWNER])
        amid += was_amid
        read_all(tier)
        reserved = int(tier.mapping.words[H_RESERVED]) * 64
        assert reserved <= os.fstat(tier.mapping.descriptor).st_blocks * 512, "what has no memory would end who reads it"
        if round_ % 2:
            continue  # the next writer repairs, and is killed in its turn
        repairs = tier.repairs
        tier.put_now(ARM, answer(1, 1, 100))
        assert tier.get_now(ARM, key(1)) == answer(1, 1, 100)
        assert tier.repairs == repairs + was_amid
        accounts_agree(tier, unreadable=amid)
    assert amid >= 6
    tier.resize_now(ARM, 0)
    assert not np.any(tier.mapping.words[H_FREE : H_FREE + 256]), "all free room has become one"
    tier.close_now()


def test_a_claimed_arena_is_repaired_by_the_next_writer(tier: ArenaTier) -> None:
    for number in range(50):
        tier.put_now(ARM, answer(number, 1, 300))
    tier.mapping.words[H_OWNER] = 12345  # died with the lease
    tier.mapping.words[H_FREE : H_FREE + 256] = 10**15
    tier.put_now(ARM, answer(60, 1, 300))
    assert tier.repairs == 1
    assert read_all(tier) == 51
    accounts_agree(tier)


def test_the_order_of_eviction_survives_a_repair(tier: ArenaTier) -> None:
    for number in range(20):
        tier.put_now(ARM, answer(number, 1, 1000))
    tier.mapping.words[H_OWNER] = 12345
    gone: list[bytes] = []
    tier.on_evict = lambda arm, keys: gone.extend(keys)
    tier.resize_now(ARM, 10 * answer(0, 1, 1000).size)
    assert gone == [key(number) for number in range(10)]


@pytest.mark.parametrize("seed", range(8))
def test_rubbish_anywhere_but_in_the_header_costs_entries_never_a_wrong_answer_or_a_hang(tier: ArenaTier, seed: int) -> None:
    random_words = np.random.default_rng(seed)
    for number in range(KEYS):
        tier.put_now(ARM, answer(number, 1, 10 + 7 * number))
    words = tier.mapping.words
    first = (512 + 32 * 16) if seed % 2 else tier.mapping.geometry.index * UNIT_WORDS
    last = tier.mapping.geometry.values * UNIT_WORDS + 20_000
    for _ in range(400):
        words[random_words.integers(first, last)] = random_words.integers(-(2**63), 2**63 - 1)
    words[H_FREE + random_words.integers(0, 256, 20)] = random_words.integers(-(2**63), 2**63 - 1, 20)
    read_all(tier)
    for version in range(2, 6):
        for number in range(KEYS):
            tier.put_now(ARM, answer(number, version, 10 + 11 * number))
            if number % 3 == 0:
                tier.delete_now(ARM, key(number))
        read_all(tier)
    tier.mapping.words[H_OWNER] = 12345
    tier.put_now(ARM, answer(1, 9, 10))
    assert tier.get_now(ARM, key(1)) == answer(1, 9, 10)
    assert tier.stats_now(ARM).entries >= read_all(tier), "what is damaged takes room until it is evicted"
    tier.flush_now(ARM)
    assert (tier.stats_now(ARM).entries, tier.stats_now(ARM).bytes) == (0, 0)
    assert tier.mapping.words[H_TOP] == tier._private[P_VALUES], "and then all of it is free"


def test_damage_that_points_to_where_the_file_has_no_memory_touches_none_of_it(tmp_path: Path) -> None:
    """To touch what has none ends the process, where the file system has none left."""
    room = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=room) as folder:
        tier = ArenaTier(Path(folder) / "arena", 64 * MIB)
        tier.resize_now(ARM, 32 * MIB)
        for number in range(KEYS):
            tier.put_now(ARM, answer(number, 1, 500))
        words, reserved = tier.mapping.words, int(tier.mapping.words[H_RESERVED])
        held = os.fstat(tier.mapping.descriptor).st_blocks
        assert reserved < tier.mapping.geometry.units - 10_000
        places = itertools.count(reserved + 100, 1000)
        for number in range(KEYS):
            tier._key[:] = key(number)
            word = locate(words, tier._private, 0)
            slot = int(words[word])
            at = next(places) % (tier.mapping.geometry.units - 1000 - reserved) + reserved
            if slot_at(slot) >= tier.mapping.geometry.values:
                words[word] = slot_word(slot_tag(slot), slot_units(slot), at)
        words[H_FREE : H_FREE + 256] = reserved + 5000
        words[arm_word(0) + A_OLDEST] = reserved + 64
        for number in range(KEYS):
            assert tier.get_now(ARM, key(number)) in (None, answer(number, 1, 500))
            tier.renew_now(ARM, key(number), 5.0)
            tier.delete_now(ARM, key(number))
        tier.put_now(ARM, answer(1, 2, 500))
        tier.flush_now(ARM)
        words[H_OWNER] = 12345
        tier.put_now(ARM, answer(1, 3, 500))
        assert tier.get_now(ARM, key(1)) == answer(1, 3, 500)
        assert (int(words[H_RESERVED]), os.fstat(tier.mapping.descriptor).st_blocks) == (reserved, held)
        tier.close_now()


def _write_without_lock(connection: Connection, path: str, seed: int) -> None:
    from serving.arena.election import Lease

    Lease._locked = lambda self: True  # type: ignore[method-assign]
    write(connection, path, seed)


def test_two_writers_elected_by_mistake_give_no_wrong_answer_and_do_not_hang(tier: ArenaTier, path: str) -> None:
    writers = [Worker(_write_without_lock, path, seed) for seed in range(2)]
    for writer in writers:
        assert writer.answer() == "ready"
    until = time.monotonic() + 2.0
    rounds = 0
    while time.monotonic() < until or rounds < 20:
        read_all(tier)
        rounds += 1
    assert all(writer.process.is_alive() for writer in writers), "neither fell over"
    for writer in writers:
        writer.kill()
    tier.mapping.words[H_OWNER] = 12345
    tier.put_now(ARM, answer(1, 1, 100))
    assert tier.get_now(ARM, key(1)) == answer(1, 1, 100)
    assert tier.stats_now(ARM).entries >= read_all(tier), "what they damaged takes room until it is evicted"


def test_a_writer_that_was_deposed_has_the_arena_repaired_once_more(tier: ArenaTier, path: str) -> None:
    other = ArenaTier(path, SIZE)
    assert tier.lease.acquire() is True
    other.lease._locked = lambda: True  # type: ignore[method-assign]
    assert other.lease.acquire() is None, "takes the first for dead"
    other._repair()
    tier.lease.release()
    assert tier.lease.deposed == 1
    other.lease.release()
    tier.put_now(ARM, answer(1, 1, 10))
    assert tier.repairs == 1
    other.close_now()


def test_a_stale_slot_that_leads_to_another_entry_is_a_miss(tier: ArenaTier) -> None:
    tier.put_now(ARM, answer(1, 1, 1000))
    tier._key[:] = key(1)
    word = locate(tier.mapping.words, tier._private, 0)
    stale = int(tier.mapping.words[word])
    tier.delete_now(ARM, key(1))
    tier.put_now(ARM, answer(2, 1, 1000))
    tier._key[:] = key(2)
    assert slot_at(int(tier.mapping.words[locate(tier.mapping.words, tier._private, 0)])) == slot_at(stale)
    tier.mapping.words[word] = stale
    assert tier.get_now(ARM, key(1)) is None
    assert tier.get_now(ARM, key(2)) == answer(2, 1, 1000)


def test_versions_grow_over_restarts_and_repairs(tier: ArenaTier, path: str) -> None:
    def version() -> int:
        tier._key[:] = key(1)
        at = slot_at(int(tier.mapping.words[locate(tier.mapping.words, tier._private, 0)]))
        return int(tier.mapping.words[at * UNIT_WORDS + R_VERSION])

    tier.put_now(ARM, answer(1, 1, 10))
    first = version()
    tier.mapping.words[24] = 0  # the count of writes was lost
    tier.mapping.words[H_OWNER] = os.getpid()
    other = ArenaTier(path, SIZE)
    other.put_now(ARM, answer(1, 2, 10))
    assert version() > first
    other.close_now()
