"""``kakeyalattice-d4``: rows as points of the lattice D4 after a rotation; lossy. The arithmetic: lattice_kernel.

At Q = 38 and dim 256 a value takes 6.375 bits. Stored bytes, little-endian:

    3 bytes  "KD4"
    1 byte   mode: 1 packed, 0 raw (the payload follows as it is, because packing would not make it smaller)
    u16      Q
    u16      0
    u32      E, number of exceptions
    u32      V, number of verbatim rows
    f16[N]   norms of all rows of the part, in payload order
    f16[N]   peaks
    per run of tensors with equal dim: codes of its points, most significant bit first, zero bits up to a whole byte
    u32[E]   exceptions: index of a point among all of the part, ascending; its code is 0
    i16[E,4] their coordinates
    u32[V]   verbatim rows: index among all rows of the part, ascending; norm and peak are 0
    bytes    their values as they are

Verbatim rows are those whose norm float16 cannot hold with full precision: above 65,504, or below 2**-14 but not 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kakeya_zmq.codecs.bits import pack, packed_bytes, unpack
from kakeya_zmq.codecs.geometry import ROW_TYPES, Float32Array, RowGeometry, Run, checked_payload, narrow, widen
from kakeya_zmq.codecs.lattice_kernel import (
    DIM_MAX,
    NORM_MAX,
    NORM_MIN,
    POINT,
    Q_DEFAULT,
    Q_MAX,
    LatticeBackend,
    NumpyLattice,
    QuantisedRows,
    code_count,
    code_width,
)
from kakeya_zmq.codecs.output import claimed_bytes, output_buffer
from wire.errors import ConfigError, DataLossError, InvalidInput, ModelError

MAGIC: Final = b"KD4"
RAW, PACKED = 0, 1
RAW_HEADER: Final = MAGIC + bytes([RAW])
HEADER: Final = struct.Struct("<3sBHHII")
SCALE_BYTES: Final = 4
EXCEPTION_BYTES: Final = 4 + 2 * POINT
INDEX_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class _Cut:
    """One run's place in a part: its rows and its values, counted over the whole part."""

    run: Run
    rows: slice
    values: slice

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def points(self) -> slice:
        return slice(self.values.start // POINT, self.values.stop // POINT)


class LatticeCodec:
    """See the module. Stateless; any thread may use it if it may use the backend.

    Args:
        q_range: Q, 1 to 255: steps from zero to the largest coordinate of a row.
        backend: does the arithmetic.

    Raises:
        ConfigError: ``q_range`` is out of range.
    """

    name = "kakeyalattice-d4"
    lossless = False

    def __init__(self, q_range: int = Q_DEFAULT, backend: LatticeBackend | None = None) -> None:
        if not 1 <= q_range <= Q_MAX:
            raise ConfigError(f"the range Q of {self.name} must be between 1 and {Q_MAX}, not {q_range}")
        self.q_range = q_range
        self._width = code_width(q_range)
        self._backend = backend if backend is not None else NumpyLattice()

    @property
    def format_suffix(self) -> str:
        return f"-kl-d4-q{self.q_range}"

    def check(self, geometry: RowGeometry) -> None:
        """Raises:
        ModelError: a dim is not a power of two from 4 to 4,096, so that rows cannot be rotated.
        """
        for _, dim in geometry.tensors:
            if not POINT <= dim <= DIM_MAX or dim & (dim - 1):
                raise ModelError(
                    f"{self.name} needs head dims that are powers of two from {POINT} to {DIM_MAX}, not {dim}",
                    remedy="use another KV codec, such as int8",
                )

    def encode(self, raw: memoryview, geometry: RowGeometry, tokens: int) -> memoryview:
        """A part's payload as stored bytes.

        Raises:
            InvalidInput: the payload has the wrong size, or holds NaN or an infinity.
            ModelError: as :meth:`check`.
        """
        self.check(geometry)
        values = checked_payload(raw, geometry, tokens)
        cuts = list(_cuts(geometry, tokens))
        quantised: list[QuantisedRows] = []
        verbatim: list[npt.NDArray[np.int64]] = []
        for cut in cuts:
            rows = widen(values[cut.values], geometry.dtype).reshape(cut.count, cut.run.dim)
            rows, norms, kept = _measured(rows)
            quantised.append(self._backend.quantise(rows, norms, self.q_range))
            verbatim.append(kept)
        sections = self._sections(values, cuts, quantised, verbatim)
        if sum(len(section) for section in sections) >= len(RAW_HEADER) + raw.nbytes:
            sections = [RAW_HEADER, raw]
        return memoryview(b"".join(sections))

    def _sections(
        self,
        values: npt.NDArray[np.generic],
        cuts: Sequence[_Cut],
        quantised: Sequence[QuantisedRows],
        verbatim: Sequence[npt.NDArray[np.int64]],
    ) -> list[bytes | memoryview]:
        exceptions = [cut.points.start + each.exceptions for cut, each in zip(cuts, quantised, strict=True)]
        kept = [cut.rows.start + rows for cut, rows in zip(cuts, verbatim, strict=True)]
        counts = sum(len(each) for each in exceptions), sum(len(each) for each in kept)
        return [
            HEADER.pack(MAGIC, PACKED, self.q_range, 0, *counts),
            *(_data(each.norms) for each in quantised),
            *(_data(each.peaks) for each in quantised),
            *(_data(pack(each.codes, self._width)) for each in quantised),
            *(_data(each.astype("<u4")) for each in exceptions),
            *(_data(each.exception_points) for each in quantised),
            *(_data(each.astype("<u4")) for each in kept),
            *(
                _data(values[cut.values].reshape(cut.count, cut.run.dim)[rows])
                for cut, rows in zip(cuts, verbatim, strict=True)
            ),
        ]

    def decode(self, stored: memoryview, geometry: RowGeometry, tokens: int, out: memoryview | None = None) -> memoryview:
        """The payload that ``stored`` stands for, in ``out`` if given (writable, of exactly its size).

        Raises:
            DataLossError: the bytes are not what :meth:`encode` makes of a part of this geometry.
            RemoteProtocolError: no part has so many tokens.
            ModelError: as :meth:`check`.
        """
        self.check(geometry)
        raw_bytes = claimed_bytes(geometry, tokens)
        if stored.nbytes == len(RAW_HEADER) + raw_bytes and stored[: len(RAW_HEADER)] == RAW_HEADER:
            target = output_buffer(out, raw_bytes)
            target[:] = stored[len(RAW_HEADER) :]
            return target.toreadonly()
        cuts = list(_cuts(geometry, tokens))
        parsed = _Parsed.of(stored, geometry, cuts, self.q_range)
        target = output_buffer(out, raw_bytes)
        values = np.frombuffer(target, ROW_TYPES[geometry.dtype])
        for cut, codes in zip(cuts, parsed.codes, strict=True):
            first, last = np.searchsorted(parsed.exceptions, (cut.points.start, cut.points.stop))
            points = QuantisedRows(
                norms=parsed.norms[cut.rows],
                peaks=parsed.peaks[cut.rows],
                codes=codes,
                exceptions=parsed.exceptions[first:last] - cut.points.start,
                exception_points=parsed.exception_points[first:last],
            )
            rows = self._backend.reconstruct(points, cut.run.dim, self.q_range)
            narrow(rows.reshape(-1), geometry.dtype, values[cut.values])
        parsed.restore_verbatim(values, cuts)
        return target.toreadonly()


def _cuts(geometry: RowGeometry, tokens: int) -> Iterator[_Cut]:
    row = value = 0
    for run in geometry.runs():
        rows, values = row + run.heads * tokens, value + run.heads * tokens * run.dim
        yield _Cut(run, slice(row, rows), slice(value, values))
        row, value = rows, values


def _data(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _measured(rows: Float32Array) -> tuple[Float32Array, Float32Array, npt.NDArray[np.int64]]:
    """The rows' norms, and which rows must be kept verbatim: those are zeros, with norm 0, in the rows returned.

    Raises:
        InvalidInput: a value is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # both show as norms that are not finite
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    odd = np.flatnonzero(~((norms >= NORM_MIN) & (norms <= NORM_MAX)))
    if odd.size == 0:
        return rows, norms, odd
    if not np.isfinite(rows[odd]).all():
        raise InvalidInput("KV state with NaN or infinite values cannot be encoded")
    verbatim = odd[rows[odd].any(axis=1)]
    rows = rows.copy()
    rows[odd], norms[odd] = 0, 0
    return rows, norms, verbatim


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A packed part's sections, checked."""

    norms: npt.NDArray[np.float16]
    peaks: npt.NDArray[np.float16]
    codes: list[npt.NDArray[Any]]
    exceptions: npt.NDArray[np.int64]
    exception_points: npt.NDArray[np.int16]
    verbatim: npt.NDArray[np.int64]
    verbatim_values: memoryview

    @classmethod
    def of(cls, stored: memoryview, geometry: RowGeometry, cuts: Sequence[_Cut], q_range: int) -> _Parsed:
        """Raises:
        DataLossError: as :meth:`LatticeCodec.decode`; sizes are checked before anything is allocated.
        """
        rows, width = cuts[-1].rows.stop, code_width(q_range)
        sizes = [packed_bytes(cut.points.stop - cut.points.start, width) for cut in cuts]
        fixed = HEADER.size + SCALE_BYTES * rows + sum(sizes)
        if stored.nbytes < fixed:
            raise DataLossError(f"a {LatticeCodec.name} part has {stored.nbytes} bytes, not the {fixed} it needs at least")
        magic, mode, q_stored, reserved, exception_count, verbatim_count = HEADER.unpack_from(stored)
        if (magic, mode, q_stored, reserved) != (MAGIC, PACKED, q_range, 0):
            raise DataLossError(f"a part is not in the format of {LatticeCodec.name} with Q = {q_range}")
        lists = fixed + EXCEPTION_BYTES * exception_count + INDEX_BYTES * verbatim_count
        if stored.nbytes < lists:
            raise DataLossError(f"a {LatticeCodec.name} part has {stored.nbytes} bytes, not the {lists} its lists need")
        at = HEADER.size
        norms = np.frombuffer(stored, "<f2", rows, at)
        peaks = np.frombuffer(stored, "<f2", rows, at + 2 * rows)
        exceptions = np.frombuffer(stored, "<u4", exception_count, fixed).astype(np.int64)
        points = np.frombuffer(stored, "<i2", POINT * exception_count, fixed + INDEX_BYTES * exception_count)
        verbatim = np.frombuffer(stored, "<u4", verbatim_count, lists - INDEX_BYTES * verbatim_count).astype(np.int64)
        parsed = cls(
            norms=norms,
            peaks=peaks,
            codes=_unpacked(stored, at + SCALE_BYTES * rows, cuts, sizes, q_range),
            exceptions=exceptions,
            exception_points=points.reshape(-1, POINT),
            verbatim=verbatim,
            verbatim_values=stored[lists:],
        )
        parsed._check(geometry, cuts, q_range)
        return parsed

    def _check(self, geometry: RowGeometry, cuts: Sequence[_Cut], q_range: int) -> None:
        _check_indices(self.exceptions, cuts[-1].points.stop)
        _check_indices(self.verbatim, cuts[-1].rows.stop)
        scales = np.concatenate([self.norms, self.peaks])
        if not bool((scales >= 0).all() and np.isfinite(self.norms).all() and (self.peaks <= 1).all()):
            raise DataLossError(f"a {LatticeCodec.name} part has norms or peaks that no row has")
        if self.exception_points.size and int(np.abs(self.exception_points.astype(np.int32)).max()) > q_range:
            raise DataLossError(f"a {LatticeCodec.name} part has exceptions beyond Q = {q_range}")
        values = sum(
            cut.run.dim * int(np.count_nonzero((self.verbatim >= cut.rows.start) & (self.verbatim < cut.rows.stop)))
            for cut in cuts
        )
        if self.verbatim_values.nbytes != values * geometry.itemsize:
            raise DataLossError(
                f"a {LatticeCodec.name} part has {self.verbatim_values.nbytes} bytes of verbatim rows, "
                f"not {values * geometry.itemsize}"
            )

    def restore_verbatim(self, values: npt.NDArray[np.generic], cuts: Sequence[_Cut]) -> None:
        """Put the verbatim rows into the payload's ``values``."""
        source = np.frombuffer(self.verbatim_values, values.dtype)
        at = 0
        for cut in cuts:
            first, last = np.searchsorted(self.verbatim, (cut.rows.start, cut.rows.stop))
            rows = values[cut.values].reshape(cut.count, cut.run.dim)
            size = int(last - first) * cut.run.dim
            rows[self.verbatim[first:last] - cut.rows.start] = source[at : at + size].reshape(-1, cut.run.dim)
            at += size


def _check_indices(indices: npt.NDArray[np.int64], end: int) -> None:
    if indices.size and not (int(indices[-1]) < end and bool((np.diff(indices) > 0).all())):
        raise DataLossError(f"a {LatticeCodec.name} part lists rows or points that do not exist, or out of order")


def _unpacked(
    stored: memoryview, at: int, cuts: Sequence[_Cut], sizes: Sequence[int], q_range: int
) -> list[npt.NDArray[Any]]:
    """The codes of every run.

    Raises:
        DataLossError: a code stands for no point.
    """
    runs = []
    for cut, size in zip(cuts, sizes, strict=True):
        packed = np.frombuffer(stored, np.uint8, size, at)
        codes = unpack(packed, cut.points.stop - cut.points.start, code_width(q_range))
        # Parity may still lead a fourth coordinate one step beyond Q: an odd value, but a finite one.
        if int(codes.max()) >= code_count(q_range):
            raise DataLossError(f"a {LatticeCodec.name} part has codes that stand for no point")
        runs.append(codes)
        at += size
    return runs
