"""What a store keeps of each block and part, and what belongs to one namespace; how they go together: store_index.

Memory matters here: a store holds up to millions of parts. Everything is slotted, hashes are kept once, descriptions are
rebuilt when they are asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from kakeya_zmq.blocks import Part
from wire.limits import HASH_BYTES
from wire.messages import PartKind, PartMeta, PartRef

NOT_QUEUED: Final = -1
SCANS_PER_BLOCK: Final = 64
"""How often a block may be looked at, on average, to find which ones a longer block has shown to be tails."""


class HeldPart:
    """One part in the store; ``payload`` is bytes or a byte view. ``locks`` counts leases and pins."""

    __slots__ = ("block", "kind", "locks", "payload", "proof", "queued_stamp", "stamp")

    def __init__(self, block: HeldBlock, meta: PartMeta, payload: bytes | memoryview, stamp: int) -> None:
        self.block = block
        self.kind = PartKind(meta.kind)
        self.proof = meta.digest + meta.checksum  # one object: a second one would cost 41 bytes
        self.payload = payload
        self.locks = 0
        self.stamp = stamp
        self.queued_stamp = NOT_QUEUED

    def __lt__(self, other: HeldPart) -> bool:
        """Order in the heap of interior windows."""
        if self.queued_stamp != other.queued_stamp:
            return self.queued_stamp < other.queued_stamp
        return self.block.start < other.block.start

    @property
    def length_bytes(self) -> int:
        return len(self.payload)

    @property
    def ref(self) -> PartRef:
        return PartRef(block_hash=self.block.block_hash, kind=self.kind)

    def as_part(self) -> Part:
        block = self.block
        meta = PartMeta(
            block_hash=block.block_hash,
            parent_hash=block.parent_hash,
            kind=self.kind,
            start=block.start,
            token_count=block.token_count,
            length_bytes=len(self.payload),
            digest=self.proof[:HASH_BYTES],
            checksum=self.proof[HASH_BYTES:],
        )
        return Part(meta=meta, payload=memoryview(self.payload))


class HeldBlock:
    """A block of which at least one part is held. ``children``: none, one block, or an ordered set of blocks."""

    __slots__ = (
        "block_hash",
        "children",
        "cuts",
        "full",
        "namespace",
        "parent_hash",
        "queued_stamp",
        "stamp",
        "start",
        "state",
        "token_count",
        "window",
    )

    def __init__(self, namespace: Namespace, block_hash: bytes, parent_hash: bytes, start: int, token_count: int) -> None:
        self.namespace = namespace
        self.block_hash = block_hash
        self.parent_hash = parent_hash
        self.start = start
        self.token_count = token_count
        self.full: HeldPart | None = None
        self.window: HeldPart | None = None
        self.state: HeldPart | None = None
        self.children: HeldBlock | dict[HeldBlock, None] | None = None
        self.cuts: list[tuple[bytes, int]] | None = None
        """Hash and tokens of tails that are this block's beginnings, oldest first."""
        self.stamp = 0
        self.queued_stamp = NOT_QUEUED

    def __lt__(self, other: HeldBlock) -> bool:
        """Order in the heap of leaves."""
        if self.queued_stamp != other.queued_stamp:
            return self.queued_stamp < other.queued_stamp
        return self.start > other.start

    def part(self, kind: PartKind) -> HeldPart | None:
        if kind == 0:  # plain numbers: naming the enum's members would take longer than all the rest
            return self.full
        return self.window if kind == 1 else self.state

    def set_part(self, kind: PartKind, held: HeldPart | None) -> None:
        if kind == PartKind.FULL:
            self.full = held
        elif kind == PartKind.WINDOW:
            self.window = held
        else:
            self.state = held

    def parts(self) -> tuple[HeldPart, ...]:
        return tuple(held for held in (self.full, self.window, self.state) if held is not None)

    @property
    def kinds(self) -> int:
        """Bit k set: the part of PartKind k is held."""
        return (self.full is not None) | (self.window is not None) << 1 | (self.state is not None) << 2

    @property
    def locked(self) -> bool:
        return any(held.locks for held in self.parts())

    def iterate_children(self) -> Iterator[HeldBlock]:
        """Children, the one stored last first."""
        if isinstance(self.children, HeldBlock):
            yield self.children
        elif self.children is not None:
            yield from reversed(self.children)


