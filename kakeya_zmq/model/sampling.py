"""Sampling with a random state of its own for each decode, so that sessions can't disturb each other.

mlx-lm's samplers draw from MLX's global random state: two interleaved sessions would see each other's draws. Here the key
is explicit. For one seed the draws equal those of ``mx.random.seed(seed)`` followed by mlx-lm's ``make_sampler``: the same
filters in the same order, and one key split for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_k, apply_top_p

from kakeya_zmq.engine import Sampling
from wire.errors import InvalidInput

SEED_END = 2**64
"""MLX keys are made from 64 bits."""


def check_sampling(sampling: Sampling) -> None:
    """Refuse values outside their range.

    Raises:
        InvalidInput: which field is wrong, with the number.
    """
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidInput(f"temperature must be at least 0, not {sampling.temperature}")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidInput(f"top_p must be between 0 and 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise InvalidInput(f"top_k must be at least 0, not {sampling.top_k}")
    if sampling.seed is not None and not 0 <= sampling.seed < SEED_END:
        raise InvalidInput(f"seed must be at least 0 and below 2^64, not {sampling.seed}")


TEMPERATURE_MIN = 1e-6
"""Below it sampling is greedy in all but name, and scaled log probabilities would leave float32's range."""


class TokenSampler:
    """Draws one token from log probabilities; holds the random key of one decode.

    Args:
        sampling: checked by :func:`check_sampling`.
        fresh_seed: gives the seed when the sampling names none.
    """

    def __init__(self, sampling: Sampling, *, fresh_seed: Callable[[], int]) -> None:
        self._sampling = sampling
        self._key: mx.array | None = None
        if sampling.temperature >= TEMPERATURE_MIN:
            self._key = mx.random.key(sampling.seed if sampling.seed is not None else fresh_seed() % SEED_END)

    def __call__(self, log_probabilities: mx.array) -> mx.array:
        """Draw.

        Args:
            log_probabilities: (1, vocabulary), any float dtype.

        Returns:
            (1,) unsigned integers, not evaluated.
        """
        if self._key is None:
            return mx.argmax(log_probabilities, axis=-1)
        values = log_probabilities
        if 0 < self._sampling.top_p < 1:
            values = apply_top_p(values, self._sampling.top_p)
        # mlx-lm raises when top_k covers the whole vocabulary, where it has nothing to do.
        if 0 < self._sampling.top_k < values.shape[-1]:
            values = apply_top_k(values, self._sampling.top_k)
        self._key, draw_key = mx.random.split(self._key)
        return mx.random.categorical(values * (1.0 / self._sampling.temperature), key=draw_key)
