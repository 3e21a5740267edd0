"""When a server has to look at its sessions and at what is open in them.

Nobody takes an entry out when the session or the request that it is for has ended: it stays until it is due, and is passed
over then, or until :meth:`SessionTimers.keep` is told what is still wanted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

IDLE_CHECK: Final = -1
"""In place of a request id: whether anything has been heard lately."""
LOSS_CHECK: Final = -2
"""The same, for a session whose connection is gone or whose node has a newer one."""


class SessionTimers:
    """See the module's text. ``what`` is the id of a request, whose deadline it is, or one of the checks above."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bytes, int]] = []
        """(due, session id, what)."""

    def __len__(self) -> int:
        return len(self._heap)

    def deadline(self) -> float | None:
        """When the first one is due."""
        return self._heap[0][0] if self._heap else None

    def add(self, due: float, session_id: bytes, what: int) -> None:
        heapq.heappush(self._heap, (due, session_id, what))

    def pop_due(self, now: float) -> tuple[float, bytes, int] | None:
        """The first one as (due, session id, what), when it is due."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0][0] <= now else None

    def keep(self, wanted: Callable[[bytes, int], bool]) -> None:
        """Drop all others; ``wanted`` is asked with session id and what."""
        self._heap = [timer for timer in self._heap if wanted(timer[1], timer[2])]
        heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()
