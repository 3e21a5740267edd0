"""What a frame is made of: everything of the fleet's view that is shown, taken at one moment, never changed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dashboard.fleet_view import REFUSED_SUFFIX, BusState, FleetView, NodeEntry, PeerOnly
from dashboard.jobs import JobEntry
from dashboard.records import Record
from dashboard.series import Bucket
from wire.events import EvictionEvent, LogEvent, RequestEvent, SecurityEvent, TransferEvent

RETURN_TOLD_S: Final = 15.0
"""How long the return of the bus is told."""


@dataclass(frozen=True, slots=True)
class BusNews:
    """``silent_s``: since the last message, 0 before the first. ``back_after_s``: how long it was silent, when it has just
    returned, else 0. ``hint``: what to do while nothing is heard."""

    state: BusState = BusState.WAITING
    silent_s: float = 0.0
    back_after_s: float = 0.0
    hint: str = ""


class BusWatch:
    """Remembers silences of the bus, so that its return can be told. Sans-IO."""

    def __init__(self) -> None:
        self._silent_since: float | None = None
        self._back_at = float("-inf")
        self._silence_s = 0.0

    def observe(self, state: BusState, last_message_at: float | None, now: float, hint: str = "") -> BusNews:
        """News as of now."""
        silent_s = max(0.0, now - last_message_at) if last_message_at is not None else 0.0
        if state is BusState.SILENT:
            if self._silent_since is None:
                self._silent_since = now - silent_s
        elif state is BusState.LIVE and self._silent_since is not None:
            self._silence_s = now - self._silent_since
            self._back_at = now
            self._silent_since = None
        told = self._silence_s if state is BusState.LIVE and now - self._back_at < RETURN_TOLD_S else 0.0
        return BusNews(state, silent_s, told, hint)


@dataclass(frozen=True, slots=True)
class Picture:
    """The view at ``now``; all times are seconds on the same clock."""

    now: float
    bus: BusNews = BusNews()
    nodes: tuple[NodeEntry, ...] = ()
    unheard: tuple[PeerOnly, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    jobs_active: tuple[JobEntry, ...] = ()
    jobs_ended: tuple[JobEntry, ...] = ()
    requests: tuple[Record[RequestEvent], ...] = ()
    transfers: tuple[Record[TransferEvent], ...] = ()
    evictions: tuple[Record[EvictionEvent], ...] = ()
    security: tuple[Record[SecurityEvent], ...] = ()
    logs: tuple[Record[LogEvent], ...] = ()
    refusals: int = 0
    """Heard since this reader started."""
    buckets: tuple[Bucket, ...] = ()
    step_s: float = 5.0
    ttft_s: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """By source: (sum of the times to first token, how many)."""
    lost: int = 0
    """Messages that this reader knows it missed."""


def take(view: FleetView, now: float, bus: BusNews = BusNews(), lost: int = 0) -> Picture:
    """A picture of the view. Quick: records are shared, not copied."""
    step_s, buckets = view.series(now)
    return Picture(
        now=now,
        bus=bus,
        nodes=tuple(view.nodes(now)),
        unheard=tuple(view.unheard()),
        totals=dict(view.totals()),
        jobs_active=tuple(view.jobs.active()),
        jobs_ended=tuple(view.jobs.ended()),
        requests=tuple(view.requests.newest()),
        transfers=tuple(view.transfers.newest()),
        evictions=tuple(view.evictions.newest()),
        security=tuple(view.security.newest()),
        logs=tuple(view.logs.newest()),
        refusals=sum(count for kind, count in view.security_counts.items() if kind.endswith(REFUSED_SUFFIX)),
        buckets=tuple(buckets),
        step_s=step_s,
        ttft_s={source: (histogram.sum, histogram.count) for source, histogram in view.ttft().items()},
        lost=lost,
    )
