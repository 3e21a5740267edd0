"""The order of effects: as the machine made them, whatever carrying one out leads to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_Effect = TypeVar("_Effect")


class EffectQueue(Generic[_Effect]):
    """Applies the effects of one machine strictly in the order in which the machine made them.

    Applying an effect may call the host, which may feed the machine again. The new effects then wait behind the rest of the
    old ones: sealed messages are counted when the machine makes them, and must leave in that order.
    """

    def __init__(self, apply: Callable[[_Effect], None]) -> None:
        self._apply = apply
        self._waiting: deque[_Effect] = deque()
        self.draining = False
        """Whether an effect is being applied right now, somewhere below on the stack."""

    def extend(self, effects: Iterable[_Effect]) -> None:
        """Apply ``effects`` after those that wait; at once, unless this is called while one is being applied."""
        self._waiting.extend(effects)
        if self.draining:
            return
        self.draining = True
        try:
            while self._waiting:
                self._apply(self._waiting.popleft())
        finally:
            self.draining = False
