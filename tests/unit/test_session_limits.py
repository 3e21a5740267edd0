"""What a member may cost a server of control sessions: HELLOs, sessions, new names, requests. No sockets, no clock."""

from __future__ import annotations

import sys

import pytest

from kakeya_zmq.io.descriptors import raise_descriptor_limit
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.limits import RequestLimiter, RequestLimits
from kakeya_zmq.protocol.session import (
    Failed,
    LocalNode,
    PeerDown,
    PeerUp,
    Refused,
    RequestOpened,
    RouterFrames,
    RouteTransmit,
    SendReply,
    ServerSessions,
    Tick,
)
from kakeya_zmq.protocol.session_bounds import (
    HELLOS_BURST,
    KEY_HELLOS_BURST,
    REGISTRATIONS_BURST,
    SESSIONS_PER_KEY_MAX,
    UNPROVEN_HELLOS_BURST,
    UNPROVEN_SESSIONS_MAX,
)
from tests.unit.test_session import CLIENT_NODE, FLEET, SERVER_NODE, Pair, make_client, make_server, of, seeded
from wire import handshake
from wire.errors import FailureCode
from wire.keys import CurvePair, NodeIdentity
from wire.messages import Done, Hello

KEYS = handshake.HandshakeKeys(FLEET)
NOISE = seeded(77).randbytes


def hello_of(node: LocalNode) -> tuple[bytes, bytes]:
    hello = Hello(
        node_id=node.node_id,
        identity_public_key=node.identity.public_key,
        ephemeral_public_key=CurvePair.from_secret(NOISE(32)).public,
        incarnation=1,
        roles=node.roles,
        software="",
        signature=b"",
    )
    return handshake.seal_hello(hello, node.identity, KEYS, NOISE)


def welcomed(server: ServerSessions, route: bytes, node: LocalNode, now: float) -> bool:
    return bool(of(RouteTransmit, server.on(RouterFrames(route, hello_of(node)), now)))


def named(name: str) -> LocalNode:
    return LocalNode(name, NodeIdentity(NOISE(32)), ("worker",), 1, "")


def test_hellos_of_one_connection_are_limited_and_come_back() -> None:
    server = make_server()
    taken = [welcomed(server, b"r", CLIENT_NODE, 0.0) for _ in range(20)]
    assert taken == [True] * int(HELLOS_BURST) + [False] * (20 - int(HELLOS_BURST))
    assert welcomed(server, b"other connection", CLIENT_NODE, 0.0)
    assert welcomed(server, b"r", CLIENT_NODE, 1.0)
    assert server.refusals == {"a connection says hello too often": 20 - int(HELLOS_BURST)}


def confirmed(server: ServerSessions, number: int, node: LocalNode = CLIENT_NODE, now: float = 100.0) -> Pair:
    """A session of a node on a connection of its own, as far as the server lets it."""
    client = make_client(seed=1000 + number, node=node)
    return Pair(client=client, server=server, route=b"confirmed-%d" % number, now=now).up()


def test_a_node_has_so_many_sessions_and_the_oldest_goes() -> None:
    server = make_server()
    pairs = [confirmed(server, number) for number in range(SESSIONS_PER_KEY_MAX + 1)]
    ended = [down for pair in pairs for down in of(PeerDown, pair.told_server)]
    assert [(down.peer.session_id, down.reason) for down in ended] == [
        (pairs[0].session_id, "the node has too many sessions")
    ]
    assert len(server.peers) == SESSIONS_PER_KEY_MAX


def test_a_key_has_so_many_sessions_under_all_its_names_together() -> None:
    server = make_server()
    for number in range(SESSIONS_PER_KEY_MAX + 3):
        confirmed(server, number, LocalNode(f"alias-{number}", CLIENT_NODE.identity, ("worker",), 1, ""))
    assert len(server.peers) == len(server._sessions) == SESSIONS_PER_KEY_MAX
    assert {peer.node_id for peer in server.peers}.isdisjoint({"alias-0", "alias-1", "alias-2"})


def test_hellos_of_one_key_are_limited_over_all_connections() -> None:
    server = make_server()
    pairs = [confirmed(server, number) for number in range(int(KEY_HELLOS_BURST) + 10)]
    assert [bool(of(PeerUp, pair.told_server)) for pair in pairs] == [True] * int(KEY_HELLOS_BURST) + [False] * 10
    assert server.refusals == {"a node says hello too often": 10}
    assert of(Refused, pairs[-1].told_server) == [Refused("a node says hello too often", CLIENT_NODE.node_id)]
    assert of(PeerUp, confirmed(server, 998, named("other")).told_server)
    assert of(PeerUp, confirmed(server, 999, now=101.0).told_server)


def test_hellos_that_others_send_again_cost_their_author_nothing() -> None:
    """Another member sends what it was sent by a node, from connections of its own; that node's session, and the next one
    it begins, are as ever."""
    server = make_server()
    own = [confirmed(server, number) for number in range(SESSIONS_PER_KEY_MAX)]
    for number in range(300):
        assert welcomed(server, b"thief-%d" % number, CLIENT_NODE, 100.0)
    assert [down for pair in own for down in of(PeerDown, pair.told_server)] == []
    assert {peer.session_id for peer in server.peers} == {pair.session_id for pair in own}
    back = [confirmed(server, 500 + number) for number in range(int(KEY_HELLOS_BURST) - SESSIONS_PER_KEY_MAX)]
    assert all(of(PeerUp, pair.told_server) for pair in back), "its whole budget was left to it"


