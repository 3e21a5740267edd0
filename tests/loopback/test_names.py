"""Names of hosts over real sockets, with a name server that hangs, errs or changes its mind: only who uses one waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.bus_publisher import Publisher
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.control_client import LinkState
from kakeya_zmq.io.names import LOOKUPS_MAX, SILENT, TOO_MANY, UNKNOWN, Dialling, Names, literal_of, look_up
from kakeya_zmq.io.reactor import Reactor
from tests.loopback.reactor_kit import run_until
from tests.loopback.test_control import KEY, LOOPBACK, Asked, World, node, world
from wire.bus import BusMessage, Topic
from wire.messages import Done

__all__ = ["world"]


class NameServer:
    """Answers as it is told; ``release`` lets every look-up that hangs go on."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self._hangs = threading.Event()
        self._hangs.set()
        self._threads: set[threading.Thread] = set()

    def hang(self) -> None:
        self._hangs.clear()

    def release(self) -> None:
        self._hangs.set()

    def __call__(self, host: str) -> list[str]:
        self._threads.add(threading.current_thread())
        self.asked.append(host)
        assert self._hangs.wait(60)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.addresses[host]

    def close(self) -> None:
        self.release()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def server() -> Iterator[NameServer]:
    made = NameServer()
    yield made
    made.close()


def named(address: Address, name: str = "mac.example") -> Address:
    return Address(name, address.port)


def test_while_the_name_server_is_silent_other_connections_work_and_new_ones_come_up(
    world: World, server: NameServer
) -> None:
    served = world.server(lambda incoming: incoming.reply(Done()))
    names = Names(world.reactor, find=server, deadline_s=0.1)
    before = world.client(served.address, names=names, local=node("client-1"))
    world.until(lambda: before.peer is not None)
    server.hang()
    server.addresses["mac.example"] = ["127.0.0.1"]
    waiting = world.client(named(served.address), names=names, local=node("client-2"))
    world.until(lambda: waiting.last_error == SILENT)
    after = world.client(served.address, names=names, local=node("client-3"))
    world.until(lambda: after.peer is not None)
    for client in (before, after):
        asked = Asked(client)
        world.until(lambda: bool(asked.replies))  # noqa: B023
    assert waiting.state is LinkState.DOWN
    assert server.asked == ["mac.example"]
    server.release()
    world.until(lambda: waiting.peer is not None)
    assert waiting.last_error is None
    assert waiting.host == "127.0.0.1", "lanes and bus are reached without a look-up"


def test_a_name_that_is_not_known_is_told_and_looked_up_again_later(world: World, server: NameServer) -> None:
    served = world.server(lambda incoming: incoming.reply(Done()))
    names = Names(world.reactor, find=server)
    client = world.client(named(served.address), names=names, local=node("client-4"))
    world.until(lambda: client.last_error == UNKNOWN)
    assert names.counters[UNKNOWN] == 1
    server.addresses["mac.example"] = ["127.0.0.1"]
    world.until(lambda: client.peer is not None)
    assert client.state is LinkState.UP
    assert len(server.asked) == 2


def test_a_name_is_looked_up_anew_when_the_connection_has_been_down(world: World, server: NameServer) -> None:
    """The machine behind the name may have another address by then."""
    served = world.server(lambda incoming: incoming.reply(Done()))
    server.addresses["mac.example"] = ["127.0.0.1"]
    client = world.client(named(served.address), names=Names(world.reactor, find=server), local=node("client-5"))
    world.until(lambda: client.peer is not None)
    asked = len(server.asked)
    client.start_over("test")
    world.until(lambda: client.peer is not None and len(server.asked) > asked)


