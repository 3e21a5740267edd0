"""One client and one server over a link that loses, repeats and reorders messages, while the hosts do anything they may.

Held at every step: no exception; nothing is delivered that was not sent, and nothing twice; no request has two ends. Held
once the link has healed: every request has exactly one end, on both sides, and the session is up.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kakeya_zmq.protocol.session import (
    ClientEvent,
    ClientSession,
    ClientState,
    Failed,
    FramesReceived,
    LocalNode,
    PeerDown,
    PeerUp,
    Progressed,
    Reopen,
    Replied,
    RequestEnded,
    RequestOpened,
    RequestUpdated,
    RouterFrames,
    RouteTransmit,
    SendFailure,
    SendProgress,
    SendReply,
    ServerEvent,
    ServerSessions,
    SessionDown,
    SessionUp,
    SocketOpened,
    StartCancel,
    StartRequest,
    StartUpdate,
    Tick,
    Transmit,
)
from wire.errors import FailureCode
from wire.keys import FleetKey, NodeIdentity
from wire.messages import (
    CloseSession,
    Credit,
    JobProgress,
    SessionClosed,
)

FLEET = FleetKey(b"f" * 32)
CLIENT_NODE = LocalNode("client", NodeIdentity(b"c" * 32), (), 1, "")
SERVER_NODE = LocalNode("server", NodeIdentity(b"s" * 32), (), 1, "")
Key = tuple[bytes, int]
Frames = tuple[bytes, ...]

CHOICE = st.integers(0, 10**6)


class LossyLink(RuleBasedStateMachine):
    """The messages in flight are two bags; rules take from them, repeat, drop and damage at will."""

    @initialize(seed=st.integers(0, 2**32), already_up=st.booleans())
    def start(self, seed: int, already_up: bool) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.client = ClientSession(local=CLIENT_NODE, fleet_key=FLEET, random_bytes=self.random.randbytes)
        self.server = self.new_server()
        self.connection = 0
        self.reopen_at: float | None = self.now
        self.to_server: list[tuple[bytes, Frames]] = []
        self.to_client: list[tuple[bytes, Frames]] = []
        self.asked: dict[int, str] = {}
        self.cancelled: set[int] = set()
        self.ends: Counter[int] = Counter()
        self.opened: dict[Key, int] = {}
        self.open_now: set[Key] = set()
        self.answered: dict[int, set[int]] = {}
        self.progress_sent: set[tuple[int, int]] = set()
        self.progress_got: Counter[tuple[int, int]] = Counter()
        self.updates_sent: set[tuple[int, int]] = set()
        self.updates_got: Counter[tuple[int, int]] = Counter()
        self.serial = 0
        self.peers_up: set[bytes] = set()
        self.session_is_up = False
        self.history_to_server: list[tuple[bytes, Frames]] = []
        self.history_to_client: list[tuple[bytes, Frames]] = []
        if already_up:
            self.run_until(self.now, deliver=True)
            assert self.session_is_up

    def new_server(self) -> ServerSessions:
        return ServerSessions(local=SERVER_NODE, fleet_key=FLEET, random_bytes=self.random.randbytes)

    # effects

    def at_client(self, event: ClientEvent) -> None:
        for effect in self.client.on(event, self.now):
            match effect:
                case Transmit(frames=frames):
                    assert self.reopen_at is None, "sent while no socket is open"
                    self.to_server.append((self.route, frames))
                    self.history_to_server.append((self.route, frames))
                case Reopen(delay_s=delay_s):
                    assert 0 <= delay_s <= 5
                    self.reopen_at = self.now + delay_s
                case SessionUp(peer=peer):
                    assert peer.node_id == "server"
                    assert not self.session_is_up
                    self.session_is_up = True
                case SessionDown():
                    self.session_is_up = False
                case Replied(request_id=request_id, body=body):
                    assert isinstance(body, SessionClosed)
                    assert body.history_tokens in self.answered[request_id]
                    self.ends[request_id] += 1
                case Failed(request_id=request_id):
                    self.ends[request_id] += 1
                case Progressed(request_id=request_id, body=progress):
                    assert isinstance(progress, JobProgress)
                    assert not self.ended(request_id)
                    self.progress_got[request_id, progress.tokens_done] += 1
                case _:
                    pass
        for request_id in self.ends:
            assert request_id in self.asked

    def at_server(self, event: ServerEvent) -> None:
        for effect in self.server.on(event, self.now):
            match effect:
                case RouteTransmit(route=route, frames=frames):
                    self.to_client.append((route, frames))
                    self.history_to_client.append((route, frames))
                case RequestOpened(peer=peer, request_id=request_id, body=body, deadline=deadline):
                    key = (peer.session_id, request_id)
                    assert key not in self.opened
                    assert request_id not in self.opened.values(), "delivered in two sessions"
                    assert isinstance(body, CloseSession)
                    assert body.session_id == self.asked[request_id]
                    assert deadline > self.now
                    assert peer.session_id in self.peers_up
                    self.opened[key] = request_id
                    self.open_now.add(key)
                case RequestUpdated(session_id=session_id, request_id=request_id, body=update):
                    assert isinstance(update, Credit)
                    assert (session_id, request_id) in self.open_now
                    self.updates_got[request_id, update.credit_bytes] += 1
                case RequestEnded(session_id=session_id, request_id=request_id):
                    self.open_now.remove((session_id, request_id))
                case PeerUp(peer=peer):
                    assert peer.session_id not in self.peers_up
                    self.peers_up.add(peer.session_id)
                case PeerDown(peer=peer):
                    self.peers_up.remove(peer.session_id)
                case _:
                    pass

    @property
    def route(self) -> bytes:
        return self.connection.to_bytes(4, "big")

    def ended(self, request_id: int) -> bool:
        return self.ends[request_id] > 0 or request_id in self.cancelled

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    # the hosts

    @rule(timeout_s=st.floats(0.1, 12.0))
    def ask(self, timeout_s: float) -> None:
        request_id = self.client.next_request_id()
        self.asked[request_id] = f"sess-{request_id}"
        self.at_client(StartRequest(request_id, CloseSession(session_id=self.asked[request_id]), timeout_s))

    @precondition(lambda self: self.asked)
    @rule(choice=CHOICE)
    def update(self, choice: int) -> None:
        request_id = list(self.asked)[choice % len(self.asked)]
        serial = self.next_serial()
        self.updates_sent.add((request_id, serial))
        self.at_client(StartUpdate(request_id, Credit(credit_bytes=serial)))

    @precondition(lambda self: self.asked)
    @rule(choice=CHOICE)
    def cancel(self, choice: int) -> None:
        request_id = list(self.asked)[choice % len(self.asked)]
        if not self.ended(request_id):
            self.cancelled.add(request_id)
        self.at_client(StartCancel(request_id))

    @precondition(lambda self: self.opened)
    @rule(choice=CHOICE, what=st.sampled_from(["reply", "failure", "progress"]))
    def answer(self, choice: int, what: str) -> None:
        key = list(self.opened)[choice % len(self.opened)]
        session_id, request_id = key
        serial = self.next_serial()
        if what == "progress":
            self.progress_sent.add((request_id, serial))
            progress = JobProgress(tokens_done=serial, tokens_total=serial, tokens_reused=0)
            self.at_server(SendProgress(session_id, request_id, progress))
            return
        self.answered.setdefault(request_id, set())
        if key in self.open_now:
            self.answered[request_id].add(serial)
        if what == "reply":
            self.at_server(SendReply(session_id, request_id, SessionClosed(history_tokens=serial)))
        else:
            self.at_server(SendFailure(session_id, request_id, FailureCode.ABORTED, "no"))
        self.open_now.discard(key)

    @rule(sure=st.integers(0, 4))
    def restart_server(self, sure: int) -> None:
        if sure:
            return
        self.server = self.new_server()
        self.open_now.clear()
        self.peers_up.clear()

    # the link

    @precondition(lambda self: self.to_server)
    @rule(choice=CHOICE, keep=st.booleans())
    def deliver_to_server(self, choice: int, keep: bool) -> None:
        index = choice % len(self.to_server)
        route, frames = self.to_server[index] if keep else self.to_server.pop(index)
        self.at_server(RouterFrames(route, frames))

    @precondition(lambda self: self.to_client)
    @rule(choice=CHOICE, keep=st.booleans())
    def deliver_to_client(self, choice: int, keep: bool) -> None:
        index = choice % len(self.to_client)
        route, frames = self.to_client[index] if keep else self.to_client.pop(index)
        if route == self.route and self.reopen_at is None:
            self.at_client(FramesReceived(frames))

    @rule()
    def deliver_all_in_order(self) -> None:
        for _ in range(100):
            if not self.to_server and not self.to_client:
                break
            to_server, self.to_server = self.to_server, []
            for route, frames in to_server:
                self.at_server(RouterFrames(route, frames))
            to_client, self.to_client = self.to_client, []
            for route, frames in to_client:
                if route == self.route and self.reopen_at is None:
                    self.at_client(FramesReceived(frames))

    @rule()
    def replay_everything(self) -> None:
        for route, frames in list(self.history_to_server):
            self.at_server(RouterFrames(route, frames))
        for route, frames in list(self.history_to_client):
            if route == self.route and self.reopen_at is None:
                self.at_client(FramesReceived(frames))

    @rule(sure=st.integers(0, 2))
    def lose_all(self, sure: int) -> None:
        if sure:
            return
        self.to_server.clear()
        self.to_client.clear()

    @precondition(lambda self: self.to_server or self.to_client)
    @rule(choice=CHOICE, bit=CHOICE)
    def deliver_damaged(self, choice: int, bit: int) -> None:
        bag = self.to_server if self.to_server and (choice % 2 or not self.to_client) else self.to_client
        route, frames = bag[choice % len(bag)]
        changed = [bytearray(frame) for frame in frames]
        target = changed[choice % 2]
        target[bit // 8 % len(target)] ^= 1 << (bit % 8)
        damaged = tuple(bytes(frame) for frame in changed)
        opened = len(self.opened)
        if bag is self.to_server:
            self.at_server(RouterFrames(route, damaged))
        elif self.reopen_at is None:
            before = self.ends.total()
            self.at_client(FramesReceived(damaged))
            # Only a deadline may have ended something in the meantime, and time stands still here.
            assert self.ends.total() == before
        assert len(self.opened) == opened

    # time

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 1.5, 4.0]))
    def wait(self, seconds: float) -> None:
        self.run_until(self.now + seconds, deliver=False)

    def run_until(self, end: float, *, deliver: bool) -> None:
        for _ in range(10_000):
            times = [each for each in (self.client.deadline(), self.server.deadline(), self.reopen_at) if each is not None]
            due = max(self.now, min(times, default=end))
            if due > end:
                break
            self.now = due
            if self.reopen_at is not None and self.reopen_at <= self.now:
                self.reopen_at = None
                self.connection += 1
                self.at_client(SocketOpened())
            self.at_client(Tick())
            self.at_server(Tick())
            if deliver:
                self.deliver_all_in_order()
            if not times:
                break
        else:
            raise AssertionError("a machine asks for the same tick again and again")
        self.now = end

    # what must hold

    @invariant()
    def nothing_twice_nothing_invented(self) -> None:
        assert all(count == 1 for count in self.ends.values())
        assert not self.cancelled & self.ends.keys()
        for got, sent in ((self.progress_got, self.progress_sent), (self.updates_got, self.updates_sent)):
            assert all(count == 1 for count in got.values())
            assert got.keys() <= sent
        assert self.session_is_up == (self.client.state is ClientState.UP)

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        # The link heals: within the longest deadline every request has its end, and the session is up again.
        self.deliver_all_in_order()
        self.run_until(self.now + 40.0, deliver=True)
        self.nothing_twice_nothing_invented()
        assert self.ends.keys() | self.cancelled == self.asked.keys()
        assert not self.open_now
        assert self.client.state is ClientState.UP
        assert len(self.server.peers) == 1
        request_id = self.client.next_request_id()
        self.asked[request_id] = "last"
        self.at_client(StartRequest(request_id, CloseSession(session_id="last"), 5.0))
        self.deliver_all_in_order()
        assert request_id in self.opened.values()


TestLossyLink = LossyLink.TestCase
TestLossyLink.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
