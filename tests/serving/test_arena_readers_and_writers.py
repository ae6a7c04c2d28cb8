"""One arena and several processes: any history of them is that of one cache, and whoever reads gets a whole answer or none."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from serving.arena.layout import P_KEY, ArenaError, digest
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from tests.serving.arenas import ARM, MIB, Worker, answer, check, key, serve

SIZE = MIB


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ArenaTier]:
    opened = ArenaTier(tmp_path / "arena", 4 * MIB)
    opened.resize_now(ARM, 2 * MIB)
    yield opened
    opened.close_now()


class Clock:
    """The byte-bounded cache that an arm is: entries in the order in which they came, those that were used spared once."""

    def __init__(self) -> None:
        self.budget = 0
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.used: set[bytes] = set()

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def put(self, entry: Entry) -> list[bytes]:
        self.drop(entry.key)
        if entry.size > self.budget:
            return []
        gone = self.trim(entry.size)
        self.entries[entry.key] = entry
        return gone

    def trim(self, room: int = 0) -> list[bytes]:
        gone = []
        while self.size + room > self.budget:
            oldest = next(iter(self.entries))
            if oldest in self.used:
                self.used.discard(oldest)
                self.entries.move_to_end(oldest)
            else:
                del self.entries[oldest]
                gone.append(oldest)
        return gone

    def drop(self, name: bytes) -> bool:
        self.used.discard(name)
        return self.entries.pop(name, None) is not None

    def clear(self) -> None:
        self.entries.clear()
        self.used.clear()

    def repair(self) -> None:
        """Those that were spared stand again where they were written."""
        self.entries = OrderedDict(sorted(self.entries.items(), key=lambda item: item[1].written_at))


def name(number: int) -> bytes:
    """Keys of which eight have the same digest: one more than there is room for in their bucket."""
    return key(0)[:8] + key(number)[8:] if number < 8 else key(number)


def version_of(number: int, version: int, size: int) -> Entry:
    return replace(answer(number, version, size), key=name(number))


class Histories(RuleBasedStateMachine):
    """Three processes do what comes to mind to one arena; each answer is that of one dict, and the evictions are CLOCK's.

    They are killed as well, while they write and while they do not, and restarted; and they get in each other's way.
    """

    workers: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self.folder.name) / "arena")
        for worker in self.workers:
            worker.ask("open", self.path, SIZE)
        self.model = {"a": Clock(), "b": Clock()}
        for arm in self.model:
            self.call(0, "resize_now", arm, 3000)
            self.model[arm].budget = 3000
        self.version = 0

    def call(self, by: int, method: str, *args: object, **more: object) -> tuple[object, list[bytes]]:
        result, gone = self.workers[by].ask(method, args, more)
        return result, gone

    def new(self, number: int, size: int) -> Entry:
        self.version += 1
        return version_of(number, self.version, size)

    by = st.integers(0, 2)
    arm = st.sampled_from("ab")
    number = st.integers(0, 9)
    size = st.sampled_from([0, 60, 90, 200, 700, 2900, 4000])

    @rule(by=by, arm=arm, number=number, size=size)
    def put(self, by: int, arm: str, number: int, size: int) -> None:
        new = self.new(number, size)
        expected = self.model[arm].put(new)
        assert self.call(by, "put_now", arm, new) == (len(expected), expected)

    @rule(by=by, arm=arm, number=number, touch=st.booleans())
    def get(self, by: int, arm: str, number: int, touch: bool) -> None:
        model = self.model[arm]
        assert self.call(by, "get_now", arm, name(number), touch=touch)[0] == model.entries.get(name(number))
        if touch and name(number) in model.entries:
            model.used.add(name(number))

    @rule(by=by, arm=arm, number=number, later=st.integers(1, 50))
    def renew(self, by: int, arm: str, number: int, later: int) -> None:
        held = self.model[arm].entries.get(name(number))
        at = later + (held.written_at if held is not None else 0.0)
        assert self.call(by, "renew_now", arm, name(number), at)[0] is (held is not None)
        if held is not None:
            self.model[arm].entries[name(number)] = replace(held, renewed=max(float(later), held.renewed))

    @rule(by=by, arm=arm, number=number)
    def delete(self, by: int, arm: str, number: int) -> None:
        assert self.call(by, "delete_now", arm, name(number))[0] is self.model[arm].drop(name(number))

    @rule(by=by, arm=arm, budget=st.integers(0, 6000))
    def resize(self, by: int, arm: str, budget: int) -> None:
        self.model[arm].budget = budget
        expected = self.model[arm].trim()
        assert self.call(by, "resize_now", arm, budget) == (len(expected), expected)

    @rule(by=by, arm=arm)
    def flush(self, by: int, arm: str) -> None:
        assert self.call(by, "flush_now", arm)[0] == len(self.model[arm].entries)
        self.model[arm].clear()

    @rule(by=by, writing=st.booleans())
    def kill_and_restart(self, by: int, writing: bool) -> None:
        if writing:
            assert self.workers[by].ask("hold") is True
        self.workers[by].kill()
        self.workers[by].close()
        self.workers[by] = Worker(serve)
        self.workers[by].ask("open", self.path, SIZE)
        if writing:
            self.repair()

    @rule(by=by, other=st.integers(1, 2), arm=arm, number=number, everything=st.booleans())
    def withdraw_while_another_writes(self, by: int, other: int, arm: str, number: int, everything: bool) -> None:
        writer = self.workers[(by + other) % 3]
        assert writer.ask("hold") is True
        model = self.model[arm]
        assert self.call(by, "put_now", arm, self.new(number, 60)) == (0, []), "it is not done, since the other does not let go"
        assert self.call(by, "get_now", arm, name(number), touch=False)[0] == model.entries.get(name(number))
        if everything:
            assert self.call(by, "flush_now", arm)[0] == len(model.entries)
            changed = bool(model.entries)
            model.clear()
        else:
            changed = model.drop(name(number))
            assert self.call(by, "delete_now", arm, name(number))[0] is changed
        assert self.call(by, "get_now", arm, name(number), touch=False)[0] is None
        writer.ask("release")
        if changed:
            self.repair()

    def repair(self) -> None:
        for model in self.model.values():
            model.repair()

    @invariant()
    def the_accounts_are_right(self) -> None:
        for arm, model in self.model.items():
            stats = self.call(self.version % 3, "stats_now", arm)[0]
            assert (stats.entries, stats.bytes, stats.budget) == (  # type: ignore[attr-defined]
                len(model.entries), model.size, model.budget,
            )  # fmt: skip

    def teardown(self) -> None:
        self.folder.cleanup()


def test_any_history_of_three_processes_is_that_of_one_cache() -> None:
    Histories.workers = [Worker(serve) for _ in range(3)]
    try:
        run_state_machine_as_test(Histories, settings=settings(max_examples=15, stateful_step_count=30, deadline=None))
    finally:
        for worker in Histories.workers:
            worker.close()


def test_keys_with_the_same_digest_do_not_answer_for_each_other(tier: ArenaTier) -> None:
    keys = [key(1)[:8] + key(number)[8:] for number in range(30)]
    words = [int.from_bytes(name[:8], "little", signed=True) for name in keys]
    assert len({digest(word, 0) for word in words}) == 1
    stored: dict[bytes, Entry] = {}
    gone: list[bytes] = []
    tier.on_evict = lambda arm, names: gone.extend(names)
    for number, name in enumerate(keys):
        stored[name] = Entry(name, str(number).encode() * 50, float(number))
        tier.put_now(ARM, stored[name])
        assert tier.get_now(ARM, name) == stored[name], "the newest is there"
    held = [name for name in keys if tier.get_now(ARM, name) is not None]
    assert len(held) == 14, "two buckets of seven"
    assert set(gone) == set(keys) - set(held), "the others were evicted, and that was told"
    assert all(tier.get_now(ARM, name) == stored[name] for name in held)
    assert tier.stats_now(ARM).entries == 14
    for name in held:
        assert tier.delete_now(ARM, name) is True
    assert tier.stats_now(ARM).bytes == 0


def test_entries_of_two_arms_with_the_same_digest_do_not_answer_for_each_other(tier: ArenaTier) -> None:
    """The digest mixes the number of the arm in, which another key can undo."""
    tier.resize_now("b", MIB)
    prime = 0x9E3779B185EBCA87
    keys = [key(number) for number in range(7)]
    twins = [(int.from_bytes(own[:8], "little") ^ prime).to_bytes(8, "little") + own[8:] for own in keys]
    for number, (own, twin) in enumerate(zip(keys, twins, strict=True)):
        first, second = (int.from_bytes(either[:8], "little", signed=True) for either in (own, twin))
        assert digest(first, 0) == digest(second, 1)
        tier.put_now(ARM, Entry(own, b"a" * 50, float(number)))
        tier.put_now("b", Entry(twin, b"b" * 50, float(number)))
    for number, (own, twin) in enumerate(zip(keys, twins, strict=True)):
        assert tier.get_now(ARM, own) == Entry(own, b"a" * 50, float(number))
        assert tier.get_now("b", twin) == Entry(twin, b"b" * 50, float(number))
        assert tier.get_now("b", own) is tier.get_now(ARM, twin) is None
        assert tier.delete_now("b", own) is False
    assert tier.flush_now("b") == 7
    assert tier.stats_now(ARM).entries == 7


def test_an_entry_is_told_from_one_of_another_arm(tier: ArenaTier) -> None:
    tier.resize_now("b", MIB)
    tier.put_now(ARM, answer(1, 1, 100))
    tier.put_now("b", answer(1, 2, 100))
    assert (tier.get_now(ARM, key(1)), tier.get_now("b", key(1))) == (answer(1, 1, 100), answer(1, 2, 100))
    assert tier.delete_now(ARM, key(1)) is True
    assert tier.get_now("b", key(1)) == answer(1, 2, 100)


@pytest.mark.parametrize("size", [0, 48, 80, 88, 89, 120, 2000])
def test_every_byte_that_is_changed_behind_its_back_makes_a_miss(tier: ArenaTier, size: int) -> None:
    whole = Entry(key(1), bytes(range(256)) * 8, 1.0) if size == 2000 else Entry(key(1), b"x" * size, 1.0)
    tier.put_now(ARM, whole)
    words = tier.mapping.words
    wanted = int.from_bytes(key(1)[:8], "little", signed=True)
    record = next(int(at) for at in (words == wanted).nonzero()[0]) - 3
    count = 9 + -(-(32 + len(whole.body)) // 8)
    for word in range(count):
        if word == 8:
            continue  # the links of the queue are the writer's alone
        before = int(words[record + word])
        for bit in (0, 17, 40, 62):
            words[record + word] = before ^ (1 << bit)
            assert tier.get_now(ARM, key(1)) is None
        words[record + word] = before
        assert tier.get_now(ARM, key(1)) == whole
    assert int(tier._private[P_KEY]) == wanted


def test_large_answers_come_back_whole(tier: ArenaTier) -> None:
    other = ArenaTier(tier.mapping.path, 4 * MIB)
    large = answer(1, 1, 900_000)
    tier.put_now(ARM, large)
    assert other.get_now(ARM, key(1)) == large, "its first buffer was too small for it"
    other.close_now()


def _overwrite(connection: Connection, path: str, ready: str) -> None:
    tier = ArenaTier(path, 4 * MIB)
    connection.send(ready)
    for version in itertools.count(1):
        for number in range(5):
            tier.put_now(ARM, answer(number, version, (version * 977 + number * 131) % 6000))


def test_readers_race_two_writers_and_see_no_torn_answer(tier: ArenaTier) -> None:
    writers = [Worker(_overwrite, tier.mapping.path, "ready") for _ in range(2)]
    for writer in writers:
        assert writer.answer() == "ready"
    try:
        seen = set()
        for step in range(10_000):
            entry = tier.get_now(ARM, key(step % 5))
            if entry is not None:
                seen.add(check(step % 5, entry))
    finally:
        for writer in writers:
            writer.close()
    assert seen, "something was read"
    for number in range(5):
        tier.put_now(ARM, answer(number, 1, 10))
        assert tier.get_now(ARM, key(number)) == answer(number, 1, 10)
    assert tier.stats_now(ARM).entries == 5


def test_what_is_evicted_is_told_after_the_lease_is_given_back(tier: ArenaTier) -> None:
    tier.resize_now(ARM, 1000)

    def delete(arm: str, names: Sequence[bytes]) -> None:
        tier.delete_now(arm, key(3))

    tier.on_evict = delete
    for number in range(10):
        tier.put_now(ARM, answer(number, 1, 200))
    assert tier.repairs == 0
    assert tier.get_now(ARM, key(9)) is not None


def test_an_arena_opened_before_a_fork_is_not_written_by_the_child(tier: ArenaTier) -> None:
    def child(connection: Connection) -> None:
        try:
            tier.put_now(ARM, answer(1, 1, 10))
        except RuntimeError as error:
            connection.send(str(error))

    worker = Worker(child)
    assert "open it again in each process" in worker.answer()
    worker.close()


def test_a_stopped_writer_delays_nobody_for_long_and_prevents_no_deletion(tier: ArenaTier) -> None:
    other = ArenaTier(tier.mapping.path, 4 * MIB)
    for number in range(3):
        tier.put_now(ARM, answer(number, 1, 10))
    assert other.lease.acquire() is True, "and it does not go on from here"
    assert tier.put_now(ARM, answer(5, 1, 10)) == 0
    assert tier.dropped == 1
    assert tier.get_now(ARM, key(0)) == answer(0, 1, 10), "reading takes no lease"
    assert tier.delete_now(ARM, key(0)) is True
    assert tier.get_now(ARM, key(0)) is None
    assert tier.flush_now(ARM) == 2
    assert other.get_now(ARM, key(1)) is None
    released = threading.Event()
    other.lease.release()
    released.set()
    assert tier.put_now(ARM, answer(6, 1, 10)) == 0
    assert (tier.stats_now(ARM).entries, tier.repairs) == (1, 1), "what was withdrawn meanwhile is free again"
    other.close_now()


def test_a_stopped_writer_is_not_waited_for_again_and_again(tier: ArenaTier, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], [0]

    def sleep(seconds: float) -> None:
        slept[0] += 1
        now[0] += max(seconds, 1e-5)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    other = ArenaTier(tier.mapping.path, 4 * MIB)
    tier.put_now(ARM, answer(0, 1, 10))
    assert other.lease.acquire() is True, "and it does not go on from here"
    assert tier.put_now(ARM, answer(1, 1, 10)) == 0
    assert slept[0] > 0
    slept[0] = 0
    for number in range(2, 100):
        assert tier.put_now(ARM, answer(number, 1, 10)) == 0
    assert tier.delete_now(ARM, key(0)) is True
    assert slept[0] == 0
    assert tier.dropped == 99
    with pytest.raises(ArenaError, match="has been writing for"):
        tier.resize_now(ARM, MIB)  # budgets are waited for all the same
    other.lease.release()
    tier.put_now(ARM, answer(1, 1, 10))
    assert tier.get_now(ARM, key(1)) == answer(1, 1, 10), "as soon as it lets go"
    other.close_now()
