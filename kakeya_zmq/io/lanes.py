"""What sending and receiving lanes share: the thread, its mailbox, its way out; and the group of a host's live lanes.

A lane is one bulk transfer. Its thread makes, uses and closes its one socket; everybody else talks to it through methods
that only leave a note and wake the thread. What happens is told by ``post``, called on the lane's thread, so it must be
quick, thread-safe and must not raise. The last event is always exactly one LaneFinished.

One socket serves one transfer, over one connection, and is never bound or connected a second time: a PUSH with two PULLs
would deal the chunks out between them. A bound lane admits the bearer of a one-time token and nobody after that; strangers
at its port are few at a time (:class:`~kakeya_zmq.io.monitor.ConnectionWatch`). A broken transfer is not repaired: the lane
ends as soon as its connection does, what it delivered is kept, and the rest is asked for in a new one.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, TypeAlias

import zmq

from kakeya_zmq.io import sockets
from kakeya_zmq.io.addresses import Address, PortRange
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lane_threads import LaneThreads
from kakeya_zmq.io.monitor import ConnectionWatch
from kakeya_zmq.io.sockets import SocketProfile
from kakeya_zmq.io.wake_up import WakeUp
from kakeya_zmq.protocol.effects import CreditEarned, LaneFinished, LaneId, LaneOpened, PartsReceived
from wire import limits
from wire.errors import KakeyaError, LocalProtocolError
from wire.messages import CipherSuite, LinkCodec, TransferGrant

LaneEvent: TypeAlias = LaneOpened | PartsReceived | CreditEarned | LaneFinished
Post: TypeAlias = Callable[[LaneEvent], None]
ZmqContext: TypeAlias = zmq.Context[zmq.Socket[bytes]]

LANE_DOMAIN_KIND: Final = "lane"
CONNECTION_LOST: Final = "the connection broke"
_TOKEN_BYTES: Final = 32


class Lane(ABC):
    """One bulk transfer: a thread and its socket. Made by SenderLane and ReceiverLane."""

    def __init__(
        self, context: ZmqContext, lane: LaneId, post: Post, idle_timeout_s: float, threads: LaneThreads | None
    ) -> None:
        if idle_timeout_s <= 0:
            raise LocalProtocolError("a lane's idle timeout must be positive")
        self._context = context
        self._lane = lane
        self._post = post
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._wake_up = WakeUp()
        self._close_request: tuple[bool, str] | None = None
        self._threads = threads or LaneThreads(spare=0)
        self._ended = threading.Event()
        # Below: the lane's thread only.
        self._socket: zmq.Socket[bytes]
        self._watch: ConnectionWatch
        self._poller = zmq.Poller()
        self._transferred_bytes = 0
        self._progress_at = time.monotonic()

    @property
    def lane_id(self) -> LaneId:
        return self._lane

    @property
    def alive(self) -> bool:
        """Whether the lane has not ended."""
        return not self._ended.is_set()

    def start(self) -> None:
        """Begin; once."""
        self._threads.run(self._run)

    def close(self, ok: bool, reason: str) -> None:
        """End the transfer. ``ok``: the other side has all it wanted. The first call counts; LaneFinished follows."""
        with self._lock:
            if self._close_request is None:
                self._close_request = (ok, reason)
        self._wake_up.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the lane's end; True if it has ended."""
        return self._ended.wait(timeout_s)

    # --- the lane's thread ---

    @abstractmethod
    def _open(self) -> None:
        """Make the socket (``self._socket``), bind or connect it."""

    @abstractmethod
    def _transfer(self) -> tuple[bool, str]:
        """Move everything; (ok, reason). Each turn of its loop reads the watch: strangers come also while it is busy."""

    @abstractmethod
    def _release(self) -> None:
        """Undo what :meth:`_open` did outside of the socket."""

    def _run(self) -> None:
        ok, reason = False, "internal error"
        try:
            self._open()
            try:
                self._poller.register(self._wake_up.fileno(), zmq.POLLIN)
                self._poller.register(self._watch.pair, zmq.POLLIN)
                ok, reason = self._transfer()
            finally:
                self._watch.close()
                # The other side either has everything or won't get the rest from here: nothing to linger for.
                self._socket.close(linger=0)
        except zmq.ContextTerminated:
            reason = "this node is shutting down"
        except KakeyaError as error:
            reason = error.message
        except (zmq.ZMQError, OSError) as error:
            reason = f"socket error: {error.strerror}"
        except MemoryError:
            reason = "not enough memory for a part"
        finally:
            self._release()
            self._wake_up.close()
            self._post(LaneFinished(self._lane, ok=ok, reason=reason, transferred_bytes=self._transferred_bytes))
            self._ended.set()

    def _open_socket(self, kind: int, profile: SocketProfile, side: BoundSide | ConnectingSide) -> TransferGrant:
        """Make the socket and its watch, and bind or connect it; nothing is left of them when that fails."""
        self._socket = sockets.create_socket(self._context, kind, profile)
        try:
            self._watch = ConnectionWatch(self._context, self._socket, side.refused, side.admitted)
            try:
                grant = side.open(self._socket)
                if isinstance(side, BoundSide):
                    self._watch.listening(grant.port)
            except BaseException:
                self._watch.close()
                raise
        except BaseException:
            self._socket.close(linger=0)
            raise
        return grant

    def _requested_close(self) -> tuple[bool, str] | None:
        with self._lock:
            return self._close_request

    def _patience_s(self) -> float:
        """How long nothing may happen now."""
        return self._idle_timeout_s

    def _made_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _wait(self, events: int, *, timed: bool) -> bool:
        """Sleep until the socket has one of ``events`` (0: ignore it) or somebody wakes us.

        Args:
            events: zmq.POLLIN, zmq.POLLOUT or 0.
            timed: whether the idle timeout runs.

        Returns:
            False: the idle timeout is over.
        """
        timeout_ms: int | None = None
        if timed:
            left_s = self._progress_at + self._patience_s() - time.monotonic()
            if left_s <= 0:
                return False
            timeout_ms = math.ceil(left_s * 1000)
        self._poller.register(self._socket, events)  # 0 removes it
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_up.fileno() in ready:
            self._wake_up.drain()
        return True


