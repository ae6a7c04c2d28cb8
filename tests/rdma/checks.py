"""What is checked in the guest: entries by RDMA that are whole or none, whatever befalls either node; each says what it found."""

from __future__ import annotations

import asyncio
import shutil
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path

from serving.neighbours import verbs_link
from serving.neighbours.link import Link, LinkLost
from serving.neighbours.membership import StaticMembership
from serving.neighbours.tcp import TcpTransport
from serving.neighbours.transport import ClientTransport
from serving.tiers.rdma import NeighbourTier
from tests.neighbour_checks import CHECKS, Bench
from tests.rdma.nodes import ARM, NAMESPACE, SECRET, SLOT_BYTES, Node, answer, forked, key, right
from tests.rdma.readers import ARENA, CHECK_SECONDS, OWN, PATIENT, SIZE, Altered, Reader, direct, queue_pairs, say, until

READS, READERS = 10_000, 4


async def reads(reader: Reader) -> str:
    """Entries of all sizes come whole; what is not there is a miss."""
    count = 0
    for size in (0, 20, 110, 2048, 20_000, 60_000):
        numbers = reader.take(12)
        reader.node.do("put", numbers, 1, size)
        for number in numbers:
            assert await reader.get(number) == answer(number, 1, size), (number, size)
            count += 1
    for number in reader.take(50):
        assert await reader.get(number) is None
    assert (reader.count("hits"), reader.count("misses"), reader.count("lost")) == (count, 50, 0), reader.tier.counts
    return f"{count} entries of 0 to 60,000 bytes read, 50 that are not there"


async def writes(reader: Reader) -> str:
    """New entries get into the owner's arena by its inbox."""
    numbers = reader.take(40)
    for number in numbers:
        before = reader.count("offered")
        reader.tier.offer(ARM, answer(number, 1, 100 + 150 * (number % 40)))
        await until(lambda before=before: reader.count("offered") > before)  # type: ignore[misc]
    await until(lambda: None not in reader.node.do("get", numbers))
    for number, found in zip(numbers, reader.node.do("get", numbers), strict=True):
        assert found == answer(number, 1, 100 + 150 * (number % 40)), number
    _, counts = reader.node.do("stats")
    assert counts["taken"] == len(numbers), counts
    dropped = reader.count("dropped")
    reader.tier.offer(ARM, answer(reader.take(1)[0], 1, SLOT_BYTES))
    assert reader.count("dropped") == dropped + 1
    return f"{len(numbers)} entries written into the inbox and put by the owner, one larger than a slot not offered"


async def one_sided(reader: Reader) -> str:
    """A stopped owner is read all the same; its full inbox drops what is offered, and is emptied when it goes on."""
    numbers = reader.take(50)
    reader.node.do("put", numbers, 1, 1000)
    offered, dropped = reader.count("offered"), reader.count("dropped")
    reader.node.signal(signal.SIGSTOP)
    try:
        for number in numbers:
            assert await reader.get(number) == answer(number, 1, 1000), number
        sent = reader.take(20)
        for number in sent:
            reader.tier.offer(ARM, answer(number, 1, 500))
        await until(lambda: reader.count("offered") + reader.count("dropped") == offered + dropped + len(sent))
    finally:
        reader.node.signal(signal.SIGCONT)
    written = reader.count("offered") - offered
    assert 0 < written < len(sent), (written, len(sent))
    await until(lambda: sum(found is not None for found in reader.node.do("get", sent)) == written)
    return f"50 entries read from a stopped owner; its full inbox took {written} of 20 and was emptied when it went on"


