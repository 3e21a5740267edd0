"""The fleet for Prometheus: one registry of our own, filled from the view whenever it is read.

Names follow Prometheus' conventions: base units (bytes, seconds), ``_total`` on counters. Counters of a node run on over its
restarts. No label holds an address, a tenant or free text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from dashboard.figures import whole
from dashboard.fleet_view import BusState, FleetView, NodeEntry, NodeStatus
from dashboard.redaction import label
from dashboard.services import Services

MEDIA_TYPE: Final = CONTENT_TYPE_LATEST

COUNTERS: Final = (
    ("prefill.local_hits", "prefill_local_hits", "Prompts continued from the primary's own store"),
    ("prefill.remote_hits", "prefill_remote_hits", "Prompts that used parts from other nodes"),
    ("prefill.misses", "prefill_misses", "Prompts computed from the first token"),
    ("prefill.tokens_reused", "prefill_tokens_reused", "Prompt tokens whose KV was imported instead of computed"),
    ("prefill.tokens_computed", "prefill_tokens_computed", "Prompt tokens prefilled on a primary"),
    ("prefill.tokens_generated", "tokens_generated", "Tokens handed out"),
    ("prefill.bytes_received", "kv_received_bytes", "Verified bytes of KV that arrived from other nodes"),
    ("prefill.bytes_published", "kv_published_bytes", "Bytes of KV sent to cache peers"),
    ("prefill.publish_failures", "publish_failures", "Offers to cache peers that failed"),
    ("prefill.fallbacks", "fallbacks", "Times something of the fleet failed and the next option was taken"),
    ("prefill.remote_jobs", "remote_jobs", "Jobs sent to workers"),
    ("prefill.remote_job_failures", "remote_job_failures", "Jobs refused, broken, stalled or too late"),
    ("prefill.job_tokens_computed", "job_tokens_computed", "Tokens a worker prefilled for others"),
    ("cache.evictions", "cache_evictions", "Parts evicted"),
    ("cache.bytes_evicted", "cache_evicted_bytes", "Bytes of evicted parts"),
    ("cache.put_failures", "cache_put_failures", "Parts that found no room"),
    ("cache.lookup_hits", "cache_lookup_hits", "Lookups that found something"),
    ("cache.lookup_misses", "cache_lookup_misses", "Lookups that found nothing"),
    ("refusals", "refusals", "Connections and messages that a node refused"),
)
"""(counter of the ledger, metric without prefix and suffix, help)."""
GAUGES: Final = (
    ("cache", "bytes_used", "cache_used_bytes", "KV held"),
    ("cache", "max_bytes", "cache_limit_bytes", "Bound of the store"),
    ("cache", "bytes_reserved", "cache_reserved_bytes", "Room promised to transfers and jobs in progress"),
    ("cache", "entry_count", "cache_parts", "Parts held"),
    ("node", "memory_bytes", "resident_memory_bytes", "Resident memory of the node's process"),
    ("node", "uptime_s", "uptime_seconds", "Seconds since the node started"),
)
"""(section, figure, metric without prefix, help)."""


class FleetCollector(Collector):
    """Turns the view into metric families."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        """All families, made at once under the view's lock."""
        feed = dict(self._services.feed_figures())
        yield from self._services.fleet.read(lambda view, now: list(_families(view, now, feed)))


def _families(view: FleetView, now: float, feed: Mapping[str, int]) -> Iterator[Metric]:
    entries = view.nodes(now)
    yield from _node_states(entries)
    yield from _node_counters(view, entries)
    workers = GaugeMetricFamily("kakeya_worker_queued_tokens", "Tokens a worker still has to compute", labels=["node"])
    rates = GaugeMetricFamily("kakeya_worker_prefill_tokens_per_second", "Measured prefill rate", labels=["node"])
    for entry in entries:
        worker = entry.snapshot.worker if entry.snapshot is not None else None
        if worker is not None:
            workers.add_metric([entry.node_id], worker.queued_tokens)
            rates.add_metric([entry.node_id], worker.tokens_per_second)
    yield from (workers, rates)
    yield GaugeMetricFamily("kakeya_jobs_active", "Prefill jobs that go on", value=view.jobs.active_count)
    yield from _reader(view, now, feed)
    yield _ttft(view)


def _node_states(entries: list[NodeEntry]) -> Iterator[Metric]:
    up = GaugeMetricFamily("kakeya_node_up", "1: heard lately, 0: stale", labels=["node", "role"])
    for entry in entries:
        role = label(entry.roles[0]) if entry.roles else ""
        up.add_metric([entry.node_id, role], float(entry.status is NodeStatus.ONLINE))
    yield up
    for section, figure, name, text in GAUGES:
        family = GaugeMetricFamily(f"kakeya_{name}", text, labels=["node"])
        for entry in entries:
            if entry.snapshot is not None and figure in entry.snapshot.sections.get(section, {}):
                family.add_metric([entry.node_id], entry.figure(section, figure))
        yield family


def _node_counters(view: FleetView, entries: list[NodeEntry]) -> Iterator[Metric]:
    counted = {entry.node_id: view.ledger.of_node(entry.node_id) for entry in entries}
    for counter, name, text in COUNTERS:
        family = CounterMetricFamily(f"kakeya_{name}", text, labels=["node"])
        for node_id, figures in counted.items():
            family.add_metric([node_id], figures.get(counter, 0))
        yield family


def _reader(view: FleetView, now: float, feed: Mapping[str, int]) -> Iterator[Metric]:
    yield GaugeMetricFamily("kakeya_bus_live", "1: the bus is heard", value=float(view.bus_state(now) is BusState.LIVE))
    yield CounterMetricFamily("kakeya_bus_messages", "Messages taken from the bus", value=view.counters["messages"])
    yield CounterMetricFamily("kakeya_bus_missed", "Messages lost on the bus", value=feed.get("missed", 0))
    events = CounterMetricFamily("kakeya_security_events", "Security events by kind", labels=["kind"])
    kinds: dict[str, int] = {}
    for kind, count in view.security_counts.items():
        kinds[label(kind)] = whole(kinds.get(label(kind), 0) + count)
    for kind, count in kinds.items():
        events.add_metric([kind], count)
    yield events


def _ttft(view: FleetView) -> Metric:
    family = HistogramMetricFamily("kakeya_time_to_first_token_seconds", "By where the KV came from", labels=["source"])
    for source, histogram in view.ttft().items():
        total = 0
        buckets = []
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([source], buckets, histogram.sum)
    return family


class Exposition:
    """What ``/metrics`` answers."""

    def __init__(self, services: Services) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(FleetCollector(services))

    def text(self) -> bytes:
        return generate_latest(self._registry)
