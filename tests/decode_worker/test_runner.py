"""The engine's thread around an engine in a child process: cancelling, stopping and failing to start."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.decode_worker.restarts import RestartLimits
from kakeya_zmq.decode_worker.values import WorkerSettings
from kakeya_zmq.engine import Command, CommandFailed, Decode, Engine, OpenSession, Prefill, TokenDecoded
from kakeya_zmq.engine_runner import EngineFailed, EngineReady, EngineRunner, RunnerEvent
from kakeya_zmq.protocol.effects import CommandEnded, CommandEvent, Ticket
from tests.decode_worker.kit import kill, toy_settings
from tests.decode_worker.toy_engine import BUG, HANG, ToyEngine
from tests.fleet_rig import wait_until

DEADLINE_S = 30.0
PROMPT = np.arange(10, dtype=np.int32)


@dataclass
class Bench:
    engine: DecodeWorkerEngine
    events: queue.SimpleQueue[RunnerEvent] = field(default_factory=queue.SimpleQueue)
    asked: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    runner: EngineRunner = field(init=False)

    def __post_init__(self) -> None:
        def build() -> Engine:
            self.engine.start()
            return self.engine

        self.runner = EngineRunner(build, self.events.put, control=self.engine)
        self.runner.start()

    def next(self) -> RunnerEvent:
        return self.events.get(timeout=DEADLINE_S)

    def run(self, ticket: int, command: Command) -> list[RunnerEvent]:
        self.runner.submit(Ticket(ticket), command)
        return self.until_ended()

    def until_ended(self) -> list[RunnerEvent]:
        events = [self.next()]
        while not isinstance(events[-1], CommandEnded):
            events.append(self.next())
        return events


def bench(settings: WorkerSettings) -> Bench:
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    return Bench(DecodeWorkerEngine(settings, boundary=asked.put), asked=asked)


@pytest.fixture
def ready() -> Iterator[Bench]:
    made = bench(toy_settings(cancel_grace_s=0.3))
    assert isinstance(made.next(), EngineReady)
    yield made
    assert made.runner.stop(DEADLINE_S)


def begin_hanging(made: Bench, ticket: int) -> None:
    """Submit a prefill whose step never ends; returns when the child has been asked for it."""
    while not made.asked.empty():
        made.asked.get()
    made.runner.submit(Ticket(ticket), Prefill("s", np.array([1, HANG], dtype=np.int32)))
    while made.asked.get(timeout=DEADLINE_S) != "sent Start":
        pass


def test_a_cancelled_command_that_hangs_ends_as_cancelled_and_the_session_goes_on(ready: Bench) -> None:
    ready.run(1, OpenSession("s"))
    ready.run(2, Prefill("s", PROMPT))
    begin_hanging(ready, 3)
    before = ready.engine.figures().pid
    ready.runner.cancel(Ticket(3))
    assert ready.until_ended() == [CommandEnded(Ticket(3), cancelled=True, position=10)]
    *events, ended = ready.run(4, Decode("s", 5, 3, ()))
    reference = ToyEngine()
    for command in (OpenSession("s"), Prefill("s", PROMPT)):
        list(reference.handle(command))
    wanted = [event for event in reference.handle(Decode("s", 5, 3, ())) if isinstance(event, TokenDecoded)]
    assert [event.event for event in events if isinstance(event, CommandEvent)][:3] == wanted
    assert ended == CommandEnded(Ticket(4), cancelled=False, position=13)
    assert ready.engine.figures().pid not in (0, before)
    assert ready.runner.failures == 0


def test_a_step_of_an_engine_that_watches_itself_is_never_old(ready: Bench) -> None:
    ready.run(1, OpenSession("s"))
    begin_hanging(ready, 2)
    running = ready.runner.running
    assert running is not None
    assert running.ticket == 2
    later = ready.runner.running
    assert later is not None
    assert later.since_s > running.since_s
    ready.runner.cancel(Ticket(2))
    ready.until_ended()


def test_a_child_that_dies_while_idle_is_replaced_before_anything_is_asked(ready: Bench) -> None:
    ready.run(1, OpenSession("s"))
    first_turn = ready.run(2, Prefill("s", PROMPT))
    first = ready.engine.figures().pid
    kill(ready.engine)
    wait_until(
        lambda: ready.engine.figures().restarts == 1 and ready.engine.figures().state == "ready",
        "a child in the place of the lost one",
    )
    assert ready.engine.figures().pid not in (0, first)
    assert ready.engine.figures().restored_sessions == 0
    assert len(first_turn) == len(ready.run(3, Prefill("s", PROMPT)))
    assert ready.engine.session_position("s") == 2 * len(PROMPT)
    assert ready.engine.figures().restored_sessions == 1
    assert ready.runner.failures == 0


def test_children_that_die_too_often_while_idle_are_given_up_and_tried_again_later() -> None:
    limits = RestartLimits(losses_max=1, backoff_first_s=0.0, cool_down_s=3.0, window_s=1000.0)
    warned: list[str] = []
    made = Bench(DecodeWorkerEngine(toy_settings(limits=limits), warn=warned.append))
    try:
        assert isinstance(made.next(), EngineReady)
        made.run(1, OpenSession("s"))
        kill(made.engine)
        wait_until(lambda: made.engine.figures().restarts == 1 and made.engine.figures().state == "ready", "a second child")
        assert not made.engine.given_up
        kill(made.engine)
        wait_until(lambda: made.engine.given_up, "the child is given up")
        assert made.engine.figures().state == "given-up"
        assert made.engine.figures().pid == 0
        assert warned[:2] == ["the decode worker was lost: it was ended by signal 9"] * 2
        assert warned[2] == "the decode worker was lost too often and is not started again for 3 s"
        wait_until(lambda: made.engine.figures().state == "ready", "a third child after the pause")
        assert not made.engine.given_up
        assert len(warned) == 3
        assert not any(isinstance(event, CommandFailed) for event in made.run(2, Prefill("s", PROMPT)))
    finally:
        assert made.runner.stop(DEADLINE_S)


def test_stopping_while_a_lost_child_is_replaced_leaves_no_child(tmp_path: Path) -> None:
    marker = tmp_path / "silent"
    made = bench(toy_settings(settings=msgspec.msgpack.encode({"silent_if": str(marker)})))
    assert isinstance(made.next(), EngineReady)
    marker.touch()
    kill(made.engine)
    wait_until(lambda: made.engine.figures().restarts == 1, "a second child is loading")
    child = psutil.Process(made.engine.figures().pid)
    assert made.runner.stop(DEADLINE_S)
    assert not child.is_running()


def test_a_bug_in_the_child_is_counted_here(ready: Bench) -> None:
    ready.run(1, OpenSession("s"))
    failed, _ = ready.run(2, Prefill("s", np.array([BUG], dtype=np.int32)))
    assert failed == CommandEvent(Ticket(2), CommandFailed("s", "the engine failed: ZeroDivisionError", 0))
    assert ready.runner.failures == 1
    assert ready.runner.memory.active_bytes == 0


def test_stopping_while_a_step_hangs_leaves_no_child() -> None:
    made = bench(toy_settings())
    assert isinstance(made.next(), EngineReady)
    made.run(1, OpenSession("s"))
    begin_hanging(made, 2)
    child = psutil.Process(made.engine.figures().pid)
    assert made.runner.stop(2.0)
    assert not child.is_running()


def test_stopping_while_the_model_is_loaded_leaves_no_child() -> None:
    made = bench(toy_settings(settings=msgspec.msgpack.encode({"silent": True})))
    while made.asked.get(timeout=DEADLINE_S) != "received Told":
        pass
    child = psutil.Process(made.engine.figures().pid)
    assert made.runner.stop(DEADLINE_S)
    assert not child.is_running()
    assert isinstance(made.next(), EngineFailed)


def test_a_model_that_cannot_be_loaded_fails_the_runner_with_its_own_words() -> None:
    made = bench(toy_settings(settings=msgspec.msgpack.encode({"refuse": "no such folder"})))
    failed = made.next()
    assert isinstance(failed, EngineFailed)
    assert failed.message == "no such folder (another folder)"
    assert made.runner.stop(DEADLINE_S)
