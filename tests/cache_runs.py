"""Running tiny models over a prompt in given segments, with a capture after each, and comparing what the caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kakeya_zmq.blocks import RawPart, needed_parts
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.model.adapters import ROWS_ADAPTERS, is_state, leaves
from kakeya_zmq.model.arrays import numpy_view
from kakeya_zmq.model.layout import CacheLayout
from wire.messages import PartKind

BLOCK = 64

Store = dict[tuple[PartKind, int, int], RawPart]
"""(kind, start, tokens) to part."""


@dataclass
class Run:
    """A prompt that has been run: caches, the last logits, and every part captured on the way."""

    caches: list[Any]
    logits: Any = None
    store: Store = field(default_factory=dict)


def run_on(model: Any, layout: CacheLayout, tokens: Any, run: Run, start: int, cuts: Sequence[int]) -> Run:
    """Continue ``run`` from ``start`` through every position of ``cuts``; captures new blocks and tails after each."""
    for cut in cuts:
        run.logits = model(tokens[:, start:cut], cache=run.caches)[:, -1]
        mx.eval(run.logits)
        for block in range(start // BLOCK * BLOCK, cut, BLOCK):
            for part in layout.export(run.caches, block, min(BLOCK, cut - block), position=cut):
                run.store[part.kind, part.start, part.token_count] = part
        start = cut
    return run


def run_from_nothing(model: Any, layout: CacheLayout, tokens: Any, cuts: Sequence[int]) -> Run:
    return run_on(model, layout, tokens, Run(layout.new_caches()), 0, cuts)


def parts_at(layout: CacheLayout, store: Store, tokens: Any, position: int) -> list[RawPart]:
    """The parts that a hit at ``position`` needs, from ``store``; KeyError when one was not captured."""
    chain = chain_hashes(np.array(tokens[0, :position], np.int32), bytes(32), bytes(32), BLOCK)
    blocks = {block.block_hash: block for block in chain.blocks}
    refs = needed_parts(chain, position, layout.requirement)
    return [store[ref.kind, blocks[ref.block_hash].start, blocks[ref.block_hash].token_count] for ref in refs]


def held(caches: Sequence[Any], position: int) -> list[np.ndarray[Any, Any]]:
    """Every row that the caches hold and a model can still read, in temporal order."""
    found: list[np.ndarray[Any, Any]] = []
    for cache in leaves(caches):
        if is_state(cache):
            mx.eval(cache.cache)
            found.extend(numpy_view(array).copy() for array in cache.cache)
            continue
        adapter = ROWS_ADAPTERS[type(cache)](cache)
        mx.eval(cache.keys, cache.values)
        spans = [span for start, end in adapter.canonical(position) for span in adapter.spans(cache, start, end) or []]
        for array in (cache.keys, cache.values):
            found.append(np.concatenate([numpy_view(array)[:, :, a:b] for a, b in spans], axis=2))
    return found


def same(one: Sequence[np.ndarray[Any, Any]], other: Sequence[np.ndarray[Any, Any]]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def greedy(model: Any, caches: list[Any], logits: Any, count: int) -> list[int]:
    """``count`` greedy tokens after ``logits``."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(mx.argmax(logits[0])))
        logits = model(mx.array([[tokens[-1]]]), cache=caches)[:, -1]
    return tokens
