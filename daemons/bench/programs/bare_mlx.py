"""Reference: mlx-lm alone, with the same model folder, BLAS and number of threads as ours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from daemons.bench.harness import serve
from kakeya_zmq.model.blas import prepare_blas

SEGMENT_TOKENS = 256
"""Prefill step. mlx-lm's own default, 2,048, is up to a tenth slower on a CPU: the reference gets the better one."""


class BareMlx:
    """The program's state: one loaded model."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, folder: str, threads: int) -> dict[str, object]:
        prepare_blas(threads)
        from mlx_lm.utils import load_model

        self._model, _ = load_model(Path(folder), lazy=False)
        self.prefill(list(range(2, 66)))  # a warm-up
        return {}

    def prefill(self, tokens: list[int]) -> dict[str, object]:
        """Compute the KV of all tokens but the last. ``wall_s``."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        prompt = mx.array(tokens[:-1])
        caches = make_prompt_cache(self._model)
        started = time.perf_counter()
        for start in range(0, prompt.size, SEGMENT_TOKENS):
            self._model(prompt[None, start : start + SEGMENT_TOKENS], cache=caches)
            mx.eval([cache.state for cache in caches])
        wall_s = time.perf_counter() - started
        mx.clear_cache()
        return {"wall_s": wall_s}

    def decode(self, tokens: list[int], max_tokens: int) -> dict[str, object]:
        """Greedy ``generate_step`` (what stream_generate runs, without its detokenizer); rate from the first token on."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        answered: list[int] = []
        first = last = 0.0
        for token, _ in generate_step(
            mx.array(tokens), self._model, max_tokens=max_tokens, prefill_step_size=SEGMENT_TOKENS
        ):
            last = time.perf_counter()
            first = first or last
            answered.append(int(token))
        return {"tokens": answered, "tokens_per_second": (len(answered) - 1) / (last - first)}


def main() -> None:
    program = BareMlx()
    serve({"load": program.load, "prefill": program.prefill, "decode": program.decode})


if __name__ == "__main__":
    main()
