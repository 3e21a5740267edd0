"""Blocks and parts of KV state, and what a prefix needs to be usable.

The K/V of each token is stored once, in its block, split into parts by layer group (:class:`wire.messages.PartKind`).
A prompt of N tokens is captured up to N - 1 (its last token is always run again, so no logits are stored): full blocks
of ``block_tokens``, then one shorter *tail* block when N - 1 is not a multiple of the block size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from wire.messages import PartKind, PartMeta, PartRef, Requirement

ROOT_HASH = bytes(32)
"""Parent hash of the first block."""


@dataclass(frozen=True, slots=True)
class Part:
    """One immutable part: its description and its canonical stored bytes (read-only, ``meta.length_bytes`` long)."""

    meta: PartMeta
    payload: memoryview


@dataclass(frozen=True, slots=True)
class RawPart:
    """A part as the engine makes and takes it, not yet bound to a hash.

    ``payload`` is a read-only contiguous byte view; its layout belongs to the model (see kakeya_zmq.model) and is fixed by
    the layer geometry in the fingerprint.
    """

    kind: PartKind
    start: int
    token_count: int
    payload: memoryview


class Block(msgspec.Struct, frozen=True, gc=False):
    """One link of a prompt's hash chain: tokens [start, start + token_count).

    A struct, because a prompt has many of them: they are made in a fifth of a dataclass's time, and without references the
    garbage collector never needs to look at them.
    """

    block_hash: bytes
    parent_hash: bytes
    start: int
    token_count: int
    stored_tokens: int = 0
    """Tokens of the stored block when only its beginning is meant; 0: all of it is."""

    @property
    def end(self) -> int:
        return self.start + self.token_count

    @property
    def part_tokens(self) -> int:
        """Tokens that its parts cover."""
        return self.stored_tokens or self.token_count


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks of one prompt, in order; the last one may be a tail. ``tokens`` = tokens covered."""

    block_tokens: int
    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        return self.blocks[-1].end if self.blocks else 0


def needed_parts(chain: Chain, position: int, requirement: Requirement) -> tuple[PartRef, ...]:
    """The parts a hit at ``position`` needs, ordered by block, then kind.

    Args:
        chain: the prompt's blocks.
        position: token position, the end of one of the chain's blocks, or 0.
        requirement: the model's.

    Raises:
        ValueError: ``position`` is not the end of a block of the chain.
    """
    if position == 0:
        return ()
    if not any(block.end == position for block in chain.blocks):
        raise ValueError(f"position {position} is not the end of a block")
    window_start = position - requirement.window_tokens
    refs: list[PartRef] = []
    for block in chain.blocks:
        if block.end > position:
            break
        if requirement.full:
            refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.FULL))
        in_window = block.end > window_start
        in_sink = block.start < requirement.sink_tokens
        if requirement.window_tokens > 0 and (in_window or in_sink):
            refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.WINDOW))
        if requirement.state and block.end == position:
            refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.STATE))
    return tuple(refs)


def checkpoint_parts(chain: Chain, every_tokens: int, after: int, requirement: Requirement) -> tuple[PartRef, ...]:
    """The window and state parts that hits at multiples of ``every_tokens`` need, behind ``after``, before the chain's end.

    Together with the full parts, which every later position needs anyway, each makes a hit possible before all has come.

    Args:
        every_tokens: a multiple of the block size; 0: no checkpoints.
        after: token position; parts that end at it or before are left out.
    """
    if every_tokens <= 0:
        return ()
    refs: list[PartRef] = []
    for block in chain.blocks:
        # Of all checkpoints that a block's rows are in the window of, the next one is the nearest.
        checkpoint = -(-block.end // every_tokens) * every_tokens
        if block.end <= after or checkpoint >= chain.tokens:
            continue
        if block.end > checkpoint - requirement.window_tokens:
            refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.WINDOW))
        if requirement.state and block.end == checkpoint:
            refs.append(PartRef(block_hash=block.block_hash, kind=PartKind.STATE))
    return tuple(refs)


def bind_parts(chain: Chain, raw_parts: Sequence[RawPart]) -> tuple[Part, ...]:
    """Give raw parts their hashes from ``chain`` and their SHA-256 digests; the payload buffers are shared, not copied.

    Args:
        chain: the prompt's blocks; may reach further than the parts.
        raw_parts: in any order; each covers exactly one block. Payloads are C-contiguous and not empty.

    Raises:
        ValueError: a raw part is not exactly one block of the chain, or its payload is empty or not contiguous.
    """
    by_span = {(block.start, block.token_count): block for block in chain.blocks}
    return tuple(_bind(by_span, raw) for raw in raw_parts)


def _bind(by_span: dict[tuple[int, int], Block], raw: RawPart) -> Part:
    block = by_span.get((raw.start, raw.token_count))
    if block is None:
        raise ValueError(f"tokens {raw.start}..{raw.start + raw.token_count} are not one block of the chain")
    payload = byte_view(raw.payload)
    meta = PartMeta(
        block_hash=block.block_hash,
        parent_hash=block.parent_hash,
        kind=raw.kind,
        start=block.start,
        token_count=block.token_count,
        length_bytes=payload.nbytes,
        digest=hashlib.sha256(payload).digest(),
        checksum=part_checksum(payload),
    )
    return Part(meta=meta, payload=payload)


def part_checksum(payload: bytes | memoryview) -> bytes:
    """XXH3-64 of contiguous bytes, 8 bytes big-endian. It finds damage, not malice: that is what seals are for."""
    return xxhash.xxh3_64_digest(payload)


def is_intact(part: Part) -> bool:
    """Whether the payload still is what its description says; about 60 GB/s, so that every use can afford it."""
    return part_checksum(part.payload) == part.meta.checksum


def raw_part(part: Part) -> RawPart:
    """What the engine takes: the part without its hashes; the payload is shared."""
    meta = part.meta
    return RawPart(kind=meta.kind, start=meta.start, token_count=meta.token_count, payload=part.payload)


def byte_view(buffer: bytes | memoryview) -> memoryview:
    """A read-only, one-dimensional view of unsigned bytes over ``buffer``, without a copy.

    Raises:
        ValueError: the buffer is empty or not C-contiguous.
    """
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes == 0:
        raise ValueError("a payload must be contiguous and not empty")
    if view.ndim != 1 or view.format != "B":
        view = view.cast("B")
    return view.toreadonly()
