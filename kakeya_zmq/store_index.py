"""The tree of held blocks and the order in which they go when room is needed; knows neither leases nor clocks.

Rules

* A block is reached only through its prefix, so the tree is evicted from its leaves: a *leaf* is a block without held
  children. Among leaves the least recently used goes first, the deeper one first on a tie. When a leaf goes, its parent
  inherits its recency if that was later, so that a chain is eaten from its end.
* The WINDOW part of a block that has children is needed only by a prompt that branches off near it. It goes before the
  leaves of the same age: those nearest the start first, since a window is looked for at the end of a prefix. The first
  block's WINDOW part is spared: it may hold attention sinks, which every boundary needs.
* Recency is a stamp, the same one for all parts of one use. Using a part costs an assignment; the two heaps of a
  namespace are put right only when something is taken from them (an entry whose stamp has grown is pushed again).
* A *tail* is a block shorter than the longest block its namespace has seen: full blocks are all of one length.
* A namespace has an index of its own: a hash means nothing outside of it. Equal hashes in two namespaces are two blocks,
  so who may use one namespace learns nothing of another one and takes no place in it. What goes first is compared over all.

Memory matters here: a store holds up to millions of parts. Everything is slotted, hashes are kept once, descriptions are
rebuilt when they are asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from kakeya_zmq.blocks import ROOT_HASH, Part
from wire.limits import HASH_BYTES
from wire.messages import PartKind, PartMeta, PartRef

NOT_QUEUED = -1


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
        "blocks",
        "bytes_used",
        "cut",
        "fingerprint",
        "full_tokens",
        "leaves",
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
        self.tails: dict[bytes, list[HeldBlock]] = {}
        """Parent hash to tails, oldest first."""
        self.cut: dict[bytes, list[HeldBlock]] = {}
        """Parent hash to blocks that have cuts, oldest first."""
        self.leaves: list[HeldBlock] = []
        self.windows: list[HeldPart] = []

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


class BlockTree:
    """All held blocks by namespace and hash, linked to their children, with the tails of each parent."""

    __slots__ = ("namespaces",)

    def __init__(self) -> None:
        self.namespaces: dict[bytes, Namespace] = {}

    @property
    def block_count(self) -> int:
        return sum(len(namespace.blocks) for namespace in self.namespaces.values())

    def block(self, fingerprint: bytes, block_hash: bytes) -> HeldBlock | None:
        """The block that a namespace has under a hash, if it is held."""
        namespace = self.namespaces.get(fingerprint)
        return None if namespace is None else namespace.blocks.get(block_hash)

    def all_blocks(self) -> Iterator[HeldBlock]:
        """Every held block; nothing may be added or removed meanwhile."""
        return (block for namespace in self.namespaces.values() for block in namespace.blocks.values())

    def add(self, fingerprint: bytes, meta: PartMeta, publisher: str = "") -> HeldBlock:
        """Link a new block without parts; the caller gives it one or removes it again. A namespace that is new with it is
        its publisher's."""
        namespace = self.namespaces.get(fingerprint)
        if namespace is None:
            namespace = self.namespaces[fingerprint] = Namespace(fingerprint, publisher)
        parent = namespace.blocks.get(meta.parent_hash)
        # one hash object for a block and its children: a hash costs 80 bytes
        parent_hash = ROOT_HASH if meta.parent_hash == ROOT_HASH else parent.block_hash if parent else meta.parent_hash
        block = HeldBlock(namespace, meta.block_hash, parent_hash, meta.start, meta.token_count)
        namespace.blocks[block.block_hash] = block
        orphans = namespace.orphans.pop(block.block_hash, None)
        if orphans is not None:
            block.children = orphans if len(orphans) > 1 else next(iter(orphans))
        self._attach(parent, block)
        self._classify(block)
        return block

    def remove(self, block: HeldBlock) -> None:
        """Unlink a block that has no parts left; its children stay, without a held parent."""
        namespace = block.namespace
        del namespace.blocks[block.block_hash]
        if block.children is not None:
            children = {block.children: None} if isinstance(block.children, HeldBlock) else block.children
            namespace.orphans[block.block_hash] = children
            block.children = None
        self._detach(block)
        self._forget_cuts(block)
        tails = namespace.tails.get(block.parent_hash)
        if tails is not None and block in tails:
            tails.remove(block)
            if not tails:
                del namespace.tails[block.parent_hash]
        if not namespace.blocks:
            del self.namespaces[namespace.fingerprint]

    def tails(self, fingerprint: bytes, parent_hash: bytes, block_tokens: int) -> list[HeldBlock]:
        """Blocks under ``parent_hash`` that are shorter than ``block_tokens``, the one stored last first."""
        namespace = self.namespaces.get(fingerprint)
        if namespace is None:
            return []
        if namespace.full_tokens >= block_tokens:
            return [block for block in reversed(namespace.tails.get(parent_hash, ())) if block.token_count < block_tokens]
        # no full block was seen yet: every block here is a tail, also those that could not be told from full ones
        return list(self._children_of(namespace, parent_hash))

    def children(self, fingerprint: bytes, parent_hash: bytes) -> Iterator[HeldBlock]:
        """Blocks under ``parent_hash``, the one stored last first."""
        namespace = self.namespaces.get(fingerprint)
        return iter(()) if namespace is None else self._children_of(namespace, parent_hash)

    def cuts(self, fingerprint: bytes, parent_hash: bytes) -> list[HeldBlock]:
        """Blocks under ``parent_hash`` that have cuts, the one stored last first."""
        namespace = self.namespaces.get(fingerprint)
        return [] if namespace is None else namespace.cut.get(parent_hash, [])[::-1]

    def add_cut(self, block: HeldBlock, tail_hash: bytes, token_count: int, at_most: int) -> None:
        """Note that a tail is the beginning of a block; the oldest of more than ``at_most`` is forgotten."""
        if block.cuts is None:
            block.cuts = []
            block.namespace.cut.setdefault(block.parent_hash, []).append(block)
        if (tail_hash, token_count) not in block.cuts:
            block.cuts.append((tail_hash, token_count))
            del block.cuts[:-at_most]

    def _forget_cuts(self, block: HeldBlock) -> None:
        if block.cuts is None:
            return
        block.cuts = None
        siblings = block.namespace.cut[block.parent_hash]
        siblings.remove(block)
        if not siblings:
            del block.namespace.cut[block.parent_hash]

    def parents_of_tails(self, fingerprint: bytes, parent_hashes: Sequence[bytes], block_tokens: int) -> Sequence[bytes]:
        """Those of some blocks that may have tails, in the same order: most of a prompt's blocks have none."""
        namespace = self.namespaces.get(fingerprint)
        if namespace is None:
            return ()
        if namespace.full_tokens < block_tokens:  # see tails(): the index does not tell yet
            return parent_hashes
        tails, cut = namespace.tails, namespace.cut
        return [parent_hash for parent_hash in parent_hashes if parent_hash in tails or parent_hash in cut]

    def ancestors(self, block: HeldBlock) -> Iterator[HeldBlock]:
        blocks = block.namespace.blocks
        parent = blocks.get(block.parent_hash)
        while parent is not None:
            yield parent
            parent = blocks.get(parent.parent_hash)

    def contradicts(self, fingerprint: bytes, meta: PartMeta) -> bool:
        """Whether a description can't be true beside what its namespace holds.

        Where a block starts is where its parent ends, so starts grow along every chain: no block is its own ancestor.
        """
        if meta.block_hash == ROOT_HASH or (meta.start == 0) != (meta.parent_hash == ROOT_HASH):
            return True
        namespace = self.namespaces.get(fingerprint)
        if namespace is None:
            return False
        block = namespace.blocks.get(meta.block_hash)
        if block is not None:
            same = block.parent_hash, block.start, block.token_count
            return same != (meta.parent_hash, meta.start, meta.token_count)
        parent = namespace.blocks.get(meta.parent_hash)
        if parent is not None and parent.start + parent.token_count != meta.start:
            return True
        # siblings and children without a held parent agree among themselves, so one of each tells
        sibling = next(iter(namespace.orphans.get(meta.parent_hash, ())), None)
        child = next(iter(namespace.orphans.get(meta.block_hash, ())), None)
        return (sibling is not None and sibling.start != meta.start) or (child is not None and child.start != meta.end)

    def victim(self, namespaces: Iterable[Namespace]) -> tuple[HeldPart, ...]:
        """What goes first: one interior WINDOW part, or all parts of one leaf; empty when nothing in order can go."""
        best: tuple[int, int] | None = None
        chosen: tuple[HeldPart, ...] = ()
        for namespace in namespaces:
            window = namespace.oldest_window()
            if window is not None and (best is None or (window.stamp, 0) < best):
                best, chosen = (window.stamp, 0), (window,)
            leaf = namespace.oldest_leaf()
            if leaf is not None and (best is None or (leaf.stamp, 1) < best):
                best, chosen = (leaf.stamp, 1), leaf.parts()
        return chosen

    def _children_of(self, namespace: Namespace, parent_hash: bytes) -> Iterator[HeldBlock]:
        parent = namespace.blocks.get(parent_hash)
        if parent is not None:
            return parent.iterate_children()
        return reversed(namespace.orphans.get(parent_hash, {}))

    def _attach(self, parent: HeldBlock | None, block: HeldBlock) -> None:
        if parent is None:
            block.namespace.orphans.setdefault(block.parent_hash, {})[block] = None
        elif parent.children is None:
            parent.children = block
            parent.namespace.queue_window(parent.window)
        elif isinstance(parent.children, HeldBlock):
            parent.children = {parent.children: None, block: None}
        else:
            parent.children[block] = None

    def _detach(self, block: HeldBlock) -> None:
        namespace = block.namespace
        parent = namespace.blocks.get(block.parent_hash)
        if parent is None:
            siblings = namespace.orphans[block.parent_hash]
            del siblings[block]
            if not siblings:
                del namespace.orphans[block.parent_hash]
        elif isinstance(parent.children, dict):
            del parent.children[block]
            if len(parent.children) == 1:
                parent.children = next(iter(parent.children))
        else:
            parent.children = None
            parent.stamp = max(parent.stamp, block.stamp)
            namespace.requeue(parent)

    def _classify(self, block: HeldBlock) -> None:
        """Enter a tail into the index; a longer block than any before shows which of the earlier ones were tails."""
        namespace = block.namespace
        if block.token_count < namespace.full_tokens:
            namespace.tails.setdefault(block.parent_hash, []).append(block)
        elif block.token_count > namespace.full_tokens:
            former, namespace.full_tokens = namespace.full_tokens, block.token_count
            if not former:
                return
            for other in namespace.blocks.values():
                if other.token_count == former:
                    namespace.tails.setdefault(other.parent_hash, []).append(other)
