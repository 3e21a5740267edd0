"""D4 codec: against a slow independent version, brute force and, where it is installed, the kakeyalattice package."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import numpy.typing as npt
import pytest

from kakeya_zmq.codecs.bits import pack, packed_bytes, unpack
from kakeya_zmq.codecs.geometry import FINITE_MAX, RowGeometry
from kakeya_zmq.codecs.lattice import HEADER, LatticeCodec
from kakeya_zmq.codecs.lattice_kernel import NumpyLattice, code_count, code_width, sylvester_hadamard
from tests.unit.test_int8 import payload_of, values_of
from wire.errors import ConfigError, DataLossError, InvalidInput, ModelError, RemoteProtocolError

CODEC = LatticeCodec()
RANDOM_ROWS = np.random.default_rng(3).normal(size=(48, 64)).astype(np.float32)


class SmallSteps(NumpyLattice):
    values_at_once = 1


def roundtrip(rows: npt.ArrayLike, *, q_range: int = 38, dtype: str = "float32") -> npt.NDArray[np.float32]:
    """Rows (rows, dim) through the codec, as one tensor of one head."""
    values = np.asarray(rows, np.float32)
    geometry = RowGeometry(dtype, ((1, values.shape[1]),))
    codec = LatticeCodec(q_range)
    stored = codec.encode(payload_of(values, dtype), geometry, len(values))
    return values_of(codec.decode(stored, geometry, len(values)), dtype).reshape(values.shape)


def clipped_rows(count: int, dim: int, q_range: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Rows about half of which have an exception, and their rotations in units of the step.

    The first point of each has an odd sum and integer coordinates, of which the first is Q, the row's peak. If float16
    rounds the peak down, all are a little larger once scaled, the first by most: so it is the one that moves, beyond Q,
    and is clipped back.
    """
    points = np.random.default_rng(dim).integers(-(q_range // 2), q_range // 2 + 1, (count, dim)).astype(np.float64)
    points[:, 0] = q_range
    points[:, 1] += (points[:, :4].sum(axis=1) + 1) % 2
    steps = np.linspace(1, 2, count)[:, None]
    return (points * steps @ sylvester_hadamard(dim) / np.sqrt(dim)).astype(np.float32), points


def hadamard_entry(row: int, column: int) -> int:
    return -1 if (row & column).bit_count() % 2 else 1


def slow_points(row: npt.NDArray[np.float32], q_range: int) -> tuple[float, float, list[tuple[int, ...]]]:
    """Norm, peak and points of one row, value by value in double precision."""
    dim = len(row)
    norm = math.sqrt(sum(float(value) ** 2 for value in row))
    rotated = [sum(hadamard_entry(i, j) * float(row[i]) for i in range(dim)) / math.sqrt(dim) / norm for j in range(dim)]
    peak = float(np.float16(max(abs(value) for value in rotated)))
    scaled = [value * q_range / peak for value in rotated]
    points = []
    for four in zip(*[iter(scaled)] * 4, strict=True):
        nearest = [round(value) for value in four]
        if sum(nearest) % 2:
            errors = [value - integer for value, integer in zip(four, nearest, strict=True)]
            worst = max(range(4), key=lambda index: abs(errors[index]))
            nearest[worst] += 1 if errors[worst] >= 0 else -1
        points.append(tuple(max(-q_range, min(q_range, value)) for value in nearest))
    return float(np.float16(norm)), peak, points


def slow_code(point: tuple[int, ...], q_range: int) -> int:
    side = 2 * q_range + 1
    u = [value + q_range for value in point]
    return ((u[0] * side + u[1]) * side + u[2]) * (q_range + 1) + (u[3] >> 1)


def test_widths_are_those_of_the_formula() -> None:
    assert [(q, code_width(q)) for q in (37, 38, 44, 152)] == [(37, 24), (38, 25), (44, 25), (152, 33)]
    assert code_count(1) == 27 * 2


def test_the_rotation_is_orthonormal() -> None:
    matrix = sylvester_hadamard(64)
    assert matrix[:2, :2].tolist() == [[1, 1], [1, -1]]
    assert all(matrix[i, j] == hadamard_entry(i, j) for i in range(64) for j in range(64))
    assert (matrix @ matrix.T == 64 * np.eye(64)).all()


@pytest.mark.parametrize("width", [1, 7, 8, 24, 25, 31, 33, 36])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 8 * 2048 + 3])
def test_codes_are_packed_without_gaps_most_significant_bit_first(width: int, count: int) -> None:
    random = np.random.default_rng(width)
    codes = random.integers(0, 1 << width, count, np.uint64)
    codes[0] = (1 << width) - 1
    codes = codes.astype(np.uint32 if width <= 31 else np.uint64)
    packed = pack(codes, width)
    assert packed.size == packed_bytes(count, width)
    number = 0
    for code in codes.tolist()[:40]:
        number = number << width | code
    bits = width * min(count, 40)
    expected = (number << (-bits % 8)).to_bytes((bits + 7) // 8, "big")
    whole = bits // 8
    assert packed.tobytes()[:whole] == expected[:whole]
    assert (unpack(packed, count, width) == codes).all()


@pytest.mark.parametrize("q_range", [2, 38, 152])
@pytest.mark.parametrize("dim", [4, 16, 64])
def test_stored_bytes_are_those_of_the_slow_version(q_range: int, dim: int) -> None:
    rows = RANDOM_ROWS.reshape(-1, dim)[:22]
    stored = LatticeCodec(q_range).encode(payload_of(rows), RowGeometry("float32", ((2, dim),)), 11)
    slow = [slow_points(row, q_range) for row in rows]
    points = [point for _, _, row_points in slow for point in row_points]
    odd = [index for index, point in enumerate(points) if sum(point) % 2]
    number = 0
    for point in points:
        number = number << code_width(q_range) | (0 if sum(point) % 2 else slow_code(point, q_range))
    bits = code_width(q_range) * len(points)
    expected = (
        struct.pack("<3sBHHII", b"KD4", 1, q_range, 0, len(odd), 0)
        + np.array([norm for norm, _, _ in slow], "<f2").tobytes()
        + np.array([peak for _, peak, _ in slow], "<f2").tobytes()
        + (number << (-bits % 8)).to_bytes((bits + 7) // 8, "big")
        + np.array(odd, "<u4").tobytes()
        + np.array([points[index] for index in odd], "<i2").tobytes()
    )
    assert stored == expected


def test_points_are_the_nearest_of_the_lattice() -> None:
    """By search of the neighbourhood. The rows are made so that their peak is a known coordinate."""
    rows = np.random.default_rng(5).normal(size=(200, 4)).astype(np.float32)
    decoded = roundtrip(rows, q_range=10)
    matrix = sylvester_hadamard(4) / 2
    lattice = list(itertools.product((-1, 0, 1, 2), repeat=4))
    for row, found in zip(rows, decoded, strict=True):
        norm = np.linalg.norm(row)
        unit = row @ matrix / norm
        step = float(np.float16(np.abs(unit).max())) / 10
        scaled = unit / step
        base = np.floor(scaled)
        near = [base + point for point in lattice if (base.sum() + sum(point)) % 2 == 0]
        best = min(float(((scaled - point).clip(-99, 99) ** 2).sum()) for point in near)
        point = found / float(np.float16(norm)) @ matrix / step
        if np.abs(np.rint(point)).max() < 10:  # not clipped
            assert float(((scaled - np.rint(point)) ** 2).sum()) == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_and_size_at_the_default_range(dtype: str) -> None:
    rows = np.random.default_rng(2).normal(size=(128, 256)).astype(np.float32)
    geometry = RowGeometry(dtype, ((1, 256), (1, 256)))
    stored = CODEC.encode(payload_of(rows, dtype), geometry, 64)
    assert stored.nbytes == HEADER.size + 128 * (4 + 200)
    decoded = values_of(CODEC.decode(stored, geometry, 64), dtype).reshape(rows.shape)
    assert 1e-4 < ((rows - decoded) ** 2).sum() / (rows**2).sum() < 1e-3


def test_stored_bytes_do_not_depend_on_the_size_of_steps() -> None:
    geometry = RowGeometry("float32", ((2, 64), (1, 16), (3, 16), (1, 4), (1, 64)))
    values = np.random.default_rng(9).normal(size=geometry.channels * 11)
    values[:64], values[-64:] = 0, 1e9
    middle = (2 * 64 + 4 * 16 + 4) * 11
    values[middle : middle + 640] = clipped_rows(10, 64, 38)[0].reshape(-1)
    raw = payload_of(values)
    small_steps = LatticeCodec(38, SmallSteps())
    stored = small_steps.encode(raw, geometry, 11)
    assert stored == CODEC.encode(raw, geometry, 11)
    assert HEADER.unpack_from(stored)[4] > 2
    decoded = values_of(small_steps.decode(stored, geometry, 11))
    np.testing.assert_allclose(decoded, values_of(CODEC.decode(stored, geometry, 11)), rtol=1e-4, atol=1e-5)
    assert decoded[-64:].tolist() == values_of(raw)[-64:].tolist()


@pytest.mark.parametrize("q_range", [2, 38, 255])
def test_a_clipped_point_with_an_odd_sum_is_an_exception(q_range: int) -> None:
    rows, points = clipped_rows(400, 8, q_range)
    geometry = RowGeometry("float32", ((1, 8),))
    codec = LatticeCodec(q_range)
    stored = codec.encode(payload_of(rows), geometry, 400)
    count = HEADER.unpack_from(stored)[4]
    assert count > 100
    lists = HEADER.size + 400 * 4 + packed_bytes(800, code_width(q_range))
    indices = np.frombuffer(stored, "<u4", count, lists)
    assert (np.frombuffer(stored, "<i2", 4 * count, lists + 4 * count).reshape(-1, 4) == points[indices // 2, :4]).all()
    decoded = values_of(codec.decode(stored, geometry, 400)).reshape(400, 8)
    rotated = decoded @ sylvester_hadamard(8) / np.sqrt(8) / np.linspace(1, 2, 400)[:, None]
    assert np.abs(rotated - points)[indices // 2, :4].max() < q_range / 500


@pytest.mark.parametrize("shape", [(1, 64), (5, 4)])
def test_what_is_encoded_is_never_written_to(shape: tuple[int, int]) -> None:
    """In these shapes planes and rows lie alike in memory."""
    payload = memoryview(bytearray(payload_of(RANDOM_ROWS.reshape(-1)[: shape[0] * shape[1]])))
    before = bytes(payload)
    CODEC.encode(payload, RowGeometry("float32", ((1, shape[1]),)), shape[0])
    assert payload == before


def test_zero_rows_and_equal_distances() -> None:
    rows = np.zeros((6, 16), np.float32)
    rows[1, 3], rows[2, :] = -2.5, 1
    rows[4, :4] = 0.25
    decoded = roundtrip(rows)
    assert not decoded[[0, 3, 5]].any()
    np.testing.assert_allclose(decoded, rows, atol=0.1)


def test_norms_beyond_float16_are_kept_verbatim() -> None:
    rows = RANDOM_ROWS.copy()
    factors = {0: 1e5, 7: 3e38 / 8, 8: 1e-8, 21: 1e-42, 47: 1e20, 30: 8000.0}
    for row, factor in factors.items():
        rows[row] *= np.float32(factor) / np.abs(rows[row]).max()
    decoded = roundtrip(rows)
    for row in (0, 7, 8, 21, 47):
        assert (decoded[row] == rows[row]).all()
    np.testing.assert_allclose(decoded[30], rows[30], atol=8000 / 30)
    wide = roundtrip(np.full((4, 256), 65504.0), dtype="float16")
    assert (wide == 65504).all()


def test_a_reconstruction_is_never_infinite() -> None:
    rows = np.zeros((8, 64), np.float32)
    rows[:, 0] = 65472  # the largest float16 but two, with noise that may round it up
    rows[:, 1:] = np.random.default_rng(0).normal(size=(8, 63)) * 30
    decoded = roundtrip(rows, dtype="float16", q_range=2)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded).max() <= FINITE_MAX["float16"]


def test_what_packing_would_make_larger_is_stored_raw() -> None:
    geometry = RowGeometry("bfloat16", ((1, 8),))
    raw = payload_of(RANDOM_ROWS[0, :16] * 1e30, "bfloat16")
    stored = CODEC.encode(raw, geometry, 2)
    assert bytes(stored[:4]) == b"KD4\x00"
    assert CODEC.decode(stored, geometry, 2) == raw


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    rows = RANDOM_ROWS.copy()
    rows[5, 5] = bad
    with pytest.raises(InvalidInput, match="NaN or infinite"):
        CODEC.encode(rows.reshape(-1).view(np.uint8).data, RowGeometry("float32", ((1, 64),)), 48)


@pytest.mark.parametrize("dim", [1, 2, 6, 80, 192, 8192])
def test_dims_that_cannot_be_rotated_are_refused(dim: int) -> None:
    geometry = RowGeometry("float32", ((1, 64), (1, dim)))
    with pytest.raises(ModelError, match=f"not {dim}"):
        CODEC.check(geometry)
    with pytest.raises(ModelError):
        CODEC.encode(memoryview(bytes(geometry.raw_bytes(1))), geometry, 1)
    with pytest.raises(ModelError):
        CODEC.decode(memoryview(b""), geometry, 1)


@pytest.mark.parametrize("q_range", [0, -1, 256])
def test_ranges_out_of_bounds_are_refused(q_range: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and 255"):
        LatticeCodec(q_range)


def test_damaged_bytes_are_refused() -> None:
    geometry = RowGeometry("float32", ((1, 64),))
    rows = RANDOM_ROWS.copy()
    rows[3] *= np.float32(1e20)
    rows[10:20] = clipped_rows(10, 64, 2)[0]
    codec = LatticeCodec(2)
    stored = bytes(codec.encode(payload_of(rows), geometry, 48))
    exceptions = HEADER.unpack_from(stored)[4]
    lists = HEADER.size + 4 * 48 + packed_bytes(48 * 16, code_width(2))
    verbatim = lists + exceptions * 12
    assert exceptions > 1
    assert len(stored) == verbatim + 4 + 64 * 4

    def patched(at: int, data: bytes) -> bytes:
        return stored[:at] + data + stored[at + len(data) :]

    nan, negative, large, big = (struct.pack("<H", bits) for bits in (0x7E00, 0x8001, 0x7C00, 0x3C01))
    refused = {
        "empty": b"",
        "short": stored[:-1],
        "long": stored + b"\0",
        "magic": patched(0, b"X"),
        "mode": patched(3, b"\x02"),
        "another range": patched(4, b"\x03"),
        "reserved": patched(6, b"\x01"),
        "more exceptions": patched(8, struct.pack("<I", 0xFFFFFFFF)),
        "fewer exceptions": patched(8, struct.pack("<I", exceptions - 1)),
        "more verbatim": patched(12, struct.pack("<I", 2)),
        "norm NaN": patched(HEADER.size, nan),
        "norm negative": patched(HEADER.size, negative),
        "norm infinite": patched(HEADER.size, large),
        "peak above 1": patched(HEADER.size + 2 * 48, big),
        "no such code": patched(HEADER.size + 4 * 48, b"\xff\xff"),
        "no such point": patched(lists + 4 * (exceptions - 1), struct.pack("<I", 48 * 16)),
        "points out of order": patched(lists, struct.pack("<I", 48 * 16 - 1)),
        "point beyond range": patched(lists + 4 * exceptions, struct.pack("<h", 3)),
        "point far beyond": patched(lists + 4 * exceptions, struct.pack("<h", -32768)),
        "no such row": patched(verbatim, struct.pack("<I", 48)),
    }
    accepted = []
    for what, broken in refused.items():
        try:
            codec.decode(memoryview(broken), geometry, 48)
        except DataLossError:
            continue
        accepted.append(what)
    assert accepted == []
    with pytest.raises(RemoteProtocolError):
        codec.decode(memoryview(stored), geometry, 1 << 40)


@pytest.mark.parametrize(("dim", "q_range"), [(256, 38), (128, 38), (64, 152), (512, 10)])
def test_reconstruction_is_that_of_the_kakeyalattice_package(dim: int, q_range: int) -> None:
    reason = "the kakeyalattice package (it needs torch) is installed by requirements-kakeyalattice.txt"
    torch = pytest.importorskip("torch", reason=reason)
    package = pytest.importorskip("kakeyalattice", reason=reason)
    random = np.random.default_rng(dim)
    rows = (random.normal(size=(2000, dim)) * np.exp(random.normal(size=(1, dim)))).astype(np.float32)
    theirs = package.V14KakeyaZamirLatticeGPU(D=dim, q_range=q_range, device="cpu").roundtrip(torch.tensor(rows.tolist()))
    expected = np.array(theirs.tolist(), np.float32)
    ours = roundtrip(rows, q_range=q_range)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    same = (np.abs(ours - expected) <= 1e-5 * norms).all(axis=1)
    # Where float rounding decides between two points at equal distance, one of the row's coordinates differs by a step.
    assert same.mean() >= 0.99
    errors = [float(((rows - each) ** 2).sum()) for each in (ours, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)
