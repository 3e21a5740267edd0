"""Lanes with a link codec: the same parts arrive, nothing broken is shown, and auto compresses where it should."""

from __future__ import annotations

import hashlib
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import zmq
import zstandard
from msgspec.structs import replace

from kakeya_zmq.blocks import Part, part_checksum
from kakeya_zmq.codecs.link import HEADER, MAGIC, CodecRates, FrameDecoder, FrameEncoder
from kakeya_zmq.codecs.probe import CodecProbe
from kakeya_zmq.compat import CACHE_FORMAT_VERSION
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.lanes import LaneGroup
from kakeya_zmq.io.receiver import ReceiverLane
from kakeya_zmq.planner import MeasuredRates, decide_link_codec
from kakeya_zmq.protocol.effects import CreditEarned, LaneFinished
from tests.loopback.lane_support import (
    CHUNK_BYTES,
    DEADLINE_S,
    HOST,
    Context,
    HandMadeSender,
    Mailbox,
    expected,
    make_part,
    same_parts,
    wait_until,
)
from tests.loopback.test_lanes import MIXED, MIXED_LENGTHS, RECEIVER, Rig, dial_pull
from tests.loopback.throttle import SlowLink
from wire import limits
from wire.bulk import SEAL_BYTES, ChunkSealer
from wire.chunks import ChunkHeader, ChunkKind
from wire.ids import NodeId
from wire.messages import CipherSuite, LinkCodec, PartKind, PartMeta, TransferGrant, ValueBytes

CODECS = pytest.mark.parametrize("codec", [LinkCodec.ZLIB, LinkCodec.ZSTD])
WIDTHS: tuple[ValueBytes, ...] = (1, 2, 4)


@pytest.fixture
def rig(context: Context, gate: Gate) -> Iterator[Rig]:
    group = LaneGroup()
    yield Rig(context, gate, group)
    assert group.close_all(5)


def part_of(number: int, payload: bytes) -> Part:
    meta = PartMeta(
        block_hash=hashlib.sha256(b"%d" % number).digest(),
        parent_hash=bytes(32),
        kind=PartKind.FULL,
        start=64 * number,
        token_count=64,
        length_bytes=len(payload),
        digest=hashlib.sha256(payload).digest(),
        checksum=part_checksum(payload),
    )
    return Part(meta=meta, payload=memoryview(payload))


def receive(
    context: Context, mailbox: Mailbox, grant: TransferGrant, parts: Sequence[Part], *, verify_digests: bool = False
) -> ReceiverLane:
    """A receiver that a hand-made sender has granted a transfer of these parts."""
    return ReceiverLane.connect(
        context,
        lane=RECEIVER,
        host=HOST,
        grant=grant,
        expected=expected(parts),
        budget_bytes=limits.MIB,
        idle_timeout_s=DEADLINE_S,
        post=mailbox.post,
        verify_digests=verify_digests,
    )


def noise(length_bytes: int) -> bytes:
    return np.random.default_rng(7).bytes(length_bytes)


