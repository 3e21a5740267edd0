"""What a reader of the telemetry bus knows of the fleet. Sans-IO: messages and the time go in, values come out.

Rules
    * All times are seconds on the reader's own monotonic clock, passed in; wall clocks of nodes decide nothing.
    * A node is *stale* when it was silent for three of its intervals, and gone (removed) after its time to live.
    * The bus loses messages silently. Whatever can be told by counters is told by counters (:mod:`dashboard.ledger`), since
      the next snapshot makes up for a lost one; single events only fill lists, charts of rates, and histograms.
    * Memory is bounded whatever arrives: nodes, jobs, rings, names and buckets all have a limit.

Theory of operation
    :meth:`FleetView.on` takes one message in, :meth:`FleetView.on_tick` lets time act (call it about once a second). Readers
    ask for values, which are frozen or copies. ``revisions`` has a number for each subject that grows whenever something of
    it changed, so that a face can tell what to draw again. One thread at a time; :mod:`dashboard.hub` adds the lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from dashboard.figures import bounded
from dashboard.jobs import JobBoard
from dashboard.ledger import CounterLedger, countable
from dashboard.records import TTFT_BOUNDS_S, Histogram, RequestRing, Ring
from dashboard.series import Bucket, TimeSeries
from wire.bus import BusMessage
from wire.errors import RemoteProtocolError
from wire.events import (
    EvictionEvent,
    JobEvent,
    LogEvent,
    NodeSnapshot,
    RequestEvent,
    SecurityEvent,
    SecurityKind,
    TransferEvent,
    decode_event,
)

STALE_INTERVALS: Final = 3
DEFAULT_INTERVAL_MS: Final = 2_000
DEFAULT_TTL_MS: Final = 120_000
"""Of a node whose snapshot has not come yet."""
INTERVAL_MS_MAX: Final = 60_000
TTL_MS_MAX: Final = 3_600_000
REPLAY_S: Final = 3.0
"""Requests that a node tells so soon after it was first heard are its past, told again because we joined."""
SOURCES: Final = ("computed", "hot", "remote_cache", "worker", "live")
"""Where a prompt's KV may come from; whatever else a node says is counted as :data:`OTHER_SOURCE`."""
OTHER_SOURCE: Final = "other"
SECURITY_KINDS_MAX: Final = 64
REFUSED_SUFFIX: Final = "_refused"
"""Of the security kinds, those with this ending are charted as refusals; a node that appeared is none."""
BUS_ADDRESSES_MAX: Final = 1024
HERE: Final = "(here)"
"""Who tells what this reader itself has noticed; no node may have that name."""
FINE_STEP_S: Final = 5.0
COARSE_STEP_S: Final = 300.0
GROWN: Final = ("prefill.tokens_reused", "prefill.tokens_computed", "prefill.tokens_generated")
"""Counters whose increases are charted, under the name after the dot."""


class NodeStatus(StrEnum):
    ONLINE = "online"
    STALE = "stale"


class BusState(StrEnum):
    """``waiting``: nothing was ever heard; ``silent``: nothing for three intervals of the most talkative node."""

    WAITING = "waiting"
    LIVE = "live"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class ViewLimits:
    """How much is remembered."""

    nodes: int = 1024
    requests: int = 500
    transfers: int = 500
    evictions: int = 256
    security: int = 256
    logs: int = 500
    fine_buckets: int = 720
    """One hour."""
    coarse_buckets: int = 288
    """One day."""


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One node. ``snapshot`` is None until the first one has come. ``silent_s``: since anything was heard of it."""

    node_id: str
    incarnation: int
    status: NodeStatus
    snapshot: NodeSnapshot | None
    silent_s: float
    first_heard_at: float
    restarts: int

    @property
    def roles(self) -> tuple[str, ...]:
        return self.snapshot.roles if self.snapshot is not None else ()

    def figure(self, section: str, name: str) -> float:
        """A number of the node's snapshot, within bounds; 0 when it has none of that name."""
        value = self.snapshot.sections.get(section, {}).get(name) if self.snapshot is not None else None
        return bounded(value) if isinstance(value, int | float) else 0


@dataclass(frozen=True, slots=True)
class PeerOnly:
    """A node that others know and that has not been heard here: its bus can't be reached, or not yet."""

    node_id: str
    roles: tuple[str, ...]
    told_by: str
    bus_address: str


