"""Byte planes: the layout by hand, and back again."""

from __future__ import annotations

import numpy as np
import pytest

from kakeya_zmq.codecs.byte_planes import VALUES_AT_ONCE, merge, split


def views(*payloads: bytes) -> list[memoryview]:
    return [memoryview(payload) for payload in payloads]


def merged(planes: bytes, width: int, sizes: list[int]) -> list[bytes]:
    out = [bytearray(size) for size in sizes]
    merge(np.frombuffer(planes, np.uint8), width, [memoryview(each) for each in out])
    return [bytes(each) for each in out]


def test_two_bytes_a_value_with_the_sign_moved_to_the_end() -> None:
    # 0x8001 rotated left is 0x0003, 0x4000 is 0x8000, 0x00ff is 0x01fe.
    payloads = [b"\x01\x80\x00\x40", b"\xff\x00\x77"]
    expected = bytes([0x03, 0x00, 0xFE, 0x00, 0x80, 0x01, 0x77])
    assert split(views(*payloads), 2).tobytes() == expected
    assert merged(expected, 2, [4, 3]) == payloads


def test_the_top_plane_of_float32_and_bfloat16_is_the_exponent() -> None:
    values = np.array([1.0, -1.0, 0.5, -0.5, 3.0], np.float32)
    exponents = [127, 127, 126, 126, 128]
    assert split([values.view(np.uint8).data], 4)[-5:].tolist() == exponents
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert split([halves.view(np.uint8).data], 2)[-5:].tolist() == exponents


def test_one_byte_a_value_is_left_alone() -> None:
    assert split(views(b"abc", b"", b"de"), 1).tobytes() == b"abcde"
    assert merged(b"abcde", 1, [3, 0, 2]) == [b"abc", b"", b"de"]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_any_sizes_come_back_at_any_alignment(width: int) -> None:
    random = np.random.default_rng(7)
    sizes = [0, 1, 2, 3, 4, 5, 7, width * VALUES_AT_ONCE, width * VALUES_AT_ONCE + 5, 3 * width * VALUES_AT_ONCE - 1]
    arena = memoryview(random.integers(0, 256, 1 + sum(sizes), np.uint8).tobytes())
    ends = np.cumsum([1, *sizes])
    payloads = [arena[end - size : end] for size, end in zip(sizes, ends[1:], strict=True)]
    planes = split(payloads, width)
    assert planes.nbytes == sum(sizes)
    target = memoryview(bytearray(len(arena)))
    merge(planes, width, [target[end - size : end] for size, end in zip(sizes, ends[1:], strict=True)])
    assert target[1:] == arena[1:]
