"""The exchange by which two nodes come to trust each other and tell each other where their memory is (docs/neighbours.md).

Four messages; both sides prove with HMAC-SHA256 that they know the secret, each over all that was said before and with a label of
its own, so that nothing can be replayed, reflected or left out::

    reader                                             owner
       hello      version, namespace, layout, nonce  →
                                                     ←  challenge   nonce, transport
       proof      MAC, parameters of the transport   →
                                                     ←  answer      MAC, arena and slots, parameters

The owner tells nothing of its memory before it has seen the proof. This module is the messages; :mod:`serving.neighbours.dialing`
and :mod:`serving.neighbours.server` send them.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import orjson

from serving.arena.layout import ARM_WORDS, ARMS, BUCKET_UNITS, HEADER_WORDS, LARGEST_FILE, UNIT, UNIT_WORDS, VERSION, Geometry
from serving.neighbours.inbox import MOST_SLOTS
from serving.neighbours.link import Hello
from serving.neighbours.transport import Parameters

PROTOCOL = 1
"""Version of the exchange and of what follows it on TCP."""

LARGEST_MESSAGE = 4096
"""Bytes of the largest message of an exchange."""

EXCHANGE_SECONDS = 2.0
"""Seconds that an exchange may take in all."""

LEAST_SECRET = 16
"""Characters of the shortest secret."""

NONCE_BYTES = 32
_MAC_BYTES = 32
_PREFIX = b"cachepilot-neighbour "
_ACCEPTED, _REFUSED = b"+", b"-"
_LARGEST_SLOT = 1 << 30
_READER, _OWNER = b"cachepilot neighbour 1: reader", b"cachepilot neighbour 1: owner"

Why = Literal["protocol", "layout", "namespace", "transport", "secret"]
_REASONS: tuple[Why, ...] = get_args(Why)


class Refused(ConnectionError):
    """The exchange failed for a reason that trying again does not mend, at once.

    Attributes:
        why: The kind of reason.
    """

    def __init__(self, why: Why, words: str) -> None:
        super().__init__(words)
        self.why = why


@dataclass(frozen=True, slots=True)
class Asked:
    """What a hello asks for."""

    nonce: bytes
    transports: tuple[str, ...]


def check_secret(secret: str) -> bytes:
    """Return the secret's bytes.

    Raises:
        ValueError: If it is too short.
    """
    if len(secret) < LEAST_SECRET:
        raise ValueError(
            f"neighbours: secret: expected at least {LEAST_SECRET} characters, the same on every node, got {len(secret)} "
            "(make one with: openssl rand -hex 32)"
        )
    return secret.encode()


# -- the reader's side -------------------------------------------------------------------------------------------------------


def hello(namespace: str, transports: Sequence[str], nonce: bytes) -> bytes:
    """Return the first message.

    Args:
        namespace: The cache's.
        transports: Those that the reader has, the best first.
        nonce: 32 random bytes, never used again.
    """
    body = {"namespace": namespace, "layout": VERSION, "nonce": nonce.hex(), "transports": list(transports)}
    return _PREFIX + b"%d\n" % PROTOCOL + orjson.dumps(body)


def chosen(challenge: bytes, transports: Sequence[str]) -> str:
    """Return the transport that the owner has chosen.

    Raises:
        Refused: If the owner refuses, or what came is no challenge.
    """
    body = _accepted(challenge)
    _nonce(body)
    transport = body.get("transport")
    if transport not in transports:
        raise Refused("protocol", f"it chose the transport {transport!r:.40}, which was not offered")
    return str(transport)


def proof(secret: bytes, said: Sequence[bytes], parameters: Parameters) -> bytes:
    """Return the third message.

    Args:
        secret: Shared by all nodes.
        said: The two messages before.
        parameters: Of the reader's end of the transport.
    """
    body = orjson.dumps(dict(parameters))
    return _mac(secret, _READER, *said, body) + body


def open_answer(secret: bytes, said: Sequence[bytes], answer: bytes) -> tuple[Hello, Parameters]:
    """Return what the owner tells of its arena and of its end of the transport, once it has proved who it is.

    Args:
        secret: Shared by all nodes.
        said: The three messages before.
        answer: The fourth.

    Raises:
        Refused: If the owner refuses, does not know the secret, or tells what cannot be.
    """
    if answer[:1] != _ACCEPTED:
        _accepted(answer)
    mac, body = answer[1 : 1 + _MAC_BYTES], answer[1 + _MAC_BYTES :]
    if not hmac.compare_digest(mac, _mac(secret, _OWNER, *said, body)):
        raise Refused("secret", "it does not know the secret: expected the same `neighbours.secret` on every node")
    told = _object(body)
    return _hello(told.get("hello")), _parameters(told.get("parameters"))


# -- the owner's side --------------------------------------------------------------------------------------------------------


def open_hello(message: bytes, namespace: str) -> Asked:
    """Return what the reader asks for.

    Raises:
        Refused: If it is of another version, layout or namespace, or no hello.
    """
    head, newline, rest = message.partition(b"\n")
    if not newline or not head.startswith(_PREFIX):
        raise Refused("protocol", "expected the hello of a neighbour; does another program use this port?")
    if head[len(_PREFIX) :] != b"%d" % PROTOCOL:
        raise Refused(
            "protocol",
            f"expected version {PROTOCOL} of the protocol between neighbours: run one version of cachepilot everywhere",
        )
    body = _object(rest)
    if body.get("layout") != VERSION:
        raise Refused("layout", f"expected layout version {VERSION} of the arena: run one version of cachepilot everywhere")
    if body.get("namespace") != namespace:
        raise Refused("namespace", "this node serves another namespace: `gateway.namespace` has to be the same for neighbours")
    transports = body.get("transports")
    if not isinstance(transports, list) or not all(isinstance(name, str) for name in transports):
        raise Refused("protocol", "expected a list of transports")
    return Asked(_nonce(body), tuple(transports))


def challenge(transport: str, nonce: bytes) -> bytes:
    """Return the second message: the chosen transport and 32 random bytes, never used again."""
    return _ACCEPTED + orjson.dumps({"transport": transport, "nonce": nonce.hex()})


def open_proof(secret: bytes, said: Sequence[bytes], message: bytes) -> Parameters:
    """Return the parameters of the reader's end, once it has proved that it knows the secret.

    Args:
        secret: Shared by all nodes.
        said: The two messages before.
        message: The third.

    Raises:
        Refused: If it does not know the secret, or tells what cannot be.
    """
    mac, body = message[:_MAC_BYTES], message[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, _READER, *said, body)):
        raise Refused("secret", "wrong secret: expected the same `neighbours.secret` on every node")
    return _parameters(_object(body))


def answer(secret: bytes, said: Sequence[bytes], told: Hello, parameters: Parameters) -> bytes:
    """Return the fourth message.

    Args:
        secret: Shared by all nodes.
        said: The three messages before.
        told: Of the arena and the reader's slots.
        parameters: Of the owner's end of the transport.
    """
    body = orjson.dumps({"hello": _flat(told), "parameters": dict(parameters)})
    return _ACCEPTED + _mac(secret, _OWNER, *said, body) + body


def refusal(error: Refused) -> bytes:
    """Return the message that says why the owner refuses; it takes the place of a challenge or an answer."""
    return _REFUSED + orjson.dumps({"why": error.why, "words": str(error)[:500]})


# -- both --------------------------------------------------------------------------------------------------------------------


def _mac(secret: bytes, label: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, label, "sha256")
    for part in parts:
        mac.update(struct.pack("<I", len(part)))
        mac.update(part)
    return mac.digest()


def _accepted(message: bytes) -> dict[str, Any]:
    if message[:1] == _REFUSED:
        body = _object(message[1:])
        why, words = body.get("why"), body.get("words")
        raise Refused(next((each for each in _REASONS if each == why), "protocol"), f"it refused: {words!s:.500}")
    if message[:1] != _ACCEPTED:
        raise Refused("protocol", "what came is not of the protocol between neighbours; does another program use that port?")
    return _object(message[1:])


def _object(text: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise Refused("protocol", "expected a JSON object in a message of the exchange")
    return body


def _nonce(body: Mapping[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(str(body.get("nonce")))
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise Refused("protocol", f"expected a nonce of {NONCE_BYTES} bytes")
    return nonce


def _parameters(told: object) -> Parameters:
    if not isinstance(told, dict) or not all(type(value) in (int, str) for value in told.values()):
        raise Refused("protocol", "expected the parameters of a transport: numbers and texts by name")
    return told


def _flat(hello: Hello) -> dict[str, Any]:
    """Return what is said by name; of the geometry each part."""
    said = asdict(hello)
    return {**said.pop("geometry"), **said}


def _hello(told: object) -> Hello:
    parts = [field.name for field in fields(Geometry)]
    names = [*parts, *(field.name for field in fields(Hello) if field.name != "geometry")]
    if not isinstance(told, dict) or sorted(told) != sorted(names) or not all(type(told[name]) is int for name in names):
        raise Refused("protocol", "expected what an arena is: whole numbers by name")
    arena = Geometry(**{name: told[name] for name in parts})
    made = Hello(geometry=arena, **{name: told[name] for name in names if name not in parts})
    possible = (
        made.layout == VERSION
        and 0 < arena.bytes <= LARGEST_FILE
        and arena.bytes % 4096 == 0
        and arena.edges == HEADER_WORDS + ARMS * ARM_WORDS
        and arena.buckets >= 2
        and arena.edges // UNIT_WORDS < arena.index
        and arena.index + arena.buckets * BUCKET_UNITS == arena.values <= arena.units
        and 0 <= arena.epoch < 1 << 63
        and made.slots >= 0
        and made.first_slot >= 0
        and made.first_slot + made.slots <= MOST_SLOTS
        and 256 <= made.slot_bytes <= _LARGEST_SLOT
        and made.slot_bytes % UNIT == 0
    )
    if not possible:
        raise Refused("layout", f"what it says of its arena cannot be: {told!s:.300}")
    return made
