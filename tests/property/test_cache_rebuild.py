"""For any model kind, prompt, segment cuts and boundary: a cache rebuilt from blocks continues like the unbroken run."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.model import state
from kakeya_zmq.model.layout import CacheLayout
from kakeya_zmq.model.policy import CachePolicy
from tests import tiny_models
from tests.cache_runs import BLOCK, Run, held, parts_at, run_from_nothing, run_on, same
from wire.errors import DataLossError, InvalidInput
from wire.messages import PartKind

NATIVE = CachePolicy.native()
BOUNDED = CachePolicy.sink_window(5, 70)
SLOW = {"qwen3_next"}
"""Left to the unit test: its recurrence runs token by token here."""


@cache
def loaded(kind: str, policy: CachePolicy) -> tuple[Any, CacheLayout]:
    model = tiny_models.build(kind)
    return model, CacheLayout(model, block_tokens=BLOCK, policy=policy)


@pytest.fixture(scope="module", autouse=True)
def _forget_models() -> Any:
    yield
    loaded.cache_clear()


@st.composite
def cuts_and_boundary(draw: st.DrawFn) -> tuple[list[int], int]:
    """Increasing segment ends of a prompt of up to 400 tokens, and one of them but the last."""
    steps = draw(st.lists(st.integers(1, 150) | st.sampled_from([1, BLOCK, 2 * BLOCK]), min_size=2, max_size=6))
    cuts: list[int] = []
    for step in steps:
        if not cuts or cuts[-1] + step <= 400:
            cuts.append((cuts[-1] if cuts else 0) + step)
    if len(cuts) < 2:
        cuts.append(cuts[-1] + 1)
    return cuts, draw(st.sampled_from(cuts[:-1]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from([kind for kind in tiny_models.KINDS if kind not in SLOW]),
    policy=st.sampled_from([NATIVE, BOUNDED]),
    shape=cuts_and_boundary(),
    seed=st.integers(0, 50),
)
def test_rebuilt_caches_continue_like_the_unbroken_run(
    kind: str, policy: CachePolicy, shape: tuple[list[int], int], seed: int
) -> None:
    model, layout = loaded(kind, policy)
    cuts, boundary = shape
    tokens = tiny_models.prompt(cuts[-1], seed)
    full = run_from_nothing(model, layout, tokens, cuts)
    run = Run(layout.rebuild(parts_at(layout, full.store, tokens, boundary), boundary))
    run_on(model, layout, tokens, run, boundary, [cut for cut in cuts if cut > boundary])
    mine, theirs = held(run.caches, cuts[-1]), held(full.caches, cuts[-1])
    for rebuilt, unbroken in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(rebuilt, unbroken, rtol=1e-3, atol=1e-4)
    before = [b - a for a, b in zip([0, *cuts], cuts, strict=False) if b <= boundary]
    if 1 not in before:  # no ring was left wrapped by a decode step
        assert same(mine, theirs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_set_of_parts_is_taken_or_refused(data: st.DataObject) -> None:
    """Parts with random ranges and sizes: either a cache at the position, or one of the two documented errors."""
    _, layout = loaded("gemma3_text", NATIVE)
    position = data.draw(st.integers(0, 200))
    parts = []
    for kind in data.draw(st.lists(st.sampled_from(list(PartKind)), max_size=6)):
        start, count = data.draw(st.integers(0, 200)), data.draw(st.integers(1, 64))
        size = layout.part_bytes_per_token[kind] * count + data.draw(st.sampled_from([0, 0, 0, 1]))
        parts.append(RawPart(kind=kind, start=start, token_count=count, payload=memoryview(bytes(size))))
    try:
        caches = layout.rebuild(parts, position)
    except (InvalidInput, DataLossError):
        return
    assert layout.position(caches) == position


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_are_a_checkpoint_or_data_loss(data: st.DataObject) -> None:
    _, layout = loaded("lfm2", NATIVE)
    expected = [(state.ArrayShape((1, 2, 64), "float32"),)] * 2
    caches = layout.rebuild([], 0)
    for leaf in caches[::2]:
        leaf.cache = [tiny_models.prompt(128).reshape(1, 2, 64).astype(mx.float32)]
    mx.eval([leaf.cache for leaf in caches[::2]])
    payload = bytearray(state.pack(caches[::2]))
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, 50))] = data.draw(st.integers(0, 255))
    image = memoryview(bytes(payload[: data.draw(st.integers(0, len(payload)) | st.just(len(payload)))]))
    try:
        layers = state.unpack(image, expected)
    except DataLossError:
        return
    assert struct.unpack_from("<4sH", image) == (state.MAGIC, 2)
    assert [array.shape for layer in layers for array in layer] == [(1, 2, 64)] * 2
