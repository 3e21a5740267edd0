"""The reactor: one thread, one poll loop, every control-plane and bus socket of a process.

Rules
    * Sockets registered here are touched on the reactor's thread only; :meth:`Reactor.check_thread` is the assertion.
    * Nothing in a callback blocks. Work longer than about 20 ms belongs to a lane, the model thread or a child process.
    * Other threads reach the reactor through :meth:`Reactor.post` (never blocks) or :meth:`Reactor.call` (waits).
    * A failing callback is logged and counted, and never stops the loop.

Theory of operation
    A turn is: poll; serve each ready socket; run due timers; run posted functions; let due deadline sources act.
    Each step has a bound, so a flood on one socket, or of one kind, delays the others by one turn and no more. Readiness is
    level triggered, so what a turn leaves behind is found by the next one. How long a poll waits, and what is due, is told
    by :mod:`kakeya_zmq.io.schedule`.

    An ``on_readable`` callback takes exactly one message with ``zmq.DONTWAIT``; it is called again until it raises
    ``zmq.Again`` or has had :data:`MESSAGES_PER_TURN` messages. A message that has no end is taken in slices
    (:mod:`kakeya_zmq.io.incoming`).

    A poller loop, not asyncio: the asyncio wrapper was measured at a quarter of the request rate, and has a history of
    lost wake-ups and of messages lost to cancelled receives (pyzmq#1203, pyzmq#1085, pyzmq#1925).
"""

from __future__ import annotations

import contextlib
import logging
import socket as os_socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Final, TypeVar

import zmq

from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.schedule import DeadlineHandle, Schedule, TimerHandle
from wire.errors import FailureCode, LocalProtocolError, RequestFailed

MESSAGES_PER_TURN: Final = 64
"""Messages one socket may deliver in one turn: as many as its receive queue holds, well under a millisecond of work."""
POSTED_PER_TURN: Final = 256
"""Posted functions run in one turn."""

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Registration:
    socket: zmq.Socket[bytes]
    on_readable: Callable[[], None]
    on_writable: Callable[[], None] | None
    events: int


