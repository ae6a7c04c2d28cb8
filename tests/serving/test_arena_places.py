"""Where an arena may be: file systems that are full, huge pages, devices, and directories in which others plant things."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from serving.arena.layout import H_OWNER, H_RESERVED, ArenaError, Geometry
from serving.arena.place import Place
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import ARM, MIB, Worker, answer, check, key, mount, own_mounts

HUGE = 2 * MIB
HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
NOBODY = 65534


def _outcome(worker: Worker) -> dict[str, object]:
    """What the worker found out; skips where it could not mount anything."""
    try:
        result: dict[str, object] = worker.answer()
    finally:
        worker.close()
    if "missing" in result:
        pytest.skip(f"needs to mount a file system: {result['missing']}")
    return result


def _mounted(connection: Connection, kind: str, directory: Path, options: str) -> bool:
    try:
        if not own_mounts():
            raise OSError("neither root nor user namespaces")
        mount(kind, directory, options)
    except OSError as error:
        connection.send({"missing": str(error)})
        return False
    return True


# -- a file system without room ----------------------------------------------------------------------------------------------


def _make_in_a_small_tmpfs(connection: Connection, directory: Path) -> None:
    if _mounted(connection, "tmpfs", directory, "size=3m,mode=0700"):
        try:
            ArenaTier(directory / "arena", 64 * MIB)
        except ArenaError as error:
            connection.send({"error": str(error), "left": os.listdir(directory)})


def test_a_tmpfs_too_small_to_begin_with_is_an_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    found = _outcome(Worker(_make_in_a_small_tmpfs, tmp_path))
    needed = Geometry.plan(64 * MIB, 1024, 1).values * 64
    assert f"expected {needed} bytes free to begin with, found {3 * MIB} bytes free" in str(found["error"])
    assert "make it smaller, or mount a larger file system" in str(found["error"])
    assert found["left"] == []


def _fill_a_small_tmpfs(connection: Connection, directory: Path) -> None:
    if not _mounted(connection, "tmpfs", directory, "size=4m,mode=0700"):
        return
    now = [0.0]
    gone: list[bytes] = []
    tier = ArenaTier(directory / "arena", 16 * MIB, clock=lambda: now[0])
    tier.on_evict = lambda arm, keys: gone.extend(keys)
    tier.resize_now(ARM, 12 * MIB)

    def write(numbers: range) -> list[int]:
        for number in numbers:
            tier.put_now(ARM, answer(number, 1, 5000))
            assert tier.get_now(ARM, key(number), touch=False) == answer(number, 1, 5000), "the newest is there"
        held = [number for number in range(numbers.stop) if (entry := tier.get_now(ARM, key(number), touch=False)) and
                check(number, entry)]  # fmt: skip
        assert sorted(gone) == sorted(key(number) for number in set(range(numbers.stop)) - set(held))
        assert tier.stats_now(ARM).entries == len(held)
        return held

    full = write(range(1500))
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    (directory / "other").write_bytes(bytes(max(0, free - 4096)))  # and another program takes the rest
    fuller = write(range(1500, 2000))
    tier.mapping.words[H_OWNER] = 1
    tier.put_now(ARM, answer(1999, 1, 5000))  # repaired without any room
    mount("tmpfs", directory, "size=40m", again=True)
    now[0] = 60.0
    connection.send({"full": len(full), "fuller": len(fuller), "more": len(write(range(2000, 4500))), "repairs": tier.repairs})


def test_a_tmpfs_that_is_full_makes_the_arena_smaller_and_room_that_comes_later_is_used(tmp_path: Path) -> None:
    found = _outcome(Worker(_fill_a_small_tmpfs, tmp_path))
    entry = answer(1, 1, 5000).size
    assert 1.5 * MIB < found["full"] * entry < 4 * MIB  # type: ignore[operator]
    assert 0.9 * found["full"] < found["fuller"] <= found["full"]  # type: ignore[operator]
    assert 11 * MIB < found["more"] * entry <= 12 * MIB, "up to its budget"  # type: ignore[operator]
    assert found["repairs"] == 1


def _make_with_a_limit(connection: Connection, path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        ArenaTier(path, 2 * MIB)
    except ArenaError as error:
        connection.send({"error": str(error)})


def test_a_file_size_limit_is_an_error_not_the_end_of_the_process(tmp_path: Path) -> None:
    found = _outcome(Worker(_make_with_a_limit, tmp_path / "arena"))
    assert f"{2 * MIB} bytes cannot be made (File too large)" in str(found["error"])
    assert os.listdir(tmp_path) == []


def _map_with_a_limit(connection: Connection, path: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 64 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        ArenaTier(path, 512 * MIB)
    except ArenaError as error:
        connection.send({"error": str(error)})


def test_an_arena_larger_than_the_process_may_map_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    ArenaTier(tmp_path / "arena", 512 * MIB).close_now()
    found = _outcome(Worker(_map_with_a_limit, tmp_path / "arena"))
    assert "cannot be mapped (Cannot allocate memory)" in str(found["error"])
    assert "ulimit -v" in str(found["error"])


# -- huge pages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "pages"), [(MIB, 1), (HUGE, 1), (7 * MIB, 3), (8 * MIB, 4)])
def test_a_file_of_huge_pages_is_a_whole_number_of_them(size: int, pages: int) -> None:
    planned = Geometry.plan(size, 1024, 1, HUGE)
    assert planned.bytes == pages * HUGE
    assert planned.values * 64 < planned.bytes


def test_a_hugetlbfs_is_known_by_the_kernels_table_of_mounts(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    table = tmp_path / "mounts"
    table.write_text(f"22 27 0:0 / /proc rw - proc proc rw\n30 25 {number} / /huge rw shared:1 - hugetlbfs none rw,pagesize=2M\n")
    place = Place.of(str(tmp_path / "arena"), table)
    assert (place.huge, place.page) == (True, os.statvfs(tmp_path).f_bsize)
    assert "huge pages" in place.room()
    table.write_text(f"30 25 {number} / / rw - ext4 /dev/sda rw\n")
    assert Place.of(str(tmp_path / "arena"), table).huge is False
    assert Place.of(str(tmp_path / "arena"), tmp_path / "none").huge is False


def _make_with_too_few_huge_pages(connection: Connection, directory: Path) -> None:
    if _mounted(connection, "hugetlbfs", directory, f"size={HUGE},pagesize={HUGE}"):
        try:
            ArenaTier(directory / "arena", 8 * MIB)
        except ArenaError as error:
            connection.send({"error": str(error), "left": os.listdir(directory)})


def test_too_few_huge_pages_are_an_error_that_says_how_to_get_more(tmp_path: Path) -> None:
    found = _outcome(Worker(_make_with_too_few_huge_pages, tmp_path))
    assert f"expected {8 * MIB} bytes free to begin with, found" in str(found["error"])
    assert f"free huge pages of {HUGE} bytes" in str(found["error"])
    assert "/proc/sys/vm/nr_hugepages" in str(found["error"])
    assert found["left"] == []


@contextmanager
def _huge_pages(count: int) -> Iterator[None]:
    """Have so many free huge pages; those that had to be set aside for it are given back."""
    if not HUGE_PAGES.is_dir():
        pytest.skip(f"needs huge pages of {HUGE} bytes, which this kernel does not have")
    free, total = (int((HUGE_PAGES / name).read_text()) for name in ("free_hugepages", "nr_hugepages"))
    lacking = max(0, count - free)
    try:
        if lacking:
            try:
                (HUGE_PAGES / "nr_hugepages").write_text(str(total + lacking))
            except OSError as error:
                pytest.skip(f"needs {count} free huge pages, has {free}, and may not set more aside: {error}")
        if int((HUGE_PAGES / "free_hugepages").read_text()) < count:
            pytest.skip(f"needs {count} free huge pages: this machine's memory is too fragmented for them")
        yield
    finally:
        if lacking:
            (HUGE_PAGES / "nr_hugepages").write_text(str(total))


def _use_huge_pages(connection: Connection, directory: Path) -> None:
    if not _mounted(connection, "hugetlbfs", directory, f"pagesize={HUGE},mode=0700"):
        return
    path = directory / "arena"
    tier = ArenaTier(path, 7 * MIB)
    tier.resize_now(ARM, 5 * MIB)
    other = ArenaTier(path, 7 * MIB)
    for number in range(2000):
        tier.put_now(ARM, answer(number, 1, 5000))
        assert other.get_now(ARM, key(number), touch=False) == answer(number, 1, 5000)
    held = tier.stats_now(ARM).bytes
    tier.mapping.words[H_OWNER] = 1
    other.put_now(ARM, answer(5000, 1, 100))
    found = {
        "bytes": path.stat().st_size, "mode": stat.S_IMODE(path.stat().st_mode), "held": held, "repairs": other.repairs,
        "reserved": int(tier.mapping.words[H_RESERVED]) * 64,
    }  # fmt: skip
    tier.close_now()
    other.close_now()
    again = ArenaTier(path, 7 * MIB)
    found["kept"] = again.get_now(ARM, key(5000)) == answer(5000, 1, 100)
    again.close_now()
    smaller = ArenaTier(path, 4 * MIB)  # there are not pages for both
    found["smaller"] = smaller.mapping.geometry.bytes
    smaller.resize_now(ARM, MIB)
    smaller.put_now(ARM, answer(1, 1, 100))
    found["works"] = smaller.get_now(ARM, key(1)) == answer(1, 1, 100)
    connection.send(found)


def test_an_arena_of_huge_pages_has_all_of_them_from_the_start(tmp_path: Path) -> None:
    with _huge_pages(4):
        found = _outcome(Worker(_use_huge_pages, tmp_path))
    assert found.pop("held") > 4 * MIB  # type: ignore[operator]
    assert found == {
        "bytes": 6 * MIB, "mode": 0o600, "repairs": 1, "reserved": 6 * MIB, "kept": True, "smaller": 4 * MIB, "works": True
    }  # fmt: skip


# -- what is not a file of this user's -----------------------------------------------------------------------------------------


def test_a_device_is_refused_with_the_way_out() -> None:
    with pytest.raises(ArenaError, match=r"expected a file, found a device.*-m fsdax.*set the path of a file there"):
        ArenaTier("/dev/null", MIB)


def test_pipes_sockets_and_directories_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "directory").mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, why in (("pipe", "expected a regular file"), ("directory", "cannot be opened"), ("socket", "cannot be opened")):
            with pytest.raises(ArenaError, match=why):
                ArenaTier(tmp_path / name, MIB)


def test_a_directory_in_which_all_may_remove_files_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    ArenaTier(shared / "arena", MIB).close_now()
    assert caplog.records == []
    shared.chmod(0o777)
    ArenaTier(shared / "arena", MIB).close_now()
    assert "all users may remove files of its directory (mode 0777); set the sticky bit" in caplog.text


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"directory cannot be looked at \(No such file or directory\); make it"):
        ArenaTier(tmp_path / "none" / "arena", MIB)


def test_the_file_and_the_directory_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir(0o700)
    ArenaTier(own / "arena", MIB).close_now()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    if user == 0:
        own_directory = pytest.raises(ArenaError, match=r"expected a regular file of user 1 with mode 0600, found one of user 0")
    else:
        own_directory = pytest.raises(ArenaError, match=rf"expected a directory of user {user + 1} or root.* of user {user}")
    with own_directory:
        ArenaTier(own / "arena", MIB)


def _plant(connection: Connection, directory: Path, victim: Path) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    (directory / "to-own").symlink_to(victim)
    (directory / "to-nothing").symlink_to(directory / "made-by-mistake")
    tier = ArenaTier(directory / "theirs", MIB)
    tier.resize_now(ARM, MIB // 2)
    tier.put_now(ARM, answer(1, 1, 100))
    os.chmod(directory / "theirs", 0o666)
    try:
        ArenaTier(directory / "own", MIB)
    except ArenaError as error:
        connection.send({"refused": str(error)})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_what_another_user_plants_in_a_shared_directory_is_neither_followed_nor_believed(tmp_path: Path) -> None:
    directory = Path(os.path.realpath("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")) / f"planted-{os.getpid()}"
    directory.mkdir()
    directory.chmod(0o1777)
    try:
        ArenaTier(directory / "own", MIB).close_now()
        victim = tmp_path / "arena"
        ArenaTier(victim, MIB).close_now()
        before = victim.read_bytes()
        found = _outcome(Worker(_plant, directory, victim))
        assert "cannot be opened (Permission denied)" in str(found["refused"])
        for name, why in (
            ("to-own", "Too many levels of symbolic links"),
            ("to-nothing", "Too many levels of symbolic links"),
            ("theirs", rf"found one of user {NOBODY} with mode 0666: others could read or forge answers"),
        ):
            with pytest.raises(ArenaError, match=why):
                ArenaTier(directory / name, MIB)
        os.chmod(directory / "theirs", 0o600)
        with pytest.raises(ArenaError, match=f"found one of user {NOBODY} with mode 0600"):
            ArenaTier(directory / "theirs", MIB)
        assert victim.read_bytes() == before
        assert not (directory / "made-by-mistake").exists()
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
