"""kvfs: the tree of names that cards make, and the snapshot's view of peers that they make too."""

from __future__ import annotations

from typing import Any

import pytest

from kakeya_zmq.kvfs import namespaces
from kakeya_zmq.protocol.dialling import is_dialable
from kakeya_zmq.telemetry_feed_snapshot import encode_snapshot, known_peers, make_snapshot, peer_view
from wire.bus import PAYLOAD_BYTES_MAX, Topic
from wire.cards import CacheOffering, Card, Endpoint, HeldNamespace, ModelOffering, WorkerOffering
from wire.events import NodeSnapshot, PeerView, decode_event

ONE, OTHER = b"1" * 32, b"2" * 32


def cache(entries: int = 3, free: int = 1_000, **held: int) -> CacheOffering:
    names = {"one": ONE, "other": OTHER}
    return CacheOffering(
        bytes_used=sum(held.values()),
        bytes_free=free,
        entry_count=entries,
        epoch=1,
        load=0.0,
        evictions=0,
        bytes_evicted=0,
        put_failures=0,
        tokens_served=0,
        held=tuple(HeldNamespace(fingerprint=names[name], bytes_used=size) for name, size in held.items()),
    )


def model(fingerprint: bytes = ONE, tenant: str = "default", name: str = "gemma 3/270m") -> ModelOffering:
    return ModelOffering(
        model_id=name, role="primary", quantization="", tokens_per_second=0.0, fingerprint=fingerprint, tenant=tenant
    )


def worker(fingerprint: bytes = ONE) -> WorkerOffering:
    return WorkerOffering(
        fingerprint=fingerprint,
        compatibility={"model_id": "gemma 3/270m", "tenant_namespace": "default"},
        max_concurrent_jobs=1,
        inflight_jobs=1,
        queued_jobs=2,
        queued_tokens=300,
        load=0.5,
        prefill_tokens_per_second=120.0,
        ram_bytes_free=7,
        accepts_jobs=True,
    )


def card(node: str, role: str, *endpoints: Endpoint, **fields: Any) -> Card:
    return Card(
        node_id=node,
        identity_public_key=b"k" * 32,
        incarnation=1,
        sequence=1,
        roles=(role,),
        software="test",
        platform="Darwin arm64",
        memory_bytes=5,
        endpoints=endpoints or (Endpoint(address=f"10.0.0.1:{50_000 + len(node)}", network="lan", priority=50),),
        bus_port=6_000,
        **fields,
    )


# --- kvfs --------------------------------------------------------------------------------------------------------------


def test_a_namespace_has_the_stores_that_hold_it_and_their_sums() -> None:
    thunderbolt = Endpoint(address="169.254.1.2:51051", network="thunderbolt", priority=100)
    lan = Endpoint(address="10.0.0.1:51051", network="lan", priority=50)
    (view,) = namespaces(
        [
            card("primary", "primary", lan, thunderbolt, models=(model(),), cache=cache(4, 900, one=100)),
            card("cache", "cache", cache=cache(2, 500, one=60)),
        ]
    )
    assert view["uri"] == f"kv://default/gemma%203%2F270m/{ONE.hex()}"
    assert view["access"] == "content-addressed-lookup-fetch-import"
    assert view["coherent_shared_memory"] is False
    hot = next(mount for mount in view["mounts"] if mount["node_id"] == "primary")
    assert hot == {
        "node_id": "primary",
        "address": "169.254.1.2:51051",
        "bytes_used": 100,
        "bytes_free": 900,
        "entry_count": 4,
        "network": "thunderbolt",
        "tier": "hot",
    }
    assert [mount["tier"] for mount in view["mounts"] if mount["node_id"] == "cache"] == ["cold-offload"]
    assert (view["bytes_used"], view["bytes_free"], view["entry_count"]) == (160, 1_400, 6)


def test_fingerprints_are_compared_not_only_names() -> None:
    views = namespaces(
        [
            card("a", "primary", models=(model(ONE),), cache=cache(one=10)),
            card("b", "primary", models=(model(OTHER),), cache=cache(other=30)),
        ]
    )
    assert [[mount["node_id"] for mount in view["mounts"]] for view in views] == [["b"], ["a"]]
    assert len({view["uri"] for view in views}) == 2
    assert len({view["model_id"] for view in views}) == 1


def test_a_worker_names_its_namespace_and_is_mounted_before_it_holds_anything() -> None:
    (view,) = namespaces([card("w", "worker", worker=worker(), cache=cache())])
    assert (view["tenant"], view["model_id"], view["bytes_used"]) == ("default", "gemma 3/270m", 0)
    assert [mount["tier"] for mount in view["mounts"]] == ["cold-offload"]


def test_what_nobody_runs_any_more_has_no_name() -> None:
    (view,) = namespaces([card("c", "cache", cache=cache(other=5))])
    assert view["uri"] == f"kv://default/unknown/{OTHER.hex()}"
    assert (view["tenant"], view["model_id"]) == ("", "")


def test_a_node_without_endpoints_or_store() -> None:
    bare = Card(**{**{name: getattr(card("c", "cache"), name) for name in Card.__struct_fields__}, "endpoints": ()})
    assert namespaces([bare]) == []
    holding = Card(**{**{name: getattr(bare, name) for name in Card.__struct_fields__}, "cache": cache(one=5)})
    (view,) = namespaces([holding])
    assert (view["mounts"][0]["address"], view["mounts"][0]["network"]) == ("", "default")


# --- the snapshot's peers ------------------------------------------------------------------------------------------------


