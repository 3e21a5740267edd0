"""Waking a thread that polls, from any other."""

from __future__ import annotations

import contextlib
import socket as os_socket
import threading


class WakeUp:
    """Wakes a thread that waits in a ``zmq.Poller``: register ``fileno()`` for POLLIN, ``drain()`` when it is readable.

    ``notify`` may be called from any thread, at any time, also after ``close`` (then it does nothing).
    """

    def __init__(self) -> None:
        self._reader, self._writer = os_socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # Reentrant: a signal handler or a finalizer may notify while this thread is notifying.
        self._lock = threading.RLock()
        self._closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def notify(self) -> None:
        with self._lock:
            if not self._closed:
                # A full pipe already holds a wake-up that nobody has read yet.
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b"\0")

    def drain(self) -> None:
        """Forget all wake-ups so far. Call it before looking at what one was woken for."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()
