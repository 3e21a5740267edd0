"""Connections of a node to the others: through configured addresses (seeds) and through cards it learnt of.

A node is reached through one of its endpoints at a time, which :class:`~kakeya_zmq.protocol.endpoints.EndpointChoice`
chooses; :class:`~daemons.peer_links.PeerLinks` opens and closes the control connections for it. Who is connected:

- seeds, for ever: whatever node answers there;
- nodes that :meth:`PeerTable.ensure` was called for, until their card is gone;
- a few more at a time that :meth:`PeerTable.reach` was called for, to exchange cards with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, assert_never

from daemons.peer_figures import peer_rows, traffic_figures
from daemons.peer_links import PeerLink, PeerLinks
from daemons.peer_node import PeerNode, offers_of
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.control_client import ControlClient, Keys
from kakeya_zmq.io.interfaces import OwnInterfaces
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol import endpoints as em
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from kakeya_zmq.telemetry import Value
from wire.cards import Card
from wire.keys import FleetKey

PASSING_MAX: Final = 4
"""Connections for the exchange of cards alone; the one used longest ago makes room."""


class PeerTable:
    """All outgoing control connections of one node.

    Args:
        fleet_key: the PSK, or what gives those that are valid now, the oldest first.
        identities: which key belongs to which node id; a book for each connection when None.
        on_up: called with the peer and its connection when a node is reached, again or through another endpoint.
        on_down: called with the node id (or None) and the reason when it is not any more, or cannot be.
        on_passed_over: called with the node id and how many more addresses of its card are not dialled.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        local: LocalNode,
        fleet_key: FleetKey | Keys,
        identities: IdentityBook | None = None,
        on_up: Callable[[PeerInfo, ControlClient], None],
        on_down: Callable[[str | None, str], None],
        on_passed_over: Callable[[str, int], None] = lambda node_id, count: None,
    ) -> None:
        self.on_refused: Callable[[str | None, str], None] | None = None
        """Told the node id (or None) and why a connection was ended for what the node sent."""
        self._reactor = reactor
        self._local = local
        self._keys: Keys = (lambda: (fleet_key,)) if isinstance(fleet_key, FleetKey) else fleet_key
        self._on_up = on_up
        self._on_down = on_down
        self._on_passed_over = on_passed_over
        self._own = OwnInterfaces(reactor.clock)
        self._links = PeerLinks(
            reactor,
            local=local,
            identities=identities,
            keys_for=self._keys_for,
            on_up=self._up,
            on_down=self._down,
            on_refused=self._refused,
            on_round_trip=self._measured,
        )
        self._nodes: dict[str, PeerNode] = {}
        self._roles: dict[str, str] = {}
        """Seed address → the role its node is used in, whatever its card says."""
        self._due: float | None = None
        reactor.add_deadline_source(self._deadline, self._tick)

    # --- whom to connect ---------------------------------------------------------------------------------------------

    def add_seed(self, address: Address, role: str = "") -> None:
        """Connect to whatever node answers at an address, for ever.

        Args:
            role: "cache" or "worker": use the node there as such, even when no card of it arrives.
        """
        if role:
            self._roles[str(address)] = role
        if self._links.at(str(address), None) is None:
            self._links.dial_seed(address)

    def ensure(self, card: Card) -> None:
        """Keep a connection to the node a card describes."""
        self._node(card.node_id).ensured = True
        self.update(card)

    def update(self, card: Card) -> None:
        """A node's card has changed; it may serve elsewhere now, or be another process."""
        node = self._nodes.get(card.node_id)
        if node is None:
            return
        node.card = card
        self._offer(node)
        for link in self._links.of(card.node_id):
            peer = link.client.peer
            if peer is not None and peer.incarnation < card.incarnation:
                link.client.start_over("the node was restarted")

    def reach(self, card: Card) -> ControlClient | None:
        """A connection to a node for one question; it may not be up yet. None: the card tells no usable address."""
        node = self._node(card.node_id)
        node.asked_at = self._reactor.clock()
        if node.card is None:
            node.card = card
            self._offer(node)
            self._make_room()
        client = self.find(card.node_id)
        return client or next((link.client for link in self._links.of(card.node_id)), None)

    def keys_changed(self) -> None:
        """Other PSKs are valid now: other endpoints may be usable, or better."""
        for node in list(self._nodes.values()):
            self._offer(node)

    def expel(self, node_id: str, identity_public_key: bytes) -> None:
        """End the connections to whoever has this key; a seed is dialled again, in vain."""
        for link in self._links:
            peer = link.client.peer
            if peer is not None and peer.identity_public_key == identity_public_key:
                link.client.start_over("the node is not accepted any more")
        node = self._nodes.get(node_id)
        if node is not None and node.card is not None and node.card.identity_public_key == identity_public_key:
            self.forget(node_id)

    def forget(self, node_id: str) -> None:
        """The node's card is gone: end the connections that were made from it."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.card, node.ensured = None, False
        if node.seeds:
            self._offer(node)
        else:
            self._drop(node)

    def close(self) -> None:
        self._links.close()
        self._nodes.clear()
        self._due = None

    # --- views ---------------------------------------------------------------------------------------------------

    def find(self, node_id: str) -> ControlClient | None:
        """The connection to a node, if its session is up."""
        node = self._nodes.get(node_id)
        link = self._links.at(node.choice.in_use, node_id) if node is not None and node.choice.in_use else None
        return link.client if link is not None and link.client.peer is not None else None

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._nodes

    def keeps(self, node_id: str) -> bool:
        """Whether a node is connected for more than an exchange of cards."""
        node = self._nodes.get(node_id)
        return node is not None and not node.passing

    def connected(self) -> list[tuple[str, ControlClient]]:
        found = ((node_id, self.find(node_id)) for node_id in self._nodes)
        return [(node_id, client) for node_id, client in found if client is not None]

    def in_role(self, role: str) -> list[str]:
        """Connected nodes that the settings name for a role."""
        return [
            node_id
            for node_id, node in self._nodes.items()
            if any(self._roles.get(seed) == role for seed in node.seeds) and self.find(node_id) is not None
        ]

    def traffic(self) -> dict[str, int]:
        """Messages that were sent to other nodes and that came back, over all connections so far; pings don't count."""
        return traffic_figures(self._links.counted())

    def rows(self) -> list[dict[str, Value]]:
        """One row a node, for status. Addresses are for the administrator, who holds the PSK."""
        return peer_rows(self._nodes.values(), self._links)

    # --- endpoints -------------------------------------------------------------------------------------------------

    def _node(self, node_id: str) -> PeerNode:
        return self._nodes.setdefault(node_id, PeerNode(node_id))

    def _offer(self, node: PeerNode) -> None:
        claimed = offers_of(node.card, self._keys())
        refused = frozenset(offer.address for offer in claimed if not self._own.may_dial(parse_address(offer.address)))
        if new := len(refused - node.passed_over - node.seeds):
            self._on_passed_over(node.node_id, new)
        node.passed_over = refused
        offers = [
            *(offer for offer in claimed if offer.address not in refused),
            *(em.EndpointOffer(seed, em.CONFIGURED, 0) for seed in sorted(node.seeds)),
        ]
        self._drive(node, em.Offered(tuple(offers)))

    def _deadline(self) -> float | None:
        return min((due for due in (self._due, self._links.deadline()) if due is not None), default=None)

    def _tick(self, now: float) -> None:
        self._links.tick(now)
        for node in [node for node in self._nodes.values() if node.due is not None and node.due <= now]:
            self._drive(node, em.EndpointTick())

    def _drive(self, node: PeerNode, event: em.EndpointEvent, why: str = "") -> None:
        if self._nodes.get(node.node_id) is not node:
            return  # let go of meanwhile
        for effect in node.choice.on(event, self._reactor.clock()):
            match effect:
                case em.Dial(address=address):
                    self._dial(node, address)
                case em.HangUp(address=address):
                    self._links.hang_up(node.node_id, address)
                case em.Use(address=None):
                    node.down_because = why
                    self._on_down(node.node_id, why)
                case em.Use(address=address):
                    link = self._links.at(address, node.node_id)
                    if link is not None and link.client.peer is not None:
                        node.down_because = ""
                        self._on_up(link.client.peer, link.client)
                case _:
                    assert_never(effect)
        node.due = node.choice.deadline()
        self._due = min((each.due for each in self._nodes.values() if each.due is not None), default=None)

    def _dial(self, node: PeerNode, address: str) -> None:
        link = self._links.at(address, node.node_id)
        if link is not None:
            if link.client.peer is not None:
                self._reactor.post(lambda: self._drive(node, em.Connected(address)))
        elif address in node.seeds:
            if self._links.at(address, None) is None:
                self._links.dial_seed(parse_address(address), node.node_id)
        else:
            self._links.dial(node.node_id, address)

    # --- connections -----------------------------------------------------------------------------------------------

    def _refused(self, link: PeerLink, reason: str) -> None:
        if self.on_refused is not None:
            self.on_refused(link.node_id, reason)

    def _keys_for(self, address: str) -> Sequence[FleetKey]:
        """The key that a card names for this address first, then the others, the oldest first."""
        cards = [node.card for node in self._nodes.values() if node.card is not None]
        named = {endpoint.key_id for card in cards for endpoint in card.endpoints if endpoint.address == address}
        return sorted(self._keys(), key=lambda key: key.key_id not in named)

    def _up(self, link: PeerLink, peer: PeerInfo) -> None:
        if peer.node_id == self._local.node_id:
            # A seed list may be the same on every node, ourselves included.
            self._reactor.post(lambda: self._links.end(link))
            return
        if link.node_id not in (None, peer.node_id):
            self._leave_seed(link)
        link.node_id = peer.node_id
        node = self._node(peer.node_id)
        if link.seed and link.address not in node.seeds:
            node.seeds.add(link.address)
            self._offer(node)
        self._links.met(peer.node_id, link.address)
        self._drive(node, em.Connected(link.address))

    def _leave_seed(self, link: PeerLink) -> None:
        """Another node answers at a seed's address than before."""
        before = self._nodes.get(link.node_id or "")
        link.node_id = None
        if before is None:
            return
        before.seeds.discard(link.address)
        if before.passing:
            self._drop(before)
        else:
            self._offer(before)

    def _down(self, link: PeerLink, reason: str) -> None:
        node = self._nodes.get(link.node_id or "")
        if node is None:
            self._on_down(link.node_id, reason)
            return
        before, told = node.choice.in_use, node.down_because
        self._links.lost(link)
        self._drive(node, em.Disconnected(link.address), reason)
        if before is None and (self._links.is_proven(link) or reason != told):
            node.down_because = reason
            self._on_down(node.node_id, reason)

    def _measured(self, link: PeerLink, round_trip_ms: float) -> None:
        node = self._nodes.get(link.node_id or "")
        if node is not None:
            self._drive(node, em.RoundTrip(link.address, round_trip_ms))

    def _make_room(self) -> None:
        """Let go of what was connected for an exchange of cards longest ago."""
        passing = sorted((node for node in self._nodes.values() if node.passing), key=lambda node: node.asked_at)
        for node in passing[: max(0, len(passing) - PASSING_MAX)]:
            self._drop(node)

    def _drop(self, node: PeerNode) -> None:
        was_up = node.choice.in_use is not None
        del self._nodes[node.node_id]
        self._links.forget(node.node_id)
        if was_up:
            self._on_down(node.node_id, "not needed any more")
