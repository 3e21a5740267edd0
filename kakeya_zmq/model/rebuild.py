"""Puts caches together from parts, which may come one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.model.adapters import RowsAdapter, RowShape, Span
from kakeya_zmq.model.arrays import NUMPY_CODES, blank, finish, numpy_view
from wire.errors import DataLossError, InvalidInput
from wire.messages import PartKind

if TYPE_CHECKING:
    from kakeya_zmq.model.layout import CacheLayout


class Rebuild:
    """Caches being rebuilt at ``position``: add the needed parts in any order, then finish.

    Each row is copied once, into arrays that MLX allocated; :meth:`add` with a few megabytes at a time keeps steps short.

    Args:
        layout: the model's.
        position: tokens; the end of a block, >= 1.
    """

    def __init__(self, layout: CacheLayout, position: int) -> None:
        if position < 1:
            raise InvalidInput(f"cannot rebuild a cache at position {position}")
        self._layout = layout
        self.position = position
        self._caches = layout.new_caches()
        self._seen: set[tuple[PartKind, int]] = set()
        self._state: RawPart | None = None
        before = {PartKind.FULL: 0, PartKind.WINDOW: 0}
        self._plans: list[_Plan] = []
        for adapter, cache in layout.rows(self._caches):
            if adapter.keys is None or adapter.values is None:
                continue
            self._plans.append(_Plan(adapter, cache, adapter.keys, adapter.values, before[adapter.kind], position))
            before[adapter.kind] += adapter.token_bytes
        self._token_bytes = before
        mx.eval([array for plan in self._plans for array in plan.arrays])

    def add(self, parts: Sequence[RawPart]) -> None:
        """Copy the rows of ``parts`` that are needed.

        Raises:
            InvalidInput: a part overlaps an earlier one or lies beyond ``position``.
            DataLossError: a payload has another size than its tokens need.
        """
        for part in parts:
            self._check(part)
            if part.kind is PartKind.STATE:
                if part.start + part.token_count == self.position:
                    self._state = part
                continue
            for plan in self._plans:
                if plan.adapter.kind is part.kind:
                    plan.put(part)

    def finish(self) -> list[Any]:
        """The evaluated caches; this object must not be used afterwards.

        Raises:
            InvalidInput: parts are missing.
            DataLossError: the state checkpoint has another form than the model's.
        """
        for plan in self._plans:
            plan.check_complete()
        if self._layout.has_state:
            if self._state is None:
                raise InvalidInput(f"the state checkpoint at {self.position} is missing")
            self._layout.restore_states(self._caches, self._state)
        for plan in self._plans:
            plan.restore()
        mx.eval([array for plan in self._plans for array in (plan.cache.keys, plan.cache.values)])
        return self._caches

    def _check(self, part: RawPart) -> None:
        key = (part.kind, part.start)
        # Of rows only the first ones may be needed; a checkpoint is of one position.
        reach = part.start + (part.token_count if part.kind is PartKind.STATE else 1)
        if key in self._seen or part.token_count < 1 or reach > self.position:
            raise InvalidInput(f"a {part.kind.name} part at {part.start} comes twice or lies beyond {self.position}")
        self._seen.add(key)
        if part.kind is PartKind.STATE:
            return
        if not part.payload.nbytes:  # what the codec could not decode comes here like that (kakeya_zmq.codecs.engine)
            raise DataLossError(f"a {part.kind.name} part of {part.token_count} tokens is damaged: it cannot be decoded")
        expected_bytes = self._token_bytes[part.kind] * part.token_count
        if part.payload.nbytes != expected_bytes:
            raise DataLossError(
                f"a {part.kind.name} part of {part.token_count} tokens has {part.payload.nbytes} bytes, not {expected_bytes}"
            )


class _Plan:
    """One cache being rebuilt: its arrays, allocated by MLX and filled in place, so that rows are copied once."""

    def __init__(
        self, adapter: RowsAdapter, cache: Any, keys: RowShape, values: RowShape, token_offset: int, position: int
    ) -> None:
        self.adapter = adapter
        self.cache = cache
        self._shapes = (keys, values)
        self._token_offset = token_offset
        """Bytes of the group's earlier caches, for each token of a part."""
        self._position = position
        self._filled: list[Span] = []
        """Token ranges that have been copied."""
        self._rows = adapter.allocated_rows(position)
        self.arrays = [blank((1, shape.heads, self._rows, shape.dim), shape.dtype) for shape in self._shapes]
        self._targets: tuple[memoryview, ...] = ()
        """The arrays' bytes, once they exist."""

    def put(self, part: RawPart) -> None:
        """Copy the canonical rows of one part into the (evaluated) arrays.

        Raises:
            InvalidInput: some of its rows are there already.
        """
        if not self._targets:
            self._targets = tuple(numpy_view(array).view(np.uint8).data.cast("B") for array in self.arrays)
        row = 0
        for start, end in self.adapter.canonical(self._position):
            first, last = max(start, part.start), min(end, part.start + part.token_count)
            if first < last:
                self._claim(first, last)
                self._copy_in(part, (first - part.start, last - part.start), row + first - start)
            row += end - start

    def _claim(self, first: int, last: int) -> None:
        if any(start < last and first < end for start, end in self._filled):
            raise InvalidInput(f"a {self.adapter.kind.name} part at {first} overlaps another")
        self._filled.append((first, last))

    def check_complete(self) -> None:
        """Whether every canonical row has come.

        Raises:
            InvalidInput: a row is in none of the parts.
        """
        filled = sorted(self._filled)
        for start, end in self.adapter.canonical(self._position):
            for first, last in filled:
                if first <= start < last:
                    start = last
            if start < end:
                raise InvalidInput(f"the {self.adapter.kind.name} part that starts at or covers {start} is missing")

    def _copy_in(self, part: RawPart, wanted: Span, row: int) -> None:
        """Copy rows [begin, end) of the part to ``row`` and behind it, in each head.

        Byte views, not NumPy: a NumPy copy lets go of the GIL, and to get it back from the threads that receive takes longer
        than copying the few rows of a part.
        """
        at = self._token_offset * part.token_count
        begin, end = wanted
        for shape, target in zip(self._shapes, self._targets, strict=True):
            row_bytes = shape.row_bytes // shape.heads
            source_bytes, target_bytes = row_bytes * part.token_count, row_bytes * self._rows
            for head in range(shape.heads):
                source, to = at + head * source_bytes, head * target_bytes + row * row_bytes
                length = (end - begin) * row_bytes
                target[to : to + length] = part.payload[source + begin * row_bytes : source + end * row_bytes]
            at += shape.row_bytes * part.token_count

    def restore(self) -> None:
        keys, values = (finish(array, shape.dtype) for array, shape in zip(self.arrays, self._shapes, strict=True))
        self._targets = ()
        self.arrays = []  # so that the cache alone owns the memory and MLX can update it in place
        self.adapter.restore(self.cache, keys, values, self._position)


def payload_rows(payload: npt.NDArray[np.uint8], shape: RowShape, tokens: int) -> npt.NDArray[Any]:
    """A payload's stretch as (heads, tokens, dim), no copy."""
    return payload.view(NUMPY_CODES[shape.dtype]).reshape(shape.heads, tokens, shape.dim)
