"""The guard of a bound socket: silent strangers, too many members, and file descriptors that are reused."""

from __future__ import annotations

import contextlib
import os
import resource
import socket as os_socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq

from kakeya_zmq.io.borrowed import host_of
from kakeya_zmq.io.connections import (
    REFUSED_ADDRESS,
    REFUSED_CROWDED,
    REFUSED_TOO_MANY,
    REFUSED_UNFINISHED,
    REFUSED_UNPROVEN,
    ConnectionGuard,
)
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import CONTROL_SERVER, create_socket
from tests.loopback.lane_support import is_cut
from tests.loopback.reactor_kit import WAIT_S, run_until

UNPROVEN_MAX = 5
CONNECTIONS_MAX = 12
READERS_MAX = 14
"""Of 16 places those that are not kept for newcomers."""
SHARE = 3
several_addresses = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system has one loopback address only"
)


class Guarded:
    """A ROUTER without any handshake but ZMTP's own, on a reactor that the test drives; echoes what comes."""

    def __init__(
        self, address_max: int | None = 100, *, connections_max: int = CONNECTIONS_MAX, share: int | None = None
    ) -> None:
        self.candidates: list[int] = []
        """Of whom one was last chosen to make room."""
        self.reactor = Reactor()
        self.refusals: Counter[str] = Counter()
        self.socket = create_socket(self.reactor.context, zmq.ROUTER, CONTROL_SERVER)
        self.guard = ConnectionGuard(
            self.reactor,
            self.socket,
            on_refused=lambda reason: self.refusals.update([reason]),
            unproven_max=UNPROVEN_MAX,
            connections_max=connections_max,
            address_max=address_max,
            address_share=share,
            choose=self._choose,
        )
        self.socket.bind("tcp://127.0.0.1:0")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.guard.listening(self.port)
        self.reactor.register(self.socket, self._echo)

    def _choose(self, candidates: Sequence[int]) -> int:
        self.candidates = list(candidates)
        return candidates[0]

    def _echo(self) -> None:
        first = self.socket.recv(zmq.DONTWAIT, copy=False)
        self.connection = self.guard.prove(first)
        frames = [first.bytes]
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(self.socket.recv(zmq.DONTWAIT))
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone
            self.socket.send_multipart(frames, zmq.DONTWAIT)

    def until(self, condition: Callable[[], bool]) -> None:
        run_until(self.reactor, condition)

    def stranger(self) -> os_socket.socket:
        return os_socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def close(self) -> None:
        self.guard.close()
        self.reactor.close_socket(self.socket)
        assert self.reactor.close()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.close()
    assert made.reactor.callback_errors == 0


@pytest.fixture
def sharing() -> Iterator[Guarded]:
    """A guard whose proven connections make room, too."""
    made = Guarded(None, connections_max=16, share=SHARE)
    yield made
    made.close()
    assert made.reactor.callback_errors == 0


