"""From the chunks of a transfer to whole, verified parts: what may come, and where its bytes go. Owns no socket.

Rules 1 to 3 and 6 of :mod:`kakeya_zmq.io.receiver` are kept here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kakeya_zmq.blocks import Part, is_intact
from kakeya_zmq.codecs.link import FrameDecoder
from kakeya_zmq.io.memory import Allocate, allocate
from kakeya_zmq.protocol.effects import WantedPart
from wire import limits
from wire.bulk import SEAL_BYTES, ChunkSealer
from wire.chunks import ChunkHeader, ChunkKind, ChunkPlan, ChunkSpan, decode_manifest, iterate_chunks, plan_bytes
from wire.errors import DataLossError, RemoteProtocolError
from wire.messages import LinkCodec, PartMeta, TransferGrant


class PartFilter:
    """Which parts may still come, what they must be, and how many bytes they may take.

    Args:
        wanted: (block hash, kind) to the exact description, or to what is known of it.
        budget_bytes: most bytes all of them may take.
    """

    def __init__(self, wanted: dict[tuple[bytes, int], PartMeta | WantedPart], budget_bytes: int) -> None:
        self._wanted = wanted
        self._budget_bytes = budget_bytes
        self._required = {key for key, part in wanted.items() if isinstance(part, PartMeta) or not part.optional}
        self.missing = len(self._required)
        """Parts that have not come whole and without which the transfer is not."""

    def announce(self, meta: PartMeta) -> None:
        """Accept a part's description before its bytes.

        Raises:
            RemoteProtocolError: not wanted, announced before, not as agreed, or over the budget.
        """
        key = (meta.block_hash, meta.kind)
        if key not in self._wanted:
            raise RemoteProtocolError("a part came that was not asked for, or came twice")
        agreed = self._wanted.pop(key)
        if isinstance(agreed, PartMeta) and agreed != meta:
            raise RemoteProtocolError("a part is not described as it was offered")
        if isinstance(agreed, WantedPart) and not agreed.admits(meta):
            raise RemoteProtocolError(f"a part of {meta.length_bytes} bytes is not of the place or size its tokens have")
        if meta.length_bytes > self._budget_bytes:
            raise RemoteProtocolError(f"a part of {meta.length_bytes} bytes exceeds the {self._budget_bytes} bytes left")
        self._budget_bytes -= meta.length_bytes

    def arrived(self, meta: PartMeta) -> None:
        """An announced part is there as a whole."""
        self.missing -= (meta.block_hash, meta.kind) in self._required


class Assembler:
    """Turns the chunks of one transfer into parts; owns no socket.

    Args:
        grant: the transfer's id, key, suite, chunk size and link codec.
        filter_: what may come; it is told of each whole part.
        verify_digests: whether each part's SHA-256 is checked.
    """

    def __init__(
        self, grant: TransferGrant, filter_: PartFilter, *, verify_digests: bool, allocate_part: Allocate = allocate
    ) -> None:
        self._allocate_part = allocate_part
        self._grant = grant
        self._filter = filter_
        self._verify_digests = verify_digests
        self._sealer = ChunkSealer(grant.suite, grant.key)
        self._decoder = None if grant.link_codec is LinkCodec.NONE else FrameDecoder()
        self._frame_bytes = 0 if self._decoder is None else limits.LINK_FRAME_BYTES
        self._next_index = 0
        self._batch = -1
        self._metas: tuple[PartMeta, ...] = ()
        self._plans: Iterator[ChunkPlan] = iter(())
        self._plan: ChunkPlan | None = None
        self._scratch: memoryview | None = None
        self._partial: memoryview | None = None

    def on_chunk(self, packed: bytes, header: ChunkHeader, sealed: memoryview) -> tuple[int, tuple[Part, ...]]:
        """Take the next chunk: its bytes before any link encoding, and the parts it completed, verified, in order.

        Raises:
            RemoteProtocolError: the sender broke a rule (AuthenticationError: the seal does not hold).
            DataLossError: a part is not what its digest says, or a frame is broken.
        """
        if header.transfer_id != self._grant.transfer_id:
            raise RemoteProtocolError("a chunk of another transfer came")
        if header.index != self._next_index:
            raise RemoteProtocolError(f"chunk {header.index} came instead of {self._next_index}")
        bytes_max = self._grant.chunk_bytes + (self._frame_bytes if header.kind is ChunkKind.DATA else 0)
        if header.length_bytes > bytes_max:
            raise RemoteProtocolError(f"a chunk of {header.length_bytes} bytes; {bytes_max} were agreed")
        if sealed.nbytes != header.length_bytes + SEAL_BYTES:
            raise RemoteProtocolError(f"a chunk of {header.length_bytes} bytes is sealed in {sealed.nbytes}")
        if header.kind is ChunkKind.MANIFEST:
            self._on_manifest(packed, header, sealed)
            opened: tuple[int, tuple[Part, ...]] = header.length_bytes, ()
        else:
            opened = self._on_data(packed, header, sealed)
        self._next_index += 1
        return opened

    def _on_manifest(self, packed: bytes, header: ChunkHeader, sealed: memoryview) -> None:
        if self._plan is not None:
            raise RemoteProtocolError("a manifest came before the parts of the one before it")
        if header.batch != self._batch + 1:
            raise RemoteProtocolError(f"batch {header.batch} came instead of {self._batch + 1}")
        if header.length_bytes > limits.MANIFEST_BYTES_MAX:
            raise RemoteProtocolError(f"a manifest of {header.length_bytes} bytes is too large")
        metas = decode_manifest(self._open_scratch(packed, header, sealed))
        if header.final == bool(metas):
            raise RemoteProtocolError("an empty manifest must be final, and only an empty one may be")
        for meta in metas:
            self._filter.announce(meta)
        self._batch = header.batch
        self._metas = metas
        self._plans = iterate_chunks([meta.length_bytes for meta in metas], self._grant.chunk_bytes)
        self._plan = next(self._plans, None)

    def _on_data(self, packed: bytes, header: ChunkHeader, sealed: memoryview) -> tuple[int, tuple[Part, ...]]:
        plan = self._plan
        if plan is None or header.batch != self._batch:
            raise RemoteProtocolError("a data chunk came that no manifest announced")
        content_bytes = plan_bytes(plan)
        # A frame may be any shorter: what is in it is checked when it is decoded.
        fits = header.length_bytes == content_bytes or (
            self._decoder is not None and header.length_bytes <= content_bytes + self._frame_bytes
        )
        if not fits:
            raise RemoteProtocolError(f"a chunk of {header.length_bytes} bytes; the manifest says {content_bytes}")
        following = next(self._plans, None)
        if header.final and following is not None:
            raise RemoteProtocolError("the transfer ended before the parts of its last manifest")
        if self._decoder is not None:
            parts = self._open_frame(self._decoder, packed, header, sealed, plan)
        elif len(plan) == 1:
            parts = self._open_piece(packed, header, sealed, plan[0])
        else:
            parts = self._open_several(packed, header, sealed, plan)
        self._plan = following
        return content_bytes, parts

    def _open_piece(self, packed: bytes, header: ChunkHeader, sealed: memoryview, span: ChunkSpan) -> tuple[Part, ...]:
        """A chunk that is one part, or one piece of one, goes straight into that part's buffer."""
        buffer = self._buffer(span)
        self._sealer.open_into(packed, header.index, sealed, _within(buffer, span))
        return self._filled(span, buffer)

    def _open_several(self, packed: bytes, header: ChunkHeader, sealed: memoryview, plan: ChunkPlan) -> tuple[Part, ...]:
        """Several whole parts are opened straight into a buffer each; none is shown before the seal has held."""
        buffers = [self._allocate_part(span.length_bytes) for span in plan]
        self._sealer.open_into_several(packed, header.index, sealed, buffers)
        return tuple(self._whole(self._metas[span.part], buffer) for span, buffer in zip(plan, buffers, strict=True))

    def _open_frame(
        self, decoder: FrameDecoder, packed: bytes, header: ChunkHeader, sealed: memoryview, plan: ChunkPlan
    ) -> tuple[Part, ...]:
        """A frame is opened as it came, then decoded into the parts' buffers. Those were announced and fit the budget."""
        frame = self._open_scratch(packed, header, sealed)
        buffers = [self._buffer(span) for span in plan]
        decoder.decode(frame, [_within(buffer, span) for span, buffer in zip(plan, buffers, strict=True)])
        return tuple(part for span, buffer in zip(plan, buffers, strict=True) for part in self._filled(span, buffer))

    def _buffer(self, span: ChunkSpan) -> memoryview:
        """The buffer of the part that ``span`` belongs to."""
        return self._allocate_part(self._metas[span.part].length_bytes) if self._partial is None else self._partial

    def _filled(self, span: ChunkSpan, buffer: memoryview) -> tuple[Part, ...]:
        """The part, if ``span`` was its last piece."""
        meta = self._metas[span.part]
        if span.offset + span.length_bytes < meta.length_bytes:
            self._partial = buffer
            return ()
        self._partial = None
        return (self._whole(meta, buffer),)

    def _open_scratch(self, packed: bytes, header: ChunkHeader, sealed: memoryview) -> memoryview:
        if self._scratch is None:
            self._scratch = allocate(self._grant.chunk_bytes + self._frame_bytes)
        count = self._sealer.open_into(packed, header.index, sealed, self._scratch)
        return self._scratch[:count]

    def _whole(self, meta: PartMeta, buffer: memoryview) -> Part:
        # hashlib lets go of the GIL for buffers of this size.
        if self._verify_digests and hashlib.sha256(buffer).digest() != meta.digest:
            raise DataLossError("a part is not what its digest says")
        part = Part(meta=meta, payload=buffer.toreadonly())
        if not is_intact(part):
            raise DataLossError("a part is not what its checksum says: it was damaged before it was sent")
        self._filter.arrived(meta)
        return part


def _within(buffer: memoryview, span: ChunkSpan) -> memoryview:
    return buffer[span.offset : span.offset + span.length_bytes]
