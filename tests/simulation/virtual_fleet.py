"""A fleet of directories on a virtual network: the real machines and the real bytes, but no sockets, threads or waiting.

Topology, as the daemons make it: every node joins through the first one, a primary, which keeps a connection to each node
and listens to its bus; the others are connected to it and to the few nodes they exchanged cards with last. Some nodes stand
behind a firewall: they can ask, but nobody reaches them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from daemons.peers import PASSING_MAX
from kakeya_zmq.protocol import directory as dm
from tests.unit.card_kit import identity
from wire.cards import CacheOffering, Card, Endpoint, WorkerOffering, sign_card
from wire.codec import encode_client, encode_server
from wire.messages import CardList, ExchangeCards, Reply, Request

INTERVAL_S = 10.0
TTL_S = 40.0
"""A third of the default, for a shorter test."""
LATENCY_S = (0.0005, 0.02)
"""Of one message; a relay understates a card's age by as much."""
CONNECT_S = 0.05
CONNECT_TIMEOUT_S = 5.0
ENVELOPE_BYTES = 36 + 16 + 20
"""Header and seal of a control message, and its ZMTP and TCP framing."""
HUB = "node-000"


@dataclass
class Node:
    name: str
    directory: dm.Directory
    incarnation: int
    reachable: bool
    links: dict[str, float] = field(default_factory=dict)
    """Whom it is connected to, and when it used the connection last."""


