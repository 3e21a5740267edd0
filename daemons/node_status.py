"""What a node tells about itself when it is asked for its status."""

from __future__ import annotations

import contextlib
import time
from dataclasses import fields
from typing import TYPE_CHECKING

import psutil

from daemons.memory import peak_memory_bytes
from kakeya_zmq.compat import TENANT_KEY_ID
from kakeya_zmq.telemetry import Value
from wire.messages import Status

if TYPE_CHECKING:
    from daemons.node import Node


class NodeStatus:
    """The status of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._process = psutil.Process()
        self._started_unix = time.time()
        self._memory_bytes = 0

    def _resident_bytes(self) -> int:
        # To look takes a descriptor, and a status is told also when none is free: then as it was.
        with contextlib.suppress(OSError):
            self._memory_bytes = self._process.memory_info().rss
        return self._memory_bytes

    def tell(self) -> Status:
        """Everything this node tells about itself."""
        node = self._node
        sections: dict[str, dict[str, Value]] = {
            "node": {
                "state": node.state,
                "software": node.local.software,
                "uptime_s": round(time.time() - self._started_unix, 1),
                "address": str(node.address),
                "bus_port": node.endpoints.bus_port,
                "connections": node.endpoints.connections,
                "descriptors_open": node.descriptors.used,
                "descriptors_max": node.descriptors.limit,
                "descriptor_level": node.descriptors.level.value,
                "audit_failures": node.security.audit.failures,
                "memory_bytes": self._resident_bytes(),
                "memory_peak_bytes": peak_memory_bytes(),
                "open_lane_threads": len(node.bulk),
                "pooled_buffer_bytes": node.bulk.pool.idle_bytes,
                "lanes_opened": node.bulk.opened,
                **node.peers.traffic(),
                "fleet_exchanges": node.membership.exchanges,
                "sealing": "aes-256-gcm" if node.has_aes else "secretbox",
                **node.dispatcher.figures(),
            },
            "cache": _vars_of(node.store.stats()),
            "prefill": node.counters.snapshot(),
            "refusals": dict(node.security.refusals),
        }
        if node.facts is not None:
            sections["compatibility"] = {**_vars_of(node.facts.compatibility), TENANT_KEY_ID: node.tenant_key_id}
        for section in node.sections:
            name, figures = section()
            sections[name] = figures
        return Status(
            node_id=node.local.node_id,
            roles=node.local.roles,
            sections=sections,
            peers=tuple(node.membership.rows()),
            recent=node.notes.recent,
        )


def roster_section(node: Node) -> tuple[str, dict[str, Value]]:
    """What of the fleet's roster holds here, and what revocations emptied."""
    entitlement = node.security.entitlement
    roster = entitlement.access.roster
    return "roster", {
        "listed_nodes": len(roster.nodes) if roster is not None else None,
        "revoked_keys": len(entitlement.revocations),
        "roster_usable": not entitlement.error,
        "emptyings": node.emptying.count,
        "emptied_bytes": node.emptying.bytes_dropped,
        "next_emptying_s": node.emptying.next_s(),
    }


def _vars_of(value: object) -> dict[str, Value]:
    """The fields of a frozen dataclass of plain figures."""
    return {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
