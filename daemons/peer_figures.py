"""What a table of peers tells in its node's status. Addresses are for the administrator, who holds the PSK."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from daemons.peer_links import PeerLink, PeerLinks
from daemons.peer_node import PeerNode
from kakeya_zmq.io.control_client import LinkState
from kakeya_zmq.telemetry import Value


def traffic_figures(counted: Counter[str]) -> dict[str, int]:
    """Messages that were sent to other nodes and that came back; pings don't count."""
    return {f"fleet_{name}": counted[name] for name in ("requests", "updates", "cancels", "answers")}


def peer_rows(nodes: Iterable[PeerNode], links: PeerLinks) -> list[dict[str, Value]]:
    """One row a node, and one a seed where nobody has answered yet."""
    rows = [_row(link, "", "") for link in links if link.node_id is None]
    for node in nodes:
        offers = node.choice.offers()
        own = links.of(node.node_id)
        used = next((link for link in own if link.address == node.choice.in_use), None)
        shown = used or next(iter(own), None)
        if shown is not None:
            network = next((offer.network for offer in offers if offer.address == shown.address), "")
            rows.append({**_row(shown, node.node_id, network), "endpoints": _endpoints_line(node)})
        elif offers:  # the next attempt waits
            rows.append(
                {
                    "node_id": node.node_id,
                    "address": offers[0].address,
                    "network": offers[0].network,
                    "state": LinkState.DOWN.value,
                    "round_trip_ms": None,
                    "error": node.down_because or None,
                    "endpoints": _endpoints_line(node),
                }
            )
    return rows


def _row(link: PeerLink, node_id: str, network: str) -> dict[str, Value]:
    client = link.client
    return {
        "node_id": node_id,
        "address": link.address,
        "network": network,
        "state": client.state.value,
        "round_trip_ms": round(client.round_trip_ms, 3) if client.round_trip_ms is not None else None,
        "error": client.last_error,
    }


def _endpoints_line(node: PeerNode) -> str:
    """All ways to a node, best first, in one text."""
    words = []
    for offer in node.choice.offers():
        round_trip_ms = node.choice.round_trip_ms(offer.address)
        measured = f" {round_trip_ms:.2f} ms" if round_trip_ms is not None else ""
        state = node.choice.state(offer.address).value
        words.append(f"{offer.address} ({offer.network} {offer.priority}, {state}{measured})")
    return "; ".join(words)