@dataclass(slots=True)
class _Node:
    incarnation: int
    first_heard_at: float
    heard_at: float
    snapshot: NodeSnapshot | None = None
    restarts: int = 0

    @property
    def interval_s(self) -> float:
        interval_ms = self.snapshot.interval_ms if self.snapshot is not None else DEFAULT_INTERVAL_MS
        return min(max(interval_ms, 50), INTERVAL_MS_MAX) / 1000

    @property
    def ttl_s(self) -> float:
        ttl_ms = self.snapshot.ttl_ms if self.snapshot is not None else DEFAULT_TTL_MS
        return max(min(ttl_ms, TTL_MS_MAX) / 1000, STALE_INTERVALS * self.interval_s)

    def status(self, now: float) -> NodeStatus:
        silent = now - self.heard_at > STALE_INTERVALS * self.interval_s
        return NodeStatus.STALE if silent else NodeStatus.ONLINE


@dataclass(slots=True)
class _Charts:
    fine: TimeSeries
    coarse: TimeSeries
    ttft: dict[str, Histogram] = field(default_factory=dict)

    def add(self, name: str, amount: float, now: float) -> None:
        self.fine.add(name, amount, now)
        self.coarse.add(name, amount, now)

    def put(self, name: str, value: float, now: float) -> None:
        self.fine.put(name, value, now)
        self.coarse.put(name, value, now)


