"""The snapshot of a node, made of what it tells the fleet (its card), the administrator (its status) and itself: pure."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kakeya_zmq.telemetry import Value, bounded_ms
from wire.cards import Card
from wire.errors import LocalProtocolError
from wire.events import (
    FIGURES_MAX,
    PEERS_MAX,
    SECTIONS_MAX,
    EndpointView,
    ModelView,
    NodeSnapshot,
    PeerView,
    WorkerView,
    encode_event,
)
from wire.limits import NAME_CHARACTERS_MAX, TEXT_CHARACTERS_MAX

_LINK_STATES: Mapping[str, str] = {"up": "connected", "connecting": "connecting", "down": "down", "closed": "down"}


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """What a node knows of another one. ``link``: state of the connection, "" without one."""

    node_id: str
    card: Card | None = None
    card_age_ms: int = 0
    clock_skew_ms: float = 0.0
    link: str = ""
    bus_address: str = ""
    round_trip_ms: float = 0.0
    megabytes_per_second: float = 0.0


def make_snapshot(
    card: Card,
    *,
    state: str,
    uptime_s: float,
    interval_s: float,
    sections: Mapping[str, Mapping[str, Value]],
    peers: Iterable[KnownPeer],
    tokens_per_second: float = 0.0,
    cache_format_version: str = "",
) -> NodeSnapshot:
    """The whole present state of the node that ``card`` describes.

    Args:
        sections: as in its Status.
        tokens_per_second: prefill, as measured; 0 when the node has no model.
        cache_format_version: of the model it has loaded.
    """
    return NodeSnapshot(
        roles=card.roles,
        software=card.software,
        platform=card.platform,
        state=state,
        uptime_s=bounded_ms(uptime_s),
        memory_bytes=card.memory_bytes,
        interval_ms=max(1, round(interval_s * 1000)),
        ttl_ms=card.ttl_ms,
        endpoints=tuple(
            EndpointView(address=endpoint.address, network=endpoint.network, priority=endpoint.priority)
            for endpoint in card.endpoints
        ),
        models=_models(card, tokens_per_second, cache_format_version),
        worker=_worker(card),
        sections=_bounded_sections(sections),
        peers=tuple(peer_view(peer) for peer in peers),
    )


def _models(card: Card, tokens_per_second: float, cache_format_version: str) -> tuple[ModelView, ...]:
    return tuple(
        ModelView(
            model_id=model.model_id,
            role=model.role,
            quantization=model.quantization,
            tokens_per_second=bounded_ms(model.tokens_per_second or tokens_per_second),
            cache_format_version=cache_format_version[:NAME_CHARACTERS_MAX],
            fingerprint=model.fingerprint.hex(),
            tenant=model.tenant or "default",
        )
        for model in card.models
    )


def _worker(card: Card) -> WorkerView | None:
    worker = card.worker
    if worker is None:
        return None
    return WorkerView(
        max_concurrent_jobs=worker.max_concurrent_jobs,
        inflight_jobs=worker.inflight_jobs,
        queued_jobs=worker.queued_jobs,
        queued_tokens=worker.queued_tokens,
        load=worker.load,
        tokens_per_second=bounded_ms(worker.prefill_tokens_per_second),
        ram_bytes_free=worker.ram_bytes_free,
        accepts_jobs=worker.accepts_jobs,
    )


def _bounded_sections(sections: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Value]]:
    """Names and texts cut to what readers accept; texts in figures are this node's own (no prompt is ever among them)."""
    return {
        name[:NAME_CHARACTERS_MAX]: {
            figure[:NAME_CHARACTERS_MAX]: value[:TEXT_CHARACTERS_MAX] if isinstance(value, str) else value
            for figure, value in list(figures.items())[:FIGURES_MAX]
            if figure
        }
        for name, figures in list(sections.items())[:SECTIONS_MAX]
    }


# --- peers -------------------------------------------------------------------------------------------------------------