class Namespace:
    """The blocks of one fingerprint: by hash, usage, tails, blocks whose parent is not held, and what goes first."""

    __slots__ = (
        "added",
        "blocks",
        "bytes_used",
        "cut",
        "cut_tails",
        "fingerprint",
        "full_tokens",
        "leaves",
        "looked_through",
        "orphans",
        "publisher",
        "tails",
        "windows",
    )

    def __init__(self, fingerprint: bytes, publisher: str) -> None:
        self.fingerprint = fingerprint
        self.publisher = publisher
        """Who brought it in: a node id, or empty for this node itself."""
        self.blocks: dict[bytes, HeldBlock] = {}
        self.bytes_used = 0
        self.full_tokens = 0
        """Longest block seen, in tokens: the length of a full block as far as known."""
        self.orphans: dict[bytes, dict[HeldBlock, None]] = {}
        """Parent hash to children, for parents that are not held; first blocks are always here."""
        self.tails: dict[bytes, dict[HeldBlock, None]] = {}
        """Parent hash to tails, oldest first."""
        self.cut: dict[bytes, dict[HeldBlock, None]] = {}
        """Parent hash to blocks that have cuts, oldest first."""
        self.cut_tails: dict[bytes, dict[HeldBlock, None]] = {}
        """Hash of a tail to the blocks that it is the beginning of."""
        self.added = 0
        """Blocks, over all time."""
        self.looked_through = 0
        """Blocks looked at to find what was a tail, over all time."""
        self.leaves: list[HeldBlock] = []
        self.windows: list[HeldPart] = []

    def may_be_looked_through(self) -> bool:
        """Whether a longer block than any before is believed: blocks that grow and grow would cost more each time."""
        return self.looked_through + len(self.blocks) <= SCANS_PER_BLOCK * (self.added + 1)

    def queue_leaf(self, block: HeldBlock) -> None:
        if block.queued_stamp == NOT_QUEUED:
            block.queued_stamp = block.stamp
            heapq.heappush(self.leaves, block)

    def queue_window(self, held: HeldPart | None) -> None:
        """Queue the WINDOW part of a block that has children; None and the first block's are ignored."""
        if held is not None and held.queued_stamp == NOT_QUEUED and held.block.start > 0:
            held.queued_stamp = held.stamp
            heapq.heappush(self.windows, held)

    def oldest_leaf(self) -> HeldBlock | None:
        """The leaf to go first; it stays queued. What can't go now leaves the queue (see :meth:`requeue`)."""
        heap = self.leaves
        while heap:
            block = heap[0]
            if block.children is not None or not block.kinds or block.locked:
                heapq.heappop(heap).queued_stamp = NOT_QUEUED
            elif block.queued_stamp != block.stamp:
                heapq.heappop(heap).queued_stamp = NOT_QUEUED
                self.queue_leaf(block)
            else:
                return block
        return None

    def oldest_window(self) -> HeldPart | None:
        """The interior WINDOW part to go first; it stays queued."""
        heap = self.windows
        while heap:
            held = heap[0]
            if held.block.window is not held or held.block.children is None or held.locks:
                heapq.heappop(heap).queued_stamp = NOT_QUEUED
            elif held.queued_stamp != held.stamp:
                heapq.heappop(heap).queued_stamp = NOT_QUEUED
                self.queue_window(held)
            else:
                return held
        return None

    def requeue(self, block: HeldBlock) -> None:
        """The block lost its last child, a lock or gained a part: put it where it belongs."""
        if block.children is not None:
            self.queue_window(block.window)
        elif block.queued_stamp == NOT_QUEUED:
            self.queue_leaf(block)
