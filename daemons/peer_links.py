"""The outgoing control connections of a node: dialling, giving up, letting go, and what went over them.

Rules
- A seed is dialled for ever, whatever node answers there. What only a card names is dialled as
  :class:`~kakeya_zmq.protocol.dialling.DialPlan` lets it. An attempt that does not lead to its node is given up; the plan
  knows when the next one comes, and for whom.
- A connection that was up is not cut when it is not needed any more: it takes no new requests, and closes once those under
  way are answered.
- What was counted on a connection is counted on, however it ended.

Which node is reached through which of its connections, :mod:`daemons.peers` decides; it is told of every up and down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.io.names import Names
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.dialling import DialPlan
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from wire.ids import NodeId
from wire.keys import FleetKey

RETIRE_LIMIT_S: Final = 120.0
"""How long requests under way may keep a connection that is not used for new ones."""


@dataclass(slots=True, eq=False)
class PeerLink:
    """One connection, or the attempt to get it. ``seed``: any node may answer there."""

    client: ControlClient
    seed: bool
    node_id: str | None = None
    """Who is meant to answer, or did; None at a seed where nobody has answered yet."""

    @property
    def address(self) -> str:
        return str(self.client.address)


class PeerLinks:
    """The connections of one node. Iterating yields those in use or being made, not those that are being let go of.

    Args:
        identities: which key belongs to which node id; a book for each connection when None.
        keys_for: the PSKs to try at an address, the best first.
        on_up: called with a connection and who answered.
        on_down: called with a connection and the reason when it is not up any more, or cannot be.
        on_refused: called with a connection and why it was ended for what the node sent.
        on_round_trip: called with a connection and a measured round trip in ms.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        local: LocalNode,
        identities: IdentityBook | None,
        keys_for: Callable[[str], Sequence[FleetKey]],
        on_up: Callable[[PeerLink, PeerInfo], None],
        on_down: Callable[[PeerLink, str], None],
        on_refused: Callable[[PeerLink, str], None],
        on_round_trip: Callable[[PeerLink, float], None],
    ) -> None:
        self._reactor = reactor
        self._local = local
        self._identities = identities
        self._keys_for = keys_for
        self._on_up = on_up
        self._on_down = on_down
        self._on_refused = on_refused
        self._on_round_trip = on_round_trip
        self._names = Names(reactor)
        self._plan = DialPlan()
        self._plan_due: float | None = None
        self._links: list[PeerLink] = []
        self._retiring: list[PeerLink] = []
        self._ended: Counter[str] = Counter()
        """What connections that were closed had counted."""

    # --- views -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(tuple(self._links))

    def at(self, address: str | None, node_id: str | None) -> PeerLink | None:
        """The connection to a node at an address; node id None: the one at a seed where nobody has answered yet."""
        return next((link for link in self._links if link.address == address and link.node_id == node_id), None)

    def of(self, node_id: str) -> list[PeerLink]:
        """All connections to a node."""
        return [link for link in self._links if link.node_id == node_id]

    def is_proven(self, link: PeerLink) -> bool:
        """Whether it may dial for ever: a seed, or to a node that was met there."""
        return link.seed or self._plan.is_proven(link.node_id or "", link.address)

    def counted(self) -> Counter[str]:
        """What all connections so far have counted."""
        total = self._ended.copy()
        for link in [*self._links, *self._retiring]:
            total.update(link.client.counters)
        return total

    def deadline(self) -> float | None:
        """When :meth:`tick` is to be called."""
        return self._plan_due

    # --- dialling ----------------------------------------------------------------------------------------------------

    def dial_seed(self, address: Address, node_id: str | None = None) -> None:
        """Connect to whatever node answers there, for ever; ``node_id``: who is known to answer."""
        self._connect(address, None, node_id)

    def dial(self, node_id: str, address: str) -> None:
        """Connect to a node at an address of its card once the plan lets us, until :meth:`hang_up`."""
        self._plan.want(node_id, address)
        for held in [held for held in self._links if held.address == address and self._gives_way(held)]:
            self._give_up(held)
        self._serve()

    def tick(self, now: float) -> None:
        if self._plan_due is not None and self._plan_due <= now:
            self._serve()

    def met(self, node_id: str, address: str) -> None:
        """The node has proven that it is there."""
        self._plan.connected(node_id, address)

    def _serve(self) -> None:
        """Dial what is due of what cards name."""
        now = self._reactor.clock()
        unproven = sum(not self.is_proven(link) for link in self._links)
        for node_id, address in self._plan.due(now, {link.address for link in self._links}, unproven):
            self._connect(parse_address(address), NodeId(node_id), node_id)
        self._plan_due = self._plan.deadline(now, {link.address for link in self._links})

    def _connect(self, address: Address, expected: NodeId | None, node_id: str | None) -> None:
        client = ControlClient(
            self._reactor,
            address=address,
            local=self._local,
            fleet_key=lambda: self._keys_for(str(address)),
            identities=self._identities,
            expected_node_id=expected,
            on_up=lambda peer: self._on_up(link, peer),
            on_down=lambda reason: self._on_down(link, reason),
            on_refused=lambda reason: self._on_refused(link, reason),
            on_round_trip=lambda round_trip_ms: self._on_round_trip(link, round_trip_ms),
            names=self._names,
        )
        link = PeerLink(client, seed=expected is None, node_id=node_id)
        self._links.append(link)

    # --- ending ------------------------------------------------------------------------------------------------------

    def hang_up(self, node_id: str, address: str) -> None:
        """The node is not to be reached at this address any more."""
        self._plan.drop(node_id, address)
        link = self.at(address, node_id)
        if link is not None:
            self._retire(link)

    def forget(self, node_id: str) -> None:
        """The node is not to be reached at all."""
        for link in self.of(node_id):
            self._retire(link)
        self._plan.forget(node_id)

    def lost(self, link: PeerLink) -> None:
        """The connection is down: it dials on by itself, unless it never led to its node, or has to make way."""
        if link in self._links and (not self.is_proven(link) or self._gives_way(link)):
            self._give_up(link)

    def end(self, link: PeerLink) -> None:
        """Close a connection and what waits for it, at once."""
        if link in self._links:
            self._links.remove(link)
            self._reactor.post(self._serve)
            link.client.close("the node is not reached")
            self._ended.update(link.client.counters)

    def close(self) -> None:
        """End everything."""
        for link in [*self._links, *self._retiring]:
            link.client.close()
        self._links.clear()
        self._retiring.clear()
        self._plan = DialPlan()
        self._plan_due = None

    def _gives_way(self, link: PeerLink) -> bool:
        """Whether another node, which is to be reached at this address, too, is the one that answers there."""
        answered_by = link.client.answered_by
        down = not link.seed and link.client.peer is None
        return down and answered_by is not None and self._plan.wants(answered_by, link.address)

    def _give_up(self, link: PeerLink) -> None:
        """End an attempt, and what waits for it; the plan knows when the next one comes, and for whom."""
        self._plan.failed(link.node_id or "", link.address, self._reactor.clock(), link.client.answered_by)
        self.end(link)

    def _retire(self, link: PeerLink) -> None:
        if not self.is_proven(link):  # what waits for it would keep it dialling
            self._give_up(link)
            return
        self._links.remove(link)
        self._retiring.append(link)
        self._reactor.post(self._serve)  # its address and its place are free
        link.client.retire(RETIRE_LIMIT_S, lambda: self._retired(link))

    def _retired(self, link: PeerLink) -> None:
        if link in self._retiring:
            self._retiring.remove(link)
            self._ended.update(link.client.counters)
