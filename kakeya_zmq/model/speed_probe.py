"""``python -m kakeya_zmq.model.speed_probe``: how fast MLX multiplies matrices here, as one JSON object a line."""

from __future__ import annotations

import json
import time
from typing import Final

from kakeya_zmq.model.blas import prepare_blas

SIZE: Final = 768
RUNS: Final = 4


def probe(threads: int = 1) -> dict[str, object]:
    """Measure float32 products of square matrices; the best of some runs, in GFLOP/s."""
    report = prepare_blas(threads)
    import mlx.core as mx

    left, right = mx.random.normal((SIZE, SIZE)), mx.random.normal((SIZE, SIZE))
    mx.eval(left, right, left @ right)
    best_s = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        mx.eval(left @ right)
        best_s = min(best_s, time.perf_counter() - started)
    return {
        "device": str(mx.default_device()),
        "gigaflops": 2 * SIZE**3 / best_s / 1e9,
        "threads": threads,
        "blas": report.version,
        "warning": report.warning,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
