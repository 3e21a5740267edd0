"""Products of one row in small groups: the same numbers as MLX's own product, in the same layers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from kakeya_zmq.model import single_row
from kakeya_zmq.model.single_row import single_row_product, use_small_products

LARGE = (1031, 521)
"""Above :data:`single_row.SMALL_PRODUCT`, and no multiple of a whole group."""


class _TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(*LARGE)
        self.large = nn.Linear(LARGE[1], LARGE[0])
        self.small = nn.Linear(LARGE[1], 8)
        self.half = nn.Linear(LARGE[1], LARGE[0])
        self.half.set_dtype(mx.bfloat16)
        self.head = self.embed


def _close(product: mx.array, expected: mx.array) -> None:
    assert product.shape == expected.shape
    np.testing.assert_allclose(np.asarray(product), np.asarray(expected), rtol=2e-4, atol=2e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 900), st.integers(1, 300), st.integers(1, 60_000), st.integers(0, 2))
def test_any_shape_and_group_gives_the_plain_product(outputs: int, inputs: int, limit: int, leading: int) -> None:
    mx.random.seed(outputs * 1000 + inputs)
    row = mx.random.normal((1,) * leading + (inputs,))
    weight = mx.random.normal((outputs, inputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_row, "SMALL_PRODUCT", limit)
        _close(single_row_product(row, weight), row @ weight.T)


def test_only_large_float32_layers_change_and_tied_ones_together() -> None:
    model = _TiedModel()
    before = {name for name, _ in tree_flatten(model.parameters())}
    assert use_small_products(model) == 2
    assert model.head is model.embed
    assert type(model.small) is nn.Linear
    assert type(model.half) is nn.Linear
    assert {name for name, _ in tree_flatten(model.parameters())} == before
    assert use_small_products(model) == 0


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_changed_layers_give_the_same_for_one_row_and_for_many(rows: int) -> None:
    model = _TiedModel()
    x = mx.random.normal((1, rows, LARGE[1]))
    expected = (model.large(x), model.head.as_linear(x))
    mx.eval(expected)
    use_small_products(model)
    for product, plain in zip((model.large(x), model.head.as_linear(x)), expected, strict=True):
        _close(product, plain)


def test_a_layer_without_a_bias() -> None:
    layer = nn.Linear(LARGE[1], LARGE[0], bias=False)
    x = mx.random.normal((LARGE[1],))
    expected = layer(x)
    mx.eval(expected)
    assert use_small_products(layer) == 1
    _close(layer(x), expected)