async def race(reader: Reader) -> str:
    """No torn value is accepted while the owner replaces what is read."""
    numbers = reader.take(6)
    reader.node.do("put", numbers, 1, 12_000)
    each = -(-READS // READERS)
    total = each * READERS
    readers = [forked(_read_on, reader.node.address, numbers, each) for _ in range(READERS)]
    reader.node.do("race", numbers)
    try:
        results = []
        for process, connection in readers:
            assert await asyncio.to_thread(connection.poll, CHECK_SECONDS), "a reader did not come to an end"
            results.append(connection.recv())
            process.join()
            connection.close()
    finally:
        reader.node.do("rest")
        for process, _ in readers:
            process.kill()
    hits, wrong, torn, lost = (sum(result[at] for result in results) for at in range(4))
    versions = max(entry.written_at for entry in reader.node.do("get", numbers) if entry is not None)
    assert wrong == 0, f"{wrong} wrong values of {hits}"
    assert lost == 0, lost
    assert versions > 100, versions
    assert hits > READS / 2, hits
    return (
        f"{total:,} reads by {READERS} readers of entries that were replaced {versions:,.0f} times meanwhile: {hits:,} hits, "
        f"{total - hits:,} misses, {torn:,} not whole at first, 0 wrong"
    )


def _read_on(connection: Connection, address: str, numbers: list[int], count: int) -> None:
    """Read the entries of those numbers again and again; send how many hits there were, wrong ones, torn ones, links lost."""

    async def read() -> tuple[int, int, int, int]:
        tier = NeighbourTier(
            OWN,
            StaticMembership(OWN, [address]),
            [verbs_link.VerbsClient()],
            secret=SECRET,
            namespace=NAMESPACE,
            deadline=PATIENT,
        )
        await tier.start()
        await until(lambda: tier.links() == {address: "rdma"})
        found = wrong = 0
        for turn in range(count):
            number = numbers[turn % len(numbers)]
            entry = await tier.get(ARM, key(number))
            if entry is not None:
                found += 1
                wrong += not right(entry, number)
        counts = tier.counts
        await tier.close()
        return found, wrong, counts["rdma", "torn"], counts["rdma", "lost"]

    connection.send(asyncio.run(read()))


async def corrupted(reader: Reader) -> str:
    """One bit that is wrong makes an entry a miss."""
    (number,) = reader.take(1)
    reader.node.do("put", [number], 1, 2048)
    assert await reader.get(number) == answer(number, 1, 2048)
    assert reader.node.do("damage", number) == 1
    assert await reader.get(number) is None
    reader.node.do("put", [number], 2, 2048)
    assert await reader.get(number) == answer(number, 2, 2048)
    return "an entry with one bit turned is a miss, and a hit when it is put again"


async def full(reader: Reader) -> str:
    """A full arena evicts; what it still has is right."""
    reader.node.do("resize", 2 * SIZE)
    numbers = reader.take(400)
    reader.node.do("put", numbers, 1, 30_000)
    stats, _ = reader.node.do("stats")
    hits = 0
    for number in numbers[::2]:
        entry = await reader.get(number)
        assert entry is None or entry == answer(number, 1, 30_000)
        hits += entry is not None
    assert stats.evictions > 0, stats
    assert 0 < hits < len(numbers) // 2, hits
    reader.node.do("resize", SIZE // 2)
    return f"12 MB into an arena of 8 MiB: {stats.evictions} evictions, of 200 entries read {hits} hits, all right"


async def refused(reader: Reader) -> str:
    """The device of the owner refuses what it has not granted."""
    client = verbs_link.VerbsClient()
    words = []

    async def fails(change: Callable[[dict[str, int | str]], None], act: Callable[[Link], Awaitable[object]]) -> str:
        try:
            link = await direct(reader.node, Altered(client, change))
            await act(link)
        except LinkLost as error:
            return str(error)
        raise AssertionError("it was not refused")

    def wrong_key(told: dict[str, int | str]) -> None:
        told["arena_rkey"] = int(told["arena_rkey"]) ^ 0x5A

    def into_arena(told: dict[str, int | str]) -> None:
        told["inbox_address"], told["inbox_rkey"] = told["arena_address"], told["arena_rkey"]

    def from_inbox(told: dict[str, int | str]) -> None:
        told["arena_address"], told["arena_rkey"] = told["inbox_address"], told["inbox_rkey"]

    def beyond_slots(told: dict[str, int | str]) -> None:
        told["inbox_address"] = int(told["inbox_address"]) + int(told["inbox_length"])

    head = ARENA.read_bytes()[:4096]
    words.append(await fails(wrong_key, lambda link: link.read(0, 4096)))
    words.append(await fails(into_arena, lambda link: link.write(0, b"\xff" * 64)))
    words.append(await fails(from_inbox, lambda link: link.read(0, 64)))
    words.append(await fails(beyond_slots, lambda link: link.write(0, b"\xff" * 64)))
    assert ARENA.read_bytes()[:2048] == head[:2048]
    client.close()
    (number,) = reader.take(1)
    reader.node.do("put", [number], 1, 100)
    assert await reader.get(number) == answer(number, 1, 100)  # the refusals were the other links' alone
    assert all("refused" in each for each in words), words
    return "a wrong key, a WRITE into the arena, a READ of the inbox, a WRITE beyond one's slots"


async def no_leaks(reader: Reader) -> str:
    """Links that fail, are given up or closed leave no queue pair behind, and lose what waits by it."""
    client = verbs_link.VerbsClient()
    await until(lambda: queue_pairs(reader.node) == 2)  # the tier's link; the owner closes its ends of others a little later
    before = 2

    def wrong_key(told: dict[str, int | str]) -> None:
        told["arena_rkey"] = int(told["arena_rkey"]) ^ 0x5A

    def nonsense(told: dict[str, int | str]) -> None:
        told["qpn"] = -1

    for number in range(5):
        good = await direct(reader.node, client)
        await good.read(0, 64)
        assert queue_pairs(reader.node) == before + 2, (number, queue_pairs(reader.node))
        waiting = asyncio.create_task(good.read(0, 1 << 20))
        await asyncio.sleep(0)
        await good.close()
        try:
            await waiting
        except LinkLost:
            pass
        else:
            raise AssertionError("a read went on after its link was closed")
        for change, said in ((wrong_key, "refused"), (nonsense, "qpn")):
            words = ""
            try:
                await direct(reader.node, Altered(client, change))
            except LinkLost as error:
                words = str(error)
            assert said in words, words
        await until(lambda: queue_pairs(reader.node) == before)
    client.close()
    return f"{before} queue pairs before and after 5 links that were closed, 5 that failed and 5 that did not come about"


async def cancelled(reader: Reader) -> str:
    """A caller that goes away leaves the link usable, and its lane is used again when the device is done with it."""
    client = verbs_link.VerbsClient()
    link = await direct(reader.node, client)
    want = bytes(await link.read(1 << 20, 4096))
    for _ in range(5):
        tasks = [asyncio.create_task(link.read(1 << 20, 4096)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(bytes(each) == want for each in found[1::2] if not isinstance(each, BaseException)), "other bytes"
        assert not any(isinstance(each, LinkLost) for each in found), found
        assert not link.lost
    await link.close()
    client.close()
    return "500 reads at once, half of them cancelled: the others are right, the link lives"


async def silent(node: Node) -> str:
    """An owner that goes silent costs one wait; the link is made anew by itself."""
    reader = Reader(node, [verbs_link.VerbsClient()], deadline=0.5)
    await reader.tier.start()
    await reader.linked("rdma")
    numbers = reader.take(20)
    node.do("put", numbers, 1, 1000)
    node.do("mute")
    began = time.perf_counter()
    assert await reader.get(numbers[0]) is None
    waited = time.perf_counter() - began
    began = time.perf_counter()
    for number in numbers:
        assert await reader.get(number) is None
    after = time.perf_counter() - began
    assert reader.count("lost") == 1, reader.tier.counts
    await reader.linked("rdma")
    assert await reader.get(numbers[0]) == answer(numbers[0], 1, 1000)
    await reader.tier.close()
    return f"one lookup waited {waited / 0.5:.1f} deadlines, the next 20 together {after / 0.5:.3f}; then it was read again"


async def killed(node: Node, reader: Reader) -> str:
    """A killed owner costs one wait at most, and its keys are void when it is there again with another arena."""
    old: dict[str, int | str] = {}
    client = verbs_link.VerbsClient()
    link = await direct(node, Altered(client, old.update))
    epoch = link.hello.geometry.epoch
    numbers = reader.take(30)
    node.do("put", numbers, 1, 1000)
    times = []
    for number in numbers:
        began = time.perf_counter()
        assert await reader.get(number) is not None
        times.append(time.perf_counter() - began)
    lost, words = reader.count("lost"), ""
    node.kill()
    began = time.perf_counter()
    assert await reader.get(numbers[0]) is None
    first = time.perf_counter() - began
    spent = []
    for number in numbers:
        began = time.perf_counter()
        assert await reader.get(number) is None
        spent.append(time.perf_counter() - began)
    after = statistics.median(spent)
    assert reader.count("lost") <= lost + 1, reader.tier.counts
    assert after < statistics.median(times), (after, times)
    ARENA.unlink()
    again = Node(ARENA, SIZE, port=node.port)
    reader.node = again
    await reader.linked("rdma")
    assert await reader.get(numbers[0]) is None
    again.do("put", numbers, 2, 1000)
    for number in numbers:
        assert await reader.get(number) == answer(number, 2, 1000)
    try:
        await link.read(0, 64)
    except LinkLost:
        pass
    else:
        raise AssertionError("a link to the owner that was killed is alive")

    def with_old_key(told: dict[str, int | str]) -> None:
        told["arena_rkey"], told["arena_address"] = old["arena_rkey"], old["arena_address"]

    fresh = await direct(again, client)
    assert fresh.hello.geometry.epoch != epoch
    await fresh.close()
    try:
        await direct(again, Altered(client, with_old_key))
    except LinkLost as error:
        words = str(error)
    assert "refused" in words, f"a key of the earlier start: {words or 'accepted'}"
    client.close()
    hit = statistics.median(times)
    return (
        f"the first lookup took {first / hit:.2f} of one that hits, the next {after / hit:.3f} "
        "each; there again with a new epoch it was read again, and the old key was refused"
    )


async def warm_start(reader: Reader) -> str:
    """An owner that was killed and is there again with its arena is as warm as before."""
    numbers = reader.take(30)
    reader.node.do("put", numbers, 1, 1000)
    port = reader.node.port
    reader.node.kill()
    await reader.linked("none")
    reader.node = Node(ARENA, SIZE, port=port)
    await reader.linked("rdma")
    found = [await reader.get(number) for number in numbers]
    assert found == [answer(number, 1, 1000) for number in numbers]
    return "30 of 30 entries read again after the owner was killed and started"


async def fallback() -> str:
    """TCP where one side has no RDMA, at once."""
    plain = Node(Path("/dev/shm/plain"), SIZE, rdma=False)
    able = Node(Path("/dev/shm/able"), SIZE)
    both: list[ClientTransport] = [verbs_link.VerbsClient(), TcpTransport()]
    for node, transports in ((plain, both), (able, [TcpTransport()])):
        reader = Reader(node, transports)
        await reader.tier.start()
        await reader.linked("tcp")
        numbers = reader.take(20)
        node.do("put", numbers, 1, 2048)
        for number in numbers:
            assert await reader.get(number) == answer(number, 1, 2048)
        assert (reader.count("hits", "tcp"), reader.count("hits")) == (20, 0), reader.tier.counts
        await reader.tier.close()
    broken = Altered(verbs_link.VerbsClient(), lambda told: told.update(qpn=(int(told["qpn"]) + 5000) % 2**24))
    reader = Reader(able, [broken, TcpTransport()], deadline=0.5)
    await reader.tier.start()
    await reader.linked("tcp")
    await reader.tier.close()
    only = Reader(plain, [verbs_link.VerbsClient()])
    await only.tier.start()
    await until(lambda: only.count("refused", "none") > 0)
    assert await only.get(only.take(1)[0]) is None
    await only.tier.close()
    plain.stop()
    able.stop()
    return (
        "an owner without RDMA and a reader without RDMA: 20 entries each by TCP; a way that carries no RDMA: TCP; where RDMA is "
        "demanded: a miss"
    )


async def contract() -> str:
    """What holds for every link holds for this one."""
    folder = Path("/dev/shm/contract")
    for checked in CHECKS:
        folder.mkdir()
        bench = Bench(folder, "rdma", verbs_link.VerbsClient, [verbs_link.offered()], reads=50, seconds=60.0)
        try:
            await checked(bench)
        except BaseException:
            say(f"FAILED contract: {checked.__name__}")
            raise
        shutil.rmtree(folder)
    return f"{len(CHECKS)} checks of tests/neighbour_checks.py"