def known_peers(
    cards: Sequence[Card],
    rows: Sequence[Mapping[str, Value]],
    *,
    card_age_ms: Callable[[str], int | None],
    clock_skew_ms: Callable[[str], float | None],
    megabytes_per_second: Callable[[str], float],
    may_dial: Callable[[str], bool],
) -> tuple[KnownPeer, ...]:
    """Every node that there is a card of or a connection to, by name.

    Args:
        rows: one a connection, as in Status.peers; of several to one node the one that is up counts.
        may_dial: whether a host may be dialled that a card names (kakeya_zmq.protocol.dialling): others are not told.
    """
    links: dict[str, Mapping[str, Value]] = {}
    for row in rows:
        node_id = str(row.get("node_id") or "")
        if node_id and (node_id not in links or row.get("state") == "up"):
            links[node_id] = row
    by_id = {card.node_id: card for card in cards}
    return tuple(
        KnownPeer(
            node_id=node_id,
            card=by_id.get(node_id),
            card_age_ms=card_age_ms(node_id) or 0,
            clock_skew_ms=clock_skew_ms(node_id) or 0.0,
            link=str(links[node_id].get("state") or "") if node_id in links else "",
            bus_address=bus_address(
                by_id.get(node_id),
                _host_of(str(links[node_id].get("address") or "")) if node_id in links else "",
                may_dial,
            ),
            round_trip_ms=_number(links[node_id].get("round_trip_ms")) if node_id in links else 0.0,
            megabytes_per_second=megabytes_per_second(node_id),
        )
        for node_id in sorted(by_id.keys() | links.keys())
    )


def peer_view(peer: KnownPeer) -> PeerView:
    """A peer as readers see it."""
    card = peer.card
    return PeerView(
        node_id=peer.node_id,
        roles=card.roles if card is not None else (),
        state=_LINK_STATES.get(peer.link, "known"),
        bus_address=peer.bus_address,
        rtt_ms=bounded_ms(peer.round_trip_ms),
        megabytes_per_second=bounded_ms(peer.megabytes_per_second),
        card_age_ms=max(0, peer.card_age_ms),
        ttl_ms=card.ttl_ms if card is not None else 0,
        clock_skew_ms=round(peer.clock_skew_ms, 1),
    )


def bus_address(card: Card | None, host: str, may_dial: Callable[[str], bool]) -> str:
    """Where a node's bus listens, as far as can be told; empty when it has none or it cannot.

    The node's own addresses come first: they are good for readers elsewhere. Only a node that names nothing but its
    loopback is told by the host we reach it on. Readers dial what they are told, so that no host is told that may not be
    dialled.
    """
    if card is None or not card.bus_port:
        return ""
    hosts = [_host_of(e.address) for e in sorted(card.endpoints, key=lambda endpoint: -endpoint.priority)]
    named = [name for name in hosts if may_dial(name)]
    reached = host if may_dial(host) else ""
    abroad = next((name for name in [*named, reached] if name and not _is_loopback(name)), "")
    chosen = abroad or reached or next(iter(named), "")
    return f"[{chosen}]:{card.bus_port}" if ":" in chosen else f"{chosen}:{card.bus_port}" if chosen else ""


def _host_of(address: str) -> str:
    host = address.rpartition(":")[0]
    return host[1:-1] if host.startswith("[") else host


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost"


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# --- bytes -------------------------------------------------------------------------------------------------------------


def encode_snapshot(snapshot: NodeSnapshot, turn: int) -> bytes:
    """The snapshot as it travels. Of more peers than fit into one message, each turn carries the next ones.

    Raises:
        LocalProtocolError: it is too large without any peer.
    """
    peers = snapshot.peers
    count = min(len(peers), PEERS_MAX)
    while True:
        start = turn * count % len(peers) if count < len(peers) else 0
        shown = (*peers[start:], *peers[:start])[:count]
        try:
            return encode_event(msgspec.structs.replace(snapshot, peers=shown))
        except LocalProtocolError:
            if count == 0:
                raise
            count //= 2
