"""What the references move: the same made-up bytes in both of their processes, without moving them first."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from wire.limits import MIB

MESSAGE_BYTES = MIB
STREAM_CHUNK_BYTES = 2 * MIB
"""The earlier system's chunk, for gRPC and Redis."""


@lru_cache
def pieces(total_bytes: int, piece_bytes: int) -> tuple[memoryview, ...]:
    """``total_bytes`` of one arena in pieces; made once, so that a clock may run around later calls."""
    arena = np.random.default_rng(2).integers(0, 256, size=total_bytes, dtype=np.uint8).data.toreadonly()
    return tuple(arena[at : at + piece_bytes] for at in range(0, total_bytes, piece_bytes))
