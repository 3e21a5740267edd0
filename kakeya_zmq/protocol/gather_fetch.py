"""One fetch of a gathering: asked for, given a lane, and let go of."""

from __future__ import annotations

from kakeya_zmq.planner import MeasuredRates, decide_link_codec
from kakeya_zmq.protocol.account import Origin
from kakeya_zmq.protocol.effects import (
    Ask,
    CancelAsk,
    CloseLane,
    ConnectReceiver,
    Count,
    Effect,
    WantedPart,
)
from kakeya_zmq.protocol.estimates import Estimates
from kakeya_zmq.protocol.gather_holders import CacheHolders
from kakeya_zmq.protocol.gather_peer import Peer, PeerFetch
from kakeya_zmq.protocol.hedge import OBSERVE_MIN_S, Watch
from kakeya_zmq.protocol.holdings import Holdings
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask
from wire.messages import Fetch, LinkCodec, PartRef, SourceKind, TransferGrant


def origin(peer: Peer) -> Origin:
    """What an explanation calls this peer."""
    return (SourceKind.REMOTE_CACHE, peer.view.node_id)


class Fetching:
    """Begins and drops the fetches of one gathering; a peer has one at most.

    Args:
        task: the preparation's.
        holdings: where parts go.
        holders: the peers.
        ids: numbers for asks and lanes.
        rates: measured; they tell whether a link is worth compressing for.
        estimates: of what transfers take.
    """

    def __init__(
        self,
        task: PreparationTask,
        holdings: Holdings,
        holders: CacheHolders,
        ids: IdAllocator,
        rates: MeasuredRates,
        estimates: Estimates,
    ) -> None:
        self._settings = task.settings
        self._holdings = holdings
        self._account = holdings.account
        self._holders = holders
        self._ids = ids
        self._rates = rates
        self._estimates = estimates

    def begin(self, peer: Peer, refs: tuple[PartRef, ...], stage_deadline: float, now: float) -> list[Effect]:
        """Ask a peer for these parts."""
        ask = self._ids.ask()
        remaining_s = max(0.001, stage_deadline - now)
        settings = self._settings
        share = peer.share(refs)
        size_bytes = share.size_bytes
        expected_s = self._estimates.transfer_ms([share]) / 1000.0
        watch = Watch(now, expected_s, max(1, size_bytes))
        peer.fetch = PeerFetch(ask, refs, now, now + settings.fetch_idle_timeout_s, watch, now + OBSERVE_MIN_S)
        link = decide_link_codec(
            settings.link_compression, peer.view.node_id, size_bytes, self._rates, frame_bytes=settings.chunk_bytes
        )
        if link.codec is not LinkCodec.NONE:
            self._account.reason(link.describe())
        body = Fetch(
            lease_id=peer.lease_id,
            parts=refs,
            suites=settings.suites,
            chunk_bytes_max=settings.chunk_bytes,
            credit_bytes=settings.credit_bytes,
            link_codec=link.codec,
            value_bytes=settings.value_bytes,
        )
        return [Count("fetches"), Ask(ask, peer.view.node_id, body, remaining_s)]

    def open_lane(self, peer: Peer, fetch: PeerFetch, grant: TransferGrant, now: float) -> list[Effect]:
        """The peer sends: receive it."""
        fetch.lane = self._ids.lane()
        fetch.codec = grant.link_codec
        fetch.watch.begin(now)
        expected = self._holdings.expected(fetch.refs)
        fetch.budget_bytes = self._lane_budget(expected)
        idle_s = self._settings.fetch_idle_timeout_s
        # The seal proves who sent the bytes, and the checksum that they are still what was stored: memory of a peer can rot.
        # What was fetched goes nowhere else, and hashing it would take longer than all the rest.
        lane, node_id, budget_bytes = fetch.lane, peer.view.node_id, fetch.budget_bytes
        return [ConnectReceiver(lane, node_id, grant, expected, budget_bytes, idle_s, verify_digests=False)]

    def drop(self, peer: Peer, reason: str) -> list[Effect]:
        """Leave nothing of a peer's fetch open."""
        fetch, peer.fetch = peer.fetch, None
        if fetch is None:
            return []
        effects: list[Effect] = []
        if fetch.lane is not None:
            effects.append(CloseLane(fetch.lane, ok=False, reason=reason))
        if fetch.ask_open:
            effects.append(CancelAsk(fetch.ask))
        return effects

    def drop_all(self, reason: str) -> list[Effect]:
        """Leave nothing of any fetch open."""
        return [effect for peer in self._holders.peers for effect in self.drop(peer, reason)]

    def spend_time(self, peer: Peer, now: float) -> None:
        """Account for the time of a fetch that came to nothing."""
        if peer.fetch is not None:
            self._account.spend_time(origin(peer), (now - peer.fetch.started) * 1000.0)

    def _lane_budget(self, expected: tuple[WantedPart, ...]) -> int:
        """Bytes a new lane may bring: what its parts can have, within what the other lanes leave of the import limit."""
        promised = sum(max(0, fetch.budget_bytes - int(fetch.watch.done)) for fetch in self._holders.fetches())
        left = self._settings.max_import_bytes - self._holdings.received_bytes - promised
        return max(1, min(left, sum(part.bytes_max for part in expected)))
