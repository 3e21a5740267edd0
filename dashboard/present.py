"""The view of the fleet as answers of the API: nodes, jobs, events, series. Who looks decides what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dashboard import api_types as api
from dashboard.figures import total, whole
from dashboard.fleet_view import OTHER_SOURCE, REFUSED_SUFFIX, SOURCES, FleetView, NodeEntry, NodeStatus
from dashboard.jobs import JobEntry
from dashboard.records import Record
from dashboard.redaction import OTHER, Eyes, label, model_name, reason_kind
from dashboard.series import Bucket
from dashboard.state import DEFAULT_REGION, Registration
from wire.events import EndpointView, EvictionEvent, LogEvent, NodeSnapshot, RequestEvent, SecurityEvent, TransferEvent

Clock = Callable[[float], float]
"""Seconds since the epoch of a time of the view."""
NO_ENDPOINT = EndpointView(address="", network="default")


def eyes(view: FleetView, now: float, *, admin: bool) -> Eyes:
    """What who asks may see."""
    known = {entry.node_id for entry in view.nodes(now)} | {peer.node_id for peer in view.unheard()}
    return Eyes(admin, known)


# --- nodes -----------------------------------------------------------------------------------------------------------


def nodes(entries: Sequence[NodeEntry], registrations: Sequence[Registration], who: Eyes) -> list[api.Node]:
    """Heard nodes, primaries first; then registrations of which none is heard, the newest of each alias."""
    by_node = {r.alias: r for r in registrations} | {r.node_id: r for r in registrations if r.node_id is not None}
    shown = [_node(entry, by_node.get(entry.node_id), who) for entry in entries]
    heard = {entry.node_id for entry in entries}
    absent = {r.alias: r for r in registrations if r.alias not in heard and r.node_id not in heard}
    return shown + [_absent_node(registration, who) for registration in absent.values()]


def _node(entry: NodeEntry, registration: Registration | None, who: Eyes) -> api.Node:
    snapshot = entry.snapshot
    paired = registration is not None and registration.node_id == entry.node_id
    endpoint = best_endpoint(snapshot)
    has_cache = snapshot is not None and "cache" in snapshot.sections
    role: Any = registration.role if registration is not None else "hybrid" if has_cache else "inference"
    return api.Node(
        id=entry.node_id,
        alias=registration.alias if registration is not None else entry.node_id,
        region=registration.region if registration is not None else DEFAULT_REGION,
        role=role,
        roles=[label(name) for name in entry.roles],
        status="online" if entry.status is NodeStatus.ONLINE else "stale",
        platform=who.description(snapshot.platform) if snapshot is not None else "",
        memory_bytes=snapshot.memory_bytes if snapshot is not None else 0,
        models=[_model(each, who) for each in (snapshot.models if snapshot is not None else ())],
        cache=_cache(entry, who) if has_cache else None,
        prefill_worker=_worker(snapshot, endpoint, who),
        endpoint=api.Endpoint(
            address=who.secret(endpoint.address),
            network=who.label(endpoint.network) or "default",
            priority=endpoint.priority,
            rtt_ms=endpoint.rtt_ms,
        ),
        state=label(snapshot.state) if snapshot is not None else "",
        software=who.description(snapshot.software) if snapshot is not None else "",
        uptime_s=snapshot.uptime_s if snapshot is not None else 0.0,
        silent_s=round(entry.silent_s, 1),
        restarts=entry.restarts,
        paired=paired,
    )


def _absent_node(registration: Registration, who: Eyes) -> api.Node:
    role: Any = registration.role
    return api.Node(
        id=registration.node_id or registration.id,
        alias=registration.alias,
        region=registration.region,
        role=role,
        roles=[],
        status="offline" if registration.node_id is not None else "pending",
        platform="",
        memory_bytes=0,
        models=[],
        cache=None,
        prefill_worker=None,
        endpoint=api.Endpoint(address=who.secret(registration.address), network="pending", priority=0, rtt_ms=0.0),
        paired=registration.node_id is not None,
    )


def best_endpoint(snapshot: NodeSnapshot | None) -> EndpointView:
    """The endpoint of highest priority; one without address when there is none."""
    endpoints = snapshot.endpoints if snapshot is not None else ()
    return max(endpoints, key=lambda endpoint: endpoint.priority, default=NO_ENDPOINT)


def _model(model: Any, who: Eyes) -> api.Model:
    return api.Model(
        model_id=model.model_id if who.admin else model_name(model.model_id),
        role=who.label(model.role.lower()),
        quantization=who.description(model.quantization),
        tokens_per_second=model.tokens_per_second,
    )


def figure(entry: NodeEntry, section: str, name: str) -> int:
    """A whole number of a node's snapshot."""
    return whole(entry.figure(section, name))


