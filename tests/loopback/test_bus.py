"""The bus over real sockets: publishers and subscribers, late ones, strangers, and members that misbehave."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator

import pytest
import zmq

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.bus_publisher import REFUSED_TALKER, REQUESTS_MAX, Publisher
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.connections import ADDRESS_SHARE, REFUSED_CROWDED, REFUSED_UNFINISHED
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import BUS_PUB, BUS_SUB, apply_curve_client, apply_curve_server, bind, create_socket
from tests.loopback.reactor_kit import node, run_until
from wire.bus import PAYLOAD_BYTES_MAX, BusMessage, Topic, seal_message
from wire.errors import LocalProtocolError, PortInUseError
from wire.ids import NodeId
from wire.keys import FleetKey, NodeIdentity, Purpose, TelemetryKey

LOOPBACK = Address("127.0.0.1", 0)
KEY = FleetKey(b"k" * 32)
OTHER_KEY = FleetKey(b"o" * 32)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    assert made.callback_errors == 0
    assert made.close()


class Listener:
    """A subscriber with its memory."""

    def __init__(
        self, reactor: Reactor, *topics: Topic, keys: FleetKey | TelemetryKey = KEY, address: Address | None = None
    ) -> None:
        self.messages: list[BusMessage] = []
        self.gaps: list[tuple[NodeId, Topic, int]] = []
        self.subscriber = Subscriber(
            reactor,
            keys=keys,
            topics=topics,
            on_message=self.messages.append,
            on_gap=lambda node_id, topic, missed: self.gaps.append((node_id, topic, missed)),
        )
        if address is not None:
            self.subscriber.connect(address)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]


class Forger:
    """A member of the fleet that sends whatever it likes on a bus of its own."""

    def __init__(self, reactor: Reactor) -> None:
        self.subscribed = 0
        self.identity = NodeIdentity.generate()
        self._reactor = reactor
        self._socket = create_socket(reactor.context, zmq.XPUB, BUS_PUB)
        reactor.gate.allow_curve("forger", {KEY.curve_bus().public})
        apply_curve_server(self._socket, KEY.curve_bus(), "forger")
        self.address = bind(self._socket, LOOPBACK)
        reactor.register(self._socket, self._on_readable)

    def _on_readable(self) -> None:
        self._socket.recv(zmq.DONTWAIT)
        self.subscribed += 1

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def sealed(self, sequence: int, *, incarnation: int = 1, topic: Topic = Topic.CARD, key: FleetKey = KEY) -> list[bytes]:
        message = BusMessage(
            NodeId("forger"), topic, incarnation, sequence, str(sequence).encode(), self.identity.public_key
        )
        return seal_message(message, self.identity, key.derive(Purpose.BUS_FLEET), secrets.token_bytes)


def test_messages_arrive_in_order_and_only_those_of_subscribed_topics(reactor: Reactor) -> None:
    joined: list[Topic] = []
    local = node("p", 7)
    publisher = Publisher(reactor, bind=LOOPBACK, local=local, fleet_key=KEY, on_subscribed=joined.append)
    listener = Listener(reactor, Topic.CARD, Topic.NODE, address=publisher.address)
    run_until(reactor, lambda: len(joined) == 2)
    for number in range(300):
        assert publisher.publish(Topic.CARD, b"card %d" % number)
        assert publisher.publish(Topic.JOB, b"job")
    assert publisher.publish(Topic.NODE, b"figures")
    run_until(reactor, lambda: len(listener.messages) == 301)
    assert listener.payloads == [b"card %d" % number for number in range(300)] + [b"figures"]
    assert listener.messages[0] == BusMessage(NodeId("p"), Topic.CARD, 7, 1, b"card 0", local.identity.public_key)
    assert listener.gaps == []  # the topic in between that it did not subscribe to makes no gap
    assert listener.subscriber.counters["received"] == 301
    assert publisher.port == publisher.address.port > 0


def test_a_late_joiner_makes_the_publisher_tell_its_state_again(reactor: Reactor) -> None:
    publishers: list[Publisher] = []

    def on_subscribed(topic: Topic) -> None:
        publishers[0].publish(topic, b"state")

    publishers.append(Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=on_subscribed))
    publishers[0].publish(Topic.CARD, b"before anybody listens")
    early = Listener(reactor, Topic.CARD, address=publishers[0].address)
    run_until(reactor, lambda: early.payloads == [b"state"])
    late = Listener(reactor, Topic.CARD, address=publishers[0].address)
    run_until(reactor, lambda: late.payloads == [b"state"])
    assert late.gaps == []


def test_one_subscriber_hears_many_publishers_until_it_disconnects(reactor: Reactor) -> None:
    joined: list[str] = []
    publishers = [
        Publisher(
            reactor,
            bind=LOOPBACK,
            local=node(name),
            fleet_key=KEY,
            on_subscribed=lambda topic, name=name: joined.append(name),  # type: ignore[misc]
        )
        for name in ("a", "b", "c")
    ]
    listener = Listener(reactor, Topic.CARD)
    for publisher in publishers:
        listener.subscriber.connect(publisher.address)
        listener.subscriber.connect(publisher.address)  # idempotent: or everything would arrive twice
    run_until(reactor, lambda: sorted(joined) == ["a", "b", "c"])
    listener.subscriber.disconnect(publishers[0].address)
    listener.subscriber.disconnect(publishers[0].address)
    assert listener.subscriber.connected == {publishers[1].address, publishers[2].address}
    for publisher in publishers:
        publisher.publish(Topic.CARD, b"x")
    run_until(reactor, lambda: len(listener.messages) == 2)
    assert {message.node_id for message in listener.messages} == {"b", "c"}


def test_a_restarted_publisher_is_heard_again(reactor: Reactor) -> None:
    joined: list[Topic] = []
    first = Publisher(reactor, bind=LOOPBACK, local=node("p", 1), fleet_key=KEY, on_subscribed=joined.append)
    listener = Listener(reactor, Topic.CARD, address=first.address)
    run_until(reactor, lambda: len(joined) == 1)
    first.publish(Topic.CARD, b"1")
    first.publish(Topic.CARD, b"2")
    run_until(reactor, lambda: len(listener.messages) == 2)
    first.close()
    first.close()
    assert not first.publish(Topic.CARD, b"closed")
    second: list[Publisher] = []

    def rebound() -> bool:
        if second:
            return True
        try:
            second.append(
                Publisher(reactor, bind=first.address, local=node("p", 2), fleet_key=KEY, on_subscribed=joined.append)
            )
        except PortInUseError:  # libzmq closes the old socket in its own time
            return False
        return True

    run_until(reactor, rebound)
    run_until(reactor, lambda: len(joined) == 2)
    second[0].publish(Topic.CARD, b"again")
    run_until(reactor, lambda: listener.payloads == [b"1", b"2", b"again"])
    assert listener.subscriber.counters["old"] == 0


def test_a_reader_with_the_telemetry_key_gets_telemetry_and_nothing_else(reactor: Reactor) -> None:
    joined: list[Topic] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=joined.append)
    reader = KEY.telemetry_key()
    listener = Listener(reactor, Topic.NODE, Topic.JOB, keys=reader, address=publisher.address)
    run_until(reactor, lambda: len(joined) == 2)
    publisher.publish(Topic.CARD, b"for members")
    publisher.publish(Topic.JOB, b"job")
    run_until(reactor, lambda: listener.payloads == [b"job"])
    with pytest.raises(LocalProtocolError, match="telemetry topics only"):
        Listener(reactor, Topic.CARD, keys=reader)


def test_another_fleets_subscriber_is_refused_at_the_handshake(reactor: Reactor) -> None:
    joined: list[Topic] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=joined.append)
    stranger = Listener(reactor, Topic.CARD, keys=OTHER_KEY, address=publisher.address)
    friend = Listener(reactor, Topic.CARD, address=publisher.address)
    run_until(reactor, lambda: bool(joined) and publisher.counters["handshakes_rejected"] > 0)
    publisher.publish(Topic.CARD, b"x")
    run_until(reactor, lambda: len(friend.messages) == 1)
    run_until(reactor, lambda: stranger.subscriber.counters["handshakes_rejected"] > 0)
    assert stranger.messages == []
    assert len(joined) == 1


def test_a_payload_that_is_too_large_is_counted_and_makes_no_gap(reactor: Reactor) -> None:
    joined: list[Topic] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=joined.append)
    listener = Listener(reactor, Topic.CARD, address=publisher.address)
    run_until(reactor, lambda: bool(joined))
    largest = secrets.token_bytes(PAYLOAD_BYTES_MAX)
    assert publisher.publish(Topic.CARD, b"first")
    assert not publisher.publish(Topic.CARD, largest + b"!")
    assert publisher.publish(Topic.CARD, largest)
    run_until(reactor, lambda: listener.payloads == [b"first", largest])
    assert publisher.counters == {"published": 2, "oversize": 1}
    assert listener.gaps == []


def test_gaps_repeats_old_and_forged_messages(reactor: Reactor) -> None:
    forger = Forger(reactor)
    listener = Listener(reactor, Topic.CARD, Topic.NODE, address=forger.address)
    run_until(reactor, lambda: forger.subscribed == 2)
    first = forger.sealed(1)
    for frames in (
        first,
        first,  # a repetition
        forger.sealed(5),  # 2 to 4 are missing
        forger.sealed(3),  # and one of them comes too late
        forger.sealed(6, key=OTHER_KEY),
        [b"\x01", b"header", b"sealed"],
        [b"\x01"],
        [b"\x01"] * 100,
        forger.sealed(6),
        forger.sealed(1, incarnation=2),
        forger.sealed(7),  # of the old incarnation
        forger.sealed(2, incarnation=2),
    ):
        forger.send(frames)
    run_until(reactor, lambda: listener.payloads == [b"1", b"5", b"6", b"1", b"2"])
    assert listener.gaps == [(NodeId("forger"), Topic.CARD, 3)]
    assert listener.subscriber.counters == {
        "received": 5,
        "old": 3,
        "unauthentic": 1,
        "malformed": 3,
        "gaps": 1,
        "missed": 3,
    }


def test_only_one_byte_topics_are_granted(reactor: Reactor) -> None:
    joined: list[Topic] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=joined.append)
    greedy = create_socket(reactor.context, zmq.SUB, BUS_SUB)
    apply_curve_client(greedy, KEY.curve_bus().public, KEY.curve_bus())
    for prefix in (b"", b"\x01\x02", b"\x7f", b"x" * 200):
        greedy.setsockopt(zmq.SUBSCRIBE, prefix)
    greedy.connect(publisher.address.zmq_endpoint())
    run_until(reactor, lambda: publisher.counters["subscriptions_refused"] == 4)
    honest = Listener(reactor, Topic.CARD, address=publisher.address)
    run_until(reactor, lambda: joined == [Topic.CARD])
    publisher.publish(Topic.CARD, b"x")
    run_until(reactor, lambda: len(honest.messages) == 1)
    assert not greedy.poll(50)
    greedy.close()


@contextlib.contextmanager
def talker(reactor: Reactor, publisher: Publisher, host: str = "127.0.0.1") -> Iterator[zmq.Socket[bytes]]:
    """Holds the telemetry key, and can send what it likes; does not come back when it is cut."""
    socket = create_socket(reactor.context, zmq.XSUB, BUS_SUB)
    curve = KEY.telemetry_key().bus_curve()
    apply_curve_client(socket, curve.public, curve)
    socket.reconnect_ivl = -1
    socket.connect(f"tcp://{host}:0;{publisher.address}")
    try:
        yield socket
    finally:
        socket.close(linger=0)


def test_a_reader_that_sends_anything_else_is_cut_and_others_are_served(reactor: Reactor) -> None:
    refused: list[str] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_refused=refused.append)
    honest = Listener(reactor, Topic.NODE, address=publisher.address)
    run_until(reactor, lambda: publisher.has_subscribers(Topic.NODE))
    for number, junk in enumerate(([b"junk"], [b""], [b"x" * 900] * 20, [b"\x01" + b"x" * 300]), start=1):
        with talker(reactor, publisher) as socket:
            for _ in range(50):
                socket.send_multipart(junk)
            run_until(reactor, lambda: refused.count(REFUSED_TALKER) == number)  # noqa: B023
            run_until(reactor, lambda: publisher._connections.connections == 1)
    assert publisher.counters["readers_cut"] == 4
    publisher.publish(Topic.NODE, b"figures")
    run_until(reactor, lambda: honest.payloads == [b"figures"])
    assert refused == [REFUSED_TALKER] * 4


def test_what_a_subscriber_sends_is_bounded_and_what_it_is_sent_is_not(reactor: Reactor) -> None:
    refused: list[str] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_refused=refused.append)
    honest = Listener(reactor, Topic.NODE, address=publisher.address)
    run_until(reactor, lambda: publisher.has_subscribers(Topic.NODE))
    with talker(reactor, publisher) as socket:
        socket.send_multipart([b"x" * 2_000] * 15)
        run_until(reactor, lambda: refused == [REFUSED_UNFINISHED])
    assert publisher.counters["readers_cut"] == 0, "libzmq itself ends it, and hands over nothing"
    largest = secrets.token_bytes(PAYLOAD_BYTES_MAX)
    assert publisher.publish(Topic.NODE, largest)
    run_until(reactor, lambda: honest.payloads == [largest])


def test_a_repeated_subscription_counts_once_and_ends_once(reactor: Reactor) -> None:
    joined: list[Topic] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=joined.append)
    with talker(reactor, publisher) as socket:
        for _ in range(10):
            socket.send(b"\x01" + Topic.NODE.frame)
        socket.send(b"\x01" + Topic.JOB.frame)
        run_until(reactor, lambda: publisher.has_subscribers(Topic.JOB))
        assert joined == [Topic.NODE, Topic.JOB]
        socket.send(b"\x00" + Topic.JOB.frame)
        socket.send(b"\x00" + Topic.CARD.frame)  # never subscribed to
        run_until(reactor, lambda: not publisher.has_subscribers(Topic.JOB))
        assert publisher.has_subscribers(Topic.NODE)
    run_until(reactor, lambda: not publisher.has_subscribers(Topic.NODE))
    assert publisher._subscriptions.total() == 0


def test_a_reader_silences_no_topic_of_others(reactor: Reactor) -> None:
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY)
    honest = Listener(reactor, Topic.NODE, address=publisher.address)
    run_until(reactor, lambda: publisher.has_subscribers(Topic.NODE))
    with talker(reactor, publisher) as socket:
        for _ in range(10):
            socket.send(b"\x00" + Topic.NODE.frame)
        socket.send(b"\x01" + Topic.JOB.frame)
        run_until(reactor, lambda: publisher.has_subscribers(Topic.JOB))
        assert publisher.has_subscribers(Topic.NODE)
    publisher.publish(Topic.NODE, b"figures")
    run_until(reactor, lambda: honest.payloads == [b"figures"])


def test_a_flood_of_subscriptions_ends_the_connection(reactor: Reactor) -> None:
    refused: list[str] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_refused=refused.append)
    with talker(reactor, publisher) as socket:
        for _ in range(REQUESTS_MAX + 1):
            socket.send(b"\x01" + Topic.NODE.frame)
        run_until(reactor, lambda: refused == [REFUSED_TALKER])
        run_until(reactor, lambda: not publisher.has_subscribers(Topic.NODE))


def test_readers_that_come_and_go_are_forgotten(reactor: Reactor) -> None:
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, connections_max=4)
    for _ in range(12):
        with talker(reactor, publisher) as socket:
            socket.send(b"\x01" + Topic.NODE.frame)
            run_until(reactor, lambda: publisher.has_subscribers(Topic.NODE))
        run_until(reactor, lambda: not publisher.has_subscribers(Topic.NODE))
        run_until(reactor, lambda: publisher._connections.connections == 0)
    assert len(publisher._readers) <= 8


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system has one loopback address only")
def test_readers_from_two_addresses_that_fill_all_places_keep_nobody_out(reactor: Reactor) -> None:
    refused: list[str] = []
    publisher = Publisher(
        reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_refused=refused.append, connections_max=32
    )
    before = Listener(reactor, Topic.NODE, address=publisher.address)
    run_until(reactor, lambda: publisher.has_subscribers(Topic.NODE))
    with contextlib.ExitStack() as stack:
        for number in range(27):
            holder = stack.enter_context(talker(reactor, publisher, f"127.0.0.{2 + number % 2}"))
            holder.send(b"\x01" + Topic.NODE.frame)
            run_until(reactor, lambda: publisher._subscriptions[Topic.NODE] == number + 2)  # noqa: B023
        assert refused == []
        late: list[Listener] = []
        while len(late) < ADDRESS_SHARE - 1:
            late.append(Listener(reactor, Topic.NODE, address=publisher.address))
            run_until(reactor, lambda: len(refused) == len(late))
        run_until(reactor, lambda: publisher._connections.connections == 28)
        assert publisher.counters == {"readers_crowded_out": len(late)}
        publisher.publish(Topic.NODE, b"figures")
        run_until(reactor, lambda: all(each.payloads == [b"figures"] for each in [before, *late]))
    assert set(refused) == {REFUSED_CROWDED}


def test_a_taken_port_is_a_clear_error(reactor: Reactor) -> None:
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY)
    with pytest.raises(PortInUseError, match="in use"):
        Publisher(reactor, bind=publisher.address, local=node("q"), fleet_key=KEY)
