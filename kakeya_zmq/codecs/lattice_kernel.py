"""The arithmetic of ``kakeyalattice-d4``, vectorised with NumPy.

A row of ``dim`` values is divided by its norm and rotated by the orthonormal Sylvester-Hadamard matrix, which spreads
outliers over all coordinates. Its largest coordinate is scaled to Q, and every four neighbouring coordinates go to the
nearest point of the lattice D4 (integers with an even sum; Conway and Sloane 1982, algorithm 4): round, and if the sum is
odd move the coordinate with the largest rounding error to its other neighbour. Coordinates are then clipped to +-Q.

An even sum makes one bit of the fourth coordinate redundant. With R = 2Q + 1 and u = coordinate + Q, the code of a point is
((u0 R + u1) R + u2)(Q + 1) + (u3 >> 1): 25 bits at Q = 38. A clip can make the sum odd (about one point in a million); such
points are exceptions, coded 0 and listed.

Arrays inside are *planes* (4, dim / 4, rows): plane j holds coordinate j of every point. So each step is one pass over long
contiguous stretches, and the rotation splits into a butterfly between planes and one small matrix product within each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kakeya_zmq.codecs.bits import CodeArray, code_type
from kakeya_zmq.codecs.geometry import Float32Array

Q_DEFAULT: Final = 38
Q_MAX: Final = 255
"""A coordinate then has 9 bits; int8 is smaller and better long before."""
DIM_MAX: Final = 4096
POINT: Final = 4
"""Coordinates of a point."""
NORM_MIN, NORM_MAX = 2.0**-14, 65504.0
"""Norms that float16 holds with full precision; rows beyond are kept as they are."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows as lattice points.

    Attributes:
        norms: float16 (rows,), 0 for a row of zeros.
        peaks: float16 (rows,), largest absolute coordinate of the rotated unit row.
        codes: (rows * dim / 4,), uint32 or uint64.
        exceptions: int64, indices into ``codes``, ascending.
        exception_points: int16 (exceptions, 4).
    """

    norms: npt.NDArray[np.float16]
    peaks: npt.NDArray[np.float16]
    codes: CodeArray
    exceptions: npt.NDArray[np.int64]
    exception_points: npt.NDArray[np.int16]


class LatticeBackend(Protocol):
    """Who does the arithmetic: :class:`NumpyLattice`, or one for another processor that is passed to the codec."""

    @property
    def values_at_once(self) -> int:
        """About how many values it wants in one call. Stored bytes don't depend on it."""

    def quantise(self, rows: Float32Array, norms: Float32Array, q_range: int) -> QuantisedRows:
        """Rows as points.

        Args:
            rows: finite float32 (rows, dim).
            norms: their norms, float32 (rows,), each 0 or in [NORM_MIN, NORM_MAX]; a row with norm 0 holds zeros.
            q_range: Q.
        """

    def reconstruct(self, points: QuantisedRows, q_range: int, out: Float32Array) -> None:
        """Fill ``out`` (rows, dim), contiguous; codes are below :func:`code_count`, norms and peaks finite."""


def code_count(q_range: int) -> int:
    """Number of codes of a point."""
    side = 2 * q_range + 1
    return side**3 * (q_range + 1)


def code_width(q_range: int) -> int:
    """Bits of a point's code: 25 for Q = 38."""
    return (code_count(q_range) - 1).bit_length()


def sylvester_hadamard(size: int) -> Float32Array:
    """The (size, size) matrix of +-1, ``size`` a power of two: H(2n) = [[H, H], [H, -H]]."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _butterfly(planes: Float32Array, scratch: Float32Array) -> None:
    """Multiply by the 4 x 4 Sylvester-Hadamard matrix across the planes, in place."""
    np.add(planes[0::2], planes[1::2], out=scratch[0::2])
    np.subtract(planes[0::2], planes[1::2], out=scratch[1::2])
    np.add(scratch[:2], scratch[2:], out=planes[:2])
    np.subtract(scratch[:2], scratch[2:], out=planes[2:])


class NumpyLattice:
    """The backend for every processor. Stateless; any thread may use it."""

    values_at_once = 65_536
    """Five or so float32 arrays of these many values stay in a core's second-level cache."""

    def quantise(self, rows: Float32Array, norms: Float32Array, q_range: int) -> QuantisedRows:
        count, dim = rows.shape
        points = dim // POINT
        planes = np.array(rows.reshape(count, points, POINT).transpose(2, 1, 0), order="C")  # a copy, always
        rotated = np.empty_like(planes)
        _butterfly(planes, rotated)
        np.matmul(_rotation(dim), planes, out=rotated)
        peaks = _scale_to(rotated, norms, q_range)
        nearest = _nearest_points(rotated, planes)
        odd = _clip(nearest, q_range)
        codes = _encode_points(nearest, q_range)
        exceptions = np.empty(0, np.int64)
        exception_points = np.empty((0, POINT), np.int16)
        if odd is not None and odd.any():
            codes[odd] = 0
            row, point = np.nonzero(odd.T)
            exceptions = row * points + point
            exception_points = nearest[:, point, row].T.astype(np.int16)
        return QuantisedRows(
            norms=norms.astype(np.float16),
            peaks=peaks,
            codes=codes.T.reshape(-1),
            exceptions=exceptions,
            exception_points=exception_points,
        )

    def reconstruct(self, points: QuantisedRows, q_range: int, out: Float32Array) -> None:
        count, dim = out.shape
        per_row = dim // POINT
        planes = _decode_points(np.ascontiguousarray(points.codes.reshape(count, per_row).T), q_range)
        if points.exceptions.size:
            row, point = np.divmod(points.exceptions, per_row)
            planes[:, point, row] = points.exception_points.T
        rotated = np.matmul(_rotation(dim), planes)
        _butterfly(rotated, planes)
        scales = points.norms.astype(np.float32) * points.peaks.astype(np.float32) / np.float32(q_range)
        target = out.reshape(count, per_row, POINT)
        np.multiply(rotated.transpose(2, 1, 0), scales[:, None, None], out=target)


