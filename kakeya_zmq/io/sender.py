"""The sending lane: seals parts into a ring of slots and pushes them within the receiver's byte credit.

Rules:

1. A chunk leaves only if its content fits the remaining credit, so bytes in flight never exceed what was granted. Credit
   counts the bytes of parts and manifests before any link encoding: both sides know them without asking.
2. A slot is written again only when libzmq has let go of it (its tracker is done): a zero-copy send reads it later.
3. After the last chunk the socket stays open until ``close``: closing a PUSH early can lose what the kernel still holds.
4. The idle timeout runs while there is something to send or the receiver's last word is missing, not while the lane
   waits to be fed.
5. Credit for bytes that were never sent ends the transfer: whoever gives it has not received anything.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from kakeya_zmq.blocks import Part
from kakeya_zmq.codecs.link import NAMES, FrameEncoder
from kakeya_zmq.io import sockets
from kakeya_zmq.io.addresses import PortRange
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lane_threads import LaneThreads
from kakeya_zmq.io.lanes import CONNECTION_LOST, BoundSide, ConnectingSide, Lane, Post, ZmqContext
from kakeya_zmq.io.memory import allocate
from kakeya_zmq.protocol.effects import LaneId, LaneOpened
from wire import limits
from wire.bulk import SEAL_BYTES, ChunkSealer
from wire.chunks import ChunkHeader, ChunkKind, encode_manifest, iterate_chunks, manifest_parts_max
from wire.errors import LocalProtocolError
from wire.messages import CipherSuite, LinkCodec, TransferGrant, ValueBytes

RING_SLOTS: Final = 4
"""One is sealed while the others leave. Six cost the same processor time here; four of the default size (8 MiB) stay in
the cache of more processors."""


@dataclass(frozen=True, slots=True)
class _Batch:
    parts: tuple[Part, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk before sealing. ``content_bytes``: before link encoding; this is what credit counts."""

    header: ChunkHeader
    buffers: tuple[memoryview, ...]
    content_bytes: int


class _Slot:
    """A buffer that libzmq may still be reading."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = allocate(size_bytes)
        self.taken = False
        """Whether it holds a chunk that has not left yet."""
        self.tracker: zmq.MessageTracker | None = None
        self.watch: weakref.ref[memoryview] | None = None

    @property
    def free(self) -> bool:
        return not self.taken and (self.tracker is None or self.tracker.done)


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A chunk that is ready to leave."""

    chunk: _Chunk
    packed: bytes
    """Its header."""
    slot: _Slot
    view: memoryview
    """The part of the slot that is its body."""


