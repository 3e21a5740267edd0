"""The cache holders of one gathering: which of them are trusted, what they hold together, and who is to deliver what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import Ask, Effect
from kakeya_zmq.protocol.estimates import LinkShare
from kakeya_zmq.protocol.gather_peer import NO_LEASE, Peer, PeerFetch, link_order
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask
from wire import limits
from wire.messages import PartRef, ReleaseLease

Shares: TypeAlias = list[tuple[Peer, tuple[PartRef, ...]]]
"""Which peer is to deliver what."""


def links(shares: Shares) -> list[LinkShare]:
    """What the shares cost on their links."""
    return [peer.share(refs) for peer, refs in shares]


class CacheHolders:
    """The peers of one gathering, in the order of their links.

    Args:
        task: the preparation's.
        holdings: what is at hand here.
        ids: numbers for asks.
        rates: measured; they tell who is left alone.
    """

    def __init__(self, task: PreparationTask, holdings: Holdings, ids: IdAllocator, rates: MeasuredRates) -> None:
        self._task = task
        self._settings = task.settings
        self._holdings = holdings
        self._account = holdings.account
        self._ids = ids
        self._rates = rates
        views = sorted(task.caches, key=link_order)[: self._settings.peers_max]
        self.peers = [Peer(view) for view in views]

    # --- who they are --------------------------------------------------------------------------------------------------

    def fetches(self) -> list[PeerFetch]:
        """The fetches under way."""
        return [peer.fetch for peer in self.peers if peer.fetch is not None]

    def pass_over(self, now: float) -> None:
        """Go without the peers from which nothing came lately."""
        self.peers = [peer for peer in self.peers if not self._left_alone(peer, now)]

    def distrust(self, peer: Peer, what: str) -> list[Effect]:
        """Nothing is wanted of this one for this prompt any more, for what it did."""
        peer.trusted = False
        return self._account.fallback(f"{peer.name} {what}")

    def release_leases(self) -> list[Effect]:
        """Give back what the peers keep for this prompt; nobody waits for the answers."""
        effects: list[Effect] = []
        for peer in self.peers:
            if peer.lease_id != NO_LEASE:
                body = ReleaseLease(lease_id=peer.lease_id)
                effects.append(Ask(self._ids.ask(), peer.view.node_id, body, self._settings.release_timeout_s))
                peer.lease_id = NO_LEASE
        return effects

    def _left_alone(self, peer: Peer, now: float) -> bool:
        """Whether nothing could be fetched from a peer anyway; one that must help is asked all the same."""
        why = self._rates.backoff.left_alone(peer.view.node_id, now, Trouble.BULK_PORT, Trouble.FETCH)
        self._account.reason(f"{peer.name} is {why}" if why else "")
        return bool(why) and not self._task.remote_required

    # --- what they hold ------------------------------------------------------------------------------------------------

    def available(self, ref: PartRef) -> bool:
        """Whether a part is at hand or held by a trusted peer."""
        return self._holdings.has(ref) or any(peer.has(ref) for peer in self.peers)

    def reach(self) -> Reach:
        """The deepest position that parts at hand and those of trusted peers can build."""
        return self._holdings.reach(self.available)

    def shares(self, reach: Reach) -> Shares:
        """Who is to deliver what of ``reach`` is neither at hand nor on its way."""
        on_the_way = {ref for fetch in self.fetches() for ref in fetch.refs}
        return self._assign(ref for ref in self._holdings.missing(reach) if ref not in on_the_way)

    def without(self, peer: Peer) -> tuple[Reach, Shares]:
        """What the others reach without a trusted peer, and who would have to deliver what for it."""
        peer.trusted = False
        reach = self.reach()
        shares = self._assign(self._holdings.missing(reach))
        peer.trusted = True
        return reach, shares

    def _assign(self, refs: Iterable[PartRef]) -> Shares:
        shares: dict[int, list[PartRef]] = {}
        for ref in refs:
            holders = [index for index, peer in enumerate(self.peers) if peer.has(ref)]
            # Peers are in link order; one that is busy with an earlier fetch would only be asked after it.
            index = min(holders, key=lambda index: (self.peers[index].fetch is not None, index))
            shares.setdefault(index, []).append(ref)
        return [(self.peers[index], tuple(found[: limits.PARTS_PER_REQUEST_MAX])) for index, found in shares.items()]
