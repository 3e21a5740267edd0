"""Whom a primary asks: the nodes that are connected and may be asked, and what is known of each and of the link to it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import asdict

from daemons.node import Node
from kakeya_zmq.compat import TENANT_KEY_ID
from kakeya_zmq.config import Settings
from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.prepare_values import PeerView, WorkerView
from kakeya_zmq.protocol.publish import replica_candidates
from kakeya_zmq.roster import NOT_ASKED
from wire.cards import Card
from wire.ids import NodeId


class PrimaryPeers:
    """Of one primary, whose model is loaded. Use it on the reactor's thread.

    Args:
        facts: the model's.
        tenant_key_id: tells which key the tenant's hashes are made with; workers have to have the same.
        rates: what was measured of links.
        took_at: node → when it last took parts of ours, seconds on the reactor's clock; None: never.
    """

    def __init__(
        self,
        node: Node,
        settings: Settings,
        facts: ModelFacts,
        tenant_key_id: str,
        *,
        rates: MeasuredRates,
        took_at: Callable[[NodeId], float | None],
    ) -> None:
        self._node = node
        self._settings = settings
        self._fingerprint = facts.compatibility.fingerprint()
        self._compatibility = {**asdict(facts.compatibility), TENANT_KEY_ID: tenant_key_id}
        self._rates = rates
        self._took_at = took_at
        self._passed_over: set[str] = set()
        """Nodes that offer KV or work and are not asked, since the roster does not list them with this tenant."""

    def forget(self, node_id: str) -> None:
        """The node has gone."""
        self._passed_over.discard(node_id)

    def live_cards(self, excluded: set[str], now: float) -> list[Card]:
        """Cards of connected nodes that may be asked."""
        return [
            card
            for card in self._node.directory.peers(now)
            if card.node_id not in excluded and self._usable(card.node_id, offers=self._offers(card))
        ]

    def measured_megabytes_per_second(self, node_id: str) -> float:
        """Of the link from a node; 0 when nothing was measured yet."""
        return self._rates.link_megabytes_per_second(NodeId(node_id)) or 0.0

    def same_host(self, node_id: NodeId) -> bool:
        """Whether a node is reached over this machine's loopback."""
        client = self._node.peers.find(node_id)
        return client is not None and _is_loopback(client.host)

    def caches(self, cards: list[Card], excluded: set[str], now: float) -> tuple[PeerView, ...]:
        """Nodes that hold something, as their cards tell or they said themselves since, and those of --cache-peer, whatever
        their cards tell."""
        names = [
            card.node_id
            for card in cards
            if card.cache is not None and (card.cache.entry_count > 0 or self._took_since_card(NodeId(card.node_id), now))
        ]
        names += [name for name in self._static("cache") if name not in excluded and name not in names]
        return tuple(
            PeerView(
                node_id=NodeId(name),
                round_trip_ms=self._round_trip_ms(name),
                megabytes_per_second=self._link_megabytes_per_second(name),
            )
            for name in names
        )

    def workers_without_card(self, known: set[str]) -> tuple[WorkerView, ...]:
        """Nodes of --worker whose card has not come: they are asked, and refuse a job they cannot do."""
        return tuple(
            WorkerView(
                node_id=NodeId(name),
                identity_public_key=self._identity_of(name),
                prefill_tokens_per_second=self._settings.worker_prefill_tps,
                queued_tokens=0,
                round_trip_ms=self._round_trip_ms(name),
                megabytes_per_second=self._link_megabytes_per_second(name),
                free_memory_bytes=0,
            )
            for name in self._static("worker")
            if name not in known
        )

    def workers(self, cards: list[Card]) -> tuple[tuple[WorkerView, ...], tuple[str, ...]]:
        """The workers that can be used, and why others cannot."""
        views: list[WorkerView] = []
        hints: list[str] = []
        for card in cards:
            worker = card.worker
            if worker is None:
                continue
            mismatch = self._mismatch(card)
            if mismatch:
                hints.append(mismatch)
            if not worker.accepts_jobs:
                continue
            if mismatch:
                self._node.note("warning", mismatch)
                continue
            views.append(
                WorkerView(
                    node_id=NodeId(card.node_id),
                    identity_public_key=self._identity_of(card.node_id),
                    prefill_tokens_per_second=worker.prefill_tokens_per_second or self._settings.worker_prefill_tps,
                    queued_tokens=worker.queued_tokens,
                    round_trip_ms=self._round_trip_ms(card.node_id),
                    megabytes_per_second=self._link_megabytes_per_second(card.node_id),
                    free_memory_bytes=worker.ram_bytes_free,
                )
            )
        return tuple(views), tuple(hints)

    def no_worker(self, excluded: set[str], now: float) -> str:
        """Why there is no worker to ask, in one line."""
        known = {card.node_id for card in self._node.directory.peers(now) if card.worker is not None}
        if not known:
            static = bool(self._settings.worker)
            return "the node of --worker is not connected" if static else "no worker is known"
        if known <= excluded:
            return "all workers are excluded"
        connected = {name for name in known - excluded if self._node.peers.find(name) is not None}
        if not connected:
            return "no worker is connected"
        if not any(self._node.find_asked(name) for name in connected):
            return "the roster lists no worker that is connected with this tenant"
        return "no worker that is connected can be used"

    def publish_targets(self, now: float) -> tuple[NodeId, ...]:
        """Cache peers that may get copies: nodes whose only business is to hold KV."""
        cards = self._node.directory.peers(now)
        willing = replica_candidates(cards, self._fingerprint)
        found = tuple(name for name in willing if self._usable(name, offers=True))
        return found or tuple(NodeId(name) for name in self._static("cache"))

    # --- what is known of a node ----------------------------------------------------------------------------------------

    def _usable(self, node_id: str, *, offers: bool) -> bool:
        """Whether a node is connected and may be asked. One that offers what this primary needs and may not is told of."""
        if self._node.peers.find(node_id) is None:
            return False
        if self._node.security.entitlement.access.may_be_asked(node_id):
            self._passed_over.discard(node_id)
            return True
        if offers and node_id not in self._passed_over:
            self._passed_over.add(node_id)
            self._node.security.count_refusal(NOT_ASKED, subject=node_id)
            self._node.note("warning", f"{node_id}: {NOT_ASKED}")
        return False

    def _offers(self, card: Card) -> bool:
        """Whether a card offers work or KV of this primary's own namespace."""
        works = card.worker is not None and card.worker.fingerprint == self._fingerprint
        return works or (card.cache is not None and any(held.fingerprint == self._fingerprint for held in card.cache.held))

    def _static(self, role: str) -> list[str]:
        """Nodes that the settings name for a role and that may be asked."""
        return [name for name in self._node.peers.in_role(role) if self._usable(name, offers=True)]

    def _round_trip_ms(self, node_id: str) -> float:
        client = self._node.peers.find(node_id)
        return (client.round_trip_ms or 0.0) if client is not None else 0.0

    def _identity_of(self, node_id: str) -> bytes:
        """The key that a connected node has proven in its session."""
        client = self._node.peers.find(node_id)
        assert client is not None, "only connected nodes are looked at"
        assert client.peer is not None, "and their sessions are up"
        return client.peer.identity_public_key

    def _link_megabytes_per_second(self, node_id: str) -> float:
        """What was measured of the link from a node, else what the settings assume."""
        return self._rates.link_megabytes_per_second(NodeId(node_id)) or self._settings.cache_link_mbps / 8

    def _took_since_card(self, node_id: NodeId, now: float) -> bool:
        """Whether a node has taken parts of ours since its card, which says it holds none, was made."""
        took_at, age_ms = self._took_at(node_id), self._node.directory.age_ms(node_id, now)
        return took_at is not None and age_ms is not None and took_at > now - age_ms / 1000.0

    def _mismatch(self, card: Card) -> str:
        """Why a worker cannot be used, in one line; empty when it can, or when its card offers no work."""
        assert card.worker is not None
        if card.worker.fingerprint == self._fingerprint and (
            card.worker.compatibility.get(TENANT_KEY_ID) == self._compatibility[TENANT_KEY_ID]
        ):
            return ""
        different = [name for name, value in self._compatibility.items() if card.worker.compatibility.get(name) != value]
        verb = "differs" if len(different) == 1 else "differ"
        return f"worker {card.node_id} is not compatible: {', '.join(different) or 'unknown fields'} {verb}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only this one always means the own machine
        return host == "localhost"