class VirtualFleet:
    """Args:
    seed: decides everything that is random.
    hidden: part of the nodes that nobody can connect to.
    """

    def __init__(self, seed: int, hidden: float = 0.0) -> None:
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self.died_at: dict[str, float] = {}
        self._rng = random.Random(seed)
        self._hidden = hidden
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._incarnations = itertools.count(1)
        self._wakes: dict[str, float] = {}

    # --- nodes -------------------------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """Start a node, or start it anew."""
        incarnation = next(self._incarnations)
        hidden = name != HUB and random.Random(name).random() < self._hidden
        directory = dm.Directory(
            node_id=name,
            make_card=lambda sequence: self._card(name, incarnation, sequence),
            settings=dm.DirectorySettings(interval_s=INTERVAL_S),
            incarnation=incarnation,
            rng=random.Random(self._rng.random()),
        )
        node = self.nodes[name] = Node(name, directory, incarnation, reachable=not hidden)
        self.died_at.pop(name, None)
        self._tell(node, dm.DirectoryTick())
        if name != HUB:
            self._later(CONNECT_S, lambda: self._connected(node, HUB))

    def kill(self, name: str) -> None:
        """It vanishes without a word; connections to it break."""
        del self.nodes[name]
        self.died_at[name] = self.now
        for other in list(self.nodes.values()):
            if other.links.pop(name, None) is not None:
                self._tell(other, dm.PeerDisconnected(name))

    def _card(self, name: str, incarnation: int, sequence: int) -> bytes:
        owner = identity(name)
        card = Card(
            node_id=name,
            identity_public_key=owner.public_key,
            incarnation=incarnation,
            sequence=sequence,
            roles=("worker", "cache-holder"),
            software="kakeya-zmq 0.1.0",
            platform="Darwin arm64",
            memory_bytes=2**36,
            endpoints=(Endpoint(address="192.168.100.200:53051", network="lan", priority=50),),
            bus_port=54_321,
            cache=CacheOffering(
                bytes_used=2**32,
                bytes_free=2**32,
                entry_count=12_345,
                epoch=123_456,
                load=0.0,
                evictions=1_234,
                bytes_evicted=2**33,
                put_failures=0,
                tokens_served=10**6,
            ),
            worker=WorkerOffering(
                fingerprint=bytes(32),
                compatibility={f"field_number_{number}": "0123456789abcdef" * 2 for number in range(13)},
                max_concurrent_jobs=1,
                inflight_jobs=0,
                queued_jobs=0,
                queued_tokens=0,
                load=0.0,
                prefill_tokens_per_second=800.0,
                ram_bytes_free=2**35,
                accepts_jobs=True,
            ),
            announced_at_unix=1.7e9 + self.now,
            ttl_ms=int(TTL_S * 1000),
        )
        return sign_card(card, owner)

    # --- time --------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._numbers), action))

    def _latency(self) -> float:
        return self._rng.uniform(*LATENCY_S)

    # --- what the shells do --------------------------------------------------------------------------------------------

    def _alive(self, node: Node) -> bool:
        return self.nodes.get(node.name) is node

    def _tell(self, node: Node, event: dm.DirectoryEvent) -> None:
        if not self._alive(node):
            return
        for effect in node.directory.on(event, self.now):
            match effect:
                case dm.Announce(card=card):
                    self._publish(node, card)
                case dm.Exchange():
                    self._exchange(node, effect)
                case dm.PeerChanged(card=card) if node.name == HUB:
                    self._connect(node, card.node_id)
                case _:
                    pass
        self._wake(node)

    def _wake(self, node: Node) -> None:
        due = node.directory.deadline()
        if self._wakes.get(node.name) == due:
            return
        self._wakes[node.name] = due

        def tick() -> None:
            if self._alive(node) and self._wakes.get(node.name) == due:
                del self._wakes[node.name]
                self._tell(node, dm.DirectoryTick())

        self._later(max(0.0, due - self.now), tick)

    def _publish(self, node: Node, card: bytes) -> None:
        """Over the bus: whoever is connected to a node listens to it."""
        for other in self.nodes.values():
            if node.name in other.links:
                self._send(node.name, other, len(card) + ENVELOPE_BYTES, dm.CardsArrived((card,), (0,)))

    def _send(self, sender: str, receiver: Node, size_bytes: int, event: dm.DirectoryEvent) -> None:
        self.sent_bytes[sender] += size_bytes
        self.received_bytes[receiver.name] += size_bytes
        self._later(self._latency(), lambda: self._tell(receiver, event))

    def _connect(self, node: Node, name: str) -> None:
        if name not in node.links:
            self._later(CONNECT_S, lambda: self._connected(node, name))

    def _connected(self, node: Node, name: str) -> None:
        other = self.nodes.get(name)
        if self._alive(node) and other is not None and other.reachable and name not in node.links:
            node.links[name] = self.now
            passing = sorted((used, link) for link, used in node.links.items() if link != HUB)
            if node.name != HUB and len(passing) > PASSING_MAX:
                del node.links[passing[0][1]]
                self._tell(node, dm.PeerDisconnected(passing[0][1]))
            self._tell(node, dm.PeerConnected(name))

    def _exchange(self, node: Node, ask: dm.Exchange) -> None:
        def arrive() -> None:
            other = self.nodes.get(ask.node_id)
            if other is None or not other.reachable:
                self._later(CONNECT_TIMEOUT_S, lambda: self._tell(node, dm.ExchangeEnded(ask.node_id, ok=False)))
                return
            node.links[ask.node_id] = self.now
            request = ExchangeCards(cards=ask.cards, ages_ms=ask.ages_ms, known=ask.known)
            size_bytes = len(encode_client(Request(request_id=1, deadline_ms=5000, body=request))) + ENVELOPE_BYTES
            self._send(node.name, other, size_bytes, dm.CardsArrived(ask.cards, ask.ages_ms))
            self._later(LATENCY_S[1], lambda: self._answer(other, node, ask))

        if ask.node_id not in node.links:
            self._connect(node, ask.node_id)
        self._later(self._latency() + (0.0 if ask.node_id in node.links else CONNECT_S), arrive)

    def _answer(self, server: Node, asker: Node, ask: dm.Exchange) -> None:
        if not self._alive(server):
            return
        cards, ages, wanted, more = server.directory.answer(ask.known, asker.name, self.now)
        reply = Reply(request_id=1, body=CardList(cards=cards, ages_ms=ages, wanted=wanted, more=more))
        size_bytes = len(encode_server(reply)) + ENVELOPE_BYTES
        ended = dm.ExchangeEnded(ask.node_id, True, cards, ages, wanted, more)
        event: dm.DirectoryEvent = ended if ask.known is not None else dm.CardsArrived((), ())
        self._send(server.name, asker, size_bytes, event)

    # --- views ---------------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, tuple[int, int]]:
        """(incarnation, sequence) of each live node's latest card."""
        return {node.name: (node.incarnation, node.directory._sequence) for node in self.nodes.values()}

    def behind(self, versions: dict[str, tuple[int, int]]) -> list[tuple[str, str]]:
        """Pairs (node, other) where the node's card of the other is missing or older than that."""
        found = []
        for node in self.nodes.values():
            held = {card.node_id: (card.incarnation, card.sequence) for card in node.directory.peers(self.now)}
            found += [
                (node.name, other)
                for other, version in versions.items()
                if other != node.name and other in self.nodes and held.get(other, (0, 0)) < version
            ]
        return found

    def ghosts(self) -> list[tuple[str, str]]:
        """Pairs (node, dead node) where the node still holds a card of the dead one."""
        return [
            (node.name, card.node_id)
            for node in self.nodes.values()
            for card in node.directory.peers(self.now)
            if card.node_id not in self.nodes
        ]

    def bytes_per_interval(self, seconds: float) -> dict[str, float]:
        """What each node sends and receives in an interval, on average over ``seconds`` from now."""
        self.sent_bytes.clear()
        self.received_bytes.clear()
        self.run(seconds)
        intervals = seconds / INTERVAL_S
        return {name: (self.sent_bytes[name] + self.received_bytes[name]) / intervals for name in self.nodes}
