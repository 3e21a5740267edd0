"""The dispatcher: every event finds its machine, everything that began ends once, nothing is remembered afterwards, and one
effect that cannot be carried out keeps no other from being carried out."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from daemons.dispatch import Dispatcher
from kakeya_zmq.engine import CloseSession, CommandFailed, OpenSession, SessionReady
from kakeya_zmq.protocol import effects as fx
from wire import limits
from wire.errors import FailureCode, LocalProtocolError
from wire.ids import NodeId
from wire.messages import CipherSuite, Credit, Done, GetSession, GetStatus, JobAccepted, ReleaseLease, TransferGrant

KEY = fx.RequestKey((bytes(16), 1))
BODY = ReleaseLease(lease_id=bytes(16))
GRANT = TransferGrant(
    transfer_id=bytes(16),
    port=1,
    token="0" * 32,
    key=bytes(32),
    suite=CipherSuite.SECRETBOX,
    chunk_bytes=limits.CHUNK_BYTES_MIN,
)


class FakeReactor:
    """Runs what was posted when told to; the real one does so on its own turn."""

    def __init__(self) -> None:
        self.posted: deque[Callable[[], None]] = deque()
        self.sources: list[tuple[Callable[[], float | None], Callable[[float], None]]] = []

    def clock(self) -> float:
        return 5.0

    def post(self, function: Callable[[], None]) -> None:
        self.posted.append(function)

    def add_deadline_source(self, deadline: Callable[[], float | None], on_due: Callable[[float], None]) -> None:
        self.sources.append((deadline, on_due))

    def run(self) -> None:
        while self.posted:
            self.posted.popleft()()


class Scripted:
    """A machine that records its events and answers each with what the test says."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.answer: Callable[[Any], Sequence[Any]] = lambda event: []

    def on(self, event: Any, now: float) -> Sequence[Any]:
        self.events.append(event)
        return self.answer(event)

    def deadline(self) -> float | None:
        return None


@dataclass
class Peer:
    session_id: bytes = bytes(16)
    node_id: str = "peer"
    roles: tuple[str, ...] = ("primary",)
    identity_public_key: bytes = b"key"


class Incoming:
    def __init__(self, body: Any = BODY, request_id: int = 1) -> None:
        self.peer = Peer()
        self.request_id = request_id
        self.body = body
        self.deadline = 60.0
        self.on_update: Any = None
        self.on_end: Any = None
        self.said: list[Any] = []

    def progress(self, body: Any) -> None:
        self.said.append(body)

    def reply(self, body: Any) -> None:
        if body == "unencodable":
            raise TypeError("cannot be encoded")
        self.said.append(body)

    def fail(self, code: FailureCode, message: str) -> None:
        self.said.append((code, message))


class Outgoing:
    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.cancelled = 0

    def update(self, body: Any) -> None:
        self.updates.append(body)

    def cancel(self) -> None:
        self.cancelled += 1


class Client:
    host = "192.0.2.1"

    def __init__(self) -> None:
        self.requests: list[tuple[Any, Any]] = []
        self.broken = False

    def request(self, body: Any, **callbacks: Any) -> Outgoing:
        if self.broken:
            raise LocalProtocolError("wrong thread")
        outgoing = Outgoing()
        self.requests.append((outgoing, callbacks))
        return outgoing


