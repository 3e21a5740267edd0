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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kakeya_zmq.blocks import ROOT_HASH
from kakeya_zmq.store_blocks import HeldBlock, HeldPart, Namespace
from wire.messages import PartMeta

CUT_BLOCKS_PER_PARENT_MAX: Final = 64
"""Blocks under one parent whose cuts are remembered: as many cuts as an answer has room for, at least."""
TAILS_LOOKED_AT_MAX: Final = 256
"""Tails under one parent that are looked at to find some that may go, or that fit; honest nodes leave far fewer."""


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
        namespace.added += 1
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
            del tails[block]
            if not tails:
                del namespace.tails[block.parent_hash]
        if not namespace.blocks:
            del self.namespaces[namespace.fingerprint]

    def tails(self, fingerprint: bytes, parent_hash: bytes, block_tokens: int, at_most: int) -> list[HeldBlock]:
        """Blocks under ``parent_hash`` that are shorter than ``block_tokens``, the one stored last first."""
        namespace = self.namespaces.get(fingerprint)
        if namespace is None:
            return []
        if namespace.full_tokens >= block_tokens:
            newest = islice(reversed(namespace.tails.get(parent_hash, {})), TAILS_LOOKED_AT_MAX)
            return [block for block in newest if block.token_count < block_tokens][:at_most]
        # no full block was seen yet: every block here is a tail, also those that could not be told from full ones
        return list(islice(self._children_of(namespace, parent_hash), at_most))

    def children(self, fingerprint: bytes, parent_hash: bytes) -> Iterator[HeldBlock]:
        """Blocks under ``parent_hash``, the one stored last first."""
        namespace = self.namespaces.get(fingerprint)
        return iter(()) if namespace is None else self._children_of(namespace, parent_hash)

    def cuts(self, fingerprint: bytes, parent_hash: bytes) -> list[HeldBlock]:
        """Blocks under ``parent_hash`` that have cuts, the one stored last first."""
        namespace = self.namespaces.get(fingerprint)
        return [] if namespace is None else list(reversed(namespace.cut.get(parent_hash, {})))

    def cut_from(self, fingerprint: bytes, tail_hash: bytes) -> Iterable[HeldBlock]:
        """Blocks that a tail is known to be the beginning of."""
        namespace = self.namespaces.get(fingerprint)
        return () if namespace is None else namespace.cut_tails.get(tail_hash, ())

    def add_cut(self, block: HeldBlock, tail_hash: bytes, token_count: int, at_most: int) -> None:
        """Note that a tail is the beginning of a block. Of more than ``at_most`` tails of a block, and of more than
        CUT_BLOCKS_PER_PARENT_MAX such blocks under one parent, the oldest are forgotten."""
        namespace = block.namespace
        if block.cuts is None:
            block.cuts = []
            siblings = namespace.cut.setdefault(block.parent_hash, {})
            siblings[block] = None
            if len(siblings) > CUT_BLOCKS_PER_PARENT_MAX:
                self._forget_cuts(next(iter(siblings)))
        if (tail_hash, token_count) in block.cuts:
            return
        block.cuts.append((tail_hash, token_count))
        namespace.cut_tails.setdefault(tail_hash, {})[block] = None
        for forgotten, _ in block.cuts[:-at_most]:
            self._forget_cut(block, forgotten)
        del block.cuts[:-at_most]

    def _forget_cuts(self, block: HeldBlock) -> None:
        if block.cuts is None:
            return
        for tail_hash, _ in block.cuts:
            self._forget_cut(block, tail_hash)
        block.cuts = None
        siblings = block.namespace.cut[block.parent_hash]
        del siblings[block]
        if not siblings:
            del block.namespace.cut[block.parent_hash]

    @staticmethod
    def _forget_cut(block: HeldBlock, tail_hash: bytes) -> None:
        blocks = block.namespace.cut_tails.get(tail_hash, {})
        blocks.pop(block, None)
        if not blocks:
            block.namespace.cut_tails.pop(tail_hash, None)

    def parents_of_tails(self, fingerprint: bytes, parent_hashes: Sequence[bytes], block_tokens: int) -> Sequence[bytes]:
        """Those of some blocks that may have tails, in the same order: most of a prompt's blocks have none."""
        namespace = self.namespaces.get(fingerprint)
        if namespace is None:
            return ()
        if namespace.full_tokens < block_tokens:  # see tails(): the index does not tell yet
            return parent_hashes
        tails, cut = namespace.tails, namespace.cut
        return [parent_hash for parent_hash in parent_hashes if parent_hash in tails or parent_hash in cut]

    def clear(self) -> None:
        """Forget every block. Each lets go of its parts, as a circle would wait for the collector."""
        for block in self.all_blocks():
            block.full = block.window = block.state = block.children = None
        self.namespaces.clear()

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
        if meta.token_count > namespace.full_tokens and not namespace.may_be_looked_through():
            return True
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
            namespace.tails.setdefault(block.parent_hash, {})[block] = None
        elif block.token_count > namespace.full_tokens:
            former, namespace.full_tokens = namespace.full_tokens, block.token_count
            if not former:
                return
            namespace.looked_through += len(namespace.blocks)
            for other in namespace.blocks.values():
                if other.token_count == former:
                    namespace.tails.setdefault(other.parent_hash, {})[other] = None
