"""The store's record of its latest changes, for readers that follow them (telemetry, gossip)."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kakeya_zmq.store_blocks import HeldPart
from kakeya_zmq.store_values import Change, StoreEvent
from wire.messages import PartKind


class EventLog:
    """Changes are numbered from 1 without gaps; the last ``events_max`` of them can be read again.

    Events become values only when they are read: a store changes far more often than anybody looks.
    """

    __slots__ = ("_entries", "_sequence")

    def __init__(self, events_max: int) -> None:
        self._entries: deque[tuple[Change, bytes, PartKind, int]] = deque(maxlen=events_max)
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Number of the last change, 0 before the first one."""
        return self._sequence

    def add(self, change: Change, held: HeldPart) -> None:
        self._sequence += 1
        self._entries.append((change, held.block.block_hash, held.kind, len(held.payload)))

    def skip(self, changes: int) -> None:
        """So many changes that cannot be read again, nor what was before them."""
        self._sequence += changes
        self._entries.clear()

    def since(self, sequence: int) -> tuple[StoreEvent, ...] | None:
        """Events with a larger number, oldest first; None when some of them are already forgotten."""
        first = self._sequence - len(self._entries) + 1
        if sequence < first - 1:
            return None
        fresh = islice(self._entries, max(0, sequence - first + 1), None)
        return tuple(StoreEvent(number, *entry) for number, entry in enumerate(fresh, max(sequence, first - 1) + 1))
