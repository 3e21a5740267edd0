"""The engine's thread: order, turns, cancelling, failures and stopping, with a scripted engine and with a real tiny one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kakeya_zmq.compat import Compatibility
from kakeya_zmq.engine import (
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    DecodeFinished,
    Engine,
    EngineMemory,
    Event,
    ModelFacts,
    OpenSession,
    Prefill,
    SegmentComputed,
    SessionReady,
    TokenDecoded,
)
from kakeya_zmq.engine_runner import EngineFailed, EngineReady, EngineRunner, RunnerEvent
from kakeya_zmq.protocol.effects import CommandEnded, CommandEvent, Ticket
from wire.errors import LocalProtocolError, ModelError
from wire.messages import Requirement, StopReason

DEADLINE_S = 30.0

FACTS = ModelFacts(
    compatibility=Compatibility("m", "r", "t", "none", "float32", "v", "h", "g", 64, 0, 0, "default"),
    requirement=Requirement(block_tokens=64, full=True),
    part_bytes_per_token=(1, 0, 0),
    max_context_tokens=1000,
    eos_token_ids=(),
    vocabulary_size=10,
    weight_bytes=1,
)


class ScriptedEngine:
    """Yields one SegmentComputed for each token of a Prefill; everything it does is recorded, with the thread it is on."""

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.log: list[tuple[str, str, int]] = []
        self.closed = False
        self.gate: threading.Semaphore | None = None
        """Each step waits for it, if set."""
        self.entered = threading.Event()

    @property
    def facts(self) -> ModelFacts:
        return FACTS

    def handle(self, command: Command) -> Iterator[Event]:
        self.threads.add(threading.get_ident())
        if isinstance(command, OpenSession):
            raise ZeroDivisionError("a bug")
        assert isinstance(command, Prefill)
        return self._steps(command)

    def _steps(self, command: Prefill) -> Iterator[Event]:
        try:
            for number in command.tokens:
                self.entered.set()
                if self.gate is not None:
                    assert self.gate.acquire(timeout=DEADLINE_S)
                if number < 0:
                    raise ZeroDivisionError("a bug")
                self.log.append(("step", command.session_id, int(number)))
                yield SegmentComputed(command.session_id, int(number), (), 0.0)
        finally:
            self.log.append(("end", command.session_id, 0))

    def session_kv_bytes(self, session_id: str) -> int:
        return 7 * len(session_id)

    def memory(self) -> EngineMemory:
        return EngineMemory(active_bytes=1000, cached_bytes=len(self.log))

    def session_position(self, session_id: str) -> int | None:
        return 42

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True


class Harness:
    """A runner whose events are collected; waits with a deadline, never sleeps."""

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self.events: queue.SimpleQueue[RunnerEvent] = queue.SimpleQueue()
        self.runner = EngineRunner(factory, self.events.put)

    def next(self) -> RunnerEvent:
        return self.events.get(timeout=DEADLINE_S)

    def until_ended(self, *tickets: int) -> list[RunnerEvent]:
        waiting, seen = set(tickets), []
        while waiting:
            event = self.next()
            seen.append(event)
            if isinstance(event, CommandEnded):
                waiting.remove(event.ticket)
        return seen

    def submit(self, ticket: int, command: Command) -> None:
        self.runner.submit(Ticket(ticket), command)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def harness(engine: ScriptedEngine) -> Iterator[Harness]:
    engine.threads.clear()
    harness = Harness(lambda: engine)
    yield harness
    if engine.gate is not None:
        engine.gate.release(1000)
    assert harness.runner.stop(DEADLINE_S)


def steps(session: str, *numbers: int) -> Prefill:
    return Prefill(session, np.array(numbers, np.int32))


def test_events_come_in_order_and_end_once(harness: Harness, engine: ScriptedEngine) -> None:
    harness.runner.start()
    assert harness.next() == EngineReady(FACTS)
    harness.submit(1, steps("a", 1, 2))
    assert harness.until_ended(1) == [
        CommandEvent(Ticket(1), SegmentComputed("a", 1, (), 0.0)),
        CommandEvent(Ticket(1), SegmentComputed("a", 2, (), 0.0)),
        CommandEnded(Ticket(1), cancelled=False, position=42),
    ]
    assert harness.runner.kv_bytes("a") == 7
    assert harness.runner.kv_bytes("b") == 0
    assert harness.runner.queued == 0
    assert harness.runner.running is None
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_sessions_take_turns_and_a_session_keeps_its_order(harness: Harness, engine: ScriptedEngine) -> None:
    harness.submit(1, steps("a", 1, 2))
    harness.submit(2, steps("a", 3, 4))
    harness.submit(3, steps("b", 5, 6, 7))
    harness.runner.start()
    harness.next()
    harness.until_ended(1, 2, 3)
    order = [(session, number) for what, session, number in engine.log if what == "step"]
    assert order[:4] == [("a", 1), ("b", 5), ("a", 2), ("b", 6)]
    assert [number for session, number in order if session == "a"] == [1, 2, 3, 4]
    assert engine.log.index(("end", "a", 0)) < engine.log.index(("step", "a", 3))


def test_cancel_running_and_queued_commands(harness: Harness, engine: ScriptedEngine) -> None:
    engine.gate = threading.Semaphore(0)
    harness.runner.start()
    harness.next()
    harness.submit(1, steps("a", *range(100)))
    harness.submit(2, steps("a", 200))
    harness.submit(3, steps("a", 300))
    assert engine.entered.wait(DEADLINE_S)
    running = harness.runner.running
    assert running is not None
    assert running.ticket == 1
    assert harness.runner.queued == 3
    harness.runner.cancel(Ticket(1))
    harness.runner.cancel(Ticket(1))
    harness.runner.cancel(Ticket(2))
    harness.runner.cancel(Ticket(99))
    engine.gate.release(2)
    events = harness.until_ended(1, 2, 3)
    assert [event for event in events if isinstance(event, CommandEnded)] == [
        CommandEnded(Ticket(1), cancelled=True, position=42),
        CommandEnded(Ticket(2), cancelled=True, position=42),
        CommandEnded(Ticket(3), cancelled=False, position=42),
    ]
    assert engine.log == [("step", "a", 0), ("end", "a", 0), ("step", "a", 300), ("end", "a", 0)]


def test_cancel_after_the_end_is_ignored(harness: Harness) -> None:
    harness.runner.start()
    harness.next()
    harness.submit(1, steps("a", 1))
    harness.until_ended(1)
    harness.runner.cancel(Ticket(1))
    harness.submit(1, steps("a", 2))  # the ticket is free again
    assert harness.until_ended(1)[-1] == CommandEnded(Ticket(1), cancelled=False, position=42)


def test_a_ticket_cannot_be_used_twice(harness: Harness) -> None:
    harness.submit(1, steps("a", 1))
    with pytest.raises(LocalProtocolError, match="in use"):
        harness.submit(1, steps("b", 1))


@pytest.mark.parametrize("command", [OpenSession("bad"), steps("bad", 1, -1)], ids=["at-once", "at-a-step"])
def test_a_bug_in_the_engine_ends_one_command_only(harness: Harness, command: Command) -> None:
    harness.submit(1, command)
    harness.submit(2, steps("good", 1, 2, 3))
    harness.runner.start()
    harness.next()
    events = harness.until_ended(1, 2)
    failure = CommandEvent(Ticket(1), CommandFailed("bad", "the engine failed: ZeroDivisionError", 42))
    assert events.count(failure) == 1
    assert events.index(failure) < events.index(CommandEnded(Ticket(1), cancelled=False, position=42))
    assert sum(isinstance(event, CommandEvent) and event.ticket == 2 for event in events) == 3
    assert harness.runner.failures == 1


def test_stop_cancels_what_is_left_and_closes_the_engine(harness: Harness, engine: ScriptedEngine) -> None:
    engine.gate = threading.Semaphore(0)
    harness.runner.start()
    harness.next()
    harness.submit(1, steps("a", *range(100)))
    harness.submit(2, steps("a", 1))
    harness.submit(3, steps("b", 1))
    assert engine.entered.wait(DEADLINE_S)
    assert not harness.runner.stop(0.0)
    assert not engine.closed
    engine.gate.release(1000)
    assert harness.runner.stop(DEADLINE_S)
    assert engine.closed
    ends = [event for event in harness.until_ended(1, 2, 3) if isinstance(event, CommandEnded)]
    assert {(end.ticket, end.cancelled) for end in ends} == {(1, True), (2, True), (3, True)}
    assert engine.log[-1] == ("end", "a", 0)
    harness.submit(4, steps("a", 1))
    assert harness.until_ended(4) == [
        CommandEvent(Ticket(4), CommandFailed("a", "the engine was stopped", 0)),
        CommandEnded(Ticket(4), cancelled=False),
    ]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelError("no model there", remedy="give another"), "no model there (give another)"),
        (ZeroDivisionError("secret detail"), "the engine failed to start: ZeroDivisionError"),
    ],
)
def test_an_engine_that_cannot_be_built_fails_every_command(error: Exception, message: str) -> None:
    def factory() -> Engine:
        raise error

    harness = Harness(factory)
    harness.submit(1, steps("a", 1))
    harness.runner.start()
    events = harness.until_ended(1)
    harness.submit(2, steps("a", 1))
    events += harness.until_ended(2)
    failed = [event.event for event in events if isinstance(event, CommandEvent)]
    assert failed == [CommandFailed("a", message, 0)] * 2
    assert events[0] == EngineFailed(message, error)
    assert harness.runner.stop(DEADLINE_S)


def test_stop_without_start() -> None:
    harness = Harness(ScriptedEngine)
    harness.submit(1, steps("a", 1))
    assert harness.runner.stop(DEADLINE_S)
    assert harness.until_ended(1) == [CommandEnded(Ticket(1), cancelled=True)]


def test_real_engine_serves_two_sessions_as_it_serves_one() -> None:
    """Built, used and closed on the runner's thread; tokens equal those of an engine used directly."""
    from kakeya_zmq.model.loader import engine_from_model
    from tests import tiny_models

    def build() -> Any:
        return engine_from_model(tiny_models.build("gemma3_text", seed=3), name="tiny")

    prompts = {
        "a": np.arange(400, dtype=np.int32) * 7 % tiny_models.VOCABULARY,
        "b": np.arange(300, dtype=np.int32) * 11 % tiny_models.VOCABULARY,
    }

    def commands(session: str) -> list[Command]:
        tokens = prompts[session]
        return [
            OpenSession(session),
            Prefill(session, tokens[:-1]),
            Decode(session, int(tokens[-1]), 12, ()),
            CloseSession(session),
        ]

    direct = build()
    expected = {session: [event for command in commands(session) for event in direct.handle(command)] for session in prompts}
    harness = Harness(build)
    harness.runner.start()
    assert isinstance(harness.next(), EngineReady)
    owners: dict[int, str] = {}
    for number in range(4):
        for session in prompts:
            owners[len(owners) + 1] = session
            harness.submit(len(owners), commands(session)[number])
    events = harness.until_ended(*owners)
    for session in prompts:
        got = [e.event for e in events if isinstance(e, CommandEvent) and owners[e.ticket] == session]
        decoded = [event for event in expected[session] if isinstance(event, TokenDecoded | DecodeFinished | SessionReady)]
        assert [event for event in got if isinstance(event, TokenDecoded | DecodeFinished | SessionReady)] == decoded
        segments = [[e for e in found if isinstance(e, SegmentComputed)] for found in (got, expected[session])]
        assert [[bytes(p.payload) for p in e.parts] for e in segments[0]] == [
            [bytes(p.payload) for p in e.parts] for e in segments[1]
        ]
        assert DecodeFinished(session, StopReason.MAX_TOKENS, len(prompts[session]) - 1 + 12) in got
    ends = [event for event in events if isinstance(event, CommandEnded)]
    assert [end.position for end in ends if end.ticket in (7, 8)] == [None, None]
    assert harness.runner.stop(DEADLINE_S)
