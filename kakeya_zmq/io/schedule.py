"""What the reactor does by the clock: functions that run once, and machines that tell their own next deadline.

Rules
    * Everything here happens on the reactor's thread; the present time is handed in.
    * Nothing runs before its time, and nothing that is cancelled or removed runs at all.
    * A source whose deadline cannot be told is removed, and nobody else notices. What a callback raises is the business of
      ``guarded``.

Theory of operation
    Timers lie in a heap. The deadline of a source moves whenever its machine takes an event, so it is not told but asked
    for: at the end of each turn those that are due act, and the earliest of all deadlines is remembered. It and the first
    timer bound the next wait.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable
from typing import Final

from kakeya_zmq.io.failures import describe_exception

POLL_SECONDS_MAX: Final = 60.0
"""The loop turns at least this often, so that a stepping clock cannot make it sleep for ever."""
DUE_AGAIN_SECONDS: Final = 0.001
"""A deadline source that is still due after it acted is asked again after this time, so that it cannot spin the loop."""

_log = logging.getLogger(__name__)


class TimerHandle:
    """A timer that is pending. ``cancel()`` is idempotent."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self._function = None

    @property
    def pending(self) -> bool:
        return self._function is not None

    def _take(self) -> Callable[[], None] | None:
        function, self._function = self._function, None
        return function


class DeadlineHandle:
    """A registered deadline source. ``remove()`` is idempotent."""

    __slots__ = ("_deadline", "_not_before", "_on_due", "_removed")

    def __init__(self, deadline: Callable[[], float | None], on_due: Callable[[float], None]) -> None:
        self._deadline = deadline
        self._on_due = on_due
        self._not_before = -math.inf
        self._removed = False

    def remove(self) -> None:
        self._removed = True

    def _due_at(self) -> float:
        if self._removed:
            return math.inf
        try:
            deadline = self._deadline()
        except Exception as error:  # a broken machine loses its ticks; the loop and everyone else go on
            _log.error("a deadline source failed and was removed: %s", describe_exception(error))
            self._removed = True
            return math.inf
        return math.inf if deadline is None else max(deadline, self._not_before)


class Schedule:
    """Timers and deadline sources of one loop.

    Args:
        guarded: runs a callback, and ends whatever it raises.
    """

    def __init__(self, guarded: Callable[[Callable[[], None]], bool]) -> None:
        self._guarded = guarded
        self._sources: list[DeadlineHandle] = []
        self._sources_due_at = -math.inf
        """When the first of them is due; before they were first asked, at once."""
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._timer_numbers = itertools.count()

    def add_source(self, deadline: Callable[[], float | None], on_due: Callable[[float], None]) -> DeadlineHandle:
        """Ask ``deadline()`` each turn, and call ``on_due(now)`` once it is past."""
        handle = DeadlineHandle(deadline, on_due)
        self._sources.append(handle)
        self._sources_due_at = -math.inf
        return handle

    def add_timer(self, due_at: float, function: Callable[[], None]) -> TimerHandle:
        """Run ``function`` once, at ``due_at`` or in the first turn after it; of equal times the first added goes first."""
        handle = TimerHandle(function)
        heapq.heappush(self._timers, (due_at, next(self._timer_numbers), handle))
        return handle

    def wait_ms(self, now: float) -> int:
        """How long the loop may wait for messages, in whole milliseconds, rounded up."""
        due_at = min(self._sources_due_at, self._timers[0][0] if self._timers else math.inf)
        wait_s = min(max(due_at - now, 0.0), POLL_SECONDS_MAX)
        return math.ceil(wait_s * 1000)

    def run_timers(self, now: float) -> None:
        """Run the functions whose time has come."""
        while self._timers and self._timers[0][0] <= now:
            function = heapq.heappop(self._timers)[2]._take()
            if function is not None:
                self._guarded(function)

    def run_sources(self, clock: Callable[[], float]) -> None:
        """Let the sources act that are due, and note when the next one is: the last thing of a turn, since whatever runs may
        change it. ``clock`` is read anew for each, since the one before may have taken its time.
        """
        ran = removed = False
        first_due_at = math.inf
        for source in tuple(self._sources):
            removed = removed or source._removed
            now = clock()
            due_at = source._due_at()
            if due_at <= now:
                ran = True
                self._guarded(lambda source=source, now=now: source._on_due(now))  # type: ignore[misc]
                source._not_before = now + DUE_AGAIN_SECONDS if source._due_at() <= now else -math.inf
            first_due_at = min(first_due_at, due_at)
        if removed:
            self._sources = [source for source in self._sources if not source._removed]
        if ran:  # it may have changed the others' deadlines, or added some
            first_due_at = min((source._due_at() for source in self._sources), default=math.inf)
        self._sources_due_at = first_due_at

    def clear(self) -> None:
        """Forget everything: nothing runs any more."""
        self._sources.clear()
        self._timers.clear()
