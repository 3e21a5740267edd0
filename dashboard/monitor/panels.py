"""The six panels: which columns they have, and how one thing becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from dashboard.fleet_view import REFUSED_SUFFIX, NodeEntry, NodeStatus, PeerOnly
from dashboard.jobs import LOST, JobEntry
from dashboard.monitor.controls import Controls, PanelName
from dashboard.monitor.picture import Picture
from dashboard.monitor.table import Cell, Column, Panel, Row
from dashboard.monitor.text import NOT_KNOWN, age, count, duration, percent, rate, ratio, size
from dashboard.records import Record
from wire.events import EvictionEvent, LogEvent, NodeSnapshot, RequestEvent, SecurityEvent, SecurityKind, TransferEvent

_Item = TypeVar("_Item")
_Rows = Callable[[_Item], Row]

GOOD: Final = "green"
BUSY: Final = "cyan"
WARNING: Final = "yellow"
BAD: Final = "bold red"
FAINT: Final = "dim"
SOURCES: Final = {
    "computed": "computed here",
    "hot": "own cache",
    "remote_cache": "fleet cache",
    "worker": "worker",
    "live": "session",
}
"""Where a prompt's KV came from, in words."""
NAME: Final = 18
"""Cells of the first column, and of the titles in it."""


def panel(name: PanelName, picture: Picture, controls: Controls) -> Panel:
    """One panel with what the filter lets through."""
    return _MAKERS[name](picture, controls)


def _panel(
    title: str,
    columns: tuple[Column, ...],
    items: Sequence[_Item],
    row: _Rows[_Item],
    *,
    empty: str,
    weight: int,
    total: int,
) -> Panel:
    def window(start: int, stop: int) -> list[Row]:
        return [row(item) for item in items[start:stop]]

    return Panel(title, columns, len(items), window, empty, weight, total)


# --- nodes -----------------------------------------------------------------------------------------------------------

_NODE_COLUMNS: Final = (
    Column("", NAME, grow=2),
    Column("ROLE", 8, rank=1, grow=1),
    Column("STATE", 10),
    Column("UP", 6, rank=4, right=True),
    Column("CACHE", 12, grow=2),
    Column("OF", 7, rank=1, right=True),
    Column("REUSED", 6, rank=6, right=True),
    Column("JOBS", 5, rank=2, right=True),
    Column("TOK/S", 6, rank=3, right=True),
    Column("RESIDENT", 8, rank=8, right=True),
    Column("EVICTED", 7, rank=9, right=True),
    Column("RESTARTS", 8, rank=10, right=True),
    Column("MODEL", 14, rank=7, grow=2),
)


def _nodes(picture: Picture, controls: Controls) -> Panel:
    heard = [node for node in picture.nodes if controls.shows(node.node_id)]
    unheard = [peer for peer in picture.unheard if controls.shows(peer.node_id)]
    items: list[NodeEntry | PeerOnly] = [*heard, *unheard]
    empty = picture.bus.hint or ("no node fits the filter" if controls.filtered else "no node is heard yet")
    return _panel("NODES", _NODE_COLUMNS, items, _node_row, empty=empty, weight=3, total=len(heard))


def _node_row(node: NodeEntry | PeerOnly) -> Row:
    if isinstance(node, PeerOnly):
        told = Cell(f"known to {node.told_by}", FAINT)
        blank = Cell("")
        return (
            Cell(node.node_id, FAINT),
            Cell(" ".join(node.roles), FAINT),
            Cell("not heard", WARNING),
            *(blank for _ in _NODE_COLUMNS[3:-1]),
            told,
        )
    stale = node.status is NodeStatus.STALE
    used, limit = node.figure("cache", "bytes_used"), node.figure("cache", "max_bytes")
    resident = node.figure("node", "memory_bytes")
    snapshot = node.snapshot
    state = f"stale {age(node.silent_s)}" if stale else snapshot.state if snapshot is not None else "appearing"
    style = WARNING if stale else ""
    worker = snapshot.worker if snapshot is not None else None
    return (
        Cell(node.node_id, style or "bold"),
        Cell(" ".join(node.roles), style),
        Cell(state, style or (GOOD if state == "serving" else BUSY)),
        Cell(duration(snapshot.uptime_s) if snapshot is not None else NOT_KNOWN, style),
        Cell(percent(ratio(used, limit)), style, share=ratio(used, limit)) if limit > 0 else Cell(NOT_KNOWN),
        Cell(size(limit) if limit > 0 else "", style),
        Cell(count(node.figure("prefill", "tokens_reused")), style),
        Cell(f"{worker.inflight_jobs}+{worker.queued_jobs}" if worker is not None else "", style),
        Cell(rate(_tokens_per_second(snapshot)), style),
        Cell(size(resident) if resident > 0 else "", style),
        Cell(count(node.figure("cache", "evictions")), style),
        Cell(str(node.restarts), style),
        Cell(snapshot.models[0].model_id if snapshot is not None and snapshot.models else "", style or FAINT),
    )


