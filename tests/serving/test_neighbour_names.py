"""Names of neighbours that have no address, many of them and slow: they take few threads, and are not looked up again at once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from serving.neighbours import exchange, resolving
from serving.neighbours.dialing import dial
from serving.neighbours.link import LinkLost
from serving.neighbours.resolving import Resolver
from serving.neighbours.tcp import TcpTransport
from tests.serving.neighbours import NAMESPACE, PATIENT, SECRET, owner
from tests.waiting import until


class Names:
    """Knows some names; looking up others takes until ``go`` and finds nothing."""

    def __init__(self, **known: str) -> None:
        self.known = known
        self.go = threading.Event()
        self.asked: list[str] = []
        self.at_once = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> Sequence[str]:
        with self._lock:
            self.asked.append(name)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            if name in self.known:
                return [self.known[name]]
            self.go.wait(30)
            raise socket.gaierror(-2, "Name or service not known")
        finally:
            with self._lock:
                self.at_once -= 1


async def test_many_names_without_an_address_take_few_threads_and_leave_the_event_loops_own_alone() -> None:
    names = Names()
    resolver = Resolver(names)
    asking = [asyncio.create_task(resolver.addresses(f"none-{number}.invalid")) for number in range(50)]
    await until(lambda: len(names.asked) == resolving.THREADS, "threads to be busy")
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 10) == 7
    names.go.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(answer) for answer in answers} == {LinkLost}
    assert "has no address: Name or service not known" in str(answers[0])
    assert (len(names.asked), names.most) == (50, resolving.THREADS)
    resolver.close()


async def test_a_name_is_looked_up_once_for_all_and_again_after_a_while() -> None:
    now = [0.0]
    names = Names(there="10.0.0.1")
    names.go.set()
    resolver = Resolver(names, lambda: now[0])
    for turn in range(1, 3):
        for _ in range(3):
            assert await asyncio.gather(*(resolver.addresses("there") for _ in range(3))) == [["10.0.0.1"]] * 3
            with pytest.raises(LinkLost, match="none has no address"):
                await resolver.addresses("none")
        assert sorted(names.asked) == sorted(["there", "none"] * turn)
        now[0] += resolving.REMEMBERED_SECONDS
    resolver.close()


async def test_who_gives_up_finds_the_name_known_later() -> None:
    names = Names()
    resolver = Resolver(names)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await resolver.addresses("slow")
    names.go.set()
    await until(lambda: not resolver._looking, "the search to end")
    with pytest.raises(LinkLost):
        await resolver.addresses("slow")
    assert names.asked == ["slow"]
    resolver.close()


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "MOST_REMEMBERED", 5)
    names = Names()
    names.go.set()
    resolver = Resolver(names)
    for number in range(20):
        with pytest.raises(LinkLost):
            await resolver.addresses(f"name-{number}")
    assert len(resolver._known) == 5
    resolver.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%lo"])
async def test_addresses_are_looked_up_by_nobody(host: str) -> None:
    names = Names()
    assert await Resolver(names).addresses(host) == [host]
    assert names.asked == []


async def test_those_who_wait_are_told_when_it_is_closed() -> None:
    names = Names()
    resolver = Resolver(names)
    asking = [asyncio.create_task(resolver.addresses(f"none-{number}")) for number in range(10)]
    await until(lambda: len(names.asked) == resolving.THREADS, "threads to be busy")
    resolver.close()
    names.go.set()
    assert {type(answer) for answer in await asyncio.gather(*asking, return_exceptions=True)} == {LinkLost}


async def test_a_peer_is_reached_by_the_first_of_its_addresses_that_answers(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        port = serving.address[1]
        given = {"secret": SECRET.encode(), "namespace": NAMESPACE, "deadline": PATIENT}
        resolver = Resolver(lambda name: ["::1", "127.0.0.1"])
        link = await dial(f"node:{port}", [TcpTransport()], **given, resolver=resolver)  # type: ignore[arg-type]
        await link.close()
        resolver.close()
        link = await dial(f"localhost:{port}", [TcpTransport()], **given)  # type: ignore[arg-type]
        await link.close()
    with pytest.raises(LinkLost):
        await dial(f"node:{port}", [TcpTransport()], **given, resolver=Resolver(lambda name: ["::1", "127.0.0.1"]))  # type: ignore[arg-type]
    assert exchange.EXCHANGE_SECONDS < resolving.REMEMBERED_SECONDS, "a name that answers late is known at the next try"
