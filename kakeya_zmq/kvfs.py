"""kvfs: the fleet's KV as a tree of names, made of capability cards. Naming only, and pure.

A *namespace* is what nodes share that run exactly the same model for the same tenant: ``kv://tenant/model/fingerprint``.
Its *mounts* are the stores that hold something of it, or would. KV stays in the memory of each machine and is copied into
a primary once, before it decodes; so there is never coherent shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypedDict
from urllib.parse import quote

from wire.cards import Card

ACCESS: Final = "content-addressed-lookup-fetch-import"
TIER_HOT: Final = "hot"
"""A primary's own store: nothing has to travel."""
TIER_COLD: Final = "cold-offload"
"""Another node's store."""


class Mount(TypedDict):
    """A store of a namespace. ``bytes_used`` is of this namespace, ``bytes_free`` and ``entry_count`` of the whole store."""

    node_id: str
    address: str
    bytes_used: int
    bytes_free: int
    entry_count: int
    network: str
    tier: str


class NamespaceView(TypedDict):
    """One namespace; the sums are over its mounts."""

    uri: str
    tenant: str
    model_id: str
    fingerprint: str
    access: str
    coherent_shared_memory: bool
    mounts: list[Mount]
    bytes_used: int
    bytes_free: int
    entry_count: int


@dataclass(slots=True)
class _Namespace:
    tenant: str = ""
    model_id: str = ""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """By node id: of every node that holds something, or runs the model and has a store."""


def namespaces(cards: Iterable[Card]) -> list[NamespaceView]:
    """Every namespace that some node runs a model of or holds KV of; those with most bytes first.

    A namespace whose model nobody runs any more has an empty tenant and model: names travel with models only.
    """
    by_id = {card.node_id: card for card in cards}
    found: dict[bytes, _Namespace] = {}
    for card in by_id.values():
        for model in card.models:
            if len(model.fingerprint) == 32:
                _name(found, model.fingerprint, model.tenant, model.model_id)
        if card.worker is not None:
            compatibility = card.worker.compatibility
            tenant, model_id = compatibility.get("tenant_namespace", ""), compatibility.get("model_id", "")
            _name(found, card.worker.fingerprint, str(tenant), str(model_id))
    for card in by_id.values():
        if card.cache is None:
            continue
        running = {model.fingerprint for model in card.models} | ({card.worker.fingerprint} if card.worker else set())
        for fingerprint in running & found.keys():
            found[fingerprint].held_bytes[card.node_id] = 0
        for held in card.cache.held:
            found.setdefault(held.fingerprint, _Namespace()).held_bytes[card.node_id] = held.bytes_used
    views = [_view(fingerprint, space, by_id) for fingerprint, space in found.items()]
    return sorted(views, key=lambda view: (-view["bytes_used"], view["uri"]))


def _name(found: dict[bytes, _Namespace], fingerprint: bytes, tenant: str, model_id: str) -> None:
    space = found.setdefault(fingerprint, _Namespace())
    space.tenant = space.tenant or tenant
    space.model_id = space.model_id or model_id


def _view(fingerprint: bytes, space: _Namespace, cards: dict[str, Card]) -> NamespaceView:
    mounts = [_mount(cards[node_id], size) for node_id, size in sorted(space.held_bytes.items())]
    tenant = space.tenant or "default"
    return NamespaceView(
        uri=f"kv://{quote(tenant, safe='')}/{quote(space.model_id or 'unknown', safe='')}/{fingerprint.hex()}",
        tenant=space.tenant,
        model_id=space.model_id,
        fingerprint=fingerprint.hex(),
        access=ACCESS,
        coherent_shared_memory=False,
        mounts=mounts,
        bytes_used=sum(mount["bytes_used"] for mount in mounts),
        bytes_free=sum(mount["bytes_free"] for mount in mounts),
        entry_count=sum(mount["entry_count"] for mount in mounts),
    )


def _mount(card: Card, held_bytes: int) -> Mount:
    assert card.cache is not None, "only nodes with a store are mounted"
    best = max(card.endpoints, key=lambda endpoint: endpoint.priority, default=None)
    return Mount(
        node_id=card.node_id,
        address=best.address if best is not None else "",
        bytes_used=held_bytes,
        bytes_free=card.cache.bytes_free,
        entry_count=card.cache.entry_count,
        network=best.network if best is not None and best.network else "default",
        tier=TIER_HOT if "primary" in card.roles else TIER_COLD,
    )
