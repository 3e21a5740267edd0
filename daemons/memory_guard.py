"""Keeps the process of a model from taking the whole machine: levels, and what follows from them.

``ok`` < warning ≤ ``warning`` < drain ≤ ``drain`` < unhealthy ≤ ``unhealthy``. From ``drain`` on no new sessions and jobs
are taken; from ``unhealthy`` on the health endpoint says so, too. What counts is what the model library holds or what the
process has resident, whichever is more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kakeya_zmq.config import Settings
from kakeya_zmq.options import OPTIONS
from kakeya_zmq.telemetry import Value
from wire.limits import GIB

REFERENCE_BYTES: Final = 24 * GIB
"""The machine for which the default levels are made; on others they are in proportion."""
USABLE_SHARE: Final = 0.9
"""Of a machine's memory: a level above it could never be reached."""
_NAMES: Final = ("memory_warning_gb", "memory_drain_gb", "memory_unhealthy_gb")


class MemoryLevel(StrEnum):
    OK = "ok"
    WARNING = "warning"
    DRAIN = "drain"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class MemoryLevels:
    """Where each level begins, in bytes."""

    warning_bytes: int
    drain_bytes: int
    unhealthy_bytes: int

    def level(self, held_bytes: int) -> MemoryLevel:
        if held_bytes >= self.unhealthy_bytes:
            return MemoryLevel.UNHEALTHY
        if held_bytes >= self.drain_bytes:
            return MemoryLevel.DRAIN
        return MemoryLevel.WARNING if held_bytes >= self.warning_bytes else MemoryLevel.OK


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process of a model holds, in bytes; ``cached_bytes``: kept by the model library for reuse."""

    active_bytes: int = 0
    cached_bytes: int = 0
    resident_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return max(self.active_bytes + self.cached_bytes, self.resident_bytes)


def memory_levels(settings: Settings, physical_bytes: int) -> MemoryLevels:
    """The configured levels for a machine of this size.

    Defaults are scaled in proportion to the machine, up or down. Levels that somebody set are taken as they are, unless the
    highest lies above what the machine can give: then all are scaled down together.
    """
    wanted = [float(getattr(settings, name)) * GIB for name in _NAMES]
    defaults = {option.name: option.default for option in OPTIONS}
    if all(getattr(settings, name) == defaults[name] for name in _NAMES):
        scale = physical_bytes / REFERENCE_BYTES
    else:
        scale = min(1.0, USABLE_SHARE * physical_bytes / wanted[-1])
    warning, drain, unhealthy = (int(level * scale) for level in wanted)
    return MemoryLevels(warning, drain, unhealthy)


class MemoryGuard:
    """Looks at the memory when it is told to, and acts on changes of the level.

    Args:
        measure: what the process holds now.
        active: how many sessions or jobs there are.
        give_back: makes the model library give back what it keeps for reuse.
        limit: told why no new work is to be taken; empty when it may be.
        note: told (level, line) of each change.
    """

    def __init__(
        self,
        levels: MemoryLevels,
        *,
        measure: Callable[[], ProcessMemory],
        active: Callable[[], int],
        give_back: Callable[[], None],
        limit: Callable[[str], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._levels = levels
        self._measure = measure
        self._active = active
        self._give_back = give_back
        self._limit = limit
        self._note = note
        self._was_active = False
        self._given_back = 0
        self._last = ProcessMemory()
        self.level = MemoryLevel.OK

    def look(self) -> None:
        """Measure once. When the last session has left above ``ok``, the library's reserve is given back first."""
        self._last = self._measure()
        level = self._levels.level(self._last.held_bytes)
        active = self._active() > 0
        if level is not MemoryLevel.OK and not active and self._was_active:
            self._give_back()
            self._given_back += 1
            self._last = self._measure()
            level = self._levels.level(self._last.held_bytes)
        self._was_active = active
        if level is not self.level:
            self._change(level)

    def _change(self, level: MemoryLevel) -> None:
        self.level = level
        held_gb = self._last.held_bytes / GIB
        refusing = level in (MemoryLevel.DRAIN, MemoryLevel.UNHEALTHY)
        self._limit(f"memory is nearly full on this node ({level.value}, {held_gb:.1f} GiB)" if refusing else "")
        text = f"memory of this process: {level.value} ({held_gb:.1f} GiB)"
        if refusing:
            text += "; no new sessions and jobs until it is less"
        self._note("info" if level is MemoryLevel.OK else "warning", text)

    def section(self) -> tuple[str, dict[str, Value]]:
        """Figures for the status."""
        return "memory", {
            "level": self.level.value,
            "held_bytes": self._last.held_bytes,
            "mlx_active_bytes": self._last.active_bytes,
            "mlx_cache_bytes": self._last.cached_bytes,
            "resident_bytes": self._last.resident_bytes,
            "warning_bytes": self._levels.warning_bytes,
            "drain_bytes": self._levels.drain_bytes,
            "unhealthy_bytes": self._levels.unhealthy_bytes,
            "caches_cleared": self._given_back,
        }
