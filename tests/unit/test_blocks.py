"""Binding raw parts to a chain, and which parts a position needs."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kakeya_zmq.blocks import RawPart, bind_parts, byte_view, needed_parts, raw_part
from tests.chains import make_chain
from wire.messages import PartKind, PartRef, Requirement


def test_parts_get_hash_place_and_digest_without_a_copy() -> None:
    chain = make_chain(40)
    payload = np.arange(6, dtype=np.float32)
    raw = RawPart(PartKind.WINDOW, 32, 8, memoryview(payload))
    (part,) = bind_parts(chain, [raw])
    block = chain.blocks[2]
    assert (part.meta.block_hash, part.meta.parent_hash) == (block.block_hash, block.parent_hash)
    assert (part.meta.kind, part.meta.start, part.meta.token_count) == (PartKind.WINDOW, 32, 8)
    assert part.meta.length_bytes == 24
    assert part.meta.digest == hashlib.sha256(payload.tobytes()).digest()
    assert part.payload.readonly
    payload[0] = 5.0
    assert part.payload.tobytes() == payload.tobytes(), "the buffer is shared"


def test_raw_part_is_the_way_back() -> None:
    chain = make_chain(32)
    raw = RawPart(PartKind.FULL, 16, 16, memoryview(b"abc"))
    (part,) = bind_parts(chain, [raw])
    assert raw_part(part) == raw


@pytest.mark.parametrize(("start", "count"), [(0, 8), (8, 16), (48, 16), (0, 32)])
def test_a_part_that_is_not_one_block_is_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match="not one block"):
        bind_parts(make_chain(40), [RawPart(PartKind.FULL, start, count, memoryview(b"abc"))])


def test_payloads_must_be_contiguous_and_not_empty() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        byte_view(memoryview(np.zeros((4, 4), np.float32)[:, ::2]))
    with pytest.raises(ValueError, match="not empty"):
        byte_view(b"")


def test_needed_parts_of_each_layer_group() -> None:
    chain = make_chain(40)
    a, b, c = (block.block_hash for block in chain.blocks)
    requirement = Requirement(block_tokens=16, full=True, window_tokens=9, sink_tokens=4, state=True)

    def refs(*pairs: tuple[bytes, PartKind]) -> tuple[PartRef, ...]:
        return tuple(PartRef(block_hash=block_hash, kind=kind) for block_hash, kind in pairs)

    full, window, state = PartKind.FULL, PartKind.WINDOW, PartKind.STATE
    assert needed_parts(chain, 0, requirement) == ()
    assert needed_parts(chain, 16, requirement) == refs((a, full), (a, window), (a, state))
    assert needed_parts(chain, 40, requirement) == refs(
        (a, full), (a, window), (b, full), (b, window), (c, full), (c, window), (c, state)
    )  # the window [31, 40) reaches one token into block b; block a is there for the sink
    eight = Requirement(block_tokens=16, full=False, window_tokens=8)
    assert needed_parts(chain, 40, eight) == refs((c, window))
    with pytest.raises(ValueError, match="not the end of a block"):
        needed_parts(chain, 17, requirement)
