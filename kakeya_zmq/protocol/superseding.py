"""Tails that a longer block has overtaken: K/V of a token is stored once, so they become notes on that block.

A prompt that is answered leaves a tail where it ended, and soon afterwards the block that the answer completed. Only who
knows the tokens can tell that one is the beginning of the other: the node that computed them. Recurrent state is a
checkpoint of one position and cannot be had from a later one, so models with state keep their tails.
"""

from __future__ import annotations

from collections.abc import Iterable

from kakeya_zmq.blocks import Block
from kakeya_zmq.protocol.prepare_values import TailHash
from kakeya_zmq.store import BlockStore
from wire.messages import Cut, PartMeta


def supersede(store: BlockStore, blocks: Iterable[Block | PartMeta], *, fingerprint: bytes, hash_tail: TailHash) -> int:
    """Drop stored tails that are the beginnings of these blocks, and note that on the blocks.

    Args:
        blocks: of the own tokens, with all their kinds put; those that are not held are skipped.
        hash_tail: hashes the own tokens.

    Returns:
        How many tails were dropped.
    """
    dropped = 0
    for block in {block.block_hash: block for block in blocks}.values():
        for tail in store.tails(block.parent_hash, fingerprint=fingerprint, block_tokens=block.token_count):
            if hash_tail(block.parent_hash, block.start, tail.token_count) != tail.block_hash:
                continue
            cut = Cut(
                parent_hash=block.parent_hash,
                block_hash=tail.block_hash,
                token_count=tail.token_count,
                within=block.block_hash,
                within_tokens=block.token_count,
                kinds=tail.kinds & 3 or 1,
            )
            dropped += store.cut(cut, fingerprint=fingerprint)
    return dropped
