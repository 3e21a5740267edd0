"""Connections of a node to the others: through configured addresses (seeds) and through cards it learnt of.

One long-lived control connection for each node. A seed is kept up for ever; a connection made from a card ends with it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import Address, parse_address
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from wire.cards import Card
from wire.errors import ConfigError
from wire.ids import NodeId
from wire.keys import FleetKey


@dataclass(slots=True)
class _Link:
    client: ControlClient
    seed: bool
    node_id: str | None = None


class PeerTable:
    """All outgoing control connections of one node.

    Args:
        on_up: called with the peer and its connection when a session is established.
        on_down: called with the node id (or None) and the reason when one ends or cannot be made.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        local: LocalNode,
        fleet_key: FleetKey,
        on_up: Callable[[PeerInfo, ControlClient], None],
        on_down: Callable[[str | None, str], None],
    ) -> None:
        self._reactor = reactor
        self._local = local
        self._fleet_key = fleet_key
        self._on_up = on_up
        self._on_down = on_down
        self._links: list[_Link] = []
        self._ended: Counter[str] = Counter()
        """What connections that were closed had counted."""

    def add_seed(self, address: Address) -> None:
        self._connect(address, None, seed=True)

    def ensure(self, card: Card) -> None:
        """Connect to the node a card describes, unless there is a connection already.

        A node that was restarted may serve elsewhere: a connection that is down and leads to none of the card's addresses
        is replaced.
        """
        addresses = _addresses(card)
        for link in [link for link in self._links if link.node_id == card.node_id]:
            if link.client.peer is not None or link.client.address in addresses:
                return
            if not link.seed:
                self._let_go(link)
        if addresses and not any(link.client.address == addresses[0] for link in self._links):
            self._connect(addresses[0], NodeId(card.node_id), seed=False)

    def forget(self, node_id: str) -> None:
        """The node's card expired: end the connection that was made from it."""
        for link in [link for link in self._links if link.node_id == node_id and not link.seed]:
            self._let_go(link)

    def find(self, node_id: str) -> ControlClient | None:
        """The connection to a node, if its session is up."""
        for link in self._links:
            if link.node_id == node_id and link.client.peer is not None:
                return link.client
        return None

    def connected(self) -> list[tuple[str, ControlClient]]:
        return [(link.node_id, link.client) for link in self._links if link.node_id and link.client.peer is not None]

    def traffic(self) -> dict[str, int]:
        """Messages that were sent to other nodes and that came back, over all connections so far; pings don't count."""
        total = self._ended.copy()
        for link in self._links:
            total.update(link.client.counters)
        return {f"fleet_{name}": total[name] for name in ("requests", "updates", "cancels", "answers")}

    def rows(self) -> list[dict[str, int | float | str | bool | None]]:
        """One row a connection, for status. Addresses are for the administrator, who holds the PSK."""
        return [
            {
                "node_id": link.node_id or "",
                "address": str(link.client.address),
                "state": link.client.state.value,
                "round_trip_ms": round(link.client.round_trip_ms, 3) if link.client.round_trip_ms is not None else None,
                "error": link.client.last_error,
            }
            for link in self._links
        ]

    def close(self) -> None:
        for link in self._links:
            link.client.close()
        self._links.clear()

    def _connect(self, address: Address, node_id: NodeId | None, *, seed: bool) -> None:
        def up(peer: PeerInfo) -> None:
            if peer.node_id == self._local.node_id:
                # A seed list may be the same on every node, ourselves included.
                self._reactor.post(lambda: self._drop(link))
                return
            link.node_id = peer.node_id
            self._on_up(peer, link.client)

        def down(reason: str) -> None:
            self._on_down(link.node_id, reason)

        client = ControlClient(
            self._reactor,
            address=address,
            local=self._local,
            fleet_key=self._fleet_key,
            expected_node_id=node_id,
            on_up=up,
            on_down=down,
        )
        link = _Link(client, seed=seed, node_id=node_id)
        self._links.append(link)

    def _drop(self, link: _Link) -> None:
        if link in self._links:
            self._let_go(link)

    def _let_go(self, link: _Link) -> None:
        self._links.remove(link)
        link.client.close()
        self._ended.update(link.client.counters)


def _addresses(card: Card) -> list[Address]:
    """Where a node can be reached, best first; what cannot be parsed is left out."""
    addresses: list[Address] = []
    for endpoint in sorted(card.endpoints, key=lambda endpoint: -endpoint.priority):
        with contextlib.suppress(ConfigError):
            addresses.append(parse_address(endpoint.address))
    return addresses
