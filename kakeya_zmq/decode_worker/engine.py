"""An engine whose model runs in a child process; the parent's side of the boundary.

Rules
- Only what the child answered has happened. Every event is written to its session's journal before it is handed out.
- A child that dies, breaks the protocol, or does not answer a step within ``step_timeout_s`` is killed, and a new one is
  started (restarts.py says when). Each session is made again from its journal when it is next used, and the step under way
  is repeated once. A second loss in the same step fails the command and empties that session: whatever it is that kills
  children must not go on to kill them for everybody.
- Nothing else of a session changes when the child is lost: position, open import, what was sampled.
- A child that dies while nothing is asked of it is replaced at once; its sessions wait until they are next used.
- Opening a session is only written down here; the child hears of it with the session's first work.

Everything runs on the engine's thread (kakeya_zmq.engine_runner), but for :meth:`DecodeWorkerEngine.step_cancelled`,
:meth:`DecodeWorkerEngine.stopping` and :meth:`DecodeWorkerEngine.figures`, which any thread may call.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kakeya_zmq.decode_worker import messages as m
from kakeya_zmq.decode_worker.journal import Journal
from kakeya_zmq.decode_worker.link import ChildLink
from kakeya_zmq.decode_worker.values import WorkerFigures, WorkerLost, WorkerSettings, WorkerState, WorkerUnavailable
from kakeya_zmq.engine import (
    CloseSession,
    Command,
    CommandFailed,
    EngineMemory,
    Event,
    ModelFacts,
    OpenSession,
    SessionReady,
)
from kakeya_zmq.engine_runner import EngineFault, StepInterrupted
from wire.errors import LocalProtocolError

TRIES = 2
"""Of one step."""


@dataclass(slots=True)
class _Session:
    journal: Journal
    serial: int = 0
    """The child that holds the session; 0: none does."""
    task: int | None = None
    """The command under way in that child."""
    kv_bytes: int = 0


def _ignore(text: str) -> None:
    pass


class DecodeWorkerEngine:
    """Implements :class:`kakeya_zmq.engine.Engine`; :meth:`start` before anything else.

    Args:
        tell: takes one line for the log: what the child says while it loads.
        warn: takes one line for the log: why a child was lost.
        boundary: told the name of every message before it is sent, when it was sent and when it was received; for tests.
        clock: seconds, monotonic.
        fresh_seed: seeds of sampled decodes that name none.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        tell: Callable[[str], None] = _ignore,
        warn: Callable[[str], None] = _ignore,
        boundary: Callable[[str], None] = _ignore,
        clock: Callable[[], float] = time.monotonic,
        fresh_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._link = ChildLink(settings, tell=tell, warn=warn, boundary=boundary, clock=clock)
        self._fresh_seed = fresh_seed
        self._tasks = 0
        self._sessions: dict[str, _Session] = {}
        self._restored = 0

    # --- any thread --------------------------------------------------------------------------------------------------

    def step_cancelled(self, session_id: str) -> None:
        """The command of that session whose step is being computed was cancelled; the child is killed if it goes on."""
        self._link.cancel(session_id)

    def stopping(self, timeout_s: float) -> None:
        """No new child from now on; a step that goes on for ``timeout_s`` is broken off."""
        self._link.stop(timeout_s)

    def figures(self) -> WorkerFigures:
        link = self._link
        return WorkerFigures(
            state=link.state.value,
            pid=link.pid,
            restarts=max(0, link.serial - 1),
            hangs=link.hangs,
            restored_sessions=self._restored,
            memory_bytes=link.resident_bytes(),
            kept_bytes=sum(session.journal.kept_bytes for session in list(self._sessions.values())),
        )

    @property
    def given_up(self) -> bool:
        """Whether no command can run now, since children were lost too often."""
        return self._link.state is WorkerState.GIVEN_UP

    # --- the engine's interface --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the child and wait until it has loaded the model.

        Raises:
            ConfigError: what the child says is wrong with its settings or the model folder (ModelError).
            WorkerUnavailable: the child died, or did not get ready in time, as often as it may.
            StepInterrupted: stopping.
        """
        self._link.ensure()

    @property
    def tokens_per_second(self) -> float:
        """Of prefill, as measured when the model was first loaded; 0 when it could not be."""
        return self._link.tokens_per_second

    @property
    def facts(self) -> ModelFacts:
        return self._link.facts

    def handle(self, command: Command) -> Iterator[Event]:
        """Run a command step by step, as every engine does."""
        match command:
            case OpenSession():
                return self._open(command)
            case CloseSession():
                return self._close_session(command)
            case _:
                return self._run(command)

    def session_kv_bytes(self, session_id: str) -> int:
        """As the child said when the session's last command ended; 0 while no child holds it."""
        session = self._sessions.get(session_id)
        return session.kv_bytes if session is not None and self._holds(session) else 0

    def session_position(self, session_id: str) -> int | None:
        session = self._sessions.get(session_id)
        return session.journal.position if session is not None else None

    def memory(self) -> EngineMemory:
        """The child's figures, as of its last answer."""
        return self._link.memory

    def close(self) -> None:
        """End the child, by force if need be."""
        self._link.close()
        self._sessions.clear()

    def idle(self) -> None:
        """Replace a child that was lost, on the engine's thread, while no command is under way in a step."""
        self._link.begin_step("")
        lost = self._link.lost_unasked()
        if lost is not None:
            self._bury(lost)
        self._link.revive()

    # --- commands ----------------------------------------------------------------------------------------------------

    def _open(self, command: OpenSession) -> Iterator[Event]:
        found = self._sessions.get(command.session_id)
        if found is not None:
            yield CommandFailed(command.session_id, "the session is already open", found.journal.position)
            return
        self._sessions[command.session_id] = _Session(Journal(command.session_id))
        yield SessionReady(command.session_id)

    def _close_session(self, command: CloseSession) -> Iterator[Event]:
        session = self._sessions.get(command.session_id)
        if session is None:
            yield CommandFailed(command.session_id, "no such session", 0)
            return
        if self._holds(session):
            self._link.begin_step(command.session_id)
            try:
                self._run_whole(command)
            except (WorkerLost, StepInterrupted) as lost:
                self._bury(lost)  # and with it the session, which is all that was wanted
        del self._sessions[command.session_id]
        yield SessionReady(command.session_id)

    def _run(self, command: Command) -> Iterator[Event]:
        session = self._sessions.get(command.session_id)
        if session is None:
            yield CommandFailed(command.session_id, "no such session", 0)
            return
        if session.journal.running:
            text = "the session is busy with another command"
            yield CommandFailed(command.session_id, text, session.journal.position)
            return
        session.journal.begin(command, self._fresh_seed)
        try:
            while (event := self._step(session)) is not None:
                yield event
                if isinstance(event, CommandFailed):
                    return
        finally:
            self._end(session)

    def _step(self, session: _Session) -> Event | None:
        """One event of the session's command, whatever happens to the child; None at its end."""
        journal = session.journal
        self._link.begin_step(journal.session_id)
        reason = ""
        for _ in range(TRIES):
            try:
                return self._try_step(session)
            except WorkerUnavailable as unavailable:
                return CommandFailed(journal.session_id, str(unavailable), journal.position)
            except StepInterrupted as interrupted:
                self._bury(interrupted)
                raise
            except WorkerLost as lost:
                reason = str(lost)
                self._bury(lost)
        journal.forget()
        return CommandFailed(journal.session_id, f"the decode worker was lost twice in one step: {reason}", 0)

    def _try_step(self, session: _Session) -> Event | None:
        resume = session.journal.resume()
        if resume is None and not self._holds(session):
            return None  # only the end of the command was lost
        self._link.ensure()
        if not self._holds(session):
            self._restore(session)
        if session.task is not None:
            return self._take(session, self._link.ask(m.Next(session.task)))
        if resume is None:
            return None
        session.task = self._next_task()
        reply = self._link.start_command(session.task, resume.command)
        for index in range(resume.known_events):
            if not isinstance(reply, m.Stepped) or not session.journal.is_known(index, self._link.event(reply)):
                session.journal.forget()
                text = "the session could not be restored: the model came to another result than before"
                return CommandFailed(session.journal.session_id, text, 0)
            reply = self._link.ask(m.Next(session.task))
        return self._take(session, reply)

    def _take(self, session: _Session, reply: m.Answer) -> Event | None:
        match reply:
            case m.Stepped():
                event = self._link.event(reply)
                try:
                    session.journal.acknowledge(event)
                except LocalProtocolError as error:
                    raise WorkerLost(error.message) from None
                return event
            case m.Ended(kv_bytes=kv_bytes, position=position):
                session.task = None
                session.kv_bytes = kv_bytes
                if position != session.journal.position:
                    self._abandon(session)
                return None
            case m.Raised(error=error, position=position):
                if position != session.journal.position:
                    session.journal.forget()
                self._abandon(session)  # the bug may have left anything of it
                raise EngineFault(error)

    def _end(self, session: _Session) -> None:
        """A command is over: tell a child that does not know it, and see that both stand at the same position."""
        task, session.task = session.task, None
        left: m.Ended | None = None
        if task is not None and self._holds(session):
            self._link.begin_step(session.journal.session_id)
            try:
                reply = self._link.ask(m.Cancel(task))
                if not isinstance(reply, m.Ended):
                    raise WorkerLost(f"it answered with {type(reply).__name__}")
                left = reply
            except (WorkerLost, StepInterrupted) as lost:
                self._bury(lost)
        position = session.journal.end()
        if left is None:
            return
        session.kv_bytes = left.kv_bytes
        if left.position != position:
            # The child did something that it never told: the session is made again when it is next used.
            self._abandon(session)

    # --- the child's sessions ----------------------------------------------------------------------------------------

    def _restore(self, session: _Session) -> None:
        """Make the session in the child there is.

        Raises:
            WorkerLost: also when the child cannot make it.
        """
        journal = session.journal
        commands = tuple(journal.replay())
        self._run_whole(CloseSession(journal.session_id))  # one that came apart from its journal; mostly there is none
        failure = self._run_whole(OpenSession(journal.session_id))
        for command in commands:
            failure = failure or self._run_whole(command)
        if failure is not None:
            raise WorkerLost(f"a session could not be restored: {failure}")
        session.serial = self._link.serial
        session.task = None
        self._restored += bool(commands)

    def _run_whole(self, command: Command) -> str | None:
        """Run a command of no asker to its end; returns why it failed.

        Raises:
            WorkerLost: the child is gone, or its engine raised.
        """
        task = self._next_task()
        failure: str | None = None
        reply = self._link.start_command(task, command)
        while isinstance(reply, m.Stepped):
            event = self._link.event(reply)
            if isinstance(event, CommandFailed):
                failure = event.message
            reply = self._link.ask(m.Next(task))
        if isinstance(reply, m.Raised):
            raise WorkerLost(f"its engine failed: {reply.error}")
        return failure

    def _holds(self, session: _Session) -> bool:
        return self._link.running and session.serial == self._link.serial

    def _abandon(self, session: _Session) -> None:
        """Whatever a child holds of the session is not what its journal says: it is made again when it is next used."""
        session.serial = 0
        session.task = None

    def _bury(self, lost: Exception) -> None:
        self._link.bury(lost)
        for session in self._sessions.values():
            self._abandon(session)

    def _next_task(self) -> int:
        self._tasks += 1
        return self._tasks
