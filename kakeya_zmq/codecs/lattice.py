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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kakeya_zmq.codecs.bits import GROUP, pack, packed_bytes, unpack
from kakeya_zmq.codecs.geometry import ROW_TYPES, Float32Array, RowGeometry, checked_payload, narrow, widen
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
    """Some rows of one run, as many as the backend wants at once.

    ``rows`` and ``values`` are counted over the whole part, ``codes`` are bytes of the part's code section.
    """

    dim: int
    rows: slice
    values: slice
    codes: slice

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
        cuts = _cuts(geometry, tokens, self._width, self._backend.values_at_once)
        quantised: list[QuantisedRows] = []
        verbatim: list[npt.NDArray[np.int64]] = []
        for cut in cuts:
            rows = widen(values[cut.values], geometry.dtype).reshape(cut.count, cut.dim)
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
            *(_data(values[cut.values].reshape(cut.count, cut.dim)[rows]) for cut, rows in zip(cuts, verbatim, strict=True)),
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
        cuts = _cuts(geometry, tokens, self._width, self._backend.values_at_once)
        parsed = _Parsed.of(stored, geometry, cuts, self.q_range)
        target = output_buffer(out, raw_bytes)
        values = np.frombuffer(target, ROW_TYPES[geometry.dtype])
        is_wide = geometry.dtype == "float32"
        scratch = np.empty(0 if is_wide else max(cut.count * cut.dim for cut in cuts), np.float32)
        for cut in cuts:
            wide = values[cut.values] if is_wide else scratch[: cut.count * cut.dim]
            self._backend.reconstruct(parsed.points(cut, self.q_range), self.q_range, wide.reshape(cut.count, cut.dim))
            if not is_wide:
                narrow(wide, geometry.dtype, values[cut.values])
        parsed.restore_verbatim(values, cuts)
        return target.toreadonly()


