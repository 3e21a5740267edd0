"""Fits a node's store to the memory of its machine: the shell around kakeya_zmq.budget, on the reactor's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from daemons.memory import available_memory_bytes, physical_memory_bytes
from kakeya_zmq.budget import BudgetLimits, MemoryBudget, MemoryMeasured
from kakeya_zmq.config import Settings
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.store import BlockStore
from kakeya_zmq.telemetry import Value
from wire.limits import GIB

EVICTIONS_PER_STEP: Final = 1000
"""About 5 ms of the reactor's time."""
STEP_INTERVAL_S: Final = 0.02


class CacheBudget:
    """Keeps the store at its floor until the model is known, then measures and resizes.

    Args:
        model_bytes: memory of this process's model now, 0 for a role without one; None while it is being loaded.

    Raises:
        ConfigError: --cache-min-gb is above --cache-gb.
    """

    def __init__(
        self, reactor: Reactor, settings: Settings, store: BlockStore, *, model_bytes: Callable[[], int | None]
    ) -> None:
        self._limits = BudgetLimits(
            floor_bytes=int(settings.cache_min_gb * GIB),
            ceiling_bytes=settings.cache_bytes,
            reserve_bytes=int(settings.memory_reserve_gb * GIB),
        )
        self._budget = MemoryBudget(self._limits)
        self._store = store
        self._model_bytes = model_bytes
        self._last = self._look(0)
        store.resize(self._limits.floor_bytes, reactor.clock())
        reactor.add_deadline_source(self._budget.deadline, self.measure)

    def measure(self, now: float) -> None:
        """Look at the machine and fit the store; what leases and reservations hold is taken back later."""
        model_bytes = self._model_bytes()
        self._last = self._look(model_bytes or 0)
        if model_bytes is None:
            self._budget.wait(now)
            return
        self._budget.on(self._last, now)
        if self._store.max_bytes != self._budget.target_bytes:
            self._fit(now)

    def _look(self, model_bytes: int) -> MemoryMeasured:
        return MemoryMeasured(
            physical_bytes=physical_memory_bytes(),
            available_bytes=available_memory_bytes(),
            model_bytes=model_bytes,
            store_bytes=self._store.stats().bytes_used,
        )

    def _fit(self, now: float) -> None:
        """A large cut is made in steps, so that the node goes on answering in between."""
        before = self._store.evictions().parts
        reached = self._store.resize(self._budget.target_bytes, now, evictions_max=EVICTIONS_PER_STEP)
        if not reached and self._store.evictions().parts - before >= EVICTIONS_PER_STEP:
            self._budget.wait(now, STEP_INTERVAL_S)

    def section(self) -> tuple[str, dict[str, Value]]:
        """Figures for the status."""
        return "budget", {
            "target_bytes": self._budget.target_bytes,
            "floor_bytes": self._limits.floor_bytes,
            "ceiling_bytes": self._limits.ceiling_bytes,
            "reserve_bytes": self._limits.reserve_bytes,
            "physical_bytes": self._last.physical_bytes,
            "available_bytes": self._last.available_bytes,
            "model_bytes": self._last.model_bytes,
            "lowered": self._budget.lowered,
            "cuts": self._budget.cuts,
        }
