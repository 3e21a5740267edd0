"""What MLX keeps for reuse, given back to the machine."""

from __future__ import annotations

import sys


def give_back_reserve() -> None:
    """Free the buffers that MLX keeps for later allocations; nothing happens where MLX is not loaded. Any thread."""
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_cache()