def bytes_free(entry: NodeEntry) -> int:
    return max(0, whole(figure(entry, "cache", "max_bytes") - figure(entry, "cache", "bytes_used")))


def _cache(entry: NodeEntry, who: Eyes) -> api.Cache:
    models = entry.snapshot.models if entry.snapshot is not None else ()
    return api.Cache(
        bytes_used=figure(entry, "cache", "bytes_used"),
        bytes_free=bytes_free(entry),
        entry_count=figure(entry, "cache", "entry_count"),
        epoch=figure(entry, "cache", "cache_epoch"),
        tokens_served=figure(entry, "cache", "tokens_served"),
        evictions=figure(entry, "cache", "evictions"),
        bytes_evicted=figure(entry, "cache", "bytes_evicted"),
        put_failures=figure(entry, "cache", "put_failures"),
        format=who.description(models[0].cache_format_version) if models else "",
        model_id=_model(models[0], who).model_id if models else "",
    )


def _worker(snapshot: NodeSnapshot | None, endpoint: EndpointView, who: Eyes) -> api.PrefillWorker | None:
    worker = snapshot.worker if snapshot is not None else None
    if worker is None:
        return None
    return api.PrefillWorker(
        address=who.secret(endpoint.address),
        max_concurrent_jobs=worker.max_concurrent_jobs,
        inflight_jobs=worker.inflight_jobs,
        queued_jobs=worker.queued_jobs,
        queued_tokens=worker.queued_tokens,
        load=worker.load,
        tokens_per_second=worker.tokens_per_second,
        ram_bytes_free=worker.ram_bytes_free,
    )


# --- events ----------------------------------------------------------------------------------------------------------


def job(entry: JobEntry, at: Clock, who: Eyes) -> api.Job:
    event = entry.event
    return api.Job(
        job_id=who.identifier(event.job_id),
        node_id=entry.node_id,
        place=who.label(event.place),
        state=who.label(event.state),
        asker=who.node(event.asker),
        tenant=who.secret(event.tenant),
        tokens_total=event.tokens_total,
        tokens_done=event.tokens_done,
        tokens_reused=event.tokens_reused,
        progress=min(1.0, event.tokens_done / event.tokens_total) if event.tokens_total else 0.0,
        elapsed_ms=event.elapsed_ms,
        tokens_per_second=event.tokens_per_second,
        eta_ms=event.eta_ms,
        changed_at=at(entry.changed_at),
        reason_kind=reason_kind(event.reason),
        reason=who.secret(event.reason),
    )


def request(record: Record[RequestEvent], at: Clock, who: Eyes) -> api.Request:
    event = record.event
    return api.Request(
        number=record.number,
        at=None if record.replayed else at(record.at),
        node_id=record.node_id,
        request_id=who.identifier(event.request_id),
        append_id=who.identifier(event.append_id),
        operation=who.label(event.operation),
        outcome=who.label(event.outcome),
        source=_source_kind(event.source),
        prompt_tokens=event.prompt_tokens,
        boundary=event.boundary,
        generated_tokens=event.generated_tokens,
        transfer_bytes=event.transfer_bytes,
        elapsed_ms=event.elapsed_ms,
        ttft_ms=event.ttft_ms,
        decode_tokens_per_second=event.decode_tokens_per_second,
        diverged_at=event.diverged_at,
        stop_reason=who.label(event.stop_reason),
        sources=[
            api.Source(
                kind=_source_kind(source.kind),
                start=source.start,
                end=source.end,
                node_id=who.node(source.node_id),
                transfer_bytes=source.transfer_bytes,
                elapsed_ms=source.elapsed_ms,
            )
            for source in event.sources
        ],
        decisions=[
            api.Decision(
                what=who.label(decision.what),
                chosen=who.option(decision.chosen),
                costs_ms={who.option(option): cost for option, cost in decision.costs_ms.items()},
                text=who.secret(decision.text),
            )
            for decision in event.decisions
        ],
        reason_kinds=list(dict.fromkeys(map(reason_kind, event.reasons))),
        reasons=list(event.reasons) if who.admin else [],
    )


