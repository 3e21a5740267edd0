"""What a node tells on the bus, and when: sans-IO.

The feed sees every event and effect of the node's machines pass by (kakeya_zmq.protocol.effects), and what the node itself
notices. It answers with what to publish.

Rules
- For a topic that nobody listens to nothing is published, and no clock runs.
- Whoever joins late gets the present state: the snapshot, the jobs that have not ended, the last requests. Many joiners at
  once cost one repetition in ``REPLAY_INTERVAL_S``.
- Live events of one topic are limited by a token bucket; a job's end is never held back. What is dropped is counted.
- Evictions and refusals are summed up over a second.
- Nothing that is told holds a prompt, token, hash, key or address; texts go through kakeya_zmq.telemetry.public_text.

Theory of operation
``on`` looks the type of what it is given up in one table of handlers: those of the trackers (jobs, requests, transfers) and
its own. Most types are in none, so that a decoded token costs two look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from kakeya_zmq.protocol.effects import SendFailure, SendReply
from kakeya_zmq.protocol.inference import ExplainPrompt
from kakeya_zmq.telemetry import public_text
from kakeya_zmq.telemetry_feed_jobs import JobBook, LocalPrefills, WorkerJobs
from kakeya_zmq.telemetry_feed_requests import REPLAY_MAX, RequestLog
from kakeya_zmq.telemetry_feed_transfers import TransferLog
from wire.bus import Topic
from wire.errors import LocalProtocolError
from wire.events import (
    TOPIC_OF,
    Event,
    EvictionEvent,
    JobEvent,
    LogEvent,
    RequestEvent,
    SecurityEvent,
    SecurityKind,
    encode_event,
)

SUM_INTERVAL_S: Final = 1.0
SUM_GAP_S: Final = 3.0
"""Figures older than this are no base for a difference: nobody listened meanwhile."""
REPLAY_INTERVAL_S: Final = 0.1
EVENTS_BURST: Final = 256.0
EVENTS_PER_SECOND: Final = 64.0
"""Live events of one topic: a busy fleet makes a few a second; a reader of 200 nodes must be able to follow."""
_BYTES_HEADER: Final = 8
"""More than what a byte string costs besides its content."""
REFUSALS_MAX: Final = 64
"""Different (kind, subject) pairs told of one second; more are summed up by kind."""


# --- events besides those of the machines -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Noted:
    """A noteworthy line: level "info", "warning" or "error"."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Something of security happened. ``subject``: a node id, where one was proven."""

    kind: SecurityKind
    text: str
    subject: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """Answers :class:`TakeFigures`: the store's, of which the first two only grow."""

    evictions: int
    bytes_evicted: int
    bytes_used: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A reader of this topic has just joined."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class Leaving:
    """The node is about to stop."""


@dataclass(frozen=True, slots=True)
class FeedTick:
    """``deadline()`` has passed."""


# --- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publish:
    event: Event


@dataclass(frozen=True, slots=True)
class PublishSnapshot:
    """Publish a fresh :class:`NodeSnapshot`."""


@dataclass(frozen=True, slots=True)
class TakeFigures:
    """Feed :class:`Figures`."""


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """So many events were held back because there were too many."""

    count: int


FeedEffect: TypeAlias = Publish | PublishSnapshot | TakeFigures | EventsDropped
_Handler: TypeAlias = Callable[[Any, float], list[FeedEffect]]


