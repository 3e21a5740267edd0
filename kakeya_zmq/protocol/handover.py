"""Parts are handed over for publishing once, although several sessions may make the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kakeya_zmq.blocks import Part
from wire.messages import PartRef

REMEMBERED_S = 60.0
"""Equal prompts of one burst lie closer together; later the cache peers may have lost what they got."""
REMEMBERED_MAX = 65_536


class Handover:
    """What was handed over lately."""

    def __init__(self) -> None:
        self._handed: OrderedDict[PartRef, float] = OrderedDict()

    def select(self, parts: Iterable[Part], now: float) -> tuple[Part, ...]:
        """Those of ``parts`` that were not handed over for :data:`REMEMBERED_S`; they count as handed over now."""
        self._forget(now)
        fresh: list[Part] = []
        for part in parts:
            ref = part.meta.ref
            if ref not in self._handed:
                self._handed[ref] = now
                fresh.append(part)
        return tuple(fresh)

    def _forget(self, now: float) -> None:
        while self._handed:
            ref, at = next(iter(self._handed.items()))
            if now - at < REMEMBERED_S and len(self._handed) <= REMEMBERED_MAX:
                return
            del self._handed[ref]
