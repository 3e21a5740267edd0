"""The thread that owns an engine; imports no model library.

Rules
- One thread builds the engine and makes every call to it (MLX ties computations to threads).
- Each submitted ticket gets CommandEvent*, then exactly one CommandEnded, whatever happens: the engine could not be built,
  a command raised, the runner is stopped.
- Commands of one session run in the order they were submitted, never interleaved with each other.

Fairness: sessions with work take turns, one step each. A decode step is much shorter than a prefill segment, so a user
who decodes waits for at most one segment of every other session between two tokens; nobody starves.

``post`` is called on the engine's thread, and on the caller's thread for what is submitted after the end. It must be
thread-safe, must not block, and must not raise.

An engine that runs elsewhere (kakeya_zmq.decode_worker) can break a step off: it is told through a :class:`StepControl`, and
answers by raising :class:`StepInterrupted`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from kakeya_zmq.engine import Command, CommandFailed, Engine, EngineMemory, Event, ModelFacts
from kakeya_zmq.protocol.effects import CommandEnded, CommandEvent, Ticket
from wire.errors import KakeyaError, LocalProtocolError
from wire.limits import TEXT_CHARACTERS_MAX

IDLE_LOOK_S: Final = 0.5
"""How often an engine that runs elsewhere is looked after while there is nothing to do."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine is built; commands run from now on."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine could not be built; ``message`` is one line for users. Every command fails from now on."""

    message: str
    error: Exception


class StepInterrupted(Exception):
    """Raised by an engine whose step was broken off because its command was cancelled, or the runner stops."""


class EngineFault(Exception):
    """Raised by an engine for an exception that another process's engine raised there.

    Args:
        error_name: the exception's class.
    """

    def __init__(self, error_name: str) -> None:
        super().__init__(error_name)
        self.error_name = error_name


class StepControl(Protocol):
    """Reaches an engine in the middle of a step; called on any thread. Such an engine watches over its steps itself."""

    def step_cancelled(self, session_id: str) -> None:
        """The session's command whose step is being computed was cancelled."""
        ...

    def stopping(self, timeout_s: float) -> None:
        """The runner stops; the step being computed may take that long."""
        ...

    def idle(self) -> None:
        """There is nothing to do; called again and again on the engine's thread, for what must be mended meanwhile."""
        ...


RunnerEvent: TypeAlias = EngineReady | EngineFailed | CommandEvent | CommandEnded


@dataclass(frozen=True, slots=True)
class Running:
    """The step being computed: for watchdogs. ``since_s`` is the runner's clock."""

    ticket: Ticket
    since_s: float


@dataclass(slots=True)
class _Task:
    ticket: Ticket
    command: Command
    steps: Iterator[Event] | None = None
    """None until the first step."""
    cancelled: bool = False


