"""What each mlx-lm cache class can do: which token rows it holds, where they lie, and how to put them back.

One adapter for one cache object of a model, chosen by the object's *exact* class: a subclass may store something else.
Written against mlx-lm 0.32.2. Sliceable caches give FULL parts, windowed, chunked and sink+window caches WINDOW parts,
array caches STATE parts (see kakeya_zmq.model.state); composites are flattened into their members.

A cache's *canonical rows* at position p are those that a rebuilt cache holds: all of them (sliceable), or the last
min(p, window) ones in temporal order (windowed, chunked), plus the sinks. Continuing from the canonical rows is bitwise
the same as continuing the run that was never interrupted, because the library itself drops everything older before the
next token is run. One exception: a ring that has wrapped while decoding is rebuilt in temporal order, so the attention of
the following decode steps sums in another order, which differs by float rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kakeya_zmq.model.arrays import NUMPY_CODES, dtype_name
from kakeya_zmq.model.sink_window import SinkWindowCache
from wire.errors import ModelError
from wire.messages import PartKind

Span = tuple[int, int]
"""Half-open range: of absolute token positions, or of stored rows."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """One token's row of one array: (heads, dim) in ``dtype`` (MLX type name)."""

    heads: int
    dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return int(NUMPY_CODES[self.dtype][-1])

    @property
    def row_bytes(self) -> int:
        return self.heads * self.dim * self.itemsize

    @classmethod
    def of(cls, array: Any) -> RowShape:
        """Of an array (1, heads, rows, dim).

        Raises:
            ModelError: the array has another form.
        """
        if array.ndim != 4 or array.shape[0] != 1:
            raise ModelError(f"the model keeps keys or values of shape {tuple(array.shape)}, not (1, heads, rows, dim)")
        return cls(heads=array.shape[1], dim=array.shape[3], dtype=dtype_name(array))

    def __str__(self) -> str:
        return f"{self.heads}x{self.dim}:{self.dtype}"


class RowsAdapter(ABC):
    """A cache that stores one K and one V row a token."""

    kind: ClassVar[PartKind]

    def __init__(self, cache: Any) -> None:
        """``cache``: a fresh one; :meth:`learn` completes the adapter after the model has run."""
        self.keys: RowShape | None = None
        self.values: RowShape | None = None

    def learn(self, cache: Any) -> None:
        """Take the row shapes from a cache that has seen a token; a cache the model never fills stays unused."""
        if cache.keys is not None:
            self.keys, self.values = RowShape.of(cache.keys), RowShape.of(cache.values)

    @property
    def used(self) -> bool:
        return self.keys is not None

    @property
    def token_bytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.row_bytes + self.values.row_bytes

    @property
    def window_tokens(self) -> int:
        """Positions before p that must be there to continue at p; 0 when all must."""
        return 0

    @property
    def sink_tokens(self) -> int:
        return 0

    @abstractmethod
    def describe(self) -> str:
        """Class and bounds, canonical: part of the layer geometry."""

    @abstractmethod
    def spans(self, cache: Any, start: int, end: int) -> list[Span] | None:
        """Stored rows of the tokens [start, end), in temporal order; None when the cache no longer holds them all."""

    def canonical(self, position: int) -> list[Span]:
        """Token ranges that a cache rebuilt at ``position`` holds, in storage order."""
        sinks = min(self.sink_tokens, position)
        first = max(sinks, position - self.window_tokens)
        return [(0, position)] if first == sinks else [(0, sinks), (first, position)] if sinks else [(first, position)]

    def allocated_rows(self, position: int) -> int:
        """Rows to allocate for a cache rebuilt at ``position``."""
        return sum(end - start for start, end in self.canonical(position))

    def restore(self, cache: Any, keys: Any, values: Any, position: int) -> None:
        """Make a fresh ``cache`` stand at ``position`` with the canonical rows in ``keys`` and ``values``."""
        cache.keys, cache.values, cache.offset = keys, values, position


def _ring_spans(first_row: int, lower: int, upper: int, skip: int, count: int) -> list[Span]:
    """``count`` rows from the ``skip``-th after ``first_row`` on, in a ring that occupies the rows [lower, upper)."""
    begin = lower + (first_row - lower + skip) % (upper - lower)
    straight = min(count, upper - begin)
    wrapped = (lower, lower + count - straight)
    return [(begin, begin + straight), wrapped] if straight < count else [(begin, begin + straight)]