@dataclass(slots=True)
class _Bucket:
    tokens: float = EVENTS_BURST
    filled_at: float = -math.inf

    def take(self, now: float) -> bool:
        self.tokens = min(EVENTS_BURST, self.tokens + max(0.0, now - self.filled_at) * EVENTS_PER_SECOND)
        self.filled_at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class TelemetryFeed:
    """See the module's rules.

    Args:
        wanted: whether anybody listens to a topic.
        tenant: whose prompts the node serves.
        interval_s: time between snapshots.
        random_bytes: makes ids of requests and of local jobs.
    """

    def __init__(
        self,
        *,
        wanted: Callable[[Topic], bool],
        tenant: str,
        interval_s: float,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._wanted = wanted
        self._interval_s = interval_s
        self._book = JobBook(tenant)
        self._requests = RequestLog(random_bytes)
        self._buckets = {topic: _Bucket() for topic in TOPIC_OF.values()}
        self._replay_due: dict[Topic, float] = {}
        self._replayed_at: dict[Topic, float] = {}
        self._snapshot_at = -math.inf
        self._sums_due = -math.inf
        self._figures: tuple[float, Figures] | None = None
        self._refused: dict[tuple[SecurityKind, str], tuple[int, str]] = {}
        self._handlers: dict[type, list[_Handler]] = {
            Noted: [self._noted],
            Refused: [self._note_refusal],
            Figures: [self._take_figures],
            Subscribed: [self._subscribed],
            Leaving: [lambda leaving, now: [PublishSnapshot()] if wanted(Topic.NODE) else []],
            FeedTick: [lambda tick, now: self._due(now)],
        }
        trackers = (WorkerJobs(self._book), LocalPrefills(self._book, random_bytes), self._requests, TransferLog())
        for tracker in trackers:
            for kind, handler in tracker.handlers().items():
                self._handlers.setdefault(kind, []).append(self._telling(handler))

    def on(self, seen: object, now: float) -> list[FeedEffect]:
        """Take note of one event or effect of the node, or one of this module's own events."""
        kind = type(seen)
        handlers = self._handlers.get(kind)
        if kind not in _MAY_FOLLOW_EXPLANATION:
            self._requests.forget_explanation()
        if handlers is None:
            return []
        effects: list[FeedEffect] = []
        for handler in handlers:
            effects += handler(seen, now)
        return effects

    def last_requests(self, count: int) -> tuple[RequestEvent, ...]:
        """The last ``count`` records, oldest first."""
        return self._requests.last(count)

    def deadline(self) -> float | None:
        """When to send a FeedTick, seconds on the clock of ``now``; None while nobody listens."""
        times = list(self._replay_due.values())
        if self._wanted(Topic.NODE):
            times.append(self._snapshot_at + self._interval_s)
        if self._wanted(Topic.JOB) and (due := self._book.deadline()) is not None:
            times.append(due)
        if self._wants_sums():
            times.append(self._sums_due)
        return min(times, default=None)

    # --- what passes by ----------------------------------------------------------------------------------------------

    def _telling(self, handler: Callable[[Any, float], Any]) -> _Handler:
        return lambda seen, now: self._tell(handler(seen, now), now)

    def _tell(self, events: list[Event], now: float) -> list[FeedEffect]:
        """Publish live events, as far as somebody wants them and there are not too many."""
        effects: list[FeedEffect] = []
        dropped = 0
        for event in events:
            topic = TOPIC_OF[type(event)]
            if not self._wanted(topic):
                continue
            if self._buckets[topic].take(now) or _is_job_end(event):
                effects.append(Publish(event))
            else:
                dropped += 1
        return [*effects, EventsDropped(dropped)] if dropped else effects

    def _noted(self, noted: Noted, now: float) -> list[FeedEffect]:
        if not self._wanted(Topic.LOG):
            return []
        return self._tell([LogEvent(level=noted.level, text=public_text(noted.text))], now)

    def _note_refusal(self, refused: Refused, now: float) -> list[FeedEffect]:
        if not self._wanted(Topic.SECURITY):
            return []
        key = (refused.kind, refused.subject)
        if key not in self._refused and len(self._refused) >= REFUSALS_MAX:
            key = (refused.kind, "")
        count, _ = self._refused.get(key, (0, ""))
        self._refused[key] = (count + refused.count, refused.text)
        return []

    def _take_figures(self, figures: Figures, now: float) -> list[FeedEffect]:
        former, self._figures = self._figures, (now, figures)
        if former is None or now - former[0] > SUM_GAP_S:
            return []
        taken_at, before = former
        parts = figures.evictions - before.evictions
        if parts <= 0:
            return []
        event = EvictionEvent(
            parts=parts,
            size_bytes=max(0, figures.bytes_evicted - before.bytes_evicted),
            interval_ms=round((now - taken_at) * 1000),
            bytes_used=figures.bytes_used,
            max_bytes=figures.max_bytes,
        )
        return self._tell([event], now)

    # --- readers -----------------------------------------------------------------------------------------------------

    def _subscribed(self, subscribed: Subscribed, now: float) -> list[FeedEffect]:
        topic = subscribed.topic
        if topic in (Topic.NODE, Topic.JOB, Topic.REQUEST):
            due = max(now, self._replayed_at.get(topic, -math.inf) + REPLAY_INTERVAL_S)
            self._replay_due.setdefault(topic, due)
        if topic in (Topic.EVICTION, Topic.SECURITY) and now - self._sums_due > SUM_GAP_S:
            self._sums_due = now  # the first figures are what later ones are compared with
        return self._due(now)

    # --- time --------------------------------------------------------------------------------------------------------

    def _wants_sums(self) -> bool:
        return self._wanted(Topic.SECURITY) or self._wanted(Topic.EVICTION)

    def _due(self, now: float) -> list[FeedEffect]:
        effects: list[FeedEffect] = []
        for topic in [topic for topic, due in self._replay_due.items() if due <= now]:
            del self._replay_due[topic]
            self._replayed_at[topic] = now
            effects += self._replay(topic, now)
        if self._wanted(Topic.NODE) and now >= self._snapshot_at + self._interval_s:
            self._snapshot_at = now
            effects.append(PublishSnapshot())
        if self._wanted(Topic.JOB):
            effects += self._tell(list(self._book.due(now)), now)
        if self._wants_sums() and now >= self._sums_due:
            self._sums_due = now + SUM_INTERVAL_S
            effects += [TakeFigures(), *self._tell_refusals(now)]
        return effects

    def _replay(self, topic: Topic, now: float) -> list[FeedEffect]:
        match topic:
            case Topic.NODE:
                self._snapshot_at = now
                return [PublishSnapshot()]
            case Topic.JOB:
                return [Publish(event) for event in self._book.present(now)]
            case _:
                return [Publish(event) for event in self._requests.last(REPLAY_MAX)]

    def _tell_refusals(self, now: float) -> list[FeedEffect]:
        refused, self._refused = self._refused, {}
        events: list[Event] = [
            SecurityEvent(kind=kind.value, subject=subject, count=count, text=public_text(text))
            for (kind, subject), (count, text) in refused.items()
        ]
        return self._tell(events, now)


_MAY_FOLLOW_EXPLANATION: Final = frozenset({ExplainPrompt, SendReply, SendFailure, Noted})
"""A host logs an explanation while it carries it out, so a note comes before the answer."""


def _is_job_end(event: Event) -> bool:
    return isinstance(event, JobEvent) and event.state in ("completed", "failed", "cancelled")


# --- bytes -------------------------------------------------------------------------------------------------------------


def encode_fitting(event: Event) -> bytes:
    """The event as it travels; a record that is too long for one message loses its decisions, then most of its reasons.

    Raises:
        LocalProtocolError: it is too large all the same.
    """
    try:
        return encode_event(event)
    except LocalProtocolError:
        if not isinstance(event, RequestEvent):
            raise
    shorter = msgspec.structs.replace(event, decisions=())
    try:
        return encode_event(shorter)
    except LocalProtocolError:
        return encode_event(msgspec.structs.replace(shorter, reasons=shorter.reasons[:4], sources=shorter.sources[:16]))


def encode_last(events: Sequence[Event], bytes_max: int) -> tuple[bytes, ...]:
    """As many of the last events as fit together, oldest first; of one that is too large by itself nothing."""
    encoded: list[bytes] = []
    for event in reversed(events):
        try:
            payload = encode_fitting(event)
        except LocalProtocolError:
            continue
        bytes_max -= len(payload) + _BYTES_HEADER
        if bytes_max < 0:
            break
        encoded.append(payload)
    return tuple(reversed(encoded))