def kv_parts(count: int, values: int) -> list[Part]:
    """Normally distributed bfloat16, which is what makes KV state compressible."""
    generator = np.random.default_rng(3)
    return [
        part_of(n, (generator.standard_normal(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())
        for n in range(count)
    ]


# --- what works ------------------------------------------------------------------------------------------------------


@CODECS
@pytest.mark.parametrize("value_bytes", WIDTHS)
@pytest.mark.parametrize("suite", list(CipherSuite))
def test_parts_of_every_size_arrive_in_order(
    rig: Rig, codec: LinkCodec, value_bytes: ValueBytes, suite: CipherSuite
) -> None:
    sender, grant = rig.bind_sender(suite=suite, link_codec=codec, value_bytes=value_bytes)
    assert grant.link_codec is codec
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED, final=True)
    sent, received = rig.finish()
    assert (sent.ok, received.ok) == (True, True)
    assert same_parts(rig.received.parts, MIXED)
    assert sent.transferred_bytes == received.transferred_bytes == sum(MIXED_LENGTHS), "payload, not what it became"
    assert all(part.payload.readonly for part in rig.received.parts)


@CODECS
def test_a_publish_arrives(rig: Rig, codec: LinkCodec) -> None:
    _, grant = rig.bind_receiver([part.meta for part in MIXED], link_codec=codec)
    assert grant.link_codec is codec
    rig.wire(rig.connect_sender(grant, MIXED, value_bytes=2))
    sent, received = rig.finish()
    assert (sent.ok, received.ok) == (True, True)
    assert same_parts(rig.received.parts, MIXED)


@CODECS
def test_parts_flow_while_later_ones_are_still_computed(rig: Rig, codec: LinkCodec) -> None:
    sender, grant = rig.bind_sender(link_codec=codec)
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    for part in MIXED:
        sender.feed([part], final=False)
        wait_until(lambda: MIXED.index(part) < len(rig.received.parts), "the part arrives before the next is fed")  # noqa: B023
    sender.feed([], final=True)
    assert rig.finish()[1].ok
    assert same_parts(rig.received.parts, MIXED)


@CODECS
def test_bytes_that_do_not_compress_fit_the_largest_chunk(rig: Rig, codec: LinkCodec) -> None:
    parts = [part_of(0, noise(limits.CHUNK_BYTES_MAX)), part_of(1, noise(limits.CHUNK_BYTES_MAX + 3))]
    sender, grant = rig.bind_sender(link_codec=codec, chunk_bytes=limits.CHUNK_BYTES_MAX)
    rig.wire(sender)
    rig.connect_receiver(grant, parts)
    sender.feed(parts, final=True)
    assert rig.finish()[1].ok
    assert same_parts(rig.received.parts, parts)


def test_several_parts_travel_in_one_frame(rig: Rig) -> None:
    parts = [make_part(number, length) for number, length in enumerate((1000, 1, 30_000, 333))]
    sender, grant = rig.bind_sender(link_codec=LinkCodec.ZSTD, value_bytes=4)
    with dial_pull(rig.context, grant, grant.token) as pull:
        pull.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        sender.feed(parts, final=True)
        _, (packed, sealed) = pull.recv_multipart(), pull.recv_multipart()
    header = ChunkHeader.unpack(packed)
    assert header.final
    assert header.length_bytes == len(sealed) - SEAL_BYTES < sum(part.meta.length_bytes for part in parts)
    frame = memoryview(bytearray(header.length_bytes))
    ChunkSealer(grant.suite, grant.key).open_into(packed, header.index, memoryview(sealed), frame)
    out = [memoryview(bytearray(part.meta.length_bytes)) for part in parts]
    FrameDecoder().decode(frame, out)
    assert [bytes(buffer) for buffer in out] == [bytes(part.payload) for part in parts]
    sender.close(True, "")
    assert rig.sent.wait_for(LaneFinished).ok


def test_a_part_has_memory_of_its_own(rig: Rig) -> None:
    sender, grant = rig.bind_sender(link_codec=LinkCodec.ZSTD)
    rig.wire(sender)
    rig.connect_receiver(grant, MIXED)
    sender.feed(MIXED, final=True)
    rig.finish()
    assert all(memoryview(part.payload.obj).nbytes == part.meta.length_bytes for part in rig.received.parts)


# --- credit ----------------------------------------------------------------------------------------------------------


def test_credit_counts_payload_however_small_it_gets(rig: Rig) -> None:
    parts = [make_part(number, CHUNK_BYTES) for number in range(20)]
    sender, grant = rig.bind_sender(credit_bytes=5 * CHUNK_BYTES, link_codec=LinkCodec.ZSTD)
    rig.connect_receiver(grant, parts)
    sender.feed(parts, final=True)
    wait_until(lambda: len(rig.received.parts) == 4, "the manifest and four chunks arrive")
    for granted in range(1, 4):
        sender.add_credit(CHUNK_BYTES)
        wait_until(lambda: len(rig.received.parts) == 4 + granted, "one more chunk for one chunk of credit")  # noqa: B023
    sender.close(False, "enough")
    assert rig.sent.wait_for(LaneFinished).transferred_bytes == 7 * CHUNK_BYTES
    assert len(rig.received.parts) == 7


@CODECS
def test_credit_given_back_is_what_was_taken(rig: Rig, codec: LinkCodec) -> None:
    parts = [make_part(number, CHUNK_BYTES) for number in range(40)]
    sender, grant = rig.bind_sender(credit_bytes=CHUNK_BYTES, link_codec=codec)
    rig.wire(sender)
    rig.connect_receiver(grant, parts, credit_bytes=CHUNK_BYTES)
    sender.feed(parts, final=True)
    assert rig.finish()[1].ok
    steps = [event.credit_bytes for event in rig.received.seen if isinstance(event, CreditEarned)]
    assert set(steps[1:]) == {CHUNK_BYTES}


# --- a sender that breaks the rules ----------------------------------------------------------------------------------

PARTS = [make_part(number, length) for number, length in enumerate((1000, 2000, 3000))]
TOTAL_BYTES = 6000
BOMB_BYTES = 128 * limits.MIB
Attack = Callable[[], bytes]


def frame_of(codec: str = "zstd", parts: list[Part] = PARTS) -> bytes:
    return bytes(FrameEncoder(codec).encode([part.payload for part in parts], 2))


def claiming(body: bytes, *, codec: int = 2, payloads: int = 3, total: int = TOTAL_BYTES, width: int = 2) -> bytes:
    return HEADER.pack(MAGIC, codec, width, payloads, total) + body


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 0x55]) + frame[at + 1 :]


