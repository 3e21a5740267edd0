"""int8 per channel: bounds of the error, the bytes, the edges of the number types, damaged bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kakeya_zmq.codecs.geometry import FINITE_MAX, ROW_TYPES, RowGeometry, narrow, widen
from kakeya_zmq.codecs.int8 import HEADER_BYTES, Int8Codec
from wire.errors import DataLossError, InvalidInput, RemoteProtocolError

CODEC = Int8Codec()


def payload_of(values: npt.ArrayLike, dtype: str = "float32") -> memoryview:
    """Flat float values as payload bytes."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    out: npt.NDArray[Any] = np.empty(flat.size, ROW_TYPES[dtype])
    narrow(flat, dtype, out)
    return out.view(np.uint8).data.toreadonly()


def values_of(payload: memoryview, dtype: str = "float32") -> npt.NDArray[np.float32]:
    return widen(np.frombuffer(payload, ROW_TYPES[dtype]), dtype)


def test_the_bytes_of_a_small_part() -> None:
    # One head, two channels: 127 and 254 at most, so scales 1 and 2 exactly.
    geometry = RowGeometry("float32", ((1, 2),))
    stored = CODEC.encode(payload_of(np.array([[127, -254], [3, 100], [-0.4, 1.2]])), geometry, 3)
    one, two = 0x3F80, 0x4000
    assert stored == b"KI8\x01" + struct.pack("<2H6b", one, two, 127, -127, 3, 50, 0, 1)
    assert values_of(CODEC.decode(stored, geometry, 3)).tolist() == [127, -254, 3, 100, 0, 2]


@pytest.mark.parametrize("dtype", list(ROW_TYPES))
def test_no_value_is_off_by_more_than_half_a_step(dtype: str) -> None:
    geometry = RowGeometry(dtype, ((2, 8), (2, 8), (1, 24), (3, 8)))
    tokens = 16
    random = np.random.default_rng(1)
    arrays = [
        random.normal(size=(heads, tokens, dim)) * np.exp(random.normal(size=(heads, 1, dim)) * 2)
        for heads, dim in geometry.tensors
    ]
    raw = payload_of(np.concatenate([array.reshape(-1) for array in arrays]), dtype)
    stored = CODEC.encode(raw, geometry, tokens)
    assert stored.nbytes == HEADER_BYTES + geometry.channels * (2 + tokens)
    before, after = values_of(raw, dtype), values_of(CODEC.decode(stored, geometry, tokens), dtype)
    at = 0
    rounding = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for heads, dim in geometry.tensors:
        size = heads * tokens * dim
        original, decoded = (each[at : at + size].reshape(heads, tokens, dim) for each in (before, after))
        largest = np.abs(original).max(axis=1, keepdims=True)
        step = largest / 127 * (1 + 2.0**-7)  # a scale is rounded up to 8 bits
        assert (np.abs(original - decoded) <= step / 2 + largest * rounding).all()
        at += size


def test_channels_of_zeros_and_of_the_smallest_numbers() -> None:
    geometry = RowGeometry("float32", ((1, 4),))
    tiny = np.float32(1e-45)
    values = np.array([[0, -0.0, tiny, 1e-30], [0, 0, -tiny, -1e-30]], np.float32)
    decoded = values_of(CODEC.decode(CODEC.encode(payload_of(values), geometry, 2), geometry, 2)).reshape(2, 4)
    assert decoded[:, :2].tolist() == [[0, 0], [0, 0]]
    assert np.abs(decoded[:, 2]).max() <= 2.0**-126
    np.testing.assert_allclose(decoded[:, 3], values[:, 3], rtol=0.01)


@pytest.mark.parametrize("dtype", list(ROW_TYPES))
def test_the_largest_numbers_stay_finite(dtype: str) -> None:
    geometry = RowGeometry(dtype, ((1, 1),))
    raw = payload_of([FINITE_MAX[dtype], -FINITE_MAX[dtype], 0, 0], dtype)
    decoded = values_of(CODEC.decode(CODEC.encode(raw, geometry, 4), geometry, 4), dtype)
    np.testing.assert_allclose(decoded, values_of(raw, dtype), rtol=0.01)


def test_a_part_too_short_for_scales_is_stored_raw_and_exact() -> None:
    geometry = RowGeometry("bfloat16", ((2, 4),))
    for tokens, packed in ((1, False), (2, False), (3, True)):
        raw = payload_of(np.linspace(-1, 1, 8 * tokens), "bfloat16")
        stored = CODEC.encode(raw, geometry, tokens)
        assert (stored[3] == 1) is packed
        assert (CODEC.decode(stored, geometry, tokens) == raw) is not packed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 4), ("bfloat16", 1)])
def test_nan_and_infinity_are_refused(bad: float, dtype: str, tokens: int) -> None:
    values = np.ones((tokens, 2), np.float32)
    values[-1, 1] = bad
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    raw = (values if dtype == "float32" else bits).reshape(-1).view(np.uint8).data
    with pytest.raises(InvalidInput, match="NaN or infinite"):
        CODEC.encode(raw, RowGeometry(dtype, ((1, 2),)), tokens)


def test_damaged_bytes_are_refused() -> None:
    geometry = RowGeometry("float32", ((1, 2),))
    stored = bytes(CODEC.encode(payload_of(np.ones((3, 2))), geometry, 3))
    for broken in (b"", stored[:-1], stored + b"\0", b"X" + stored[1:], stored[:3] + b"\0" + stored[4:]):
        with pytest.raises(DataLossError):
            CODEC.decode(memoryview(broken), geometry, 3)
    for scale in (0x7F80, 0x7FC0, 0x8001, 0xFFFF):  # infinity, NaN, negative
        with pytest.raises(DataLossError, match="scale"):
            CODEC.decode(memoryview(stored[:4] + struct.pack("<H", scale) + stored[6:]), geometry, 3)
    for tokens in (0, -1, 1 << 40):
        with pytest.raises(RemoteProtocolError):
            CODEC.decode(memoryview(stored), geometry, tokens)
