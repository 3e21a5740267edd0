"""How one model's KV state is cut into parts of whole blocks, and put together again at any boundary.

Payload of a FULL or WINDOW part: for each cache of that kind, in the order of the model's cache list (composites
flattened), its K rows and then its V rows, each (KV heads, tokens, dim) in C order in the cache's own type; a model's
latent or shared layouts (MLA, k = v) are simply the shapes its arrays have. Payload of a STATE part: see
kakeya_zmq.model.state.

The layout is learned from the model itself: the caches it makes, and one or two tokens traced through it on fresh caches.
Nothing is evaluated for that, because MLX knows shapes and types of arrays that were never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.codecs.geometry import RowGeometry
from kakeya_zmq.model import state
from kakeya_zmq.model.adapters import ROWS_ADAPTERS, RowsAdapter, Span, is_state, leaves, unsupported
from kakeya_zmq.model.arrays import numpy_view
from kakeya_zmq.model.policy import CachePolicy
from kakeya_zmq.model.rebuild import Rebuild, payload_rows
from kakeya_zmq.model.sink_window import SinkWindowCache
from wire.errors import InvalidInput, LocalProtocolError, ModelError
from wire.messages import PartKind, Requirement

PROBE_LENGTHS: Final = (1, 2, 5)
"""Tokens of each probe: lengths that tell growing recurrent state from constant one."""


def bounded_caches(policy: CachePolicy, caches: Sequence[Any]) -> list[Any]:
    """The model's own caches under a policy.

    Full-attention caches become sink+window caches. Sliding layers keep their own, narrower window; a wider one is
    narrowed, without sinks, since the layer never had any. Chunked and recurrent layers are bounded already.
    """
    return [_bounded(policy, cache) for cache in caches] if policy.bounded else list(caches)


def _bounded(policy: CachePolicy, cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_bounded(policy, member) for member in cache.caches))
    if type(cache) is KVCache:
        return SinkWindowCache(policy.sink_tokens, policy.window_tokens)
    if type(cache) is RotatingKVCache and cache.max_size > policy.window_tokens:
        return SinkWindowCache(0, policy.window_tokens)
    return cache


class CacheLayout:
    """How one model's KV state is split into parts. Built once per loaded model; holds no session's state.

    Args:
        model: an mlx-lm model (callable with ``cache=``).
        block_tokens: tokens of a full block.
        policy: the caches to run with.

    Attributes:
        requirement: which parts a prefix needs.
        geometry: canonical text of every cache: kind and bounds, heads, K and V dims, types.
        kv_dtype: type of the state, e.g. "bfloat16"; several are sorted and joined with "+".
        part_bytes_per_token: bytes of one token in a FULL and in a WINDOW part; bytes of a whole STATE part.
        state_part_bytes: exact size of a STATE part; 0 when it varies, or there is none.
        tracks_position: whether the caches know how many tokens they hold; false when all of them are recurrent.

    Raises:
        ModelError: a cache class is not supported, by name, or the model's state cannot be stored.
    """

    requirement: Requirement
    geometry: str
    kv_dtype: str
    part_bytes_per_token: tuple[int, int, int]
    state_part_bytes: int
    tracks_position: bool

    def __init__(self, model: Any, *, block_tokens: int, policy: CachePolicy) -> None:
        self._model = model
        self._policy = policy
        fresh = leaves(self.new_caches())
        self._adapters: list[RowsAdapter | None] = [self._adapter(cache) for cache in fresh]
        self._classes = [type(cache) for cache in fresh]
        self._state_shapes: list[state.Shapes] = []
        self._probe()
        used = self._used()
        if not used and not self._state_shapes:
            raise ModelError("the model keeps no KV state that could be shared")
        windows = [adapter for adapter in used if adapter.kind is PartKind.WINDOW]
        self.tracks_position = bool(used)
        self.requirement = Requirement(
            block_tokens=block_tokens,
            full=any(adapter.kind is PartKind.FULL for adapter in used),
            window_tokens=max((adapter.window_tokens for adapter in windows), default=0),
            sink_tokens=max((adapter.sink_tokens for adapter in windows), default=0),
            state=bool(self._state_shapes),
        )
        self.geometry = self._describe()
        self.kv_dtype = "+".join(sorted(set(self._types())))
        self.part_bytes_per_token = (
            self._token_bytes(PartKind.FULL),
            self._token_bytes(PartKind.WINDOW),
            self._state_bytes,
        )
        self.state_part_bytes = state.packed_bytes(self._state_shapes)

    def row_geometry(self, kind: PartKind) -> RowGeometry | None:
        """Shapes of the rows in the payload of a ``kind`` part; None when it has none (STATE, or no such layer).

        Raises:
            ModelError: the rows are of several types, or of one that no codec takes.
        """
        shapes = [shape for each in self._used() if each.kind is kind for shape in (each.keys, each.values)]
        rows = [shape for shape in shapes if shape is not None]
        if not rows:
            return None
        types = "+".join(sorted({shape.dtype for shape in rows}))
        try:
            return RowGeometry(dtype=types, tensors=tuple((shape.heads, shape.dim) for shape in rows))
        except InvalidInput as error:
            raise ModelError(error.message) from None

    # --- what the engine asks -----------------------------------------------------------------------------------

    def new_caches(self) -> list[Any]:
        """Empty caches in the form the model expects, under the policy."""
        return bounded_caches(self._policy, make_prompt_cache(self._model))

    def position(self, caches: Sequence[Any]) -> int:
        """Tokens the caches hold.

        Raises:
            ModelError: the model has recurrent layers only, which do not know (see ``tracks_position``).
            LocalProtocolError: the caches stand at different positions.
        """
        if not self.tracks_position:
            raise ModelError("this model's caches do not know their position")
        offsets = {int(cache.offset) for adapter, cache in self.rows(caches) if adapter.used}
        if len(offsets) != 1:
            raise LocalProtocolError(f"the model's caches stand at {len(offsets)} different positions")
        return offsets.pop()

    def kv_bytes(self, caches: Sequence[Any]) -> int:
        """Memory of the caches in bytes, with what they allocated ahead."""
        return sum(int(cache.nbytes) for cache in leaves(caches) if not cache.empty())

    def export(
        self, caches: Sequence[Any], start: int, token_count: int, *, position: int | None = None
    ) -> tuple[RawPart, ...]:
        """The parts of the tokens [start, start + token_count) that the caches still hold completely, sorted by kind.

        Meant for one block at a time, soon after it was computed: windowed layers drop old rows with the next segment,
        and a STATE part is given only when the caches stand exactly at the end of the range. Payloads are copies: later
        updates don't reach them.

        Args:
            caches: those of a session.
            start: token position.
            token_count: tokens, >= 1.
            position: where the caches stand, for models without ``tracks_position``; without it the caller vouches that
                they stand at the end of the range. Other models' caches know.

        Raises:
            InvalidInput: the range is empty or negative.
        """
        if start < 0 or token_count < 1:
            raise InvalidInput(f"cannot export {token_count} tokens from {start} on")
        rows = self.rows(caches)
        states = self._states(caches)
        end = start + token_count
        mx.eval([array for _, cache in rows if cache.keys is not None for array in (cache.keys, cache.values)])
        parts: list[RawPart] = []
        for kind in (PartKind.FULL, PartKind.WINDOW):
            payload = self._export_rows([(a, c) for a, c in rows if a.used and a.kind is kind], start, end)
            if payload is not None:
                parts.append(RawPart(kind=kind, start=start, token_count=token_count, payload=payload))
        if self.tracks_position:
            position = self.position(caches)
        if states and position in (None, end):
            mx.eval([array for cache in states for array in cache.cache if array is not None])
            parts.append(RawPart(kind=PartKind.STATE, start=start, token_count=token_count, payload=state.pack(states)))
        return tuple(parts)

    def rebuild(self, parts: Sequence[RawPart], position: int) -> list[Any]:
        """Caches that stand at ``position``, as an unbroken run of the same tokens would have left them.

        Args:
            parts: those that :func:`kakeya_zmq.blocks.needed_parts` names for ``position``, in any order. Window rows
                that are not needed are skipped.
            position: tokens; the end of a block.

        Returns:
            Evaluated caches, bitwise equal in every row the model will read.

        Raises:
            InvalidInput: parts are missing, overlap, or reach beyond ``position``.
            DataLossError: a payload has another size or form than its tokens need.
        """
        if position == 0 and not parts:
            return self.new_caches()
        rebuild = self.begin_rebuild(position)
        rebuild.add(parts)
        return rebuild.finish()

    def begin_rebuild(self, position: int) -> Rebuild:
        """Like :meth:`rebuild`, but the parts may come one after the other.

        Raises:
            InvalidInput: ``position`` is below 1.
        """
        return Rebuild(self, position)

    # --- learning the model -------------------------------------------------------------------------------------

    @staticmethod
    def _adapter(cache: Any) -> RowsAdapter | None:
        if is_state(cache):
            return None
        adapter_class = ROWS_ADAPTERS.get(type(cache))
        if adapter_class is None:
            raise unsupported(cache)
        return adapter_class(cache)

    def _probe(self) -> None:
        """Trace short prompts through the model, unevaluated, to learn shapes and types."""
        lengths = PROBE_LENGTHS if None in self._adapters else PROBE_LENGTHS[:1]
        for length in lengths:
            caches = self.new_caches()
            self._model(mx.zeros((1, length), mx.int32), cache=caches)
            for adapter, cache in self.rows(caches):
                adapter.learn(cache)
            shapes = [state.shapes_of(cache) for cache in self._states(caches)]
            self._state_bytes = sum(s.data_bytes for layer in shapes for s in layer if s is not None)
            previous = self._state_shapes or shapes
            self._state_shapes = [state.merge_shapes(a, b) for a, b in zip(previous, shapes, strict=True)]

    def _used(self) -> list[RowsAdapter]:
        return [adapter for adapter in self._adapters if adapter is not None and adapter.used]

    def _token_bytes(self, kind: PartKind) -> int:
        return sum(adapter.token_bytes for adapter in self._used() if adapter.kind is kind)

    def _types(self) -> Iterator[str]:
        for adapter in self._used():
            assert adapter.keys is not None
            assert adapter.values is not None
            yield from (adapter.keys.dtype, adapter.values.dtype)
        yield from (shape.dtype for layer in self._state_shapes for shape in layer if shape is not None)

    def _describe(self) -> str:
        states = iter(self._state_shapes)
        lines = []
        for index, adapter in enumerate(self._adapters):
            if adapter is None:
                arrays = ",".join("-" if shape is None else str(shape) for shape in next(states))
                lines.append(f"{index} state [{arrays}]")
            elif adapter.used:
                lines.append(f"{index} {adapter.describe()} k={adapter.keys} v={adapter.values}")
            else:
                lines.append(f"{index} {adapter.describe()} unused")
        return "\n".join(lines)

    # --- caches side by side with their adapters ----------------------------------------------------------------

    def _members(self, caches: Sequence[Any]) -> list[Any]:
        members = leaves(caches)
        if [type(cache) for cache in members] != self._classes:
            raise LocalProtocolError("these caches were not made by this layout")
        return members

    def rows(self, caches: Sequence[Any]) -> list[tuple[RowsAdapter, Any]]:
        """Each cache that keeps rows, with its adapter."""
        pairs = zip(self._adapters, self._members(caches), strict=True)
        return [(adapter, cache) for adapter, cache in pairs if adapter is not None]

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent or convolution state."""
        return bool(self._state_shapes)

    def restore_states(self, caches: Sequence[Any], part: RawPart) -> None:
        """Fill the state caches from a STATE part.

        Raises:
            DataLossError: the payload has another form than the model's state.
        """
        layers = state.unpack(part.payload, self._state_shapes)
        mx.eval([array for layer in layers for array in layer if array is not None])
        for cache, arrays in zip(self._states(caches), layers, strict=True):
            cache.cache = arrays

    def _states(self, caches: Sequence[Any]) -> list[Any]:
        return [cache for cache in self._members(caches) if is_state(cache)]

    # --- export and rebuild -------------------------------------------------------------------------------------

    @staticmethod
    def _export_rows(group: Sequence[tuple[RowsAdapter, Any]], start: int, end: int) -> memoryview | None:
        """One part's payload, written once; None when there is no such layer or rows are gone."""
        spans = [adapter.spans(cache, start, end) for adapter, cache in group]
        if not group or any(span is None for span in spans):
            return None
        payload = np.empty(sum(adapter.token_bytes for adapter, _ in group) * (end - start), np.uint8)
        at = 0
        for (adapter, cache), cache_spans in zip(group, spans, strict=True):
            for shape, array in ((adapter.keys, cache.keys), (adapter.values, cache.values)):
                assert shape is not None
                length = shape.row_bytes * (end - start)
                rows = payload_rows(payload[at : at + length], shape, end - start)
                _copy_out(numpy_view(array)[0], cache_spans or [], rows)
                at += length
        return payload.data.toreadonly()


def _copy_out(source: npt.NDArray[Any], spans: Sequence[Span], target: npt.NDArray[Any]) -> None:
    """Copy the spans of stored rows (heads, rows, dim) one after the other into ``target``."""
    row = 0
    for start, end in spans:
        target[:, row : row + end - start] = source[:, start:end]
        row += end - start
