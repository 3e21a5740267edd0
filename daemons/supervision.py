"""Watches over the process of a model: memory guard, stalled steps, health endpoint. On the reactor's thread.

A step of the model that does not end while a session decodes is a stall: the daemon says so and ends with an error, so that
launchd or systemd starts it again. While a model is being loaded there is no step and no session, so a slow load is never
taken for a stall, and cannot make a loop of restarts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import psutil

from daemons.health import HealthBoard, Liveness
from daemons.health_server import HealthServer
from daemons.memory import physical_memory_bytes
from daemons.memory_guard import MemoryGuard, ProcessMemory, memory_levels
from daemons.node import Node
from kakeya_zmq.config import Settings
from kakeya_zmq.engine import EngineMemory
from kakeya_zmq.engine_runner import Running
from kakeya_zmq.io.reactor import Reactor
from wire.errors import FailureCode, RequestFailed

LOOK_S_MAX: Final = 5.0
"""How long at most between two looks."""
LOOKS_PER_STALL: Final = 4
ASK_S: Final = 0.5
"""How long a question to the health endpoint waits for a look of its own, before it is answered with the last one."""
FRESH_S: Final = 0.05
"""A look so young answers the next question, too: whoever asks without a pause does not keep the reactor's thread busy."""


class Runner(Protocol):
    """The part of an engine's runner that is watched."""

    @property
    def running(self) -> Running | None: ...

    @property
    def memory(self) -> EngineMemory: ...


class Work(Protocol):
    """What the model is used for; ``sessions`` are a worker's jobs."""

    def sessions(self) -> int: ...

    def decoding(self) -> bool: ...


def stalled_s(running: Running | None, *, decoding: bool, limit_s: float, now: float) -> float:
    """How long a step has been computed when that is a stall, else 0. Both times are on the runner's clock.

    Args:
        limit_s: 0 means that nothing is a stall.
    """
    if running is None or not decoding or limit_s <= 0:
        return 0.0
    elapsed_s = now - running.since_s
    return elapsed_s if elapsed_s >= limit_s else 0.0


class AskingBoard(HealthBoard):
    """Has the reactor's thread look anew before an answer, which so tells the present and not the watch's last turn.

    A thread that does not turn keeps one question waiting for ``ASK_S``; until it turns again, the last report answers all.

    Args:
        ask: has the reactor's thread report, and then call what it is given; any thread may call it.
    """

    def __init__(self, ask: Callable[[Callable[[], None]], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._ask = ask
        self._looked = threading.Event()
        self._looked.set()

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, Any]] | None:
        """As HealthBoard's; on the thread of the health endpoint."""
        if self._looked.is_set() and self.age_s() > FRESH_S:
            looked = self._looked = threading.Event()
            self._ask(looked.set)
            looked.wait(ASK_S)
        return super().answer(path)


class Supervisor:
    """See the module's text.

    Args:
        fail: ends the daemon with an error.
        give_back: makes the model library give back what it keeps for reuse.
        trouble: why the model cannot be used now, or empty.

    Raises:
        PortInUseError: --runtime-health-port is taken.
    """

    def __init__(
        self,
        reactor: Reactor,
        settings: Settings,
        node: Node,
        runner: Runner,
        *,
        work: Work,
        fail: Callable[[Exception], None],
        give_back: Callable[[], None],
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._node = node
        self._runner = runner
        self._work = work
        self._fail = fail
        self._trouble = trouble
        self._process = psutil.Process()
        self._stalled = ""
        self.guard = MemoryGuard(
            memory_levels(settings, physical_memory_bytes()),
            measure=self._measure,
            active=work.sessions,
            give_back=give_back,
            limit=node.limit_memory,
            note=node.note,
        )
        node.sections.append(self.guard.section)
        self._board = AskingBoard(self._look_and_tell)
        self._server: HealthServer | None = None
        if settings.runtime_health_port:
            self._server = HealthServer(self._board.answer, settings.runtime_health_port)
        self._interval_s = min(LOOK_S_MAX, settings.memory_poll_s)
        if settings.decode_stall_s > 0:
            self._interval_s = min(self._interval_s, settings.decode_stall_s / LOOKS_PER_STALL)
        self._guard_at = 0.0
        self._look_at: float | None = 0.0
        self._source = reactor.add_deadline_source(lambda: self._look_at, self._look)

    @property
    def stalled(self) -> bool:
        """Whether the model hangs: its thread need not be waited for."""
        return bool(self._stalled)

    def close(self) -> None:
        self._source.remove()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _measure(self) -> ProcessMemory:
        memory = self._runner.memory
        return ProcessMemory(memory.active_bytes, memory.cached_bytes, self._process.memory_info().rss)

    def _look(self, now: float) -> None:
        self._look_at = now + self._interval_s
        if now >= self._guard_at:
            self._guard_at = now + self._settings.memory_poll_s
            self.guard.look()
        self._report(now)

    def _look_and_tell(self, looked: Callable[[], None]) -> None:
        def look() -> None:
            try:
                self.guard.look()
                self._report(self._reactor.clock())
            finally:
                looked()

        self._reactor.post(look)

    def _report(self, now: float) -> None:
        running, decoding = self._runner.running, self._work.decoding()
        stalled = stalled_s(running, decoding=decoding, limit_s=self._settings.decode_stall_s, now=now)
        begins = bool(stalled) and not self._stalled
        if begins:
            self._stalled = f"the model has been in one step for {stalled:.0f} s"
        self._board.put(self._liveness(running, decoding=decoding, now=now), self.guard.section()[1])
        if begins:
            self._node.note("error", f"{self._stalled}: this daemon ends, to be started again")
            remedy = "see --decode-stall-s"
            self._fail(RequestFailed(FailureCode.INTERNAL, self._stalled, remedy=remedy))
            self._look_at = None

    def _liveness(self, running: Running | None, *, decoding: bool, now: float) -> Liveness:
        phase = "idle" if running is None else "decode" if decoding else "prefill"
        if self._node.state in ("starting", "draining"):
            phase = self._node.state
        step_s = round(max(0.0, now - running.since_s), 1) if running is not None else 0.0
        return Liveness(
            phase,
            os.getpid(),
            self._work.sessions(),
            step_s,
            self._stalled or self._trouble() or self._node.descriptors.trouble,
        )
