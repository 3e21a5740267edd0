"""The receiving lane: opens chunks straight into the buffers of the parts, and hands parts over once they are whole.

Rules:

1. Everything is checked before anything is allocated for it: header, order, manifest, wanted parts, budget, plan.
2. A part is shown only when every byte of it is verified. What a broken transfer delivered before stays valid.
3. Each part has a buffer of its own, so that evicting it frees its memory.
4. Whole parts are told when they are enough to be worth a turn of the reactor, when nothing more comes for a moment, and one
   by one at the end.
5. Credit is earned by bytes that were processed, in steps of about half of the initial credit, or of seconds on a slow link:
   to the sender it is the sign that something arrives. What counts are the bytes of parts and manifests, whatever a link
   encoding made of them on the way.
6. The first violation ends the transfer: over one TCP connection nothing honest arrives twice, torn or out of order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import zmq

from kakeya_zmq.blocks import Part
from kakeya_zmq.io import sockets
from kakeya_zmq.io.addresses import PortRange
from kakeya_zmq.io.assembler import Assembler, PartFilter
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lane_threads import LaneThreads
from kakeya_zmq.io.lanes import CONNECTION_LOST, BoundSide, ConnectingSide, Lane, Post, ZmqContext
from kakeya_zmq.io.memory import Allocate, allocate
from kakeya_zmq.protocol.effects import NO_CONNECTION, NO_DATA, CreditEarned, LaneId, LaneOpened, PartsReceived, WantedPart
from wire import limits
from wire.chunks import ChunkHeader, ChunkKind
from wire.errors import RemoteProtocolError
from wire.messages import CipherSuite, LinkCodec, PartMeta, TransferGrant

_CREDIT_STEPS: Final = 2
TOLD_BYTES: Final = 4 * limits.MIB
"""Whole parts are told at the latest when there are so many bytes of them: each telling costs the reactor a turn."""
TOLD_AT_ONCE_PARTS: Final = 4
"""When so few parts are missing, each is told as it comes: what is told last is what is waited for."""
TOLD_WITHIN_MS: Final = 3
"""Whole parts are told at the latest when nothing came for so long. A chunk takes a fast network less."""
CREDIT_SECONDS: Final = 2.0
"""Credit is told at the first chunk after so long."""
CONNECT_SECONDS: Final = 3.0
"""Longer than this nobody waits for a connection to a bulk port; a closed one is dropped silently by most firewalls."""


class ReceiverLane(Lane):
    """Receives parts; see the module's rules. Made by :meth:`connect` (fetch) or :meth:`bind` (accept a publish)."""

    def __init__(
        self,
        context: ZmqContext,
        lane: LaneId,
        post: Post,
        idle_timeout_s: float,
        side: BoundSide | ConnectingSide,
        filter_: PartFilter,
        credit_bytes: int,
        verify_digests: bool,
        allocate_part: Allocate,
        threads: LaneThreads | None,
    ) -> None:
        super().__init__(context, lane, post, idle_timeout_s, threads)
        self._side = side
        self._filter = filter_
        self._initial_credit_bytes = credit_bytes
        self._verify_digests = verify_digests
        self._allocate_part = allocate_part
        self._assembler: Assembler
        self._whole: list[Part] = []
        """Verified, and not told yet."""
        self._whole_bytes = 0

    @classmethod
    def connect(
        cls,
        context: ZmqContext,
        *,
        lane: LaneId,
        host: str,
        grant: TransferGrant,
        expected: Sequence[WantedPart],
        budget_bytes: int,
        idle_timeout_s: float,
        post: Post,
        verify_digests: bool,
        credit_bytes: int = limits.CREDIT_BYTES_DEFAULT,
        allocate_part: Allocate = allocate,
        threads: LaneThreads | None = None,
    ) -> ReceiverLane:
        """Pull a granted transfer.

        Args:
            host: where the granting server was reached.
            expected: the parts that may come; anything else is a violation.
            budget_bytes: most bytes of parts that may be allocated.
            idle_timeout_s: longest time without a chunk.
            verify_digests: check each part's SHA-256 too. The seal proves that the sender sent these bytes; the checksum,
                which is always checked, proves that they were not damaged where they lay.
            credit_bytes: what the sender was granted at the start.
            allocate_part: gives the buffers of parts, for example a :class:`kakeya_zmq.io.memory.BufferPool`'s.
            threads: lends the lane its thread; None: one that is started for it.

        Raises:
            LocalProtocolError: the grant's chunk size is out of range.
        """
        filter_ = PartFilter({(part.ref.block_hash, part.ref.kind): part for part in expected}, budget_bytes)
        side = ConnectingSide(host, grant)
        options = (credit_bytes, verify_digests, allocate_part, threads)
        receiver = cls(context, lane, post, idle_timeout_s, side, filter_, *options)
        receiver.start()
        return receiver

    @classmethod
    def bind(
        cls,
        context: ZmqContext,
        gate: Gate,
        *,
        lane: LaneId,
        host: str,
        port_range: PortRange | None = None,
        suite: CipherSuite,
        chunk_bytes: int,
        expected: Sequence[PartMeta],
        post: Post,
        idle_timeout_s: float,
        credit_bytes: int = limits.CREDIT_BYTES_DEFAULT,
        link_codec: LinkCodec = LinkCodec.NONE,
        allocate_part: Allocate = allocate,
        threads: LaneThreads | None = None,
    ) -> ReceiverLane:
        """Accept one publish of exactly these parts: bind a one-shot PULL and post LaneOpened. Digests are verified.

        Raises:
            LocalProtocolError: the chunk size is out of range.
        """
        budget_bytes = sum(meta.length_bytes for meta in expected)
        filter_ = PartFilter({(meta.block_hash, meta.kind): meta for meta in expected}, budget_bytes)
        side = BoundSide(gate, host, port_range, suite, chunk_bytes, link_codec)
        options = (credit_bytes, True, allocate_part, threads)
        receiver = cls(context, lane, post, idle_timeout_s, side, filter_, *options)
        receiver.start()
        return receiver

    # --- the lane's thread ---

    def _open(self) -> None:
        grant = self._open_socket(zmq.PULL, sockets.LANE_PULL, self._side)
        self._assembler = Assembler(
            grant, self._filter, verify_digests=self._verify_digests, allocate_part=self._allocate_part
        )
        # A sender that waits for credit must be able to send its largest chunk with what we have not told it yet.
        spare_bytes = max(0, self._initial_credit_bytes - grant.chunk_bytes)
        self._credit_step_bytes = min(self._initial_credit_bytes // _CREDIT_STEPS, spare_bytes)
        if isinstance(self._side, BoundSide):
            self._post(LaneOpened(self._lane, grant))

    def _release(self) -> None:
        self._side.release()

    @property
    def _connecting(self) -> bool:
        return isinstance(self._side, ConnectingSide) and not self._watch.began

    def _patience_s(self) -> float:
        # The other side bound its port before it named it, so that connecting takes no longer than the network does.
        return min(self._idle_timeout_s, CONNECT_SECONDS) if self._connecting else self._idle_timeout_s

    def _transfer(self) -> tuple[bool, str]:
        try:
            return self._receive()
        finally:
            self._tell()

    def _receive(self) -> tuple[bool, str]:
        processed_bytes, credited_at = 0, time.monotonic()
        while True:
            self._watch.read()
            request = self._requested_close()
            if request is not None:
                ok, reason = request
                return ok and self._filter.missing == 0, reason
            try:
                packed = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                if self._whole and not self._watch.lost and self._socket.poll(TOLD_WITHIN_MS):
                    continue
                self._tell()
                # What had arrived before the connection ended has been read by now.
                if self._watch.lost:
                    return False, CONNECTION_LOST
                if not self._wait(zmq.POLLIN, timed=True):
                    return False, NO_CONNECTION if self._connecting else NO_DATA
                continue
            header, content_bytes, parts = self._receive_chunk(packed)
            self._made_progress()
            if header.kind is ChunkKind.DATA:
                self._transferred_bytes += content_bytes
            self._whole += parts
            self._whole_bytes += sum(part.meta.length_bytes for part in parts)
            if self._whole_bytes >= TOLD_BYTES or self._filter.missing <= TOLD_AT_ONCE_PARTS:
                self._tell()
            if header.final:
                missing = self._filter.missing
                return missing == 0, f"the sender ended with {missing} parts missing" if missing else ""
            processed_bytes += content_bytes
            if processed_bytes > self._credit_step_bytes or self._progress_at - credited_at > CREDIT_SECONDS:
                self._tell()
                self._post(CreditEarned(self._lane, processed_bytes))
                processed_bytes, credited_at = 0, self._progress_at

    def _tell(self) -> None:
        """Hand over the parts that are whole: several together, as long as more is there to be received."""
        if self._whole:
            parts, self._whole, self._whole_bytes = tuple(self._whole), [], 0
            self._post(PartsReceived(self._lane, parts))

    def _receive_chunk(self, packed: bytes) -> tuple[ChunkHeader, int, tuple[Part, ...]]:
        """The rest of a message whose first frame is ``packed``. A message is there as a whole or not at all."""
        header = ChunkHeader.unpack(packed)
        if not self._socket.getsockopt(zmq.RCVMORE):
            raise RemoteProtocolError("a chunk has no body")
        # The frame is opened where libzmq put it, and is gone when this method returns.
        frame = self._socket.recv(zmq.DONTWAIT, copy=False)
        if frame.more:
            raise RemoteProtocolError("a chunk has more than one body")
        return header, *self._assembler.on_chunk(packed, header, frame.buffer)
