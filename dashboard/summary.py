"""Sums over the fleet: summary, tokens, prefill counters, and the namespace of its KV (kvfs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dashboard import api_types as api
from dashboard.figures import total
from dashboard.fleet_view import FleetView, NodeEntry, NodeStatus
from dashboard.present import best_endpoint, bytes_free, figure
from dashboard.redaction import Eyes, model_name, reason_kind
from dashboard.state import ReportedTokens
from kakeya_zmq.kvfs import ACCESS
from kakeya_zmq.telemetry import PREFILL_COUNTERS
from wire.events import ModelView

GAUGES = ("remote_job_tokens_total", "remote_job_tokens_computed")
TEXTS = ("last_fallback_reason", "last_publish_error")


def tokens(totals: Mapping[str, int], reported: ReportedTokens) -> api.Tokens:
    """Generated and reused tokens, as the nodes count them, and those reported by POST.

    The hit rate is over all tokens that could have come from KV: the nodes' prompt tokens, and the reported ones.
    """
    reused, computed = totals.get("prefill.tokens_reused", 0), totals.get("prefill.tokens_computed", 0)
    assisted = reused + reported.kv_assisted
    possible = reused + computed + reported.completed
    return api.Tokens(
        completed=totals.get("prefill.tokens_generated", 0) + reported.completed,
        kv_assisted=assisted,
        hit_rate=assisted / possible if possible else 0.0,
    )


def prefill(view: FleetView, now: float, who: Eyes) -> dict[str, api.Figure]:
    """The counters of all nodes together; gauges and last reasons of the primaries. Empty when no node was ever heard."""
    entries = [entry for entry in view.nodes(now) if entry.snapshot is not None]
    totals = view.totals()
    if not entries and not totals:
        return {}
    answer: dict[str, api.Figure] = {name: totals.get(f"prefill.{name}", 0) for name in PREFILL_COUNTERS}
    primaries = [entry for entry in entries if "primary" in entry.roles]
    for name in GAUGES:
        answer[name] = total(figure(entry, "prefill", name) for entry in primaries)
    for name in TEXTS:
        texts = [text for entry in primaries if (text := _text(entry, name))]
        answer[name] = (texts[0] if who.admin else reason_kind(texts[0])) if texts else ""
    return answer


def _text(entry: NodeEntry, name: str) -> str:
    value = entry.snapshot.sections.get("prefill", {}).get(name) if entry.snapshot is not None else None
    return value if isinstance(value, str) else ""


def summary(
    view: FleetView, now: float, who: Eyes, reported: ReportedTokens, *, registered: int, groups: int
) -> api.Summary:
    """Everything in one answer. ``registered``: live nodes and registrations of which none is heard."""
    entries = view.nodes(now)
    totals = view.totals()
    online = [entry for entry in entries if entry.status is NodeStatus.ONLINE]
    own = [entry for entry in entries if "primary" in entry.roles]
    counted = tokens(totals, reported)
    return api.Summary(
        online_nodes=len(online),
        stale_nodes=len(entries) - len(online),
        registered_nodes=registered,
        groups=groups,
        completed_tokens=counted.completed,
        kv_assisted_tokens=counted.kv_assisted,
        kv_hit_rate=counted.hit_rate,
        cache_bytes_used=cache_bytes_used(entries),
        cache_bytes_free=total(bytes_free(entry) for entry in entries),
        cache_evictions=totals.get("cache.evictions", 0),
        cache_bytes_evicted=totals.get("cache.bytes_evicted", 0),
        cache_put_failures=totals.get("cache.put_failures", 0),
        local_lookup_hits=total(figure(entry, "cache", "lookup_hits") for entry in own),
        local_lookup_misses=total(figure(entry, "cache", "lookup_misses") for entry in own),
        local_tokens_served=total(figure(entry, "cache", "tokens_served") for entry in own),
        prefill=prefill(view, now, who),
        jobs_active=view.jobs.active_count,
        bus=view.bus_state(now).value,
    )


def cache_bytes_used(entries: Sequence[NodeEntry]) -> int:
    return total(figure(entry, "cache", "bytes_used") for entry in entries)


# --- kvfs ------------------------------------------------------------------------------------------------------------


def namespace(entries: Sequence[NodeEntry], who: Eyes) -> api.Namespace:
    """The KV namespace of the first primary's model, or else of the first node that runs one.

    Mounted are the caches of nodes that run exactly this model, and of those that run none: they hold whatever they get.
    """
    models = [(entry, model) for entry in entries for model in (entry.snapshot.models if entry.snapshot is not None else ())]
    chosen = models[0][1] if models else None
    mounts = [_mount(entry, who) for entry in entries if _is_mounted(entry, chosen)]
    uris = list(dict.fromkeys(_uri(model, who) for _, model in models))
    return api.Namespace(
        uri=_uri(chosen, who),
        access=ACCESS,
        coherent_shared_memory=False,
        mounts=mounts,
        bytes_used=total(mount.bytes_used for mount in mounts),
        bytes_free=total(mount.bytes_free for mount in mounts),
        entry_count=total(mount.entry_count for mount in mounts),
        namespaces=uris,
    )


def _uri(model: ModelView | None, who: Eyes) -> str:
    if model is None:
        return "kv://default//"
    name = model.model_id if who.admin else model_name(model.model_id)
    return f"kv://{model.tenant or 'default'}/{name}/{who.fingerprint(model.fingerprint)}"


def _is_mounted(entry: NodeEntry, chosen: ModelView | None) -> bool:
    if entry.snapshot is None or "cache" not in entry.snapshot.sections:
        return False
    models = entry.snapshot.models
    return not models or chosen is None or any(model.fingerprint == chosen.fingerprint for model in models)


def _mount(entry: NodeEntry, who: Eyes) -> api.Mount:
    endpoint = best_endpoint(entry.snapshot)
    return api.Mount(
        node_id=entry.node_id,
        address=who.secret(endpoint.address),
        bytes_used=figure(entry, "cache", "bytes_used"),
        bytes_free=bytes_free(entry),
        entry_count=figure(entry, "cache", "entry_count"),
        network=who.label(endpoint.network) or "default",
        tier="hot" if "primary" in entry.roles else "cold-offload",
    )
