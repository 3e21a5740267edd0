"""The sending end of the bus: sealed one-to-many messages over PUB/SUB (layout and keys: :mod:`wire.bus`).

The publisher is an XPUB in manual mode: libzmq then asks us about every subscription, and only the one-byte topics of
:class:`wire.bus.Topic` are granted, so that no member can make the publisher keep endless prefixes (GHSA-qq65-x72m-9wr8).
It also tells us of each new subscriber, which is the moment to publish the present state again: whatever was published
before a subscription arrived is lost to that subscriber, without any error.

Who reads needs no more than the telemetry key, and is no member. libzmq takes in all that a subscriber sends, whatever the
high-water mark says. So one that sends anything but a few subscriptions is cut, and its frames have 1 KiB at most. All
readers have the same key, so whoever fills all places makes room for newcomers: see :mod:`kakeya_zmq.io.connections`.

PUB/SUB drops silently when a subscriber is slow: :mod:`kakeya_zmq.io.bus_subscriber` counts what is missing.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.connections import ADDRESS_SHARE, CONNECTIONS_MAX, REFUSED_CROWDED, Connection, ConnectionGuard
from kakeya_zmq.io.incoming import MessageReader
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import BUS_PUB, apply_curve_server, create_socket
from kakeya_zmq.io.sockets import bind as bind_socket
from kakeya_zmq.protocol.session import LocalNode
from wire.bus import PAYLOAD_BYTES_MAX, BusMessage, Topic, group_keys, seal_message
from wire.ids import NodeId
from wire.keys import FleetKey

_SUBSCRIBE: Final = 1
_UNSUBSCRIBE: Final = 0
CLOSE_LINGER_MS: Final = 200
REFUSED_TOPIC: Final = "a subscription to something else than a topic of the bus"
REFUSED_TALKER: Final = "a connection to the bus was cut: it sent something else than a few subscriptions"
SUBSCRIPTION_BYTES_MAX: Final = 256
"""Prefixes as long as that are merely refused: some later version of ours may have longer topics."""
REQUESTS_MAX: Final = 64
"""Of one connection, over its life: a subscriber of ours subscribes to each of a few topics once."""
_TOPIC_FRAMES: Final = {topic.frame: topic for topic in Topic}


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
        """``published``, ``oversize``, ``subscriptions_refused``, ``readers_cut``, ``readers_crowded_out``,
        ``handshakes_rejected``."""
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
            reactor,
            self._socket,
            on_refused=self._rejected,
            connections_max=connections_max,
            address_share=ADDRESS_SHARE,
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
        self.counters["readers_crowded_out" if reason == REFUSED_CROWDED else "handshakes_rejected"] += 1
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