class SenderLane(Lane):
    """Sends parts; see the module's rules. Made by :meth:`bind` (serve a fetch) or :meth:`connect` (publish)."""

    def __init__(
        self,
        context: ZmqContext,
        lane: LaneId,
        post: Post,
        idle_timeout_s: float,
        credit_bytes: int,
        side: BoundSide | ConnectingSide,
        value_bytes: ValueBytes,
        threads: LaneThreads | None,
    ) -> None:
        super().__init__(context, lane, post, idle_timeout_s, threads)
        self._side = side
        self._value_bytes = value_bytes
        self._fed: deque[_Batch] = deque()
        self._final_fed = False
        self._earned_bytes = 0
        # Below: the lane's thread only.
        self._credit_bytes = credit_bytes
        self._unconfirmed_bytes = 0
        """Sent, and not given back as credit."""
        self._grant: TransferGrant
        self._sealer: ChunkSealer
        self._source: _ChunkSource
        self._next: _Chunk | None = None
        self._sealed: deque[_Sealed] = deque()
        """Chunks that are ready to leave: as many as slots allow, also before anybody has connected."""
        self._slots: list[_Slot] = []
        self._final_sent = False

    @classmethod
    def bind(
        cls,
        context: ZmqContext,
        gate: Gate,
        *,
        lane: LaneId,
        host: str,
        port_range: PortRange | None,
        suite: CipherSuite,
        chunk_bytes: int,
        credit_bytes: int,
        post: Post,
        idle_timeout_s: float,
        link_codec: LinkCodec = LinkCodec.NONE,
        value_bytes: ValueBytes = 1,
        threads: LaneThreads | None = None,
    ) -> SenderLane:
        """Serve one transfer: bind a one-shot PUSH and post LaneOpened. It can be fed at once.

        Args:
            host: address of this machine to listen on.
            port_range: None for an ephemeral port.
            chunk_bytes: largest content of a chunk.
            credit_bytes: bytes of content that may be sent before the first :meth:`add_credit`.
            idle_timeout_s: see the module's rule 4.
            link_codec: how data chunks are packed.
            value_bytes: width of a value in the parts, for the codec.
            threads: lends the lane its thread; None: one that is started for it.

        Raises:
            LocalProtocolError: chunk size out of range, or larger than the credit (nothing could ever be sent).
        """
        _check_credit(credit_bytes, chunk_bytes)
        side = BoundSide(gate, host, port_range, suite, chunk_bytes, link_codec)
        sender = cls(context, lane, post, idle_timeout_s, credit_bytes, side, value_bytes, threads)
        sender.start()
        return sender

    @classmethod
    def connect(
        cls,
        context: ZmqContext,
        *,
        lane: LaneId,
        host: str,
        grant: TransferGrant,
        credit_bytes: int,
        parts: Sequence[Part],
        post: Post,
        idle_timeout_s: float,
        value_bytes: ValueBytes = 1,
        threads: LaneThreads | None = None,
    ) -> SenderLane:
        """Push exactly ``parts`` to the peer that granted it; as :meth:`bind`, but there is no LaneOpened.

        The grant names the link codec.

        Raises:
            LocalProtocolError: as :meth:`bind`.
        """
        _check_credit(credit_bytes, grant.chunk_bytes)
        side = ConnectingSide(host, grant)
        sender = cls(context, lane, post, idle_timeout_s, credit_bytes, side, value_bytes, threads)
        sender.feed(parts, final=True)
        sender.start()
        return sender

    def feed(self, parts: Sequence[Part], final: bool) -> None:
        """Queue parts; ``final``: nothing follows. Their payloads must stay unchanged until LaneFinished.

        Raises:
            LocalProtocolError: after the final feed, or a payload is not as long as its description says.
        """
        if any(part.payload.nbytes != part.meta.length_bytes for part in parts):
            raise LocalProtocolError("a part is not as long as its description says")
        with self._lock:
            if self._final_fed:
                raise LocalProtocolError("a lane was fed after its final parts")
            self._final_fed = final
            if parts or final:
                self._fed.append(_Batch(parts=tuple(parts), final=final))
        self._wake_up.notify()

    def add_credit(self, credit_bytes: int) -> None:
        """The receiver has processed this many bytes more."""
        if credit_bytes <= 0:
            raise LocalProtocolError("credit must be positive")
        with self._lock:
            self._earned_bytes += credit_bytes
        self._wake_up.notify()

    # --- the lane's thread ---

    def _open(self) -> None:
        self._grant = self._open_socket(zmq.PUSH, sockets.LANE_PUSH, self._side)
        self._sealer = ChunkSealer(self._grant.suite, self._grant.key)
        self._source = _ChunkSource(self._grant, self._value_bytes)
        if isinstance(self._side, BoundSide):
            self._post(LaneOpened(self._lane, self._grant))

    def _release(self) -> None:
        self._side.release()

    def _transfer(self) -> tuple[bool, str]:
        while True:
            self._read_mailbox()
            self._watch.read()
            request = self._requested_close()
            if self._unconfirmed_bytes < 0:
                return False, "credit came for bytes that were never sent"
            if request is not None:
                ok, reason = request
                if ok and not self._final_sent:
                    return False, "the receiver ended the transfer before everything was sent"
                return ok, reason
            sealed, sent = self._seal_next(), self._send_sealed()
            if sent:
                self._made_progress()
            if sealed or sent:
                continue
            if self._watch.lost and not self._final_sent:
                return False, CONNECTION_LOST
            busy = self._next is not None or bool(self._sealed) or self._final_sent
            if not self._wait(zmq.POLLOUT if self._sealed else 0, timed=busy):
                return False, "the receiver did not take any more data in time"

    def _read_mailbox(self) -> None:
        with self._lock:
            fed, self._fed = self._fed, deque()
            earned_bytes, self._earned_bytes = self._earned_bytes, 0
        self._credit_bytes += earned_bytes
        self._unconfirmed_bytes -= earned_bytes
        for batch in fed:
            self._source.add(batch)
        if fed or earned_bytes:
            self._made_progress()

    def _seal_next(self) -> bool:
        """Seal the next chunk if there is one, a slot is free, and the credit lets it through; True if it was."""
        self._next = self._next or self._source.next()
        chunk = self._next
        if chunk is None or chunk.content_bytes > self._credit_bytes:
            return False
        slot = self._free_slot()
        if slot is None:
            return False
        packed = chunk.header.pack()
        count = self._sealer.seal_into(packed, chunk.header.index, chunk.buffers, slot.buffer)
        slot.taken = True
        self._sealed.append(_Sealed(chunk, packed, slot, slot.buffer[:count]))
        self._credit_bytes -= chunk.content_bytes
        self._next = None
        return True

    def _send_sealed(self) -> bool:
        """Send the oldest sealed chunk; False if there is none, the queue is full, or nobody has connected yet."""
        if not self._sealed:
            return False
        try:
            self._socket.send(self._sealed[0].packed, zmq.DONTWAIT | zmq.SNDMORE)
        except zmq.Again:
            return False
        sealed = self._sealed.popleft()
        chunk, slot, view = sealed.chunk, sealed.slot, sealed.view
        # The view dies when libzmq lets go of it, which wakes us if we wait for a slot.
        slot.watch = weakref.ref(view, lambda _: self._wake_up.notify())
        # Once the first frame is taken the second always is.
        slot.tracker = self._socket.send(view, copy=False, track=True)
        slot.taken = False
        self._unconfirmed_bytes += chunk.content_bytes
        self._final_sent = chunk.header.final
        if chunk.header.kind is ChunkKind.DATA:
            self._transferred_bytes += chunk.content_bytes
        return True

    def _free_slot(self) -> _Slot | None:
        for slot in self._slots:
            if slot.free:
                return slot
        if len(self._slots) == RING_SLOTS:
            return None
        frame_bytes = 0 if self._grant.link_codec is LinkCodec.NONE else limits.LINK_FRAME_BYTES
        self._slots.append(_Slot(self._grant.chunk_bytes + frame_bytes + SEAL_BYTES))
        return self._slots[-1]


