"""Link and disk encodings: how bytes travel or lie, chosen for each link; never part of what a part is.

A frame holds one or many payloads, whole small parts or slices of large ones (:func:`group_payloads`). Many in one frame
compress better than each alone and cost one call. Layout, little-endian:

    4 bytes  "KZF1"
    u8       codec: 0 none, 1 zlib, 2 zstd
    u8       bytes of a value: 1, 2 or 4
    u16      number of payloads, 1 to 65,535
    u64      total bytes of the payloads
    body     none: the payloads one after the other; zlib, zstd: one stream of their byte planes (see byte_planes)

A frame is never more than its 16-byte header longer than its payloads: what does not compress is sent as ``none``.

The receiver knows the sizes from the manifest and owns the buffers. A frame that claims another total is refused before
anything is allocated, and decoding allocates the total once.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard

from kakeya_zmq.codecs.byte_planes import WIDTHS, merge, split
from kakeya_zmq.codecs.registry import inflate
from wire.errors import ConfigError, DataLossError, InvalidInput, LocalProtocolError, RemoteProtocolError

LINK_CODECS: Final = {"none": 0, "zlib": 1, "zstd": 2}
NAMES: Final = {number: name for name, number in LINK_CODECS.items()}
MAGIC: Final = b"KZF1"
HEADER: Final = struct.Struct("<4sBBHQ")
PAYLOADS_MAX: Final = 0xFFFF
LEVEL_DEFAULT: Final = 1
LEVELS: Final = range(1, 10)
"""Levels that zlib and zstd both have; above 1 zstd is slower and, on KV state, no better."""
MATCH_MIN, HASH_LOG = 7, 6
"""zstd level 1 with few, long matches: matches in noise are chance, and looking for them cost half the time (measured on
Gemma: 1.45x at twice the speed, against 1.44x)."""
SLICE_UNIT: Final = 4
"""Slices of payloads are cut at multiples of this, the largest value."""


# --- frames ----------------------------------------------------------------------------------------------------


class FrameEncoder:
    """Makes frames with one codec. Keeps a compression context: for one thread at a time.

    Args:
        codec: one of :data:`LINK_CODECS`.
        level: 1 to 9.

    Raises:
        ConfigError: no such codec or level.
    """

    def __init__(self, codec: str, level: int = LEVEL_DEFAULT) -> None:
        if codec not in LINK_CODECS:
            raise ConfigError(f"there is no link codec {codec!r}", remedy=f"use one of {', '.join(LINK_CODECS)}")
        if level not in LEVELS:
            raise ConfigError(f"a compression level is between {LEVELS[0]} and {LEVELS[-1]}, not {level}")
        self.codec = codec
        self._level = level
        tuned = {"min_match": MATCH_MIN, "hash_log": HASH_LOG} if level == LEVEL_DEFAULT else {}
        parameters = zstandard.ZstdCompressionParameters.from_level(level, write_content_size=True, **tuned)
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)

    def encode(self, payloads: Sequence[memoryview], value_bytes: int) -> memoryview:
        """One frame.

        Args:
            payloads: contiguous bytes, 1 to 65,535 of them, not all empty.
            value_bytes: 2 or 4 for KV state of that type, 1 for everything else (lossy parts).

        Raises:
            InvalidInput: nothing to encode, too many payloads, or another ``value_bytes``.
        """
        total = sum(payload.nbytes for payload in payloads)
        if not 1 <= len(payloads) <= PAYLOADS_MAX or total == 0 or value_bytes not in WIDTHS:
            raise InvalidInput(f"{len(payloads)} payloads of {total} bytes, {value_bytes} a value, make no frame")
        if self.codec != "none":
            planes = split(payloads, value_bytes)
            body = self._zstd.compress(planes.data) if self.codec == "zstd" else zlib.compress(planes.data, self._level)
            if len(body) < total:
                header = HEADER.pack(MAGIC, LINK_CODECS[self.codec], value_bytes, len(payloads), total)
                return memoryview(header + body)
        header = HEADER.pack(MAGIC, LINK_CODECS["none"], value_bytes, len(payloads), total)
        return memoryview(b"".join((header, *payloads)))


class FrameDecoder:
    """Opens frames of every codec. Keeps a decompression context: for one thread at a time."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, frame: memoryview, out: Sequence[memoryview]) -> None:
        """Fill ``out`` with the payloads of ``frame``. After an error their content is undefined.

        Args:
            frame: contiguous bytes, as received.
            out: writable contiguous bytes, one for each payload and of its size.

        Raises:
            RemoteProtocolError: not a frame, an unknown codec, or other payloads than expected.
            DataLossError: the body is broken, or longer or shorter than it claims.
            LocalProtocolError: a buffer is read-only or not contiguous bytes.
        """
        if any(buffer.readonly or not buffer.c_contiguous or buffer.itemsize != 1 for buffer in out):
            raise LocalProtocolError("a frame is decoded into writable contiguous bytes")
        total = sum(buffer.nbytes for buffer in out)
        codec, value_bytes = _check_header(frame, len(out), total)
        body = frame[HEADER.size :]
        if codec == "none":
            _copy_out(body, out, total)
            return
        raw = inflate(body, total) if codec == "zlib" else self._decompress(body, total)
        merge(np.frombuffer(raw, np.uint8), value_bytes, out)

    def _decompress(self, body: memoryview, total: int) -> bytes:
        try:
            claimed = zstandard.get_frame_parameters(body).content_size
            if claimed != total:
                raise DataLossError(f"a zstd stream claims another size than the frame's {total} bytes")
            raw = self._zstd.decompress(body, allow_extra_data=False)
        except zstandard.ZstdError:
            raise DataLossError("a zstd stream is broken") from None
        if len(raw) != total:
            raise DataLossError(f"a zstd stream holds {len(raw)} bytes, not {total}")
        return raw


