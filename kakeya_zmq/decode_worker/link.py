"""The parent's link to whichever child there is: starts it when it is wanted, asks it, and gives it up when it fails.

Threads: everything runs on one thread, but for :meth:`ChildLink.cancel`, :meth:`ChildLink.stop` and the properties that only
read, which any thread may use.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, assert_never

import msgspec

from kakeya_zmq.decode_worker import messages as m
from kakeya_zmq.decode_worker.channel import ChannelClosed
from kakeya_zmq.decode_worker.process import WorkerProcess
from kakeya_zmq.decode_worker.restarts import RestartPolicy
from kakeya_zmq.decode_worker.values import WorkerLost, WorkerSettings, WorkerState, WorkerUnavailable
from kakeya_zmq.engine import Command, EngineMemory, Event, ModelFacts
from kakeya_zmq.engine_runner import StepInterrupted
from wire.errors import ConfigError, KakeyaError, LocalProtocolError, ModelError, RemoteProtocolError

SLICE_S: Final = 0.1
"""How often a wait for the child looks whether it was told to stop."""


class ChildLink:
    """Args as those of :class:`kakeya_zmq.decode_worker.engine.DecodeWorkerEngine`."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
        boundary: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._tell = tell
        self._warn = warn
        self._boundary = boundary
        self._clock = clock
        self._policy = RestartPolicy(settings.limits)
        self._process: WorkerProcess | None = None
        self._state = WorkerState.STARTING
        self._facts: ModelFacts | None = None
        self._memory = EngineMemory()
        self._deadline = 0.0
        self._payloads: tuple[memoryview, ...] = ()
        """Of the reply received last."""
        self._session_id = ""
        """Whose step is being computed."""
        self._cancelled: tuple[str, float] | None = None
        """Set by another thread: a session, and when its step must have ended."""
        self._stop_at: float | None = None
        self._stopping = threading.Event()
        self.serial = 0
        """Of the child there is, or was last; the first is 1."""
        self.hangs = 0
        self.tokens_per_second = 0.0
        """Of prefill, as the first child measured it."""

    # --- any thread --------------------------------------------------------------------------------------------------

    def cancel(self, session_id: str) -> None:
        """Kill the child if the step of that session, should it be the current one, goes on beyond the grace."""
        self._cancelled = (session_id, self._clock() + self._settings.cancel_grace_s)

    def stop(self, timeout_s: float) -> None:
        """No new child from now on; a step that goes on for ``timeout_s`` is broken off, loading a model at once."""
        self._stop_at = self._clock() + timeout_s
        self._stopping.set()

    @property
    def state(self) -> WorkerState:
        process = self._process
        if self._state is WorkerState.READY and (process is None or not process.alive):
            return WorkerState.LOST
        return self._state

    @property
    def pid(self) -> int:
        """0 when there is no child."""
        process = self._process
        return process.pid if process is not None else 0

    def resident_bytes(self) -> int:
        process = self._process
        return process.memory_bytes() if process is not None else 0

    # --- the child -----------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """Raises LocalProtocolError before a child was ready."""
        if self._facts is None:
            raise LocalProtocolError("the decode worker has not been started")
        return self._facts

    @property
    def memory(self) -> EngineMemory:
        """As of the child's last answer."""
        return self._memory if self._process is not None else EngineMemory()

    @property
    def running(self) -> bool:
        """Whether there is a child, as far as is known."""
        return self._process is not None

    def begin_step(self, session_id: str) -> None:
        """What is asked from now on belongs to a step of that session."""
        self._session_id, self._cancelled = session_id, None

    def ensure(self) -> None:
        """Start a child if there is none, and wait until it has loaded the model.

        Raises:
            WorkerUnavailable: it may not be started now, or says that it cannot load the model again.
            ConfigError: the first child says that it cannot load the model (ModelError), or not with these settings.
            StepInterrupted: stopping.
        """
        while self._process is None:
            wait_s = self._policy.wait_s(self._clock())
            if wait_s is None:
                self._give_up()
                raise WorkerUnavailable(
                    "the decode worker was lost too often and is not started again for now",
                    remedy="see the log for what killed it; a model that does not fit in memory is the usual reason",
                )
            if self._stopping.wait(wait_s):
                raise StepInterrupted
            try:
                self._launch()
            except WorkerLost as lost:
                self.bury(lost)
            except StepInterrupted as interrupted:
                self.bury(interrupted)
                raise

    def lost_unasked(self) -> WorkerLost | None:
        """Why the child is gone, when it died without having been asked anything; None while it lives or there is none."""
        process = self._process
        return None if process is None or process.alive else WorkerLost(self._how_it_ended())

    def revive(self) -> None:
        """Start a child in the place of a lost one, and wait for its model, if that may be done right now.

        What goes wrong is told in the log, and bounds when the next one may be started.
        """
        if self._process is not None or self._facts is None or self._stopping.is_set():
            return
        wait_s = self._policy.wait_s(self._clock())
        if wait_s is None:
            self._give_up()
        if wait_s != 0.0:
            return
        try:
            self._launch()
        except (WorkerLost, StepInterrupted) as lost:
            self.bury(lost)
        except WorkerUnavailable as unavailable:
            self._warn(f"the decode worker was not started again: {unavailable}")

    def _give_up(self) -> None:
        given_up_before = self._state is WorkerState.GIVEN_UP
        self._state = WorkerState.GIVEN_UP
        if self._facts is not None and not given_up_before:  # else the node ends, and says so
            pause_s = self._settings.limits.cool_down_s
            self._warn(f"the decode worker was lost too often and is not started again for {pause_s:g} s")

    def ask(self, request: m.Start | m.Next | m.Cancel, payloads: Sequence[memoryview] = ()) -> m.Answer:
        """Send a request and wait for its answer, both within the time of one step.

        Raises:
            WorkerLost: the child is gone, hangs, or broke a rule.
            StepInterrupted: the step was cancelled or the engine is stopping, and it took too long.
        """
        self._deadline = self._clock() + self._settings.step_timeout_s
        self._send(request, payloads)
        reply = self._receive()
        if not isinstance(reply, m.Stepped | m.Ended | m.Raised) or reply.task != request.task:
            raise WorkerLost(f"it answered with {type(reply).__name__}")
        self._memory = reply.memory
        return reply

    def start_command(self, task: int, command: Command) -> m.Answer:
        """:meth:`ask` for the first step of a command."""
        kind, fields, shapes, payloads = m.pack(command)
        return self.ask(m.Start(task, kind, fields, shapes), payloads)

    def event(self, reply: m.Stepped) -> Event:
        """The event of the reply received last.

        Raises:
            WorkerLost: it is none.
        """
        try:
            return m.unpack_event(reply.kind, reply.event, reply.parts, self._payloads)
        except RemoteProtocolError as error:
            raise WorkerLost(error.message) from None

    def bury(self, lost: Exception) -> None:
        """Kill the child, if it still lives, and all it held; ``lost`` says why."""
        process, self._process = self._process, None
        was_ready = self._state is WorkerState.READY
        self._state = WorkerState.LOST
        self._payloads = ()
        if process is not None:
            process.kill()
        if isinstance(lost, StepInterrupted):
            return  # our own doing: no sign of anything wrong with the child
        self._policy.lost(self._clock(), was_ready=was_ready)
        self._warn(f"the decode worker was lost: {lost}")

    def close(self) -> None:
        """End the child, by force if need be."""
        self._stopping.set()
        process, self._process = self._process, None
        self._state = WorkerState.STOPPED
        if process is not None:
            process.leave()

    def _launch(self) -> None:
        self._state = WorkerState.STARTING
        self._deadline = self._clock() + self._settings.startup_timeout_s
        try:
            self._process = WorkerProcess(self._settings.program, self._wait)
        except OSError as error:
            raise WorkerLost(f"it could not be started: {error.strerror}") from None
        self.serial += 1
        self._send(m.Load(msgspec.Raw(self._settings.settings), measure=self._facts is None))
        while isinstance(reply := self._receive(), m.Told):
            self._tell(reply.text)
        match reply:
            case m.Loaded():
                self._loaded(reply)
            case m.Refused():
                self.bury(WorkerLost("it cannot load the model"))
                raise self._refusal(reply)
            case m.Stepped() | m.Ended() | m.Raised():
                raise WorkerLost(f"it answered with {type(reply).__name__}")
            case _:
                assert_never(reply)

    def _loaded(self, loaded: m.Loaded) -> None:
        if self._facts is None:
            self._facts = loaded.facts
            self.tokens_per_second = loaded.tokens_per_second
        elif loaded.facts != self._facts:
            self.bury(WorkerLost("the model folder has changed"))
            raise WorkerUnavailable("the model folder has changed since this node started", remedy="restart this node")
        self._memory = loaded.memory
        self._policy.ready()
        self._state = WorkerState.READY

    def _refusal(self, refused: m.Refused) -> KakeyaError:
        if self._facts is not None:  # it could be loaded before
            return WorkerUnavailable(refused.message, remedy=refused.remedy)
        kind = ConfigError if refused.error == "ConfigError" else ModelError
        return kind(refused.message, remedy=refused.remedy)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, request: m.Request, payloads: Sequence[memoryview] = ()) -> None:
        assert self._process is not None
        self._boundary(f"before {type(request).__name__}")
        try:
            self._process.channel.send(m.encode(request), payloads)
        except ChannelClosed:
            raise WorkerLost(self._how_it_ended()) from None
        self._boundary(f"sent {type(request).__name__}")

    def _receive(self) -> m.Reply:
        assert self._process is not None
        try:
            body, payload_bytes = self._process.channel.receive()
            reply = m.decode_reply(body)
            self._payloads = self._process.channel.receive_payloads(m.payload_sizes(reply), payload_bytes)
        except ChannelClosed:
            raise WorkerLost(self._how_it_ended()) from None
        except RemoteProtocolError as error:
            raise WorkerLost(error.message) from None
        self._boundary(f"received {type(reply).__name__}")
        return reply

    def _wait(self, end: socket.socket, for_writing: bool) -> None:
        """Wait for the child's socket, see :class:`kakeya_zmq.decode_worker.channel.Channel`."""
        waiter = select.poll()
        waiter.register(end, select.POLLOUT if for_writing else select.POLLIN)
        while True:
            now = self._clock()
            cancelled = self._cancelled
            if cancelled is not None and cancelled[0] == self._session_id and now >= cancelled[1]:
                raise StepInterrupted
            if self._stop_at is not None and (now >= self._stop_at or self._state is not WorkerState.READY):
                raise StepInterrupted
            if now >= self._deadline:
                self.hangs += 1
                raise WorkerLost("it did not answer in time")
            if waiter.poll(1000 * min(SLICE_S, self._deadline - now)):
                return

    def _how_it_ended(self) -> str:
        assert self._process is not None
        status = self._process.kill()
        return f"it was ended by signal {-status}" if status is not None and status < 0 else f"it ended with status {status}"
