"""Making a link to a peer: connect, prove, be proved to, and take the best transport that both sides have."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

from serving.neighbours.exchange import (
    EXCHANGE_SECONDS,
    LARGEST_MESSAGE,
    NONCE_BYTES,
    Refused,
    chosen,
    hello,
    open_answer,
    proof,
)
from serving.neighbours.framing import Framed
from serving.neighbours.link import Link, LinkLost
from serving.neighbours.resolving import Resolver
from serving.neighbours.transport import ClientTransport


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; IPv6 addresses are in brackets.

    Raises:
        ValueError: If it is not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"neighbours: {what}: expected host:port, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Messages:
    """The messages of an exchange, one at a time, from a connection.

    Make it before the connection can receive anything: uvloop delivers what has come before tasks that are ready run.
    """

    def __init__(self, connection: Framed) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._reason = ""
        connection.received = self._received
        connection.ended = self._ended

    async def next(self) -> bytes:
        """Return the next message.

        Raises:
            LinkLost: If the connection has ended.
        """
        message = await self._queue.get()
        if message is None:
            raise LinkLost(self._reason)
        return message

    def finish(self) -> None:
        """The exchange is over, and whoever comes next takes the messages.

        Raises:
            LinkLost: If the connection has ended, or more was sent than an exchange has.
        """
        if not self._queue.empty():
            message = self._queue.get_nowait()
            raise LinkLost(self._reason if message is None else "more messages than an exchange has")

    def _received(self, message: bytes) -> None:
        if self._queue.qsize() > 1:
            raise ValueError("more messages than an exchange has")
        self._queue.put_nowait(message)

    def _ended(self, reason: str) -> None:
        self._reason = reason
        self._queue.put_nowait(None)


async def dial(
    address: str,
    transports: Sequence[ClientTransport],
    *,
    secret: bytes,
    namespace: str,
    deadline: float,
    fell_back: Callable[[str], None] = lambda _: None,
    resolver: Resolver | None = None,
) -> Link:
    """Return a link to the peer at ``host:port``, over the first of the transports that the peer has too.

    Bounded by :data:`serving.neighbours.exchange.EXCHANGE_SECONDS`. A transport that fails is left out, and the next one tried.

    Args:
        address: Of the peer.
        transports: Those that this side has, the best first.
        secret: Shared by all nodes.
        namespace: The cache's.
        deadline: Seconds that a call of the link may take.
        fell_back: Told why a transport that both sides have is not the one, in words.
        resolver: Finds the addresses of names; None: one that remembers nothing.

    Raises:
        LinkLost: If the peer cannot be reached or ends the exchange.
        Refused: If one side refuses the other; says why.
    """
    left, finding = list(transports), resolver or Resolver()
    try:
        while True:
            try:
                return await _dial(address, left, secret, namespace, deadline, finding)
            except _Failed as failed:
                left = [each for each in left if each.name != failed.name]
                if not left:
                    raise failed.error from None
                fell_back(f"by {left[0].name}, since {failed.name} failed: {failed.error}")
    finally:
        if resolver is None:
            finding.close()


class _Failed(Exception):
    """A transport failed, though the peer was reached."""

    def __init__(self, name: str, error: LinkLost | Refused) -> None:
        super().__init__(str(error))
        self.name = name
        self.error = error


async def _connect(connection: Framed, addresses: Sequence[str], port: int) -> None:
    """Connect to the first of the addresses that can be reached.

    Raises:
        OSError: If none can; of the last one.
    """
    for left, host in reversed(list(enumerate(reversed(addresses)))):
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
            return
        except OSError:
            if not left:
                raise


async def _dial(
    address: str, transports: Sequence[ClientTransport], secret: bytes, namespace: str, deadline: float, resolver: Resolver
) -> Link:
    host, port = parse_address(address, "peer")
    connection = Framed(LARGEST_MESSAGE)
    messages = Messages(connection)
    dialing = None
    finished = False
    try:
        async with asyncio.timeout(EXCHANGE_SECONDS):
            await _connect(connection, await resolver.addresses(host), port)
            names = [each.name for each in transports]
            said = [hello(namespace, names, secrets.token_bytes(NONCE_BYTES))]
            connection.send(said[0])
            said.append(await messages.next())
            name = chosen(said[1], names)
            transport = next(each for each in transports if each.name == name)
            try:
                dialing = transport.dial(deadline)
            except LinkLost as error:
                raise _Failed(name, error) from error
            said.append(proof(secret, said, dialing.parameters))
            connection.send(said[2])
            reply = await messages.next()
            try:
                told, parameters = open_answer(secret, said, reply)
            except Refused as error:
                if error.why != "transport":
                    raise
                raise _Failed(name, error) from error
            messages.finish()
            try:
                link: Link = await dialing.finish(parameters, told, connection)
            except LinkLost as error:
                raise _Failed(name, error) from error
            if not connection.open:
                await link.close()
                raise LinkLost("the connection was closed")
            finished = True
            return link
    except TimeoutError as error:
        raise LinkLost(f"{address}: no exchange within {EXCHANGE_SECONDS:g} s") from error
    except Refused as error:
        raise Refused(error.why, f"{address}: {error}") from error
    except LinkLost as error:
        raise LinkLost(f"{address}: {error}") from error
    except OSError as error:
        raise LinkLost(f"{address}: {error.strerror or error}") from error
    except ValueError as error:  # of a name that no host can have, and whoever writes to Redis can name one
        raise LinkLost(f"{address}: {error}") from error
    finally:
        if not finished:
            if dialing is not None:
                dialing.abandon()
            connection.abort()