def _check_header(frame: memoryview, count: int, total: int) -> tuple[str, int]:
    """Codec name and bytes of a value."""
    if frame.nbytes < HEADER.size:
        raise RemoteProtocolError(f"a frame of {frame.nbytes} bytes is too short")
    magic, number, value_bytes, payloads, claimed = HEADER.unpack_from(frame)
    if magic != MAGIC or number not in NAMES or value_bytes not in WIDTHS:
        raise RemoteProtocolError("not a frame, or one with an unknown codec")
    if (payloads, claimed) != (count, total):
        raise RemoteProtocolError(f"a frame claims {payloads} payloads of {claimed} bytes, not {count} of {total}")
    return NAMES[number], value_bytes


def _copy_out(body: memoryview, out: Sequence[memoryview], total: int) -> None:
    if body.nbytes != total:
        raise DataLossError(f"a frame holds {body.nbytes} bytes, not {total}")
    at = 0
    for buffer in out:
        buffer[:] = body[at : at + buffer.nbytes]
        at += buffer.nbytes


# --- what goes into one frame ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PayloadSlice:
    """Bytes [start, stop) of payload ``index``."""

    index: int
    start: int
    stop: int


def frame_bytes_max(payload_bytes: int) -> int:
    """Upper bound of a frame's size."""
    return HEADER.size + payload_bytes


