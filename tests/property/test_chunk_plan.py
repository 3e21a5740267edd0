"""The chunk plan covers every byte once, in order, within the chunk size; headers and manifests survive the trip."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import limits
from wire.chunks import (
    HEADER_BYTES,
    ChunkHeader,
    ChunkKind,
    decode_manifest,
    encode_manifest,
    iterate_chunks,
    plan_bytes,
    plan_chunks,
)
from wire.errors import RemoteProtocolError
from wire.messages import PartKind, PartMeta

LENGTHS = st.lists(st.integers(1, 300), max_size=40)
METAS = st.builds(
    PartMeta,
    block_hash=st.binary(min_size=32, max_size=32),
    parent_hash=st.binary(min_size=32, max_size=32),
    kind=st.sampled_from(PartKind),
    start=st.integers(0, 2**53),
    token_count=st.integers(1, limits.BLOCK_TOKENS_MAX),
    length_bytes=st.integers(1, limits.PART_BYTES_MAX),
    digest=st.binary(min_size=32, max_size=32),
    checksum=st.binary(min_size=8, max_size=8),
)


@given(lengths=LENGTHS, chunk_bytes=st.integers(1, 128))
def test_every_byte_once_in_order_within_the_chunk_size(lengths: list[int], chunk_bytes: int) -> None:
    plans = plan_chunks(lengths, chunk_bytes)
    assert tuple(iterate_chunks(lengths, chunk_bytes)) == plans
    covered = [(span.part, span.offset + at) for plan in plans for span in plan for at in range(span.length_bytes)]
    assert covered == [(part, at) for part, length in enumerate(lengths) for at in range(length)]
    assert all(1 <= plan_bytes(plan) <= chunk_bytes for plan in plans)


@given(lengths=LENGTHS, chunk_bytes=st.integers(1, 128))
def test_a_chunk_is_several_whole_parts_or_one_piece(lengths: list[int], chunk_bytes: int) -> None:
    for plan in plan_chunks(lengths, chunk_bytes):
        whole = all(span.offset == 0 and span.length_bytes == lengths[span.part] for span in plan)
        assert whole or len(plan) == 1


@given(lengths=LENGTHS, chunk_bytes=st.integers(1, 128))
def test_small_parts_are_packed_greedily(lengths: list[int], chunk_bytes: int) -> None:
    plans = plan_chunks(lengths, chunk_bytes)
    for plan, following in itertools.pairwise(plans):
        both_whole = max(lengths[plan[-1].part], lengths[following[0].part]) <= chunk_bytes
        if both_whole:
            assert plan_bytes(plan) + following[0].length_bytes > chunk_bytes


@given(
    kind=st.sampled_from(ChunkKind),
    final=st.booleans(),
    transfer_id=st.binary(min_size=16, max_size=16),
    index=st.integers(0, 2**32 - 1),
    batch=st.integers(0, 2**32 - 1),
    length_bytes=st.integers(0, limits.CHUNK_BYTES_MAX),
)
def test_headers_round_trip(
    kind: ChunkKind, final: bool, transfer_id: bytes, index: int, batch: int, length_bytes: int
) -> None:
    header = ChunkHeader(
        kind=kind, final=final, transfer_id=transfer_id, index=index, batch=batch, length_bytes=length_bytes
    )
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert ChunkHeader.unpack(packed) == header


@given(data=st.one_of(st.binary(max_size=64), st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)))
def test_any_bytes_are_a_header_or_a_remote_error(data: bytes) -> None:
    try:
        header = ChunkHeader.unpack(data)
    except RemoteProtocolError:
        return
    assert header.pack() == data


@given(metas=st.lists(METAS, max_size=5))
def test_manifests_round_trip(metas: list[PartMeta]) -> None:
    assert decode_manifest(encode_manifest(metas)) == tuple(metas)


@given(
    data=st.one_of(st.binary(max_size=200), st.lists(METAS, min_size=1, max_size=2).map(msgspec.msgpack.encode)),
    cut=st.integers(0, 50),
)
def test_any_bytes_are_a_manifest_or_a_remote_error(data: bytes, cut: int) -> None:
    try:
        metas = decode_manifest(data[: max(0, len(data) - cut)])
    except RemoteProtocolError:
        return
    assert all(1 <= meta.length_bytes <= limits.PART_BYTES_MAX for meta in metas)


def test_a_manifest_beyond_the_limits_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="too large"):
        decode_manifest(bytes(limits.MANIFEST_BYTES_MAX + 1))