def peers_of(cards: list[Card], rows: list[dict[str, Any]]) -> dict[str, PeerView]:
    known = known_peers(
        cards,
        rows,
        card_age_ms=lambda node_id: 1_500 if node_id == "b" else None,
        clock_skew_ms=lambda node_id: -42.0 if node_id == "b" else None,
        megabytes_per_second=lambda node_id: 110.0 if node_id == "b" else 0.0,
        may_dial=lambda host: is_dialable(host, link_local=False, interfaces={"en0"}),
    )
    return {peer.node_id: peer_view(peer) for peer in known}


def test_peers_are_told_with_what_is_measured_of_them() -> None:
    rows = [
        {"node_id": "b", "address": "10.0.0.9:51051", "state": "down", "round_trip_ms": None},
        {"node_id": "b", "address": "10.0.0.9:51051", "state": "up", "round_trip_ms": 0.4},
        {"node_id": "", "address": "10.0.0.8:51051", "state": "connecting", "round_trip_ms": None},
        {"node_id": "d", "address": "10.0.0.7:51051", "state": "connecting", "round_trip_ms": None},
    ]
    peers = peers_of([card("b", "worker"), card("c", "cache")], rows)
    assert peers["b"] == PeerView(
        node_id="b",
        roles=("worker",),
        state="connected",
        bus_address="10.0.0.1:6000",
        rtt_ms=0.4,
        megabytes_per_second=110.0,
        card_age_ms=1_500,
        ttl_ms=120_000,
        clock_skew_ms=-42.0,
    )
    assert (peers["c"].state, peers["c"].rtt_ms, peers["c"].bus_address) == ("known", 0.0, "10.0.0.1:6000")
    assert (peers["d"].state, peers["d"].bus_address) == ("connecting", "")
    assert set(peers) == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("addresses", "host", "told"),
    [
        (["127.0.0.1:1"], "127.0.0.1", "127.0.0.1:6000"),
        (["127.0.0.1:1"], "10.0.0.5", "10.0.0.5:6000"),
        (["10.0.0.4:1"], "127.0.0.1", "10.0.0.4:6000"),
        (["[fe80::2%en0]:1"], "", "[fe80::2%en0]:6000"),
        (["localhost:1"], "[::1]", "[::1]:6000"),
        # Readers dial what is told: names, other spellings and addresses of no machine are not.
        (["mac.local:1"], "", ""),
        (["mac.local:1", "10.0.0.4:1"], "", "10.0.0.4:6000"),
        (["127.1:1"], "", ""),
        (["010.0.0.4:1"], "10.0.0.5", "10.0.0.5:6000"),
        (["0.0.0.0:1"], "", ""),
        (["224.0.0.1:1"], "", ""),
        (["[fe80::2%utun9]:1"], "", ""),
        (["169.254.1.1:1"], "", ""),
        (["127.0.0.1:1"], "mac.local", "127.0.0.1:6000"),
    ],
)
def test_a_bus_is_told_by_an_address_that_is_good_elsewhere(addresses: list[str], host: str, told: str) -> None:
    endpoints = [Endpoint(address=address, network="lan", priority=50) for address in addresses]
    rows = [{"node_id": "b", "address": f"{host}:9", "state": "up", "round_trip_ms": 1.0}] if host else []
    assert peers_of([card("b", "cache", *endpoints)], rows)["b"].bus_address == told


def snapshot_with(count: int) -> NodeSnapshot:
    cards = [card(f"node-{number:03d}-" + "x" * 90, "cache") for number in range(count)]
    known = known_peers(
        cards,
        [],
        card_age_ms=lambda n: 1,
        clock_skew_ms=lambda n: 0.0,
        megabytes_per_second=lambda n: 0.0,
        may_dial=lambda host: True,
    )  # fmt: skip
    own = card("me", "worker", models=(model(),), worker=worker(), cache=cache())
    return make_snapshot(
        own,
        state="serving",
        uptime_s=5.0,
        interval_s=2.0,
        sections={"node": {"state": "serving", "x": None}, "refusals": {"r" * 200: 1}},
        peers=known,
        tokens_per_second=99.0,
        cache_format_version="kakeya-zmq-v1",
    )


def test_a_snapshot_is_made_of_the_card_and_the_status() -> None:
    found = decode_event(Topic.NODE, encode_snapshot(snapshot_with(3), 0))
    assert isinstance(found, NodeSnapshot)
    assert (found.roles, found.platform, found.interval_ms, found.ttl_ms) == (("worker",), "Darwin arm64", 2_000, 120_000)
    assert found.worker is not None
    assert (found.worker.queued_tokens, found.worker.tokens_per_second) == (300, 120.0)
    (told,) = found.models
    assert (told.fingerprint, told.tokens_per_second, told.tenant) == (ONE.hex(), 99.0, "default")
    assert found.sections["node"] == {"state": "serving", "x": None}
    assert found.sections["refusals"] == {"r" * 128: 1}
    assert len(found.peers) == 3


def test_of_too_many_peers_each_snapshot_carries_the_next_ones() -> None:
    snapshot = snapshot_with(700)
    seen: set[str] = set()
    for turn in range(8):
        payload = encode_snapshot(snapshot, turn)
        assert len(payload) <= PAYLOAD_BYTES_MAX
        found = decode_event(Topic.NODE, payload)
        assert isinstance(found, NodeSnapshot)
        assert found.peers
        seen |= {peer.node_id for peer in found.peers}
    assert len(seen) == 700
