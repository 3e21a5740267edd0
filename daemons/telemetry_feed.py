"""Publishes what a node tells about itself: the shell around kakeya_zmq.telemetry_feed, on the reactor's thread."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.interfaces import OwnInterfaces
from kakeya_zmq.store import BlockStore
from kakeya_zmq.telemetry_feed import (
    EventsDropped,
    FeedEffect,
    FeedTick,
    Figures,
    Leaving,
    Noted,
    Publish,
    PublishSnapshot,
    Refused,
    Subscribed,
    TakeFigures,
    TelemetryFeed,
    encode_fitting,
    encode_last,
)
from kakeya_zmq.telemetry_feed_snapshot import encode_snapshot, known_peers, make_snapshot
from wire.bus import Topic
from wire.errors import LocalProtocolError
from wire.events import TOPIC_OF, NodeSnapshot, SecurityKind
from wire.limits import ANSWER_BYTES_MAX
from wire.messages import Requests

if TYPE_CHECKING:
    from daemons.node import Node

_log = logging.getLogger(__name__)


class NodeTelemetry:
    """The telemetry of one node.

    Whatever goes wrong in here is counted (``telemetry_failures``) and must not disturb the work it tells of.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._feed = TelemetryFeed(
            wanted=lambda topic: node.endpoints.has_subscribers(topic),
            tenant=node.settings.tenant_id,
            interval_s=node.settings.telemetry_interval_s,
            random_bytes=secrets.token_bytes,
        )
        self._snapshots = 0
        self.interfaces = OwnInterfaces(node.reactor.clock)
        self.link_megabytes_per_second: Callable[[str], float] = lambda node_id: 0.0
        """What was measured of the link from a node, 0 when nothing was; set by roles that measure."""
        node.reactor.add_deadline_source(self._feed.deadline, lambda now: self.observe(FeedTick()))

    # --- what the node tells -----------------------------------------------------------------------------------------

    def observe(self, seen: object) -> None:
        """An event or effect of a machine of this node."""
        try:
            for effect in self._feed.on(seen, self._node.reactor.clock()):
                self._carry_out(effect)
        except Exception as error:  # whatever it is: the node's work goes on
            self._node.counters.add("telemetry_failures")
            _log.error("telemetry failed at %s: %s", type(seen).__name__, describe_exception(error))

    def subscribed(self, topic: Topic) -> None:
        """A reader of the bus has just joined."""
        self.observe(Subscribed(topic))

    def note(self, level: str, text: str) -> None:
        """A line was logged."""
        self.observe(Noted(level, text))

    def security(self, kind: SecurityKind, text: str, subject: str = "") -> None:
        """Something was refused, or somebody joined."""
        self.observe(Refused(kind, text, subject))

    def leave(self) -> None:
        """The node is stopping: readers need not wait until it is stale."""
        self.observe(Leaving())

    def requests(self, count: int) -> Requests:
        """The last records, oldest first: as many as fit into one answer."""
        return Requests(records=encode_last(self._feed.last_requests(count), ANSWER_BYTES_MAX))

    # --- what the feed wants -----------------------------------------------------------------------------------------

    def _carry_out(self, effect: FeedEffect) -> None:
        match effect:
            case Publish(event=event):
                self._publish(TOPIC_OF[type(event)], lambda: encode_fitting(event))
            case PublishSnapshot():
                self._snapshots += 1
                self._publish(Topic.NODE, lambda: encode_snapshot(snapshot_of(self._node), self._snapshots))
            case TakeFigures():
                self.observe(figures_of(self._node.store))
            case EventsDropped(count=count):
                self._node.counters.add("telemetry_events_dropped", count)

    def _publish(self, topic: Topic, encode: Callable[[], bytes]) -> None:
        try:
            payload = encode()
        except LocalProtocolError:  # too large in spite of everything that can be left out
            self._node.counters.add("telemetry_events_dropped")
            return
        self._node.endpoints.publish(topic, payload)


def figures_of(store: BlockStore) -> Figures:
    """What the feed sums up."""
    stats = store.stats()
    return Figures(stats.evictions, stats.bytes_evicted, stats.bytes_used, stats.max_bytes)


def snapshot_of(node: Node) -> NodeSnapshot:
    """The whole present state of a node."""
    now = node.reactor.clock()
    # Digests of the model are for those who hold the PSK.
    sections = {name: figures for name, figures in node.status().sections.items() if name != "compatibility"}
    directory = node.directory
    facts = node.facts
    primary, worker = sections.get("primary", {}), sections.get("worker", {})
    measured = primary.get("local_prefill_tokens_per_second") or worker.get("prefill_tokens_per_second") or 0.0
    return make_snapshot(
        node.describe(0),
        state=node.state,
        uptime_s=float(sections["node"]["uptime_s"] or 0.0),
        interval_s=node.settings.telemetry_interval_s,
        sections=sections,
        peers=known_peers(
            directory.peers(now),
            node.peers.rows(),
            card_age_ms=lambda node_id: directory.age_ms(node_id, now),
            clock_skew_ms=directory.clock_skew_ms,
            megabytes_per_second=node.telemetry.link_megabytes_per_second,
            may_dial=node.telemetry.interfaces.may_dial_host,
        ),
        tokens_per_second=float(measured),
        cache_format_version=facts.compatibility.cache_format_version if facts is not None else "",
    )
