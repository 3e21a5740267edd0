"""What one preparation can build a prefix from: the local store, and parts that just arrived.

Not a machine: a value store shared by the machines of prompt preparation. Parts that arrive are kept in memory until the
preparation ends, whatever the local store does with them; so a full or failing store costs nothing but a later hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kakeya_zmq.blocks import ROOT_HASH, Block, Chain, Part, RawPart, is_intact, needed_parts, raw_part
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.protocol.account import Account, Origin
from kakeya_zmq.protocol.effects import Count, Effect, WantedPart
from kakeya_zmq.protocol.prepare_values import PreparationTask, TailHash
from kakeya_zmq.store import BlockStore
from wire.errors import KakeyaError
from wire.ids import LeaseId, NodeId
from wire.messages import Cut, PartKind, PartRef, Requirement, SourceKind

ALTERNATIVE_TAILS_MAX = 16
"""Other prompts' tails tried as deeper positions; each try walks the whole chain."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A position that can be had, and the chain on which it is the end of a block."""

    position: int
    chain: Chain

    @property
    def blocks(self) -> list[Block]:
        """Those that it takes."""
        return [block for block in self.chain.blocks if block.end <= self.position]


def estimate_bytes(position: int, requirement: Requirement, part_bytes_per_token: tuple[int, int, int]) -> int:
    """Bytes of the parts a hit at ``position`` needs; at most one block too many for windows."""
    if position <= 0:
        return 0
    total = position * part_bytes_per_token[PartKind.FULL] if requirement.full else 0
    if requirement.window_tokens > 0:
        rows = requirement.window_tokens + requirement.sink_tokens + 2 * requirement.block_tokens
        total += min(position, rows) * part_bytes_per_token[PartKind.WINDOW]
    if requirement.state:
        total += part_bytes_per_token[PartKind.STATE]
    return total


def _holds_nothing(ref: PartRef) -> bool:
    return False


