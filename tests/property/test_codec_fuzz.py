"""Any bytes either decode, or raise RemoteProtocolError, never any other error."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_cards import IDENTITY, make_card
from tests.unit.test_codec import CLIENT, HELLO, SERVER, WELCOME
from wire.cards import open_card, sign_card
from wire.codec import (
    decode_client,
    decode_hello,
    decode_server,
    decode_welcome,
    encode_client,
    encode_hello,
    encode_server,
    encode_welcome,
    pack_bitmap,
    pack_tokens,
    unpack_bitmap,
    unpack_hashes,
    unpack_tokens,
)
from wire.errors import RemoteProtocolError
from wire.frames import Header, split_frames

DECODERS: list[Callable[[bytes], object]] = [
    decode_client,
    decode_server,
    decode_hello,
    decode_welcome,
    open_card,
    unpack_tokens,
    unpack_hashes,
    Header.unpack,
    lambda data: unpack_bitmap(data, 10),
    lambda data: split_frames((data[:36], data[36:])),
]
VALID = [
    *(encode_client(each) for each in CLIENT),
    *(encode_server(each) for each in SERVER),
    encode_hello(HELLO),
    encode_welcome(WELCOME),
    sign_card(make_card(), IDENTITY),
]


def decode_all(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    decode_all(data)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda children: st.lists(children, max_size=6) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 310), st.lists(TREES, max_size=8))
def test_well_formed_msgpack_of_the_wrong_shape(tag: int, fields: list[object]) -> None:
    decode_all(msgspec.msgpack.encode([tag, *fields]))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(VALID), st.data())
def test_damaged_messages(valid: bytes, data: st.DataObject) -> None:
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged)))
        replacement = data.draw(st.binary(max_size=6))
        damaged[position : position + data.draw(st.integers(0, 6))] = replacement
    decode_all(bytes(damaged))


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1k", b"\x92\x01", b"\xdd\0\0\0\x01"])
@pytest.mark.parametrize("outer", [b"", b"\x92\x04", b"\x93\x01\x01\x64"])
def test_deep_nesting(opener: bytes, outer: bytes) -> None:
    decode_all(outer + opener * 200_000)
    # Also where anything is allowed: the sections of a Status.
    decode_all(b"\x93\x04\x01\x96\x6f\xa1n\x90" + opener * 200_000)


@pytest.mark.parametrize("code", [b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"])
@pytest.mark.parametrize("count", [2**24, 2**31, 2**32 - 1])
def test_announced_lengths_cost_nothing(code: bytes, count: int) -> None:
    lie = code + struct.pack(">I", count)
    for outer in (b"", b"\x93\x01\x01\x01", b"\x93\x04\x01\x96\x6f\xa1n", b"\x93\x04\x01\x96\x6f\xa1n\x90", b"\x97\xa1n"):
        decode_all(outer + lie)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_tokens_round_trip(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens


@given(st.lists(st.booleans(), max_size=100))
def test_bitmap_round_trip(bits: list[bool]) -> None:
    assert list(unpack_bitmap(pack_bitmap(bits), len(bits))) == bits
