"""Levels of memory and what follows from them, stalled steps, admission, and the health endpoint around them."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemons import supervision
from daemons.admission import NEW_WORK, Admission
from daemons.health import STALE_AFTER_S, HealthBoard, Liveness
from daemons.health_server import HealthServer
from daemons.memory_guard import REFERENCE_BYTES, MemoryGuard, MemoryLevel, MemoryLevels, ProcessMemory, memory_levels
from daemons.supervision import AskingBoard, Supervisor, stalled_s
from kakeya_zmq.config import Settings, resolve_settings
from kakeya_zmq.engine import EngineMemory
from kakeya_zmq.engine_runner import Running
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.effects import Ticket
from tests.proxy import free_port
from wire.errors import FailureCode, PortInUseError
from wire.limits import GIB
from wire.messages import CloseSession, CreateSession, GetStatus, SubmitJob

LEVELS = MemoryLevels(warning_bytes=100, drain_bytes=200, unhealthy_bytes=300)


def settings(**flags: Any) -> Settings:
    return resolve_settings("primary", flags, environment={}, host_name=lambda: "box").settings


# --- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "level"),
    [(0, "ok"), (99, "ok"), (100, "warning"), (199, "warning"), (200, "drain"), (299, "drain"), (300, "unhealthy")],
)
def test_a_level_begins_at_its_bound(held: int, level: str) -> None:
    assert LEVELS.level(held) == level


def test_what_counts_is_the_larger_of_the_two_counts() -> None:
    assert ProcessMemory(active_bytes=5, cached_bytes=6, resident_bytes=10).held_bytes == 11
    assert ProcessMemory(active_bytes=5, cached_bytes=6, resident_bytes=12).held_bytes == 12


def test_defaults_are_in_proportion_to_the_machine_and_own_levels_are_taken() -> None:
    assert memory_levels(settings(), REFERENCE_BYTES).unhealthy_bytes == int(21.5 * GIB)
    assert memory_levels(settings(), REFERENCE_BYTES // 2).drain_bytes == 10 * GIB
    assert memory_levels(settings(), REFERENCE_BYTES * 4).warning_bytes == 72 * GIB
    own = settings(memory_warning_gb="2", memory_drain_gb="3", memory_unhealthy_gb="4")
    assert memory_levels(own, REFERENCE_BYTES).unhealthy_bytes == 4 * GIB


@given(physical=st.integers(GIB // 2, 2048 * GIB), unhealthy=st.floats(0.02, 4096))
def test_levels_are_in_order_and_can_be_reached(physical: int, unhealthy: float) -> None:
    flags = {
        "memory_warning_gb": str(unhealthy / 2),
        "memory_drain_gb": str(unhealthy),
        "memory_unhealthy_gb": str(unhealthy),
    }
    for found in (memory_levels(settings(**flags), physical), memory_levels(settings(), physical)):
        assert 0 < found.warning_bytes <= found.drain_bytes <= found.unhealthy_bytes < physical


# --- the guard -------------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A process whose memory the test sets."""

    held: int = 0
    active: int = 0
    reserve: int = 0
    given_back: int = 0
    limits: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def give_back(self) -> None:
        self.given_back += 1
        self.held -= self.reserve
        self.reserve = 0

    def guard(self) -> MemoryGuard:
        return MemoryGuard(
            LEVELS,
            measure=lambda: ProcessMemory(resident_bytes=self.held),
            active=lambda: self.active,
            give_back=self.give_back,
            limit=self.limits.append,
            note=lambda level, text: self.notes.append((level, text)),
        )


def test_new_work_is_refused_from_drain_on_and_taken_again_below_it() -> None:
    process = Process()
    guard = process.guard()
    for held in (50, 150, 150, 250, 350, 150, 50):
        process.held = held
        guard.look()
    assert [bool(limit) for limit in process.limits] == [False, True, True, False, False]
    assert [level for level, _ in process.notes] == ["warning", "warning", "warning", "warning", "info"]


def test_when_the_last_session_leaves_above_ok_the_reserve_is_given_back_once() -> None:
    process = Process(held=250, active=1, reserve=200)
    guard = process.guard()
    guard.look()
    assert (guard.level, process.given_back) == (MemoryLevel.DRAIN, 0)
    process.active = 0
    guard.look()
    guard.look()
    assert (guard.level, process.given_back) == (MemoryLevel.OK, 1)
    assert guard.section()[1]["caches_cleared"] == 1


