"""What a codec must know of a part's rows: their type, heads and dims; and float32 views of them.

A FULL or WINDOW payload is, for each tensor of the group (each cache's K, then its V), (heads, tokens, dim) in C order.
bfloat16 has no NumPy type and is handled as its uint16 bits. All bytes are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from wire.errors import InvalidInput
from wire.limits import PART_BYTES_MAX

Float32Array = npt.NDArray[np.float32]
ROW_TYPES: Final = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""Row types a lossy codec can take, and the NumPy type that holds their bits."""
FINITE_MAX: Final = {
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
}
"""Largest finite value of each type; what a reconstruction is limited to, so that it never becomes an infinity."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tensors with one dim: ``heads`` of all of them together, rows of ``dim`` values."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """The rows of one part kind of one model.

    Args:
        dtype: "float32", "float16" or "bfloat16", of every tensor.
        tensors: (heads, dim) of each, in payload order.

    Raises:
        InvalidInput: another type, no tensor, or a size below 1.
    """

    dtype: str
    tensors: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.dtype not in ROW_TYPES:
            raise InvalidInput(f"rows of type {self.dtype} cannot be encoded, only {', '.join(ROW_TYPES)}")
        if not self.tensors or min(min(tensor) for tensor in self.tensors) < 1:
            raise InvalidInput("a row geometry needs at least one tensor, and heads and dims of at least 1")

    @property
    def itemsize(self) -> int:
        return int(ROW_TYPES[self.dtype][-1])

    @property
    def channels(self) -> int:
        """Values of one token."""
        return sum(heads * dim for heads, dim in self.tensors)

    def raw_bytes(self, tokens: int) -> int:
        """Bytes of a part's payload.

        Raises:
            InvalidInput: no tokens, or more bytes than a part may have.
        """
        size = self.channels * self.itemsize * tokens
        if tokens < 1 or size > PART_BYTES_MAX:
            raise InvalidInput(f"a part of {tokens} tokens and {size} bytes cannot be encoded")
        return size

    def runs(self) -> Iterator[Run]:
        """Maximal stretches of tensors with equal dim; in a payload each is one C-ordered array (heads, tokens, dim)."""
        heads, dim = 0, self.tensors[0][1]
        for tensor_heads, tensor_dim in self.tensors:
            if tensor_dim != dim:
                yield Run(heads, dim)
                heads, dim = 0, tensor_dim
            heads += tensor_heads
        yield Run(heads, dim)


def checked_payload(raw: memoryview, geometry: RowGeometry, tokens: int) -> npt.NDArray[np.generic]:
    """The payload's values, flat, in the type that holds their bits; no copy.

    Raises:
        InvalidInput: the payload has another size than ``tokens`` rows have.
    """
    expected = geometry.raw_bytes(tokens)
    if raw.nbytes != expected:
        raise InvalidInput(f"a payload of {tokens} tokens has {raw.nbytes} bytes, not {expected}")
    return np.frombuffer(raw, ROW_TYPES[geometry.dtype])


def widen(values: npt.NDArray[np.generic], dtype: str) -> Float32Array:
    """The values as float32: exact for every row type; no copy of float32."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrow(values: Float32Array, dtype: str, out: npt.NDArray[np.generic]) -> None:
    """Write finite float32 ``values`` to ``out``, rounded to nearest even and limited to the type's finite range."""
    limit = FINITE_MAX[dtype]
    if dtype != "float32" and max(float(values.max()), -float(values.min())) > limit:
        values = np.clip(values, -limit, limit)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        np.copyto(out, rounded, casting="unsafe")
    else:
        np.copyto(out, values, casting="same_kind")
