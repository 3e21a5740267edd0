"""The client end of the control plane: one long-lived connection to one server around the :class:`ClientSession` machine.

Theory of operation
    The machine decides when to say HELLO, to ping, to give up and to start over. The socket, and why nothing works
    (``last_error``), is the business of :class:`~kakeya_zmq.io.client_link.ClientLink`; whom to tell what has become of a
    request, that of :class:`~kakeya_zmq.io.client_requests.ClientRequests`. This shell leads events and effects from one to
    the other. When too much waits for the socket, new requests fail with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Final, assert_never

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.client_link import (
    NOBODY_THERE,
    NOT_A_NODE,
    QUEUE_BYTES_MAX,
    QUEUE_MESSAGES_MAX,
    WRONG_PSK,
    ClientLink,
    Keys,
    LinkOwner,
    SendQueue,
)
from kakeya_zmq.io.client_requests import ClientRequests, OutgoingRequest
from kakeya_zmq.io.effect_queue import EffectQueue
from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.incoming import OVERLONG, Incoming
from kakeya_zmq.io.names import Names
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol import session as machine
from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.session import ClientSession, LocalNode, PeerInfo
from wire import limits
from wire.errors import FailureCode
from wire.keys import FleetKey
from wire.messages import ProgressBody, ReplyBody, RequestBody

__all__ = [
    "NOBODY_THERE",
    "NOT_A_NODE",
    "WRONG_PSK",
    "ControlClient",
    "Keys",
    "LinkState",
    "OutgoingRequest",
]

GOODBYE_LINGER_MS: Final = 300
ROUND_TRIP_WEIGHT: Final = 0.2
"""Weight of a new sample in the moving average of the round trip time."""
ABANDONED_S: Final = 60.0
"""How long a server is left alone that broke the rules of the transport."""

_log = logging.getLogger(__name__)


class LinkState(Enum):
    """How far a client is; what ``kakeya status`` shows."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class ControlClient:
    """One connection to the server at ``address``, kept up until :meth:`close`. Use it on the reactor's thread.

    Args:
        address: where the server listens.
        fleet_key: the PSK; or a function that gives those that may be valid, asked each time the connection is opened. They
            are tried in turn, as an endpoint admits one of them only.
        expected_node_id: refuse any other node there.
        identities: which key belongs to which node id; a book of its own when None.
        on_up: called with the peer each time a session is established.
        on_refused: told why a connection was ended for what the server sent.
        on_round_trip: called with each measured round trip, in ms.
        names: looks up the host of ``address``, where it is a name, each time the connection is opened.
        on_down: called with one line each time a session ends, and when a first or repeated attempt fails for a new reason.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        address: Address,
        local: LocalNode,
        fleet_key: FleetKey | Keys,
        expected_node_id: str | None = None,
        identities: IdentityBook | None = None,
        on_up: Callable[[PeerInfo], None] | None = None,
        on_down: Callable[[str], None] | None = None,
        on_refused: Callable[[str], None] | None = None,
        on_round_trip: Callable[[float], None] | None = None,
        names: Names | None = None,
    ) -> None:
        reactor.check_thread()
        self.reactor = reactor
        self.address = address
        self.peer: PeerInfo | None = None
        self.last_error: str | None = None
        """Why there is no session, in one line; None while there is one."""
        self.round_trip_ms: float | None = None
        """Moving average of the round trip, None until measured."""
        self.counters: Counter[str] = Counter()
        """``sessions``, ``sockets``, ``handshakes_rejected``, ``rules_broken``, ``late_replies``, ``frames_dropped``,
        ``callback_errors``; of the host's own traffic, pings aside: ``requests``, ``updates``, ``cancels``, ``answers``."""
        self._queue = SendQueue()
        self._link = ClientLink(
            reactor,
            address=address,
            keys=(lambda: (fleet_key,)) if isinstance(fleet_key, FleetKey) else fleet_key,
            names=names or Names(reactor),
            queue=self._queue,
            counters=self.counters,
            owner=LinkOwner(opened=self._opened, received=self._received, failed=self._explain),
        )
        self._on_up = on_up
        self._on_down = on_down
        self._on_refused = on_refused
        self._on_round_trip = on_round_trip
        self._session = ClientSession(
            local=local,
            fleet_key=self._link.fleet_key,
            random_bytes=secrets.token_bytes,
            expected_node_id=expected_node_id,
            identities=identities,
        )
        self._effects = EffectQueue(self._apply)
        self._requests = ClientRequests(reactor, counters=self.counters, feed=self._feed, guarded=self._guarded)
        self._closed = False
        self._deadline = reactor.add_deadline_source(self._session.deadline, lambda now: self._feed(Tick()))
        self._link.open()

    @property
    def host(self) -> str:
        """The IP address by which the server is reached; its lanes and bus are on the same one."""
        return self._link.host

    @property
    def answered_by(self) -> str | None:
        """Who answered last in place of the expected node, by its own words."""
        return self._session.answered_by

    @property
    def fleet_key(self) -> FleetKey:
        """The PSK the connection is made with."""
        return self._link.fleet_key

    @property
    def state(self) -> LinkState:
        if self._closed:
            return LinkState.CLOSED
        if self.peer is not None:
            return LinkState.UP
        return LinkState.CONNECTING if self.last_error is None else LinkState.DOWN

    def request(
        self,
        body: RequestBody,
        *,
        timeout_s: float,
        on_reply: Callable[[ReplyBody], None],
        on_failure: Callable[[FailureCode, str], None],
        on_progress: Callable[[ProgressBody], None] | None = None,
    ) -> OutgoingRequest:
        """Ask the server. Callbacks come later, on the reactor's thread, never from inside this call.

        Raises:
            LocalProtocolError: this is another thread.
        """
        self.reactor.check_thread()
        request = self._requests.add(self._session.next_request_id(), on_reply, on_failure, on_progress)
        if self._closed:
            self._requests.fail_later(request, FailureCode.UNAVAILABLE, "the connection is closed")
        elif self._queue_full():
            self._requests.fail_later(request, FailureCode.RESOURCE_EXHAUSTED, "too much is waiting to be sent to this node")
        else:
            self._requests.start(request, body, timeout_s)
        return request

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    def retire(self, limit_s: float, on_closed: Callable[[], None]) -> None:
        """Close once nothing is open any more, or after ``limit_s``; until then it tells nobody of ups and downs."""
        self.reactor.check_thread()
        self._on_up = self._on_down = self._on_round_trip = None

        def end() -> None:
            if not self._closed:
                self.close("another connection is used")
                on_closed()

        if not self._requests:
            self.reactor.post(end)
            return
        self._requests.call_when_idle(lambda: self.reactor.post(end))
        self.reactor.call_later(limit_s, end)

    def start_over(self, reason: str) -> None:
        """Give up the session, if there is one, and open another: requests under way fail as UNAVAILABLE, at once.

        For a host that knows better than the silence of the line: the node behind it was restarted.
        """
        self.reactor.check_thread()
        if self._closed or self.peer is None:
            return
        if self._effects.draining:
            self.reactor.post(lambda: self.start_over(reason))
            return
        self._link.replace(reason)

    def close(self, reason: str = "closed") -> None:
        """Say Goodbye and close; open requests fail with CANCELLED. Idempotent.

        Called from inside a callback it takes effect right after it.
        """
        if self._closed or self.reactor.closed:
            self._closed = True
            return
        self.reactor.check_thread()
        if self._effects.draining:
            self.reactor.post(lambda: self.close(reason))
            return
        self._on_up = self._on_down = self._on_round_trip = None
        self._feed(machine.Leave(reason[: limits.TEXT_CHARACTERS_MAX]))
        self._closed = True
        self.peer = None
        self._deadline.remove()
        self._link.close(linger_ms=GOODBYE_LINGER_MS)
        self._requests.fail_all(FailureCode.UNAVAILABLE, reason)

    def _queue_full(self) -> bool:
        return len(self._queue) >= QUEUE_MESSAGES_MAX or self._queue.size_bytes >= QUEUE_BYTES_MAX

    # --- the machine ------------------------------------------------------------------------------------------------

    def _feed(self, event: machine.ClientEvent) -> None:
        if not self._closed:
            self._effects.extend(self._session.on(event, self.reactor.clock()))

    def _apply(self, effect: machine.ClientEffect) -> None:
        match effect:
            case machine.Transmit():
                self._link.send(list(effect.frames))
            case machine.Reopen():
                self._link.reopen(effect.delay_s, effect.port)
            case machine.SessionUp():
                self._session_up(effect.peer)
            case machine.SessionDown():
                self._session_down(effect.reason)
            case machine.Replied():
                self._requests.replied(effect)
            case machine.Failed():
                self._requests.failed(effect)
            case machine.Progressed():
                self._requests.progressed(effect)
            case machine.Measured():
                sample_ms, mean_ms = effect.round_trip_ms, self.round_trip_ms
                self.round_trip_ms = sample_ms if mean_ms is None else mean_ms + ROUND_TRIP_WEIGHT * (sample_ms - mean_ms)
                if self._on_round_trip is not None:
                    on_round_trip = self._on_round_trip
                    self._guarded(lambda: on_round_trip(sample_ms))
            case _:
                assert_never(effect)

    def _guarded(self, callback: Callable[[], None]) -> None:
        """A callback of the host must not take the machine's remaining effects with it."""
        try:
            callback()
        except Exception as error:  # its bug, logged with its place
            self.counters["callback_errors"] += 1
            _log.error("a callback of a control client failed: %s", describe_exception(error))

    def _session_up(self, peer: PeerInfo) -> None:
        self.peer = peer
        self._link.session_began()
        self.last_error = None
        self.counters["sessions"] += 1
        if self._on_up is not None:
            on_up = self._on_up
            self._guarded(lambda: on_up(peer))

    def _session_down(self, reason: str) -> None:
        was_up = self.peer is not None
        self.peer = None
        self._explain(self._link.session_ended(reason), force=was_up)

    def _explain(self, line: str, *, force: bool = False) -> None:
        """Remember why there is no session, and tell it once."""
        if line == self.last_error and not force:
            return
        self.last_error = line
        if self._on_down is not None:
            on_down = self._on_down
            self._guarded(lambda: on_down(line))

    # --- the link ---------------------------------------------------------------------------------------------------

    def _opened(self, replaced_because: str | None) -> None:
        self._session.use_key(self._link.fleet_key)
        if replaced_because is not None:
            self._session.replaced_because = replaced_because
        self._feed(machine.SocketOpened())

    def _received(self, message: Incoming) -> None:
        if message.overlong:
            self._abandon(OVERLONG)
        else:
            self._feed(machine.FramesReceived(message.frames))

    def _abandon(self, reason: str) -> None:
        """The server sends what no node of ours does: have none of it for a while."""
        self.counters["rules_broken"] += 1
        if self._on_refused is not None:
            on_refused = self._on_refused
            self._guarded(lambda: on_refused(reason))
        self._feed(machine.Abandon(reason, ABANDONED_S))
