"""Caches cut into block parts and rebuilt: bitwise the unbroken run, for every kind of cache mlx-lm has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.model import blas, state
from kakeya_zmq.model.adapters import is_state, leaves
from kakeya_zmq.model.arrays import numpy_view
from kakeya_zmq.model.layout import CacheLayout
from kakeya_zmq.model.policy import CachePolicy
from tests import tiny_models
from tests.cache_runs import BLOCK, Run, greedy, held, parts_at, run_from_nothing, run_on, same
from wire.errors import DataLossError, InvalidInput, LocalProtocolError, ModelError
from wire.messages import PartKind

BOUNDARIES = (64, 192, 256, 300, 320, 512)
LENGTH = 560
CUTS = (*BOUNDARIES, LENGTH)


@cache
def unbroken(kind: str) -> tuple[Any, CacheLayout, Any, Run]:
    model = tiny_models.build(kind)
    layout = CacheLayout(model, block_tokens=BLOCK, policy=CachePolicy.native())
    tokens = tiny_models.prompt(LENGTH)
    return model, layout, tokens, run_from_nothing(model, layout, tokens, CUTS)


@pytest.fixture(scope="module", autouse=True)
def _forget_models() -> Any:
    yield
    unbroken.cache_clear()


def resumed(kind: str, position: int, damage: Callable[[list[RawPart]], list[RawPart]] = list) -> Run:
    model, layout, tokens, full = unbroken(kind)
    run = Run(layout.rebuild(damage(parts_at(layout, full.store, tokens, position)), position))
    return run_on(model, layout, tokens, run, position, [cut for cut in CUTS if cut > position])


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_rebuilt_at_any_boundary_equals_the_unbroken_run(kind: str) -> None:
    model, layout, tokens, full = unbroken(kind)
    expected = held(full.caches, LENGTH)
    following: list[int] = []
    for position in BOUNDARIES:
        run = resumed(kind, position)
        assert same(held(run.caches, LENGTH), expected), position
        assert np.array_equal(np.array(run.logits), np.array(full.logits)), position
        if layout.tracks_position:
            assert layout.position(run.caches) == LENGTH
        tokens_after = greedy(model, run.caches, run.logits, 6)
        following = following or tokens_after
        assert tokens_after == following
    fresh = run_from_nothing(model, layout, tokens, CUTS)
    assert greedy(model, fresh.caches, fresh.logits, 6) == following


@pytest.mark.parametrize("kind", sorted(set(tiny_models.KINDS) - tiny_models.STATE_KINDS))
def test_rebuilt_between_segment_ends_agrees_to_rounding(kind: str) -> None:
    model, layout, tokens, _ = unbroken(kind)
    tokens = tokens[:, :512]
    full = run_from_nothing(model, layout, tokens, (256, 512))
    for position in (64, 320):
        run = Run(layout.rebuild(parts_at(layout, full.store, tokens, position), position))
        run_on(model, layout, tokens, run, position, [cut for cut in (256, 512) if cut > position])
        np.testing.assert_allclose(np.array(run.logits), np.array(full.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "llama4"])
def test_blocks_captured_while_decoding_agree_to_rounding(kind: str) -> None:
    """The rings have wrapped by then. A rebuilt ring starts in temporal order, so sums run in another order."""
    model, layout, _, _ = unbroken(kind)
    tokens = tiny_models.prompt(200)
    decoding = tuple(range(131, 193))
    full = run_from_nothing(model, layout, tokens, (130, *decoding, *range(193, 201)))
    parts = parts_at(layout, full.store, tokens, 192)
    run = Run(layout.rebuild(parts, 192))
    run_on(model, layout, tokens, run, 192, range(193, 201))
    for mine, theirs in zip(held(run.caches, 200), held(full.caches, 200), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    again = Run(layout.rebuild(parts, 192))
    for part in layout.export(again.caches, 128, BLOCK):
        assert part.payload == full.store[part.kind, 128, BLOCK].payload


@pytest.mark.parametrize("kind", sorted(set(tiny_models.KINDS) - {"mamba2"}))
def test_damaged_values_of_a_middle_block_change_the_result(kind: str) -> None:
    """The control: rebuilding really uses the bytes of every part."""
    _, layout, _, full = unbroken(kind)
    part_kind = PartKind.FULL if layout.requirement.full else PartKind.WINDOW
    rows = next(leaf for leaf in leaves(full.caches) if isinstance(leaf, KVCache))
    key_bytes, value_bytes = (BLOCK * a.shape[1] * a.shape[3] * 4 for a in (rows.keys, rows.values))

    def roll(parts: list[RawPart]) -> list[RawPart]:
        index = next(i for i, part in enumerate(parts) if part.kind is part_kind and part.start == 64)
        payload: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.array(parts[index].payload)
        values = payload[key_bytes : key_bytes + value_bytes].reshape(rows.values.shape[1], BLOCK, -1)
        values[...] = np.roll(values, 7, axis=1)
        return [*parts[:index], replace(parts[index], payload=payload.data), *parts[index + 1 :]]

    run = resumed(kind, 256, roll)
    assert not np.array_equal(np.array(run.logits), np.array(full.logits))


@pytest.mark.parametrize("kind", sorted(tiny_models.STATE_KINDS))
def test_the_next_token_depends_on_the_state(kind: str) -> None:
    """Right after the boundary, before a small model's state has decayed: bitwise right, and a reversed state is not."""
    model, layout, tokens, _ = unbroken(kind)
    full = run_from_nothing(model, layout, tokens, (192, 200))
    parts = parts_at(layout, full.store, tokens, 200)
    expected = run_on(model, layout, tokens, full, 200, [201]).logits
    rebuilt = run_on(model, layout, tokens, Run(layout.rebuild(parts, 200)), 200, [201])
    assert np.array_equal(np.array(rebuilt.logits), np.array(expected))
    caches = layout.rebuild(parts, 200)
    for leaf in leaves(caches):
        if is_state(leaf):
            leaf.cache = [array[..., ::-1] for array in leaf.cache]
    damaged = run_on(model, layout, tokens, Run(caches), 200, [201])
    assert np.abs(np.array(damaged.logits) - np.array(expected)).max() > 1e-6


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_every_missing_or_torn_part_is_refused(kind: str) -> None:
    _, layout, tokens, full = unbroken(kind)
    parts = parts_at(layout, full.store, tokens, 300)
    assert {part.kind for part in parts} == {part_kind for part_kind, used in _kinds(layout).items() if used}
    for index, part in enumerate(parts):
        others = [*parts[:index], *parts[index + 1 :]]
        with pytest.raises(InvalidInput):
            layout.rebuild(others, 300)
        with pytest.raises(DataLossError):
            layout.rebuild([*others, replace(part, payload=part.payload[:-1])], 300)
        if part.kind is not PartKind.STATE:
            with pytest.raises(InvalidInput):
                layout.rebuild([*parts, part], 300)


