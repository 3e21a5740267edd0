"""The parent's hold on one child process: start it, reach it, kill it, never leave it behind.

The child inherits one end of a socket pair, which has no name in the file system: nobody else can connect, and nothing is
left of it however either side ends. Its standard input is a pipe that nobody writes to; it ends when the parent does
(kakeya_zmq.decode_worker.serve). A child is spawned, never forked from this process's memory.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence

import psutil

from kakeya_zmq.decode_worker.channel import Channel, Wait

KILL_WAIT_S = 10.0
"""For the system to reap a killed process; one that is stuck in a driver is left to it."""
LEAVE_WAIT_S = 2.0


class WorkerProcess:
    """A running child.

    Args:
        program: words of its command line; ``--channel DESCRIPTOR`` is added.
        wait: see :class:`Channel`.

    Raises:
        OSError: the system cannot start it.
    """

    def __init__(self, program: Sequence[str], wait: Wait) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = subprocess.Popen(
                [*program, "--channel", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours, wait)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def memory_bytes(self) -> int:
        """Resident memory of the child; 0 when it is gone."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss) if self.alive else 0
        except psutil.Error:
            return 0

    def kill(self) -> int | None:
        """SIGKILL, wait, and close our ends; may be called again. Returns the exit status, negative for a signal."""
        if self.alive:
            self._process.kill()
        return self._close(KILL_WAIT_S)

    def leave(self) -> None:
        """Let the child end by itself, or kill it when it does not in two seconds."""
        self._close(LEAVE_WAIT_S)
        if self.alive:
            self.kill()

    def _close(self, timeout_s: float) -> int | None:
        self.channel.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None