@contextlib.contextmanager
def members(guarded: Guarded, count: int, host: str = "127.0.0.1") -> Iterator[list[zmq.Socket[bytes]]]:
    """Peers that have said something and heard the answer; none of them comes back when it is cut."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    try:
        for _ in range(count):
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            socket.reconnect_ivl = -1
            socket.connect(f"tcp://{host}:0;127.0.0.1:{guarded.port}")
            socket.send(b"hello")
            sockets.append(socket)
            guarded.until(lambda socket=socket: bool(socket.poll(0)) or guarded.refusals[REFUSED_TOO_MANY] > 0)  # type: ignore[misc]
        yield sockets
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()


def answers(guarded: Guarded, socket: zmq.Socket[bytes]) -> bool:
    while socket.poll(0):
        socket.recv()
    socket.send(b"again")
    guarded.until(lambda: bool(socket.poll(0)))
    return socket.recv() == b"again"


def stranger_from(guarded: Guarded, host: str) -> os_socket.socket:
    return os_socket.create_connection(("127.0.0.1", guarded.port), timeout=WAIT_S, source_address=(host, 0))


def test_the_oldest_silent_ones_are_cut_and_members_stay(guarded: Guarded) -> None:
    with members(guarded, 3) as friends, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(guarded.stranger()) for _ in range(UNPROVEN_MAX + 7)]
        guarded.until(lambda: guarded.refusals[REFUSED_UNPROVEN] >= 7)
        guarded.until(lambda: [is_cut(each) for each in strangers] == [True] * 7 + [False] * UNPROVEN_MAX)
        assert guarded.refusals[REFUSED_UNPROVEN] == 7
        assert guarded.guard.connections == 3 + UNPROVEN_MAX
        assert all(answers(guarded, friend) for friend in friends)
    guarded.until(lambda: guarded.guard.connections == 0)


def test_of_too_many_members_the_newest_is_cut(guarded: Guarded) -> None:
    with members(guarded, CONNECTIONS_MAX) as friends:
        assert guarded.refusals == {}
        with guarded.stranger() as late:
            guarded.until(lambda: guarded.refusals[REFUSED_TOO_MANY] == 1)
            guarded.until(lambda: is_cut(late))
        assert all(answers(guarded, friend) for friend in friends)
        assert guarded.guard.connections == CONNECTIONS_MAX


def test_a_connection_that_proves_nothing_any_more_makes_room_like_a_new_one(guarded: Guarded) -> None:
    with members(guarded, 1) as friends, contextlib.ExitStack() as stack:
        assert answers(guarded, friends[0])
        connection = guarded.connection
        assert connection is not None
        guarded.guard.doubt(connection)
        guarded.guard.doubt(connection)  # once is enough
        strangers = [stack.enter_context(guarded.stranger()) for _ in range(UNPROVEN_MAX)]
        guarded.until(lambda: guarded.refusals[REFUSED_UNPROVEN] == 1)
        guarded.until(lambda: guarded.guard.connections == UNPROVEN_MAX)
        assert not any(map(is_cut, strangers)), "the oldest one was the friend's"
        guarded.guard.doubt(connection)  # it is gone
        assert guarded.guard.connections == UNPROVEN_MAX
    guarded.until(lambda: guarded.guard.connections == 0)
    assert guarded.refusals.keys() <= {REFUSED_UNPROVEN, REFUSED_UNFINISHED}


@several_addresses
def test_where_readers_make_room_a_newcomer_takes_the_place_of_one_of_the_busiest_address(sharing: Guarded) -> None:
    with members(sharing, 5, "127.0.0.2") as few, members(sharing, READERS_MAX - 5, "127.0.0.3") as many:
        assert sharing.refusals == {}
        with members(sharing, 2, "127.0.0.4") as newcomers:
            sharing.until(lambda: sharing.refusals == {REFUSED_CROWDED: 2})
            assert len(sharing.candidates) == READERS_MAX - 5 - 1
            assert all(answers(sharing, each) for each in [*few, *many[2:], *newcomers])
            assert sharing.guard.connections == READERS_MAX


@several_addresses
def test_where_readers_make_room_a_newcomer_of_the_busiest_address_gets_in_and_is_not_chosen(sharing: Guarded) -> None:
    with (
        members(sharing, 4, "127.0.0.2") as few,
        members(sharing, READERS_MAX - 4, "127.0.0.3") as many,
        members(sharing, 1, "127.0.0.3") as newcomers,
    ):
        sharing.until(lambda: sharing.refusals == {REFUSED_CROWDED: 1})
        connection = sharing.connection
        assert connection is not None
        assert len(sharing.candidates) == READERS_MAX - 4
        assert connection.descriptor not in sharing.candidates
        assert all(answers(sharing, each) for each in [*few, *many[1:], *newcomers])


@several_addresses
def test_where_readers_make_room_a_small_share_of_an_address_never_does(sharing: Guarded) -> None:
    with contextlib.ExitStack() as stack:
        readers: list[zmq.Socket[bytes]] = []
        for number in range(4):
            readers += stack.enter_context(members(sharing, SHARE, f"127.0.0.{2 + number}"))
        readers += stack.enter_context(members(sharing, READERS_MAX - len(readers), "127.0.0.6"))
        late = stack.enter_context(members(sharing, 1, "127.0.0.7"))
        sharing.until(lambda: sharing.refusals == {REFUSED_TOO_MANY: 1})
        assert all(answers(sharing, each) for each in readers)
        assert sharing.guard.connections == READERS_MAX
        assert sharing.candidates == []
        late[0].send(b"again")
        assert not late[0].poll(50)


@several_addresses
def test_where_readers_make_room_who_proves_nothing_takes_the_place_of_no_reader(sharing: Guarded) -> None:
    with members(sharing, READERS_MAX, "127.0.0.2") as readers, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger_from(sharing, "127.0.0.3")) for _ in range(10)]
        sharing.until(lambda: sharing.refusals[REFUSED_TOO_MANY] == 8)
        sharing.until(lambda: [is_cut(each) for each in strangers] == [True] * 8 + [False] * 2)
        assert all(answers(sharing, each) for each in readers)
        with members(sharing, 1, "127.0.0.4") as newcomers:
            sharing.until(lambda: bool(newcomers[0].poll(0)))
            assert answers(sharing, newcomers[0])
        assert (sharing.refusals[REFUSED_TOO_MANY], sharing.refusals[REFUSED_CROWDED]) == (9, 1)


@several_addresses
def test_where_readers_make_room_one_address_may_have_all_that_nobody_else_wants(sharing: Guarded) -> None:
    with members(sharing, READERS_MAX, "127.0.0.2") as readers:
        assert sharing.refusals == {}
        assert all(answers(sharing, each) for each in readers)


def test_silent_ones_never_take_more_than_half(reactor_guard: ConnectionGuard) -> None:
    assert reactor_guard._unproven_max == 4


@pytest.fixture
def reactor_guard() -> Iterator[ConnectionGuard]:
    reactor = Reactor()
    socket = create_socket(reactor.context, zmq.ROUTER, CONTROL_SERVER)
    guard = ConnectionGuard(reactor, socket, on_refused=lambda reason: None, unproven_max=100, connections_max=8)
    yield guard
    guard.close()
    reactor.close_socket(socket)
    assert reactor.close()


@several_addresses
def test_one_address_does_not_take_all_connections() -> None:
    guarded = Guarded(address_max=3)
    try:
        with contextlib.ExitStack() as stack:
            greedy = [stack.enter_context(stranger_from(guarded, "127.0.0.2")) for _ in range(UNPROVEN_MAX)]
            guarded.until(lambda: guarded.refusals[REFUSED_ADDRESS] == UNPROVEN_MAX - 3)
            guarded.until(lambda: [is_cut(each) for each in greedy] == [True] * (UNPROVEN_MAX - 3) + [False] * 3)
            with members(guarded, 2) as friends:
                assert all(answers(guarded, friend) for friend in friends)
                assert guarded.guard.connections == 5
        guarded.until(lambda: guarded.guard.connections == 0)
    finally:
        guarded.close()


@several_addresses
def test_a_flood_from_one_address_does_not_cut_whoever_comes_from_another(guarded: Guarded) -> None:
    with contextlib.ExitStack() as stack:
        early = stack.enter_context(guarded.stranger())
        for _ in range(4 * UNPROVEN_MAX):
            stack.enter_context(stranger_from(guarded, "127.0.0.2"))
        guarded.until(lambda: guarded.refusals[REFUSED_UNPROVEN] == 3 * UNPROVEN_MAX + 1)
        assert not is_cut(early), "the oldest of all, and from an address with one connection"
    guarded.until(lambda: guarded.guard.connections == 0)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("192.168.1.9", "192.168.1.9"),
        ("::ffff:192.168.1.9", "192.168.1.9"),
        ("2001:db8:1:2:3:0:0:4", "2001:db8:1:2:3::4"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("", ""),
        ("somewhere", ""),
    ],
)
def test_what_counts_as_one_address(text: str, host: str) -> None:
    assert host_of(text) == host


def test_connections_that_come_and_go_leave_nothing(guarded: Guarded) -> None:
    for _ in range(100):
        guarded.stranger().close()
    guarded.until(lambda: guarded.refusals.total() >= 100)
    guarded.until(lambda: guarded.guard.connections == 0)
    assert set(guarded.refusals) <= {REFUSED_UNFINISHED, REFUSED_UNPROVEN}


def test_a_descriptor_that_has_become_something_else_is_left_alone(guarded: Guarded) -> None:
    """The number the monitor told may stand for a file or for a connection to somewhere else by now."""
    reader, writer = os.pipe()
    listener = os_socket.create_server(("127.0.0.1", 0))
    elsewhere = os_socket.create_connection(listener.getsockname())
    before = os.listdir("/dev/fd")
    try:
        for descriptor in (reader, elsewhere.fileno(), 9_999):
            guarded.guard._unproven[descriptor] = False
            guarded.guard._cut(descriptor, REFUSED_UNPROVEN)
        assert os.listdir("/dev/fd") == before, "what was no connection of ours was left open"
        os.write(writer, b"x")
        assert os.read(reader, 1) == b"x"
        accepted, _ = listener.accept()
        with accepted:
            elsewhere.sendall(b"y")
            assert accepted.recv(1) == b"y"
        assert guarded.refusals == {}
    finally:
        os.close(reader)
        os.close(writer)
        elsewhere.close()
        listener.close()


def descriptors_open() -> list[int]:
    return sorted(map(int, os.listdir("/dev/fd")))


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open exactly ``count`` files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    highest = max(descriptors_open())
    while held[-1] < highest:
        held.append(os.dup(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1 + count, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)


def test_a_look_at_something_else_leaves_no_descriptor_open(guarded: Guarded) -> None:
    """A flood of connections that end at once: the numbers that the monitor told stand for other things by then."""
    reader, writer = os.pipe()
    try:
        before = descriptors_open()
        for descriptor in [reader, writer, 9_999] * 20:
            assert guarded.guard._borrowed.host(descriptor, guarded.port) == ""
        assert descriptors_open() == before
    finally:
        os.close(reader)
        os.close(writer)


def test_without_free_descriptors_connections_are_cut_and_others_served(guarded: Guarded) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(os_socket.socket()) for _ in range(4 * UNPROVEN_MAX)]
        stack.enter_context(descriptors_left(UNPROVEN_MAX + 1))
        for stranger in strangers:
            stranger.connect(("127.0.0.1", guarded.port))
        # The sixth takes the last descriptor: whoever waits is let in as soon as one is cut.
        guarded.until(lambda: guarded.refusals[REFUSED_UNPROVEN] == 3 * UNPROVEN_MAX)
        assert guarded.guard.connections == UNPROVEN_MAX
    guarded.until(lambda: guarded.guard.connections == 0)


def test_accepts_that_fail_without_end_are_no_flood_of_events(guarded: Guarded) -> None:
    """libzmq tries again at once for as long as no descriptor is free."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(os_socket.socket()) for _ in range(2 * UNPROVEN_MAX)]
        stack.enter_context(descriptors_left(1))
        for stranger in strangers:
            stranger.connect(("127.0.0.1", guarded.port))
        started = time.process_time()
        guarded.until(lambda: time.process_time() > started + 0.3)
        assert guarded.guard.connections == 1
        assert guarded.refusals == {}
        assert not guarded.guard._pair.poll(0)
    guarded.until(lambda: guarded.guard.connections == 0)
