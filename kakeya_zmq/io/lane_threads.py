"""Threads for lanes, some of which wait for the next one.

A lane needs its thread at once: the other side of the transfer waits for it. To start one takes one to two milliseconds in a
busy process, most of them spent on waiting for the GIL; to wake one that is there takes a tenth.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

SPARE_THREADS: Final = 2
"""A fetch needs one; a publish that runs beside it another."""
Work: TypeAlias = Callable[[], None]


class LaneThreads:
    """Runs each lane on a thread of its own. Thread-safe.

    Args:
        spare: how many idle threads are kept for the next lanes.
    """

    def __init__(self, spare: int = SPARE_THREADS) -> None:
        self._spare = spare
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work | None]] = []
        """The inboxes of the idle threads; the one that was used last comes last."""

    @property
    def idle(self) -> int:
        """Threads that wait for a lane."""
        with self._lock:
            return len(self._idle)

    def run(self, work: Work) -> None:
        """Run ``work``, which must not raise, on a thread that nobody else uses meanwhile.

        Raises:
            RuntimeError: the system gives out no more threads.
        """
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            # Of a daemon, since an idle thread must not keep the process alive; lanes are joined when their group closes.
            threading.Thread(target=self._main, args=(inbox,), name="kakeya-lane", daemon=True).start()
        inbox.put(work)

    def close(self) -> None:
        """End the idle threads, and each of the others when its lane has ended. Idempotent."""
        with self._lock:
            self._spare = 0
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _main(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        while (work := inbox.get()) is not None:
            work()
            del work  # it holds the lane, and with it the parts
            with self._lock:
                if len(self._idle) >= self._spare:
                    return
                self._idle.append(inbox)
