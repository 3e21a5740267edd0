"""Helpers for tests with real sockets: a context that must end clean, parts, a mailbox, a hand-made sender."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket as os_socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import zmq

from kakeya_zmq.blocks import Part, part_checksum
from kakeya_zmq.io import sockets
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lanes import LaneEvent
from kakeya_zmq.protocol.effects import CreditEarned, LaneFinished, LaneId, LaneOpened, PartsReceived, WantedPart
from wire import limits
from wire.bulk import SEAL_BYTES, ChunkSealer
from wire.chunks import ChunkHeader, ChunkKind, encode_manifest
from wire.messages import CipherSuite, PartKind, PartMeta, TransferGrant

HOST = "127.0.0.1"
DEADLINE_S = 20.0
CHUNK_BYTES = limits.CHUNK_BYTES_MIN
Context = zmq.Context[zmq.Socket[bytes]]
_Event = TypeVar("_Event", LaneOpened, LaneFinished, PartsReceived, CreditEarned)


@contextlib.contextmanager
def clean_context() -> Iterator[Context]:
    """A context that must terminate promptly: a socket or thread left behind by the test fails it."""
    before = set(threading.enumerate())
    context: Context = zmq.Context()
    try:
        yield context
    finally:
        terminator = threading.Thread(target=context.term, daemon=True)
        terminator.start()
        terminator.join(5)
        left = [t.name for t in threading.enumerate() if t not in before and not t.daemon]
    assert not terminator.is_alive(), "a socket was left open"
    assert not left, f"threads were left running: {left}"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)


def is_cut(stranger: os_socket.socket) -> bool:
    """The node has nothing to say to it but its greeting."""
    stranger.setblocking(False)
    try:
        while stranger.recv(1024):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def make_part(number: int, length_bytes: int) -> Part:
    seed = hashlib.sha256(b"%d" % number).digest()
    payload = (seed * (length_bytes // 32 + 1))[:length_bytes]
    meta = PartMeta(
        block_hash=seed,
        parent_hash=bytes(32),
        kind=PartKind.FULL,
        start=64 * number,
        token_count=64,
        length_bytes=length_bytes,
        digest=hashlib.sha256(payload).digest(),
        checksum=part_checksum(payload),
    )
    return Part(meta=meta, payload=memoryview(payload))


def expected(parts: Sequence[Part]) -> list[WantedPart]:
    return [WantedPart.like(part.meta) for part in parts]


class Mailbox:
    """What a lane posts, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[LaneEvent] = queue.SimpleQueue()
        self.seen: list[LaneEvent] = []
        self._lock = threading.Lock()
        self.listeners: list[Callable[[LaneEvent], None]] = []

    def post(self, event: LaneEvent) -> None:
        with self._lock:
            self.seen.append(event)
        for listener in self.listeners:
            listener(event)
        self._queue.put(event)

    def wait_for(self, kind: type[_Event]) -> _Event:
        """The next event of this kind; others before it stay in ``seen``."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event

    @property
    def parts(self) -> list[Part]:
        return [part for event in list(self.seen) if isinstance(event, PartsReceived) for part in event.parts]

    @property
    def credit_bytes(self) -> int:
        return sum(event.credit_bytes for event in list(self.seen) if isinstance(event, CreditEarned))

    def assert_ended_once(self, lane: LaneId) -> None:
        assert [type(event) for event in self.seen].count(LaneFinished) == 1
        assert isinstance(self.seen[-1], LaneFinished)
        assert {event.lane for event in self.seen} == {lane}


def same_parts(received: Sequence[Part], sent: Sequence[Part]) -> bool:
    return [part.meta for part in received] == [part.meta for part in sent] and all(
        bytes(left.payload) == bytes(right.payload) for left, right in zip(received, sent, strict=True)
    )


class HandMadeSender:
    """A PUSH that knows the protocol and breaks it where the test wants."""

    def __init__(self, context: Context, gate: Gate, suite: CipherSuite = CipherSuite.AES_256_GCM) -> None:
        self.socket = sockets.create_socket(context, zmq.PUSH, sockets.LANE_PUSH)
        self.socket.setsockopt(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        token = "0" * 64
        gate.admit_once("lane/hand-made", token)
        sockets.apply_plain_server(self.socket, "lane/hand-made")
        port = sockets.bind(self.socket, sockets.Address(HOST, 0)).port
        self.grant = TransferGrant(
            transfer_id=b"t" * 16, port=port, token=token, key=b"k" * 32, suite=suite, chunk_bytes=CHUNK_BYTES
        )
        self._sealer = ChunkSealer(suite, self.grant.key)

    def header(self, kind: ChunkKind, index: int, length_bytes: int, *, batch: int = 0, final: bool = False) -> ChunkHeader:
        return ChunkHeader(
            kind=kind, final=final, transfer_id=self.grant.transfer_id, index=index, batch=batch, length_bytes=length_bytes
        )

    def seal(self, header: ChunkHeader, plaintext: bytes) -> list[bytes]:
        packed = header.pack()
        out = bytearray(len(plaintext) + SEAL_BYTES)
        self._sealer.seal_into(packed, header.index, [memoryview(plaintext)], memoryview(out))
        return [packed, bytes(out)]

    def manifest(self, index: int, parts: Sequence[Part], *, batch: int = 0, final: bool = False) -> list[bytes]:
        plaintext = encode_manifest([part.meta for part in parts])
        return self.seal(self.header(ChunkKind.MANIFEST, index, len(plaintext), batch=batch, final=final), plaintext)

    def data(self, index: int, plaintext: bytes, *, batch: int = 0, final: bool = False) -> list[bytes]:
        return self.seal(self.header(ChunkKind.DATA, index, len(plaintext), batch=batch, final=final), plaintext)

    def send(self, *messages: list[bytes]) -> None:
        for message in messages:
            self.socket.send_multipart(message)

    def close(self) -> None:
        self.socket.close(linger=0)