def _source_kind(kind: str) -> str:
    return kind if not kind or kind in SOURCES else OTHER_SOURCE


def transfer(record: Record[TransferEvent], at: Clock, who: Eyes) -> api.Transfer:
    event = record.event
    return api.Transfer(
        number=record.number,
        at=at(record.at),
        node_id=record.node_id,
        direction=who.label(event.direction),
        purpose=who.label(event.purpose),
        peer=who.node(event.peer),
        parts=event.parts,
        payload_bytes=event.payload_bytes,
        elapsed_ms=event.elapsed_ms,
        codec=who.label(event.codec),
        ok=event.ok,
        reason_kind=reason_kind(event.reason),
        reason=who.secret(event.reason),
    )


def eviction(record: Record[EvictionEvent], at: Clock) -> api.Eviction:
    event = record.event
    return api.Eviction(
        number=record.number,
        at=at(record.at),
        node_id=record.node_id,
        parts=event.parts,
        size_bytes=event.size_bytes,
        bytes_used=event.bytes_used,
        max_bytes=event.max_bytes,
    )


def security(view: FleetView, at: Clock, who: Eyes, limit: int) -> api.Security:
    """Aggregates for everybody, single events with the key."""
    kinds: dict[str, int] = {}
    for kind, count in view.security_counts.items():
        shown = who.label(kind)
        kinds[shown] = whole(kinds.get(shown, 0) + count)
    return api.Security(
        total=total(kinds.values()),
        refusals_total=total(count for kind, count in view.security_counts.items() if kind.endswith(REFUSED_SUFFIX)),
        kinds=dict(sorted(kinds.items())),
        items=[_security_item(record, at) for record in view.security.newest(limit)] if who.admin else [],
    )


def _security_item(record: Record[SecurityEvent], at: Clock) -> api.SecurityItem:
    event = record.event
    return api.SecurityItem(
        number=record.number,
        at=at(record.at),
        node_id=record.node_id,
        kind=event.kind,
        subject=event.subject,
        count=event.count,
        text=event.text,
    )


def log_line(record: Record[LogEvent], at: Clock) -> api.LogLine:
    event = record.event
    return api.LogLine(number=record.number, at=at(record.at), node_id=record.node_id, level=event.level, text=event.text)


# --- series ----------------------------------------------------------------------------------------------------------


def series(step_s: float, buckets: Iterable[Bucket], at: Clock) -> api.Series:
    return api.Series(step_s=step_s, points=[_point(bucket, step_s, at) for bucket in buckets])


def _point(bucket: Bucket, step_s: float, at: Clock) -> api.Point:
    figures = bucket.figures
    reused, computed = figures.get("tokens_reused", 0), figures.get("tokens_computed", 0)
    ttft = {source: _mean(figures, f"ttft_ms_sum.{source}", f"ttft_count.{source}") for source in (*SOURCES, OTHER)}
    return api.Point(
        index=round(bucket.start / step_s),
        at=at(bucket.start),
        tokens_reused=whole(reused),
        tokens_computed=whole(computed),
        tokens_generated=whole(figures.get("tokens_generated", 0)),
        hit_rate=reused / (reused + computed) if reused + computed else None,
        bytes_moved=whole(figures.get("bytes_in", 0)),
        bytes_evicted=whole(figures.get("bytes_evicted", 0)),
        transfers=whole(figures.get("transfers", 0)),
        requests=whole(figures.get("requests", 0)),
        refusals=whole(figures.get("refusals", 0)),
        ttft_ms={source: mean for source, mean in ttft.items() if mean is not None},
        decode_tokens_per_second=_mean(figures, "decode_tps_sum", "decode_count"),
        cache_bytes_used=_state(figures, "cache_bytes_used"),
        cache_bytes_max=_state(figures, "cache_bytes_max"),
        nodes_online=_state(figures, "nodes_online"),
        jobs_active=_state(figures, "jobs_active"),
    )


def _mean(figures: Mapping[str, float], total: str, count: str) -> float | None:
    return figures[total] / figures[count] if figures.get(count) else None


def _state(figures: Mapping[str, float], name: str) -> int | None:
    return whole(figures[name]) if name in figures else None