class SliceableAdapter(RowsAdapter):
    """KVCache: every token's row, in order."""

    kind = PartKind.FULL

    def describe(self) -> str:
        return "sliceable"

    def spans(self, cache: Any, start: int, end: int) -> list[Span] | None:
        return [(start, end)] if end <= cache.offset else None

    def canonical(self, position: int) -> list[Span]:
        return [(0, position)]

    def allocated_rows(self, position: int) -> int:
        # One step's room beyond the last row, as the library allocates, or the next token would copy everything.
        step: int = KVCache.step
        return (position // step + 1) * step


class WindowedAdapter(RowsAdapter):
    """RotatingKVCache without kept rows: temporal order after a prefill chunk, a ring after decode steps."""

    kind = PartKind.WINDOW

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        if cache.keep != 0:
            raise ModelError(
                f"RotatingKVCache with keep={cache.keep} is not supported: it loses its kept tokens in chunked prefill",
                remedy="use --kv-policy sink-window for a bounded cache",
            )
        self._window = int(cache.max_size)

    @property
    def window_tokens(self) -> int:
        return self._window

    def describe(self) -> str:
        return f"windowed({self._window})"

    def spans(self, cache: Any, start: int, end: int) -> list[Span] | None:
        if cache.keys is None:
            return None
        rows = min(cache.offset, cache.keys.shape[2])
        first = cache.offset - rows
        if start < first or end > cache.offset:
            return None
        oldest = cache._idx if cache._idx < rows else 0
        return _ring_spans(oldest, 0, rows, start - first, end - start)

    def restore(self, cache: Any, keys: Any, values: Any, position: int) -> None:
        super().restore(cache, keys, values, position)
        cache._idx = keys.shape[2]


class ChunkedAdapter(RowsAdapter):
    """ChunkedKVCache: temporal order from ``start_position`` on; trimmed to one chunk before the next token is run."""

    kind = PartKind.WINDOW

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._chunk = int(cache.chunk_size)

    @property
    def window_tokens(self) -> int:
        return self._chunk

    def describe(self) -> str:
        return f"chunked({self._chunk})"

    def spans(self, cache: Any, start: int, end: int) -> list[Span] | None:
        if start < cache.start_position or end > cache.offset:
            return None
        return [(start - cache.start_position, end - cache.start_position)]

    def restore(self, cache: Any, keys: Any, values: Any, position: int) -> None:
        super().restore(cache, keys, values, position)
        cache.start_position = position - min(position, self._chunk)


class SinkWindowAdapter(RowsAdapter):
    """Our own SinkWindowCache: the sinks, then a ring of the latest rows."""

    kind = PartKind.WINDOW

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._sink, self._window = int(cache.sink), int(cache.window)

    @property
    def window_tokens(self) -> int:
        return self._window

    @property
    def sink_tokens(self) -> int:
        return self._sink

    def describe(self) -> str:
        return f"sink-window({self._sink},{self._window})"

    def spans(self, cache: Any, start: int, end: int) -> list[Span] | None:
        if end > cache.offset:
            return None
        sinks = min(self._sink, cache.rows)
        tail = cache.rows - sinks
        first = cache.offset - tail
        in_sinks = [(start, min(end, sinks))] if start < sinks else []
        start = max(start, sinks)
        if start >= end:
            return in_sinks
        if start < first:
            return None
        return in_sinks + _ring_spans(max(cache.oldest, sinks), sinks, cache.rows, start - first, end - start)

    def restore(self, cache: Any, keys: Any, values: Any, position: int) -> None:
        super().restore(cache, keys, values, position)
        cache.rows = keys.shape[2]
        cache.oldest = self._sink


ROWS_ADAPTERS: Final[Mapping[type, type[RowsAdapter]]] = {
    KVCache: SliceableAdapter,
    RotatingKVCache: WindowedAdapter,
    ChunkedKVCache: ChunkedAdapter,
    SinkWindowCache: SinkWindowAdapter,
}
"""The registry: exact class to adapter. ArraysCache and CacheList are handled by the layout."""


def leaves(caches: Iterable[Any]) -> list[Any]:
    """The caches in list order, composites replaced by their members."""
    found: list[Any] = []
    for cache in caches:
        found.extend(leaves(cache.caches) if type(cache) is CacheList else [cache])
    return found


def unsupported(cache: Any) -> ModelError:
    """The refusal of a cache object that is neither in the registry nor an ArraysCache."""
    if type(cache) is QuantizedKVCache:
        return ModelError("a quantized KV cache cannot be shared", remedy="load the model without KV quantization")
    return ModelError(
        f"the model's cache class {type(cache).__name__} is not supported",
        remedy="this model can only be used without the fleet's cache",
    )


def is_state(cache: Any) -> bool:
    """Whether the cache is a checkpoint of recurrent or convolution state."""
    return type(cache) is ArraysCache
