"""A node's card: what it is, holds and can do right now."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import psutil

from wire.cards import HELD_NAMESPACES_MAX, CacheOffering, Card, HeldNamespace, ModelOffering
from wire.limits import NAME_CHARACTERS_MAX

if TYPE_CHECKING:
    from daemons.node import Node

_MEMORY_BYTES: Final = psutil.virtual_memory().total
"""Looked at once: to look takes a descriptor, and a card is made also when none is free."""


def card_of(node: Node, sequence: int) -> Card:
    """The card as it would be announced now, not signed."""
    return Card(
        node_id=node.local.node_id,
        identity_public_key=node.local.identity.public_key,
        incarnation=node.local.incarnation,
        sequence=sequence,
        roles=node.local.roles,
        software=node.local.software,
        platform=f"{platform.system()} {platform.machine()}",
        memory_bytes=_MEMORY_BYTES,
        endpoints=node.endpoints.card_endpoints(node.own_endpoints.announced()),
        bus_port=node.endpoints.bus_port,
        models=_models(node),
        cache=_cache(node),
        worker=node.worker_offering() if node.worker_offering is not None else None,
        announced_at_unix=time.time(),
        ttl_ms=int(node.settings.ttl_seconds * 1000),
    )


def _models(node: Node) -> tuple[ModelOffering, ...]:
    if node.facts is None:
        return ()
    compatibility = node.facts.compatibility
    return (
        ModelOffering(
            model_id=compatibility.model_id,
            role=node.settings.role,
            quantization=compatibility.quantization[:NAME_CHARACTERS_MAX],
            tokens_per_second=0.0,
            fingerprint=compatibility.fingerprint(),
            tenant=compatibility.tenant_namespace[:NAME_CHARACTERS_MAX],
            compatibility=asdict(compatibility),
        ),
    )


def _cache(node: Node) -> CacheOffering:
    stats = node.store.stats()
    usage = sorted(node.store.usage_by_fingerprint().items(), key=lambda entry: -entry[1])[:HELD_NAMESPACES_MAX]
    # Whoever looks for KV goes past a node that says it holds none.
    draining = node.admission.draining
    return CacheOffering(
        bytes_used=stats.bytes_used,
        bytes_free=max(0, stats.max_bytes - stats.bytes_used),
        entry_count=0 if draining else stats.entry_count,
        epoch=stats.cache_epoch,
        load=0.0,
        evictions=stats.evictions,
        bytes_evicted=stats.bytes_evicted,
        put_failures=stats.put_failures,
        tokens_served=stats.tokens_served,
        held=tuple(HeldNamespace(fingerprint=name, bytes_used=size) for name, size in usage if not draining),
    )