def zstd_bomb(*, says_its_size: bool) -> bytes:
    """A stream of some 4 KB that is 128 MiB of zeros."""
    stream = zstandard.ZstdCompressor(write_content_size=says_its_size).compressobj(size=BOMB_BYTES)
    piece = bytes(4 * limits.MIB)
    return b"".join(stream.compress(piece) for _ in range(BOMB_BYTES // len(piece))) + stream.flush()


def lying_zstd_bomb() -> bytes:
    """A frame header that claims the right size, then a thousand blocks of 5,000 equal bytes (RFC 8878, 3.1.1)."""
    header = struct.pack("<IBH", 0xFD2FB528, 0x60, TOTAL_BYTES - 256)  # magic, one segment with a size of two bytes, size
    block = (5000 << 3 | 1 << 1).to_bytes(3, "little") + b"0"
    return header + 1000 * block


def zlib_bomb() -> bytes:
    return zlib.compress(bytes(5_000_000), 9)


ATTACKS: dict[str, tuple[Attack, str]] = {
    "no frame": (lambda: noise(TOTAL_BYTES), "not a frame"),
    "shorter than a header": (lambda: b"KZF1", "too short"),
    "an empty chunk": (lambda: b"", "too short"),
    "an unknown codec": (lambda: claiming(b"x", codec=3), "not a frame"),
    "values of three bytes": (lambda: claiming(b"x", width=3), "not a frame"),
    "another total": (lambda: claiming(b"x", total=TOTAL_BYTES + 1), "claims 3 payloads of 6001"),
    "an enormous total": (lambda: claiming(b"x", total=2**63), "claims 3 payloads"),
    "fewer parts": (lambda: frame_of(parts=[make_part(0, TOTAL_BYTES)]), "claims 1 payloads"),
    "other parts": (lambda: frame_of(parts=PARTS[:2]), "claims 2 payloads of 3000"),
    "a cut zstd stream": (lambda: frame_of()[:-3], "zstd"),
    "a cut zlib stream": (lambda: frame_of("zlib")[:-3], "zlib"),
    "something after the stream": (lambda: frame_of() + b"x", "zstd"),
    "a damaged zstd stream": (lambda: flipped(frame_of(), HEADER.size), "zstd"),
    "a damaged zlib stream": (lambda: flipped(frame_of("zlib"), HEADER.size + 4), "zlib"),
    "plain but too short": (lambda: claiming(noise(TOTAL_BYTES - 1), codec=0), "holds 5999 bytes"),
    "longer than plain": (lambda: claiming(noise(TOTAL_BYTES + 1), codec=0), "the manifest says 6000"),
    "bytes that were changed": (lambda: claiming(noise(TOTAL_BYTES), codec=0), "digest"),
    "a zstd bomb": (lambda: claiming(zstd_bomb(says_its_size=True)), "zstd"),
    "a zstd bomb of unknown size": (lambda: claiming(zstd_bomb(says_its_size=False)), "zstd"),
    "a zstd bomb that lies": (lambda: claiming(lying_zstd_bomb()), "zstd"),
    "a zlib bomb": (lambda: claiming(zlib_bomb(), codec=1), "zlib"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_frame_ends_the_transfer_and_shows_nothing(context: Context, gate: Gate, name: str) -> None:
    attack, complaint = ATTACKS[name]
    plaintext = attack()
    mailbox = Mailbox()
    sender = HandMadeSender(context, gate)
    tracemalloc.start()
    lane = receive(context, mailbox, replace(sender.grant, link_codec=LinkCodec.ZSTD), PARTS, verify_digests=True)
    sender.send(sender.manifest(0, PARTS), sender.data(1, plaintext, final=True))
    finished = mailbox.wait_for(LaneFinished)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sender.close()
    assert lane.join(DEADLINE_S)
    assert not finished.ok
    assert complaint in finished.reason
    assert "\n" not in finished.reason
    assert mailbox.parts == []
    assert peak_bytes < limits.MIB
    mailbox.assert_ended_once(RECEIVER)


def test_what_came_before_a_bad_frame_stays(context: Context, gate: Gate) -> None:
    parts = [make_part(0, CHUNK_BYTES), make_part(1, CHUNK_BYTES), make_part(2, 2 * CHUNK_BYTES)]
    mailbox = Mailbox()
    sender = HandMadeSender(context, gate)
    lane = receive(context, mailbox, replace(sender.grant, link_codec=LinkCodec.ZLIB), parts)
    encoder = FrameEncoder("zlib")
    half = bytes(encoder.encode([parts[2].payload[:CHUNK_BYTES]], 1))
    frames = [bytes(encoder.encode([part.payload], 1)) for part in parts[:2]]
    sender.send(
        sender.manifest(0, parts),
        *(sender.data(index, frame) for index, frame in enumerate(frames, 1)),
        sender.data(3, half),
        sender.data(4, half[:-1], final=True),
    )
    finished = mailbox.wait_for(LaneFinished)
    sender.close()
    assert lane.join(DEADLINE_S)
    assert not finished.ok
    assert same_parts(mailbox.parts, parts[:2])


def test_a_frame_on_a_plain_transfer_is_refused(context: Context, gate: Gate) -> None:
    mailbox = Mailbox()
    sender = HandMadeSender(context, gate)
    lane = receive(context, mailbox, sender.grant, PARTS)
    sender.send(sender.manifest(0, PARTS), sender.data(1, frame_of(), final=True))
    finished = mailbox.wait_for(LaneFinished)
    sender.close()
    assert lane.join(DEADLINE_S)
    assert "the manifest says 6000" in finished.reason
    assert mailbox.parts == []


def test_a_manifest_gets_no_room_for_a_frame(context: Context, gate: Gate) -> None:
    mailbox = Mailbox()
    sender = HandMadeSender(context, gate)
    lane = receive(context, mailbox, replace(sender.grant, link_codec=LinkCodec.ZSTD), PARTS)
    sender.send(sender.seal(sender.header(ChunkKind.MANIFEST, 0, CHUNK_BYTES + 1), bytes(CHUNK_BYTES + 1)))
    finished = mailbox.wait_for(LaneFinished)
    sender.close()
    assert lane.join(DEADLINE_S)
    assert f"{CHUNK_BYTES} were agreed" in finished.reason


# --- the choice, end to end --------------------------------------------------------------------------------------------

NODE = NodeId("far away")
KV = kv_parts(12, limits.CHUNK_BYTES_MIN)  # 1.5 MiB


def fetch(rig: Rig, rates: MeasuredRates, slow_megabytes_per_second: float | None) -> tuple[LinkCodec, int]:
    """One fetch as a primary does it: choose, transfer, observe. The codec, and the bytes that passed the slow link."""
    payload_bytes = sum(part.meta.length_bytes for part in KV)
    codec = decide_link_codec("auto", NODE, payload_bytes, rates, frame_bytes=CHUNK_BYTES).codec
    rig.sent, rig.received = Mailbox(), Mailbox()
    sender, grant = rig.bind_sender(link_codec=codec, value_bytes=2)
    rig.wire(sender)
    passed_bytes = 0
    started = time.perf_counter()
    if slow_megabytes_per_second is None:
        rig.connect_receiver(grant, KV)
        sender.feed(KV, final=True)
        received = rig.received.wait_for(LaneFinished)
        elapsed_s = time.perf_counter() - started
    else:
        with SlowLink(grant.port, slow_megabytes_per_second) as link:
            rig.connect_receiver(replace(grant, port=link.port), KV)
            sender.feed(KV, final=True)
            received = rig.received.wait_for(LaneFinished)
            elapsed_s = time.perf_counter() - started
            passed_bytes = link.passed_bytes
    assert received.ok
    assert rig.sent.wait_for(LaneFinished).ok
    assert same_parts(rig.received.parts, KV)
    wait_until(lambda: sender.join(0), "the sender is gone")
    rates.observe_link(NODE, received.transferred_bytes, elapsed_s * 1000, codec)
    return codec, passed_bytes


def test_auto_compresses_on_a_slow_link_once_it_is_measured(rig: Rig) -> None:
    rates = MeasuredRates(codec_rates=CodecProbe("bfloat16", CACHE_FORMAT_VERSION))
    first, plain_bytes = fetch(rig, rates, 5.0)
    assert first is LinkCodec.NONE, "nothing is known of the link yet"
    measured = rates.plain_link(NODE)
    assert measured is not None
    assert measured <= 5.0
    second, compressed_bytes = fetch(rig, rates, 5.0)
    assert second is LinkCodec.ZSTD
    assert compressed_bytes < 0.8 * plain_bytes
    assert rates.plain_link(NODE) == measured, "a compressed transfer says nothing about the plain link"


def test_auto_leaves_a_link_alone_that_outruns_the_codec(rig: Rig) -> None:
    rates = MeasuredRates()
    assert fetch(rig, rates, None)[0] is LinkCodec.NONE
    measured = rates.plain_link(NODE)
    assert measured is not None
    # A processor on which zstd is a little slower than what this machine's loopback just did.
    rates.codec_rates = lambda: {"zstd": CodecRates(0.9 * measured, 10 * measured, 1.45)}
    assert fetch(rig, rates, None)[0] is LinkCodec.NONE


def test_auto_leaves_the_own_host_alone_however_slow_it_looks(rig: Rig) -> None:
    rates = MeasuredRates(codec_rates=CodecProbe("bfloat16", CACHE_FORMAT_VERSION), same_host={NODE}.__contains__)
    rates.observe_link(NODE, 1_000_000, 1000.0)
    assert fetch(rig, rates, None)[0] is LinkCodec.NONE
    assert rates.compressed_link(NODE) is None