class BoundSide:
    """The bound side of a transfer: makes its id, key and token, and admits one bearer of the token."""

    def __init__(
        self,
        gate: Gate,
        host: str,
        port_range: PortRange | None,
        suite: CipherSuite,
        chunk_bytes: int,
        link_codec: LinkCodec = LinkCodec.NONE,
    ) -> None:
        check_chunk_bytes(chunk_bytes)
        self._gate = gate
        self._host = host
        self._port_range = port_range
        self._suite = suite
        self._chunk_bytes = chunk_bytes
        self._link_codec = link_codec
        self._transfer_id = os.urandom(16)
        self._domain = f"{LANE_DOMAIN_KIND}/{self._transfer_id.hex()}"

    def open(self, socket: zmq.Socket[bytes]) -> TransferGrant:
        """Bind ``socket`` and let one peer in; what that peer must know is returned."""
        token = os.urandom(_TOKEN_BYTES).hex()
        self._gate.admit_once(self._domain, token)
        sockets.apply_plain_server(socket, self._domain)
        address = sockets.bind_in_range(socket, self._host, self._port_range)
        return TransferGrant(
            transfer_id=self._transfer_id,
            port=address.port,
            token=token,
            key=os.urandom(32),
            suite=self._suite,
            chunk_bytes=self._chunk_bytes,
            link_codec=self._link_codec,
        )

    def admitted(self) -> bool:
        """Whether the bearer of the token has shown it."""
        return self._gate.admitted(self._domain)

    def refused(self, reason: str) -> None:
        """Somebody did not get through the transport's handshake, or was cut."""
        self._gate.note(LANE_DOMAIN_KIND, reason)

    def release(self) -> None:
        self._gate.forget(self._domain)


class ConnectingSide:
    """The connecting side of a transfer."""

    def __init__(self, host: str, grant: TransferGrant) -> None:
        check_chunk_bytes(grant.chunk_bytes)
        self._address = Address(host=host, port=grant.port)
        self._grant = grant

    def open(self, socket: zmq.Socket[bytes]) -> TransferGrant:
        sockets.apply_plain_client(socket, self._grant.token)
        socket.connect(self._address.zmq_endpoint())
        return self._grant

    def admitted(self) -> bool:
        """Nobody is let in here: whether the other side lets us in is told by the handshake."""
        return False

    def refused(self, reason: str) -> None:
        """Our own attempt failed: nobody was refused."""

    def release(self) -> None:
        """Nothing to undo."""


def check_chunk_bytes(chunk_bytes: int) -> None:
    if not limits.CHUNK_BYTES_MIN <= chunk_bytes <= limits.CHUNK_BYTES_MAX:
        raise LocalProtocolError(f"chunks of {chunk_bytes} bytes are out of range")


class LaneGroup:
    """The live lanes of one host, by id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[LaneId, Lane] = {}

    def add(self, lane: Lane) -> None:
        """Keep a lane; forgets those that have ended meanwhile.

        Raises:
            LocalProtocolError: a live lane has the same id.
        """
        with self._lock:
            self._lanes = {key: kept for key, kept in self._lanes.items() if kept.alive}
            if lane.lane_id in self._lanes:
                raise LocalProtocolError(f"lane {lane.lane_id} is already there")
            self._lanes[lane.lane_id] = lane

    def get(self, lane_id: LaneId) -> Lane | None:
        """The lane, or None when it is unknown or has ended."""
        with self._lock:
            lane = self._lanes.get(lane_id)
        return lane if lane is not None and lane.alive else None

    def __len__(self) -> int:
        with self._lock:
            return sum(lane.alive for lane in self._lanes.values())

    def close_all(self, timeout_s: float, reason: str = "this node is shutting down") -> bool:
        """Close every lane and wait for the threads, ``timeout_s`` altogether; True if all have ended."""
        with self._lock:
            lanes = tuple(self._lanes.values())
        for lane in lanes:
            lane.close(False, reason)
        deadline = time.monotonic() + timeout_s
        ended = [lane.join(max(0.0, deadline - time.monotonic())) for lane in lanes]
        return all(ended)
