"""Empties a node's store when a key is revoked: the shell around kakeya_zmq.protocol.emptying, on the reactor's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.emptying import EmptyingPlan
from kakeya_zmq.store import BlockStore

EMPTIED: Final = "the cache was emptied: what a revoked node gave may have been in it"


class StoreEmptying:
    """Drops what the store holds, and has everybody else of the node who holds KV let go of it.

    Args:
        told: given EMPTIED and the bytes that went, each time.
    """

    def __init__(self, reactor: Reactor, store: BlockStore, *, told: Callable[[str, int], None]) -> None:
        self.count = 0
        """How often it has happened: whoever works on what was there before it must not keep the outcome."""
        self.bytes_dropped = 0
        self.also: list[Callable[[], None]] = []
        """Called each time, when the store is empty."""
        self._clock = reactor.clock
        self._store = store
        self._told = told
        self._plan = EmptyingPlan()
        reactor.add_deadline_source(self._plan.deadline, self._due)

    def revoked(self) -> None:
        """A key is refused from now on that was not before."""
        self._plan.revoked(self._clock())

    def _due(self, now: float) -> None:
        if not self._plan.due(now):
            return
        self.count += 1
        dropped_bytes = self._store.clear()
        self.bytes_dropped += dropped_bytes
        for let_go in self.also:
            let_go()
        self._told(EMPTIED, dropped_bytes)

    def next_s(self) -> float | None:
        """Seconds until the store is emptied again; None when it is not going to be."""
        deadline = self._plan.deadline()
        return None if deadline is None else round(max(0.0, deadline - self._clock()), 1)