def _cuts(geometry: RowGeometry, tokens: int, width: int, values_at_once: int) -> list[_Cut]:
    """A part in steps. All but a run's last have a multiple of 8 rows, so that their codes fill whole bytes."""
    cuts = []
    row = value = code = 0
    for run in geometry.runs():
        most = max(GROUP, values_at_once // run.dim // GROUP * GROUP)
        end = row + run.heads * tokens
        while row < end:
            rows = min(most, end - row)
            values, codes = rows * run.dim, packed_bytes(rows * run.dim // POINT, width)
            cuts.append(_Cut(run.dim, slice(row, row + rows), slice(value, value + values), slice(code, code + codes)))
            row, value, code = row + rows, value + values, code + codes
    return cuts


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
    """A packed part's sections, as views, checked but for the codes."""

    norms: npt.NDArray[np.float16]
    peaks: npt.NDArray[np.float16]
    codes: memoryview
    exceptions: npt.NDArray[np.int64]
    exception_points: npt.NDArray[np.int16]
    verbatim: npt.NDArray[np.int64]
    verbatim_values: memoryview

    @classmethod
    def of(cls, stored: memoryview, geometry: RowGeometry, cuts: Sequence[_Cut], q_range: int) -> _Parsed:
        """Raises:
        DataLossError: as :meth:`LatticeCodec.decode`; sizes are checked before anything is allocated.
        """
        rows, code_bytes = cuts[-1].rows.stop, cuts[-1].codes.stop
        lists = HEADER.size + SCALE_BYTES * rows + code_bytes
        if stored.nbytes < lists:
            raise DataLossError(f"a {LatticeCodec.name} part has {stored.nbytes} bytes, not the {lists} it needs at least")
        magic, mode, q_stored, reserved, exceptions, verbatim = HEADER.unpack_from(stored)
        if (magic, mode, q_stored, reserved) != (MAGIC, PACKED, q_range, 0):
            raise DataLossError(f"a part is not in the format of {LatticeCodec.name} with Q = {q_range}")
        rest = lists + EXCEPTION_BYTES * exceptions + INDEX_BYTES * verbatim
        if stored.nbytes < rest:
            raise DataLossError(f"a {LatticeCodec.name} part has {stored.nbytes} bytes, not the {rest} its lists need")
        points = np.frombuffer(stored, "<i2", POINT * exceptions, lists + INDEX_BYTES * exceptions)
        parsed = cls(
            norms=np.frombuffer(stored, "<f2", rows, HEADER.size),
            peaks=np.frombuffer(stored, "<f2", rows, HEADER.size + 2 * rows),
            codes=stored[lists - code_bytes : lists],
            exceptions=np.frombuffer(stored, "<u4", exceptions, lists).astype(np.int64),
            exception_points=points.reshape(-1, POINT),
            verbatim=np.frombuffer(stored, "<u4", verbatim, rest - INDEX_BYTES * verbatim).astype(np.int64),
            verbatim_values=stored[rest:],
        )
        parsed._check(geometry, cuts, q_range)
        return parsed

    def _check(self, geometry: RowGeometry, cuts: Sequence[_Cut], q_range: int) -> None:
        _check_indices(self.exceptions, cuts[-1].points.stop)
        _check_indices(self.verbatim, cuts[-1].rows.stop)
        if not bool(((self.norms >= 0) & (self.norms <= NORM_MAX)).all() and ((self.peaks >= 0) & (self.peaks <= 1)).all()):
            raise DataLossError(f"a {LatticeCodec.name} part has norms or peaks that no row has")
        if self.exception_points.size and int(np.abs(self.exception_points.astype(np.int32)).max()) > q_range:
            raise DataLossError(f"a {LatticeCodec.name} part has exceptions beyond Q = {q_range}")
        size = sum(cut.dim * _within(self.verbatim, cut.rows).size for cut in cuts) * geometry.itemsize
        if self.verbatim_values.nbytes != size:
            raise DataLossError(
                f"a {LatticeCodec.name} part has {self.verbatim_values.nbytes} bytes of verbatim rows, not {size}"
            )

    def points(self, cut: _Cut, q_range: int) -> QuantisedRows:
        """The rows of ``cut``.

        Raises:
            DataLossError: a code stands for no point.
        """
        width = code_width(q_range)
        codes = unpack(np.frombuffer(self.codes[cut.codes], np.uint8), cut.points.stop - cut.points.start, width)
        # Parity may still lead a fourth coordinate one step beyond Q: an odd value, but a finite one.
        if int(codes.max()) >= code_count(q_range):
            raise DataLossError(f"a {LatticeCodec.name} part has codes that stand for no point")
        first, last = np.searchsorted(self.exceptions, (cut.points.start, cut.points.stop))
        return QuantisedRows(
            norms=self.norms[cut.rows],
            peaks=self.peaks[cut.rows],
            codes=codes,
            exceptions=self.exceptions[first:last] - cut.points.start,
            exception_points=self.exception_points[first:last],
        )

    def restore_verbatim(self, values: npt.NDArray[np.generic], cuts: Sequence[_Cut]) -> None:
        """Put the verbatim rows into the payload's ``values``."""
        source = np.frombuffer(self.verbatim_values, values.dtype) if self.verbatim.size else values[:0]
        at = 0
        for cut in cuts:
            kept = _within(self.verbatim, cut.rows)
            size = kept.size * cut.dim
            values[cut.values].reshape(cut.count, cut.dim)[kept] = source[at : at + size].reshape(kept.size, cut.dim)
            at += size


def _within(indices: npt.NDArray[np.int64], span: slice) -> npt.NDArray[np.int64]:
    """The ascending ``indices`` that lie in ``span``, counted from its start."""
    first, last = np.searchsorted(indices, (span.start, span.stop))
    inside: npt.NDArray[np.int64] = indices[first:last] - span.start
    return inside


def _check_indices(indices: npt.NDArray[np.int64], end: int) -> None:
    if indices.size and not (int(indices[-1]) < end and bool((np.diff(indices) > 0).all())):
        raise DataLossError(f"a {LatticeCodec.name} part lists rows or points that do not exist, or out of order")
