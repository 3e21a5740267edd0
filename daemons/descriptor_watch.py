"""Looks after the file descriptors of a node's process: how many it has open of how many it may, and what that allows.

A process without free descriptors accepts no connection, opens no transfer and writes no file. libzmq then tries to accept
again at once and without end, and would tell its monitor so each time, without bound; so nobody listens to that, and one
look an interval tells it instead.

Nobody else can bring it about by connecting: what the bound sockets hold together (``connections_bound``) fits into the
limit, with room for the node's own business.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from kakeya_zmq.io.connections import REFUSED_NO_DESCRIPTOR
from kakeya_zmq.io.descriptors import descriptors_open
from kakeya_zmq.io.reactor import Reactor

LOOK_S: Final = 5.0
WARNING_SHARE: Final = 0.8
FREE_MIN: Final = 8
"""With fewer than these it is out of them: they come and go between two looks."""
SHARES: Final = 5
"""Control port and bus, both twice while a PSK is changed, and what is left for files, transfers and other nodes."""
CONNECTIONS_MIN: Final = 16
OUT_OF_THEM: Final = "this process is out of file descriptors"


class DescriptorLevel(Enum):
    """How many are open: few, most of the limit, all."""

    OK = "ok"
    WARNING = "warning"
    EXHAUSTED = "exhausted"


def connections_bound(wanted: int, limit: int) -> int:
    """How many connections one bound socket may hold: as many as wanted, where the limit on open files has room for that.

    Args:
        limit: descriptors that the process may have; 0 for no limit that is known.
    """
    return min(wanted, max(CONNECTIONS_MIN, limit // SHARES)) if limit else wanted


def level_of(used: int, limit: int) -> DescriptorLevel:
    """``limit``: 0 for no limit that is known."""
    if not limit or used < WARNING_SHARE * limit:
        return DescriptorLevel.OK
    return DescriptorLevel.WARNING if used < limit - FREE_MIN else DescriptorLevel.EXHAUSTED


class DescriptorWatch:
    """On the reactor's thread, for as long as that runs.

    Args:
        limit: descriptors that the process may have; 0 for no limit that is known.
        note: told (level, line) of each change.
        refused: told a reason with each look at which none was free: connections wait then, or have been given up.
        count: how many are open, None where the system does not say; raises OSError when none is free for looking.
    """

    def __init__(
        self,
        reactor: Reactor,
        limit: int,
        *,
        note: Callable[[str, str], None],
        refused: Callable[[str], None],
        count: Callable[[], int | None] = descriptors_open,
    ) -> None:
        self.limit = limit
        self.used = 0
        """At the last look."""
        self.level = DescriptorLevel.OK
        self._note = note
        self._refused = refused
        self._count = count
        self._look_at = reactor.clock()
        reactor.add_deadline_source(lambda: self._look_at, self._look)

    @property
    def trouble(self) -> str:
        """Why the node is of no use now, or empty."""
        return OUT_OF_THEM if self.level is DescriptorLevel.EXHAUSTED else ""

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_S
        try:
            self.used = self._count() or 0
            level = level_of(self.used, self.limit)
        except OSError:
            self.used, level = self.limit, DescriptorLevel.EXHAUSTED
        if level is DescriptorLevel.EXHAUSTED:
            self._refused(REFUSED_NO_DESCRIPTOR)
        if level is not self.level:
            self.level = level
            self._tell_change()

    def _tell_change(self) -> None:
        text = f"file descriptors of this process: {self.level.value} ({self.used} of {self.limit})"
        if self.level is DescriptorLevel.EXHAUSTED:
            text += "; no connection is accepted until there are free ones"
        self._note("info" if self.level is DescriptorLevel.OK else "warning", text)
