"""RDMA where there is no device: why it is not available, what peers may tell, and links over a queue pair that is made up."""

from __future__ import annotations

import asyncio
import importlib.util
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.arena.layout import Geometry
from serving.neighbours.framing import Framed
from serving.neighbours.link import Hello, LinkLost
from serving.neighbours.verbs import Endpoint, Remote, VerbsError, ack_timeout, choose_gid, parse_device
from serving.neighbours.verbs_link import LANE_BYTES, LANES, VerbsDialing, VerbsLink
from tests.requirements import ROOT

ARENA = bytes(range(256)) * 4096
SLOTS, SLOT_BYTES = 2, 3 * LANE_BYTES
HELLO = Hello(1, Geometry(len(ARENA), 8, 1024, 200, 300, 7), 0, SLOTS, SLOT_BYTES)

# -- why it is not available -------------------------------------------------------------------------------------------------

ENUMS = "IBV_PORT_ACTIVE = 4\nIBV_GID_TYPE_ROCE_V2 = 2\n"
DEVICE = """
import logging, os
from types import SimpleNamespace as Made
from pyverbs.pyverbs_error import PyverbsError
logging.basicConfig(level=logging.DEBUG)
CASE = os.environ["CASE"]
if CASE == "does not fit":
    raise ValueError("pyverbs.device size changed, may indicate binary incompatibility")
def get_device_list():
    if CASE == "no kernel":
        raise PyverbsError("Failed to get devices list")
    return [] if CASE == "no device" else [Made(name=b"fake0"), Made(name=b"fake1")]
class Context:
    def __init__(self, name):
        if CASE == "no right":
            raise PyverbsError("Failed to open device")
        self.name = name
    def query_port(self, port):
        down = CASE == "all down" or (CASE == "first down" and self.name == "fake0")
        return Made(state=1 if down else 4, link_layer=2, active_mtu=5, lid=0, gid_tbl_len=8)
    def query_device(self):
        return Made(max_qp_rd_atom=128, max_qp_init_rd_atom=128)
    def query_gid_table(self, count):
        if CASE == "no address":
            return []
        return [Made(gid_index=3, gid_str="::ffff:10.0.0.1", gid_type=2, port_num=1)]
    def query_gid(self, port, index):
        return "::ffff:10.0.0.1"
    def close(self):
        pass
"""
PROGRAM = """
import logging, sys
from serving.neighbours import verbs
given = sys.argv[1] or None
first = verbs.available(given, int(sys.argv[2]))
assert verbs.available(given, int(sys.argv[2])) == first
assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING
print(first)
"""


def ask(folder: Path, case: str, *, enums: str = "enums", device: str = "", memory: int = 0) -> str:
    """What ``available`` says in a process of its own, with a pyverbs that is made up."""
    package = folder / "pyverbs"
    if case != "not installed":
        package.mkdir()
        for name in ("__init__", "addr", "cq", "mr", "qp", "wr"):
            (package / f"{name}.py").write_text("")
        (package / "pd.py").write_text("class PD:\n    def __init__(self, context): pass\n    def close(self): pass\n")
        (package / "pyverbs_error.py").write_text("class PyverbsError(Exception): pass\n")
        (package / f"{enums}.py").write_text(ENUMS)
        (package / "device.py").write_text(DEVICE)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CASE": case}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device, str(memory)], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0]


@pytest.mark.parametrize("enums", ["enums", "libibverbs_enums"])
def test_a_device_is_found_with_either_name_of_the_enumerations(tmp_path: Path, enums: str) -> None:
    assert ask(tmp_path, "all well", enums=enums) == "None"


@pytest.mark.parametrize(
    ("case", "device", "words"),
    [
        ("not installed", "", "not installed"),
        ("does not fit", "", "has to be that of the installed rdma-core"),
        ("no kernel", "", "the kernel offers no RDMA"),
        ("no device", "", "there is no RDMA device"),
        ("no right", "", "/dev/infiniband"),
        ("all down", "", "not active"),
        ("no address", "", "has no address"),
        ("all well", "mlx5_0", "there are: fake0, fake1"),
        ("all well", "fake0:one", "expected name"),
    ],
)
def test_it_says_why_rdma_cannot_be_used(tmp_path: Path, case: str, device: str, words: str) -> None:
    if case == "not installed" and importlib.util.find_spec("pyverbs") is not None:
        pytest.skip("pyverbs is installed here")
    assert words in ask(tmp_path, case, device=device)