class FleetView:
    """The fleet as its telemetry tells it."""

    def __init__(self, limits: ViewLimits = ViewLimits()) -> None:
        self.counters: Counter[str] = Counter()
        """``messages``, ``malformed``, ``old`` (of an incarnation that has ended), ``nodes_refused`` (too many), ``refused``
        (under a name that is not its sender's)."""
        self.revisions: Counter[str] = Counter()
        """By subject: nodes, jobs, requests, transfers, evictions, security, logs, series."""
        self.ledger = CounterLedger()
        self.jobs = JobBoard()
        self.requests = RequestRing(limits.requests)
        self.transfers: Ring[TransferEvent] = Ring(limits.transfers)
        self.evictions: Ring[EvictionEvent] = Ring(limits.evictions)
        self.security: Ring[SecurityEvent] = Ring(limits.security)
        self.logs: Ring[LogEvent] = Ring(limits.logs)
        self.security_counts: Counter[str] = Counter()
        """Security events by kind, since this reader started."""
        self.last_message_at: float | None = None
        self._limits = limits
        self._nodes: dict[str, _Node] = {}
        self._statuses: dict[str, NodeStatus] = {}
        self._charts = _Charts(
            TimeSeries(step_s=FINE_STEP_S, length=limits.fine_buckets),
            TimeSeries(step_s=COARSE_STEP_S, length=limits.coarse_buckets),
        )

    # --- in ----------------------------------------------------------------------------------------------------------

    def on(self, message: BusMessage, now: float) -> None:
        """Take note of one authentic bus message; a malformed one is counted and dropped."""
        self.counters["messages"] += 1
        try:
            event = decode_event(message.topic, message.payload)
        except RemoteProtocolError:
            self.counters["malformed"] += 1
            return
        node = self._heard(str(message.node_id), message.incarnation, now)
        if node is None:
            return
        node_id = str(message.node_id)
        match event:
            case NodeSnapshot():
                self._on_snapshot(node_id, node, event, now)
            case JobEvent():
                if self.jobs.on(node_id, node.incarnation, event, now):
                    self.revisions["jobs"] += 1
            case RequestEvent():
                self._on_request(node_id, node, event, now)
            case TransferEvent():
                self.transfers.add(now, node_id, event)
                self.revisions["transfers"] += 1
                self._charts.add("transfers", 1, now)
                self._charts.add("bytes_in" if event.direction == "in" else "bytes_out", event.payload_bytes, now)
            case EvictionEvent():
                self.evictions.add(now, node_id, event)
                self.revisions["evictions"] += 1
                self._charts.add("bytes_evicted", event.size_bytes, now)
            case SecurityEvent():
                self._on_security(node_id, event, now)
            case LogEvent():
                self.logs.add(now, node_id, event)
                self.revisions["logs"] += 1

    def refuse(self, node_id: str, reason: str, count: int, now: float) -> None:
        """Messages came under the name of a node and were not taken: a refusal, and nothing of that node's.

        Args:
            reason: fixed text.
        """
        self.counters["refused"] += count
        kind = SecurityKind.TELEMETRY_REFUSED
        self._on_security(HERE, SecurityEvent(kind=kind, subject=node_id, count=count, text=reason), now)

    def forget(self, node_id: str, now: float) -> None:
        """Another key stands for the name from now on: nothing that was told under it goes on."""
        if node_id in self._nodes:
            self._remove(node_id, now)
        self.ledger.restart(node_id)

    def on_tick(self, now: float) -> None:
        """Let time act: nodes turn stale and vanish, jobs without an end are closed, states are charted."""
        for node_id in [name for name, node in self._nodes.items() if now - node.heard_at > node.ttl_s]:
            self._remove(node_id, now)
        statuses = {node_id: node.status(now) for node_id, node in self._nodes.items()}
        if statuses != self._statuses:
            self._statuses = statuses
            self.revisions["nodes"] += 1
        before = self.jobs.changes
        self.jobs.on_tick(now)
        self.revisions["jobs"] += self.jobs.changes != before
        self._chart_states(now)
        self.revisions["series"] += 1

    # --- out ---------------------------------------------------------------------------------------------------------

    def nodes(self, now: float) -> list[NodeEntry]:
        """Primaries first, then by name."""
        entries = [self._entry(node_id, node, now) for node_id, node in self._nodes.items()]
        return sorted(entries, key=lambda entry: ("primary" not in entry.roles, entry.node_id))

    def node(self, node_id: str, now: float) -> NodeEntry | None:
        node = self._nodes.get(node_id)
        return self._entry(node_id, node, now) if node is not None else None

    def unheard(self) -> list[PeerOnly]:
        """Nodes that somebody here is connected to or knows, and that are not heard on any bus."""
        found: dict[str, PeerOnly] = {}
        for teller, node in self._nodes.items():
            for peer in node.snapshot.peers if node.snapshot is not None else ():
                if peer.node_id not in self._nodes and len(found) < self._limits.nodes:
                    found.setdefault(peer.node_id, PeerOnly(peer.node_id, peer.roles, teller, peer.bus_address))
        return [found[node_id] for node_id in sorted(found)]

    def bus_addresses(self) -> frozenset[str]:
        """Where the buses of all nodes listen that some node here knows (``host:port``), for the feed to connect to."""
        found: set[str] = set()
        for node in self._nodes.values():
            for peer in node.snapshot.peers if node.snapshot is not None else ():
                if peer.bus_address and len(found) < BUS_ADDRESSES_MAX:
                    found.add(peer.bus_address)
        return frozenset(found)

    def bus_state(self, now: float) -> BusState:
        if self.last_message_at is None:
            return BusState.WAITING
        interval_s = min((node.interval_s for node in self._nodes.values()), default=DEFAULT_INTERVAL_MS / 1000)
        # A fleet that tells itself many times a second must not look silent at the first hiccup.
        allowed_s = STALE_INTERVALS * max(interval_s, 1.0)
        return BusState.SILENT if now - self.last_message_at > allowed_s else BusState.LIVE

    def totals(self) -> dict[str, int]:
        """Counters over the fleet as ``section.figure``; they never go backwards."""
        return self.ledger.totals()

    def series(self, now: float, *, coarse: bool = False) -> tuple[float, list[Bucket]]:
        """(seconds of a bucket, buckets oldest first). Figures of a bucket, each missing when there was nothing:

        ``tokens_reused``, ``tokens_computed``, ``tokens_generated``, ``bytes_in``, ``bytes_out``, ``transfers``,
        ``bytes_evicted``, ``refusals``, ``requests``, ``decode_tps_sum`` and ``decode_count``, ``ttft_ms_sum.SOURCE`` and
        ``ttft_count.SOURCE``: sums; ``nodes_online``, ``cache_bytes_used``, ``cache_bytes_max``, ``jobs_active``: states.
        """
        chosen = self._charts.coarse if coarse else self._charts.fine
        return chosen.step_s, chosen.buckets(now)

    def ttft(self) -> dict[str, Histogram]:
        """Times to first token in seconds by source, since this reader started."""
        return self._charts.ttft

    # --- parts -------------------------------------------------------------------------------------------------------

    def _entry(self, node_id: str, node: _Node, now: float) -> NodeEntry:
        silent_s = max(0.0, now - node.heard_at)
        return NodeEntry(
            node_id, node.incarnation, node.status(now), node.snapshot, silent_s, node.first_heard_at, node.restarts
        )

    def _heard(self, node_id: str, incarnation: int, now: float) -> _Node | None:
        """The node, made known and marked as heard; None when the message is not to be used."""
        node = self._nodes.get(node_id)
        if node is None:
            if len(self._nodes) >= self._limits.nodes and not self._make_room(now):
                self.counters["nodes_refused"] += 1
                return None
            node = self._nodes[node_id] = _Node(incarnation, now, now)
            self.revisions["nodes"] += 1
        elif incarnation < node.incarnation:
            self.counters["old"] += 1
            return None
        elif incarnation > node.incarnation:
            node.incarnation = incarnation
            node.first_heard_at = now
            node.restarts += 1
            node.snapshot = None
            self.jobs.node_restarted(node_id, incarnation, now)
            self.revisions["nodes"] += 1
            self.revisions["jobs"] += 1
        node.heard_at = self.last_message_at = now
        return node

    def _make_room(self, now: float) -> bool:
        silent = [name for name, node in self._nodes.items() if node.status(now) is NodeStatus.STALE]
        if not silent:
            return False
        self._remove(min(silent, key=lambda name: self._nodes[name].heard_at), now)
        return True

    def _remove(self, node_id: str, now: float) -> None:
        del self._nodes[node_id]
        self.jobs.node_gone(node_id, now)
        self.revisions["nodes"] += 1
        self.revisions["jobs"] += 1

    def _on_snapshot(self, node_id: str, node: _Node, snapshot: NodeSnapshot, now: float) -> None:
        node.snapshot = snapshot
        self.revisions["nodes"] += 1
        grown = self.ledger.observe(node_id, node.incarnation, countable(snapshot.sections))
        for name in GROWN:
            if name in grown:
                self._charts.add(name.partition(".")[2], grown[name], now)
        before = self.jobs.changes
        self.jobs.worker_told(node_id, snapshot.worker, now)
        self.revisions["jobs"] += self.jobs.changes != before

    def _on_request(self, node_id: str, node: _Node, event: RequestEvent, now: float) -> None:
        replayed = now - node.first_heard_at < REPLAY_S
        known = self.requests.add(now, node_id, event, replayed=replayed)
        if known is event:
            return
        self.revisions["requests"] += 1
        if replayed:
            return
        if known is None:
            self._charts.add("requests", 1, now)
        if event.ttft_ms > 0 and (known is None or known.ttft_ms == 0):
            source = event.source if event.source in SOURCES else OTHER_SOURCE
            self._charts.add(f"ttft_ms_sum.{source}", event.ttft_ms, now)
            self._charts.add(f"ttft_count.{source}", 1, now)
            self._charts.ttft.setdefault(source, Histogram(TTFT_BOUNDS_S)).add(event.ttft_ms / 1000)
        if event.decode_tokens_per_second > 0 and (known is None or known.decode_tokens_per_second == 0):
            self._charts.add("decode_tps_sum", event.decode_tokens_per_second, now)
            self._charts.add("decode_count", 1, now)

    def _on_security(self, node_id: str, event: SecurityEvent, now: float) -> None:
        self.security.add(now, node_id, event)
        self.revisions["security"] += 1
        kind = event.kind
        if kind not in self.security_counts and len(self.security_counts) >= SECURITY_KINDS_MAX:
            kind = "other"
        self.security_counts[kind] += event.count
        if event.kind.endswith(REFUSED_SUFFIX):
            self._charts.add("refusals", event.count, now)

    def _chart_states(self, now: float) -> None:
        used = limit = online = 0.0
        for node_id, node in self._nodes.items():
            if node.status(now) is not NodeStatus.ONLINE:
                continue
            online += 1
            entry = self._entry(node_id, node, now)
            used += entry.figure("cache", "bytes_used")
            limit += entry.figure("cache", "max_bytes")
        self._charts.put("nodes_online", online, now)
        self._charts.put("cache_bytes_used", used, now)
        self._charts.put("cache_bytes_max", limit, now)
        self._charts.put("jobs_active", self.jobs.active_count, now)