def test_at_ok_nothing_is_given_back() -> None:
    process = Process(held=50, active=1, reserve=50)
    guard = process.guard()
    guard.look()
    process.active = 0
    guard.look()
    assert process.given_back == 0


# --- admission -------------------------------------------------------------------------------------------------------


def _body(kind: type[Any]) -> Any:
    """A request of this kind; what is in it does not matter here."""
    return kind(**{one.name: None for one in msgspec.structs.fields(kind) if one.required})


def test_a_draining_node_takes_nothing_new_and_ends_what_there_is() -> None:
    admission = Admission()
    assert all(admission.refusal(_body(kind)) is None for kind in (*NEW_WORK, GetStatus))
    admission.drain("told to")
    for kind in NEW_WORK:
        refusal = admission.refusal(_body(kind))
        assert refusal is not None
        assert refusal.code is FailureCode.UNAVAILABLE
        assert "draining" in str(refusal)
    assert admission.refusal(_body(CloseSession)) is None
    assert admission.refusal(_body(GetStatus)) is None
    assert not admission.accepting


def test_a_node_short_of_memory_refuses_sessions_and_jobs_only_while_it_is() -> None:
    admission = Admission()
    admission.limit_memory("full")
    for kind in (CreateSession, SubmitJob):
        refusal = admission.refusal(_body(kind))
        assert refusal is not None
        assert refusal.code is FailureCode.RESOURCE_EXHAUSTED
    assert admission.refusal(_body(CloseSession)) is None
    admission.limit_memory("")
    assert admission.accepting


# --- stalls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "decoding", "limit_s", "stalled"),
    [
        (None, True, 10.0, 0.0),
        (Running(Ticket(1), 0.0), False, 10.0, 0.0),
        (Running(Ticket(1), 0.0), True, 0.0, 0.0),
        (Running(Ticket(1), 95.0), True, 10.0, 0.0),
        (Running(Ticket(1), 80.0), True, 10.0, 20.0),
    ],
)
def test_only_a_long_step_while_somebody_decodes_is_a_stall(
    running: Running | None, decoding: bool, limit_s: float, stalled: float
) -> None:
    assert stalled_s(running, decoding=decoding, limit_s=limit_s, now=100.0) == stalled


@dataclass
class Runner:
    running: Running | None = None
    memory: EngineMemory = field(default_factory=EngineMemory)


@dataclass
class Descriptors:
    trouble: str = ""


@dataclass
class Host:
    """A node as the supervisor sees it."""

    state: str = "serving"
    sections: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_decoding: bool = False
    descriptors: Descriptors = field(default_factory=Descriptors)

    def limit_memory(self, why: str) -> None: ...

    def note(self, level: str, text: str) -> None:
        self.notes.append(text)

    def sessions(self) -> int:
        return int(self.is_decoding)

    def decoding(self) -> bool:
        return self.is_decoding


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    made.close()


