"""The view of the fleet shared between threads: one lock, one number that grows with every change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dashboard.fleet_view import FleetView
from dashboard.ledger import LedgerRow
from wire.bus import BusMessage

_Answer = TypeVar("_Answer")


class LiveFleet:
    """Owns the view. The feed writes, any thread reads.

    Args:
        clock: monotonic seconds; the view's times.
        wall_clock: seconds since the epoch, only to show when something was.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._wall_clock = wall_clock
        self._view = FleetView()
        self._changed = threading.Condition()
        self._number = 0
        self._closing = threading.Event()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def apply(self, messages: Sequence[tuple[BusMessage, float]]) -> None:
        """Take in messages, each with the time at which it arrived."""
        with self._changed:
            for message, at in messages:
                self._view.on(message, at)
            self._notify()

    def refuse(self, node_id: str, reason: str, count: int) -> None:
        """Messages under the name of a node were not taken."""
        with self._changed:
            self._view.refuse(node_id, reason, count, self.clock())
            self._notify()

    def forget(self, node_id: str) -> None:
        """Another key stands for a name from now on."""
        with self._changed:
            self._view.forget(node_id, self.clock())
            self._notify()

    def tick(self) -> None:
        """Let time act; call it about once a second."""
        with self._changed:
            self._view.on_tick(self.clock())
            self._notify()

    def read(self, question: Callable[[FleetView, float], _Answer]) -> _Answer:
        """Ask the view, under the lock: ``question(view, now)`` must be quick and keep nothing that changes."""
        with self._changed:
            return question(self._view, self.clock())

    def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until something changed after ``seen`` (0 at first), at most so long; the present number."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen or self.closed, timeout_s)
            return self._number

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait at most so long for :meth:`close`; whether it has happened."""
        return self._closing.wait(timeout_s)

    def unix_time(self, at: float) -> float:
        """When something of the view was, in seconds since the epoch by this machine's present wall clock."""
        return self._wall_clock() - (self.clock() - at)

    def restore(self, rows: Sequence[LedgerRow]) -> None:
        """Begin with the sums of an earlier run."""
        with self._changed:
            self._view.ledger.restore(rows)

    def close(self) -> None:
        """Wake everybody who waits; what is known stays readable. Idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def _notify(self) -> None:
        self._number += 1
        self._changed.notify_all()