def test_each_address_of_a_name_gets_its_turn_until_one_is_reached(server: NameServer) -> None:
    reactor = Reactor()
    server.addresses["mac.example"] = ["192.0.2.1", "192.0.2.2"]
    dialled: list[str] = []
    dialling = Dialling(reactor, "mac.example", Names(reactor, find=server))

    def dial() -> None:
        count = len(dialled)
        dialling.dial(1, lambda literal: dialled.append(literal.host), dialled.append)
        run_until(reactor, lambda: len(dialled) > count)

    for _ in range(3):
        dial()
    assert dialled == ["192.0.2.1", "192.0.2.2", "192.0.2.1"]
    for _ in range(2):
        dialling.reached()
    dial()
    assert dialled[-1] == "192.0.2.1"
    assert reactor.close()


def test_there_is_one_look_up_a_name_and_so_many_of_all_and_who_gives_up_leaves_nothing(server: NameServer) -> None:
    reactor = Reactor()
    names = Names(reactor, find=server, deadline_s=0.01)
    server.hang()
    failed: list[str] = []

    def ask(name: str) -> None:
        count = len(failed)
        names.find(name, lambda addresses: None, failed.append)
        run_until(reactor, lambda: len(failed) > count)

    for _ in range(20):
        ask("name-0")
    assert failed == [SILENT] * 20
    assert server.asked == ["name-0"]
    assert names.counters["look_ups"] == 1
    assert not names._waiting["name-0"], "nobody waits any more"
    for number in range(1, LOOKUPS_MAX):
        ask(f"name-{number}")
    ask("one-too-many")
    assert failed[-1] == TOO_MANY
    assert len(server.asked) == LOOKUPS_MAX
    server.release()
    run_until(reactor, lambda: not names._waiting)
    ask("one-too-many")
    assert failed[-1] == UNKNOWN
    assert reactor.close()


def test_a_bus_whose_name_hangs_keeps_no_other_bus_from_being_heard(server: NameServer) -> None:
    reactor = Reactor()
    joined: list[Topic] = []
    publisher = Publisher(reactor, bind=LOOPBACK, local=node("p"), fleet_key=KEY, on_subscribed=joined.append)
    messages: list[BusMessage] = []
    server.addresses["mac.example"] = ["127.0.0.1"]
    server.hang()
    names = Names(reactor, find=server, deadline_s=0.05)
    subscriber = Subscriber(reactor, keys=KEY, topics=[Topic.CARD], on_message=messages.append, names=names)
    subscriber.connect(named(publisher.address))
    run_until(reactor, lambda: subscriber.counters["names_not_found"] > 0)
    other = Publisher(reactor, bind=LOOPBACK, local=node("q"), fleet_key=KEY, on_subscribed=joined.append)
    subscriber.connect(other.address)
    run_until(reactor, lambda: len(joined) == 1)
    other.publish(Topic.CARD, b"heard")
    run_until(reactor, lambda: len(messages) == 1)
    server.release()
    run_until(reactor, lambda: len(joined) == 2)
    publisher.publish(Topic.CARD, b"too")
    run_until(reactor, lambda: len(messages) == 2)
    subscriber.disconnect(named(publisher.address))
    assert subscriber.connected == {other.address}
    subscriber.close()
    assert reactor.close()


def test_a_question_that_is_dropped_is_not_answered(server: NameServer) -> None:
    reactor = Reactor()
    server.hang()
    answers: list[object] = []
    dialling = Dialling(reactor, "mac.example", Names(reactor, find=server, deadline_s=0.01))
    dialling.dial(1, answers.append, answers.append)
    dialling.stop()
    names = Names(reactor, find=server, deadline_s=0.05)
    names.find("other", answers.append, lambda reason: reactor.stop())
    reactor.run()
    assert answers == []
    assert reactor.close()


@pytest.mark.parametrize(
    ("host", "literal"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("fe80::1%en0", "fe80::1%en0"), ("::1", "::1")]
    + [(name, None) for name in ("mac.local", "127.1", "010.0.0.1", "FE80::1")],
)
def test_what_needs_no_look_up(host: str, literal: str | None) -> None:
    assert literal_of(host) == literal


def test_the_systems_resolver() -> None:
    assert "127.0.0.1" in look_up("localhost")
    assert look_up("127.1") == ["127.0.0.1"]
    with pytest.raises((OSError, UnicodeError)):
        look_up("a" * 70 + ".invalid")
