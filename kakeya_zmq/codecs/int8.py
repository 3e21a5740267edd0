"""``int8``: one symmetric scale per channel over the tokens of a part; lossy, the better quality per bit.

Channels of K differ in size far more than tokens do, so a scale per (tensor, head, channel) costs little and fits well.
With 64 tokens a value takes 8.25 bits. Stored bytes, little-endian:

    3 bytes  "KI8"
    1 byte   mode: 1 packed, 0 raw (the payload follows as it is: parts of so few tokens that scales would cost more)
    u16[C]   scales as bfloat16 bits, in the order (tensor, head, channel); 0 for a channel of zeros
    i8[...]  values in payload order, -127..127: value = round(x / scale)

The scale is max|x| / 127 rounded *up* to bfloat16, so no value is ever cut off; bfloat16 because its range is that of
float32, and its coarser steps cost under 1 % of a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kakeya_zmq.codecs.geometry import (
    ROW_TYPES,
    Float32Array,
    RowGeometry,
    Run,
    checked_payload,
    narrow,
    widen,
)
from kakeya_zmq.codecs.output import claimed_bytes, output_buffer
from wire.errors import DataLossError, InvalidInput

MAGIC: Final = b"KI8"
RAW, PACKED = b"\x00", b"\x01"
HEADER_BYTES: Final = 4
LEVELS: Final = 127
SCALE_MIN: Final = 2.0**-126
"""Smallest normal float32: its reciprocal is still finite."""
INFINITY_BITS: Final = 0x7F80


class Int8Codec:
    """See the module. Stateless; any thread may use it."""

    name = "int8"
    format_suffix = "-int8"
    lossless = False

    def check(self, geometry: RowGeometry) -> None:
        """Every geometry will do."""

    def encode(self, raw: memoryview, geometry: RowGeometry, tokens: int) -> memoryview:
        """A part's payload as stored bytes.

        Raises:
            InvalidInput: the payload has the wrong size, or holds NaN or an infinity.
        """
        values = checked_payload(raw, geometry, tokens)
        packed = _packed_bytes(geometry, tokens) < HEADER_BYTES + raw.nbytes
        stored = bytearray(_packed_bytes(geometry, tokens) if packed else HEADER_BYTES + raw.nbytes)
        stored[:HEADER_BYTES] = MAGIC + (PACKED if packed else RAW)
        if not packed:
            _scales(widen(values, geometry.dtype).reshape(1, 1, -1))
            stored[HEADER_BYTES:] = raw
            return memoryview(stored).toreadonly()
        scales, levels = _sections(memoryview(stored), geometry)
        for run, channels, elements in _cuts(geometry, tokens):
            rows = widen(values[elements], geometry.dtype).reshape(run.heads, tokens, run.dim)
            bits = _scales(rows)
            scales[channels] = bits.reshape(-1)
            steps = _scale_values(bits)
            np.copyto(levels[elements].reshape(rows.shape), _quantise(rows, steps), casting="unsafe")
        return memoryview(stored).toreadonly()

    def decode(self, stored: memoryview, geometry: RowGeometry, tokens: int, out: memoryview | None = None) -> memoryview:
        """The payload that ``stored`` stands for, in ``out`` if given (writable, of exactly its size).

        Raises:
            DataLossError: the bytes are not what :meth:`encode` makes of a part of this geometry.
            RemoteProtocolError: no part has so many tokens.
        """
        raw_bytes, packed_bytes = claimed_bytes(geometry, tokens), _packed_bytes(geometry, tokens)
        packed = packed_bytes < HEADER_BYTES + raw_bytes
        expected = packed_bytes if packed else HEADER_BYTES + raw_bytes
        if stored.nbytes != expected or stored[:HEADER_BYTES] != MAGIC + (PACKED if packed else RAW):
            raise DataLossError(f"an int8 part of {tokens} tokens is not in its format, or has not {expected} bytes")
        if not packed:
            target = output_buffer(out, raw_bytes)
            target[:] = stored[HEADER_BYTES:]
            return target.toreadonly()
        scales, levels = _sections(stored, geometry)
        if int(scales.max()) >= INFINITY_BITS:
            raise DataLossError("an int8 part has a scale that is negative or not finite")
        target = output_buffer(out, raw_bytes)
        values = np.frombuffer(target, ROW_TYPES[geometry.dtype])
        for run, channels, elements in _cuts(geometry, tokens):
            steps = _scale_values(scales[channels].reshape(run.heads, 1, run.dim))
            _reconstruct(levels[elements].reshape(run.heads, tokens, run.dim), steps, geometry.dtype, values[elements])
        return target.toreadonly()


def _packed_bytes(geometry: RowGeometry, tokens: int) -> int:
    return HEADER_BYTES + 2 * geometry.channels + geometry.channels * tokens


def _sections(stored: memoryview, geometry: RowGeometry) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int8]]:
    """Scales and values of packed bytes, as views."""
    scales = np.frombuffer(stored, "<u2", geometry.channels, HEADER_BYTES)
    return scales, np.frombuffer(stored, np.int8, -1, HEADER_BYTES + 2 * geometry.channels)


def _cuts(geometry: RowGeometry, tokens: int) -> Iterator[tuple[Run, slice, slice]]:
    """Every run with its stretch of the channels and of the payload's values."""
    at = 0
    for run in geometry.runs():
        end = at + run.heads * run.dim
        yield run, slice(at, end), slice(at * tokens, end * tokens)
        at = end


def _scales(rows: Float32Array) -> npt.NDArray[np.uint32]:
    """bfloat16 bits (heads, 1, dim) of max|x| / 127 over the tokens, rounded up.

    Raises:
        InvalidInput: a value is not finite.
    """
    with np.errstate(invalid="ignore"):  # a NaN is looked for right below
        largest = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
    if not np.isfinite(largest).all():
        raise InvalidInput("KV state with NaN or infinite values cannot be encoded")
    exact = np.maximum(largest / np.float32(LEVELS), np.float32(SCALE_MIN))
    bits = (exact.view(np.uint32) + np.uint32(0xFFFF)) >> 16
    return np.where(largest > 0, bits, np.uint32(0))


def _scale_values(bits: npt.NDArray[np.unsignedinteger]) -> Float32Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _quantise(rows: Float32Array, steps: Float32Array) -> Float32Array:
    inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps > 0)
    scaled = rows * inverse
    return np.rint(scaled, out=scaled)


def _reconstruct(levels: npt.NDArray[np.int8], steps: Float32Array, dtype: str, out: npt.NDArray[np.generic]) -> None:
    with np.errstate(over="ignore"):  # the largest float32 values; made finite below
        values = levels * steps
    if float(steps.max()) > np.finfo(np.float32).max / (LEVELS + 1):
        np.nan_to_num(values, copy=False)
    narrow(values.reshape(-1), dtype, out)