def group_payloads(sizes: Sequence[int], frame_bytes: int) -> list[tuple[PayloadSlice, ...]]:
    """Cut payloads into groups, each of which fits a frame (and so a chunk) of ``frame_bytes``, in order.

    Sender and receiver make the same groups from the sizes alone. Small payloads share a group; one that doesn't fit in
    what is left of a group is cut at a multiple of four bytes.

    Args:
        sizes: bytes of each payload, >= 0.
        frame_bytes: most bytes of a frame, header included.

    Raises:
        InvalidInput: ``frame_bytes`` leaves no room.
    """
    room = min((frame_bytes - HEADER.size) // SLICE_UNIT * SLICE_UNIT, 1 << 62)
    if room < SLICE_UNIT:
        raise InvalidInput(f"a frame of {frame_bytes} bytes leaves no room for payloads")
    groups: list[tuple[PayloadSlice, ...]] = []
    group: list[PayloadSlice] = []
    left = room
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if left < min(size - start, SLICE_UNIT) or len(group) == PAYLOADS_MAX:
                groups.append(tuple(group))
                group, left = [], room
            length = size - start if size - start <= left else left // SLICE_UNIT * SLICE_UNIT
            group.append(PayloadSlice(index, start, start + length))
            start += length
            left -= length
    return [*groups, tuple(group)] if group else groups


# --- which codec for a link --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CodecRates:
    """What a codec does, in megabytes (10**6 bytes) of payload a second, and how many times smaller the bytes get."""

    encode_megabytes_per_second: float
    decode_megabytes_per_second: float
    ratio: float


def estimate_seconds(payload_bytes: int, link_megabytes_per_second: float, rates: CodecRates, frame_bytes: int) -> float:
    """Time to encode, send and decode, with the three overlapping frame by frame: the first frame passes every stage,
    the rest follows at the pace of the slowest."""
    stages = (
        1 / (rates.encode_megabytes_per_second * 1e6),
        1 / (rates.ratio * link_megabytes_per_second * 1e6),
        1 / (rates.decode_megabytes_per_second * 1e6),
    )
    first = min(payload_bytes, frame_bytes)
    return first * sum(stages) + (payload_bytes - first) * max(stages)


def choose_link_codec(
    link_megabytes_per_second: float | None,
    codecs: Mapping[str, CodecRates],
    payload_bytes: int,
    frame_bytes: int,
) -> str:
    """The codec that makes a transfer shortest: ``none`` unless another is estimated to be faster.

    A codec that encodes or decodes more slowly than the link carries is not considered: it could only cost time that a
    processor has other uses for.

    Args:
        link_megabytes_per_second: measured; None or 0 when nothing is known yet, which means ``none``.
        codecs: measured rates of the codecs to choose from, on this kind of payload; without ``none``.
        payload_bytes: bytes of the transfer.
        frame_bytes: bytes of one frame.
    """
    if not link_megabytes_per_second or payload_bytes < 1:
        return "none"
    best, best_s = "none", payload_bytes / (link_megabytes_per_second * 1e6)
    for name, rates in codecs.items():
        slowest = min(rates.encode_megabytes_per_second, rates.decode_megabytes_per_second)
        if slowest <= link_megabytes_per_second or rates.ratio <= 1:
            continue
        estimate_s = estimate_seconds(payload_bytes, link_megabytes_per_second, rates, frame_bytes)
        if estimate_s < best_s:
            best, best_s = name, estimate_s
    return best


def measure_codec(
    codec: str, payloads: Sequence[memoryview], value_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> CodecRates:
    """Encode and decode ``payloads`` once, as one frame, and time it. A sample of some MB takes some milliseconds.

    Raises:
        ConfigError, InvalidInput: as :class:`FrameEncoder`.
    """
    encoder, decoder = FrameEncoder(codec), FrameDecoder()
    out = [memoryview(bytearray(payload.nbytes)) for payload in payloads]
    started = clock()
    frame = encoder.encode(payloads, value_bytes)
    encoded = clock()
    decoder.decode(frame, out)
    decoded = clock()
    total = sum(payload.nbytes for payload in payloads)
    shortest_s = 1e-9  # a clock may not have moved
    return CodecRates(
        encode_megabytes_per_second=total / 1e6 / max(encoded - started, shortest_s),
        decode_megabytes_per_second=total / 1e6 / max(decoded - encoded, shortest_s),
        ratio=total / frame.nbytes,
    )
