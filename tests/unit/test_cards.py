"""Capability cards."""

from __future__ import annotations

import math

import msgspec
import pytest

from wire import limits
from wire.cards import CacheOffering, Card, Endpoint, ModelOffering, WorkerOffering, open_card, sign_card
from wire.errors import AuthenticationError, LocalProtocolError, RemoteProtocolError
from wire.keys import NodeIdentity

IDENTITY = NodeIdentity(b"i" * 32)


def make_card(**changes: object) -> Card:
    card = Card(
        node_id="worker-1",
        identity_public_key=IDENTITY.public_key,
        incarnation=3,
        sequence=9,
        roles=("worker", "cache"),
        software="kakeya-zmq 0.1",
        platform="macOS arm64",
        memory_bytes=2**34,
        endpoints=(
            Endpoint(address="10.0.0.7:52051", network="lan", priority=50),
            Endpoint(address="[fe80::1%en0]:52051", network="thunderbolt", priority=100, key_id=b"k" * 8),
        ),
        bus_port=52052,
        models=(ModelOffering(model_id="m", role="worker", quantization="4bit", tokens_per_second=0.0),),
        cache=CacheOffering(
            bytes_used=1,
            bytes_free=2,
            entry_count=3,
            epoch=4,
            load=0.5,
            evictions=5,
            bytes_evicted=6,
            put_failures=7,
            tokens_served=8,
            fingerprints=(b"f" * 32,),
        ),
        worker=WorkerOffering(
            fingerprint=b"f" * 32,
            compatibility={"model_id": "m", "window_size": 0},
            max_concurrent_jobs=1,
            inflight_jobs=0,
            queued_jobs=0,
            queued_tokens=0,
            load=0.0,
            prefill_tokens_per_second=812.5,
            ram_bytes_free=2**33,
            accepts_jobs=True,
        ),
        announced_at_unix=1.7e9,
        ttl_ms=120_000,
    )
    return msgspec.structs.replace(card, **changes)


def test_round_trip() -> None:
    card = make_card()
    data = sign_card(card, IDENTITY)
    assert len(data) < 1024
    assert open_card(data) == card


def test_a_bare_card() -> None:
    card = make_card(models=(), cache=None, worker=None, endpoints=(), bus_port=0)
    assert open_card(sign_card(card, IDENTITY)) == card


def test_any_changed_byte_is_noticed() -> None:
    data = sign_card(make_card(), IDENTITY)
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 0x20
        with pytest.raises(RemoteProtocolError):
            open_card(bytes(changed))


def test_only_the_node_itself_signs() -> None:
    with pytest.raises(LocalProtocolError):
        sign_card(make_card(), NodeIdentity.generate())


def test_a_signature_of_another_key_is_refused() -> None:
    other = NodeIdentity(b"o" * 32)
    card, signature = msgspec.msgpack.decode(sign_card(make_card(), IDENTITY))
    forged = msgspec.msgpack.encode([card, other.sign(b"kakeya-zmq card\0" + card)])
    with pytest.raises(AuthenticationError):
        open_card(forged)
    assert open_card(msgspec.msgpack.encode([card, signature])) == make_card()


@pytest.mark.parametrize(
    "changes",
    [
        {"node_id": ""},
        {"node_id": "n" * 129},
        {"roles": ("r",) * 9},
        {"bus_port": 65_536},
        {"ttl_ms": 0},
        {"sequence": -1},
        {"announced_at_unix": math.nan},
        {"models": (ModelOffering(model_id="m", role="", quantization="", tokens_per_second=math.inf),)},
    ],
)
def test_what_others_would_refuse_is_not_sent(changes: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        sign_card(make_card(**changes), IDENTITY)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "tcp://host:1", "ho st:1", "host:1\n", "host:123456", "[::1]", "::1:80", "a/b:1"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(LocalProtocolError):
        sign_card(make_card(endpoints=(Endpoint(address=address, network="lan", priority=1),)), IDENTITY)


def test_oversize() -> None:
    fields = {f"{index:0100d}": "v" * 512 for index in range(32)}
    worker = make_card().worker
    assert worker is not None
    with pytest.raises(LocalProtocolError, match="bytes, more than"):
        sign_card(make_card(worker=msgspec.structs.replace(worker, compatibility=fields)), IDENTITY)
    with pytest.raises(RemoteProtocolError, match="oversize"):
        open_card(bytes(limits.CARD_BYTES_MAX + 1))