def test_the_first_device_that_can_be_used_is_taken(tmp_path: Path) -> None:
    assert ask(tmp_path, "first down") == "None"


# -- what peers may tell -----------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Endpoint,
        qpn=st.integers(0, 2**24 - 1),
        psn=st.integers(0, 2**24 - 1),
        gid=st.ip_addresses(v=6).map(lambda address: address.exploded),
        lid=st.integers(0, 2**16 - 1),
        mtu=st.integers(1, 5),
        reads=st.integers(1, 255),
    )
)
@settings(max_examples=50)
def test_an_endpoint_is_read_as_it_was_told(endpoint: Endpoint) -> None:
    assert Endpoint.read(endpoint.parameters()) == endpoint


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=40) | st.floats() | st.lists(st.integers(), max_size=2)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("qpn", "psn", "gid", "lid", "mtu", "reads"), VALUES)))
@settings(max_examples=100)
def test_an_endpoint_that_cannot_be_is_refused(told: dict[str, Any]) -> None:
    try:
        made = Endpoint.read(told)
    except ValueError:
        return
    assert Endpoint.read(made.parameters()) == made


@given(st.fixed_dictionaries({}, optional={f"arena_{name}": VALUES for name in ("address", "length", "rkey")}))
@settings(max_examples=100)
def test_memory_that_cannot_be_is_refused(told: dict[str, Any]) -> None:
    try:
        made = Remote.read(told, "arena")
    except ValueError:
        return
    assert Remote.read(made.parameters("arena"), "arena") == made
    assert made.address + made.length <= 2**64


def test_a_device_is_named_with_port_and_address() -> None:
    assert parse_device("mlx5_0") == ("mlx5_0", 1, None)
    assert parse_device("mlx5_0:2") == ("mlx5_0", 2, None)
    assert parse_device("mlx5_0:2:3") == ("mlx5_0", 2, 3)
    for wrong in ("", ":1", "a:b", "a:1:2:3", "a:-1", "a:"):
        with pytest.raises(ValueError, match="expected name"):
            parse_device(wrong)


def test_an_address_that_is_routed_is_preferred() -> None:
    local, six, four = "fe80::1", "2001:db8::1", "::ffff:10.0.0.1"
    assert choose_gid([(0, local, True), (1, six, True), (2, four, False), (3, four, True)]) == 3
    assert choose_gid([(0, local, True), (1, six, True)]) == 1
    assert choose_gid([(0, local, False), (1, "::", True)]) == 0
    assert choose_gid([]) is None


@given(st.floats(0.001, 100.0))
def test_what_is_lost_is_sent_again_within_the_deadline(deadline: float) -> None:
    again = 4.096e-6 * 2 ** ack_timeout(deadline)
    assert again <= max(deadline / 2, 0.0011)
    assert again > min(deadline / 4, 4.2)


# -- links -------------------------------------------------------------------------------------------------------------------


class MadeUpPair:
    """A queue pair whose peer's memory is here; completions come when they are told to.

    Attributes:
        at_once: Complete what is posted at once.
        inbox: The peer's slots.
    """

    def __init__(self, memory: mmap.mmap, *, at_once: bool = True, descriptor: bool = True) -> None:
        self.at_once = at_once
        self.inbox = bytearray(SLOTS * SLOT_BYTES)
        self.posted: list[tuple[str, int, int, int, int]] = []
        self.completed: list[tuple[int, str]] = []
        self.closed = 0
        self.most = 0
        self._memory = memory
        self._pipe = os.pipe()
        self._armed = False
        self.descriptor = self._pipe[0] if descriptor else None
        os.set_blocking(self._pipe[0], False)

    def post(
        self, what: Literal["read", "write"], number: int, address: int, length: int, lkey: int, remote: int, rkey: int
    ) -> None:
        if self.closed:
            raise VerbsError("closed")
        assert (lkey, rkey) == (5, 6 if what == "read" else 7)
        self.posted.append((what, number, address, length, remote))
        self.most = max(self.most, len(self.posted))
        if self.at_once:
            self.complete()

    def complete(self, count: int = 1 << 30, wrong: str = "") -> None:
        """Complete so many of what was posted."""
        done, self.posted = self.posted[:count], self.posted[count:]
        for what, number, address, length, remote in done:
            if what == "read" and not wrong:
                self._memory[address : address + length] = ARENA[remote : remote + length]
            elif not wrong:
                self.inbox[remote : remote + length] = self._memory[address : address + length]
            self.completed.append((number, wrong))
        if done and self._armed:
            self._armed = False
            os.write(self._pipe[1], b"!")

    def poll(self) -> list[tuple[int, str]]:
        if self.closed:
            raise VerbsError("closed")
        done, self.completed = self.completed, []
        return done

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        os.read(self._pipe[0], 1)

    def close(self) -> None:
        if not self.closed:
            for end in self._pipe:
                os.close(end)
        self.closed += 1