def _kinds(layout: CacheLayout) -> dict[PartKind, bool]:
    need = layout.requirement
    return {PartKind.FULL: need.full, PartKind.WINDOW: need.window_tokens > 0, PartKind.STATE: need.state}


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_part_sizes_are_what_the_layout_says(kind: str) -> None:
    _, layout, tokens, full = unbroken(kind)
    for part in parts_at(layout, full.store, tokens, 300):
        per_token = layout.part_bytes_per_token[part.kind]
        if part.kind is PartKind.STATE:
            assert per_token <= part.payload.nbytes <= per_token + 256
        else:
            assert part.payload.nbytes == per_token * part.token_count
    assert layout.kv_bytes(full.caches) > 0
    assert layout.kv_bytes(layout.new_caches()) == 0


def test_exported_payloads_are_copies_and_read_only() -> None:
    model = tiny_models.build("gemma3_text")
    layout = CacheLayout(model, block_tokens=BLOCK, policy=CachePolicy.native())
    tokens = tiny_models.prompt(256)
    run = run_from_nothing(model, layout, tokens, (64,))
    before = {key: bytes(part.payload) for key, part in run.store.items()}
    run_on(model, layout, tokens, run, 64, (65, 66, 256))
    assert before
    assert all(bytes(run.store[key].payload) == payload for key, payload in before.items())
    assert all(part.payload.readonly and part.payload.format == "B" for part in run.store.values())


def test_window_rows_that_are_gone_are_not_exported() -> None:
    _, layout, _, full = unbroken("gemma3_text")
    assert [part.kind for part in layout.export(full.caches, 0, BLOCK)] == [PartKind.FULL]
    assert layout.export(full.caches, LENGTH, BLOCK) == ()
    with pytest.raises(InvalidInput):
        layout.export(full.caches, 0, 0)


def test_a_state_part_exists_only_where_the_caches_stand() -> None:
    _, layout, _, full = unbroken("lfm2")
    assert [part.kind for part in layout.export(full.caches, 0, BLOCK)] == [PartKind.FULL]
    assert PartKind.STATE in {part.kind for part in layout.export(full.caches, LENGTH - 48, 48)}


def test_a_recurrent_model_does_not_know_its_position() -> None:
    _, layout, _, full = unbroken("mamba2")
    assert not layout.tracks_position
    with pytest.raises(ModelError):
        layout.position(full.caches)
    assert layout.export(full.caches, 448, 64, position=LENGTH) == ()
    assert [part.kind for part in layout.export(full.caches, 512, 48, position=LENGTH)] == [PartKind.STATE]


