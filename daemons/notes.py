"""Noteworthy events of a node: logged, told, and the latest remembered."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kakeya_zmq.telemetry import Counters
from wire.limits import TEXT_CHARACTERS_MAX
from wire.text import clean

NOTES_KEPT = 100
NOTE_REPEAT_SECONDS = 10.0
"""The same line is logged at most this often: a stranger knocking must not fill the log."""


class Notes:
    """The notes of one node.

    Args:
        clock: monotonic seconds.
        log: where they are logged.
        counters: counts repetitions.
        told: level and line of each one that is logged.
    """

    def __init__(
        self, clock: Callable[[], float], log: logging.Logger, counters: Counters, told: Callable[[str, str], None]
    ) -> None:
        self._clock = clock
        self._log = log
        self._counters = counters
        self._told = told
        self._times: dict[str, float] = {}
        self._kept: deque[str] = deque(maxlen=NOTES_KEPT)

    @property
    def recent(self) -> tuple[str, ...]:
        """The latest lines with their times of day, oldest first."""
        return tuple(self._kept)

    def add(self, level: str, text: str) -> None:
        """Remember and log one noteworthy event; repetitions within a short time are only counted."""
        now = self._clock()
        # Much of it was written by others: a peer's name, its reason, its error.
        line = clean(text)[:TEXT_CHARACTERS_MAX]
        if now - self._times.get(line, float("-inf")) < NOTE_REPEAT_SECONDS:
            self._counters.add("notes_repeated")
            return
        if len(self._times) >= NOTES_KEPT:
            self._times.clear()
        self._times[line] = now
        self._kept.append(f"{time.strftime('%H:%M:%S')} {line}"[:TEXT_CHARACTERS_MAX])
        self._log.log({"info": logging.INFO, "warning": logging.WARNING}.get(level, logging.ERROR), "%s", line)
        self._told(level, line)
