"""Server-sent events: the answers of the API, sent again when they change.

Every event is ``event: TOPIC`` with the data ``{"type": TOPIC, "data": <the same as its route>}``. What was made for one
reader is used for all, so a hundred open pages cost little more than one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dashboard import api_types as api
from dashboard import present
from dashboard import routes_activity as activity
from dashboard import routes_benchmarks as benchmarks
from dashboard import routes_network as network
from dashboard.http import Call, encode_json
from dashboard.services import Services
from wire.errors import CapacityError

READERS_MAX: Final = 24
"""Each open stream holds a thread of the server."""
KEEP_ALIVE_S: Final = 10.0
STREAM_S: Final = 3600.0
"""A stream ends after this time; readers connect again by themselves."""
LIST_ITEMS: Final = 50
SERIES_POINTS: Final = 3
"""The newest buckets, which may still change; the others come from the route."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Topic:
    """``every_s``: not sent more often. ``subjects``: revisions of the view that say whether it changed; "" always."""

    handler: Callable[[Call], Any]
    every_s: float
    subjects: tuple[str, ...]


def _latest_series(call: Call) -> api.Series:
    step_s, buckets = call.services.fleet.read(lambda view, now: view.series(now))
    return present.series(step_s, buckets[-SERIES_POINTS:], call.services.fleet.unix_time)


TOPICS: Final[Mapping[str, Topic]] = {
    "summary": Topic(network.summarise, 5.0, ()),
    "nodes": Topic(network.nodes, 1.0, ("nodes",)),
    "groups": Topic(network.groups, 2.0, ("nodes",)),
    "kvfs": Topic(network.kvfs, 2.0, ("nodes",)),
    "jobs": Topic(activity.jobs, 0.5, ("jobs",)),
    "requests": Topic(activity.requests, 1.0, ("requests",)),
    "transfers": Topic(activity.transfers, 1.0, ("transfers",)),
    "evictions": Topic(activity.evictions, 1.0, ("evictions",)),
    "security": Topic(activity.security, 1.0, ("security",)),
    "series": Topic(_latest_series, 5.0, ("series",)),
    "bus": Topic(activity.bus, 1.0, ()),
    "benchmarks": Topic(benchmarks.live, 1.0, ("",)),
}
"""No subjects: sent at every interval, since its content ages by itself; ``""``: depends on the kept state only."""


class LiveEvents:
    """Makes and shares events.

    Args:
        readers_max: streams that may be open at once.
    """

    def __init__(self, services: Services, *, readers_max: int = READERS_MAX) -> None:
        self._services = services
        self._lock = threading.Lock()
        self._made: dict[tuple[str, bool], tuple[float, tuple[int, ...], bytes]] = {}
        self._readers = threading.BoundedSemaphore(readers_max)

    def once(self, admin: bool) -> bytes:
        """One summary."""
        return self._event("summary", admin)[1]

    def stream(self, topics: tuple[str, ...], admin: bool) -> Iterator[bytes]:
        """Events until the reader goes away or the server stops.

        Raises:
            CapacityError: too many readers.
        """
        if not self._readers.acquire(blocking=False):
            raise CapacityError("too many live readers", remedy="try again later, or read the routes")
        return _Stream(self._events(topics, admin), self._readers.release)

    def _events(self, topics: tuple[str, ...], admin: bool) -> Iterator[bytes]:
        fleet = self._services.fleet
        end = fleet.clock() + STREAM_S
        due = dict.fromkeys(topics, 0.0)
        sent: dict[str, tuple[int, ...]] = {}
        quiet_since = fleet.clock()
        yield b"retry: 3000\n\n"
        while not fleet.closed and (now := fleet.clock()) < end:
            for topic in topics:
                if now < due[topic]:
                    continue
                due[topic] = now + TOPICS[topic].every_s
                version, event = self._event(topic, admin)
                if not TOPICS[topic].subjects or sent.get(topic) != version:
                    sent[topic] = version
                    quiet_since = now
                    yield event
            if now - quiet_since > KEEP_ALIVE_S:
                quiet_since = now
                yield b": still here\n\n"
            fleet.wait_closed(max(0.01, min(due.values()) - fleet.clock()))

    def _event(self, topic: str, admin: bool) -> tuple[tuple[int, ...], bytes]:
        """(version, event), made anew when it may have changed and the last one is not quite new."""
        kind = TOPICS[topic]
        fleet = self._services.fleet
        with self._lock:
            made = self._made.get((topic, admin))
            now = fleet.clock()
            if made is not None and now - made[0] < kind.every_s / 2:
                return made[1], made[2]
            version = self._version(kind)
            if made is not None and kind.subjects and made[1] == version:
                return made[1], made[2]
            call = Call(self._services, admin, None, api.LimitQuery(limit=LIST_ITEMS), {})
            data = encode_json({"type": topic, "data": kind.handler(call)})
            event = b"event: " + topic.encode() + b"\ndata: " + data + b"\n\n"
            self._made[topic, admin] = (now, version, event)
            return version, event

    def _version(self, kind: Topic) -> tuple[int, ...]:
        subjects = [subject for subject in kind.subjects if subject]
        seen = self._services.fleet.read(lambda view, now: tuple(view.revisions[subject] for subject in subjects))
        return (self._services.state.changes, *seen)


class _Stream(Iterator[bytes]):
    """An iterator that gives its place back when it is closed, also when it was never begun; an error just ends it."""

    def __init__(self, events: Iterator[bytes], release: Callable[[], None]) -> None:
        self._events = events
        self._release: Callable[[], None] | None = release

    def __next__(self) -> bytes:
        try:
            return next(self._events)
        except StopIteration:
            self.close()
            raise
        except Exception as error:  # the status is sent already; the reader connects again and is told then
            self.close()
            _log.error("live events ended: %s", type(error).__name__)
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
