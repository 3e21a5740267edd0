"""Codecs under arbitrary shapes, values and damage.

Any stored bytes or frame either decode, or raise RemoteProtocolError or DataLossError, never any other error; and what an
encoder made always comes back.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.codecs.geometry import FINITE_MAX, RowGeometry
from kakeya_zmq.codecs.lattice import LatticeCodec
from kakeya_zmq.codecs.link import LINK_CODECS, FrameDecoder, FrameEncoder, frame_bytes_max, group_payloads
from kakeya_zmq.codecs.registry import STORAGE_CODECS, StorageCodec, storage_codec
from tests.unit.test_int8 import payload_of, values_of
from wire.errors import DataLossError, RemoteProtocolError

Values = npt.NDArray[np.float64]
ROUNDING = {"float32": (2.0**-20, 2.0**-126), "float16": (2.0**-10, 2.0**-24), "bfloat16": (2.0**-7, 2.0**-126)}
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])
CODECS = st.builds(
    lambda name, q_range: storage_codec(name, q_range=q_range),
    st.sampled_from(STORAGE_CODECS),
    st.sampled_from([1, 5, 38, 200]),
)


@st.composite
def parts(draw: st.DrawFn) -> tuple[RowGeometry, int, memoryview]:
    """A geometry, tokens, and a payload of finite values that range over the type's exponents."""
    dtype = draw(DTYPES)
    tensors = draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([4, 8, 32])), min_size=1, max_size=4))
    tokens = draw(st.integers(1, 9))
    geometry = RowGeometry(dtype, tuple(tensors))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = geometry.channels * tokens
    top = np.log10(FINITE_MAX[dtype])
    low, high = sorted(draw(st.tuples(st.floats(-44, top), st.floats(-44, top))))
    values = random.choice([-1.0, 0.0, 1.0], count) * 10 ** (low + (high - low) * random.random(count))
    return geometry, tokens, payload_of(values.clip(-FINITE_MAX[dtype], FINITE_MAX[dtype]), dtype)


@given(codec=CODECS, part=parts())
@settings(max_examples=150, deadline=None)
def test_what_was_encoded_comes_back(codec: StorageCodec, part: tuple[RowGeometry, int, memoryview]) -> None:
    geometry, tokens, raw = part
    stored = codec.encode(raw, geometry, tokens)
    decoded = codec.decode(stored, geometry, tokens)
    assert decoded.nbytes == raw.nbytes
    if codec.lossless:
        assert decoded == raw
        return
    assert stored.nbytes <= raw.nbytes + 4
    decoded_values = values_of(decoded, geometry.dtype).astype(np.float64)
    assert np.isfinite(decoded_values).all()
    original_values = values_of(raw, geometry.dtype).astype(np.float64)
    at = 0
    for heads, dim in geometry.tensors:
        span = slice(at, at + heads * tokens * dim)
        before, after = (values[span].reshape(heads, tokens, dim) for values in (original_values, decoded_values))
        check_errors(codec, before, after, ROUNDING[geometry.dtype])
        at = span.stop


def check_errors(codec: StorageCodec, before: Values, after: Values, rounding: tuple[float, float]) -> None:
    """(heads, tokens, dim) before and after; ``rounding`` of the type: relative, and absolute near zero."""
    relative, absolute = rounding
    errors = np.abs(before - after)
    if isinstance(codec, LatticeCodec):
        # No point of R4 is further than 1 from D4; a clip may take a step more, float16 scales and rounding the rest.
        dim = before.shape[2]
        norms = np.linalg.norm(before, axis=2)
        largest = norms * (1.1 * np.sqrt(dim / 4) / codec.q_range + 2**-9 + relative) + absolute * dim
        assert (np.linalg.norm(errors, axis=2) <= largest).all()
    else:
        channels = np.abs(before).max(axis=1, keepdims=True)
        assert (errors <= channels * ((1 + 2**-7) / 254 + relative) + absolute).all()


@given(codec=CODECS, part=parts(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_refused_or_decodes(
    codec: StorageCodec, part: tuple[RowGeometry, int, memoryview], data: st.DataObject
) -> None:
    geometry, tokens, raw = part
    stored = damaged(bytes(codec.encode(raw, geometry, tokens)), data)
    claimed = data.draw(st.sampled_from([tokens, tokens + 1, 0, -1, 1 << 40]))
    with contextlib.suppress(RemoteProtocolError, DataLossError):
        decoded = codec.decode(memoryview(stored), geometry, claimed)
        assert decoded.nbytes == geometry.raw_bytes(claimed)


def damaged(valid: bytes, data: st.DataObject) -> bytes:
    """Some bytes changed, or cut, or longer, or wholly arbitrary."""
    kind = data.draw(st.sampled_from(["change", "cut", "extend", "arbitrary"]))
    if kind == "arbitrary":
        return data.draw(st.binary(max_size=200))
    if kind == "cut":
        return valid[: data.draw(st.integers(0, len(valid) - 1))]
    if kind == "extend":
        return valid + data.draw(st.binary(min_size=1, max_size=40))
    changed = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        # Often within the headers and lists, whose bytes mean most.
        at = data.draw(st.integers(0, min(len(valid), 40) - 1) | st.integers(0, len(valid) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    return bytes(changed)


PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=5).filter(any)
WIDTHS = st.sampled_from([1, 2, 4])
NAMES = st.sampled_from(list(LINK_CODECS))


def buffers_for(payloads: list[Any]) -> list[memoryview]:
    return [memoryview(bytearray(len(payload))) for payload in payloads]


@given(codec=NAMES, payloads=PAYLOADS, width=WIDTHS, repeat=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_frames_come_back(codec: str, payloads: list[bytes], width: int, repeat: int) -> None:
    repeated = [memoryview(payload * repeat) for payload in payloads]
    frame = FrameEncoder(codec).encode(repeated, width)
    assert frame.nbytes <= frame_bytes_max(sum(payload.nbytes for payload in repeated))
    out = buffers_for(repeated)
    FrameDecoder().decode(frame, out)
    assert out == repeated


@given(codec=NAMES, payloads=PAYLOADS, width=WIDTHS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_frames_are_refused_or_decode(codec: str, payloads: list[bytes], width: int, data: st.DataObject) -> None:
    frame = damaged(bytes(FrameEncoder(codec).encode([memoryview(each * 20) for each in payloads], width)), data)
    sizes = data.draw(st.sampled_from([[each * 20 for each in payloads], payloads]))
    with contextlib.suppress(RemoteProtocolError, DataLossError):
        FrameDecoder().decode(memoryview(frame), buffers_for(sizes))


@given(sizes=st.lists(st.integers(0, 300), max_size=40), room=st.integers(4, 200))
def test_groups_hold_every_byte_once_in_order_and_fit(sizes: list[int], room: int) -> None:
    groups = group_payloads(sizes, frame_bytes_max(room))
    pieces = [piece for group in groups for piece in group]
    covered = [(piece.index, byte) for piece in pieces for byte in range(piece.start, piece.stop)]
    assert covered == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    assert all(0 < sum(piece.stop - piece.start for piece in group) <= room for group in groups)
    assert all(piece.start % 4 == 0 for piece in pieces)
