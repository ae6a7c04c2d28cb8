"""The file of an arena: its rights, its room, its layout's version, and who may replace it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from serving.arena.layout import H_RESERVED, H_VERSION, VERSION, ArenaError, Geometry
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import ARM, MIB, Worker, answer, check, key


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        tier = ArenaTier(tmp_path / "arena", MIB)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "arena").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["arena"]
    tier.close_now()


def test_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    ArenaTier(tmp_path / "arena", MIB).close_now()
    (tmp_path / "arena").chmod(0o644)
    with pytest.raises(ArenaError, match=r"mode 0600, found one of user .* with mode 0644"):
        ArenaTier(tmp_path / "arena", MIB)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    ArenaTier(tmp_path / "arena", MIB).close_now()
    (tmp_path / "link").symlink_to(tmp_path / "arena")
    with pytest.raises(ArenaError, match="cannot be opened"):
        ArenaTier(tmp_path / "link", MIB)


def test_another_layout_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    ArenaTier(path, MIB).close_now()
    with path.open("r+b") as file:
        file.seek(8 * H_VERSION)
        file.write(struct.pack("<q", VERSION + 1))
    before = path.read_bytes()
    with pytest.raises(ArenaError, match=rf"expected layout version {VERSION}, found {VERSION + 1}.*remove the file, or set"):
        ArenaTier(path, MIB)
    assert path.read_bytes() == before, "it may be in use by those who know it"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4096])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "arena").write_bytes(content)
    (tmp_path / "arena").chmod(0o600)
    with pytest.raises(ArenaError, match="not an arena"):
        ArenaTier(tmp_path / "arena", MIB)


def test_one_that_was_cut_short_or_has_a_damaged_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    ArenaTier(path, MIB).close_now()
    os.truncate(path, MIB // 2)
    with pytest.raises(ArenaError, match=r"damaged or .* cut short"):
        ArenaTier(path, MIB)
    os.truncate(path, MIB)
    with path.open("r+b") as file:
        file.seek(8 * 4)
        file.write(struct.pack("<q", 10**9))
    with pytest.raises(ArenaError, match="damaged"):
        ArenaTier(path, MIB)


def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    first = ArenaTier(tmp_path / "arena", MIB)
    first.resize_now(ARM, MIB // 4)
    first.put_now(ARM, answer(1, 1, 500))
    first.close_now()
    second = ArenaTier(tmp_path / "arena", MIB)
    assert second.get_now(ARM, key(1)) == answer(1, 1, 500)
    assert second.stats_now(ARM).budget == MIB // 4
    second.close_now()


def test_another_size_replaces_it_when_nobody_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    first = ArenaTier(path, MIB)
    second = ArenaTier(path, 2 * MIB)
    assert second.mapping.geometry.bytes == MIB, "the first is using it"
    first.close_now()
    second.close_now()
    third = ArenaTier(path, 2 * MIB)
    assert third.mapping.geometry.bytes == path.stat().st_size == 2 * MIB
    third.close_now()


def _open_when_told(connection: Connection, path: Path) -> None:
    connection.send("ready")
    connection.recv()
    tier = ArenaTier(path, 2 * MIB)
    connection.send((tier.mapping.geometry.bytes, os.fstat(tier.mapping.descriptor).st_ino))
    connection.recv()


def test_processes_that_start_together_with_a_new_size_share_one_arena(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    for _ in range(10):
        path.unlink(missing_ok=True)
        ArenaTier(path, MIB).close_now()
        workers = [Worker(_open_when_told, path) for _ in range(4)]
        for worker in workers:
            assert worker.answer() == "ready"
        for worker in workers:
            worker.connection.send("go")
        opened = {worker.answer() for worker in workers}
        for worker in workers:
            worker.close()
        assert opened == {(2 * MIB, path.stat().st_ino)}


def test_one_that_others_replace_at_this_moment_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    ArenaTier(path, MIB).close_now()
    worker = Worker(_open_when_told, path)  # before: it would inherit the lock
    replacing = os.open(path, os.O_RDWR)
    whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, VERSION, 1, 0)
    fcntl.fcntl(replacing, fcntl.F_OFD_SETLK, whole_file)
    assert worker.answer() == "ready"
    worker.connection.send("go")
    assert not worker.connection.poll(0.1)
    os.close(replacing)
    assert worker.answer()[0] == MIB * 2
    worker.close()


def test_what_a_maker_that_was_killed_has_left_is_removed_and_what_a_living_one_makes_is_not(tmp_path: Path) -> None:
    left, living = tmp_path / "arena.0123.being-made", tmp_path / "arena.4567.being-made"
    for path in (left, living, tmp_path / "arena.bak"):
        path.write_bytes(b"x" * 100)
    with living.open("r+b") as made:
        fcntl.fcntl(made, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, VERSION, 1, 0))
        ArenaTier(tmp_path / "arena", MIB).close_now()
    assert {path.name for path in tmp_path.iterdir()} == {"arena", living.name, "arena.bak"}


def test_other_expected_sizes_of_entries_replace_it(tmp_path: Path) -> None:
    first = ArenaTier(tmp_path / "arena", MIB)
    first.close_now()
    second = ArenaTier(tmp_path / "arena", MIB, entry_bytes=8192)
    assert second.mapping.geometry.buckets == first.mapping.geometry.buckets // 8
    second.close_now()


def test_a_file_system_without_locks_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    ArenaTier(tmp_path / "arena", MIB).close_now()
    monkeypatch.setattr(fcntl, "fcntl", unsupported)
    with pytest.raises(ArenaError, match=r"cannot be opened \(No locks available\); expected a file system with locks"):
        ArenaTier(tmp_path / "arena", MIB)


def test_no_room_to_begin_with_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, begin: int, count: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match=r"cannot be made \(No space left on device\).*make it smaller"):
        ArenaTier(tmp_path / "arena", MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_fills_up_makes_it_smaller_not_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    tier = ArenaTier(tmp_path / "arena", 8 * MIB, clock=lambda: now[0])
    tier.resize_now(ARM, 7 * MIB)
    real = os.posix_fallocate
    free = [2 * MIB]

    def scarce(descriptor: int, begin: int, count: int) -> None:
        if count > free[0]:
            raise OSError(28, "No space left on device")
        free[0] -= count
        real(descriptor, begin, count)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    gone: list[bytes] = []
    tier.on_evict = lambda arm, keys: gone.extend(keys)
    for number in range(1000):
        tier.put_now(ARM, answer(number, 1, 5000))
        assert tier.get_now(ARM, key(number), touch=False) == answer(number, 1, 5000)
    held = [number for number in range(1000) if tier.get_now(ARM, key(number), touch=False) is not None]
    assert 300 < len(held) < 420
    assert sorted(gone) == sorted(key(number) for number in set(range(1000)) - set(held)), "told like every eviction"
    reserved = int(tier.mapping.words[H_RESERVED])
    free[0] = 100 * MIB
    now[0] = 60.0
    for number in range(1000, 2000):
        tier.put_now(ARM, answer(number, 1, 5000))
    assert tier.mapping.words[H_RESERVED] > reserved, "room that comes later is used"
    tier.close_now()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_memory_that_is_not_to_be_had_for_whatever_reason_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, begin: int, count: int) -> None:
        raise OSError(number, os.strerror(number))

    tier = ArenaTier(tmp_path / "arena", 8 * MIB)
    tier.resize_now(ARM, 7 * MIB)
    tier.put_now(ARM, answer(1, 1, 10))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for version in range(2000):
        tier.put_now(ARM, answer(version, 1, 3000))
        assert tier.get_now(ARM, key(version)) in (None, answer(version, 1, 3000))
    assert tier.repairs == 0
    tier.close_now()


def test_a_value_larger_than_the_arena_is_not_stored_and_its_older_self_is_gone(tmp_path: Path) -> None:
    tier = ArenaTier(tmp_path / "arena", MIB)
    tier.resize_now(ARM, 100 * MIB)
    for size in (1_000_000, 2 * MIB, 70 * MIB):
        tier.put_now(ARM, answer(1, 1, 10))
        tier.put_now(ARM, answer(1, 2, size))
        assert tier.get_now(ARM, key(1)) is None
        assert tier.stats_now(ARM).bytes == 0
    tier.put_now(ARM, answer(2, 1, 300_000))
    assert tier.get_now(ARM, key(2)) == answer(2, 1, 300_000)
    tier.close_now()


def test_a_budget_beyond_the_file_is_bounded_by_the_file(tmp_path: Path) -> None:
    tier = ArenaTier(tmp_path / "arena", MIB)
    for arm in ("a", "b"):
        tier.resize_now(arm, 100 * MIB)
    for number in range(3000):
        tier.put_now("ab"[number % 2], answer(number, 1, 100 + 37 * number % 3000))
    held = 0
    for number in range(3000):
        entry = tier.get_now("ab"[number % 2], key(number))
        if entry is not None:
            check(number, entry)
            held += entry.size
    assert MIB // 2 < held == tier.stats_now("a").bytes + tier.stats_now("b").bytes < MIB
    tier.close_now()


def test_an_arm_gets_room_even_when_others_have_taken_it_all(tmp_path: Path) -> None:
    tier = ArenaTier(tmp_path / "arena", MIB)
    tier.resize_now("a", 100 * MIB)
    tier.resize_now("b", 100 * MIB)
    for number in range(1000):
        tier.put_now("a", answer(number, 1, 2000))
    tier.put_now("b", answer(5000, 1, 2000))
    assert tier.get_now("b", key(5000)) == answer(5000, 1, 2000)
    tier.close_now()


def test_more_arms_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    tier = ArenaTier(tmp_path / "arena", MIB)
    for number in range(32):
        tier.resize_now(f"arm-{number}", 1000)
    with pytest.raises(ArenaError, match="expected at most 32 arms"):
        tier.resize_now("one more", 1000)
    tier.put_now("arm-7", answer(1, 1, 10))
    assert tier.get_now("arm-7", key(1)) is not None
    tier.close_now()


@pytest.mark.parametrize("size", [0, 1000, 1 << 40])
def test_a_size_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ArenaError, match="expected a size from"):
        Geometry.plan(size, 1024, 1)
