"""Byte views of MLX arrays, through NumPy: no copy either way.

bfloat16 has no NumPy type and travels as its uint16 bits. All bytes are little-endian, as are all machines MLX runs on.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from wire.errors import ModelError

NUMPY_CODES: Final = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int8": "|i1",
    "uint8": "|u1",
    "bool": "|b1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
}
"""MLX type name to the NumPy type that holds its bits."""


def dtype_name(array: Any) -> str:
    """The array's MLX type by name.

    Raises:
        ModelError: a type that cannot be stored.
    """
    name = str(array.dtype).removeprefix("mlx.core.")
    if name not in NUMPY_CODES:
        raise ModelError(f"the model keeps KV state of type {name}, which cannot be stored")
    return name


def numpy_view(array: Any) -> npt.NDArray[Any]:
    """The memory of an evaluated MLX array as a NumPy array (bfloat16 as uint16), no copy.

    The view is only for immediate reading or filling: MLX may reuse the memory once the array has been updated.
    """
    name = dtype_name(array)
    if array.size == 0:
        return np.empty(array.shape, NUMPY_CODES[name])
    view = memoryview(array)
    if name != "bfloat16":
        return np.asarray(view)
    if view.c_contiguous:  # the common case; the other way costs an evaluation
        return np.frombuffer(view, "<u2").reshape(array.shape)
    bits = array.view(mx.uint16)
    mx.eval(bits)
    return np.asarray(memoryview(bits))


def blank(shape: tuple[int, ...], name: str) -> Any:
    """A zeroed MLX array, lazily, in the type that can be filled through :func:`numpy_view`; see :func:`finish`."""
    return mx.zeros(shape, mx.uint16 if name == "bfloat16" else getattr(mx, "bool_" if name == "bool" else name))


def finish(array: Any, name: str) -> Any:
    """A filled :func:`blank` array in its own type (the bits are shared, not copied)."""
    return array.view(mx.bfloat16) if name == "bfloat16" else array
