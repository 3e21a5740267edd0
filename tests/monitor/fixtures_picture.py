"""A fleet in the middle of its work, told to a view event by event: what the golden frames show."""

from __future__ import annotations

from typing import Any

from dashboard.fleet_view import FleetView
from dashboard.monitor.picture import BusNews, BusWatch, Picture, take
from tests.dashboard.kit import snapshot, tell
from wire.events import (
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

START = 1000.0
MODEL = ModelView(model_id="Qwen3-8B-4bit", role="primary", quantization="4bit", tokens_per_second=210.0)


def primary(reused: int, computed: int) -> Any:
    return snapshot(
        uptime_s=7321.0,
        models=(MODEL,),
        peers=(
            PeerView(node_id="studio-worker", roles=("worker",)),
            PeerView(node_id="attic", roles=("cache",), bus_address="192.0.2.99:5000"),
        ),
        sections={
            "cache": {"bytes_used": 3_400_000_000, "max_bytes": 8_000_000_000, "evictions": 12, "lookup_hits": 40},
            "prefill": {
                "tokens_reused": reused,
                "tokens_computed": computed,
                "tokens_generated": 18_400,
                "local_hits": 31,
                "remote_hits": 12,
                "misses": 5,
                "fallbacks": 2,
            },
            "node": {"memory_bytes": 9_100_000_000},
        },
    )


def worker() -> Any:
    return snapshot(
        roles=("worker",),
        uptime_s=950.0,
        models=(MODEL,),
        worker=WorkerView(inflight_jobs=1, queued_jobs=1, tokens_per_second=640.0),
        sections={"cache": {"bytes_used": 11_000_000_000, "max_bytes": 16_000_000_000, "lookup_hits": 9}, "node": {}},
    )


def cache() -> Any:
    held = {"cache": {"bytes_used": 4_000_000, "max_bytes": 8_000_000_000}}
    return snapshot(roles=("cache",), uptime_s=90_000.0, models=(), sections=held)


def busy_view() -> tuple[FleetView, float]:
    """(the view, now)."""
    view = FleetView()
    now = START
    for second in range(90):
        now = START + second
        view.on_tick(now)
        tell(view, primary(1000 * second, 150 * second + (4000 if second > 70 else 0)), now, "mac-mini")
        tell(view, worker(), now, "studio-worker")
        if second < 80:
            tell(view, cache(), now, "cellar-cache")
        if second == 30:
            _tell_the_past(view, now)
        if second == 75:
            _tell_events(view, now)
    job: dict[str, Any] = {"place": "worker", "asker": "mac-mini", "tokens_total": 32_000, "tokens_per_second": 640.0}
    running = JobEvent(job_id="j1", state="running", tokens_done=14_400, tokens_reused=2048, eta_ms=27_500.0, **job)
    tell(view, running, now, "studio-worker")
    tell(view, JobEvent(job_id="j2", state="queued", eta_ms=27_600.0, **job), now, "studio-worker")
    own = JobEvent(job_id="j3", state="running", place="primary", tokens_total=900, tokens_done=450, eta_ms=900.0)
    tell(view, own, now, "mac-mini")
    return view, now


def _tell_the_past(view: FleetView, now: float) -> None:
    done = JobEvent(job_id="j0", state="completed", asker="mac-mini", tokens_total=4096, tokens_done=4096, elapsed_ms=6400.0)
    tell(view, done, now, "studio-worker")
    broken = JobEvent(
        job_id="j9", state="failed", asker="mac-mini", tokens_total=8000, tokens_done=512, reason="out of memory"
    )
    tell(view, broken, now, "studio-worker")
    tell(view, TransferEvent(direction="in", purpose="job", peer="studio-worker", parts=192, payload_bytes=180_000_000,
                             elapsed_ms=410.0, codec="zstd"), now, "mac-mini")  # fmt: skip
    tell(view, LogEvent(level="info", text="studio-worker is connected"), now, "mac-mini")


def _tell_events(view: FleetView, now: float) -> None:
    sources = (
        SourceView(kind="remote_cache", start=0, end=4096, node_id="cellar-cache", transfer_bytes=96_000_000),
        SourceView(kind="computed", start=4096, end=4500),
    )
    tell(view, RequestEvent(
        request_id="r1", operation="append", outcome="ready", source="remote_cache", prompt_tokens=4500, boundary=4096,
        transfer_bytes=96_000_000, elapsed_ms=640.0, sources=sources, diverged_at=4096,
        reasons=("diverged at token 4096 from everything cached that begins like it",),
    ), now, "mac-mini")  # fmt: skip
    tell(view, RequestEvent(
        request_id="r2", append_id="r1", operation="generate", outcome="ready", source="remote_cache", prompt_tokens=4500,
        generated_tokens=220, elapsed_ms=6400.0, ttft_ms=702.0, decode_tokens_per_second=38.4, stop_reason="eos",
    ), now, "mac-mini")  # fmt: skip
    tell(view, RequestEvent(
        request_id="r3", operation="append", outcome="failed", source="computed", prompt_tokens=900, elapsed_ms=12_000.0,
        reasons=("cellar-cache had not answered after 2 s", "studio-worker refused: queue full"),
    ), now, "mac-mini")  # fmt: skip
    tell(view, RequestEvent(
        request_id="r4", operation="generate", outcome="ready", source="computed", prompt_tokens=900,
        generated_tokens=7, ttft_ms=12_100.0, elapsed_ms=12_400.0, decode_tokens_per_second=41.0, stop_reason="max_tokens",
    ), now, "mac-mini")  # fmt: skip
    tell(view, TransferEvent(direction="in", purpose="fetch", peer="cellar-cache", parts=64, payload_bytes=96_000_000,
                             elapsed_ms=120.0), now, "mac-mini")  # fmt: skip
    tell(view, TransferEvent(direction="out", purpose="publish", peer="attic", parts=9, payload_bytes=2_500_000,
                             elapsed_ms=2000.0, ok=False, reason="the peer stalled"), now, "mac-mini")  # fmt: skip
    tell(view, EvictionEvent(parts=12, size_bytes=48_000_000, bytes_used=11_000_000_000, max_bytes=16_000_000_000), now,
         "studio-worker")  # fmt: skip
    tell(view, SecurityEvent(kind="connection_refused", count=3, text="the key is not the fleet's"), now, "mac-mini")
    tell(view, SecurityEvent(kind="node_appeared", subject="studio-worker", text="joined"), now, "mac-mini")
    tell(view, LogEvent(level="warning", text="publishing to attic failed: the peer stalled"), now, "mac-mini")


def busy_picture() -> Picture:
    view, now = busy_view()
    return take(view, now, BusWatch().observe(view.bus_state(now), view.last_message_at, now))


def silent_picture() -> Picture:
    """The same twelve seconds after the last message."""
    view, now = busy_view()
    now += 8.0
    view.on_tick(now)
    return take(view, now, BusWatch().observe(view.bus_state(now), view.last_message_at, now))


def waiting_picture() -> Picture:
    return take(FleetView(), START, BusNews(hint="no bus is known: start a fleet with `kakeya up`, or name one with --bus"))
