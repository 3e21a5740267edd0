"""Bus messages for tests of the view and of the faces on it."""

from __future__ import annotations

import itertools
from typing import Any

from dashboard.fleet_view import FleetView
from wire.bus import BusMessage
from wire.events import TOPIC_OF, EndpointView, Event, ModelView, NodeSnapshot, WorkerView, encode_event
from wire.ids import NodeId

_sequence = itertools.count(1)


def message(event: Event, node_id: str = "primary", incarnation: int = 1) -> BusMessage:
    """The event as the subscriber hands it on."""
    return BusMessage(NodeId(node_id), TOPIC_OF[type(event)], incarnation, next(_sequence), encode_event(event), bytes(32))


def snapshot(**changes: Any) -> NodeSnapshot:
    """A primary's snapshot."""
    fields: dict[str, Any] = {
        "roles": ("primary",),
        "software": "kakeya-zmq test",
        "platform": "Linux x86_64",
        "state": "serving",
        "uptime_s": 10.0,
        "memory_bytes": 16 << 30,
        "interval_ms": 1000,
        "ttl_ms": 10_000,
        "endpoints": (EndpointView(address="192.0.2.7:51051", network="lan", priority=50, rtt_ms=0.5),),
        "models": (
            ModelView(
                model_id="tiny", role="primary", quantization="none", cache_format_version="v3", fingerprint="ab" * 32
            ),
        ),
        "sections": {
            "cache": {"bytes_used": 300, "max_bytes": 1000, "entry_count": 3, "evictions": 1, "lookup_hits": 4},
            "prefill": {"tokens_reused": 0, "tokens_computed": 0},
        },
    }
    return NodeSnapshot(**{**fields, **changes})


def worker_snapshot(**changes: Any) -> NodeSnapshot:
    return snapshot(roles=("worker",), worker=WorkerView(tokens_per_second=120.0, ram_bytes_free=1 << 30), **changes)


def tell(view: FleetView, event: Event, now: float, node_id: str = "primary", incarnation: int = 1) -> None:
    view.on(message(event, node_id, incarnation), now)
