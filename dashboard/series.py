"""Time series of fixed size: a ring of buckets, each a few named figures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from dashboard.figures import bounded

FIGURES_MAX: Final = 64
"""Names in one bucket; further ones are ignored."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Figures of [start, start + step) seconds on the owner's clock."""

    start: float
    figures: dict[str, float]


class TimeSeries:
    """The last ``length`` buckets of ``step_s`` seconds; a bucket in which nothing happened takes no memory.

    Time must not go backwards: what comes late is put into the newest bucket.
    """

    def __init__(self, *, step_s: float, length: int) -> None:
        self.step_s = step_s
        self.length = length
        self._buckets: deque[tuple[int, dict[str, float]]] = deque(maxlen=length)

    def add(self, name: str, amount: float, now: float) -> None:
        """Add to a sum, which stays within bounds."""
        figures = self._current(now)
        if name in figures or len(figures) < FIGURES_MAX:
            figures[name] = bounded(figures.get(name, 0.0) + amount)

    def put(self, name: str, value: float, now: float) -> None:
        """Replace a state; the last one of a bucket is kept."""
        figures = self._current(now)
        if name in figures or len(figures) < FIGURES_MAX:
            figures[name] = bounded(value)

    def buckets(self, now: float) -> list[Bucket]:
        """Oldest first, only those that hold something and are not older than the ring."""
        oldest = int(now // self.step_s) - self.length + 1
        return [Bucket(index * self.step_s, dict(figures)) for index, figures in self._buckets if index >= oldest]

    def _current(self, now: float) -> dict[str, float]:
        index = int(now // self.step_s)
        if not self._buckets or self._buckets[-1][0] < index:
            self._buckets.append((index, {}))
        return self._buckets[-1][1]