class EngineRunner:
    """Runs an engine on a thread of its own.

    Args:
        engine_factory: called once, on that thread.
        post: takes every event, see the module's text.
        clock: seconds, monotonic.
        control: of an engine that can break a step off, else None.
    """

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        post: Callable[[RunnerEvent], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        control: StepControl | None = None,
    ) -> None:
        self._factory = engine_factory
        self._post = post
        self._clock = clock
        self._control = control
        self._changed = threading.Condition()
        # Under the condition's lock:
        self._tasks: dict[Ticket, _Task] = {}
        self._queues: dict[str, deque[_Task]] = {}
        """Tasks of each session with work, the running one first."""
        self._turns: deque[str] = deque()
        """Each session with work once, next one first; the one whose step is being computed stays at the front."""
        self._cancelled: deque[_Task] = deque()
        self._stopping = False
        self._refusal: str | None = None
        """Set once no command can run any more."""
        # Written by the engine's thread only, read by any:
        self._running: Running | None = None
        self._failures = 0
        self._kv_bytes: dict[str, int] = {}
        self._memory = EngineMemory()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # --- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; EngineReady or EngineFailed follows."""
        self._thread.start()

    def submit(self, ticket: Ticket, command: Command) -> None:
        """Queue a command behind the earlier ones of its session.

        Raises:
            LocalProtocolError: the ticket is in use.
        """
        with self._changed:
            if ticket in self._tasks:
                raise LocalProtocolError(f"engine ticket {ticket} is in use")
            refusal = self._refusal
            if refusal is None:
                task = _Task(ticket, command)
                self._tasks[ticket] = task
                queue = self._queues.setdefault(command.session_id, deque())
                queue.append(task)
                if len(queue) == 1:
                    self._turns.append(command.session_id)
                self._changed.notify()
                return
        self._post(CommandEvent(ticket, CommandFailed(command.session_id, refusal, 0)))
        self._post(CommandEnded(ticket, cancelled=False))

    def cancel(self, ticket: Ticket) -> None:
        """Stop a command before its next step; CommandEnded follows. A ticket that has ended is ignored."""
        with self._changed:
            task = self._tasks.get(ticket)
            if task is None or task.cancelled:
                return
            task.cancelled = True
            self._cancelled.append(task)
            self._changed.notify()
        running = self._running
        if self._control is not None and running is not None and running.ticket == ticket:
            self._control.step_cancelled(task.command.session_id)

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything after the running step, close the engine, end the thread; may be called again.

        Returns:
            Whether the thread is gone; False when a step took longer than ``timeout_s``.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is None:  # never started
            self._refuse("the engine was never started")
            return True
        if self._control is not None:
            # Half of the time for the step, the rest for closing.
            self._control.stopping(timeout_s / 2)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> Running | None:
        """Which command's step is being computed, and since when; None while idle.

        With a control it is always since now: such an engine has a limit for its steps, and one of them may hold a restart,
        which takes longer than any step.
        """
        running = self._running
        if running is None or self._control is None:
            return running
        return Running(running.ticket, self._clock())

    @property
    def control(self) -> StepControl | None:
        return self._control

    @property
    def failures(self) -> int:
        """Commands that ended with an exception: each is a bug."""
        return self._failures

    @property
    def queued(self) -> int:
        """Commands that have not ended."""
        with self._changed:
            return len(self._tasks)

    def kv_bytes(self, session_id: str) -> int:
        """Bytes of KV a session held when its last command ended."""
        return self._kv_bytes.get(session_id, 0)

    @property
    def memory(self) -> EngineMemory:
        """What the engine held when a command last made a step; nothing before it is built and after it is closed."""
        return self._memory

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            engine = self._factory()
        except Exception as error:  # whatever a model library raises: the host must learn it, and the process live on
            message = str(error) if isinstance(error, KakeyaError) else f"the engine failed to start: {type(error).__name__}"
            self._post(EngineFailed(message, error))
            self._refuse(message)
            return
        self._memory = engine.memory()
        self._post(EngineReady(engine.facts))
        try:
            while (task := self._next_task(engine)) is not None:
                self._advance(engine, task)
        finally:
            self._refuse("the engine was stopped")
            engine.close()
            self._memory = EngineMemory()

    def _next_task(self, engine: Engine) -> _Task | None:
        """Wait for work; None when the runner is stopping."""
        while True:
            with self._changed:
                if self._stopping:
                    return None
                # A cancelled command goes first: ending it is cheap and its asker waits.
                while self._cancelled:
                    task = self._cancelled.popleft()
                    if task.ticket in self._tasks:
                        return task
                if self._turns:
                    return self._queues[self._turns[0]][0]
                woken = self._changed.wait(IDLE_LOOK_S if self._control is not None else None)
            if not woken:
                self._look_after(engine)

    def _look_after(self, engine: Engine) -> None:
        assert self._control is not None
        try:
            self._control.idle()
        except Exception:  # a bug in mending must not take the sessions down
            self._failures += 1
        self._memory = engine.memory()

    def _advance(self, engine: Engine, task: _Task) -> None:
        if task.cancelled:
            self._end(engine, task, cancelled=True)
            return
        self._running = Running(task.ticket, self._clock())
        try:
            if task.steps is None:
                task.steps = iter(engine.handle(task.command))
            event = next(task.steps, None)
        except StepInterrupted:
            self._end(engine, task, cancelled=True)
            return
        except Exception as error:  # a bug in the engine must not take the other sessions down
            self._failures += 1
            session_id = task.command.session_id
            name = error.error_name if isinstance(error, EngineFault) else type(error).__name__
            message = f"the engine failed: {name}"
            failed = CommandFailed(session_id, message, engine.session_position(session_id) or 0)
            self._post(CommandEvent(task.ticket, failed))
            event = None
        finally:
            self._running = None
            self._memory = engine.memory()
        if event is None:
            self._end(engine, task, cancelled=False)
            return
        self._post(CommandEvent(task.ticket, event))
        with self._changed:
            # To the end of the line; the session may hold more commands, but only its first one runs.
            self._turns.remove(task.command.session_id)
            self._turns.append(task.command.session_id)

    def _end(self, engine: Engine, task: _Task, *, cancelled: bool) -> None:
        session_id = task.command.session_id
        self._close_steps(task)
        held = engine.session_kv_bytes(session_id)
        if held:
            self._kv_bytes[session_id] = held
        else:
            self._kv_bytes.pop(session_id, None)
        with self._changed:
            del self._tasks[task.ticket]
            queue = self._queues[session_id]
            queue.remove(task)
            self._turns.remove(session_id)
            if queue:
                self._turns.append(session_id)
            else:
                del self._queues[session_id]
        self._post(CommandEnded(task.ticket, cancelled=cancelled, position=engine.session_position(session_id)))

    def _close_steps(self, task: _Task) -> None:
        close = getattr(task.steps, "close", None)
        if close is None:
            return
        try:
            close()
        except Exception:  # cleaning up must not take the other sessions down; it is a bug, so it is counted
            self._failures += 1

    def _refuse(self, reason: str) -> None:
        """Let no command in any more and end those that are there."""
        with self._changed:
            self._refusal = reason[:TEXT_CHARACTERS_MAX]
            tasks = list(self._tasks.values())
            stopping = self._stopping
            self._tasks.clear()
            self._queues.clear()
            self._turns.clear()
            self._cancelled.clear()
        for task in tasks:
            self._close_steps(task)
            if not stopping:
                self._post(CommandEvent(task.ticket, CommandFailed(task.command.session_id, reason, 0)))
            self._post(CommandEnded(task.ticket, cancelled=stopping))