class _ChunkSource:
    """Cuts fed batches into numbered chunks, one at a time, and packs them; can go on after it ran dry."""

    def __init__(self, grant: TransferGrant, value_bytes: ValueBytes) -> None:
        self._encoder = None if grant.link_codec is LinkCodec.NONE else FrameEncoder(NAMES[grant.link_codec])
        self._value_bytes = value_bytes
        self._transfer_id = grant.transfer_id
        self._chunk_bytes = grant.chunk_bytes
        self._waiting: deque[_Batch] = deque()
        self._current: Iterator[_Chunk] = iter(())
        self._index = 0
        self._batch = 0

    def add(self, batch: _Batch) -> None:
        """Queue a batch, as several when its manifest might not fit one chunk."""
        parts_max = manifest_parts_max(self._chunk_bytes)
        for start in range(0, max(1, len(batch.parts)), parts_max):
            end = start + parts_max
            self._waiting.append(_Batch(batch.parts[start:end], final=batch.final and end >= len(batch.parts)))

    def next(self) -> _Chunk | None:
        """The next chunk in order, or None when nothing is fed."""
        chunk = next(self._current, None)
        if chunk is None and self._waiting:
            self._current = self._cut(self._waiting.popleft())
            chunk = next(self._current)  # a batch has at least its manifest
        return chunk

    def _cut(self, batch: _Batch) -> Iterator[_Chunk]:
        manifest = memoryview(encode_manifest([part.meta for part in batch.parts]))
        yield self._chunk(ChunkKind.MANIFEST, final=batch.final and not batch.parts, buffers=(manifest,))
        payloads = [part.payload.cast("B") for part in batch.parts]
        for plan in iterate_chunks([payload.nbytes for payload in payloads], self._chunk_bytes):
            last = plan[-1]
            is_last = last.part == len(payloads) - 1 and last.offset + last.length_bytes == payloads[-1].nbytes
            buffers = tuple(payloads[span.part][span.offset : span.offset + span.length_bytes] for span in plan)
            yield self._chunk(ChunkKind.DATA, final=batch.final and is_last, buffers=buffers)
        self._batch += 1

    def _chunk(self, kind: ChunkKind, *, final: bool, buffers: tuple[memoryview, ...]) -> _Chunk:
        content_bytes = length_bytes = sum(buffer.nbytes for buffer in buffers)
        if self._encoder is not None and kind is ChunkKind.DATA:
            frame = self._encoder.encode(buffers, self._value_bytes)
            buffers, length_bytes = (frame,), frame.nbytes
        header = ChunkHeader(
            kind=kind,
            final=final,
            transfer_id=self._transfer_id,
            index=self._index,
            batch=self._batch,
            length_bytes=length_bytes,
        )
        self._index += 1
        return _Chunk(header, buffers, content_bytes)


def _check_credit(credit_bytes: int, chunk_bytes: int) -> None:
    if credit_bytes < chunk_bytes:
        raise LocalProtocolError(f"a credit of {credit_bytes} bytes never lets a chunk of {chunk_bytes} bytes through")