def _run_until(reactor: Reactor, done: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds

    def look() -> None:
        if done() or time.monotonic() > deadline:
            reactor.stop()
        else:
            reactor.call_later(0.01, look)

    look()
    reactor.run()
    assert done()


def _get(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_stall_ends_the_daemon_once_and_is_told_and_a_slow_load_is_none(reactor: Reactor) -> None:
    port = free_port()
    host, runner, failures = Host(state="starting"), Runner(), []
    chosen = replace(settings(decode_stall_s="0.2", memory_poll_s="0.05"), runtime_health_port=port)
    supervisor = Supervisor(
        reactor,
        chosen,
        host,  # type: ignore[arg-type]
        runner,
        work=host,
        fail=failures.append,
        give_back=lambda: None,
    )
    started = time.monotonic()
    _run_until(reactor, lambda: time.monotonic() - started > 0.6)
    assert failures == []
    assert _get(port, "/healthz")[0] == 200
    assert _get(port, "/v1/runtime/liveness")[1]["phase"] == "starting"
    host.state, host.is_decoding, runner.running = "serving", True, Running(Ticket(1), reactor.clock())
    _run_until(reactor, lambda: bool(failures))
    assert "one step" in str(failures[0])
    code, body = _get(port, "/healthz")
    assert (code, body["liveness"]["phase"]) == (503, "decode")
    assert "one step" in body["status"]
    started = time.monotonic()
    _run_until(reactor, lambda: time.monotonic() - started > 0.3)
    assert len(failures) == 1
    supervisor.close()
    with pytest.raises(OSError, match="refused"):
        _get(port, "/healthz")


def test_a_model_that_cannot_be_used_is_unhealthy_until_it_can(reactor: Reactor) -> None:
    port = free_port()
    trouble = ["the decode worker was lost too often"]
    supervisor = Supervisor(
        reactor,
        replace(settings(memory_poll_s="0.05"), runtime_health_port=port),
        Host(),  # type: ignore[arg-type]
        Runner(),
        work=Host(),
        fail=lambda error: None,
        give_back=lambda: None,
        trouble=lambda: trouble[0],
    )
    try:
        _run_until(reactor, lambda: _get(port, "/healthz")[1]["status"] == trouble[0])
        assert _get(port, "/healthz")[0] == 503
        trouble[0] = ""
        _run_until(reactor, lambda: _get(port, "/healthz")[0] == 200)
    finally:
        supervisor.close()


def test_the_endpoint_tells_the_present_and_not_the_last_look(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "LOOK_S_MAX", 3600.0)
    port = free_port()
    host, runner, held = Host(), Runner(), 4096
    supervisor = Supervisor(
        reactor,
        replace(settings(memory_poll_s="3600", decode_stall_s="0"), runtime_health_port=port),
        host,  # type: ignore[arg-type]
        runner,
        work=host,
        fail=lambda error: None,
        give_back=lambda: None,
    )
    thread = threading.Thread(target=reactor.run)
    thread.start()

    def tells(path: str, key: str, value: object) -> None:
        deadline = time.monotonic() + 20
        while (told := _get(port, path)[1].get(key)) != value and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told == value

    try:
        tells("/v1/runtime/liveness", "phase", "idle")
        host.is_decoding, runner.running = True, Running(Ticket(1), reactor.clock())
        tells("/v1/runtime/liveness", "phase", "decode")
        host.is_decoding, runner.running = False, None
        tells("/v1/runtime/liveness", "sessions", 0)
        tells("/v1/runtime/liveness", "phase", "idle")
        host.state = "draining"
        tells("/v1/runtime/liveness", "phase", "draining")
        runner.memory = EngineMemory(active_bytes=held)
        tells("/v1/runtime/memory", "mlx_active_bytes", held)
    finally:
        reactor.call(supervisor.close)
        reactor.post(reactor.stop)
        thread.join(20)
    assert not thread.is_alive()


def test_a_thread_that_hangs_keeps_no_asker_for_long_and_is_told_when_it_has_been_silent() -> None:
    asked: list[Any] = []
    now = [0.0]
    board = AskingBoard(asked.append, lambda: now[0])
    board.put(Liveness("prefill", pid=1), {})
    now[0] = STALE_AFTER_S + 1
    for _ in range(100):
        answer = board.answer("/healthz")
    assert answer is not None
    assert answer[1]["status"] == "the daemon does not react"
    assert len(asked) == 1  # the others did not wait
    asked[0]()
    board.answer("/healthz")
    assert len(asked) == 2


# --- the endpoint ------------------------------------------------------------------------------------------------------


def test_health_tells_memory_staleness_and_unknown_paths() -> None:
    now = [0.0]
    board = HealthBoard(lambda: now[0])
    server = HealthServer(board.answer, 0)
    try:
        assert _get(server.port, "/healthz") == (503, {"status": "starting"})
        board.put(Liveness("idle", pid=1), {"level": "ok", "held_bytes": 5})
        assert _get(server.port, "/healthz")[0] == 200
        assert _get(server.port, "/v1/runtime/memory")[1]["held_bytes"] == 5
        board.put(Liveness("idle", pid=1), {"level": "unhealthy"})
        assert _get(server.port, "/healthz")[0] == 503
        assert _get(server.port, "/v1/runtime/liveness")[1]["unhealthy"] == "memory"
        board.put(Liveness("idle", pid=1), {"level": "drain"})
        assert _get(server.port, "/healthz")[0] == 200
        now[0] = STALE_AFTER_S + 1
        assert _get(server.port, "/healthz")[0] == 503
        assert _get(server.port, "/../etc")[0] == 404
        with pytest.raises(PortInUseError, match=str(server.port)):
            HealthServer(board.answer, server.port)
    finally:
        server.close()