@lru_cache(maxsize=8)
def _rotation(dim: int) -> Float32Array:
    """What is left of the orthonormal matrix of ``dim`` after the butterfly between planes: (dim / 4, dim / 4)."""
    matrix = sylvester_hadamard(dim // POINT) / np.float32(np.sqrt(dim))
    matrix.flags.writeable = False
    return matrix


def _scale_to(planes: Float32Array, norms: Float32Array, q_range: int) -> npt.NDArray[np.float16]:
    """Scale rotated rows, in place, so that each one's largest coordinate is about Q; gives their peaks."""
    flat = planes.reshape(-1, norms.size)
    safe = np.where(norms > 0, norms, np.float32(1))
    largest = np.maximum(flat.max(axis=0), -flat.min(axis=0))
    # Rounding must not make a peak larger than any unit row can have.
    peaks = np.where(norms > 0, np.minimum(largest / safe, 1), 0).astype(np.float16)
    scales = np.zeros_like(norms)
    np.divide(np.float32(q_range), peaks.astype(np.float32) * safe, out=scales, where=peaks > 0)
    planes *= scales
    return peaks


def _nearest_points(planes: Float32Array, scratch: Float32Array) -> Float32Array:
    """The nearest point of D4 to each (plane 0..3); overwrites both arguments, the result is one of them."""
    nearest = np.rint(planes, out=scratch)
    errors = planes - nearest
    distance = np.abs(errors, out=planes)
    total = nearest[0] + nearest[1]
    total += nearest[2]
    total += nearest[3]
    odd = total.astype(np.int32) & 1
    worst = np.maximum(np.maximum(distance[0], distance[1]), np.maximum(distance[2], distance[3]))
    worst += 1 - odd  # no distance reaches it where the sum is even
    moved = distance == worst
    if np.count_nonzero(moved) != np.count_nonzero(odd):  # equal distances: the first one moves
        moved[1] &= ~moved[0]
        moved[2] &= ~(moved[0] | moved[1])
        moved[3] &= ~(moved[0] | moved[1] | moved[2])
    nearest += np.copysign(moved.astype(np.float32), errors, out=errors)
    return nearest


def _clip(points: Float32Array, q_range: int) -> npt.NDArray[np.bool_] | None:
    """Clip to +-Q in place; true where that made a sum odd. None when nothing had to be clipped, the usual case."""
    if float(points.max()) <= q_range and float(points.min()) >= -q_range:
        return None
    np.clip(points, -q_range, q_range, out=points)
    odd: npt.NDArray[np.bool_] = (points.sum(axis=0).astype(np.int32) & 1).astype(np.bool_)
    return odd


def _encode_points(points: Float32Array, q_range: int) -> CodeArray:
    """Planes as codes (dim / 4, rows)."""
    side = 2 * q_range + 1
    unsigned = (points + np.float32(q_range)).astype(code_type(code_width(q_range)))
    code: CodeArray = unsigned[0] * side
    code += unsigned[1]
    code *= side
    code += unsigned[2]
    code *= q_range + 1
    code += unsigned[3] >> 1
    return code


def _decode_points(codes: CodeArray, q_range: int) -> Float32Array:
    """Codes (dim / 4, rows) as planes."""
    side = 2 * q_range + 1
    planes = np.empty((POINT, *codes.shape), np.float32)
    rest = codes // (q_range + 1)
    last = (codes - rest * (q_range + 1)) << 1
    high = rest // side
    third = rest - high * side
    first = high // side
    second = high - first * side
    last += (first + second + third) & 1
    for plane, coordinate in zip(planes, (first, second, third, last), strict=True):
        np.subtract(coordinate, np.float32(q_range), out=plane, casting="unsafe", dtype=np.float32)
    return planes