def _tokens_per_second(snapshot: NodeSnapshot | None) -> float:
    if snapshot is None:
        return 0.0
    if snapshot.worker is not None:
        return snapshot.worker.tokens_per_second
    return max((model.tokens_per_second for model in snapshot.models), default=0.0)


# --- jobs --------------------------------------------------------------------------------------------------------------

_JOB_COLUMNS: Final = (
    Column("", NAME, grow=1),
    Column("FOR", 10, rank=3, grow=1),
    Column("STATE", 9),
    Column("PROGRESS", 15, grow=2),
    Column("TOKENS", 11, rank=1, right=True),
    Column("TOK/S", 6, rank=2, right=True),
    Column("LEFT", 7, right=True),
    Column("REASON", 8, rank=4, grow=3),
)


def _jobs(picture: Picture, controls: Controls) -> Panel:
    active = [job for job in picture.jobs_active if controls.shows(job.node_id, job.event.asker or job.node_id)]
    ended = [job for job in picture.jobs_ended if controls.shows(job.node_id, job.event.asker or job.node_id)]
    row = partial(_job_row, picture.now)
    return _panel("JOBS", _JOB_COLUMNS, [*active, *ended], row, empty="no prefill job yet", weight=2, total=len(active))


def _job_row(now: float, job: JobEntry) -> Row:
    event = job.event
    done = ratio(event.tokens_done, event.tokens_total)
    style = {"running": BUSY, "completed": GOOD, "failed": BAD, LOST: WARNING}.get(event.state, FAINT)
    left = f"{age(now - job.changed_at)} ago" if job.ended else duration(event.eta_ms / 1000)
    return (
        Cell(job.node_id, FAINT if job.ended else "bold"),
        Cell(event.asker if event.place == "worker" else "itself", FAINT),
        Cell(event.state, style),
        Cell(percent(done), FAINT if job.ended else style, share=done),
        Cell(f"{count(event.tokens_done)}/{count(event.tokens_total)}"),
        Cell(rate(event.tokens_per_second)),
        Cell("now" if left == "now ago" else left, FAINT if job.ended else ""),
        Cell(event.reason, style),
    )


# --- requests ----------------------------------------------------------------------------------------------------------

_REQUEST_COLUMNS: Final = (
    Column("", NAME, grow=1),
    Column("AGE", 4, rank=2, right=True),
    Column("WHAT", 8, rank=3),
    Column("FROM", 13),
    Column("PROMPT", 6, rank=1, right=True),
    Column("REUSED", 6, right=True),
    Column("MOVED", 7, rank=5, right=True),
    Column("TOOK", 6, right=True),
    Column("TTFT", 6, rank=4, right=True),
    Column("TOK/S", 6, rank=4, right=True),
    Column("WHY NOT BETTER", 14, grow=6),
)
_USUAL_STOPS: Final = frozenset(("", "eos", "max_tokens", "cancelled"))
_OUTCOMES: Final = {"ready": "", "cancelled": FAINT, "unavailable": WARNING, "failed": BAD}


def _requests(picture: Picture, controls: Controls) -> Panel:
    items = [record for record in picture.requests if controls.shows(record.node_id, *_helpers(record.event))]
    row = partial(_request_row, picture.now)
    return _panel("REQUESTS", _REQUEST_COLUMNS, items, row, empty="no request yet", weight=3, total=len(items))


def _helpers(event: RequestEvent) -> list[str]:
    return [source.node_id for source in event.sources if source.node_id]


def _request_row(now: float, record: Record[RequestEvent]) -> Row:
    event = record.event
    append = event.operation == "append"
    outcome = [] if event.outcome == "ready" else [event.outcome]
    style = _OUTCOMES.get(event.outcome, WARNING)
    stopped = [f"stopped: {event.stop_reason}"] if event.stop_reason not in _USUAL_STOPS else []
    return (
        Cell(record.node_id, style or "bold"),
        # Told again to us when we came: it was before, nobody knows when.
        Cell("past" if record.replayed else age(now - record.at), FAINT),
        Cell(event.operation, style),
        Cell(SOURCES.get(event.source, event.source), style or (WARNING if event.source == "computed" else GOOD)),
        Cell(count(event.prompt_tokens), style),
        Cell(percent(ratio(event.boundary, event.prompt_tokens)) if append else "", style),
        Cell(size(event.transfer_bytes) if event.transfer_bytes else "", style),
        Cell(duration(event.elapsed_ms / 1000), style),
        Cell(duration(event.ttft_ms / 1000) if event.ttft_ms > 0 else "", style),
        Cell(rate(event.decode_tokens_per_second) if event.decode_tokens_per_second > 0 else "", style),
        Cell("; ".join([*outcome, *event.reasons, *stopped]), style or FAINT),
    )


