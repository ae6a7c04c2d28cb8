"""RDMA by pyverbs: a device, memory that peers may read or write, queue pairs.

pyverbs is imported once, when it is first asked for: a failed import of it poisons later ones. Both names of its enumerations are
known (``pyverbs.enums`` up to 44, ``pyverbs.libibverbs_enums`` since). Nothing here waits; :mod:`serving.neighbours.verbs_link`
does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
import logging
import math
import os
import resource
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

RETRIES = 3
"""How often the hardware repeats what was not acknowledged; with 7, soft-RoCE never reports a killed peer."""

READS = 16
"""Reads that one queue pair has on the wire at most."""

_HOPS = 64
_ACK_UNIT = 4.096e-6  # seconds
_AT_ONCE = 16  # completions that are asked for
_REQUESTS = 512  # that are kept to be used again
_CLOSED = "the queue pair is closed"
_CAP_IPC_LOCK = 14
_LINK_LAYER_INFINIBAND = 1
_EVENTS = "infiniband"  # of the names of a channel's descriptor under /proc/self/fd


class VerbsError(OSError):
    """RDMA cannot be used here; the message says why, and what to do."""


# -- the library ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> SimpleNamespace | str:
    """Return what is used of pyverbs, or why it cannot be imported."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        try:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
        except ModuleNotFoundError:
            enums = importlib.import_module("pyverbs.enums")
        parts = {
            name: importlib.import_module(f"pyverbs.{name}")
            for name in ("device", "addr", "cq", "mr", "pd", "qp", "wr", "pyverbs_error")
        }
    # Compiled modules that do not fit the library or the interpreter fail in all these ways.
    except (ImportError, OSError, AttributeError, TypeError, ValueError, RuntimeError, SystemError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "pyverbs":
            return "pyverbs is not installed: it comes with the extra 'rdma', or as the package python3-pyverbs"
        return f"pyverbs cannot be imported ({error}): its version has to be that of the installed rdma-core"
    finally:  # pyverbs sets up the logging of the whole process
        root.handlers[:] = handlers
        root.setLevel(level)
    return SimpleNamespace(e=enums, Error=parts["pyverbs_error"].PyverbsError, **parts)


def _loaded() -> SimpleNamespace:
    found = _library()
    if isinstance(found, str):
        raise VerbsError(found)
    return found


@contextlib.contextmanager
def _asked(what: str, way_out: str = "") -> Iterator[None]:
    """Turn what pyverbs raises into words."""
    try:
        yield
    except _loaded().Error as error:
        raise VerbsError(f"{what} ({error})" + (f": {way_out}" if way_out else "")) from error


def available(device: str | None = None, memory: int = 0) -> str | None:
    """Return None if RDMA can be used, else why not, in one sentence.

    Args:
        device: As for :class:`Device`.
        memory: Bytes that are to be registered.
    """
    try:
        Device(device).close()
    except VerbsError as error:
        return str(error)
    except ValueError as error:
        return str(error)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and memory > limit and not _may_lock():
        return (
            f"{memory} bytes have to be locked in memory and {limit} may be: raise the limit (ulimit -l, LimitMEMLOCK=infinity)"
        )
    return None


def _may_lock() -> bool:
    """Whether the limit of locked memory does not hold for this process."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return os.geteuid() == 0
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)


# -- what is told to peers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a connection, as its peer has to know it.

    Attributes:
        qpn: Number of the queue pair, 24 bits.
        psn: Number of its first packet, 24 bits.
        gid: Address, as an IPv6 address.
        lid: Local address on InfiniBand, 16 bits; 0 on Ethernet.
        mtu: Largest packet: 1 to 5 for 256 to 4096 bytes.
        reads: Reads that it answers at a time.
    """

    qpn: int
    psn: int
    gid: str
    lid: int
    mtu: int
    reads: int

    def parameters(self) -> dict[str, int | str]:
        """Return it as :meth:`read` takes it."""
        return asdict(self)

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Endpoint:
        """Return what a peer told; other names are ignored.

        Raises:
            ValueError: If something is missing or out of range.
        """
        highest = {"qpn": 2**24 - 1, "psn": 2**24 - 1, "lid": 2**16 - 1, "mtu": 5, "reads": 255}
        numbers = {name: whole(given, name, limit) for name, limit in highest.items()}
        gid = given.get("gid")
        try:
            address = ipaddress.IPv6Address(gid if isinstance(gid, str) else "")
        except ValueError:
            raise ValueError(f"endpoint: expected gid to be an IPv6 address, got {gid!r:.60}") from None
        if not numbers["mtu"] or not numbers["reads"]:
            raise ValueError(f"endpoint: expected mtu and reads >= 1, got {numbers['mtu']} and {numbers['reads']}")
        return cls(gid=address.exploded, **numbers)


@dataclass(frozen=True, slots=True)
class Remote:
    """Memory of a peer.

    Attributes:
        address: Of its first byte, where the peer has it.
        length: Bytes.
        rkey: The key that opens it.
    """

    address: int
    length: int
    rkey: int

    def parameters(self, prefix: str) -> dict[str, int | str]:
        """Return it as :meth:`read` takes it."""
        return {f"{prefix}_{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def read(cls, given: Mapping[str, object], prefix: str) -> Remote:
        """Return what a peer told.

        Raises:
            ValueError: If something is missing or out of range.
        """
        highest = {"address": 2**64 - 1, "length": 2**48, "rkey": 2**32 - 1}
        found = cls(**{name: whole(given, f"{prefix}_{name}", limit) for name, limit in highest.items()})
        if found.address + found.length > 2**64:
            raise ValueError(f"{prefix}: expected memory below 2^64, got {found.length} bytes at {found.address}")
        return found


def whole(given: Mapping[str, object], name: str, highest: int) -> int:
    """Return the number of that name.

    Raises:
        ValueError: If there is none from 0 to ``highest``.
    """
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= highest:
        raise ValueError(f"{name}: expected a whole number from 0 to {highest}, got {value!r:.60}")
    return value


def parse_device(text: str) -> tuple[str, int, int | None]:
    """Return name, port and index of the GID of ``name[:port[:index]]``; port 1 and None where they are left out.

    Raises:
        ValueError: If it has another form.
    """
    name, *rest = text.split(":")
    if not name or len(rest) > 2 or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in rest):
        raise ValueError(f"RDMA device: expected name, name:port or name:port:gid-index (mlx5_0:1:3), got {text!r}")
    numbers = [int(part) for part in rest]
    return name, numbers[0] if numbers else 1, numbers[1] if len(numbers) > 1 else None


def choose_gid(entries: Sequence[tuple[int, str, bool]]) -> int | None:
    """Return the index of the address to be known by: one that is routed like IPv4, else IPv6, else of its network alone.

    Args:
        entries: Index, GID as an IPv6 address, and whether it is used by RoCE version 2.

    Returns:
        None where there is none.
    """

    def rank(entry: tuple[int, str, bool]) -> tuple[bool, bool, bool, int]:
        index, gid, routed = entry
        address = ipaddress.IPv6Address(gid)
        return not routed, address.is_link_local, address.ipv4_mapped is None, index

    usable = [entry for entry in entries if not ipaddress.IPv6Address(entry[1]).is_unspecified]
    return min(usable, key=rank)[0] if usable else None


def ack_timeout(deadline: float) -> int:
    """Return the exponent of the time after which the hardware repeats what was not acknowledged: 4.096 us x 2^exponent.

    It is a quarter to half of the deadline, so that a lost packet does not cost the link, and at least 1 ms, below which hardware
    does not go.

    Args:
        deadline: Seconds that an operation may take, > 0.
    """
    return min(20, max(8, math.floor(math.log2(deadline / 2 / _ACK_UNIT))))


# -- the device -----------------------------------------------------------------------------------------------------------------


class Device:
    """An opened device with one protection domain, in which all of its memory and queue pairs are.

    Args:
        which: ``name[:port[:gid-index]]``; None: the first one that has an active port 1.

    Attributes:
        name: Of the device.
        port: Number of the port.
        gid_index: Index of the GID by which it is known.

    Raises:
        VerbsError: If there is none, or it cannot be used.
        ValueError: If ``which`` has another form.
    """

    def __init__(self, which: str | None = None) -> None:
        wanted: str | None = None
        self.port = 1
        self.gid_index: int | None = None
        if which is not None:
            wanted, self.port, self.gid_index = parse_device(which)
        library = _loaded()
        with _asked(
            "the kernel offers no RDMA", "load the driver of the device (ib_uverbs, and mlx5_ib, bnxt_re, rdma_rxe, ...)"
        ):
            names = [found.name.decode() for found in library.device.get_device_list()]
        if wanted is not None and wanted not in names:
            raise VerbsError(f"there is no RDMA device {wanted!r}; there are: {', '.join(names) or 'none'}")
        if not names:
            raise VerbsError("there is no RDMA device")
        self._closed = False
        self._children: list[QueuePair | Region] = []
        reasons = []
        for name in [wanted] if wanted is not None else names:
            try:
                self._open(library, name)
                return
            except VerbsError as error:
                reasons.append(str(error))
        raise VerbsError("; ".join(reasons))

    def _open(self, library: SimpleNamespace, name: str) -> None:
        self.name = name
        with _asked(f"the RDMA device {name} cannot be opened", "does this user have the right to /dev/infiniband/uverbs*?"):
            self._context = library.device.Context(name=name)
        try:
            with _asked(f"port {self.port} of the RDMA device {name} cannot be asked"):
                state = self._context.query_port(self.port)
                limits = self._context.query_device()
            if state.state != library.e.IBV_PORT_ACTIVE:
                raise VerbsError(f"port {self.port} of the RDMA device {name} is not active: is its link up?")
            self._global = state.link_layer != _LINK_LAYER_INFINIBAND
            self._mtu, self._lid = int(state.active_mtu), int(state.lid)
            self._answers = max(1, min(READS, limits.max_qp_rd_atom))
            self._asks = max(1, min(READS, limits.max_qp_init_rd_atom))
            self._gid = self._address(library, state.gid_tbl_len)
            with _asked(f"the RDMA device {name} gives no protection domain"):
                self._domain = library.pd.PD(self._context)
        except BaseException:
            self._context.close()
            raise

    def _address(self, library: SimpleNamespace, count: int) -> str:
        if self.gid_index is None:
            with _asked(f"the addresses of the RDMA device {self.name} cannot be asked"):
                table = self._context.query_gid_table(count)
            entries = [
                (item.gid_index, _gid_text(item.gid_str), item.gid_type == library.e.IBV_GID_TYPE_ROCE_V2)
                for item in table
                if item.port_num == self.port
            ]
            self.gid_index = choose_gid(entries)
            if self.gid_index is None:
                raise VerbsError(f"the RDMA device {self.name} has no address: give its network interface one")
        with _asked(f"the RDMA device {self.name} has no GID of index {self.gid_index}"):
            return str(self._context.query_gid(self.port, self.gid_index))

    def register(self, memory: Any, remote: Literal["read", "write", "none"]) -> Region:
        """Register memory, which pins all of it, and so gives memory to all of a file.

        Args:
            memory: A writable buffer; it is kept until the region is closed. (One that cannot be written to cannot be registered,
                not even to be read.)
            remote: What peers may do with it; ``none``: what this side reads or writes from afar lands in it or comes from it.

        Raises:
            VerbsError: If it cannot be.
        """
        region = Region(self, _loaded(), self._domain, memory, remote)
        self._children.append(region)
        return region

    def queue_pair(self, depth: int = 0) -> QueuePair:
        """Return a queue pair that is not connected yet.

        Args:
            depth: Operations under way at most; 0: it only answers its peer.

        Raises:
            VerbsError: If there can be no more.
        """
        own = Endpoint(0, secrets.randbits(24), self._gid, self._lid, self._mtu, self._answers)
        pair = QueuePair(self, _loaded(), self._context, self._domain, depth, own)
        self._children.append(pair)
        return pair

    def route(self, peer: Endpoint) -> Any:
        """Return the way to a peer."""
        address = _loaded().addr
        way = address.GlobalRoute(dgid=address.GID(peer.gid), sgid_index=self.gid_index, hop_limit=_HOPS)
        beyond = self._global or not peer.lid
        return address.AHAttr(gr=way, is_global=int(beyond), dlid=peer.lid, port_num=self.port)

    def path(self, peer: Endpoint) -> tuple[int, int, int]:
        """Return the largest packet on the way to a peer, the reads to have on the wire, and the reads to answer at a time."""
        return min(self._mtu, peer.mtu), min(self._asks, peer.reads), self._answers

    def forget(self, child: QueuePair | Region) -> None:
        """Called by what was made here, when it is closed."""
        with contextlib.suppress(ValueError):
            self._children.remove(child)

    def close(self) -> None:
        """Close everything that was made here, queue pairs first. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for kind in (QueuePair, Region):
            for child in [child for child in self._children if isinstance(child, kind)]:
                child.close()
        with _asked(f"the RDMA device {self.name} cannot be closed"):
            self._domain.close()
            self._context.close()


class Region:
    """Registered memory; see :meth:`Device.register`.

    Attributes:
        remote: Where it is, and the key to it, for peers.
        lkey: The key to it for this side.
    """

    def __init__(self, device: Device, library: SimpleNamespace, domain: Any, memory: Any, remote: str) -> None:
        self._device = device
        # Held on to: a mapping cannot be unmapped under the device.
        self._memory: Any = np.frombuffer(memory, np.uint8)
        if self._memory.size == 0 or not self._memory.flags.writeable:
            raise VerbsError("registered memory: expected at least one byte, and that it may be written to")
        access = {
            "read": library.e.IBV_ACCESS_REMOTE_READ,
            "write": library.e.IBV_ACCESS_REMOTE_WRITE | library.e.IBV_ACCESS_LOCAL_WRITE,
            "none": library.e.IBV_ACCESS_LOCAL_WRITE,
        }[remote]
        address, length = int(self._memory.ctypes.data), int(self._memory.nbytes)
        with _asked(
            f"{length} bytes cannot be registered with the RDMA device {device.name}",
            "all of it is locked in memory, so it has to be there (df /dev/shm) and allowed (ulimit -l)",
        ):
            self._region: Any = library.mr.MR(domain, length, access, address=address)
        self.remote = Remote(address, length, int(self._region.rkey))
        self.lkey = int(self._region.lkey)

    def close(self) -> None:
        """Void its keys and let go of the memory. Safe to call twice."""
        if self._region is not None:
            self._device.forget(self)
            region, self._region = self._region, None
            with _asked("registered memory cannot be let go"):
                region.close()
            self._memory = None


class QueuePair:
    """A reliable connection to one peer; see :meth:`Device.queue_pair`.

    Attributes:
        endpoint: This end, to be told to the peer.
        descriptor: Becomes readable when something is completed after :meth:`arm`; None where it is not known.
    """

    def __init__(self, device: Device, library: SimpleNamespace, context: Any, domain: Any, depth: int, own: Endpoint) -> None:
        self._device = device
        self._library = library
        self._depth = depth
        self._channel: Any = None
        self._queue: Any = None
        self._pair: Any = None
        self.descriptor: int | None = None
        self._requests: dict[tuple[int, int], Any] = {}
        self._opcodes = {"read": library.e.IBV_WR_RDMA_READ, "write": library.e.IBV_WR_RDMA_WRITE}
        self._success = int(library.e.IBV_WC_SUCCESS)
        # Up to now pyverbs does not free a request when it is collected, and frees it twice where it does and is told to.
        self._leaks = hasattr(library.wr.SendWR, "__dealloc")
        flags = 0 if depth else library.e.IBV_ACCESS_REMOTE_READ | library.e.IBV_ACCESS_REMOTE_WRITE
        try:
            with _asked(f"the RDMA device {device.name} gives no queue pair"):
                if depth:
                    self._channel, self.descriptor = _with_descriptor(lambda: library.cq.CompChannel(context))
                self._queue = library.cq.CQ(context, max(1, depth) + 1, None, self._channel, 0)
                capacity = library.qp.QPCap(max_send_wr=max(1, depth), max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
                wanted = library.qp.QPInitAttr(
                    qp_type=library.e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=1
                )
                first = library.qp.QPAttr(port_num=device.port)
                first.qp_access_flags = flags
                self._pair = library.qp.QP(domain, wanted, first)
            own_number = int(self._pair.qp_num)
        except BaseException:
            self._release()
            raise
        self.endpoint = Endpoint(own_number, own.psn, own.gid, own.lid, own.mtu, own.reads)
        if self.descriptor is not None:
            os.set_blocking(self.descriptor, False)

    def connect(self, peer: Endpoint, deadline: float = 1.0) -> None:
        """Connect it; the peer has to do the same, before either side asks for anything.

        Args:
            peer: Its end.
            deadline: Seconds that what is asked for may take.

        Raises:
            VerbsError: If the peer's end is of no use.
        """
        wanted = self._library.qp.QPAttr(port_num=self._device.port)
        mtu, asks, answers = self._device.path(peer)
        wanted.path_mtu, wanted.max_rd_atomic, wanted.max_dest_rd_atomic = mtu, asks, answers
        wanted.dest_qp_num, wanted.rq_psn, wanted.sq_psn = peer.qpn, peer.psn, self.endpoint.psn
        wanted.min_rnr_timer, wanted.timeout, wanted.retry_cnt, wanted.rnr_retry = 12, ack_timeout(deadline), RETRIES, RETRIES
        wanted.ah_attr = self._device.route(peer)
        with _asked(f"the RDMA device {self._device.name} cannot be connected with {peer.gid}", "are both in one network?"):
            if self._depth:
                self._pair.to_rts(wanted)
            else:
                self._pair.to_rtr(wanted)

    def post(
        self, what: Literal["read", "write"], number: int, address: int, length: int, lkey: int, remote: int, rkey: int
    ) -> None:
        """Ask for an operation; it is completed when :meth:`poll` gives its number back.

        Args:
            what: ``read``: from the peer; ``write``: to it.
            number: Given back; 64 bits.
            address: In this side's memory.
            length: Bytes.
            lkey: Key to this side's memory.
            remote: Address in the peer's memory.
            rkey: Key to the peer's memory.

        Raises:
            VerbsError: If it cannot be asked for; the queue pair is of no use any more.
        """
        request = self._requests.get((address, length))
        if request is None:
            request = self._request(address, length, lkey)
        request.wr_id, request.opcode = number, self._opcodes[what]
        request.set_wr_rdma(rkey, remote)
        pair = self._pair
        if pair is None:
            raise VerbsError(_CLOSED)
        try:
            pair.post_send(request)
        except self._library.Error as error:
            raise VerbsError(f"the RDMA device takes no request ({error})") from error

    def poll(self) -> list[tuple[int, str]]:
        """Return the numbers of what was completed, with what went wrong, ``""`` where nothing did."""
        done = []
        while True:
            if self._queue is None:
                raise VerbsError(_CLOSED)
            try:
                count, completions = self._queue.poll(_AT_ONCE)
            except self._library.Error as error:
                raise VerbsError(f"the RDMA device cannot be asked for what was completed ({error})") from error
            for completion in completions:
                status = completion.status
                done.append((completion.wr_id, "" if status == self._success else self._words(status)))
            if count < _AT_ONCE:
                return done

    def arm(self) -> None:
        """Have the descriptor become readable with the next completion that :meth:`poll` would give."""
        if self._queue is None:
            raise VerbsError(_CLOSED)
        with _asked("the RDMA device gives no notice"):
            self._queue.req_notify()

    def disarm(self) -> None:
        """Take the notice that made the descriptor readable."""
        # Readable for another reason, such as a notice that was taken: there is nothing to take.
        with contextlib.suppress(self._library.Error):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)

    def close(self) -> None:
        """Cut the connection at this end: afterwards the peer reads and writes nothing by it. Safe to call twice."""
        if self._pair is not None:
            self._device.forget(self)
            self._release()

    def _request(self, address: int, length: int, lkey: int) -> Any:
        """Return a request for so many bytes at that address, which is kept: making one takes as long as posting it."""
        if len(self._requests) >= _REQUESTS:
            self._forget_requests()
        wr = self._library.wr
        part = wr.SGE(address, length, lkey)
        made = wr.SendWR(opcode=self._opcodes["read"], num_sge=1, sg=[part])
        self._requests[address, length] = made
        if self._leaks:
            part.close()  # the request has a copy
        return made

    def _forget_requests(self) -> None:
        if self._leaks:
            for request in self._requests.values():
                request.close()
        self._requests.clear()

    def _release(self) -> None:
        self._forget_requests()
        pair, queue, channel = self._pair, self._queue, self._channel
        self._pair = self._queue = self._channel = self.descriptor = None
        with _asked("a queue pair cannot be closed"):
            for part in (pair, queue, channel):
                if part is not None:
                    part.close()

    def _words(self, status: int) -> str:
        enums = self._library.e
        known = {
            enums.IBV_WC_RETRY_EXC_ERR: "the peer does not answer",
            enums.IBV_WC_RNR_RETRY_EXC_ERR: "the peer does not answer",
            enums.IBV_WC_REM_ACCESS_ERR: "the peer refused the key or the kind of access",
            enums.IBV_WC_REM_INV_REQ_ERR: "the peer refused the request",
            enums.IBV_WC_REM_OP_ERR: "the peer could not do it",
            enums.IBV_WC_WR_FLUSH_ERR: "the connection is broken",
        }
        return f"{known.get(status, 'the operation failed')} (status {status})"


def _with_descriptor(make: Callable[[], Any]) -> tuple[Any, int | None]:
    """Make a completion channel and find its descriptor, which pyverbs does not tell."""
    before = _event_descriptors()
    made = make()
    new = _event_descriptors() - before
    return made, new.pop() if len(new) == 1 else None


def _event_descriptors() -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if _EVENTS in os.readlink(f"/proc/self/fd/{name}"):
                    found.add(int(name))
    return found


def _gid_text(given: Any) -> str:
    """Return a GID as text, whichever way this version of pyverbs gives it."""
    return str(given() if callable(given) else given)