class MadeUpLanding:
    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, LANES * LANE_BYTES)
        self.region = SimpleNamespace(lkey=5, remote=Remote(0, len(self.memory), 0))
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def link_over(
    pair: Any, landing: Any, deadline: float = 5.0, *, inbox: bool = True, connection: Framed | None = None
) -> VerbsLink:
    slots = Remote(0, SLOTS * SLOT_BYTES, 7) if inbox else None
    return VerbsLink(pair, landing, Remote(0, len(ARENA), 6), slots, HELLO, deadline, connection or Framed(100))


def made(**options: bool) -> tuple[MadeUpPair, MadeUpLanding]:
    landing = MadeUpLanding()
    return MadeUpPair(landing.memory, **options), landing


async def test_reads_and_writes_of_any_length_come_whole() -> None:
    pair, landing = made()
    link = link_over(pair, landing)
    for offset, length in ((0, 64), (256, 256), (64, LANE_BYTES), (128, 5 * LANE_BYTES + 64)):
        assert await link.read(offset, length) == ARENA[offset : offset + length]
    data = os.urandom(2 * LANE_BYTES + 100)
    await link.write(1, data)
    assert pair.inbox[SLOT_BYTES : SLOT_BYTES + len(data)] == data
    assert bytes(pair.inbox[:SLOT_BYTES]) == bytes(SLOT_BYTES)
    await link.close()


@pytest.mark.parametrize("descriptor", [True, False])
async def test_more_operations_than_lanes_wait_for_one_another(descriptor: bool) -> None:
    pair, landing = made(at_once=False, descriptor=descriptor)
    link = link_over(pair, landing)
    tasks = [asyncio.create_task(link.read(64 * number, 64)) for number in range(5 * LANES)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        pair.complete(7)
    assert [task.result() for task in tasks] == [ARENA[64 * number : 64 * number + 64] for number in range(5 * LANES)]
    assert pair.most == LANES
    await link.close()


async def test_a_caller_that_goes_away_gives_its_lane_back_when_the_device_is_done() -> None:
    pair, landing = made(at_once=False)
    link = link_over(pair, landing)
    for _ in range(3):
        tasks = [asyncio.create_task(link.read(0, 64)) for _ in range(2 * LANES)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(pair.posted) == LANES
        pair.complete()
        last = asyncio.create_task(link.read(64, 64))
        while not last.done():
            await asyncio.sleep(0)
            pair.complete()
        assert last.result() == ARENA[64:128]
    tasks = [asyncio.create_task(link.read(0, 64)) for _ in range(LANES)]
    await asyncio.sleep(0)
    assert len(pair.posted) == LANES, "lanes were lost"
    pair.complete()
    await asyncio.gather(*tasks)
    await link.close()


async def test_no_answer_loses_the_link_for_all_who_wait() -> None:
    pair, landing = made(at_once=False)
    link = link_over(pair, landing, deadline=0.02)
    found = await asyncio.gather(*(link.read(0, 64) for _ in range(LANES + 5)), link.write(0, b"x"), return_exceptions=True)
    assert all(isinstance(error, LinkLost) for error in found), found
    assert link.lost
    assert (pair.closed, landing.closed) == (1, 1)
    with pytest.raises(LinkLost, match="no answer"):
        await link.read(0, 64)
    await link.close()
    assert (pair.closed, landing.closed) == (1, 1)


async def test_one_operation_that_fails_loses_the_link_with_its_reason() -> None:
    pair, landing = made(at_once=False)
    link = link_over(pair, landing)
    tasks = [asyncio.create_task(link.read(0, 64)) for _ in range(3)]
    await asyncio.sleep(0)
    pair.complete(1, "the peer refused the key (status 10)")
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, LinkLost) and "refused the key" in str(error) for error in found), found
    assert pair.closed == 1


