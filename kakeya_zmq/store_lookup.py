"""Finding a prompt's parts in a store: one pass over its hashes, without a value for each block.

A lookup of the longest prompt has 8,192 blocks and runs on the reactor's thread, so nothing here may cost more than a
microsecond a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya_zmq.blocks import ROOT_HASH
from kakeya_zmq.store_blocks import HeldBlock, HeldPart
from kakeya_zmq.store_index import BlockTree
from kakeya_zmq.store_values import TAILS_PER_LOOKUP_MAX, Finding, Survey
from wire import limits
from wire.messages import Cut, Requirement, Tail

ROWS = 3
"""Kinds of parts that can be cut by token: FULL and WINDOW, as bits."""


def survey_of(found: Sequence[HeldBlock | None]) -> Survey:
    """Presence of every kind in each block, and the mean size of what is there."""
    full = [None if block is None else block.full for block in found]
    window = [None if block is None else block.window for block in found]
    state = [None if block is None else block.state for block in found]
    return Survey(
        present=(_presence(full), _presence(window), _presence(state)),
        mean_bytes=(_mean_bytes(full), _mean_bytes(window), _mean_bytes(state)),
    )


def find_prompt(tree: BlockTree, hashes: Sequence[bytes], fingerprint: bytes, requirement: Requirement) -> Finding:
    """What is held of a prompt whose blocks have these hashes, in prefix order.

    Also what lies behind a hole: another node may hold what is missing here, and the asker puts a prefix together from all
    of them.
    """
    namespace = tree.namespaces.get(fingerprint)
    found: list[HeldBlock | None] = [None] * len(hashes)
    if namespace is not None:  # what is asked of a namespace that is not there costs the same, whatever others hold
        get = namespace.blocks.get
        found = [get(block_hash) for block_hash in hashes]
    parts: list[HeldPart] = []
    for block in found:
        if block is None:
            continue
        if block.full is not None:
            parts.append(block.full)
        if block.window is not None:
            parts.append(block.window)
        if block.state is not None:
            parts.append(block.state)
    tail_blocks, cuts = _tails(tree, hashes, fingerprint, requirement)
    for block in (*tail_blocks, *(block for block, _ in cuts)):
        parts += block.parts()
    return Finding(
        survey_of(found),
        tuple([tail_of(block) for block in tail_blocks]),
        tuple([cut for _, cut in cuts]),
        tuple(parts),
    )


def tail_of(block: HeldBlock) -> Tail:
    return Tail(
        parent_hash=block.parent_hash,
        block_hash=block.block_hash,
        token_count=block.token_count,
        kinds=block.kinds,
    )


def cuts_of(block: HeldBlock) -> tuple[Cut, ...]:
    """The tails that are a held block's beginnings; none when it holds no rows of its tokens."""
    kinds = block.kinds & ROWS
    if not kinds or block.cuts is None:
        return ()
    return tuple(
        [
            Cut(
                parent_hash=block.parent_hash,
                block_hash=tail_hash,
                token_count=token_count,
                within=block.block_hash,
                within_tokens=block.token_count,
                kinds=kinds,
            )
            for tail_hash, token_count in block.cuts
        ]
    )


def _tails(
    tree: BlockTree, hashes: Sequence[bytes], fingerprint: bytes, requirement: Requirement
) -> tuple[list[HeldBlock], list[tuple[HeldBlock, Cut]]]:
    """Tails under the asked blocks and the root, longest prefix first, longer tails first, at most as many as an answer
    has room for; and those that are beginnings of blocks which were not asked for (the asker has no use for others)."""
    tails: list[HeldBlock] = []
    cuts: list[tuple[HeldBlock, Cut]] = []
    block_tokens = requirement.block_tokens
    asked: frozenset[bytes] | None = None
    for parent in tree.parents_of_tails(fingerprint, (*reversed(hashes), ROOT_HASH), block_tokens):
        under = tree.tails(fingerprint, parent, block_tokens, limits.TAILS_PER_PARENT_MAX)
        tails += sorted(under, key=lambda block: -block.token_count)
        for block in tree.cuts(fingerprint, parent):
            asked = asked or frozenset(hashes)
            if block.block_hash not in asked:
                cuts += [(block, cut) for cut in cuts_of(block)]
        if len(tails) >= TAILS_PER_LOOKUP_MAX or len(cuts) >= TAILS_PER_LOOKUP_MAX:
            break
    return tails[:TAILS_PER_LOOKUP_MAX], cuts[:TAILS_PER_LOOKUP_MAX]


def _presence(row: Sequence[HeldPart | None]) -> tuple[bool, ...]:
    return tuple([held is not None for held in row])


def _mean_bytes(row: Sequence[HeldPart | None]) -> int:
    lengths = [len(held.payload) for held in row if held is not None]
    return sum(lengths) // len(lengths) if lengths else 0