# --- transfers -----------------------------------------------------------------------------------------------------------

_TRANSFER_COLUMNS: Final = (
    Column("", NAME, grow=2),
    Column("AGE", 4, rank=1, right=True),
    Column("", 4),
    Column("PEER", 12, grow=2),
    Column("FOR", 7, rank=2),
    Column("SIZE", 7, right=True),
    Column("TOOK", 6, rank=3, right=True),
    Column("MB/S", 6, right=True),
    Column("PARTS", 5, rank=5, right=True),
    Column("CODEC", 5, rank=4),
    Column("RESULT", 8, grow=3),
)


def _transfers(picture: Picture, controls: Controls) -> Panel:
    items = [record for record in picture.transfers if controls.shows(record.node_id, record.event.peer or record.node_id)]
    row = partial(_transfer_row, picture.now)
    return _panel("TRANSFERS", _TRANSFER_COLUMNS, items, row, empty="no transfer yet", weight=2, total=len(items))


def _transfer_row(now: float, record: Record[TransferEvent]) -> Row:
    event = record.event
    style = "" if event.ok else BAD
    return (
        Cell(record.node_id, style or "bold"),
        Cell(age(now - record.at), FAINT),
        Cell("from" if event.direction == "in" else "to", style),
        Cell(event.peer, style),
        Cell(event.purpose, style),
        Cell(size(event.payload_bytes), style),
        Cell(duration(event.elapsed_ms / 1000), style),
        Cell(rate(event.payload_bytes / 1e3 / event.elapsed_ms) if event.elapsed_ms > 0 else NOT_KNOWN, style),
        Cell(count(event.parts), style),
        Cell(event.codec, style),
        Cell("ok" if event.ok else f"failed: {event.reason}", style or GOOD),
    )


# --- security and log ------------------------------------------------------------------------------------------------------

_SECURITY_COLUMNS: Final = (
    Column("", NAME, grow=1),
    Column("AGE", 4, right=True),
    Column("KIND", 18),
    Column("TIMES", 5, right=True),
    Column("NODE", 10, rank=1, grow=1),
    Column("TEXT", 14, grow=4),
)
_LOG_COLUMNS: Final = (
    Column("", NAME, grow=1),
    Column("AGE", 4, right=True),
    Column("LEVEL", 8),
    Column("TEXT", 20, grow=6),
)
_Line = Record[LogEvent] | Record[EvictionEvent] | Record[SecurityEvent]
_LEVELS: Final = {"warning": WARNING, "error": BAD}


def _security(picture: Picture, controls: Controls) -> Panel:
    items = [record for record in picture.security if controls.shows(record.node_id) and not _is_news(record)]
    row = partial(_security_row, picture.now)
    return _panel("REFUSED", _SECURITY_COLUMNS, items, row, empty="nothing was refused", weight=1, total=picture.refusals)


def _is_news(record: Record[SecurityEvent]) -> bool:
    """A node that appeared is nothing refused: it is told in the log."""
    return record.event.kind == SecurityKind.NODE_APPEARED


def _security_row(now: float, record: Record[SecurityEvent]) -> Row:
    event = record.event
    style = BAD if event.kind.endswith(REFUSED_SUFFIX) else FAINT
    return (
        Cell(record.node_id, "bold"),
        Cell(age(now - record.at), FAINT),
        Cell(event.kind.replace("_", " "), style),
        Cell(count(event.count), style),
        Cell(event.subject, style),
        Cell(event.text, style),
    )


def _log(picture: Picture, controls: Controls) -> Panel:
    lines: list[_Line] = [*picture.logs, *picture.evictions, *filter(_is_news, picture.security)]
    items = sorted((record for record in lines if controls.shows(record.node_id)), key=lambda record: -record.at)
    row = partial(_log_row, picture.now)
    return _panel("LOG", _LOG_COLUMNS, items, row, empty="no line yet", weight=1, total=len(items))


def _log_row(now: float, record: _Line) -> Row:
    event = record.event
    if isinstance(event, EvictionEvent):
        level, style = "evicted", BUSY
        now_held = f"{size(event.bytes_used)} of {size(event.max_bytes)}"
        text = f"{count(event.parts)} parts, {size(event.size_bytes)}; now {now_held}"
    elif isinstance(event, SecurityEvent):
        level, style, text = "appeared", GOOD, event.subject or event.text
    else:
        level, text, style = event.level, event.text, _LEVELS.get(event.level, "")
    return (Cell(record.node_id, "bold"), Cell(age(now - record.at), FAINT), Cell(level, style), Cell(text, style))


_MAKERS: Final[dict[PanelName, Callable[[Picture, Controls], Panel]]] = {
    PanelName.NODES: _nodes,
    PanelName.JOBS: _jobs,
    PanelName.REQUESTS: _requests,
    PanelName.TRANSFERS: _transfers,
    PanelName.SECURITY: _security,
    PanelName.LOG: _log,
}