def test_position_zero_needs_nothing() -> None:
    for kind in ("gemma3_text", "mamba2"):
        layout = unbroken(kind)[1]
        assert all(leaf.empty() for leaf in leaves(layout.rebuild([], 0)))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_kept_bit_for_bit(dtype: Any) -> None:
    model = tiny_models.build("gemma3_text", dtype=dtype)
    layout = CacheLayout(model, block_tokens=BLOCK, policy=CachePolicy.native())
    assert layout.kv_dtype == str(dtype).removeprefix("mlx.core.")
    tokens = tiny_models.prompt(160)
    full = run_from_nothing(model, layout, tokens, (150, 160))
    run = Run(layout.rebuild(parts_at(layout, full.store, tokens, 150), 150))
    assert {leaf.keys.dtype for leaf in leaves(run.caches)} == {dtype}
    run_on(model, layout, tokens, run, 150, (160,))
    assert same(held(run.caches, 160), held(full.caches, 160))


def test_a_rebuilt_cache_has_room_for_the_next_token() -> None:
    model, layout, tokens, full = unbroken("qwen3")
    for position in (256, 300):
        caches = layout.rebuild(parts_at(layout, full.store, tokens, position), position)
        allocated = caches[0].keys.shape[2]
        model(tokens[:, position : position + 1], cache=caches)
        assert caches[0].keys.shape[2] == allocated > position
        assert allocated % KVCache.step == 0


def test_geometry_tells_models_apart() -> None:
    texts = {unbroken(kind)[1].geometry for kind in tiny_models.KINDS}
    same_caches = {"qwen3", "llama"}, {"gemma3_text", "gemma4_text", "gemma4_shared", "gpt_oss"}
    assert len(texts) == len(tiny_models.KINDS) - sum(len(group) - 1 for group in same_caches)


class _Fake:
    """A model that only makes caches."""

    def __init__(self, *caches: Any) -> None:
        self.caches = list(caches)

    def make_cache(self) -> list[Any]:
        return self.caches


class _OwnCache(KVCache):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("cache_object", "words"),
    [(_OwnCache(), "_OwnCache"), (QuantizedKVCache(), "quantized"), (RotatingKVCache(128, keep=4), "keep=4")],
)
def test_unsupported_caches_are_refused_by_name(cache_object: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        CacheLayout(_Fake(KVCache(), cache_object), block_tokens=BLOCK, policy=CachePolicy.native())


def test_caches_of_another_model_are_refused() -> None:
    layout = unbroken("gemma3_text")[1]
    with pytest.raises(LocalProtocolError):
        layout.export(unbroken("qwen3")[3].caches, 0, BLOCK)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    layout, full = unbroken("lfm2")[1], unbroken("lfm2")[3]
    foreign = next(part for key, part in unbroken("qwen3_next")[3].store.items() if key == (PartKind.STATE, 192, 64))
    own = parts_at(layout, full.store, unbroken("lfm2")[2], 256)
    swapped = [foreign if part.kind is PartKind.STATE else part for part in own]
    with pytest.raises(DataLossError):
        layout.rebuild(swapped, 256)


def test_a_growing_state_is_free_in_one_dimension_only() -> None:
    shapes = state.merge_shapes((state.ArrayShape((1, 1), "int32"), None), (state.ArrayShape((1, 2), "int32"), None))
    assert str(shapes[0]) == "1x*:int32"
    with pytest.raises(ModelError):
        state.merge_shapes(shapes, (None, None))
    with pytest.raises(ModelError):
        state.merge_shapes(shapes, (state.ArrayShape((1, 2), "int64"), None))


def test_blas_is_prepared_and_checked() -> None:
    report = blas.prepare_blas(1)
    assert report.status in (blas.BlasStatus.ALREADY_LOADED, blas.BlasStatus.TOO_LATE, blas.BlasStatus.NOT_NEEDED)
    assert (report.status is blas.BlasStatus.TOO_LATE) == bool(report.warning)
    with pytest.raises(ValueError, match="at least 1"):
        blas.prepare_blas(0)
    for image in (b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(100)):
        with pytest.raises(ValueError, match="ELF"):
            blas.with_library_name(image, "x")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_numpy_views_share_memory_also_of_slices(dtype: Any) -> None:
    array = mx.arange(60, dtype=mx.float32).astype(dtype).reshape(1, 3, 10, 2)
    part = array[:, :, 2:7]
    mx.eval(array, part)
    whole, sliced = numpy_view(array), numpy_view(part)
    assert np.array_equal(whole[:, :, 2:7], sliced)
    whole[0, 0, 0, 0] = whole[0, 2, 9, 1]
    assert float(array[0, 0, 0, 0]) == float(array[0, 2, 9, 1]) == 59.0
