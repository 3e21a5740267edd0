"""What gathering knows of one cache holder: what it holds of the prompt, and the fetch that runs from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kakeya_zmq.blocks import Block
from kakeya_zmq.protocol.effects import AskId, LaneId
from kakeya_zmq.protocol.estimates import LinkShare
from kakeya_zmq.protocol.hedge import Watch
from kakeya_zmq.protocol.prepare_values import PeerView
from wire.codec import unpack_bitmap
from wire.errors import FailureCode
from wire.messages import Cut, LinkCodec, LookupReply, PartKind, PartRef, Tail

NO_LEASE = bytes(16)
ROW_KINDS = (PartKind.FULL, PartKind.WINDOW)


@dataclass(slots=True)
class PeerFetch:
    """A fetch under way. ``watch`` counts bytes."""

    ask: AskId
    refs: tuple[PartRef, ...]
    started: float
    grant_deadline: float
    watch: Watch
    check_at: float
    lane: LaneId | None = None
    codec: LinkCodec = LinkCodec.NONE
    budget_bytes: int = 0
    """What its lane may bring; 0 before it has one."""
    ask_open: bool = True


@dataclass(slots=True)
class Peer:
    """One cache holder. ``part_bytes``: mean size of what it holds, by kind."""

    view: PeerView
    trusted: bool = True
    lookup: AskId | None = None
    presence: set[PartRef] = field(default_factory=set)
    part_bytes: tuple[int, int, int] = (0, 0, 0)
    lease_id: bytes = NO_LEASE
    fetch: PeerFetch | None = None

    @property
    def name(self) -> str:
        return f"cache {self.view.node_id}"

    def has(self, ref: PartRef) -> bool:
        return self.trusted and ref in self.presence

    def owns(self, ask: AskId) -> bool:
        return self.lookup == ask or (self.fetch is not None and self.fetch.ask == ask)

    def share(self, refs: Iterable[PartRef]) -> LinkShare:
        """What it would cost to get these from it."""
        size_bytes = sum(self.part_bytes[ref.kind] for ref in refs)
        return LinkShare(self.view.node_id, size_bytes, self.view.round_trip_ms, self.view.megabytes_per_second)

    def take_reply(
        self,
        reply: LookupReply,
        asked: Sequence[Block],
        ends: Mapping[bytes, int],
        is_own: Callable[[Tail | Cut], bool],
    ) -> list[Block]:
        """Remember what the peer holds; nothing of it when it gave no lease, since it would send nothing.

        Args:
            asked: the blocks of the lookup.
            ends: block hash to the end of that block, the root included.
            is_own: whether a tail's tokens are the prompt's own.

        Returns:
            Tails that go on with this prompt's tokens, also those that are the beginnings of longer blocks.

        Raises:
            RemoteProtocolError: the reply is not one to this lookup.
        """
        self.lease_id = reply.lease_id
        if reply.lease_id == NO_LEASE:
            return []
        presence: set[PartRef] = set()
        for kind in PartKind:
            held = unpack_bitmap(reply.present[kind], len(asked))
            presence.update(
                PartRef(block_hash=block.block_hash, kind=kind)
                for block, is_held in zip(asked, held, strict=True)
                if is_held
            )
        self.part_bytes = reply.part_bytes
        tails: list[Block] = []
        for tail in reply.tails:
            if is_own(tail):
                tails.append(Block(tail.block_hash, tail.parent_hash, ends[tail.parent_hash], tail.token_count))
                presence.update(
                    PartRef(block_hash=tail.block_hash, kind=kind) for kind in PartKind if tail.kinds >> kind & 1
                )
        for cut in reply.cuts:
            if cut.token_count < cut.within_tokens and is_own(cut):
                start = ends[cut.parent_hash]
                tails.append(Block(cut.within, cut.parent_hash, start, cut.token_count, cut.within_tokens))
                presence.update(PartRef(block_hash=cut.within, kind=kind) for kind in ROW_KINDS if cut.kinds >> kind & 1)
        self.presence = presence
        return tails


def link_order(view: PeerView) -> tuple[float, float, str]:
    """Sort key: the fastest measured link first, unmeasured ones last, then the shorter round trip."""
    return (-(view.megabytes_per_second or 0.0), view.round_trip_ms, view.node_id)


def words(code: FailureCode) -> str:
    """A peer's answer as it is told to the user."""
    return code.name.lower().replace("_", " ")
