"""Byte planes: equal bytes of all values side by side, so that a general compressor finds what little there is to find.

Each value is first rotated left by one bit. That moves the sign to the lowest bit, and for float32 and bfloat16 the top byte
becomes the whole exponent, the only bits of KV state that compress. Sign and mantissa are noise.

With width w, the result is plane 0 (lowest byte of every value of every buffer, in order), ..., plane w - 1, then what
is left over of buffers whose size is not a multiple of w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

WIDTHS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Bytes of a value; 1 changes nothing."""
VALUES_AT_ONCE: Final = 32_768
"""So that the rotated copy stays in a core's cache."""


def split(buffers: Sequence[memoryview], width: int) -> npt.NDArray[np.uint8]:
    """The planes of all ``buffers`` (contiguous bytes), in a new array of their total size."""
    out = np.empty(sum(buffer.nbytes for buffer in buffers), np.uint8)
    planes, rest = _parts(out, [buffer.nbytes for buffer in buffers], width)
    at = spare = 0
    for buffer in buffers:
        count = buffer.nbytes // width
        values = np.frombuffer(buffer, WIDTHS[width], count)
        for first in range(0, count, VALUES_AT_ONCE):
            some = values[first : first + VALUES_AT_ONCE]
            if width > 1:
                some = (some << 1) | (some >> (8 * width - 1))
            for plane, target in enumerate(planes):
                # The cast keeps the lowest byte.
                np.copyto(target[at + first : at + first + some.size], some >> 8 * plane, casting="unsafe")
        at += count
        left = buffer.nbytes - count * width
        rest[spare : spare + left] = np.frombuffer(buffer, np.uint8, left, count * width)
        spare += left
    return out


def merge(joined: npt.NDArray[np.uint8], width: int, buffers: Sequence[memoryview]) -> None:
    """Undo :func:`split` into ``buffers``: writable contiguous bytes whose sizes are those that were split."""
    planes, rest = _parts(joined, [buffer.nbytes for buffer in buffers], width)
    at = spare = 0
    for buffer in buffers:
        count = buffer.nbytes // width
        values = np.frombuffer(buffer, WIDTHS[width], count)
        for first in range(0, count, VALUES_AT_ONCE):
            some = values[first : first + VALUES_AT_ONCE]
            stretch = slice(at + first, at + first + some.size)
            if width == 1:
                np.copyto(some, planes[0][stretch])
                continue
            rotated = planes[-1][stretch].astype(values.dtype)
            for source in planes[-2::-1]:
                rotated <<= 8
                rotated |= source[stretch]
            np.bitwise_or(rotated >> 1, rotated << (8 * width - 1), out=some)
        at += count
        left = buffer.nbytes - count * width
        np.frombuffer(buffer, np.uint8, left, count * width)[:] = rest[spare : spare + left]
        spare += left


def _parts(
    joined: npt.NDArray[np.uint8], sizes: Sequence[int], width: int
) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
    """The planes and the left-over bytes, as views."""
    count = sum(size // width for size in sizes)
    return [joined[plane * count : (plane + 1) * count] for plane in range(width)], joined[width * count :]
