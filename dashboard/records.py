"""Rings of the last events of a kind, and histograms: what the view remembers, all of bounded size."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from wire.events import Event, RequestEvent

_Kind = TypeVar("_Kind", bound=Event)

TTFT_BOUNDS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of times to first token, seconds; one more holds what is above."""
PAST_MAX: Final = 10_000
"""Names of past requests remembered: the 64 that a node tells again, for more nodes than fit into the ring."""


@dataclass(frozen=True, slots=True)
class Record(Generic[_Kind]):
    """One event as it was heard. ``number`` grows by each event of its ring; ``at``: seconds on the owner's clock.

    ``replayed``: the node told it again to a late reader, so it happened earlier, nobody knows when.
    """

    number: int
    at: float
    node_id: str
    event: _Kind
    replayed: bool = False


class Ring(Generic[_Kind]):
    """The last events of one kind."""

    def __init__(self, length: int) -> None:
        self.count = 0
        """Events ever heard; the number of the newest one."""
        self._records: deque[Record[_Kind]] = deque(maxlen=length)

    def add(self, now: float, node_id: str, event: _Kind) -> None:
        self.count += 1
        self._records.append(Record(self.count, now, node_id, event))

    def newest(self, count: int | None = None) -> list[Record[_Kind]]:
        """Newest first, at most ``count``."""
        found = list(reversed(self._records))
        return found if count is None else found[:count]

    def since(self, number: int) -> list[Record[_Kind]]:
        """Those after ``number``, oldest first; what fell out of the ring is missing."""
        return [record for record in self._records if record.number > number]


class RequestRing:
    """The last requests. One told again is not taken twice; one told again with more in it replaces the first telling."""

    def __init__(self, length: int) -> None:
        self.count = 0
        """Grows with every request that is new or has changed."""
        self._length = length
        self._records: OrderedDict[tuple[str, str, str], Record[RequestEvent]] = OrderedDict()
        self._past: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        """Names of requests that fell out of the ring: told again, they are still not new."""

    def add(self, now: float, node_id: str, event: RequestEvent, *, replayed: bool) -> RequestEvent | None:
        """Take note of one.

        Returns:
            What was known of it before, or None when it is new; ``event`` itself when nothing changed.
        """
        key = (node_id, event.request_id, event.operation)
        known = self._records.get(key)
        if key in self._past or (known is not None and known.event == event):
            return event
        self.count += 1
        self._records[key] = Record(self.count, now, node_id, event, replayed)
        self._records.move_to_end(key)
        if len(self._records) > self._length:
            self._past[self._records.popitem(last=False)[0]] = None
            if len(self._past) > PAST_MAX:
                self._past.popitem(last=False)
        return known.event if known is not None else None

    def newest(self, count: int | None = None) -> list[Record[RequestEvent]]:
        """Newest first, at most ``count``."""
        found = list(reversed(self._records.values()))
        return found if count is None else found[:count]

    def since(self, number: int) -> list[Record[RequestEvent]]:
        """Those new or changed after ``number``, oldest first."""
        return [record for record in self._records.values() if record.number > number]


class Histogram:
    """Counts by fixed upper bounds. ``counts`` has one more entry, for what is above the last bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)