async def test_closing_wakes_those_who_wait() -> None:
    pair, landing = made(at_once=False)
    link = link_over(pair, landing)
    tasks = [asyncio.create_task(link.read(0, 64)) for _ in range(LANES + 3)]
    await asyncio.sleep(0)
    await link.close()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, LinkLost) for error in found), found


async def test_the_end_of_the_exchanges_connection_is_the_end_of_the_link() -> None:
    pair, landing = made(at_once=False)
    connection = Framed(100)
    link = link_over(pair, landing, inbox=False, connection=connection)
    waiting = asyncio.create_task(link.read(0, 64))
    await asyncio.sleep(0)
    connection.ended("the connection was closed")
    with pytest.raises(LinkLost, match="closed"):
        await waiting
    assert link.lost


async def test_what_no_transport_takes_is_not_asked_for() -> None:
    pair, landing = made()
    link = link_over(pair, landing)
    for offset, length in ((1, 64), (0, 65), (0, 0), (-64, 64), (0, 1 << 30)):
        with pytest.raises(ValueError, match="expected"):
            await link.read(offset, length)
    for slot, size in ((2, 1), (-1, 1), (0, SLOT_BYTES + 1)):
        with pytest.raises(ValueError, match="expected"):
            await link.write(slot, bytes(size))
    assert not link.lost
    await link.close()


# -- links in the making -----------------------------------------------------------------------------------------------------


class MadeUpDevice:
    """A device whose one queue pair is made up."""

    def __init__(self, *, answers: bool = True) -> None:
        self.regions: list[SimpleNamespace] = []
        self.answers = answers
        self.pair: Any = None

    def register(self, memory: mmap.mmap, remote: str) -> SimpleNamespace:
        region = SimpleNamespace(lkey=5, remote=Remote(0, len(memory), 0), closed=0)
        region.close = lambda: setattr(region, "closed", region.closed + 1)
        self.regions.append(region)
        self.pair = MadeUpPair(memory, at_once=self.answers)
        return region

    def queue_pair(self, depth: int) -> Any:
        assert depth == LANES
        self.pair.endpoint = ENDPOINT
        self.pair.connect = lambda peer, deadline: None
        return self.pair


ENDPOINT = Endpoint(1, 2, "0000:0000:0000:0000:0000:ffff:0a00:0001", 0, 5, 16)
TOLD = {
    **ENDPOINT.parameters(),
    **Remote(0, len(ARENA), 6).parameters("arena"),
    **Remote(0, SLOTS * SLOT_BYTES, 7).parameters("inbox"),
}


def dialing(device: Any, deadline: float = 5.0) -> VerbsDialing:
    return VerbsDialing(device, deadline, WeakSet())


async def test_a_link_is_there_once_something_was_read_over_it() -> None:
    device = MadeUpDevice()
    made = dialing(device)
    assert Endpoint.read(made.parameters) == ENDPOINT
    link = await made.finish(TOLD, HELLO, Framed(100))
    assert await link.read(64, 64) == ARENA[64:128]
    await link.close()
    assert device.pair.closed
    assert device.regions[0].closed


@pytest.mark.parametrize(
    "wrong",
    [{"qpn": -1}, {"gid": "here"}, {"arena_length": 64}, {"arena_rkey": None}, {"inbox_length": SLOT_BYTES}, {"mtu": 9}],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_peer_whose_end_cannot_be_leaves_nothing_behind(wrong: dict[str, Any]) -> None:
    device = MadeUpDevice()
    with pytest.raises(LinkLost, match="expected"):
        await dialing(device).finish({**TOLD, **wrong}, HELLO, Framed(100))
    assert device.pair.closed
    assert device.regions[0].closed


async def test_a_way_that_carries_nothing_leaves_nothing_behind() -> None:
    device = MadeUpDevice(answers=False)
    made = dialing(device, 0.02)
    with pytest.raises(LinkLost, match="no answer"):
        await made.finish(TOLD, HELLO, Framed(100))
    made.abandon()
    assert device.pair.closed
    assert device.regions[0].closed


async def test_an_exchange_that_is_given_up_leaves_nothing_behind() -> None:
    device = MadeUpDevice(answers=False)
    task = asyncio.create_task(dialing(device).finish(TOLD, HELLO, Framed(100)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert device.pair.closed
    assert device.regions[0].closed
