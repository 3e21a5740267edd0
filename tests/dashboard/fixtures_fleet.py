"""A small fleet told to a dashboard: a primary, a worker, a cache peer, and one of everything that happens."""

from __future__ import annotations

from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import Web
from wire.events import (
    DecisionView,
    EndpointView,
    EvictionEvent,
    JobEvent,
    LogEvent,
    ModelView,
    PeerView,
    RequestEvent,
    SecurityEvent,
    SourceView,
    TransferEvent,
    WorkerView,
)

JOB_ID = "0b" * 16
REQUEST_ID = "0c" * 8
ADDRESSES = ("192.0.2.7", "192.0.2.8", "192.0.2.9", "2001:db8::77")
PRIVATE = (
    *ADDRESSES,
    "/Users/telltale",
    "/home/telltale",
    "deadbeefdeadbeef",
    "telltale prompt",
    "secret-tenant-7",
    "51051",
)
"""What must never be seen without the key, wherever a node puts it."""


def tell_fleet(web: Web) -> None:
    """Everything a fleet can tell, with private things in every field that can hold text."""
    gossip = "192.0.2.8:53051 said telltale prompt deadbeefdeadbeef in /Users/telltale/x for secret-tenant-7"
    sections = {
        "cache": {
            "bytes_used": 300,
            "max_bytes": 1000,
            "entry_count": 3,
            "cache_epoch": 7,
            "evictions": 1,
            "bytes_evicted": 50,
            "put_failures": 2,
            "lookup_hits": 4,
            "lookup_misses": 5,
            "tokens_served": 64,
        },
        "prefill": {
            "local_hits": 3,
            "remote_hits": 2,
            "misses": 1,
            "tokens_reused": 300,
            "tokens_computed": 100,
            "tokens_generated": 50,
            "last_fallback_reason": f"timed out: {gossip}",
            "last_publish_error": gossip,
            "remote_job_tokens_total": 128,
        },
        "node": {"address": "192.0.2.7:51051", "memory_bytes": 5000},
        "refusals": {gossip: 4},
    }
    peers = (
        PeerView(node_id="worker-1", roles=("worker",), bus_address="192.0.2.8:5000"),
        PeerView(node_id="far-away", roles=("cache",), bus_address="[2001:db8::77]:5000"),
    )
    web.tell(snapshot(sections=sections, peers=peers), "primary")
    cache_only = {"cache": {"bytes_used": 10, "max_bytes": 100, "entry_count": 1}}
    web.tell(
        snapshot(
            roles=("worker",),
            endpoints=(EndpointView(address="192.0.2.8:53051", network="thunderbolt", priority=100),),
            worker=WorkerView(queued_jobs=2, queued_tokens=256, load=0.5, tokens_per_second=120.0, ram_bytes_free=1 << 30),
            sections=cache_only,
        ),
        "worker-1",
    )
    web.tell(
        snapshot(
            roles=("cache",),
            models=(),
            endpoints=(EndpointView(address="192.0.2.9:52051", network="lan", priority=50),),
            sections=cache_only,
        ),
        "cache-1",
    )
    web.clocks.pass_time(4.0)
    web.tell(snapshot(sections=sections, peers=peers), "primary")
    web.tell(snapshot(roles=("worker",), worker=WorkerView(inflight_jobs=1), sections=cache_only), "worker-1")
    web.tell(snapshot(roles=("cache",), models=(), sections=cache_only), "cache-1")
    job = {"place": "worker", "tenant": "secret-tenant-7", "tokens_total": 200, "reason": gossip}
    web.tell(JobEvent(job_id=JOB_ID, state="running", asker="primary", tokens_done=50, eta_ms=900.0, **job), "worker-1")
    web.tell(JobEvent(job_id="0d" * 16, state="failed", asker="192.0.2.7:51051", tokens_done=50, **job), "worker-1")
    web.tell(
        RequestEvent(
            request_id=REQUEST_ID,
            operation="append",
            outcome="ready",
            source="worker",
            prompt_tokens=200,
            boundary=128,
            transfer_bytes=4096,
            elapsed_ms=120.0,
            ttft_ms=150.0,
            decode_tokens_per_second=11.5,
            diverged_at=64,
            stop_reason=gossip[:100],
            sources=(
                SourceView(kind="worker", start=0, end=128, node_id="worker-1", transfer_bytes=4096),
                SourceView(kind="/Users/telltale", start=128, end=200, node_id="192.0.2.9:52051"),
            ),
            decisions=(
                DecisionView(
                    what="prepare",
                    chosen="worker worker-1",
                    costs_ms={"compute": 900.0, "worker worker-1": 120.0, "worker 192.0.2.8:53051": 3.0, gossip: 4.0},
                    text=gossip,
                ),
            ),
            reasons=("diverged at token 64 from everything cached that begins like it", gossip),
        ),
        "primary",
    )
    web.tell(
        TransferEvent(
            direction="in", purpose="fetch", peer="192.0.2.9:52051", parts=2, payload_bytes=4096, ok=False, reason=gossip
        ),
        "primary",
    )
    web.tell(EvictionEvent(parts=2, size_bytes=128, interval_ms=1000, bytes_used=300, max_bytes=1000), "primary")
    web.tell(SecurityEvent(kind="connection_refused", subject="192.0.2.99", count=3, text=gossip), "primary")
    web.tell(SecurityEvent(kind="/Users/telltale", text=gossip), "primary")
    web.tell(LogEvent(level="warning", text=gossip), "primary")
    web.fleet.tick()


def tell_hostile_node(web: Web) -> None:
    """A node whose descriptions of itself are full of private things."""
    told = {"quantization": "/home/telltale", "role": "/x", "cache_format_version": "a/b"}
    models = tuple(
        ModelView(model_id=name, fingerprint=name[:64], **told)
        for name in ("/Users/telltale/tiny", "192.0.2.7:51051", "telltale prompt")
    )
    endpoint = EndpointView(address="192.0.2.9:1", network="192.0.2.9:1")
    texts = {"platform": "/Users/telltale", "software": "at 192.0.2.7:51051", "state": "telltale prompt"}
    peer = PeerView(node_id="unheard", roles=("cache",))
    web.tell(snapshot(sections={"cache": {}}, models=models, endpoints=(endpoint,), peers=(peer,), **texts), "hostile")
    for text in ("192.0.2.7:51051", "telltale prompt", "deadbeefdeadbeef" * 4):
        web.tell(JobEvent(job_id=text, state="running"), "hostile")
        web.tell(RequestEvent(request_id=text, append_id=text, operation="generate", outcome="ready"), "hostile")
