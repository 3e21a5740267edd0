"""Fixed-width codes packed without gaps: code i occupies bits [i * width, (i + 1) * width), most significant bit first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

CodeArray = npt.NDArray[Any]
"""uint32 (widths up to 31) or uint64."""
GROUP = 8
"""Eight codes of w bits are exactly w bytes: the unit of the vectorised loops."""
GROUPS_AT_ONCE = 2048
"""So that a step's arrays stay in a core's second-level cache."""


def code_type(width: int) -> type[np.uint32] | type[np.uint64]:
    """The NumPy type of codes of ``width`` bits; one spare bit, so that no sum in between overflows."""
    return np.uint32 if width <= 31 else np.uint64


def packed_bytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def pack(codes: CodeArray, width: int) -> npt.NDArray[np.uint8]:
    """``codes`` (flat, each below 2**width) as bytes; the last byte is filled up with zero bits."""
    size = packed_bytes(codes.size, width)
    groups = -(-codes.size // GROUP)
    if codes.size % GROUP:
        codes = np.concatenate([codes, np.zeros(groups * GROUP - codes.size, codes.dtype)])
    columns = codes.reshape(groups, GROUP)
    out = np.empty((groups, width), np.uint8)
    for first in range(0, groups, GROUPS_AT_ONCE):
        out[first : first + GROUPS_AT_ONCE] = _pack_groups(columns[first : first + GROUPS_AT_ONCE], width).T
    return out.reshape(-1)[:size]


def _pack_groups(columns: CodeArray, width: int) -> npt.NDArray[np.uint8]:
    """(groups, 8) codes as (width, groups) bytes: every byte gathers the codes that reach into it."""
    lanes = np.ascontiguousarray(columns.T)
    out = np.zeros((width, lanes.shape[1]), np.uint8)
    for lane in range(GROUP):
        end = (lane + 1) * width
        for byte in range(lane * width // 8, (end + 7) // 8):
            shift = end - GROUP * (byte + 1)
            moved = lanes[lane] >> shift if shift >= 0 else lanes[lane] << -shift
            out[byte] |= moved.astype(np.uint8)
    return out


def unpack(packed: npt.NDArray[np.uint8], count: int, width: int) -> CodeArray:
    """The first ``count`` codes in ``packed``, which has :func:`packed_bytes` (count, width) bytes."""
    groups = -(-count // GROUP)
    if packed.size < groups * width:
        packed = np.concatenate([packed, np.zeros(groups * width - packed.size, np.uint8)])
    rows = packed[: groups * width].reshape(groups, width)
    out = np.empty((groups, GROUP), code_type(width))
    for first in range(0, groups, GROUPS_AT_ONCE):
        out[first : first + GROUPS_AT_ONCE] = _unpack_groups(rows[first : first + GROUPS_AT_ONCE], width).T
    return out.reshape(-1)[:count]


def _unpack_groups(rows: npt.NDArray[np.uint8], width: int) -> CodeArray:
    """(groups, width) bytes as (8, groups) codes."""
    kind = code_type(width)
    source = np.ascontiguousarray(rows.T).astype(kind)
    out = np.zeros((GROUP, source.shape[1]), kind)
    mask = kind((1 << width) - 1)
    for lane in range(GROUP):
        end = (lane + 1) * width
        for byte in range(lane * width // 8, (end + 7) // 8):
            shift = end - GROUP * (byte + 1)
            out[lane] |= source[byte] << shift if shift >= 0 else source[byte] >> -shift
        out[lane] &= mask
    return out