class Lanes:
    """Refuses the effects named in ``broken`` with the error given there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, str | None]] = []
        self.broken: dict[str, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        def call(effect: Any, host: str | None = None) -> None:
            if name in self.broken:
                raise self.broken[name]
            self.calls.append((name, effect, host))

        return call


class Runner:
    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.cancelled: list[Any] = []
        self.error: Exception | None = None

    def submit(self, ticket: Any, command: Any) -> None:
        if self.error is not None:
            raise self.error
        self.submitted.append((ticket, command))

    def cancel(self, ticket: Any) -> None:
        self.cancelled.append(ticket)


class Rig:
    def __init__(self) -> None:
        self.reactor = FakeReactor()
        self.clients: dict[str, Client] = {"near": Client()}
        self.counts: Counter[str] = Counter()
        self.notes: list[tuple[str, str]] = []
        self.lanes = Lanes()
        self.runner = Runner()
        self.dispatcher = Dispatcher(
            self.reactor,  # type: ignore[arg-type]
            find_client=self.clients.get,  # type: ignore[arg-type]
            count=self.add,
            note=lambda level, text: self.notes.append((level, text)),
        )
        self.dispatcher.lanes = self.lanes
        self.dispatcher.runner = self.runner  # type: ignore[assignment]
        self.machine, self.other = Scripted(), Scripted()
        self.dispatcher.add(self.machine, handles=lambda body: isinstance(body, ReleaseLease))
        self.dispatcher.add(self.other, handles=lambda body: isinstance(body, GetSession))

    def add(self, name: str, amount: int) -> None:
        self.counts[name] += amount

    def apply(self, *effects: Any) -> None:
        self.dispatcher.apply(self.machine, effects)

    def request(self, incoming: Incoming) -> bool:
        return self.dispatcher.request(incoming)  # type: ignore[arg-type]

    def nothing_open(self) -> bool:
        return not any(self.dispatcher.figures().values())


@pytest.fixture
def rig() -> Rig:
    return Rig()


def ask(number: int = 1, node: str = "near") -> fx.Ask:
    return fx.Ask(fx.AskId(number), NodeId(node), BODY, 1.0)


def bind(lane: int = 1) -> fx.BindSender:
    return fx.BindSender(fx.LaneId(lane), CipherSuite.SECRETBOX, limits.CHUNK_BYTES_MIN, limits.CHUNK_BYTES_MIN)


# --- requests ----------------------------------------------------------------------------------------------------------


def test_requests_go_to_the_machine_whose_business_they_are(rig: Rig) -> None:
    assert rig.request(Incoming())
    assert rig.request(Incoming(GetSession(session_id="s"), 2))
    assert not rig.request(Incoming(GetStatus(), 3))
    (event,) = rig.machine.events
    assert event == fx.RequestArrived(KEY, NodeId("peer"), ("primary",), BODY, 60.0, b"key")
    assert len(rig.other.events) == 1
    assert rig.dispatcher.figures()["open_requests"] == 2


def test_an_answered_request_is_forgotten_and_later_answers_are_dropped(rig: Rig) -> None:
    incoming = Incoming()
    rig.request(incoming)
    accepted = JobAccepted(proof=bytes(32), queued_jobs=0, queued_tokens=0, eta_ms=0)
    rig.apply(fx.SendProgress(KEY, accepted), fx.SendReply(KEY, Done()))
    rig.apply(fx.SendProgress(KEY, accepted), fx.SendFailure(KEY, FailureCode.INTERNAL, "late"), fx.SendReply(KEY, Done()))
    assert incoming.said == [accepted, Done()]
    assert rig.nothing_open()
    incoming.on_update(Credit(credit_bytes=1))
    assert len(rig.machine.events) == 1


def test_updates_and_ends_reach_the_machine_once(rig: Rig) -> None:
    incoming = Incoming()
    rig.request(incoming)
    incoming.on_update(Credit(credit_bytes=1))
    incoming.on_end("cancelled")
    incoming.on_end("again")
    incoming.on_update(Credit(credit_bytes=1))
    assert rig.machine.events[1:] == [
        fx.UpdateArrived(KEY, Credit(credit_bytes=1)),
        fx.RequestCancelled(KEY, "cancelled"),
    ]
    assert rig.nothing_open()


def test_a_machine_that_fails_on_a_request_leaves_no_owner_behind(rig: Rig) -> None:
    def broken(event: Any) -> Sequence[Any]:
        raise ZeroDivisionError

    rig.machine.answer = broken
    with pytest.raises(ZeroDivisionError):
        rig.request(Incoming())
    assert rig.nothing_open()


def test_a_machine_that_fails_later_fails_its_open_requests(rig: Rig) -> None:
    incoming = Incoming()
    rig.request(incoming)

    def broken(event: Any) -> Sequence[Any]:
        raise ZeroDivisionError

    rig.machine.answer = broken
    incoming.on_update("more")
    assert [code for code, _ in incoming.said] == [FailureCode.INTERNAL]
    assert rig.nothing_open()
    assert rig.counts == {"machine_failures": 1}


def test_a_reply_that_cannot_be_encoded_ends_the_request_all_the_same(rig: Rig) -> None:
    rig.request(Incoming())
    rig.apply(fx.SendReply(KEY, "unencodable"), fx.Count("after"))  # type: ignore[arg-type]
    assert rig.nothing_open()
    assert rig.counts == {"effect_failures": 1, "after": 1}


# --- asks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["reply", "failure", "cancel"])
def test_an_ask_is_told_home_until_it_ends(rig: Rig, ending: str) -> None:
    rig.apply(ask(), fx.SendUpdate(fx.AskId(1), Credit(credit_bytes=3)))
    ((outgoing, callbacks),) = rig.clients["near"].requests
    assert outgoing.updates == [Credit(credit_bytes=3)]
    callbacks["on_progress"](GRANT)
    match ending:
        case "reply":
            callbacks["on_reply"](Done())
        case "failure":
            callbacks["on_failure"](FailureCode.UNAVAILABLE, "gone")
        case _:
            rig.apply(fx.CancelAsk(fx.AskId(1)))
            assert outgoing.cancelled == 1
    last = {
        "reply": [fx.AskReplied(fx.AskId(1), Done())],
        "failure": [fx.AskFailed(fx.AskId(1), FailureCode.UNAVAILABLE, "gone")],
        "cancel": [],
    }[ending]
    assert rig.machine.events == [fx.AskProgressed(fx.AskId(1), GRANT), *last]
    assert rig.nothing_open()
    rig.apply(fx.SendUpdate(fx.AskId(1), Credit(credit_bytes=3)), fx.CancelAsk(fx.AskId(1)))
    assert len(outgoing.updates) == 1
    assert outgoing.cancelled <= 1


def test_an_ask_of_nobody_fails_later_and_once(rig: Rig) -> None:
    rig.apply(ask(node="far"))
    assert rig.machine.events == []
    rig.reactor.run()
    (event,) = rig.machine.events
    assert (event.ask, event.code) == (1, FailureCode.UNAVAILABLE)
    assert rig.nothing_open()


def test_an_ask_that_is_cancelled_before_its_failure_is_told_stays_silent(rig: Rig) -> None:
    rig.apply(ask(node="far"), fx.CancelAsk(fx.AskId(1)))
    rig.reactor.run()
    assert rig.machine.events == []
    assert rig.nothing_open()


def test_an_ask_that_cannot_be_sent_fails(rig: Rig) -> None:
    rig.clients["near"].broken = True
    rig.apply(ask(), fx.Count("after"))
    rig.reactor.run()
    (event,) = rig.machine.events
    assert event.code is FailureCode.INTERNAL
    assert rig.nothing_open()
    assert rig.counts == {"effect_failures": 1, "after": 1}


# --- lanes ----------------------------------------------------------------------------------------------------------------


def test_lane_events_go_to_the_owner_until_the_lane_has_finished(rig: Rig) -> None:
    rig.apply(bind(1))
    rig.dispatcher.apply(rig.other, [bind(2)])
    opened = fx.LaneOpened(fx.LaneId(1), GRANT)
    finished = fx.LaneFinished(fx.LaneId(1), True, "", 0)
    for event in (opened, finished, finished, fx.LaneOpened(fx.LaneId(9), GRANT)):
        rig.dispatcher.lane_event(event)
    assert rig.machine.events == [opened, finished]
    assert rig.other.events == []
    assert rig.dispatcher.figures()["open_lanes"] == 1


@pytest.mark.parametrize(
    "error",
    [LocalProtocolError("a credit of 1 byte"), OSError("too many open files"), RuntimeError("can't start new thread")],
)
def test_a_lane_that_cannot_open_finishes_later(rig: Rig, error: Exception) -> None:
    rig.lanes.broken["bind_sender"] = error
    rig.apply(bind(), fx.CloseLane(fx.LaneId(1), False, "never mind"))
    assert rig.machine.events == []
    rig.reactor.run()
    (event,) = rig.machine.events
    assert isinstance(event, fx.LaneFinished)
    assert not event.ok
    assert "files" not in event.reason, "the text of a foreign exception stays out"
    assert "thread" not in event.reason
    assert rig.nothing_open()


def test_lanes_connect_to_the_host_of_the_nodes_connection(rig: Rig) -> None:
    connect = fx.ConnectReceiver(fx.LaneId(1), NodeId("near"), GRANT, (), 1, 1.0, verify_digests=False)
    rig.apply(connect, fx.ConnectReceiver(fx.LaneId(2), NodeId("far"), GRANT, (), 1, 1.0, verify_digests=False))
    assert rig.lanes.calls == [("connect_receiver", connect, "192.0.2.1")]
    rig.reactor.run()
    (event,) = rig.machine.events
    assert (event.lane, event.ok) == (2, False)
    assert rig.dispatcher.figures()["open_lanes"] == 1


def test_a_feed_that_fails_ends_the_lane(rig: Rig) -> None:
    rig.apply(bind())
    rig.lanes.broken["feed"] = LocalProtocolError("a part is not as long as its description says")
    rig.apply(fx.FeedSender(fx.LaneId(1), (), True), fx.Count("after"))
    name, effect, _ = rig.lanes.calls[-1]
    assert (name, effect.lane, effect.ok) == ("close", 1, False)
    assert rig.counts == {"effect_failures": 1, "after": 1}


# --- the engine -----------------------------------------------------------------------------------------------------------


def test_engine_events_go_to_the_owner_until_the_command_has_ended(rig: Rig) -> None:
    command = OpenSession("s")
    rig.apply(fx.RunCommand(fx.Ticket(1), command), fx.CancelCommand(fx.Ticket(1)))
    assert (rig.runner.submitted, rig.runner.cancelled) == ([(1, command)], [1])
    events = [fx.CommandEvent(fx.Ticket(1), SessionReady("s")), fx.CommandEnded(fx.Ticket(1), False)]
    for event in [*events, *events]:
        rig.dispatcher.engine_event(event)  # type: ignore[arg-type]
    assert rig.machine.events == events
    assert rig.nothing_open()


@pytest.mark.parametrize("missing", [True, False])
def test_a_command_the_runner_does_not_take_fails_and_ends(rig: Rig, missing: bool) -> None:
    rig.runner.error = LocalProtocolError("engine ticket 1 is in use")
    if missing:
        rig.dispatcher.runner = None
    rig.apply(fx.RunCommand(fx.Ticket(1), OpenSession("s")), fx.Count("after"))
    rig.reactor.run()
    failed, ended = rig.machine.events
    assert isinstance(failed.event, CommandFailed)
    assert isinstance(ended, fx.CommandEnded)
    assert rig.nothing_open()
    assert rig.counts == {"effect_failures": 1, "after": 1}


# --- effects in order -----------------------------------------------------------------------------------------------------


def test_effects_of_a_machine_fed_while_its_effects_are_carried_out_come_after_them(rig: Rig) -> None:
    numbers = itertools.count(10)
    incoming = Incoming()
    rig.request(incoming)
    rig.machine.answer = lambda event: [fx.RunCommand(fx.Ticket(next(numbers)), OpenSession("new"))]

    def reply_and_feed(body: Any) -> None:
        rig.dispatcher.feed(rig.machine, fx.Tick())

    incoming.reply = reply_and_feed  # type: ignore[method-assign]
    rig.apply(fx.SendReply(KEY, Done()), fx.RunCommand(fx.Ticket(1), CloseSession("old")))
    assert [ticket for ticket, _ in rig.runner.submitted] == [1, 10]


def test_an_effect_nobody_knows_is_counted_and_the_rest_carried_out(rig: Rig) -> None:
    rig.apply("what is this?", fx.Note("info", "line"), fx.Count("jobs", 3))
    assert rig.counts == {"effect_failures": 1, "jobs": 3}
    assert rig.notes == [("info", "line")]


def test_effects_of_its_own_kind_go_to_the_machines_own_hand(rig: Rig) -> None:
    taken: list[object] = []
    special = Scripted()
    rig.dispatcher.add(special, extra=lambda effect: effect == "mine" and not taken.append(effect))
    rig.dispatcher.apply(special, ["mine", "not mine"])
    rig.apply("mine")
    assert taken == ["mine"]
    assert rig.counts["effect_failures"] == 2


def test_a_machines_deadline_brings_it_a_tick(rig: Rig) -> None:
    assert len(rig.reactor.sources) == 2
    for _, on_due in rig.reactor.sources:
        on_due(5.0)
    assert rig.machine.events == rig.other.events == [fx.Tick()]
