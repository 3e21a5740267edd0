"""Chunk headers, plans and manifests by example."""

from __future__ import annotations

import pytest

from wire import limits
from wire.chunks import (
    HEADER_BYTES,
    META_BYTES_MAX,
    PLAINTEXT_BYTES_MAX,
    ChunkHeader,
    ChunkKind,
    ChunkSpan,
    decode_manifest,
    encode_manifest,
    manifest_parts_max,
    plan_chunks,
)
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import PartKind, PartMeta

HEADER = ChunkHeader(kind=ChunkKind.DATA, final=True, transfer_id=b"T" * 16, index=7, batch=2, length_bytes=1000)
LARGEST_META = PartMeta(
    block_hash=b"\xff" * 32,
    parent_hash=b"\xff" * 32,
    kind=PartKind.STATE,
    start=2**53,
    token_count=limits.BLOCK_TOKENS_MAX,
    length_bytes=limits.PART_BYTES_MAX,
    digest=b"\xff" * 32,
    checksum=b"\xff" * 8,
)


def test_the_header_layout_is_fixed() -> None:
    expected = b"KC" + b"\x01\x02\x01" + b"T" * 16 + b"\x00\x00\x00\x07" + b"\x00\x00\x00\x02" + b"\x00\x00\x03\xe8"
    assert HEADER.pack() == expected
    assert len(expected) == HEADER_BYTES


@pytest.mark.parametrize(
    ("position", "value", "complaint"),
    [
        (0, 0x58, "not a chunk header"),
        (2, 9, "version"),
        (3, 0, "kind"),
        (3, 3, "kind"),
        (4, 2, "flags"),
        (29, 0xFF, "bytes"),
    ],
)
def test_a_wrong_header_is_refused(position: int, value: int, complaint: str) -> None:
    packed = bytearray(HEADER.pack())
    packed[position] = value
    with pytest.raises(RemoteProtocolError, match=complaint):
        ChunkHeader.unpack(bytes(packed))


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError, match=str(cut)):
        ChunkHeader.unpack((HEADER.pack() + b"\0")[:cut])


@pytest.mark.parametrize(
    ("transfer_id", "index", "length_bytes"),
    [(b"short", 0, 0), (b"T" * 16, 2**32, 0), (b"T" * 16, -1, 0), (b"T" * 16, 0, PLAINTEXT_BYTES_MAX + 1)],
)
def test_we_never_send_a_header_out_of_range(transfer_id: bytes, index: int, length_bytes: int) -> None:
    header = ChunkHeader(
        kind=ChunkKind.DATA, final=False, transfer_id=transfer_id, index=index, batch=0, length_bytes=length_bytes
    )
    with pytest.raises(LocalProtocolError):
        header.pack()


def test_small_parts_share_a_chunk_and_a_large_part_shares_with_nobody() -> None:
    assert plan_chunks([3, 4, 5, 25, 2, 8, 10], 10) == (
        (ChunkSpan(0, 0, 3), ChunkSpan(1, 0, 4)),
        (ChunkSpan(2, 0, 5),),
        (ChunkSpan(3, 0, 10),),
        (ChunkSpan(3, 10, 10),),
        (ChunkSpan(3, 20, 5),),
        (ChunkSpan(4, 0, 2), ChunkSpan(5, 0, 8)),
        (ChunkSpan(6, 0, 10),),
    )
    assert plan_chunks([], 10) == ()


@pytest.mark.parametrize(("lengths", "chunk_bytes"), [([0], 10), ([5, -1], 10), ([5], 0)])
def test_empty_parts_and_chunks_are_our_own_mistake(lengths: list[int], chunk_bytes: int) -> None:
    with pytest.raises(LocalProtocolError):
        plan_chunks(lengths, chunk_bytes)


def test_the_largest_manifest_of_any_chunk_size_fits_its_chunk() -> None:
    assert len(encode_manifest([LARGEST_META])) <= META_BYTES_MAX
    for chunk_bytes in (limits.CHUNK_BYTES_MIN, limits.CHUNK_BYTES_DEFAULT, limits.CHUNK_BYTES_MAX):
        metas = [LARGEST_META] * manifest_parts_max(chunk_bytes)
        assert len(encode_manifest(metas)) <= min(chunk_bytes, limits.MANIFEST_BYTES_MAX)


def test_too_many_parts_are_refused_on_both_sides() -> None:
    metas = [LARGEST_META] * (limits.PARTS_PER_MANIFEST_MAX + 1)
    with pytest.raises(LocalProtocolError, match="too large"):
        encode_manifest(metas)
    count = len(metas).to_bytes(2, "big")
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode_manifest(b"\xdc" + count + encode_manifest([LARGEST_META])[1:] * len(metas))