def test_sessions_that_nobody_confirms_are_bounded_together_and_the_oldest_goes() -> None:
    server = make_server()
    up = confirmed(server, 1)
    for number in range(UNPROVEN_SESSIONS_MAX + 20):
        assert welcomed(server, b"%d" % number, CLIENT_NODE, 100.0)
    assert len(server._sessions) == UNPROVEN_SESSIONS_MAX + 1
    assert server.refusals == {"an unproven session made room": 20}
    assert of(PeerDown, up.told_server) == []
    assert of(PeerUp, confirmed(server, 2, named("honest")).told_server), "whoever confirms gets in meanwhile"


def test_hellos_that_nobody_confirms_are_limited_over_all_connections_and_confirmed_ones_do_not_count() -> None:
    server = ServerSessions(local=SERVER_NODE, fleet_key=FLEET, random_bytes=NOISE, sessions_max=10_000)
    node = named("busy")
    for number in range(int(KEY_HELLOS_BURST)):
        confirmed(server, number, node)
    taken = sum(welcomed(server, b"%d" % number, CLIENT_NODE, 100.0) for number in range(int(UNPROVEN_HELLOS_BURST) + 10))
    assert taken == UNPROVEN_HELLOS_BURST
    assert server.refusals["too many hellos that nobody confirms"] == 10
    assert welcomed(server, b"later", CLIENT_NODE, 101.0)


def test_new_names_come_in_at_a_bounded_rate_and_known_ones_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.protocol.identities.ACCOUNT_MAX", 10_000)
    known = named("known")
    book = IdentityBook(("server", SERVER_NODE.identity.public_key), {"known": known.identity.public_key})
    server = ServerSessions(local=SERVER_NODE, fleet_key=FLEET, random_bytes=NOISE, sessions_max=10_000, identities=book)
    taken = sum(
        welcomed(server, b"%d" % number, named(f"n{number}"), 0.0) for number in range(int(REGISTRATIONS_BURST) + 20)
    )
    assert taken == REGISTRATIONS_BURST
    assert server.refusals == {"too many new nodes in a short time": 20}
    assert welcomed(server, b"k", known, 0.0)
    assert welcomed(server, b"later", named("later"), 1.0)


def limited(**limits: float) -> tuple[Pair, RequestLimiter]:
    limiter = RequestLimiter(RequestLimits(**limits))  # type: ignore[arg-type]
    server = ServerSessions(local=SERVER_NODE, fleet_key=FLEET, random_bytes=seeded(1).randbytes, limiter=limiter)
    return Pair(server=server).up(), limiter


def test_a_request_over_a_limit_fails_with_a_hint_and_is_told_to_the_host() -> None:
    pair, limiter = limited(requests_per_s=1)
    numbers = [pair.ask() for _ in range(5)]
    failed = of(Failed, pair.told_client)
    assert [each.request_id for each in failed] == numbers[2:]
    assert {each.code for each in failed} == {FailureCode.RESOURCE_EXHAUSTED}
    assert all("try again in 1000 ms" in each.message for each in failed)
    assert of(Refused, pair.told_server) == [Refused("a peer makes too many requests", CLIENT_NODE.node_id)] * 3
    assert len(of(RequestOpened, pair.told_server)) == 2
    assert limiter.open_bytes > 0


@pytest.mark.parametrize("way", ["answered", "deadline", "silence", "shutdown"])
def test_whatever_ends_a_request_gives_its_room_back(way: str) -> None:
    from kakeya_zmq.protocol.session import Shutdown

    pair, limiter = limited()
    pair.cut = False
    pair.ask(timeout_s=3.0)
    (opened,) = of(RequestOpened, pair.told_server)
    assert limiter.open_bytes > 0
    match way:
        case "answered":
            pair.at_server(SendReply(opened.peer.session_id, opened.request_id, Done()))
        case "deadline":
            pair.wait(3.5)
        case "silence":
            pair.cut = True
            pair.now += 60
            pair.at_server(Tick())
        case "shutdown":
            pair.at_server(Shutdown("x"))
    assert limiter.open_bytes == 0


def test_two_sessions_of_a_node_share_its_room() -> None:
    limiter = RequestLimiter(RequestLimits(open_requests_max=1))
    server = ServerSessions(local=SERVER_NODE, fleet_key=FLEET, random_bytes=seeded(1).randbytes, limiter=limiter)
    first, second = (Pair(client=make_client(seed), server=server, route=b"r%d" % seed).up() for seed in (5, 6))
    first.ask()
    second.ask()
    assert not of(Failed, first.told_client)
    assert len(of(Failed, second.told_client)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_the_limit_on_open_files_is_raised_and_never_lowered() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raised = raise_descriptor_limit()
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised > 256
        assert raise_descriptor_limit() == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
