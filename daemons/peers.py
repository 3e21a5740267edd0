"""Connections of a node to the others: through configured addresses (seeds) and through cards it learnt of.

A node is reached through one of its endpoints at a time, which :class:`~kakeya_zmq.protocol.endpoints.EndpointChoice`
chooses; this shell opens and closes the control connections for it. Who is connected:

- seeds, for ever: whatever node answers there;
- nodes that :meth:`PeerTable.ensure` was called for, until their card is gone;
- a few more at a time that :meth:`PeerTable.reach` was called for, to exchange cards with.

What only a card names is dialled as :class:`~kakeya_zmq.protocol.dialling.DialPlan` lets it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from kakeya_zmq.io.control_client import ControlClient, Keys, LinkState
from kakeya_zmq.io.interfaces import OwnInterfaces
from kakeya_zmq.io.names import Names
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import Address, parse_address
from kakeya_zmq.protocol import endpoints as em
from kakeya_zmq.protocol.dialling import DialPlan
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from wire.cards import Card
from wire.errors import ConfigError
from wire.ids import NodeId
from wire.keys import FleetKey

PASSING_MAX: Final = 4
"""Connections for the exchange of cards alone; the one used longest ago makes room."""
RETIRE_LIMIT_S: Final = 120.0
"""How long requests under way may keep a connection that is not used for new ones."""


@dataclass(slots=True, eq=False)
class _Link:
    client: ControlClient
    seed: bool
    node_id: str | None = None

    @property
    def address(self) -> str:
        return str(self.client.address)


@dataclass(slots=True)
class _Node:
    """A node that is connected, or is to be."""

    node_id: str
    choice: em.EndpointChoice = field(default_factory=em.EndpointChoice)
    card: Card | None = None
    seeds: set[str] = field(default_factory=set)
    ensured: bool = False
    asked_at: float = 0.0
    due: float | None = None
    passed_over: frozenset[str] = frozenset()
    """Addresses of its card that are not dialled."""
    down_because: str = ""
    """What was told last of its being away; nothing while it is reached."""

    @property
    def passing(self) -> bool:
        return not self.ensured and not self.seeds


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
        self._identities = identities
        self._on_up = on_up
        self._on_down = on_down
        self._on_passed_over = on_passed_over
        self._own = OwnInterfaces(reactor.clock)
        self._names = Names(reactor)
        self._plan = DialPlan()
        self._plan_due: float | None = None
        self._nodes: dict[str, _Node] = {}
        self._links: list[_Link] = []
        self._retiring: list[_Link] = []
        self._roles: dict[str, str] = {}
        """Seed address → the role its node is used in, whatever its card says."""
        self._ended: Counter[str] = Counter()
        """What connections that were closed had counted."""
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
        if self._link_at(str(address), None) is None:
            self._connect(address, None)

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
        for link in [link for link in self._links if link.node_id == card.node_id]:
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
        return client or next((link.client for link in self._links if link.node_id == card.node_id), None)

    def keys_changed(self) -> None:
        """Other PSKs are valid now: other endpoints may be usable, or better."""
        for node in list(self._nodes.values()):
            self._offer(node)

    def expel(self, node_id: str, identity_public_key: bytes) -> None:
        """End the connections to whoever has this key; a seed is dialled again, in vain."""
        for link in list(self._links):
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
        for link in [*self._links, *self._retiring]:
            link.client.close()
        self._links.clear()
        self._retiring.clear()
        self._nodes.clear()
        self._plan = DialPlan()
        self._due = self._plan_due = None

    # --- views ---------------------------------------------------------------------------------------------------

    def find(self, node_id: str) -> ControlClient | None:
        """The connection to a node, if its session is up."""
        node = self._nodes.get(node_id)
        link = self._link_at(node.choice.in_use, node_id) if node is not None and node.choice.in_use else None
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
        total = self._ended.copy()
        for link in [*self._links, *self._retiring]:
            total.update(link.client.counters)
        return {f"fleet_{name}": total[name] for name in ("requests", "updates", "cancels", "answers")}

    def rows(self) -> list[dict[str, int | float | str | bool | None]]:
        """One row a node, for status. Addresses are for the administrator, who holds the PSK."""
        rows = [self._row(link, "", "") for link in self._links if link.node_id is None]
        for node_id, node in self._nodes.items():
            links = [link for link in self._links if link.node_id == node_id]
            used = next((link for link in links if link.address == node.choice.in_use), None)
            shown = used or next(iter(links), None)
            if shown is not None:
                network = next((offer.network for offer in node.choice.offers() if offer.address == shown.address), "")
                rows.append({**self._row(shown, node_id, network), "endpoints": self._endpoints_line(node)})
            elif offers := node.choice.offers():  # the next attempt waits
                rows.append(
                    {
                        "node_id": node_id,
                        "address": offers[0].address,
                        "network": offers[0].network,
                        "state": LinkState.DOWN.value,
                        "round_trip_ms": None,
                        "error": node.down_because or None,
                        "endpoints": self._endpoints_line(node),
                    }
                )
        return rows

    @staticmethod
    def _row(link: _Link, node_id: str, network: str) -> dict[str, int | float | str | bool | None]:
        client = link.client
        return {
            "node_id": node_id,
            "address": link.address,
            "network": network,
            "state": client.state.value,
            "round_trip_ms": round(client.round_trip_ms, 3) if client.round_trip_ms is not None else None,
            "error": client.last_error,
        }

    @staticmethod
    def _endpoints_line(node: _Node) -> str:
        """All ways to a node, best first, in one text."""
        words = []
        for offer in node.choice.offers():
            round_trip_ms = node.choice.round_trip_ms(offer.address)
            measured = f" {round_trip_ms:.2f} ms" if round_trip_ms is not None else ""
            state = node.choice.state(offer.address).value
            words.append(f"{offer.address} ({offer.network} {offer.priority}, {state}{measured})")
        return "; ".join(words)

    # --- endpoints -------------------------------------------------------------------------------------------------

    def _node(self, node_id: str) -> _Node:
        return self._nodes.setdefault(node_id, _Node(node_id))

    def _offer(self, node: _Node) -> None:
        claimed = _offers(node.card, self._keys())
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
        return min((due for due in (self._due, self._plan_due) if due is not None), default=None)

    def _tick(self, now: float) -> None:
        if self._plan_due is not None and self._plan_due <= now:
            self._serve()
        for node in [node for node in self._nodes.values() if node.due is not None and node.due <= now]:
            self._drive(node, em.EndpointTick())

    def _drive(self, node: _Node, event: em.EndpointEvent, why: str = "") -> None:
        if self._nodes.get(node.node_id) is not node:
            return  # let go of meanwhile
        for effect in node.choice.on(event, self._reactor.clock()):
            match effect:
                case em.Dial(address=address):
                    self._dial(node, address)
                case em.HangUp(address=address):
                    self._plan.drop(node.node_id, address)
                    link = self._link_at(address, node.node_id)
                    if link is not None:
                        self._retire(link)
                case em.Use(address=None):
                    node.down_because = why
                    self._on_down(node.node_id, why)
                case em.Use(address=address):
                    link = self._link_at(address, node.node_id)
                    if link is not None and link.client.peer is not None:
                        node.down_because = ""
                        self._on_up(link.client.peer, link.client)
                case _:
                    assert_never(effect)
        node.due = node.choice.deadline()
        self._due = min((each.due for each in self._nodes.values() if each.due is not None), default=None)

    def _dial(self, node: _Node, address: str) -> None:
        link = self._link_at(address, node.node_id)
        if link is not None:
            if link.client.peer is not None:
                self._reactor.post(lambda: self._drive(node, em.Connected(address)))
        elif address in node.seeds:
            if self._link_at(address, None) is None:
                self._connect(parse_address(address), None, node.node_id)
        else:
            self._plan.want(node.node_id, address)
            for held in [held for held in self._links if held.address == address and self._gives_way(held)]:
                self._give_up(held)
            self._serve()

    def _serve(self) -> None:
        """Dial what is due of what cards name."""
        now = self._reactor.clock()
        unproven = sum(not self._proven(link) for link in self._links)
        for node_id, address in self._plan.due(now, {link.address for link in self._links}, unproven):
            self._connect(parse_address(address), NodeId(node_id), node_id)
        self._plan_due = self._plan.deadline(now, {link.address for link in self._links})

    def _proven(self, link: _Link) -> bool:
        return link.seed or self._plan.is_proven(link.node_id or "", link.address)

    def _gives_way(self, link: _Link) -> bool:
        """Whether another node, which is to be reached at this address, too, is the one that answers there."""
        answered_by = link.client.answered_by
        down = not link.seed and link.client.peer is None
        return down and answered_by is not None and self._plan.wants(answered_by, link.address)

    def _give_up(self, link: _Link) -> None:
        """End an attempt, and what waits for it; the plan knows when the next one comes, and for whom."""
        self._plan.failed(link.node_id or "", link.address, self._reactor.clock(), link.client.answered_by)
        self._end(link)

    def _link_at(self, address: str | None, node_id: str | None) -> _Link | None:
        return next((link for link in self._links if link.address == address and link.node_id == node_id), None)

    # --- connections -----------------------------------------------------------------------------------------------

    def _connect(self, address: Address, expected: NodeId | None, node_id: str | None = None) -> None:
        client = ControlClient(
            self._reactor,
            address=address,
            local=self._local,
            fleet_key=lambda: self._keys_for(str(address)),
            identities=self._identities,
            expected_node_id=expected,
            on_up=lambda peer: self._up(link, peer),
            on_down=lambda reason: self._down(link, reason),
            on_refused=lambda reason: self._refused(link, reason),
            on_round_trip=lambda round_trip_ms: self._measured(link, round_trip_ms),
            names=self._names,
        )
        link = _Link(client, seed=expected is None, node_id=node_id)
        self._links.append(link)

    def _refused(self, link: _Link, reason: str) -> None:
        if self.on_refused is not None:
            self.on_refused(link.node_id, reason)

    def _keys_for(self, address: str) -> Sequence[FleetKey]:
        """The key that a card names for this address first, then the others, the oldest first."""
        cards = [node.card for node in self._nodes.values() if node.card is not None]
        named = {endpoint.key_id for card in cards for endpoint in card.endpoints if endpoint.address == address}
        return sorted(self._keys(), key=lambda key: key.key_id not in named)

    def _up(self, link: _Link, peer: PeerInfo) -> None:
        if peer.node_id == self._local.node_id:
            # A seed list may be the same on every node, ourselves included.
            self._reactor.post(lambda: self._end(link))
            return
        if link.node_id not in (None, peer.node_id):
            self._leave_seed(link)
        link.node_id = peer.node_id
        node = self._node(peer.node_id)
        if link.seed and link.address not in node.seeds:
            node.seeds.add(link.address)
            self._offer(node)
        self._plan.connected(peer.node_id, link.address)
        self._drive(node, em.Connected(link.address))

    def _leave_seed(self, link: _Link) -> None:
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

    def _down(self, link: _Link, reason: str) -> None:
        node = self._nodes.get(link.node_id or "")
        if node is None:
            self._on_down(link.node_id, reason)
            return
        before, told = node.choice.in_use, node.down_because
        if link in self._links and (not self._proven(link) or self._gives_way(link)):
            self._give_up(link)
        self._drive(node, em.Disconnected(link.address), reason)
        if before is None and (self._proven(link) or reason != told):
            node.down_because = reason
            self._on_down(node.node_id, reason)

    def _measured(self, link: _Link, round_trip_ms: float) -> None:
        node = self._nodes.get(link.node_id or "")
        if node is not None:
            self._drive(node, em.RoundTrip(link.address, round_trip_ms))

    def _make_room(self) -> None:
        """Let go of what was connected for an exchange of cards longest ago."""
        passing = sorted((node for node in self._nodes.values() if node.passing), key=lambda node: node.asked_at)
        for node in passing[: max(0, len(passing) - PASSING_MAX)]:
            self._drop(node)

    def _drop(self, node: _Node) -> None:
        was_up = node.choice.in_use is not None
        del self._nodes[node.node_id]
        for link in [link for link in self._links if link.node_id == node.node_id]:
            self._retire(link)
        self._plan.forget(node.node_id)
        if was_up:
            self._on_down(node.node_id, "not needed any more")

    def _retire(self, link: _Link) -> None:
        if not self._proven(link):  # what waits for it would keep it dialling
            self._give_up(link)
            return
        self._links.remove(link)
        self._retiring.append(link)
        self._reactor.post(self._serve)  # its address and its place are free
        link.client.retire(RETIRE_LIMIT_S, lambda: self._retired(link))

    def _retired(self, link: _Link) -> None:
        if link in self._retiring:
            self._retiring.remove(link)
            self._ended.update(link.client.counters)

    def _end(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._reactor.post(self._serve)
            link.client.close("the node is not reached")
            self._ended.update(link.client.counters)


def _offers(card: Card | None, keys: Sequence[FleetKey]) -> list[em.EndpointOffer]:
    """What a card offers, best first; what cannot be parsed, or admits none of our keys (the oldest first), is left out."""
    generations = {b"": 0, **{key.key_id: generation for generation, key in enumerate(keys)}}
    endpoints = sorted(card.endpoints, key=lambda endpoint: -endpoint.priority) if card is not None else []
    offers = []
    for endpoint in endpoints:
        generation = generations.get(endpoint.key_id)
        if generation is None:
            continue
        with contextlib.suppress(ConfigError):
            address = str(parse_address(endpoint.address))
            offers.append(em.EndpointOffer(address, endpoint.network, endpoint.priority, generation))
    return offers
