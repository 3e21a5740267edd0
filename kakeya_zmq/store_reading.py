"""Looking into a block store: what is held, in prefix order or by name. Changes nothing, not even what counts as used.

A part belongs to the namespace (fingerprint) it was put in and is found there only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kakeya_zmq.blocks import Part
from kakeya_zmq.store_blocks import HeldPart
from kakeya_zmq.store_index import BlockTree
from kakeya_zmq.store_lookup import ROWS, cuts_of, find_prompt, survey_of, tail_of
from kakeya_zmq.store_values import Finding, Survey
from wire import limits
from wire.messages import Cut, PartMeta, PartRef, Requirement, Tail

CONTINUATIONS_MAX: Final = 64


class StoreReading:
    """What may be asked of the held blocks; the store builds on it.

    Args:
        tree: the held blocks, which the store changes.
    """

    def __init__(self, tree: BlockTree) -> None:
        self._tree = tree

    def has(self, ref: PartRef, *, fingerprint: bytes) -> bool:
        return self._find(ref, fingerprint) is not None

    def presence(self, fingerprint: bytes) -> Callable[[PartRef], bool]:
        """Whether a part of one namespace is held at the moment it is asked, for walks along a chain."""
        namespaces = self._tree.namespaces

        def has(ref: PartRef) -> bool:
            if (namespace := namespaces.get(fingerprint)) is None or (block := namespace.blocks.get(ref.block_hash)) is None:
                return False
            kind = ref.kind  # written out, not by block.part: a prompt asks this for every block
            return (block.full if kind == 0 else block.window if kind == 1 else block.state) is not None

        return has

    def get(self, ref: PartRef, *, fingerprint: bytes) -> Part | None:
        """The part, without refreshing it."""
        held = self._find(ref, fingerprint)
        return None if held is None else held.as_part()

    def length_bytes(self, ref: PartRef, *, fingerprint: bytes) -> int:
        """Payload size, 0 when it is not held."""
        held = self._find(ref, fingerprint)
        return 0 if held is None else held.length_bytes

    def contradicts(self, meta: PartMeta, *, fingerprint: bytes) -> bool:
        """Whether :meth:`put` would refuse this description: its namespace has the block at another place in a chain."""
        return self._tree.contradicts(fingerprint, meta)

    def survey(self, block_hashes: Sequence[bytes], *, fingerprint: bytes) -> Survey:
        """Presence of every kind for each hash, in the given order, and the mean size of what is there."""
        return survey_of([self._tree.block(fingerprint, block_hash) for block_hash in block_hashes])

    def find(self, block_hashes: Sequence[bytes], *, fingerprint: bytes, requirement: Requirement) -> Finding:
        """What is held of a prompt whose blocks have these hashes, in prefix order; refreshes nothing."""
        return find_prompt(self._tree, block_hashes, fingerprint, requirement)

    def tails(self, parent_hash: bytes, *, fingerprint: bytes, block_tokens: int) -> tuple[Tail, ...]:
        """Tails held under a block (or under ROOT_HASH), newest first, at most TAILS_PER_PARENT_MAX."""
        blocks = self._tree.tails(fingerprint, parent_hash, block_tokens, limits.TAILS_PER_PARENT_MAX)
        return tuple([tail_of(block) for block in blocks])

    def cuts(self, parent_hash: bytes, *, fingerprint: bytes) -> tuple[Cut, ...]:
        """Tails under a block (or under ROOT_HASH) that are beginnings of longer blocks."""
        return tuple([cut for block in self._tree.cuts(fingerprint, parent_hash) for cut in cuts_of(block)])

    def continuations(self, parent_hash: bytes, *, fingerprint: bytes) -> tuple[tuple[bytes, int], ...]:
        """Hash and tokens of blocks held under a block, newest first, at most CONTINUATIONS_MAX."""
        found = itertools.islice(self._tree.children(fingerprint, parent_hash), CONTINUATIONS_MAX)
        return tuple((block.block_hash, block.token_count) for block in found)

    def cuts_within(self, block_hash: bytes, *, fingerprint: bytes) -> tuple[Cut, ...]:
        """Tails that are beginnings of this block, if it is held."""
        block = self._tree.block(fingerprint, block_hash)
        return () if block is None else cuts_of(block)

    def is_cut(self, meta: PartMeta, *, fingerprint: bytes) -> bool:
        """Whether this part of a tail can be had from a longer block."""
        tail = (meta.block_hash, meta.token_count)
        return any(
            block.parent_hash == meta.parent_hash and block.kinds & ROWS & 1 << meta.kind and tail in (block.cuts or ())
            for block in self._tree.cut_from(fingerprint, meta.block_hash)
        )

    def holds_namespace(self, fingerprint: bytes) -> bool:
        """Whether there is a part of it."""
        return fingerprint in self._tree.namespaces

    def usage_by_fingerprint(self) -> dict[bytes, int]:
        return {fingerprint: namespace.bytes_used for fingerprint, namespace in self._tree.namespaces.items()}

    def _find(self, ref: PartRef, fingerprint: bytes) -> HeldPart | None:
        block = self._tree.block(fingerprint, ref.block_hash)
        return None if block is None else block.part(ref.kind)

    def _found(self, refs: Iterable[PartRef], fingerprint: bytes) -> list[HeldPart]:
        """The parts that are held, in order."""
        return [held for ref in refs if (held := self._find(ref, fingerprint)) is not None]