class Reactor:
    """One poll loop with its ZeroMQ context, its admission gate, timers and a door for other threads.

    Args:
        clock: monotonic clock in seconds.

    Build everything on the constructing thread, then either call :meth:`run` (daemons) or :meth:`start_thread` (clients).
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, io_threads: int = 1) -> None:
        self.clock = clock
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self.gate = Gate(self.context)
        self.callback_errors = 0
        self.interrupted = False
        """Whether the last run() ended by KeyboardInterrupt."""
        self._poller = zmq.Poller()
        self._registrations: dict[zmq.Socket[bytes], _Registration] = {}
        self._schedule = Schedule(self._guarded)
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = os_socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._wake_fd = self._wake_receiver.fileno()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._wake_pending = False
        self._stopping = False
        self._closed = False
        self._loop_thread: int | None = None
        self._thread: threading.Thread | None = None
        self._running = threading.Event()

    # --- sockets ----------------------------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Hold the rule that only the reactor's thread touches its sockets (libzmq aborts the process otherwise).

        Raises:
            LocalProtocolError: the loop runs on another thread, or the reactor is closed.
        """
        if self._closed:
            raise LocalProtocolError("the reactor is closed")
        if self._loop_thread is not None and self._loop_thread != threading.get_ident():
            raise LocalProtocolError("a socket of the reactor was used from another thread")

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has closed every socket."""
        return self._closed

    def register(
        self,
        socket: zmq.Socket[bytes],
        on_readable: Callable[[], None],
        on_writable: Callable[[], None] | None = None,
    ) -> None:
        """Serve a socket. ``on_readable()`` takes one message and raises zmq.Again when there is none.

        ``on_writable`` is called only while :meth:`watch_writable` is on.
        """
        self.check_thread()
        if socket in self._registrations:
            raise LocalProtocolError("the socket is registered already")
        self._registrations[socket] = _Registration(socket, on_readable, on_writable, zmq.POLLIN)
        self._poller.register(socket, zmq.POLLIN)

    def watch_writable(self, socket: zmq.Socket[bytes], watch: bool) -> None:
        """Ask for ``on_writable()`` in every turn in which the socket takes a message; switch it off when done."""
        self.check_thread()
        registration = self._registrations[socket]
        events = zmq.POLLIN | zmq.POLLOUT if watch else zmq.POLLIN
        if events != registration.events:
            registration.events = events
            self._poller.modify(socket, events)

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        """Stop serving a socket (it stays open); unknown sockets are ignored."""
        self.check_thread()
        if self._registrations.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def close_socket(self, socket: zmq.Socket[bytes], *, linger_ms: int = 0) -> None:
        """Unregister and close; unsent messages are kept for at most ``linger_ms``."""
        self.unregister(socket)
        socket.close(linger=linger_ms)

    # --- time -------------------------------------------------------------------------------------------------------

    def add_deadline_source(self, deadline: Callable[[], float | None], on_due: Callable[[float], None]) -> DeadlineHandle:
        """Attach a machine.

        Args:
            deadline: asked each turn: absolute seconds of :attr:`clock`, or None.
            on_due: called with the present time once ``deadline()`` is past.
        """
        self.check_thread()
        return self._schedule.add_source(deadline, on_due)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> TimerHandle:
        """Run ``function`` on the reactor's thread after ``delay_s`` seconds."""
        self.check_thread()
        return self._schedule.add_timer(self.clock() + delay_s, function)

    # --- other threads ----------------------------------------------------------------------------------------------

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the reactor's thread, in the order of posting. Any thread, or a signal handler, may call it.

        Never blocks and takes no lock: the function is queued *before* the flag is read, and the loop clears the flag
        *before* it drains the queue, so no function can be left behind.
        """
        if self._closed:
            return
        self._posted.append(function)
        if not self._wake_pending:
            self._wake_pending = True
            with contextlib.suppress(OSError):  # full: a wake-up is on its way anyhow; closed: nobody is left to wake
                self._wake_sender.send(b"\0")

    def call(self, function: Callable[[], _Result], *, timeout_s: float = 10.0) -> _Result:
        """Run ``function`` on the reactor's thread and hand back what it returns or raises.

        Raises:
            RequestFailed: DEADLINE_EXCEEDED, the loop did not get to it in time.
        """
        if self._loop_thread is None or self._loop_thread == threading.get_ident():
            return function()
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # handed to the caller, whose error it is
                future.set_exception(error)

        self.post(run)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if not future.cancel() and future.done():
                return future.result()
            raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, "the reactor is stopped or stalled") from None

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turn until :meth:`stop`; KeyboardInterrupt stops it too and sets ``interrupted``."""
        self.check_thread()
        if self._loop_thread is not None:
            raise LocalProtocolError("the reactor is running already")
        self._loop_thread = threading.get_ident()
        self._running.set()
        self.interrupted = False
        try:
            while not self._stopping:
                self._turn()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._loop_thread = None
            self._stopping = False

    def stop(self) -> None:
        """End run() after the current turn; any thread or signal handler."""
        self.post(self._set_stopping)

    def start_thread(self, name: str = "kakeya-reactor") -> None:
        """Run the loop on a thread of its own (a daemon thread: it never keeps a process alive)."""
        if self._thread is not None:
            raise LocalProtocolError("the reactor has a thread already")
        self._running.clear()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)
        self._thread.start()
        # From here on check_thread() must hold for the caller, so the loop has to have taken over.
        self._running.wait()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread of :meth:`start_thread`; whether it is gone."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop, close every registered socket and the gate, and terminate the context. Idempotent.

        Returns:
            Whether the context terminated in time. When not, some other socket of it is still open (a lane's, say); that
            is logged, and the process can still exit, because the waiting thread is a daemon thread.
        """
        if self._closed:
            return True
        if self._loop_thread == threading.get_ident():
            raise LocalProtocolError("close() was called inside the loop; call stop()")
        self.stop()
        if not self.join(timeout_s):
            _log.error("the reactor's thread did not stop within %.1f s", timeout_s)
            return False
        self._closed = True
        for socket in list(self._registrations):
            self._poller.unregister(socket)
            socket.close()
        self._registrations.clear()
        self._schedule.clear()
        self._posted.clear()
        self._poller.unregister(self._wake_fd)
        self._wake_receiver.close()
        self._wake_sender.close()
        self.gate.close()
        return self._terminate(timeout_s)

    def _terminate(self, timeout_s: float) -> bool:
        thread = threading.Thread(target=self.context.term, name="kakeya-zmq-term", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            _log.error("the ZeroMQ context did not terminate within %.1f s: a socket is still open", timeout_s)
            return False
        return True

    def _set_stopping(self) -> None:
        self._stopping = True

    def _turn(self) -> None:
        for key, events in self._poller.poll(0 if self._posted else self._schedule.wait_ms(self.clock())):
            if key == self._wake_fd:
                self._drain_wake_ups()
                continue
            registration = self._registrations.get(key)
            if registration is not None:
                self._serve(registration, events)
        self._schedule.run_timers(self.clock())
        self._run_posted()
        self._schedule.run_sources(self.clock)

    def _drain_wake_ups(self) -> None:
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            pass  # empty
        self._wake_pending = False

    def _serve(self, registration: _Registration, events: int) -> None:
        socket = registration.socket
        if events & zmq.POLLOUT and registration.on_writable is not None and registration.events & zmq.POLLOUT:
            self._guarded(registration.on_writable)
        if not events & zmq.POLLIN:
            return
        for _ in range(MESSAGES_PER_TURN):
            # A callback may have closed or replaced the socket.
            if self._registrations.get(socket) is not registration or not self._guarded(registration.on_readable):
                return

    def _run_posted(self) -> None:
        for _ in range(min(POSTED_PER_TURN, len(self._posted))):
            self._guarded(self._posted.popleft())

    def _guarded(self, function: Callable[[], None]) -> bool:
        """Run a callback; False when it had nothing to do (zmq.Again). Everything it raises ends here."""
        try:
            function()
        except zmq.Again:
            return False
        except Exception as error:  # one bad callback must not take the process's other sessions with it
            self.callback_errors += 1
            _log.error("a reactor callback failed: %s", describe_exception(error))
        return True
