"""``kakeya top --json``: every event of the bus as one line of JSON, as it comes.

Lines are ASCII (JSON escapes everything else), so that nothing a node tells can steer the terminal they are shown on.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from dashboard.fleet_view import HERE, BusState
from dashboard.hub import LiveFleet
from wire.bus import BusMessage, Group, Topic
from wire.errors import RemoteProtocolError
from wire.events import SecurityEvent, SecurityKind, decode_event
from wire.text import escape_json

WAITING_MAX: Final = 20_000
"""Messages that wait for a slow reader; then the oldest are dropped, and counted."""
REFUSALS_WAITING_MAX: Final = 1024
TOPICS: Final[Mapping[str, Topic]] = {topic.name.lower(): topic for topic in Topic if topic.group is Group.TELEMETRY}
"""By the name they are chosen with."""


class TappedFleet(LiveFleet):
    """A fleet whose messages can also be had one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0
        self._messages: deque[tuple[BusMessage, float]] = deque()
        self._refusals: deque[tuple[str, str, int, float]] = deque(maxlen=REFUSALS_WAITING_MAX)
        self._arrived = threading.Condition()

    def apply(self, messages: Sequence[tuple[BusMessage, float]]) -> None:
        super().apply(messages)
        with self._arrived:
            self._messages.extend(messages)
            while len(self._messages) > WAITING_MAX:
                self._messages.popleft()
                self.dropped += 1
            self._arrived.notify_all()

    def refuse(self, node_id: str, reason: str, count: int) -> None:
        super().refuse(node_id, reason, count)
        self._refusals.append((node_id, reason, count, self.clock()))

    def take_refusals(self) -> list[tuple[str, str, int, float]]:
        """(under whose name, why, how many messages, when) of all that were refused since the last time."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._refusals.popleft())
        return taken

    def take_messages(self, timeout_s: float) -> list[tuple[BusMessage, float]]:
        """All that came since the last time, waiting at most so long for the first; with each when it came."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._messages), timeout_s)
            taken = list(self._messages)
            self._messages.clear()
            return taken


def event_line(message: BusMessage, at: float) -> str | None:
    """One event; None when the message holds none that can be read.

    Args:
        at: when it came, seconds since the epoch.
    """
    try:
        event = decode_event(message.topic, message.payload)
    except RemoteProtocolError:
        return None
    return _line(
        {
            "at": round(at, 3),
            "topic": message.topic.name.lower(),
            "node": str(message.node_id),
            "incarnation": message.incarnation,
            "sequence": message.sequence,
            "event": _plain(event),
        }
    )


def refusal_line(node_id: str, reason: str, count: int, at: float) -> str:
    """Messages that were not taken, as a security event of this reader."""
    event = SecurityEvent(kind=SecurityKind.TELEMETRY_REFUSED, subject=node_id, count=count, text=reason)
    return _line({"at": round(at, 3), "topic": "security", "node": HERE, "event": _plain(event)})


def bus_line(state: BusState, at: float, lost: int) -> str:
    """A change of the bus. ``lost``: messages that this reader knows it missed so far."""
    return _line({"at": round(at, 3), "topic": "bus", "state": state.value, "lost": lost})


def _line(value: Mapping[str, Any]) -> str:
    return escape_json(json.dumps(value, allow_nan=False))


def _plain(value: Any) -> Any:
    """With all fields, also those at their default; what is no number in JSON is null."""
    if isinstance(value, msgspec.Struct):
        return {field: _plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EventLines:
    """Writes lines for a fleet's messages.

    Args:
        write: takes one line without its end.
        shows: whether a node is wanted.
        topics: which are wanted; all when empty.
        lost: how many messages the feed has missed.
    """

    def __init__(
        self,
        fleet: TappedFleet,
        write: Callable[[str], None],
        *,
        shows: Callable[[str], bool],
        topics: Collection[Topic],
        lost: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._write = write
        self._shows = shows
        self._topics = topics
        self._lost = lost
        self._state: BusState | None = None

    def step(self, timeout_s: float) -> None:
        """Write what has come, waiting at most so long for it, and any change of the bus."""
        for message, at in self._fleet.take_messages(timeout_s):
            # A bus that returns is told before what it brings.
            self._tell_state(at, BusState.LIVE)
            if (not self._topics or message.topic in self._topics) and self._shows(str(message.node_id)):
                line = event_line(message, self._fleet.unix_time(at))
                if line is not None:
                    self._write(line)
        for node_id, reason, count, at in self._fleet.take_refusals():
            if (not self._topics or Topic.SECURITY in self._topics) and self._shows(node_id):
                self._write(refusal_line(node_id, reason, count, self._fleet.unix_time(at)))
        now = self._fleet.clock()
        self._tell_state(now, self._fleet.read(lambda view, at: view.bus_state(at)))

    def _tell_state(self, at: float, state: BusState) -> None:
        if state is not self._state:
            self._state = state
            self._write(bus_line(state, self._fleet.unix_time(at), self._lost() + self._fleet.dropped))
