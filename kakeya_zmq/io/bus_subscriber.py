"""The receiving end of the bus (layout and keys: :mod:`wire.bus`; the sending end: :mod:`kakeya_zmq.io.bus_publisher`).

Every message is signed by the node it is of. A subscriber takes a name under one key only where it is told which
(``admit``); nodes need not, as the cards they listen for are signed, and judged, themselves.

PUB/SUB drops silently when a subscriber is slow. Messages are therefore numbered for each topic; the subscriber counts gaps
and tells its owner, who asks for a snapshot over the control plane. Nothing on the bus is the only copy of anything.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.incoming import MessageReader
from kakeya_zmq.io.monitor import SERVER_EVENTS, LinkEvent, SocketMonitor
from kakeya_zmq.io.names import Dialling, Names
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import BUS_SUB, apply_curve_client, create_socket
from wire.bus import BusMessage, Topic, group_keys, open_message
from wire.errors import AuthenticationError, ForgedMessageError, LocalProtocolError, RemoteProtocolError
from wire.ids import NodeId
from wire.keys import FleetKey, TelemetryKey
from wire.replay import Order, SequenceTracker

FORGED: Final = "a message on the bus is not signed by the node whose name it bears"


class Subscriber:
    """Receives messages of any number of publishers. Use it on the reactor's thread.

    Args:
        keys: the fleet key, or the telemetry key for who may read telemetry only.
        topics: what to subscribe to.
        on_message: called with each authentic message that is newer than the last one of its node and topic.
        on_gap: called before ``on_message`` when messages between were lost: (node, topic, how many).
        admit: (node, identity key of a message whose signature holds) → why it is not taken, or an empty text.
        on_refused: told of each message that is not: under whose name it came, and why.
        names: looks up hosts of publishers that are named.

    Raises:
        LocalProtocolError: a topic that ``keys`` cannot open.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        keys: FleetKey | TelemetryKey,
        topics: Iterable[Topic],
        on_message: Callable[[BusMessage], None],
        on_gap: Callable[[NodeId, Topic, int], None] | None = None,
        admit: Callable[[NodeId, bytes], str] | None = None,
        on_refused: Callable[[NodeId, str], None] | None = None,
        names: Names | None = None,
    ) -> None:
        reactor.check_thread()
        self.counters: Counter[str] = Counter()
        """``received``, ``malformed``, ``unauthentic``, ``forged``, ``not_admitted``, ``old``, ``gaps``, ``missed``,
        ``handshakes_rejected``, ``names_not_found``."""
        self._reactor = reactor
        self._on_message = on_message
        self._on_gap = on_gap
        self._admit = admit
        self._on_refused = on_refused
        self._key = keys
        self._opening = [group_keys(keys)]
        self._orders = {topic: SequenceTracker() for topic in topics}
        if any(topic.group not in self._opening[0] for topic in self._orders):
            raise LocalProtocolError("the telemetry key opens telemetry topics only")
        self._names = names or Names(reactor)
        self._dialled: dict[Address, tuple[Dialling, list[Address]]] = {}
        """What was asked for, and the IP address of it that was connected to, as soon as there is one."""
        self._closed = False
        self._socket = create_socket(reactor.context, zmq.SUB, BUS_SUB)
        self._incoming = MessageReader(self._socket)
        for topic in self._orders:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.frame)
        self._monitor = SocketMonitor(reactor, self._socket, SERVER_EVENTS, self._on_link_event)
        reactor.register(self._socket, self._on_readable)

    @property
    def connected(self) -> frozenset[Address]:
        """The publishers asked for so far, reached or not."""
        return frozenset(self._dialled)

    def use_keys(self, keys: Sequence[FleetKey]) -> None:
        """Open what is sealed with one of these PSKs from now on; for a member, while PSKs change."""
        self._opening = [group_keys(key) for key in keys]

    def connect(self, address: Address, key: FleetKey | None = None) -> None:
        """Also listen to the publisher at ``address``; libzmq keeps trying until :meth:`disconnect`. Idempotent.

        Args:
            key: the PSK that publisher admits; the first one given when None.
        """
        self._reactor.check_thread()
        if address in self._dialled:
            return
        keys = key or self._key
        curve = keys.bus_curve() if isinstance(keys, TelemetryKey) else keys.curve_bus()
        dialling, connected = self._dialled[address] = (Dialling(self._reactor, address.host, self._names), [])

        def connect(literal: Address) -> None:
            # What is set now is what this connection keeps, also when it is made again.
            apply_curve_client(self._socket, curve.public, curve)
            self._socket.connect(literal.zmq_endpoint())
            connected.append(literal)

        dialling.dial(address.port, connect, self._not_found)

    def disconnect(self, address: Address) -> None:
        """Stop listening to the publisher at ``address``. Idempotent."""
        self._reactor.check_thread()
        dialling, connected = self._dialled.pop(address, (None, []))
        if dialling is not None:
            dialling.stop()
        for literal in connected:
            try:
                self._socket.disconnect(literal.zmq_endpoint())
            except zmq.ZMQError as error:
                if error.errno != errno.ENOENT:  # libzmq gave this one up by itself, after a peer that is none of ours
                    raise

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._closed or self._reactor.closed:
            self._closed = True
            return
        self._reactor.check_thread()
        self._closed = True
        for dialling, _ in self._dialled.values():
            dialling.stop()
        self._monitor.close()
        self._reactor.close_socket(self._socket)

    def _on_readable(self) -> None:
        try:
            message = self._open(list(self._incoming.receive().frames))
        except AuthenticationError:
            self.counters["unauthentic"] += 1  # sealed with another key: dropped, as a member can't have meant it for us
            return
        except ForgedMessageError as error:
            self._refuse("forged", NodeId(error.node_id), FORGED)
            return
        except RemoteProtocolError:
            self.counters["malformed"] += 1  # not a bus message of ours
            return
        order = self._orders.get(message.topic)
        if order is None:
            self.counters["malformed"] += 1
            return
        if self._admit is not None and (refusal := self._admit(message.node_id, message.identity_public_key)):
            self._refuse("not_admitted", message.node_id, refusal)
            return
        observation = order.observe(message.node_id, message.identity_public_key, message.incarnation, message.sequence)
        if observation.order is Order.OLD:
            self.counters["old"] += 1
            return
        self.counters["received"] += 1
        if observation.order is Order.GAP:
            self.counters["gaps"] += 1
            self.counters["missed"] += observation.missed
            if self._on_gap is not None:
                self._on_gap(message.node_id, message.topic, observation.missed)
        self._on_message(message)

    def _not_found(self, reason: str) -> None:
        self.counters["names_not_found"] += 1

    def _refuse(self, counter: str, node_id: NodeId, reason: str) -> None:
        self.counters[counter] += 1
        if self._on_refused is not None:
            self._on_refused(node_id, reason)

    def _open(self, frames: list[bytes]) -> BusMessage:
        *others, last = self._opening
        for keys in others:
            with contextlib.suppress(AuthenticationError):
                return open_message(frames, keys)
        return open_message(frames, last)

    def _on_link_event(self, event: LinkEvent) -> None:
        if event is LinkEvent.REJECTED:
            self.counters["handshakes_rejected"] += 1
