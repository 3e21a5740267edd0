"""Taking back the last one-token step of a cache list.

Decoding launches the step of a token before it is known whether that token is wanted (it may be the end of the text, or
the request is cancelled), because otherwise the processor idles while Python builds the next graph. An unwanted step is
taken back here, exactly: every later result is what it would be without it.

How, by cache class:

- rows that only grow (``KVCache``, ``ChunkedKVCache``): move the end back; the row is
  overwritten later.
- ring of the last ``max_size`` rows (``RotatingKVCache``): move the write index back. The step has overwritten the row
  ``max_size`` positions before it, which no later query can see; but the ring still counts it as held, so
  :func:`take_back` names it, and it must not be exported.
- sinks and a ring of the last ``window`` rows (``SinkWindowCache``): the same.
- recurrent state (``ArraysCache``): models put new arrays in and never write into old ones: keep the old ones.
- ``CacheList``: each member.

For any other class there is no undo, and the engine decodes without launching ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from kakeya_zmq.model.sink_window import SinkWindowCache

Mark: TypeAlias = list[Any]
"""What :func:`take_back` needs of the caches before the step; opaque."""

GROWING_CLASSES = (KVCache, ChunkedKVCache)


def can_take_back(caches: Sequence[Any]) -> bool:
    """Whether every cache's last one-token step can be taken back."""
    for cache in caches:
        # Exact classes: a subclass may keep more state than its parent.
        kind = type(cache)
        if kind is CacheList:
            if not can_take_back(cache.caches):
                return False
        elif kind is RotatingKVCache:
            if cache.keep != 0:
                return False
        elif kind not in (ArraysCache, SinkWindowCache, *GROWING_CLASSES):
            return False
    return True


def mark(caches: Sequence[Any]) -> Mark:
    """Remember what a step replaces; costs no copies."""
    marks: Mark = []
    for cache in caches:
        if type(cache) is ArraysCache:
            marks.append((list(cache.cache), cache.left_padding, cache.lengths))
        elif type(cache) is CacheList:
            marks.append(mark(cache.caches))
        elif type(cache) is SinkWindowCache:
            marks.append((cache.rows, cache.oldest))
        else:
            marks.append(None)
    return marks


def take_back(caches: Sequence[Any], before: Mark) -> frozenset[int]:
    """Undo exactly one one-token step that ran after ``before`` was marked.

    Returns:
        Positions of rows that a ring still counts as held although the step destroyed them.
    """
    destroyed: set[int] = set()
    for cache, remembered in zip(caches, before, strict=True):
        kind = type(cache)
        if kind is CacheList:
            destroyed |= take_back(cache.caches, remembered)
        elif kind is ArraysCache:
            cache.cache, cache.left_padding, cache.lengths = remembered
        elif cache.keys is None:
            continue  # the model has this cache but never uses it
        elif kind is RotatingKVCache:
            cache.offset -= 1
            cache._idx -= 1
            if cache.offset >= cache.max_size:
                destroyed.add(cache.offset - cache.max_size)
        elif kind is SinkWindowCache:
            destroyed |= _take_back_sink_window(cache, *remembered)
        else:
            cache.trim(1)
    return frozenset(destroyed)


def _take_back_sink_window(cache: SinkWindowCache, rows_before: int, oldest_before: int) -> set[int]:
    cache.offset -= 1
    if rows_before < cache.capacity:
        cache.rows -= 1
        return set()
    # A step after a prefill chunk first trims the rows to the ring and puts them in temporal order.
    cache.oldest = oldest_before if rows_before == cache.capacity else cache.sink
    return {cache.offset - cache.window}
