"""Where a decoder writes: the caller's buffer, or a new one; and how much, checked first."""

from __future__ import annotations

import numpy as np

from kakeya_zmq.codecs.geometry import RowGeometry
from wire.errors import InvalidInput, LocalProtocolError, RemoteProtocolError


def output_buffer(out: memoryview | None, size: int) -> memoryview:
    """``out`` if it is given and fits, else a new buffer of ``size`` bytes (not zeroed).

    Raises:
        LocalProtocolError: ``out`` is read-only, not contiguous bytes, or of another size.
    """
    if out is None:
        return np.empty(size, np.uint8).data
    if out.readonly or not out.c_contiguous or out.itemsize != 1 or out.nbytes != size:
        raise LocalProtocolError(f"a decoder needs a writable buffer of exactly {size} bytes, not {out.nbytes}")
    return out


def claimed_bytes(geometry: RowGeometry, tokens: int) -> int:
    """Payload bytes of a part that a peer says has ``tokens`` tokens.

    Raises:
        RemoteProtocolError: no part has so many.
    """
    try:
        return geometry.raw_bytes(tokens)
    except InvalidInput as error:
        raise RemoteProtocolError(error.message) from None
