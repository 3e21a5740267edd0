"""How parts travel in bulk: batches of one manifest chunk and the data chunks it announces.

Rules:

1. A transfer is a sequence of batches. A batch is one MANIFEST chunk (which parts follow, in which order) and the DATA
   chunks of those parts. An empty manifest has no data chunks.
2. Chunks are numbered from 0 through the whole transfer without a gap; the receiver takes only the next number.
3. The FINAL flag is on the last chunk of the transfer and nowhere else.
4. Neither side sends offsets: both derive the same :func:`plan_chunks` from the manifest's lengths. A data chunk is either
   several whole parts, or one piece of one part.
5. A chunk is one ZeroMQ message of two frames: the packed :class:`ChunkHeader` in clear, and the sealed bytes
   (:mod:`wire.bulk`). The header is authenticated with the seal.
6. With a link codec the content of each DATA chunk is packed into one frame of kakeya_zmq.codecs.link before it is sealed.
   Plan, budget and credit count the bytes of the parts all the same; the frame is at most LINK_FRAME_BYTES longer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from wire import limits
from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.messages import PartMeta

MAGIC: Final = b"KC"
_HEADER: Final = struct.Struct("!2sBBB16sIII")
HEADER_BYTES: Final = _HEADER.size
FLAG_FINAL: Final = 1
CHUNKS_MAX: Final = 2**32
"""Indexes are 32-bit; the largest transfer in the smallest chunks needs 2^20."""
PLAINTEXT_BYTES_MAX: Final = limits.CHUNK_BYTES_MAX + limits.LINK_FRAME_BYTES
META_BYTES_MAX: Final = 144
"""Bound on one PartMeta as msgpack: three 32-byte strings of 34, four integers of at most 9, 1 for the array."""


class ChunkKind(IntEnum):
    MANIFEST = 1
    DATA = 2


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The clear, authenticated head of a chunk.

    ``index`` counts the chunks of the transfer and ``batch`` its batches, both from 0; ``length_bytes`` is the
    plaintext's as it is sealed (of the frame, where there is a link codec).
    """

    kind: ChunkKind
    final: bool
    transfer_id: bytes
    index: int
    batch: int
    length_bytes: int

    def pack(self) -> bytes:
        """33 bytes: magic, version, kind, flags, transfer id, then index, batch and length as big-endian uint32.

        Raises:
            LocalProtocolError: a field is out of range.
        """
        if len(self.transfer_id) != 16 or not 0 <= self.length_bytes <= PLAINTEXT_BYTES_MAX:
            raise LocalProtocolError(f"chunk of {self.length_bytes} bytes or its transfer id is out of range")
        if not (0 <= self.index < CHUNKS_MAX and 0 <= self.batch < CHUNKS_MAX):
            raise LocalProtocolError(f"chunk {self.index} of batch {self.batch} is out of range")
        flags = FLAG_FINAL if self.final else 0
        return _HEADER.pack(
            MAGIC, limits.PROTOCOL_VERSION, self.kind, flags, self.transfer_id, self.index, self.batch, self.length_bytes
        )

    @classmethod
    def unpack(cls, data: bytes) -> ChunkHeader:
        """The inverse of :meth:`pack`.

        Raises:
            RemoteProtocolError: these bytes are no chunk header of this version, or announce an oversize chunk.
        """
        if len(data) != HEADER_BYTES:
            raise RemoteProtocolError(f"a chunk header has {HEADER_BYTES} bytes, not {len(data)}")
        magic, version, kind, flags, transfer_id, index, batch, length_bytes = _HEADER.unpack(data)
        if magic != MAGIC:
            raise RemoteProtocolError("not a chunk header")
        if version != limits.PROTOCOL_VERSION:
            raise RemoteProtocolError(f"chunk version {version} is not known")
        if kind not in (ChunkKind.MANIFEST, ChunkKind.DATA) or flags not in (0, FLAG_FINAL):
            raise RemoteProtocolError(f"chunk kind {kind} with flags {flags} is not known")
        if length_bytes > PLAINTEXT_BYTES_MAX:
            raise RemoteProtocolError(f"chunk of {length_bytes} bytes; at most {PLAINTEXT_BYTES_MAX} are allowed")
        return cls(
            kind=ChunkKind(kind),
            final=flags == FLAG_FINAL,
            transfer_id=transfer_id,
            index=index,
            batch=batch,
            length_bytes=length_bytes,
        )


