"""STATE parts: checkpoints of recurrent and convolution layers (mlx-lm's ArraysCache), which cannot be cut by token.

Payload, little-endian, all layers in list order: ``magic 4s, layers u16``, then for each layer ``arrays u16``, and for
each array ``dtype u8 (0 = absent, else 1 + index in NUMPY_CODES), rank u8, rank x u32``; then the arrays' bytes, C order,
in the same order. The header must agree with what the probe learned from the model, so a foreign or torn checkpoint is
refused before an array is made. A dimension that differed between the probe's lengths (a growing token context) is free.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from kakeya_zmq.model.arrays import NUMPY_CODES, blank, dtype_name, finish, numpy_view
from wire import limits
from wire.errors import DataLossError, ModelError

MAGIC: Final = b"KST1"
FREE: Final = -1
"""Marks a dimension that may differ between checkpoints."""
RANK_MAX: Final = 8
_NAMES: Final = tuple(NUMPY_CODES)


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of a checkpoint; ``FREE`` where a dimension varies."""

    dims: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Any) -> ArrayShape:
        return cls(dims=tuple(array.shape), dtype=dtype_name(array))

    @property
    def data_bytes(self) -> int:
        return math.prod(self.dims) * int(NUMPY_CODES[self.dtype][-1])

    def merged(self, other: ArrayShape) -> ArrayShape:
        """The shape both are instances of.

        Raises:
            ModelError: rank or type differ, so nothing could be checked.
        """
        if self.dtype != other.dtype or len(self.dims) != len(other.dims):
            raise ModelError("the model's recurrent state changes its type or rank with the prompt's length")
        return ArrayShape(tuple(a if a == b else FREE for a, b in zip(self.dims, other.dims, strict=True)), self.dtype)

    def admits(self, other: ArrayShape) -> bool:
        return (
            self.dtype == other.dtype
            and len(self.dims) == len(other.dims)
            and all(mine in (FREE, theirs) for mine, theirs in zip(self.dims, other.dims, strict=True))
        )

    def __str__(self) -> str:
        return "x".join("*" if dim == FREE else str(dim) for dim in self.dims) + f":{self.dtype}"


Shapes = tuple[ArrayShape | None, ...]
"""The arrays of one layer's checkpoint; None where the model keeps nothing."""


def shapes_of(cache: Any) -> Shapes:
    """Of one ArraysCache.

    Raises:
        ModelError: the cache belongs to a batch of padded prompts.
    """
    if cache.left_padding is not None or cache.lengths is not None:
        raise ModelError("recurrent state of padded batches cannot be stored")
    return tuple(None if array is None else ArrayShape.of(array) for array in cache.cache)


def merge_shapes(one: Shapes, other: Shapes) -> Shapes:
    """What two probes of different length have in common.

    Raises:
        ModelError: an array exists in one of them only, or changes its type or rank.
    """
    if [shape is None for shape in one] != [shape is None for shape in other]:
        raise ModelError("the model's recurrent state appears only at some prompt lengths")
    return tuple(a.merged(b) if a is not None and b is not None else None for a, b in zip(one, other, strict=True))


def packed_bytes(layers: Sequence[Shapes]) -> int:
    """Size of every checkpoint of these layers; 0 when it varies, or when there is no layer."""
    if not layers:
        return 0
    size = struct.calcsize("<4sH") + 2 * len(layers)
    for shape in (shape for layer in layers for shape in layer):
        if shape is None:
            size += 2
        elif FREE in shape.dims:
            return 0
        else:
            size += 2 + 4 * len(shape.dims) + shape.data_bytes
    return size


def pack(caches: Sequence[Any]) -> memoryview:
    """The checkpoint of all array caches (evaluated), as an immutable copy."""
    header = bytearray(struct.pack("<4sH", MAGIC, len(caches)))
    arrays: list[Any] = []
    for cache in caches:
        shapes = shapes_of(cache)
        header += struct.pack("<H", len(shapes))
        for shape, array in zip(shapes, cache.cache, strict=True):
            if shape is None:
                header += b"\0\0"
                continue
            header += struct.pack(f"<BB{len(shape.dims)}I", 1 + _NAMES.index(shape.dtype), len(shape.dims), *shape.dims)
            arrays.append(array)
    pieces = [bytes(header), *(numpy_view(array).tobytes() for array in arrays)]
    return memoryview(b"".join(pieces))


class _Reader:
    """Reads the header; anything short or odd is DataLossError."""

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(form, self.payload, self.at)
        except struct.error as error:
            raise DataLossError("a state checkpoint ends inside its header") from error
        self.at += struct.calcsize(form)
        return values

    def shape(self) -> ArrayShape | None:
        code, rank = self.take("<BB")
        if code == 0:
            return None
        if code > len(_NAMES) or rank > RANK_MAX:
            raise DataLossError("a state checkpoint names an unknown array type")
        return ArrayShape(dims=self.take(f"<{rank}I"), dtype=_NAMES[code - 1])


def _agree(expected: Shapes, found: Shapes) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and a.admits(b)) for a, b in zip(expected, found, strict=True)
    )


def unpack(payload: memoryview, expected: Sequence[Shapes]) -> list[list[Any]]:
    """The arrays of every layer's checkpoint (lazy where MLX is).

    Raises:
        DataLossError: the payload is not a checkpoint of this model.
    """
    reader = _Reader(payload)
    magic, layers = reader.take("<4sH")
    if magic != MAGIC or layers != len(expected):
        raise DataLossError("a state checkpoint belongs to another model")
    found: list[Shapes] = []
    for shapes in expected:
        (count,) = reader.take("<H")
        if count != len(shapes):
            raise DataLossError("a state checkpoint has another number of arrays than the model")
        found.append(tuple(reader.shape() for _ in range(count)))
        if not _agree(shapes, found[-1]):
            raise DataLossError("a state checkpoint has other array shapes than the model")
    data_bytes = sum(shape.data_bytes for layer in found for shape in layer if shape is not None)
    if data_bytes != payload.nbytes - reader.at or data_bytes > limits.PART_BYTES_MAX:
        raise DataLossError(f"a state checkpoint carries {payload.nbytes - reader.at} bytes instead of {data_bytes}")
    return [[_array(reader, shape) for shape in layer] for layer in found]


def _array(reader: _Reader, shape: ArrayShape | None) -> Any:
    if shape is None:
        return None
    array = blank(shape.dims, shape.dtype)
    if shape.data_bytes:
        mx.eval(array)
        source = np.frombuffer(reader.payload, NUMPY_CODES[shape.dtype], math.prod(shape.dims), reader.at)
        numpy_view(array)[...] = source.reshape(shape.dims)
        reader.at += shape.data_bytes
    return finish(array, shape.dtype)
