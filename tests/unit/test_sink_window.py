"""The sink+window cache: the same answer for every chunking, bounded, and rebuilt from blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kakeya_zmq.model.adapters import leaves
from kakeya_zmq.model.layout import CacheLayout, bounded_caches
from kakeya_zmq.model.policy import CachePolicy
from kakeya_zmq.model.sink_window import SinkWindowCache
from tests import tiny_models
from tests.cache_runs import BLOCK, Run, greedy, held, parts_at, run_from_nothing, run_on, same
from wire.errors import InvalidInput
from wire.messages import PartKind

SINK, WINDOW = 4, 96
LENGTH = 450
KINDS = ("llama", "qwen3", "gemma3_text", "gemma4_shared", "gpt_oss", "deepseek_v3", "falcon_h1")


@cache
def bounded(kind: str) -> tuple[Any, CacheLayout]:
    model = tiny_models.build(kind)
    return model, CacheLayout(model, block_tokens=BLOCK, policy=CachePolicy.sink_window(SINK, WINDOW))


@pytest.fixture(scope="module", autouse=True)
def _forget_models() -> Any:
    yield
    bounded.cache_clear()


def logits_in_chunks(model: Any, caches: list[Any], tokens: Any, chunk: int) -> np.ndarray[Any, Any]:
    """Logits (tokens, vocabulary) of the whole prompt, run ``chunk`` tokens at a time."""
    found = []
    for start in range(0, tokens.shape[1], chunk):
        logits = model(tokens[:, start : start + chunk], cache=caches)
        mx.eval(logits)
        found.append(np.array(logits[0]))
    return np.concatenate(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size_agrees_with_token_by_token(kind: str) -> None:
    model, layout = bounded(kind)
    tokens = tiny_models.prompt(300)
    expected = logits_in_chunks(model, layout.new_caches(), tokens, 1)
    for chunk in (7, 64, 256):
        found = logits_in_chunks(model, layout.new_caches(), tokens, chunk)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=3e-4, err_msg=f"chunk {chunk}")


def test_it_is_attention_over_the_sinks_and_the_window() -> None:
    """Against the definition: one pass with an explicit mask over all positions."""
    model, layout = bounded("llama")
    tokens = tiny_models.prompt(300)
    query, key = np.arange(300)[:, None], np.arange(300)[None, :]
    visible = mx.array((key <= query) & ((key < SINK) | (key > query - WINDOW)))

    class Explicit(KVCache):  # type: ignore[misc]
        def make_mask(self, *_: Any, **__: Any) -> Any:
            return visible

    expected = np.array(model(tokens, cache=[Explicit() for _ in model.layers])[0])
    found = logits_in_chunks(model, layout.new_caches(), tokens, 64)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    unbounded = np.array(model(tokens)[0])
    assert np.abs(found - unbounded)[: SINK + WINDOW].max() < 1e-4
    assert np.abs(found - unbounded)[SINK + WINDOW :].max() > 1e-2


def test_the_librarys_rotating_cache_loses_its_sinks_in_chunks() -> None:
    """Why this class exists; should this fail one day, the library was repaired."""
    model, layout = bounded("llama")
    tokens = tiny_models.prompt(300)

    def rotating() -> list[Any]:
        return [RotatingKVCache(SINK + WINDOW, keep=SINK) for _ in model.layers]

    ours = logits_in_chunks(model, layout.new_caches(), tokens, 64)
    by_token = logits_in_chunks(model, rotating(), tokens, 1)
    np.testing.assert_allclose(by_token, ours, rtol=1e-3, atol=1e-4)
    in_chunks = logits_in_chunks(model, rotating(), tokens, 64)
    assert np.abs(in_chunks - by_token).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_from_blocks_equals_the_unbroken_run(kind: str) -> None:
    model, layout = bounded(kind)
    tokens = tiny_models.prompt(LENGTH)
    cuts = (64, 192, 256, 300, 384, LENGTH)
    full = run_from_nothing(model, layout, tokens, cuts)
    expected = held(full.caches, LENGTH)
    following: list[int] = []
    for position in cuts[:-1]:
        run = Run(layout.rebuild(parts_at(layout, full.store, tokens, position), position))
        run_on(model, layout, tokens, run, position, [cut for cut in cuts if cut > position])
        assert same(held(run.caches, LENGTH), expected), position
        tokens_after = greedy(model, run.caches, run.logits, 6)
        following = following or tokens_after
        assert tokens_after == following
    assert greedy(model, full.caches, full.logits, 6) == following


def test_it_needs_the_sink_block_and_the_window_blocks_only() -> None:
    model, layout = bounded("llama")
    tokens = tiny_models.prompt(LENGTH)
    full = run_from_nothing(model, layout, tokens, (256, 448))
    parts = parts_at(layout, full.store, tokens, 448)
    assert [(part.kind, part.start) for part in parts] == [(PartKind.WINDOW, start) for start in (0, 320, 384)]
    with pytest.raises(InvalidInput):
        layout.rebuild(parts[1:], 448)
    with pytest.raises(InvalidInput):
        layout.rebuild([parts[0], parts[2]], 448)


def test_blocks_captured_while_decoding_are_the_same_rows() -> None:
    model, layout = bounded("llama")
    tokens = tiny_models.prompt(LENGTH)
    full = run_from_nothing(model, layout, tokens, (200, *range(201, 257)))
    run = Run(layout.rebuild(parts_at(layout, full.store, tokens, 256), 256))
    (part,) = layout.export(run.caches, 192, BLOCK)
    assert part.payload == full.store[PartKind.WINDOW, 192, BLOCK].payload
    for mine, theirs in zip(held(run.caches, 256), held(full.caches, 256), strict=True):
        assert np.array_equal(mine, theirs)


def test_decoding_keeps_memory_bounded() -> None:
    model, layout = bounded("llama")
    caches = layout.new_caches()
    logits = model(tiny_models.prompt(LENGTH), cache=caches)[:, -1]
    greedy(model, caches, logits, 3)
    assert all(leaf.keys.shape[2] == SINK + WINDOW and leaf.size() == SINK + WINDOW for leaf in leaves(caches))
    assert layout.kv_bytes(caches) == layout.part_bytes_per_token[PartKind.WINDOW] * (SINK + WINDOW)
    assert layout.position(caches) == LENGTH + 3


def test_the_policy_keeps_narrower_windows_and_narrows_wider_ones() -> None:
    model = tiny_models.build("gemma3_text")

    def classes(window: int) -> list[tuple[type, int, int]]:
        caches = bounded_caches(CachePolicy.sink_window(SINK, window), model.make_cache())
        return [(type(c), getattr(c, "sink", 0), getattr(c, "window", getattr(c, "max_size", 0))) for c in caches[:2]]

    wide = tiny_models.WINDOW
    assert classes(wide) == [(RotatingKVCache, 0, wide), (SinkWindowCache, SINK, wide)]
    assert classes(wide // 2) == [(SinkWindowCache, 0, wide // 2), (SinkWindowCache, SINK, wide // 2)]
    assert not CachePolicy.native().bounded


def test_the_models_own_window_applies_on_top() -> None:
    cache = SinkWindowCache(2, 8)
    cache.update_and_fetch(mx.zeros((1, 1, 20, 4)), mx.zeros((1, 1, 20, 4)))
    cache.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    assert cache.make_mask(1) is None
    mask = np.array(cache.make_mask(1, window_size=3))[0]
    cache.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    assert sorted(cache.stored_positions()[mask]) == [19, 20, 21]


@pytest.mark.parametrize("chunks", [(1,) * 40, (3, 1, 1, 20, 1, 1, 9), (30, 1, 1, 1, 1, 2, 1), (2, 2, 2, 2, 1, 1, 30)])
def test_rows_are_the_positions_it_says(chunks: tuple[int, ...]) -> None:
    """Each row carries its position as its key: storage order, masks and positions must tell one story."""
    cache = SinkWindowCache(3, 7)
    for count in chunks:
        first = cache.offset
        mask = cache.make_mask(count, return_array=True)
        rows = mx.broadcast_to(mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None], (1, 1, count, 2))
        keys, values = cache.update_and_fetch(rows, rows + 0.5)
        positions = cache.stored_positions()
        assert np.array_equal(np.array(keys)[0, 0, :, 0], positions)
        assert np.array_equal(np.array(values)[0, 0, :, 1], positions + 0.5)
        for row, position in enumerate(range(first, first + count)):
            seen = positions if mask is None else positions[np.array(mask)[row]]
            assert sorted(seen) == [r for r in range(position + 1) if r < 3 or r > position - 7]


def test_state_round_trip_and_trim() -> None:
    cache = SinkWindowCache(2, 8)
    cache.update_and_fetch(mx.ones((1, 1, 6, 4)), mx.ones((1, 1, 6, 4)))
    assert cache.trim(2) == 2
    assert (cache.offset, cache.size()) == (4, 4)
    copy = SinkWindowCache.from_state(cache.state)
    assert np.array_equal(copy.stored_positions(), cache.stored_positions())
    copy.update_and_fetch(mx.ones((1, 1, 20, 4)), mx.ones((1, 1, 20, 4)))
    copy.update_and_fetch(mx.ones((1, 1, 1, 4)), mx.ones((1, 1, 1, 4)))
    assert copy.trim(2) == 0
    for sink, window in ((-1, 8), (0, 0)):
        with pytest.raises(InvalidInput):
            SinkWindowCache(sink, window)
        with pytest.raises(InvalidInput):
            CachePolicy.sink_window(sink, window)