class Holdings:
    """Parts at hand for one prompt.

    Args:
        task: the preparation's.
        store: the local store, or None when the session does not use it.
        account: what comes is written down there. Whoever fills the holdings writes into it as well.
    """

    def __init__(self, task: PreparationTask, store: BlockStore | None, account: Account) -> None:
        self._task = task
        self.account = account
        self._store = store
        self._has_stored = store.presence(task.fingerprint) if store is not None else _holds_nothing
        self._requirement = task.facts.requirement
        self._arrived: dict[PartRef, Part] = {}
        self._blocks = {block.block_hash: block for block in task.chain.blocks}
        self._lease_id: LeaseId | None = None
        self._alternatives: dict[bytes, Chain] = {}
        self.importable = self._cut_to_budget(task.chain)
        """The chain up to the deepest position whose parts fit into the import budget."""
        self.tail_starts: set[int] = set()
        """Where tails in the own store go on with this prompt's tokens."""
        self.received_bytes = 0
        self.new_parts: list[Part] = []
        self._needed: dict[tuple[int, int], tuple[Chain, tuple[PartRef, ...]]] = {}
        self.held_by: dict[NodeId, int] = {}
        """Position up to which a node said that it can do without computing."""
        self.known_to = 0
        """How far something cached, here or elsewhere, begins like this prompt, to the block."""
        self._branches: set[int] = set()
        """Ends of this prompt's blocks behind which something cached is known to go on with other tokens."""
        self.store_failed = False
        """The local store could not take a part: others cannot count on finding it there."""

    # --- coverage ---------------------------------------------------------------------------------------------------

    def has(self, ref: PartRef) -> bool:
        return ref in self._arrived or self._has_stored(ref)

    def find(self, ref: PartRef) -> Part | None:
        """The part, if it is at hand."""
        part = self._arrived.get(ref)
        return part if part is not None or self._store is None else self._store.get(ref, fingerprint=self._task.fingerprint)

    def take(self, ref: PartRef) -> Part | None:
        """The part for an import, if it is at hand and undamaged; a damaged one is dropped from the store.

        Parts that arrived were checked by the lane that received them.
        """
        part = self.find(ref)
        if part is None or ref in self._arrived or is_intact(part):
            return part
        if self._store is not None:
            self._store.invalidate(ref, fingerprint=self._task.fingerprint)
        self.account.reason("a stored part was damaged and is not used")
        return None

    def reach(self, has: Callable[[PartRef], bool]) -> Reach:
        """The deepest position for which ``has`` holds for every needed part."""
        best = Reach(self._best_boundary(has), self.importable)
        target, grid = self._task.target, self._task.settings.import_grid_tokens
        usable = [chain for chain in self._alternatives.values() if not grid or chain.tokens == target]
        deeper = sorted(usable, key=lambda chain: chain.tokens, reverse=True)
        for chain in deeper[:ALTERNATIVE_TAILS_MAX]:
            if chain.tokens <= best.position:
                break
            if all(has(ref) for ref in needed_parts(chain, chain.tokens, self._requirement)):
                return Reach(chain.tokens, chain)
        return best

    def _best_boundary(self, has: Callable[[PartRef], bool]) -> int:
        """The deepest usable end of a block; with an import grid, the target or a multiple of it."""
        grid, chain = self._task.settings.import_grid_tokens, self.importable
        position = best_boundary(chain, self._requirement, has)
        while grid and position % grid and position != self._task.target:
            below = position - position % grid
            chain = Chain(chain.block_tokens, tuple(block for block in chain.blocks if block.end <= below))
            position = best_boundary(chain, self._requirement, has)
        return position

    def job_base(self) -> int:
        """The deepest position at hand that is a boundary of the prompt's own chain: a worker knows no other tails."""
        position = self.reach(self.has).position
        return max((block.end for block in self._task.chain.blocks if block.end <= position), default=0)

    def note_known(self, has: Callable[[PartRef], bool], hash_tail: TailHash) -> None:
        """Learn from one more view of what is cached how far anything begins like this prompt."""
        tails = [chain.tokens for chain in self._alternatives.values()]
        self.known_to = max([self.known_to, *tails])
        for block in self._task.chain.blocks:
            if not any(has(PartRef(block_hash=block.block_hash, kind=kind)) for kind in PartKind):
                break
            self.known_to = max(self.known_to, block.end)
        self._look_for_branch(hash_tail)

    def note_branch(self, end: int) -> None:
        """Something cached goes on behind the block that ends at ``end`` with other tokens than this prompt's."""
        self._branches.add(end)

    def _look_for_branch(self, hash_tail: TailHash) -> None:
        """Look in the own store for what follows ``known_to``; a block longer than the prompt's rest tells nothing."""
        start, parent = self.known_to, next((b for b in self._task.chain.blocks if b.end == self.known_to), None)
        if self._store is None or parent is None:
            return
        for block_hash, tokens in self._store.continuations(parent.block_hash, fingerprint=self._task.fingerprint):
            if start + tokens <= self._task.target and hash_tail(parent.block_hash, start, tokens) != block_hash:
                self.note_branch(start)
                return

    @property
    def diverged_at(self) -> int | None:
        """Where the prompt leaves everything cached that begins like it; None unless something is known to go on so.

        Of another node's store only the tails are known: what its blocks go on with behind the prompt's is not.
        """
        return self.known_to if 0 < self.known_to < self._task.target and self.known_to in self._branches else None

    def needed(self, reach: Reach) -> tuple[PartRef, ...]:
        """The parts of a hit at ``reach``; worked out once for each of the few places a preparation looks at."""
        key = (reach.position, id(reach.chain))
        found = self._needed.get(key)
        if found is None or found[0] is not reach.chain:
            found = self._needed[key] = (reach.chain, needed_parts(reach.chain, reach.position, self._requirement))
        return found[1]

    def missing(self, reach: Reach) -> tuple[PartRef, ...]:
        """Parts a hit at ``reach`` needs that are not at hand."""
        needed = self.needed(reach)
        return tuple(ref for ref in needed if not self.has(ref))

    def expected(self, refs: Iterable[PartRef], *, optional: bool = False) -> tuple[WantedPart, ...]:
        """What parts of this prompt must look like when they come: all that the own model and tokens tell of them."""
        parts: list[WantedPart] = []
        for ref in refs:
            block = self._blocks[ref.block_hash]
            least, most = self._task.facts.part_bytes_range(ref.kind, block.part_tokens)
            parts.append(WantedPart(ref, block.parent_hash, block.start, block.part_tokens, least, most, optional))
        return tuple(parts)

    def add_tail(self, tail: Block) -> None:
        """Make the end of another prompt's tail a candidate position. The caller has checked its hash."""
        parents = [block for block in self.importable.blocks if block.end <= tail.start]
        known = self._blocks.get(tail.block_hash)
        if known is not None and not (known.stored_tokens == tail.stored_tokens and tail.token_count > known.token_count):
            return
        if tail.end > self._task.target or (tail.stored_tokens and self._requirement.state):
            return  # state cannot be cut
        if (parents[-1].end if parents else 0) != tail.start:
            return
        self._blocks[tail.block_hash] = tail
        self._alternatives[tail.block_hash] = Chain(self.importable.block_tokens, (*parents, tail))

    def find_local_tails(self, hash_tail: TailHash, boundary: int) -> bool:
        """Look in the local store for tails of other prompts that continue ``boundary`` with this prompt's own tokens."""
        if self._store is None:
            return False
        starts = {0: ROOT_HASH} | {block.end: block.block_hash for block in self.importable.blocks}
        block_tokens = self.importable.block_tokens
        for start, parent_hash in starts.items():
            if start < boundary or start % block_tokens:
                continue
            fingerprint = self._task.fingerprint
            found = [
                (tail.block_hash, Block(tail.block_hash, parent_hash, start, tail.token_count))
                for tail in self._store.tails(parent_hash, fingerprint=fingerprint, block_tokens=block_tokens)
            ]
            found += [
                (cut.block_hash, Block(cut.within, parent_hash, start, cut.token_count, cut.within_tokens))
                for cut in self._store.cuts(parent_hash, fingerprint=fingerprint)
            ]
            for tail_hash, block in found:
                if block.end > self._task.target:
                    continue
                if hash_tail(parent_hash, start, block.token_count) == tail_hash:
                    self.tail_starts.add(start)
                    self.add_tail(block)
                else:
                    self.note_branch(start)
        return bool(self._alternatives)

    def _cut_to_budget(self, chain: Chain) -> Chain:
        """The chain as far as what is not in the own store fits the import limit."""
        task, sizes = self._task, self._task.facts.part_bytes_per_token
        own = best_boundary(chain, self._requirement, self._has_stored)
        limit_bytes = task.settings.max_import_bytes + (own * sizes[PartKind.FULL] if self._requirement.full else 0)
        fitting = tuple(
            block
            for block in chain.blocks
            if block.end <= own or estimate_bytes(block.end, self._requirement, sizes) <= limit_bytes
        )
        return chain if len(fitting) == len(chain.blocks) else Chain(chain.block_tokens, fitting)

    # --- parts come in ----------------------------------------------------------------------------------------------

    def accept(self, parts: Iterable[Part], origin: Origin, now: float) -> list[Effect]:
        """Keep parts that arrived verified from another node, and promote them into the local store."""
        effects: list[Effect] = []
        limit_bytes = self._task.settings.max_import_bytes
        for part in parts:
            ref = part.meta.ref
            if ref in self._arrived:
                continue
            if not self._fits_chain(part) or self.received_bytes + part.meta.length_bytes > limit_bytes:
                effects.append(Count("parts_refused"))
                continue
            self._arrived[ref] = part
            self.received_bytes += part.meta.length_bytes
            self.account.receive(ref, part.meta.length_bytes, origin)
            effects.append(Count("bytes_received", part.meta.length_bytes))
            if origin[0] is SourceKind.WORKER:
                self._note_new([part])
            effects.extend(self._promote(part, now))
        return effects

    def keep_computed(self, parts: Sequence[Part], now: float) -> list[Effect]:
        """Put parts computed here into the local store and remember them for publishing."""
        effects: list[Effect] = []
        if self._task.publish:
            self._note_new(parts)
        for part in parts:
            if not self._put(part, now):
                self.store_failed = True
                effects.append(Count("hot_store_failures"))
        return effects

    def _note_new(self, parts: Iterable[Part]) -> None:
        """Remember parts for publishing, each once: what a worker sent may be computed again behind a shorter import."""
        known = {part.meta.ref for part in self.new_parts}
        self.new_parts.extend(part for part in parts if part.meta.ref not in known)

    def _promote(self, part: Part, now: float) -> list[Effect]:
        if self._store is None or self._has_stored(part.meta.ref):
            return []
        if not self._put(part, now):
            self.store_failed = True
            return [Count("hot_promotion_failures")]
        self._note_cut(part, self._store)
        return [Count("hot_promotions"), Count("hot_promotion_bytes", part.meta.length_bytes)]

    def _note_cut(self, part: Part, store: BlockStore) -> None:
        """A block that was fetched because the prompt's own tail is its beginning: a repeat must find it here, too."""
        block = self._blocks[part.meta.block_hash]
        own = self._task.chain.blocks[-1]
        same_place = own.parent_hash == block.parent_hash and own.token_count == block.token_count
        if not block.stored_tokens or not same_place or own.block_hash == block.block_hash:
            return
        cut = Cut(
            parent_hash=own.parent_hash,
            block_hash=own.block_hash,
            token_count=own.token_count,
            within=block.block_hash,
            within_tokens=block.stored_tokens,
            kinds=1 << part.meta.kind,
        )
        store.cut(cut, fingerprint=self._task.fingerprint)

    def _put(self, part: Part, now: float) -> bool:
        if self._store is None:
            return True
        if not self._task.may_keep():
            return False
        try:
            self._store.put(part, fingerprint=self._task.fingerprint, now=now)
        except KakeyaError:  # a cache error can only ever cause a later miss; the caller counts it
            return False
        return True

    def _fits_chain(self, part: Part) -> bool:
        block = self._blocks.get(part.meta.block_hash)
        return (
            block is not None
            and (part.meta.start, part.meta.token_count) == (block.start, block.part_tokens)
            and part.meta.parent_hash == block.parent_hash
        )

    # --- parts go out -----------------------------------------------------------------------------------------------

    def collect(self, reach: Reach, now: float) -> tuple[RawPart, ...] | None:
        """The parts of a hit at ``reach`` as the engine takes them, by (start, kind); None when one has vanished."""
        refs = self.needed(reach)
        if self._store is not None:
            self._store.touch(refs, now, fingerprint=self._task.fingerprint)
        found: list[Part] = []
        for ref in refs:
            part = self.take(ref)
            if part is None:
                return None
            found.append(part)
        found.sort(key=lambda part: (part.meta.start, part.meta.kind))
        return tuple(raw_part(part) for part in found)

    def bytes_of(self, reach: Reach) -> int:
        """Size of the parts at hand that a hit at ``reach`` needs."""
        found = (self.find(ref) for ref in self.needed(reach))
        return sum(part.meta.length_bytes for part in found if part is not None)

    def hold(self, reach: Reach, now: float) -> None:
        """Lease what the local store contributes to ``reach``, so that it stays until :meth:`release` or the next call.

        Whoever has others bring the rest calls it before: what they bring goes into the store, too, and makes room there.
        """
        if self._store is None or reach.position == 0:
            return
        refs = [ref for ref in self.needed(reach) if self._has_stored(ref)]
        self.release()
        try:
            fingerprint, lease_ms = self._task.fingerprint, self._task.stages_ms
            self._lease_id = self._store.lease(refs, now, lease_ms, fingerprint=fingerprint).lease_id
        except KakeyaError:  # the parts may be evicted before the import then, which is a miss, not an error
            self._lease_id = None

    def release(self) -> None:
        """Give the local lease back, if there is one."""
        if self._store is not None and self._lease_id is not None:
            self._store.release(self._lease_id)
        self._lease_id = None

    def invalidate(self, reach: Reach) -> None:
        """Drop everything that was used for ``reach``: the engine refused it, fresh parts must be able to replace it."""
        dropped = set(self.needed(reach))
        self.release()
        for ref in dropped:
            self._arrived.pop(ref, None)
            if self._store is not None:
                self._store.invalidate(ref, fingerprint=self._task.fingerprint)
        self.new_parts = [part for part in self.new_parts if part.meta.ref not in dropped]
