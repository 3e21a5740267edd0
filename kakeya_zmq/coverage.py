"""What prefix can be used, given which parts are there; pure functions over hashes, no store and no peer.

A boundary is usable when every part that :func:`kakeya_zmq.blocks.needed_parts` names for it is present. Asking that for
every boundary costs blocks squared, so :func:`best_boundary` walks the chain once. Going from block to block it keeps

* whether FULL parts have been contiguous so far (the first hole ends the walk: no later boundary can do without it),
* whether all blocks that overlap the sink had their WINDOW part (the first hole ends the walk too),
* where the current run of WINDOW parts began, and the first block that the window ending here overlaps,
* whether a STATE part ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kakeya_zmq.blocks import Block, Chain, needed_parts
from wire.messages import PartKind, PartRef, Requirement

Presence: TypeAlias = Callable[[PartRef], bool]
"""Whether one part is available in a source."""


def best_boundary(chain: Chain, requirement: Requirement, has: Presence) -> int:
    """The largest usable token position that is the end of a block (tails included), or 0.

    Asks ``has`` at most once for each block and kind.
    """
    windowed = requirement.window_tokens > 0
    full, state = requirement.full, requirement.state
    best = 0
    run_start = 0  # index of the first block of the current unbroken run of WINDOW parts
    first_needed = 0  # index of the first block that overlaps the window ending at the current block
    # References are made in place and the kinds named beforehand: this is most of the time a lookup in a store takes.
    full_kind, state_kind = PartKind.FULL, PartKind.STATE
    for index, block in enumerate(chain.blocks):
        if full and not has(PartRef(block_hash=block.block_hash, kind=full_kind)):
            break
        if windowed:
            if not has(_ref(block, PartKind.WINDOW)):
                if block.start < requirement.sink_tokens:
                    break
                run_start = index + 1
            while chain.blocks[first_needed].end <= block.end - requirement.window_tokens:
                first_needed += 1
            if run_start > first_needed:
                continue
        if state and not has(PartRef(block_hash=block.block_hash, kind=state_kind)):
            continue
        best = block.start + block.token_count
    return best


def missing_parts(chain: Chain, position: int, requirement: Requirement, has: Presence) -> tuple[PartRef, ...]:
    """The parts a hit at ``position`` needs and ``has`` lacks, ordered by block, then kind.

    Raises:
        ValueError: ``position`` is not the end of a block of the chain.
    """
    return tuple(ref for ref in needed_parts(chain, position, requirement) if not has(ref))


def in_any(sources: Sequence[tuple[str, Presence]]) -> Presence:
    """Presence in the union of the sources."""
    return lambda ref: any(has(ref) for _, has in sources)


def plan_sources(
    chain: Chain, requirement: Requirement, sources: Sequence[tuple[str, Presence]], position: int
) -> dict[str, tuple[PartRef, ...]]:
    """Give each part a hit at ``position`` needs to the first source, in the given order, that has it.

    Returns:
        source name to its parts in prefix order; sources without a part and parts without a source are left out.

    Raises:
        ValueError: ``position`` is not the end of a block of the chain.
    """
    plan: dict[str, list[PartRef]] = {}
    for ref in needed_parts(chain, position, requirement):
        for name, has in sources:
            if has(ref):
                plan.setdefault(name, []).append(ref)
                break
    return {name: tuple(refs) for name, refs in plan.items()}


def describe_gap(chain: Chain, requirement: Requirement, has: Presence, position: int) -> str:
    """Why the hit is not longer than ``position``: one line for users, without hashes; empty when it covers the chain.

    Args:
        position: what :func:`best_boundary` returned for the same ``has``.
    """
    for index, block in enumerate(chain.blocks):
        if block.start < position < block.end:
            return f"nothing that is stored goes on from token {position}"
        if block.end > position:
            return _describe_missing(chain, requirement, has, index, position)
    return ""


def _describe_missing(chain: Chain, requirement: Requirement, has: Presence, index: int, position: int) -> str:
    """Name what keeps the boundary after block ``index``, the next one, from being usable."""
    following = chain.blocks[index]
    missing = set(missing_parts(chain, following.end, requirement, has))
    for block in chain.blocks[: index + 1]:
        if _ref(block, PartKind.FULL) in missing:
            return f"diverged or never stored at token {block.start}"
    for number, block in enumerate(chain.blocks[: index + 1]):
        if _ref(block, PartKind.WINDOW) in missing:
            if block is following and not requirement.full:
                return f"diverged or never stored at token {block.start}"
            return f"window part evicted at block {number} (tokens {block.start}..{block.end})"
    if missing:
        return f"no state checkpoint after token {position}"
    return f"not used past token {position}"


def _ref(block: Block, kind: PartKind) -> PartRef:
    return PartRef(block_hash=block.block_hash, kind=kind)
