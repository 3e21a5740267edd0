"""A bounded KV cache that keeps the first ``sink`` and the last ``window`` positions, at their true positions.

The query at position p attends to every position r <= p with r < sink or r > p - window. Keys keep the rotation of
their true position (nothing is rotated again), so what a layer stores does not depend on how the prompt was cut.

Why not the library's ``RotatingKVCache(max_size, keep)``: in chunked prefill it builds its mask on compacted positions,
so once rows were dropped the queries of a chunk no longer see the sinks, and how wrong that is depends on the chunk size.
Here the mask is built on absolute positions; every chunking agrees with token-by-token up to float rounding.

Storage: rows [0, sink) are the sinks; the rows behind them hold the latest positions. A prefill chunk leaves them in
temporal order (up to window - 1 + chunk rows, so that each query of the chunk had its whole window); decode trims to
exactly ``window`` rows and then overwrites the oldest one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import _BaseCache

from wire.errors import InvalidInput


class SinkWindowCache(_BaseCache):  # type: ignore[misc]
    """Drop-in for mlx-lm's ``KVCache`` (same calls, same ``offset``), bounded to sink + window rows while decoding.

    Args:
        sink: positions kept for ever, >= 0.
        window: latest positions kept, >= 1; the query's own position counts.

    Attributes:
        keys, values: (1, KV heads, allocated rows, dim) or None.
        offset: tokens seen so far, which is the position of the next one.
        rows: valid rows; ``oldest``: row of the oldest position behind the sinks (``sink`` when in temporal order).
    """

    step = 256

    def __init__(self, sink: int, window: int) -> None:
        if sink < 0 or window < 1:
            raise InvalidInput(f"sink must be >= 0 and window >= 1, not {sink} and {window}")
        self.sink = sink
        self.window = window
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self.rows = 0
        self.oldest = sink

    @property
    def capacity(self) -> int:
        """Rows kept while decoding."""
        return self.sink + self.window

    def stored_positions(self) -> npt.NDArray[np.int64]:
        """Absolute position of every valid row, in storage order."""
        sinks = min(self.sink, self.rows)
        ring = np.arange(self.offset - (self.rows - sinks), self.offset)
        return np.concatenate([np.arange(sinks), np.roll(ring, max(0, self.oldest - self.sink))])

    def _positions_after(self, count: int) -> npt.NDArray[np.int64]:
        """What :meth:`stored_positions` will be after ``count`` more tokens in one call."""
        new = np.arange(self.offset, self.offset + count)
        before = self.stored_positions()
        if count > 1:
            ordered = np.sort(before)
            return np.concatenate([ordered[: self.sink], ordered[self.sink :][self._kept_from(self.rows) :], new])
        if self.rows < self.capacity:
            return np.concatenate([before, new])
        if self.rows > self.capacity:  # after a prefill chunk: the decode step trims first
            before = np.concatenate([before[: self.sink], before[self.rows - self.window :]])
        before[self.oldest] = self.offset
        return before

    def _kept_from(self, rows: int) -> int:
        """First row behind the sinks, counted from ``sink``, that a following chunk's first query still sees."""
        return max(0, rows - self.sink - (self.window - 1))

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask for the next ``N`` tokens over the rows that :meth:`update_and_fetch` will return for them.

        Args:
            N: tokens about to be run.
            window_size: the layer's own sliding window, which applies on top; None for full attention.
            return_array: the model needs an array even where "causal" would do.

        Returns:
            None (everything visible), "causal", or a boolean array (N, rows).
        """
        everything_kept = self.offset + N <= self.capacity
        unlimited = window_size is None or self.offset + N <= window_size
        if N == 1 and unlimited:  # decode keeps exactly the rows it may see
            return None
        if everything_kept and unlimited and not return_array:
            return "causal"
        keys = self._positions_after(N)[None, :]
        queries = np.arange(self.offset, self.offset + N)[:, None]
        visible = (keys <= queries) & ((keys < self.sink) | (keys > queries - self.window))
        if window_size is not None:
            visible &= keys > queries - window_size
        return mx.array(visible)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append keys and values (1, KV heads, tokens, dim); returns all rows that the mask is about."""
        if keys.shape[2] == 1:
            self._write_one(keys, values)
        else:
            self._append_chunk(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        if self.rows < self.keys.shape[2]:
            return self.keys[..., : self.rows, :], self.values[..., : self.rows, :]
        return self.keys, self.values

    def _append_chunk(self, keys: Any, values: Any) -> None:
        count = keys.shape[2]
        if self.keys is None:
            self.keys, self.values = keys, values
            self.rows = count
        else:
            kept_from = self._kept_from(self.rows)
            self.keys = mx.concatenate([*self._ordered(self.keys, kept_from), keys], axis=2)
            self.values = mx.concatenate([*self._ordered(self.values, kept_from), values], axis=2)
            self.rows = self.keys.shape[2]
        self.offset += count
        self.oldest = self.sink

    def _ordered(self, rows: Any, skip: int) -> list[Any]:
        """The valid rows in temporal order without the ``skip`` oldest ones behind the sinks, as slices to join."""
        if self.rows <= self.sink:
            return [rows[..., : self.rows, :]]
        first = self.oldest + skip
        if first >= self.rows:  # the skipped rows reach over the ring's end
            return [rows[..., : self.sink, :], rows[..., self.sink + first - self.rows : self.oldest, :]]
        older = rows[..., first : self.rows, :]
        newer = rows[..., self.sink : self.oldest, :]
        return [rows[..., : self.sink, :], older, newer] if self.oldest > self.sink else [rows[..., : self.sink, :], older]

    def _write_one(self, keys: Any, values: Any) -> None:
        if self.rows > self.capacity:  # trim what a prefill chunk left over
            skip = self.rows - self.capacity
            self.keys = mx.concatenate(self._ordered(self.keys, skip), axis=2)
            self.values = mx.concatenate(self._ordered(self.values, skip), axis=2)
            self.rows = self.capacity
            self.oldest = self.sink
        if self.rows < self.capacity:
            if self.keys is None or self.rows == self.keys.shape[2]:
                self._grow(keys, values)
            row = self.rows
            self.rows += 1
        else:
            row = self.oldest
            self.oldest = self.oldest + 1 if self.oldest + 1 < self.capacity else self.sink
        self.keys[..., row : row + 1, :] = keys
        self.values[..., row : row + 1, :] = values
        self.offset += 1

    def _grow(self, keys: Any, values: Any) -> None:
        extra = min(self.step, self.capacity - self.rows)
        blank_keys = mx.zeros((*keys.shape[:2], extra, keys.shape[3]), keys.dtype)
        blank_values = mx.zeros((*values.shape[:2], extra, values.shape[3]), values.dtype)
        if self.keys is None:
            self.keys, self.values = blank_keys, blank_values
        else:
            self.keys = mx.concatenate([self.keys, blank_keys], axis=2)
            self.values = mx.concatenate([self.values, blank_values], axis=2)

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset, self.sink, self.window, self.rows, self.oldest

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.sink, self.window, self.rows, self.oldest = value

    def size(self) -> int:
        return self.rows

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return self.rows == self.offset

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens; only while nothing was dropped. Returns how many were forgotten."""
        if not self.is_trimmable():
            return 0
        n = min(self.offset, n)
        self.offset -= n
        self.rows -= n
        return n

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)
