"""Signed cards of made-up nodes, for tests of everything that merges them."""

from __future__ import annotations

import hashlib
from functools import cache

from wire.cards import Card, Endpoint, sign_card
from wire.keys import NodeIdentity


@cache
def identity(name: str) -> NodeIdentity:
    return NodeIdentity(hashlib.sha256(name.encode()).digest())


@cache
def card_blob(
    node: str,
    incarnation: int = 1,
    sequence: int = 1,
    *,
    ttl_ms: int = 10_000,
    key: str = "",
    address: str = "",
    announced_at_unix: float = 0.0,
) -> bytes:
    owner = identity(key or node)
    card = Card(
        node_id=node,
        identity_public_key=owner.public_key,
        incarnation=incarnation,
        sequence=sequence,
        roles=("cache",),
        software="",
        platform="",
        memory_bytes=0,
        endpoints=(Endpoint(address=address, network="lan", priority=50),) if address else (),
        bus_port=0,
        announced_at_unix=announced_at_unix,
        ttl_ms=ttl_ms,
    )
    return sign_card(card, owner)