# --- the plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Bytes [offset, offset + length_bytes) of the batch's part number ``part``."""

    part: int
    offset: int
    length_bytes: int


ChunkPlan: TypeAlias = tuple[ChunkSpan, ...]
"""What one data chunk holds, in order."""


def plan_bytes(plan: ChunkPlan) -> int:
    """Plaintext length of a chunk, in bytes."""
    return sum(span.length_bytes for span in plan)


def iterate_chunks(lengths: Sequence[int], chunk_bytes: int) -> Iterator[ChunkPlan]:
    """:func:`plan_chunks`, one chunk at a time: a receiver must not build the plan of a huge claim in memory."""
    if chunk_bytes <= 0 or any(length <= 0 for length in lengths):
        raise LocalProtocolError("chunks and parts have at least one byte")
    together: list[ChunkSpan] = []
    filled = 0
    for part, length in enumerate(lengths):
        if together and filled + length > chunk_bytes:
            yield tuple(together)
            together, filled = [], 0
        if length <= chunk_bytes:
            together.append(ChunkSpan(part=part, offset=0, length_bytes=length))
            filled += length
            continue
        for offset in range(0, length, chunk_bytes):
            yield (ChunkSpan(part=part, offset=offset, length_bytes=min(chunk_bytes, length - offset)),)
    if together:
        yield tuple(together)


def plan_chunks(lengths: Sequence[int], chunk_bytes: int) -> tuple[ChunkPlan, ...]:
    """Cut the parts of one batch into chunks; both sides of a transfer get the same plan.

    Greedy: whole parts go together while they fit. A part larger than ``chunk_bytes`` starts a new chunk and is cut into
    pieces of ``chunk_bytes``; its last piece shares its chunk with nobody.

    Args:
        lengths: bytes of each part, each > 0.
        chunk_bytes: largest plaintext of a chunk.

    Raises:
        LocalProtocolError: a length is not positive.
    """
    return tuple(iterate_chunks(lengths, chunk_bytes))


# --- the manifest --------------------------------------------------------------------------------------------------

_Manifest: TypeAlias = Annotated[tuple[PartMeta, ...], msgspec.Meta(max_length=limits.PARTS_PER_MANIFEST_MAX)]


def manifest_parts_max(chunk_bytes: int) -> int:
    """How many parts one batch may announce, so that its manifest surely fits one chunk."""
    return min(limits.PARTS_PER_MANIFEST_MAX, min(limits.MANIFEST_BYTES_MAX, chunk_bytes) // META_BYTES_MAX - 1)


def encode_manifest(metas: Sequence[PartMeta]) -> bytes:
    """The plaintext of a manifest chunk.

    Raises:
        LocalProtocolError: too many parts or bytes for one manifest.
    """
    data = msgspec.msgpack.encode(tuple(metas))
    if len(metas) > limits.PARTS_PER_MANIFEST_MAX or len(data) > limits.MANIFEST_BYTES_MAX:
        raise LocalProtocolError(f"a manifest of {len(metas)} parts and {len(data)} bytes is too large")
    return data


def decode_manifest(data: bytes | memoryview) -> tuple[PartMeta, ...]:
    """The inverse of :func:`encode_manifest`.

    Raises:
        RemoteProtocolError: not a manifest, or one beyond the limits.
    """
    if len(data) > limits.MANIFEST_BYTES_MAX:
        raise RemoteProtocolError(f"a manifest of {len(data)} bytes is too large")
    try:
        metas: tuple[PartMeta, ...] = msgspec.msgpack.decode(data, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The decoder's own text may quote what it was given.
        raise RemoteProtocolError("a manifest is malformed") from error
    return metas
