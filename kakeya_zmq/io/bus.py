"""The bus: sealed one-to-many messages over PUB/SUB (layout and keys: :mod:`wire.bus`).

The publisher is an XPUB in manual mode: libzmq then asks us about every subscription, and only the one-byte topics of
:class:`wire.bus.Topic` are granted, so that no member can make the publisher keep endless prefixes (GHSA-qq65-x72m-9wr8).
It also tells us of each new subscriber, which is the moment to publish the present state again: whatever was published
before a subscription arrived is lost to that subscriber, without any error.

Who reads needs no more than the telemetry key, and is no member. libzmq takes in all that a subscriber sends, whatever the
high-water mark says. So one that sends anything but a few subscriptions is cut, and its frames have 1 KiB at most.

Every message is signed by the node it is of. A subscriber takes a name under one key only where it is told which
(``admit``); nodes need not, as the cards they listen for are signed, and judged, themselves.

PUB/SUB drops silently when a subscriber is slow. Messages are therefore numbered for each topic; the subscriber counts gaps
and tells its owner, who asks for a snapshot over the control plane. Nothing on the bus is the only copy of anything.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import zmq

from kakeya_zmq.io.connections import CONNECTIONS_MAX, Connection, ConnectionGuard
from kakeya_zmq.io.incoming import MessageReader
from kakeya_zmq.io.monitor import SERVER_EVENTS, LinkEvent, SocketMonitor
from kakeya_zmq.io.names import Dialling, Names
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import BUS_PUB, BUS_SUB, Address, apply_curve_client, apply_curve_server, create_socket
from kakeya_zmq.io.sockets import bind as bind_socket
from kakeya_zmq.protocol.session import LocalNode
from wire.bus import PAYLOAD_BYTES_MAX, BusMessage, Group, Topic, open_message, seal_message
from wire.errors import AuthenticationError, ForgedMessageError, LocalProtocolError, RemoteProtocolError
from wire.ids import NodeId
from wire.keys import FleetKey, Purpose, TelemetryKey
from wire.replay import Order, SequenceTracker

_SUBSCRIBE: Final = 1
_UNSUBSCRIBE: Final = 0
CLOSE_LINGER_MS: Final = 200
REFUSED_TOPIC: Final = "a subscription to something else than a topic of the bus"
REFUSED_TALKER: Final = "a connection to the bus was cut: it sent something else than a few subscriptions"
SUBSCRIPTION_BYTES_MAX: Final = 256
"""Prefixes as long as that are merely refused: some later version of ours may have longer topics."""
REQUESTS_MAX: Final = 64
"""Of one connection, over its life: a subscriber of ours subscribes to each of a few topics once."""
FORGED: Final = "a message on the bus is not signed by the node whose name it bears"
_TOPIC_FRAMES: Final = {topic.frame: topic for topic in Topic}


def group_keys(keys: FleetKey | TelemetryKey) -> dict[Group, bytes]:
    """The group keys that a holder of ``keys`` has."""
    if isinstance(keys, TelemetryKey):
        return {Group.TELEMETRY: keys.seal_key}
    return {Group.FLEET: keys.derive(Purpose.BUS_FLEET), Group.TELEMETRY: keys.telemetry_key().seal_key}


@dataclass(slots=True)
class _Reader:
    """One connection from behind the handshake, as long as messages of it may come."""

    connection: Connection | None
    """None: it had ended when it was first heard."""
    topics: set[Topic] = field(default_factory=set)
    requests: int = 0
    is_cut: bool = False


class Publisher:
    """Publishes this node's messages on one bound port. Use it on the reactor's thread.

    Args:
        bind: where to listen; port 0 picks one.
        on_subscribed: a subscriber of this topic has just joined: publish its present state again.
        on_refused: told the reason of each refused connection or subscription.
        connections_max: most connections at once.

    Raises:
        PortInUseError: the address is taken.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        bind: Address,
        local: LocalNode,
        fleet_key: FleetKey,
        on_subscribed: Callable[[Topic], None] | None = None,
        on_refused: Callable[[str], None] | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        reactor.check_thread()
        self.counters: Counter[str] = Counter()
        """``published``, ``oversize``, ``subscriptions_refused``, ``readers_cut``, ``handshakes_rejected``."""
        self._reactor = reactor
        self._local = local
        self._keys = group_keys(fleet_key)
        self._on_subscribed = on_subscribed
        self._on_refused = on_refused
        self._sequences: Counter[Topic] = Counter()
        self._subscriptions: Counter[Topic] = Counter()
        """Connections that have subscribed to it."""
        self._readers: dict[bytes, _Reader] = {}
        """By the number that the gate gave them."""
        self._readers_max = 2 * connections_max
        self._closed = False
        self._domain = f"bus/{secrets.token_hex(8)}"
        self._socket = create_socket(reactor.context, zmq.XPUB, BUS_PUB)
        self._incoming = MessageReader(self._socket)
        self._socket.setsockopt(zmq.XPUB_MANUAL, 1)
        curve = fleet_key.curve_bus()
        reactor.gate.allow_curve(self._domain, {curve.public})
        apply_curve_server(self._socket, curve, self._domain)
        self._connections = ConnectionGuard(
            reactor, self._socket, on_refused=self._rejected, connections_max=connections_max
        )
        try:
            self.address = bind_socket(self._socket, bind)
        except BaseException:
            self._connections.close()
            self._socket.close(linger=0)
            reactor.gate.forget(self._domain)
            raise
        self._connections.listening(self.address.port)
        reactor.register(self._socket, self._on_readable)

    @property
    def port(self) -> int:
        return self.address.port

    def has_subscribers(self, topic: Topic) -> bool:
        """Whether somebody may be listening to ``topic``: what nobody listens to need not even be encoded.

        A connection counts once, until it takes its subscription back or ends. A reader can neither keep a topic busy when
        it has gone nor silence it for the others.
        """
        return self._subscriptions[topic] > 0

    def publish(self, topic: Topic, payload: bytes, sequence: int = 0) -> bool:
        """Send to whoever subscribes to ``topic`` now; False (and counted) when the payload is too large for the bus.

        Args:
            sequence: number of the message, greater than all before of its topic; 0: the next one.
        """
        self._reactor.check_thread()
        if self._closed:
            return False
        if len(payload) > PAYLOAD_BYTES_MAX:
            self.counters["oversize"] += 1
            return False
        self._sequences[topic] = sequence or self._sequences[topic] + 1
        local = self._local
        message = BusMessage(
            NodeId(local.node_id), topic, local.incarnation, self._sequences[topic], payload, local.identity.public_key
        )
        frames = seal_message(message, local.identity, self._keys[topic.group], secrets.token_bytes)
        # Never blocks: an XPUB drops what a subscriber's full queue cannot take.
        self._socket.send_multipart(frames, zmq.DONTWAIT)
        self.counters["published"] += 1
        return True

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        if self._closed or self._reactor.closed:
            self._closed = True
            return
        self._reactor.check_thread()
        self._closed = True
        self._connections.close()
        # What a node tells last, for example that a job has failed because it stops, should still get out.
        self._reactor.close_socket(self._socket, linger_ms=CLOSE_LINGER_MS)
        self._reactor.gate.forget(self._domain)

    def _on_readable(self) -> None:
        message = self._incoming.receive()
        frame = message.first
        content = frame.bytes
        topic = _TOPIC_FRAMES.get(content[1:]) if not message.others else None
        number = _number_of(frame)
        if not number:
            # libzmq itself makes an unsubscription for each subscription of a connection that ends.
            if topic is not None and content[0] == _UNSUBSCRIBE:
                self._subscriptions[topic] = max(0, self._subscriptions[topic] - 1)
            return
        reader = self._reader(number, frame)
        if reader.is_cut:
            return
        reader.requests += 1
        if message.others or not _is_subscription(content) or reader.requests > REQUESTS_MAX:
            self._cut(reader)
        elif topic is None:
            self.counters["subscriptions_refused"] += 1
            self._tell(REFUSED_TOPIC)
        elif content[0] == _UNSUBSCRIBE:
            self._unsubscribe(reader, topic)
        else:
            self._subscribe(reader, topic)

    def _reader(self, number: bytes, frame: zmq.Frame) -> _Reader:
        reader = self._readers.get(number)
        if reader is None:
            if len(self._readers) >= self._readers_max:
                knows = self._connections.knows
                self._readers = {key: each for key, each in self._readers.items() if knows(each.connection)}
            reader = self._readers[number] = _Reader(self._connections.prove(frame))
        return reader

    def _subscribe(self, reader: _Reader, topic: Topic) -> None:
        if topic in reader.topics:
            return  # libzmq would tell one end for both
        reader.topics.add(topic)
        self._subscriptions[topic] += 1
        # In manual mode this grants the subscription to the connection whose request was just received.
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.frame)
        if self._on_subscribed is not None:
            self._on_subscribed(topic)

    def _unsubscribe(self, reader: _Reader, topic: Topic) -> None:
        if topic in reader.topics:  # else it is none of its own, and would be told no end of either
            reader.topics.discard(topic)
            self._subscriptions[topic] = max(0, self._subscriptions[topic] - 1)
            self._socket.setsockopt(zmq.UNSUBSCRIBE, topic.frame)

    def _cut(self, reader: _Reader) -> None:
        """What of it is under way still comes, under its own number, and cuts nobody else who has its descriptor by then."""
        reader.is_cut = True
        self.counters["readers_cut"] += 1
        if reader.connection is not None:
            self._connections.cut(reader.connection, REFUSED_TALKER)

    def _rejected(self, reason: str) -> None:
        self.counters["handshakes_rejected"] += 1
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if self._on_refused is not None:
            self._on_refused(reason)


def _number_of(frame: zmq.Frame) -> bytes:
    """What the gate called the connection that sent this; empty when libzmq itself made it."""
    try:
        number = frame.get("User-Id")
    except zmq.ZMQError:
        return b""
    return number.encode() if isinstance(number, str) else bytes(number)


def _is_subscription(content: bytes) -> bool:
    """Whether this is what a subscriber may send: also one to a prefix that is no topic, as of another version of ours."""
    return 0 < len(content) <= SUBSCRIPTION_BYTES_MAX and content[0] in (_SUBSCRIBE, _UNSUBSCRIBE)


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
