"""The session machines, client against server, with a fake clock and no sockets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from kakeya_zmq.protocol.session import (
    Abandon,
    ClientEffect,
    ClientEvent,
    ClientSession,
    ClientState,
    Failed,
    FramesReceived,
    Leave,
    LocalNode,
    Measured,
    NameTaken,
    PeerDown,
    PeerUp,
    Progressed,
    Refused,
    Reopen,
    Replied,
    RequestEnded,
    RequestOpened,
    RequestUpdated,
    RouteGone,
    RouterFrames,
    RouteTransmit,
    SendFailure,
    SendProgress,
    SendReply,
    ServerEffect,
    ServerEvent,
    ServerSessions,
    SessionDown,
    SessionUp,
    Shutdown,
    SocketOpened,
    StartCancel,
    StartRequest,
    StartUpdate,
    Tick,
    Transmit,
)
from kakeya_zmq.protocol.session_table import OLDER_SESSION_IDLE_S
from kakeya_zmq.protocol.session_values import REQUESTS_WAITING_MAX
from wire import limits
from wire.errors import FailureCode, LocalProtocolError
from wire.frames import FrameKind, Header
from wire.keys import FleetKey, NodeIdentity
from wire.messages import CardList, Credit, Done, ExchangeCards, GetStatus, JobProgress, ReleaseLease

FLEET = FleetKey(b"f" * 32)
SERVER_NODE = LocalNode("server", NodeIdentity(b"s" * 32), ("cache",), 7, "server 1")
CLIENT_NODE = LocalNode("client", NodeIdentity(b"c" * 32), ("primary",), 3, "client 1")
Frames = tuple[bytes, ...]
T = TypeVar("T")


def of(kind: type[T], effects: Iterable[object]) -> list[T]:
    return [each for each in effects if isinstance(each, kind)]


def seeded(seed: int) -> random.Random:
    return random.Random(seed)


def make_server(seed: int = 1, *, fleet: FleetKey = FLEET, node: LocalNode = SERVER_NODE, **options: int) -> ServerSessions:
    randomness = seeded(seed).randbytes
    return ServerSessions(local=node, fleet_key=fleet, random_bytes=randomness, bus_port=lambda: 4711, **options)


def make_client(
    seed: int = 2, *, fleet: FleetKey = FLEET, node: LocalNode = CLIENT_NODE, expected: str | None = None
) -> ClientSession:
    return ClientSession(local=node, fleet_key=fleet, random_bytes=seeded(seed).randbytes, expected_node_id=expected)


@dataclass
class Pair:
    """A client and a server with a perfect link; ``cut`` loses everything. Keeps what the machines told."""

    client: ClientSession = field(default_factory=make_client)
    server: ServerSessions = field(default_factory=make_server)
    route: bytes = b"r1"
    now: float = 100.0
    cut: bool = False
    told_client: list[ClientEffect] = field(default_factory=list)
    told_server: list[ServerEffect] = field(default_factory=list)
    to_server: list[Frames] = field(default_factory=list)
    to_client: list[Frames] = field(default_factory=list)

    def at_client(self, event: ClientEvent) -> list[ClientEffect]:
        effects = self.client.on(event, self.now)
        for effect in effects:
            self.told_client.append(effect)
            if isinstance(effect, Transmit):
                self.to_server.append(effect.frames)
                if not self.cut:
                    self.at_server(RouterFrames(self.route, effect.frames))
        return effects

    def at_server(self, event: ServerEvent) -> list[ServerEffect]:
        effects = self.server.on(event, self.now)
        for effect in effects:
            self.told_server.append(effect)
            if isinstance(effect, RouteTransmit):
                self.to_client.append(effect.frames)
                if not self.cut and effect.route == self.route:
                    self.at_client(FramesReceived(effect.frames))
        return effects

    def up(self) -> Pair:
        self.at_client(SocketOpened())
        assert self.client.state is ClientState.UP
        return self

    def ask(self, timeout_s: float = 10.0) -> int:
        request_id = self.client.next_request_id()
        self.at_client(StartRequest(request_id, GetStatus(), timeout_s))
        return request_id

    def wait(self, seconds: float) -> None:
        """Let time pass, both machines being ticked exactly when they ask for it."""
        end = self.now + seconds
        while True:
            times = [each for each in (self.client.deadline(), self.server.deadline()) if each is not None]
            due = min(times, default=math.inf)
            if due > end:
                break
            self.now = max(self.now, due)
            self.at_client(Tick())
            self.at_server(Tick())
        self.now = end

    @property
    def session_id(self) -> bytes:
        assert self.client.peer is not None
        return self.client.peer.session_id


@pytest.fixture
def pair() -> Pair:
    return Pair().up()


class TestHandshake:
    def test_both_sides_learn_who_the_other_is(self, pair: Pair) -> None:
        (up,) = of(SessionUp, pair.told_client)
        assert (up.peer.node_id, up.peer.roles, up.peer.incarnation, up.peer.software, up.peer.bus_port) == (
            "server",
            ("cache",),
            7,
            "server 1",
            4711,
        )
        assert up.peer.identity_public_key == SERVER_NODE.identity.public_key
        (peer_up,) = of(PeerUp, pair.told_server)
        assert (peer_up.peer.node_id, peer_up.peer.roles, peer_up.peer.session_id) == (
            "client",
            ("primary",),
            up.peer.session_id,
        )
        assert of(Measured, pair.told_client) == [Measured(0.0)]
        assert pair.server.peers == (peer_up.peer,)
        assert not pair.client.refusals
        assert not pair.server.refusals

    def test_hello_is_resent_as_it_was_until_welcome(self) -> None:
        pair = Pair(cut=True)
        pair.at_client(SocketOpened())
        pair.wait(2.5)
        assert len(pair.to_server) == 3
        assert len(set(pair.to_server)) == 1
        # A late answer to the first one, and the resent ones after it: one session.
        for frames in list(pair.to_server):
            pair.at_server(RouterFrames(pair.route, frames))
        assert len(set(pair.to_client)) == 1
        pair.cut = False
        pair.at_client(FramesReceived(pair.to_client[0]))
        assert pair.client.state is ClientState.UP
        assert len(of(PeerUp, pair.told_server)) == 1

    def test_no_answer_reopens_with_full_jitter_backoff(self) -> None:
        pair = Pair(cut=True)
        delays = []
        for _ in range(12):
            pair.at_client(SocketOpened())
            pair.wait(5.0)
            delays.append(of(Reopen, pair.told_client)[-1].delay_s)
            assert pair.client.state is ClientState.CLOSED
        assert all(0 <= delay <= min(5.0, 0.1 * 2**n) for n, delay in enumerate(delays))
        assert len(set(delays)) == len(delays)
        assert max(delays) > 1.0
        assert len({frames[1] for frames in pair.to_server}) == 12, "each attempt has its own ephemeral"
        assert of(SessionDown, pair.told_client)[-1].reason.startswith("it does not answer our hello")

    def test_wrong_psk(self) -> None:
        pair = Pair(client=make_client(fleet=FleetKey(b"w" * 32)))
        pair.at_client(SocketOpened())
        assert of(Refused, pair.told_server) == [Refused("another fleet key")]
        assert not pair.to_client
        # The key id is only a name: with a forged one the seal still does not open.
        header = Header(kind=FrameKind.HELLO, key_id=FLEET.key_id).pack()
        pair.at_server(RouterFrames(pair.route, (header, pair.to_server[0][1])))
        assert pair.server.refusals == {"another fleet key": 1, "the seal is broken": 1}
        assert not pair.to_client

    def test_unknown_version(self, pair: Pair) -> None:
        for frames in (pair.to_server[0], pair.to_server[1]):
            changed = frames[0][:2] + b"\x02" + frames[0][3:]
            assert pair.at_server(RouterFrames(pair.route, (changed, frames[1]))) == [Refused("another protocol version")]
        changed = pair.to_client[1][0][:2] + b"\x02" + pair.to_client[1][0][3:]
        assert pair.at_client(FramesReceived((changed, pair.to_client[1][1]))) == []
        assert pair.client.refusals == {"another protocol version": 1}

    @pytest.mark.parametrize("frame", [0, 1])
    def test_any_bit_flip_in_hello_or_welcome_is_refused(self, frame: int) -> None:
        pair = Pair(cut=True)
        pair.at_client(SocketOpened())
        for changed in flips(pair.to_server[0], frame):
            assert of(RouteTransmit, pair.at_server(RouterFrames(pair.route, changed))) == []
        pair.at_server(RouterFrames(pair.route, pair.to_server[0]))
        for changed in flips(pair.to_client[0], frame):
            assert pair.at_client(FramesReceived(changed)) == []
        assert sum(pair.client.refusals.values()) == len(pair.to_client[0][frame])
        pair.at_client(FramesReceived(pair.to_client[0]))
        assert pair.client.state is ClientState.UP

    def test_expected_node(self) -> None:
        pair = Pair(client=make_client(expected="somebody-else"))
        request_id = pair.ask()
        pair.at_client(SocketOpened())
        assert pair.client.state is ClientState.CLOSED
        assert of(SessionDown, pair.told_client) == [SessionDown("another node answers at this address")]
        assert of(Failed, pair.told_client) == [
            Failed(request_id, FailureCode.UNAVAILABLE, "another node answers at this address")
        ]
        assert len(of(Reopen, pair.told_client)) == 1
        assert not of(SessionUp, pair.told_client)

    def test_client_refuses_a_server_with_a_new_identity(self, pair: Pair) -> None:
        impostor = LocalNode("server", NodeIdentity(b"x" * 32), ("cache",), 8, "")
        pair.server = make_server(3, node=impostor)
        pair.at_client(SocketOpened())
        assert of(SessionDown, pair.told_client)[-1].reason == "the node answers with another identity key than before"
        assert pair.client.refusals == {"the node answers with another identity key than before": 1}
        assert pair.client.state is ClientState.CLOSED

    @pytest.mark.parametrize("name", ["client", "server"])
    def test_server_refuses_a_node_id_with_another_identity(self, pair: Pair, name: str) -> None:
        impostor = Pair(
            client=make_client(5, node=LocalNode(name, NodeIdentity(b"x" * 32), (), 4, "")), server=pair.server, route=b"r2"
        )
        impostor.at_client(SocketOpened())
        assert impostor.told_server == [
            Refused("the node says hello with another identity key than before"),
            NameTaken(name),
        ]
        assert pair.server.peers[0].node_id == "client"

    def test_replayed_hello_takes_nothing_over(self, pair: Pair) -> None:
        hello = pair.to_server[0]
        assert pair.at_server(RouterFrames(b"attacker", hello)) == [Refused("a replayed hello")]
        old = pair.session_id
        pair.at_client(SocketOpened())
        assert pair.session_id != old
        assert pair.at_server(RouterFrames(pair.route, hello)) == [Refused("a replayed hello")]
        request_id = pair.ask()
        assert [each.request_id for each in of(RequestOpened, pair.told_server)] == [request_id]

    def test_a_hello_replayed_after_a_restart_is_not_a_peer(self, pair: Pair) -> None:
        restarted = make_server(9)
        effects = restarted.on(RouterFrames(b"attacker", pair.to_server[0]), pair.now)
        assert len(of(RouteTransmit, effects)) == 1
        for frames in pair.to_server[1:]:
            effects += restarted.on(RouterFrames(b"attacker", frames), pair.now)
        assert not of(PeerUp, effects)
        assert restarted.peers == ()

    def test_new_hello_on_the_same_route_replaces_the_session(self, pair: Pair) -> None:
        request_id = pair.ask()
        old = pair.session_id
        pair.at_client(SocketOpened())
        assert of(RequestEnded, pair.told_server) == [
            RequestEnded(old, request_id, "the session ended: the client started a new session")
        ]
        assert [each.peer.session_id for each in of(PeerDown, pair.told_server)] == [old]
        assert [each.session_id for each in pair.server.peers] == [pair.session_id]

    def test_names_are_bounded(self) -> None:
        with pytest.raises(LocalProtocolError):
            LocalNode("", SERVER_NODE.identity, (), 0, "")
        with pytest.raises(LocalProtocolError):
            LocalNode("n" * 129, SERVER_NODE.identity, (), 0, "")
        with pytest.raises(LocalProtocolError):
            LocalNode("n", SERVER_NODE.identity, ("r",) * 9, 0, "")


def flips(frames: Frames, frame: int) -> Iterable[Frames]:
    """The message with one bit flipped, for every byte of one of its frames."""
    for index in range(len(frames[frame])):
        changed = bytearray(frames[frame])
        changed[index] ^= 1 << (index % 8)
        yield (bytes(changed), frames[1]) if frame == 0 else (frames[0], bytes(changed))


class TestSealedMessages:
    @pytest.mark.parametrize("frame", [0, 1])
    def test_any_bit_flip_is_refused(self, pair: Pair, frame: int) -> None:
        pair.cut = True
        request_id = pair.ask()
        for changed in flips(pair.to_server[-1], frame):
            effects = pair.at_server(RouterFrames(pair.route, changed))
            assert len(of(Refused, effects)) == 1
            assert not of(RequestOpened, effects)
        assert len(of(RequestOpened, pair.at_server(RouterFrames(pair.route, pair.to_server[-1])))) == 1
        pair.at_server(SendReply(pair.session_id, request_id, Done()))
        before = len(pair.told_client)
        for changed in flips(pair.to_client[-1], frame):
            pair.at_client(FramesReceived(changed))
        assert pair.told_client[before:] == []
        assert pair.at_client(FramesReceived(pair.to_client[-1])) == [Replied(request_id, Done())]

    def test_replay_reorder_reflection(self, pair: Pair) -> None:
        pair.cut = True
        first, second = pair.ask(), pair.ask()
        frames = pair.to_server[-2:]
        pair.at_server(RouterFrames(pair.route, frames[1]))
        for old in (frames[0], frames[1]):
            assert pair.at_server(RouterFrames(pair.route, old)) == [Refused("the counter is not new")]
        assert [each.request_id for each in of(RequestOpened, pair.told_server)] == [second]
        # Our own message sent back to us, and theirs to them.
        assert pair.at_client(FramesReceived(frames[0])) == []
        assert pair.client.refusals == {"the seal is broken": 1}
        assert pair.at_server(RouterFrames(pair.route, pair.to_client[-1])) == [Refused("the counter is not new")]
        pair.at_server(SendReply(pair.session_id, second, Done()))
        assert pair.at_server(RouterFrames(pair.route, pair.to_client[-1])) == [Refused("the counter is not new")]
        pair.at_client(FramesReceived(pair.to_client[-1]))
        assert pair.at_client(FramesReceived(pair.to_client[-1])) == []
        assert [each.request_id for each in of(Replied, pair.told_client)] == [second]
        assert first in pair.client._sent

    def test_another_route_is_refused(self, pair: Pair) -> None:
        pair.cut = True
        pair.ask()
        assert pair.at_server(RouterFrames(b"r2", pair.to_server[-1])) == [Refused("a session on another connection")]
        assert of(RequestOpened, pair.at_server(RouterFrames(pair.route, pair.to_server[-1])))

    @pytest.mark.parametrize("frames", [(), (b"",), (b"", b""), (b"x" * 36, b""), (b"a", b"b", b"c")])
    def test_garbage(self, pair: Pair, frames: Frames) -> None:
        assert len(of(Refused, pair.at_server(RouterFrames(pair.route, frames)))) == 1
        assert pair.at_client(FramesReceived(frames)) == []
        assert sum(pair.client.refusals.values()) == 1

    def test_no_reuse_of_counters_means_distinct_ciphertexts(self, pair: Pair) -> None:
        for _ in range(5):
            pair.at_client(StartUpdate(pair.ask(), Credit(credit_bytes=1)))
        assert len({frames[0] for frames in pair.to_server}) == len(pair.to_server)
        assert len({frames[1] for frames in pair.to_server}) == len(pair.to_server)


class TestRequests:
    def test_request_progress_update_reply(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=2.5)
        (opened,) = of(RequestOpened, pair.told_server)
        assert (opened.request_id, opened.body, opened.deadline) == (request_id, GetStatus(), 102.5)
        progress = JobProgress(tokens_done=1, tokens_total=2, tokens_reused=0)
        pair.at_server(SendProgress(opened.peer.session_id, request_id, progress))
        pair.at_client(StartUpdate(request_id, Credit(credit_bytes=9)))
        pair.at_server(SendReply(opened.peer.session_id, request_id, Done()))
        assert of(Progressed, pair.told_client) == [Progressed(request_id, progress)]
        assert of(RequestUpdated, pair.told_server) == [RequestUpdated(pair.session_id, request_id, Credit(credit_bytes=9))]
        assert of(Replied, pair.told_client) == [Replied(request_id, Done())]
        # It is over: nothing more of it, on either side.
        assert pair.at_server(SendReply(pair.session_id, request_id, Done())) == []
        assert pair.at_server(SendProgress(pair.session_id, request_id, progress)) == []
        assert pair.at_client(StartUpdate(request_id, Credit(credit_bytes=9))) == []
        assert pair.at_client(StartCancel(request_id)) == []
        pair.wait(10)
        assert not of(RequestEnded, pair.told_server)
        assert not of(Failed, pair.told_client)

    def test_failure(self, pair: Pair) -> None:
        request_id = pair.ask()
        pair.at_server(SendFailure(pair.session_id, request_id, FailureCode.NOT_FOUND, "no\nsuch " + "x" * 600))
        (failed,) = of(Failed, pair.told_client)
        assert (failed.request_id, failed.code) == (request_id, FailureCode.NOT_FOUND)
        assert failed.message.startswith("no such x")
        assert len(failed.message) == limits.TEXT_CHARACTERS_MAX

    def test_requests_wait_for_the_session(self) -> None:
        pair = Pair()
        ids = [pair.ask(), pair.ask(timeout_s=1.0), pair.ask()]
        pair.now += 0.5
        assert not pair.to_server
        pair.up()
        assert [each.request_id for each in of(RequestOpened, pair.told_server)] == ids
        assert of(RequestOpened, pair.told_server)[1].deadline == pytest.approx(101.0)

    def test_deadline_runs_while_waiting(self) -> None:
        pair = Pair()
        request_id = pair.ask(timeout_s=1.0)
        assert pair.client.deadline() == 101.0
        pair.wait(1.0)
        (failed,) = of(Failed, pair.told_client)
        assert (failed.request_id, failed.code) == (request_id, FailureCode.DEADLINE_EXCEEDED)
        pair.up()
        assert not of(RequestOpened, pair.told_server)

    def test_deadline_ends_both_sides_once(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=2.0)
        pair.wait(20.0)
        assert [(each.request_id, each.code) for each in of(Failed, pair.told_client)] == [
            (request_id, FailureCode.DEADLINE_EXCEEDED)
        ]
        (ended,) = of(RequestEnded, pair.told_server)
        assert ended.request_id == request_id
        assert pair.at_server(SendReply(pair.session_id, request_id, Done())) == []

    def test_server_fails_what_passes_its_deadline(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=2.0)
        pair.now += 2.0
        pair.at_server(Tick())
        assert of(RequestEnded, pair.told_server) == [RequestEnded(pair.session_id, request_id, "deadline passed")]
        assert [each.code for each in of(Failed, pair.told_client)] == [FailureCode.DEADLINE_EXCEEDED]

    def test_client_deadline_cancels_at_the_server(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=2.0)
        pair.now += 2.0
        pair.at_client(Tick())
        assert [each.request_id for each in of(RequestEnded, pair.told_server)] == [request_id]

    def test_cancel(self, pair: Pair) -> None:
        request_id = pair.ask()
        pair.at_client(StartCancel(request_id))
        assert of(RequestEnded, pair.told_server) == [RequestEnded(pair.session_id, request_id, "cancelled by the client")]
        pair.wait(20)
        assert not of(Failed, pair.told_client)

    def test_cancel_while_waiting_sends_nothing(self) -> None:
        pair = Pair()
        pair.at_client(StartCancel(pair.ask()))
        pair.up()
        assert not of(RequestOpened, pair.told_server)
        assert not of(RequestEnded, pair.told_server)

    def test_ids_only_rise(self, pair: Pair) -> None:
        request_id = pair.ask()
        with pytest.raises(LocalProtocolError):
            pair.client.on(StartRequest(request_id, GetStatus(), 1.0), pair.now)
        pair.at_client(StartRequest(request_id + 10, GetStatus(), 1.0))
        assert pair.client.next_request_id() == request_id + 11

    def test_more_than_the_server_allows_wait_at_the_client(self, pair: Pair) -> None:
        ids = [pair.ask() for _ in range(limits.REQUESTS_IN_FLIGHT_MAX + 3)]
        assert len(of(RequestOpened, pair.told_server)) == limits.REQUESTS_IN_FLIGHT_MAX
        for request_id in ids[:2]:
            pair.at_server(SendReply(pair.session_id, request_id, Done()))
        assert [each.request_id for each in of(RequestOpened, pair.told_server)] == ids[:-1]
        assert not of(Failed, pair.told_client)

    def test_server_refuses_more_than_it_allows(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in range(limits.REQUESTS_IN_FLIGHT_MAX):
            pair.ask()
        with monkeypatch.context() as patch:
            # A client that does not keep to the rule; the server reads the limit afterwards.
            patch.setattr(limits, "REQUESTS_IN_FLIGHT_MAX", 1000)
            pair.cut = True
            request_id = pair.ask()
        pair.cut = False
        pair.at_server(RouterFrames(pair.route, pair.to_server[-1]))
        assert [(each.request_id, each.code) for each in of(Failed, pair.told_client)] == [
            (request_id, FailureCode.RESOURCE_EXHAUSTED)
        ]

    def test_the_waiting_line_is_bounded(self) -> None:
        pair = Pair()
        for _ in range(REQUESTS_WAITING_MAX):
            pair.ask()
        request_id = pair.ask()
        assert [(each.request_id, each.code) for each in of(Failed, pair.told_client)] == [
            (request_id, FailureCode.RESOURCE_EXHAUSTED)
        ]

    def test_messages_of_ours_that_do_not_fit(self, pair: Pair) -> None:
        huge = ExchangeCards(cards=(bytes(limits.CONTROL_BODY_BYTES_MAX),), ages_ms=(0,))
        request_id = pair.client.next_request_id()
        pair.at_client(StartRequest(request_id, huge, 1.0))
        assert [each.code for each in of(Failed, pair.told_client)] == [FailureCode.INVALID_ARGUMENT]
        request_id = pair.ask()
        pair.at_server(
            SendReply(pair.session_id, request_id, CardList(cards=(bytes(limits.CONTROL_BODY_BYTES_MAX),), ages_ms=(0,)))
        )
        assert [each.code for each in of(Failed, pair.told_client)[1:]] == [FailureCode.INTERNAL]

    def test_a_body_the_server_cannot_read_is_refused(self, pair: Pair) -> None:
        pair.at_client(StartRequest(pair.client.next_request_id(), ReleaseLease(lease_id=b"short"), 1.0))
        assert pair.server.refusals == {"malformed client message": 1}

    def test_nothing_private_in_reprs(self, pair: Pair) -> None:
        pair.ask()
        for effect in (*pair.told_client, *pair.told_server):
            if isinstance(effect, Transmit | RouteTransmit | RequestOpened):
                assert "frames" not in repr(effect)
                assert "body" not in repr(effect)

    def test_timers_of_ended_requests_do_not_pile_up(self, pair: Pair) -> None:
        for _ in range(1000):
            request_id = pair.ask(timeout_s=80_000.0)
            pair.at_server(SendReply(pair.session_id, request_id, Done()))
        assert len(pair.server._timers) < 100


class TestLiveness:
    def test_an_idle_session_lives_on_pings(self, pair: Pair) -> None:
        pair.wait(120.0)
        assert len(of(SessionUp, pair.told_client)) == 1
        assert not of(SessionDown, pair.told_client)
        assert not of(PeerDown, pair.told_server)
        assert 100 <= len(of(Measured, pair.told_client)) <= 130

    def test_a_client_that_only_listens_is_not_lost(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=100.0)
        for step in range(100):
            progress = JobProgress(tokens_done=step, tokens_total=100, tokens_reused=0)
            pair.at_server(SendProgress(pair.session_id, request_id, progress))
            pair.wait(0.5)
        assert len(of(Progressed, pair.told_client)) == 100
        assert not of(PeerDown, pair.told_server)

    def test_silence_ends_the_session_after_five_seconds(self, pair: Pair) -> None:
        sent = pair.ask(timeout_s=60.0)
        pair.cut = True
        pair.wait(4.9)
        assert not of(SessionDown, pair.told_client)
        pair.wait(0.2)
        assert of(SessionDown, pair.told_client) == [SessionDown("nothing heard for 5 seconds")]
        assert [(each.request_id, each.code) for each in of(Failed, pair.told_client)] == [(sent, FailureCode.UNAVAILABLE)]
        assert len(of(Reopen, pair.told_client)) == 1
        waiting = pair.ask(timeout_s=60.0)
        pair.cut, pair.route = False, b"r2"
        pair.at_client(SocketOpened())
        assert of(RequestOpened, pair.told_server)[-1].request_id == waiting
        assert len(of(Failed, pair.told_client)) == 1

    def test_a_stall_of_our_own_is_not_the_peers_silence(self, pair: Pair) -> None:
        pair.now += 60.0
        pair.at_client(Tick())
        assert pair.client.state is ClientState.UP
        pair.wait(3.0)
        assert pair.client.state is ClientState.UP

    def test_server_ends_idle_sessions(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=100.0)
        session_id = pair.session_id
        pair.cut = True
        pair.wait(14.9)
        assert not of(PeerDown, pair.told_server)
        pair.wait(0.2)
        assert [each.reason for each in of(PeerDown, pair.told_server)] == ["nothing heard for 15 seconds"]
        assert [(each.session_id, each.request_id) for each in of(RequestEnded, pair.told_server)] == [
            (session_id, request_id)
        ]
        assert pair.server.peers == ()

    def test_a_session_whose_connection_is_gone_ends_after_the_frames_at_hand(self, pair: Pair) -> None:
        pair.ask(timeout_s=100.0)
        pair.cut = True
        pair.now += 1.0
        pair.at_client(StartRequest(pair.client.next_request_id(), GetStatus(), 50.0))
        assert pair.at_server(RouteGone(b"another")) == []
        assert pair.at_server(RouteGone(pair.route)) == []
        assert pair.server.deadline() == pair.now
        assert not of(Refused, pair.at_server(RouterFrames(pair.route, pair.to_server[-1])))
        ended = pair.at_server(Tick())
        assert [each.reason for each in of(PeerDown, ended)] == ["its connection is gone"]
        assert len(of(RequestEnded, ended)) == 2
        assert pair.server.peers == ()
        assert pair.at_server(RouteGone(pair.route)) == []

    def test_the_session_that_a_node_has_left_for_another_ends_soon(self, pair: Pair) -> None:
        pair.ask(timeout_s=100.0)
        pair.cut = True
        pair.wait(1.0)
        again = Pair(client=make_client(4), server=pair.server, route=b"r2", now=pair.now).up()
        again.wait(OLDER_SESSION_IDLE_S - 0.1)
        assert not of(PeerDown, again.told_server)
        again.wait(0.2)
        assert [each.reason for each in of(PeerDown, again.told_server)] == ["the node goes on with a newer one"]
        assert [each.session_id for each in of(RequestEnded, again.told_server)] == [
            of(RequestOpened, pair.told_server)[0].peer.session_id
        ]
        again.wait(30.0)
        assert [peer.session_id for peer in pair.server.peers] == [again.session_id]

    def test_a_node_may_use_several_sessions_also_one_that_only_listens(self, pair: Pair) -> None:
        request_id = pair.ask(timeout_s=100.0)
        others = [Pair(client=make_client(seed), server=pair.server, route=b"r%d" % seed) for seed in (4, 5)]
        for tenth in range(300):
            pair.now = 100.0 + 0.1 * tenth
            pair.at_server(
                SendProgress(pair.session_id, request_id, JobProgress(tokens_done=1, tokens_total=9, tokens_reused=0))
            )
            for index, other in enumerate(others):
                other.now = pair.now
                if tenth == 5 + 30 * index:
                    other.up()
                other.at_client(Tick())
            pair.at_client(Tick())
            pair.at_server(Tick())
        assert len(pair.server.peers) == 3
        assert not of(PeerDown, pair.told_server)

    def test_frames_at_hand_keep_a_stalled_servers_session(self, pair: Pair) -> None:
        pair.cut = True
        pair.at_client(StartUpdate(pair.ask(timeout_s=100.0), Credit(credit_bytes=1)))
        pair.now += 30.0
        pair.at_server(RouterFrames(pair.route, pair.to_server[-1]))
        pair.at_server(Tick())
        assert not of(PeerDown, pair.told_server)

    def test_restart_of_the_server(self, pair: Pair) -> None:
        lost = pair.ask(timeout_s=60.0)
        old = pair.session_id
        pair.server = make_server(11)
        waiting = pair.ask(timeout_s=60.0)
        assert [each.request_id for each in of(Failed, pair.told_client)] == [lost, waiting]
        assert pair.client.state is ClientState.UP
        assert pair.session_id != old
        assert [type(each) for each in pair.told_client if isinstance(each, SessionUp | SessionDown)] == [
            SessionUp,
            SessionDown,
            SessionUp,
        ]
        assert not of(Reopen, pair.told_client)
        request_id = pair.ask()
        assert [each.request_id for each in of(RequestOpened, pair.told_server)[-1:]] == [request_id]

    def test_unknown_session_of_another_node_or_session_is_ignored(self, pair: Pair) -> None:
        pair.cut = True
        pair.ask()
        other = make_server(12, node=LocalNode("other", NodeIdentity(b"o" * 32), (), 1, ""))
        (forged,) = of(RouteTransmit, other.on(RouterFrames(b"r", pair.to_server[-1]), pair.now))
        assert pair.at_client(FramesReceived(forged.frames)) == []
        assert pair.client.refusals == {"the signature does not hold": 1}
        restarted = make_server(13)
        (genuine,) = of(RouteTransmit, restarted.on(RouterFrames(b"r", pair.to_server[-1]), pair.now))
        assert of(SessionDown, pair.at_client(FramesReceived(genuine.frames)))
        assert pair.at_client(FramesReceived(genuine.frames)) == []

    def test_client_leaves(self, pair: Pair) -> None:
        request_id = pair.ask()
        session_id = pair.session_id
        pair.at_client(Leave("done"))
        assert of(Failed, pair.told_client) == [Failed(request_id, FailureCode.CANCELLED, "this client is leaving")]
        assert [each.reason for each in of(PeerDown, pair.told_server)] == ["the client left: done"]
        assert [each.session_id for each in of(RequestEnded, pair.told_server)] == [session_id]
        assert pair.client.deadline() is None
        assert pair.at_client(SocketOpened()) == []
        assert pair.at_client(Leave("again")) == []
        late = pair.ask()
        assert of(Failed, pair.told_client)[-1].request_id == late

    def test_server_leaves(self, pair: Pair) -> None:
        request_id = pair.ask()
        pair.at_server(Shutdown("upgrade"))
        assert of(SessionDown, pair.told_client) == [SessionDown("the server left: upgrade")]
        assert [(each.request_id, each.code) for each in of(Failed, pair.told_client)] == [
            (request_id, FailureCode.UNAVAILABLE)
        ]
        assert len(of(Reopen, pair.told_client)) == 1
        assert len(of(PeerDown, pair.told_server)) == 1
        assert len(of(RequestEnded, pair.told_server)) == 1
        assert pair.server.deadline() is None
        assert pair.at_server(RouterFrames(pair.route, pair.to_server[0])) == [Refused("this server has shut down")]

    def test_a_server_that_breaks_the_rules_is_left_alone_for_the_hosts_time(self, pair: Pair) -> None:
        request_id = pair.ask()
        for waits in (1, 2):  # also when it is done to a socket on which no session is up
            pair.at_client(Abandon("noise", 60.0))
            assert of(SessionDown, pair.told_client) == [SessionDown("noise")] * waits
            assert [each.delay_s >= 60.0 for each in of(Reopen, pair.told_client)] == [True] * waits
        assert [each.request_id for each in of(Failed, pair.told_client)] == [request_id]
        assert pair.client.state is ClientState.CLOSED
        pair.at_client(Leave("done"))
        assert pair.at_client(Abandon("noise", 60.0)) == []

    def test_session_cap_evicts_the_unproven_first(self) -> None:
        server = make_server(sessions_max=2)

        def say_hello(name: str) -> Pair:
            node = LocalNode(name, NodeIdentity(name.encode() * 32), (), 1, "")
            each = Pair(client=make_client(ord(name), node=node), server=server, route=name.encode())
            each.at_client(SocketOpened())
            return each

        proven = say_hello("a")
        unproven = make_client(50, node=LocalNode("u", NodeIdentity(b"u" * 32), (), 1, ""))
        (hello,) = of(Transmit, unproven.on(SocketOpened(), 100.0))
        server.on(RouterFrames(b"u", hello.frames), 100.0)
        assert say_hello("b").client.state is ClientState.UP
        assert server.refusals == {"an unproven session made room": 1}
        assert say_hello("c").client.state is ClientState.GREETING
        assert server.refusals["too many sessions"] == 1
        assert {each.node_id for each in server.peers} == {"a", "b"}
        proven.at_client(Leave("room"))
        assert say_hello("d").client.state is ClientState.UP
