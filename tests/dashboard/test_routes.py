"""Contract of the reads: every route answers with exactly the fields and types it declares, over a fleet that was told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dashboard import api_types as api
from dashboard.http import Access, Route
from tests.dashboard.fixtures_fleet import JOB_ID, tell_fleet
from tests.dashboard.kit import snapshot
from tests.dashboard.web_kit import API_KEY, Answer, Web

SUMMARY = {
    *("online_nodes", "registered_nodes", "groups", "completed_tokens", "kv_assisted_tokens", "kv_hit_rate"),
    *("cache_bytes_used", "cache_bytes_free", "cache_evictions", "cache_bytes_evicted", "cache_put_failures"),
    *("local_lookup_hits", "local_lookup_misses", "local_tokens_served", "prefill"),
}
NODE = {
    *("id", "alias", "region", "role", "status", "platform", "memory_bytes", "models", "cache", "prefill_worker"),
    "endpoint",
}
CACHE = {
    *("bytes_used", "bytes_free", "entry_count", "epoch", "tokens_served", "evictions", "bytes_evicted"),
    *("put_failures", "format", "model_id"),
}
WORKER = {
    *("address", "max_concurrent_jobs", "inflight_jobs", "queued_jobs", "queued_tokens", "load", "tokens_per_second"),
    "ram_bytes_free",
}
PREFILL = {
    *("local_hits", "remote_hits", "misses", "tokens_reused", "tokens_computed", "bytes_received", "remote_jobs"),
    *("remote_job_failures", "remote_job_tokens_total", "remote_job_tokens_computed", "fallbacks"),
    *("last_fallback_reason", "publish_attempts", "publish_successes", "publish_failures", "bytes_published"),
    *("last_publish_error", "hot_promotions", "hot_promotion_bytes", "hot_promotion_failures"),
}
KVFS = {
    *("uri", "access", "coherent_shared_memory", "mounts", "bytes_used", "bytes_free", "entry_count"),
}
MOUNT = {"node_id", "address", "bytes_used", "bytes_free", "entry_count", "network", "tier"}


@pytest.fixture
def told(web: Web) -> Web:
    tell_fleet(web)
    return web


def strictly(answer: Answer, kind: Any) -> Any:
    """Decode an answer as its declared type, and hold that nothing else was in it."""
    assert answer.headers["Content-Type"] == "application/json"
    value = msgspec.json.decode(answer.body, type=kind)
    assert msgspec.to_builtins(value) == answer.json
    return value


def test_every_json_read_answers_what_it_declares(told: Web) -> None:
    run = told.post("/v1/network/benchmarks", {}).json["id"]
    checked = 0
    for route in told.routes:
        if route.method != "GET" or isinstance(route.answer, str) or "capture" in route.path:
            continue
        path = route.path.replace("<run_id>", run)
        for key in (None, API_KEY):
            if route.access is Access.ADMIN and key is None:
                assert told.call("GET", path).status == 401
                continue
            answer = told.call("GET", path, key=key)
            assert answer.status == 200, (path, answer.body)
            strictly(answer, route.answer)
            assert answer.headers["Cache-Control"] == "no-store"
            checked += 1
    assert checked > 30


def test_health_and_summary_have_the_fields_of_the_reference(told: Web) -> None:
    assert told.get("/healthz") == {"status": "ok", "online_nodes": 3, "cache_bytes_used": 320, "bus": "live"}
    summary = told.get("/v1/network/summary")
    assert summary.keys() >= SUMMARY
    assert (summary["online_nodes"], summary["registered_nodes"], summary["groups"]) == (3, 3, 0)
    assert (summary["cache_bytes_used"], summary["cache_bytes_free"]) == (320, 880)
    assert (summary["local_lookup_hits"], summary["local_lookup_misses"], summary["local_tokens_served"]) == (4, 5, 64)
    assert (summary["completed_tokens"], summary["kv_assisted_tokens"], summary["kv_hit_rate"]) == (50, 300, 0.75)
    assert summary["prefill"] == told.get("/v1/network/prefill")


def test_an_empty_dashboard_answers_with_nothing_not_with_errors(web: Web) -> None:
    assert web.get("/v1/network/nodes") == []
    assert web.get("/v1/network/prefill") == {}
    assert web.get("/v1/network/benchmarks/live") is None
    assert web.get("/v1/network/tokens") == {"completed": 0, "kv_assisted": 0, "hit_rate": 0.0}
    assert web.get("/healthz")["bus"] == "waiting"


def test_nodes_show_what_they_are_and_addresses_only_with_the_key(told: Web) -> None:
    public, full = told.get("/v1/network/nodes"), told.get("/v1/network/nodes", key=API_KEY)
    assert [node["id"] for node in public] == ["primary", "cache-1", "worker-1"]
    assert all(node.keys() >= NODE for node in public)
    primary, cache, worker = public
    assert (primary["status"], primary["role"], primary["region"]) == ("online", "hybrid", "Private")
    assert primary["cache"].keys() >= CACHE
    assert primary["cache"]["epoch"] == 7
    assert primary["models"] == [{"model_id": "tiny", "role": "primary", "quantization": "none", "tokens_per_second": 0.0}]
    assert worker["prefill_worker"].keys() >= WORKER
    assert cache["prefill_worker"] is None
    assert primary["endpoint"] == {"address": "", "network": "lan", "priority": 50, "rtt_ms": 0.5}
    assert full[0]["endpoint"]["address"] == "192.0.2.7:51051"
    assert full[2]["prefill_worker"]["address"] == "192.0.2.7:51051"
    assert public[2]["prefill_worker"]["address"] == ""


def test_a_silent_node_is_stale_and_then_gone(told: Web) -> None:
    told.clocks.pass_time(5.0)
    told.tell(snapshot(), "primary")
    told.fleet.tick()
    assert {node["id"]: node["status"] for node in told.get("/v1/network/nodes")} == {
        "primary": "online",
        "cache-1": "stale",
        "worker-1": "stale",
    }
    assert told.get("/v1/network/summary")["stale_nodes"] == 2
    told.clocks.pass_time(6.0)
    told.fleet.tick()
    assert [node["id"] for node in told.get("/v1/network/nodes")] == ["primary"]


def test_prefill_counters_have_the_names_of_the_reference(told: Web) -> None:
    counters = told.get("/v1/network/prefill")
    assert counters.keys() == PREFILL
    assert (counters["local_hits"], counters["remote_job_tokens_total"]) == (3, 128)
    assert counters["last_fallback_reason"] == "timed out"
    assert counters["last_publish_error"] == "other"
    full = told.get("/v1/network/prefill", key=API_KEY)
    assert full["last_fallback_reason"].startswith("timed out: 192.0.2.8:53051")


def test_kvfs_mounts_the_stores_and_promises_no_shared_memory(told: Web) -> None:
    kvfs = told.get("/v1/network/kvfs")
    assert kvfs.keys() >= KVFS
    assert kvfs["uri"] == f"kv://default/tiny/{'ab' * 32}"
    assert kvfs["coherent_shared_memory"] is False
    assert kvfs["access"] == "content-addressed-lookup-fetch-import"
    assert all(mount.keys() == MOUNT for mount in kvfs["mounts"])
    assert {mount["node_id"]: mount["tier"] for mount in kvfs["mounts"]} == {
        "primary": "hot",
        "worker-1": "cold-offload",
        "cache-1": "cold-offload",
    }
    assert {mount["address"] for mount in kvfs["mounts"]} == {""}
    assert (kvfs["bytes_used"], kvfs["entry_count"]) == (320, 5)
    assert told.get("/v1/network/kvfs", key=API_KEY)["mounts"][0]["address"] == "192.0.2.7:51051"


def test_a_store_of_another_model_is_not_mounted(told: Web) -> None:

    other = msgspec.structs.replace(snapshot().models[0], fingerprint="cd" * 32, model_id="other")
    told.tell(snapshot(roles=("worker",), models=(other,)), "stranger")
    kvfs = told.get("/v1/network/kvfs")
    assert "stranger" not in {mount["node_id"] for mount in kvfs["mounts"]}
    assert len(kvfs["namespaces"]) == 2


def test_jobs_requests_and_transfers_tell_their_numbers(told: Web) -> None:
    jobs = told.get("/v1/network/jobs")
    assert [(job["job_id"], job["progress"], job["eta_ms"]) for job in jobs["active"]] == [(JOB_ID, 0.25, 900.0)]
    assert [(job["state"], job["asker"], job["reason"], job["tenant"]) for job in jobs["ended"]] == [
        ("failed", "other", "", "")
    ]
    (request,) = told.get("/v1/network/requests")["items"]
    assert (request["source"], request["boundary"], request["diverged_at"], request["ttft_ms"]) == ("worker", 128, 64, 150.0)
    assert request["reason_kinds"] == ["diverged", "other"]
    assert request["sources"][0]["node_id"] == "worker-1"
    assert request["decisions"][0]["costs_ms"] == {
        "compute": 900.0,
        "worker worker-1": 120.0,
        "worker other": 3.0,
        "other": 4.0,
    }
    (transfer,) = told.get("/v1/network/transfers")["items"]
    assert (transfer["payload_bytes"], transfer["ok"], transfer["peer"]) == (4096, False, "other")
    full = told.get("/v1/network/requests", key=API_KEY)["items"][0]
    assert full["reasons"][0].startswith("diverged at token 64")


def test_times_of_events_are_of_the_wall_clock(told: Web) -> None:
    told.clocks.pass_time(30.0)
    (transfer,) = told.get("/v1/network/transfers")["items"]
    assert transfer["at"] == pytest.approx(told.clocks.wall - 30.0)


def test_security_is_told_in_sums_to_all_and_in_detail_with_the_key(told: Web) -> None:
    public = told.get("/v1/network/security")
    assert public == {"total": 4, "refusals_total": 3, "kinds": {"connection_refused": 3, "other": 1}, "items": []}
    full = told.get("/v1/network/security", key=API_KEY)
    assert {item["subject"] for item in full["items"]} == {"192.0.2.99", ""}


def test_series_hold_what_was_charted(told: Web) -> None:
    series = told.get("/v1/network/series")
    point = series["points"][-1]
    assert series["step_s"] == 5.0
    assert (point["bytes_moved"], point["bytes_evicted"], point["refusals"], point["nodes_online"]) == (4096, 128, 3, 3)
    assert point["ttft_ms"] == {"worker": 150.0}
    assert point["decode_tokens_per_second"] == 11.5
    assert told.get("/v1/network/series?resolution=coarse")["step_s"] == 300.0


def test_the_bus_route_names_who_is_not_heard(told: Web) -> None:
    told.feed_figures.update(missed=3, dropped=2)
    bus = told.get("/v1/network/bus")
    assert (bus["state"], bus["missed"], bus["dropped"]) == ("live", 3, 2)
    assert bus["unheard"] == [{"node_id": "far-away", "roles": ["cache"], "told_by": "primary"}]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/network/requests?limit=0", 400),
        ("/v1/network/requests?limit=201", 400),
        ("/v1/network/requests?limit=x", 422),
        ("/v1/network/benchmarks?limit=0", 400),
        ("/v1/network/benchmarks?limit=200", 200),
        ("/v1/network/benchmarks?limit=1.5", 422),
        ("/v1/network/benchmarks/br_none", 404),
        ("/v1/network/benchmarks/br_none/stages", 404),
        ("/v1/network/series?resolution=huge", 422),
        ("/v1/network/events?once=maybe", 422),
        ("/v1/network/events?topics=secrets", 400),
        ("/v1/network/events?topics=,", 400),
        ("/v1/network/maintenance/capture", 401),
        ("/nothing", 404),
        ("/assets/..%2fapp.py", 404),
        ("/assets/../app.py", 404),
    ],
)
def test_what_is_wrong_with_a_read_is_told_by_its_code(web: Web, path: str, status: int) -> None:
    answer = web.call("GET", path)
    assert answer.status == status
    if status != 200:
        assert answer.json.keys() == {"detail"}


def test_the_page_and_its_headers(web: Web) -> None:
    for path in ("/", "/network"):
        answer = web.call("GET", path)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/html")
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
    for path in ("/", "/healthz", "/nothing"):
        headers = web.call("GET", path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Server" not in headers


def test_other_origins_get_no_permission(web: Web) -> None:
    answer = web.call(
        "OPTIONS", "/v1/network/groups", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert answer.status == 405
    assert not any(name.lower().startswith("access-control") for name in answer.headers)
    assert set(answer.headers["Allow"].split(", ")) >= {"GET", "POST"}


def test_an_error_inside_is_told_without_details(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(question: object) -> None:
        raise RuntimeError("telltale prompt /Users/telltale")

    monkeypatch.setattr(web.fleet, "read", fail)
    answer = web.call("GET", "/healthz")
    assert (answer.status, answer.json) == (500, {"detail": "internal error"})


def test_routes_are_unique_and_named_by_the_reference(web: Web) -> None:
    table = [(route.method, route.path) for route in web.routes]
    assert len(table) == len(set(table))
    v1 = "/v1/network"
    assert set(table) >= {
        *(("GET", path) for path in ("/", "/network", "/healthz")),
        *(("GET", f"{v1}/{name}") for name in ("summary", "nodes", "groups", "topology", "kvfs", "tokens", "prefill")),
        *(("GET", f"{v1}/{name}") for name in ("benchmarks", "benchmarks/live", "benchmarks/<run_id>", "events")),
        ("GET", f"{v1}/benchmarks/<run_id>/stages"),
        ("GET", f"{v1}/maintenance/capture"),
        ("POST", f"{v1}/maintenance/capture/drain"),
        *(("POST", f"{v1}/{name}") for name in ("nodes/register", "groups", "telemetry/tokens", "benchmarks")),
        ("PATCH", f"{v1}/benchmarks/<run_id>"),
    }
    assert all(isinstance(route, Route) and route.summary for route in web.routes)
    assert issubclass(api.Summary, msgspec.Struct)
