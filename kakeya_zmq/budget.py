"""How much memory a store may have on a machine that does other things, too: a pure function, and a machine around it.

Rules
- The budget is physical memory less the model less a reserve, between a floor and a ceiling. The model may grow (sessions,
  buffers); the budget follows it.
- Memory pressure lowers it: when less than half of the reserve is available on the whole machine, the store gives back what
  is missing to the full reserve, down to the floor. Freed memory takes a while to show, so it does not give back again for
  ``settle_s``.
- Recovery raises it, slower than pressure lowers it: only after more than the reserve has been available for ``recovery_s``
  without a break, and then by half of what is available beyond the reserve. Between the two marks nothing changes.
- What is leased or reserved is not the budget's business: the store itself keeps it (kakeya_zmq.store), and the budget asks
  again at the next measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from wire.errors import ConfigError
from wire.limits import GIB, MIB

STEP_BYTES: Final = 16 * MIB
"""Rises smaller than this are not worth a change: a model's buffers come and go."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """What an operator allows.

    Raises:
        ConfigError: the floor is above the ceiling, or not positive.
    """

    floor_bytes: int
    ceiling_bytes: int
    reserve_bytes: int

    def __post_init__(self) -> None:
        if self.floor_bytes > self.ceiling_bytes:
            raise ConfigError(
                f"the smallest cache, {self.floor_bytes / GIB:g} GiB, is larger than the largest, "
                f"{self.ceiling_bytes / GIB:g} GiB",
                remedy="lower --cache-min-gb or raise --cache-gb",
            )
        if self.floor_bytes <= 0 or self.reserve_bytes < 0:
            raise ConfigError("the smallest cache must be larger than 0", remedy="check --cache-min-gb")


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """One look at the machine. All in bytes."""

    physical_bytes: int
    """What this process may ever use: the machine's memory, or less where a container is limited."""
    available_bytes: int
    """What could be allocated now without swapping."""
    model_bytes: int
    """Weights, sessions and buffers of this process's model; 0 without one."""
    store_bytes: int
    """Payloads the store holds."""


@dataclass(frozen=True, slots=True)
class SetBudget:
    """The store should be resized to this."""

    max_bytes: int


def static_budget(limits: BudgetLimits, memory: MemoryMeasured) -> int:
    """The budget without pressure, in bytes: physical − model − reserve, between floor and ceiling."""
    left = memory.physical_bytes - memory.model_bytes - limits.reserve_bytes
    return max(limits.floor_bytes, min(left, limits.ceiling_bytes))


class MemoryBudget:
    """Feed it measurements when ``deadline()`` says so; see the module's rules.

    Args:
        interval_s: seconds between measurements.
        settle_s: seconds after a cut before the next one.
        recovery_s: seconds without pressure before a rise, and between two rises.
    """

    def __init__(
        self, limits: BudgetLimits, *, interval_s: float = 2.0, settle_s: float = 10.0, recovery_s: float = 30.0
    ) -> None:
        self._limits = limits
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._recovery_s = recovery_s
        self._next_at = float("-inf")
        self._settled_at = float("-inf")
        self._calm_since: float | None = None
        self.target_bytes = limits.floor_bytes
        """Starts at the floor: before the first measurement nothing is known."""
        self.lowered = False
        """Whether pressure holds it below the static budget."""
        self.cuts = 0
        """Times that pressure lowered it."""

    def deadline(self) -> float:
        """When to measure next, seconds on the clock of ``now``."""
        return self._next_at

    def wait(self, now: float, seconds: float | None = None) -> None:
        """Look again after so many seconds, or after the usual interval."""
        self._next_at = now + (self._interval_s if seconds is None else seconds)

    def on(self, memory: MemoryMeasured, now: float) -> list[SetBudget]:
        """Take a measurement; a change of the target comes back, at most one."""
        self._next_at = now + self._interval_s
        before = self.target_bytes
        static = static_budget(self._limits, memory)
        self._take_pressure(memory, now)
        if self.lowered:
            self._recover(memory, static, now)
        if not self.lowered and (static < self.target_bytes or self._worth_a_rise(static)):
            self.target_bytes = static
        self.target_bytes = min(self.target_bytes, static)
        return [] if self.target_bytes == before else [SetBudget(self.target_bytes)]

    def _take_pressure(self, memory: MemoryMeasured, now: float) -> None:
        limits = self._limits
        if memory.available_bytes >= limits.reserve_bytes / 2:
            return
        self._calm_since = None
        if now < self._settled_at:
            return
        missing = limits.reserve_bytes - memory.available_bytes
        cut = max(limits.floor_bytes, min(self.target_bytes, memory.store_bytes) - missing)
        self._settled_at = now + self._settle_s
        self.lowered = True
        if cut < self.target_bytes:
            self.target_bytes = cut
            self.cuts += 1

    def _recover(self, memory: MemoryMeasured, static: int, now: float) -> None:
        spare = memory.available_bytes - self._limits.reserve_bytes
        if spare <= 0:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < self._recovery_s:
            return
        self._calm_since = now
        # Room that the store has and does not use will be taken from what is available, too.
        unused = max(0, self.target_bytes - memory.store_bytes)
        rise = max(0, spare - unused) // 2
        if rise >= STEP_BYTES or self.target_bytes + rise >= static:
            self.target_bytes = min(static, self.target_bytes + rise)
        self.lowered = self.target_bytes < static

    def _worth_a_rise(self, static: int) -> bool:
        return static - self.target_bytes >= STEP_BYTES or static == self._limits.ceiling_bytes
