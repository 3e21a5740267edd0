"""The real demo model: a prefix rebuilt from parts and continued gives what an unbroken prefill gives.

One prompt of 2,049 tokens is prefilled once without a break, 2,048 tokens of it; every case rebuilds a prefix from the parts
of that run, computes the rest, and compares the KV and the greedy continuation. With sink + window, where the library's own
cache depends on how a prompt is cut, no cut may matter.

Damaged parts are the controls: comparisons that could not see them would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kakeya_zmq.blocks import RawPart, needed_parts
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.demo.document import demo_document
from kakeya_zmq.engine import (
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    Engine,
    Event,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    SegmentComputed,
    TokenArray,
    TokenDecoded,
)
from kakeya_zmq.model.loader import load_engine
from kakeya_zmq.model.policy import CachePolicy
from kakeya_zmq.text import TextCodec
from wire.messages import PartKind

pytestmark = pytest.mark.model

BLOCK = 64
SEGMENT = 256
PROMPT = 2049
CONTINUED = 16
HEAD_DIM = 256
"""Of the demo model, which has one KV head, in float32."""
ROUNDING = 2e-5
"""Largest difference, relative to the largest value, that cutting a prompt elsewhere may make in float32.

Measured: 1e-6 on a CPU."""
VISIBLE = 100 * ROUNDING
"""What damage must at least do, so that a comparison within ROUNDING means something."""

PartKey = tuple[PartKind, int, int]
Parts = dict[PartKey, RawPart]
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Result:
    """KV of a session after its prefill, as the parts it still holds, and the greedy tokens that follow."""

    held: Parts
    continuation: list[int]


def run(engine: Engine, command: Command) -> list[Event]:
    events = list(engine.handle(command))
    assert not [event for event in events if isinstance(event, CommandFailed)], events
    return events


def parts_of(events: Iterable[Event]) -> Parts:
    found = (part for event in events if isinstance(event, SegmentComputed | PartsCaptured) for part in event.parts)
    return {(part.kind, part.start, part.token_count): part for part in found}


def rows_of(part: RawPart) -> Rows:
    """(layers, K and V, tokens, dim) of a FULL or WINDOW part."""
    return np.frombuffer(part.payload, np.float32).reshape(-1, 2, part.token_count, HEAD_DIM)


def with_rolled_values(part: RawPart, by: int = 7) -> RawPart:
    """The part with every V at a wrong token of the block."""
    rows = rows_of(part).copy()
    rows[:, 1] = np.roll(rows[:, 1], by, axis=1)
    return RawPart(part.kind, part.start, part.token_count, memoryview(rows.tobytes()))


def difference(one: Parts, other: Parts, *, start: int) -> float:
    """Largest difference in the parts from ``start`` on that both hold, relative to the largest value."""
    shared = [key for key in one if key in other and key[1] >= start]
    assert shared
    scale = max(float(np.abs(rows_of(one[key])).max()) for key in shared)
    return max(float(np.abs(rows_of(one[key]) - rows_of(other[key])).max()) for key in shared) / scale


def are_bitwise_equal(one: Parts, other: Parts) -> bool:
    shared = one.keys() & other.keys()
    return all(bytes(one[key].payload) == bytes(other[key].payload) for key in shared)


def needed(engine: Engine, tokens: TokenArray, position: int, parts: Parts) -> list[RawPart]:
    """Exactly the parts that a hit at ``position`` is given; KeyError when one was never captured."""
    requirement = engine.facts.requirement
    chain = chain_hashes(tokens[:position], bytes(32), bytes(16), BLOCK)
    blocks = {block.block_hash: block for block in chain.blocks}
    refs = needed_parts(chain, position, requirement)
    return [parts[ref.kind, blocks[ref.block_hash].start, blocks[ref.block_hash].token_count] for ref in refs]


def prefilled(engine: Engine, session: str, tokens: TokenArray, cuts: Sequence[int], position: int = 0) -> Parts:
    """Prefill an open session up to each of ``cuts`` in turn; all parts that were captured on the way."""
    captured: Parts = {}
    for cut in cuts:
        captured |= parts_of(run(engine, Prefill(session, tokens[position:cut])))
        position = cut
    return captured


def concluded(engine: Engine, session: str, tokens: TokenArray) -> Result:
    """What a session with all but the last token prefilled holds, and how it goes on; closes it."""
    held = parts_of(run(engine, Capture(session, 0)))
    events = run(engine, Decode(session, int(tokens[-1]), CONTINUED, eos_token_ids=()))
    run(engine, CloseSession(session))
    continuation = [event.token for event in events if isinstance(event, TokenDecoded)]
    assert len(continuation) == CONTINUED
    return Result(held, continuation)


def continued_from(
    engine: Engine, tokens: TokenArray, position: int, parts: Sequence[RawPart], cuts: Sequence[int] = ()
) -> Result:
    """Import ``parts``, compute what is missing of ``tokens``, go on."""
    run(engine, OpenSession("rebuilt"))
    (imported,) = run(engine, ImportPrefix("rebuilt", position, tuple(parts)))
    assert isinstance(imported, PrefixImported)
    assert imported.position == position
    prefilled(engine, "rebuilt", tokens, [*cuts, len(tokens) - 1], position)
    return concluded(engine, "rebuilt", tokens)


@pytest.fixture(scope="module")
def text_tokens(model_folder: Path) -> TokenArray:
    """The first PROMPT tokens of the demonstration's document."""
    tokens = np.array(TextCodec.load(model_folder).encode(demo_document()), np.int32)
    assert len(tokens) > PROMPT
    return tokens[:PROMPT]


# --- the model's own caches ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unbroken:
    """One prefill without a break: its engine, all parts captured on the way, and what it led to."""

    engine: Engine
    tokens: TokenArray
    parts: Parts
    result: Result


@pytest.fixture(scope="module")
def native(model_folder: Path, text_tokens: TokenArray) -> Iterator[Unbroken]:
    engine = load_engine(model_folder, block_tokens=BLOCK, segment_tokens=SEGMENT)
    run(engine, OpenSession("unbroken"))
    parts = prefilled(engine, "unbroken", text_tokens, [PROMPT - 1])
    yield Unbroken(engine, text_tokens, parts, concluded(engine, "unbroken", text_tokens))
    engine.close()


def check_coverage(result: Result, window: int) -> None:
    """The comparisons look at every row that later tokens can attend to."""
    starts = {kind: {start for held, start, _ in result.held if held is kind} for kind in PartKind}
    assert starts[PartKind.FULL] == set(range(0, PROMPT - 1, BLOCK))
    assert starts[PartKind.WINDOW] >= set(range(PROMPT - 1 - window, PROMPT - 1, BLOCK))


@pytest.mark.parametrize("position", [64, 512, 576, 1024, 1984])
def test_a_prefix_from_blocks_continues_like_an_unbroken_prefill(native: Unbroken, position: int) -> None:
    parts = needed(native.engine, native.tokens, position, native.parts)
    result = continued_from(native.engine, native.tokens, position, parts)
    check_coverage(result, native.engine.facts.requirement.window_tokens)
    assert result.continuation == native.result.continuation
    if position % SEGMENT == 0:  # the same segments, so the same arithmetic
        assert are_bitwise_equal(result.held, native.result.held)
    else:
        assert difference(native.result.held, result.held, start=0) < ROUNDING


def test_a_prefix_with_a_tail_continues_like_an_unbroken_prefill(native: Unbroken) -> None:
    position = 1000
    run(native.engine, OpenSession("shorter"))
    grid = position - position % SEGMENT
    run(native.engine, ImportPrefix("shorter", grid, tuple(needed(native.engine, native.tokens, grid, native.parts))))
    shorter = prefilled(native.engine, "shorter", native.tokens, [position], grid)
    run(native.engine, CloseSession("shorter"))
    tail = position % BLOCK
    assert {kind for kind, _, count in shorter if count == tail} == {PartKind.FULL, PartKind.WINDOW}
    parts = needed(native.engine, native.tokens, position, native.parts | shorter)
    assert [part.token_count for part in parts[-2:]] == [tail, tail]
    result = continued_from(native.engine, native.tokens, position, parts)
    assert result.continuation == native.result.continuation
    assert difference(native.result.held, result.held, start=0) < ROUNDING


@pytest.mark.parametrize("kind", [PartKind.FULL, PartKind.WINDOW])
def test_one_damaged_block_is_seen(native: Unbroken, kind: PartKind) -> None:
    """Control: the comparisons above notice one block whose values stand at wrong tokens."""
    position = 1984
    parts = needed(native.engine, native.tokens, position, native.parts)
    of_kind = [index for index, part in enumerate(parts) if part.kind is kind]
    # Global layers attend to the very first tokens most, sliding ones to their nearest.
    at = of_kind[0] if kind is PartKind.FULL else of_kind[-1]
    parts[at] = with_rolled_values(parts[at])
    result = continued_from(native.engine, native.tokens, position, parts)
    assert not are_bitwise_equal(result.held, native.result.held)
    assert difference(native.result.held, result.held, start=position) > VISIBLE
    if kind is PartKind.FULL:
        assert result.continuation != native.result.continuation


# --- sink + window ---------------------------------------------------------------------------------------------------

SINK, WINDOW = 4, 256
BOUNDED_PROMPT = 577
"""More than twice the window, so that most queries have lost rows between the sinks and their window."""


@pytest.fixture(scope="module")
def bounded(model_folder: Path, text_tokens: TokenArray, native: Unbroken) -> Iterator[Unbroken]:
    """The same with KV bounded to sink + window, prefilled in the smallest segments that fill whole blocks."""
    engine = load_engine(model_folder, block_tokens=BLOCK, segment_tokens=1024, policy=CachePolicy.sink_window(SINK, WINDOW))
    tokens = text_tokens[:BOUNDED_PROMPT]
    run(engine, OpenSession("unbroken"))
    parts = prefilled(engine, "unbroken", tokens, range(BLOCK, BOUNDED_PROMPT, BLOCK))
    yield Unbroken(engine, tokens, parts, concluded(engine, "unbroken", tokens))
    engine.close()


CHUNKINGS = {
    "all at once": [],
    "as long as the window": range(WINDOW, BOUNDED_PROMPT - 1, WINDOW),
    "uneven, then token by token": [150, 300, 450, *range(BOUNDED_PROMPT - 1 - 20, BOUNDED_PROMPT - 1)],
}


@pytest.mark.parametrize("cuts", CHUNKINGS.values(), ids=CHUNKINGS.keys())
def test_with_sink_and_window_no_chunking_matters(bounded: Unbroken, cuts: Sequence[int]) -> None:
    run(bounded.engine, OpenSession("chunked"))
    prefilled(bounded.engine, "chunked", bounded.tokens, [*cuts, BOUNDED_PROMPT - 1])
    result = concluded(bounded.engine, "chunked", bounded.tokens)
    assert difference(bounded.result.held, result.held, start=BOUNDED_PROMPT - 1 - WINDOW) < ROUNDING
    assert result.continuation == bounded.result.continuation


@pytest.mark.parametrize("position", [320, 512])
def test_with_sink_and_window_a_prefix_from_blocks_continues_alike(bounded: Unbroken, position: int) -> None:
    parts = needed(bounded.engine, bounded.tokens, position, bounded.parts)
    assert {part.kind for part in parts} == {PartKind.WINDOW}
    assert len(parts) == min(position, BLOCK + WINDOW) // BLOCK  # the sinks' block and the window's
    result = continued_from(bounded.engine, bounded.tokens, position, parts)
    assert difference(bounded.result.held, result.held, start=BOUNDED_PROMPT - 1 - WINDOW) < ROUNDING
    assert result.continuation == bounded.result.continuation


def test_with_sink_and_window_a_damaged_sink_is_seen(bounded: Unbroken) -> None:
    """Control: the sinks are really attended to, far beyond the window."""
    position = 512
    parts = needed(bounded.engine, bounded.tokens, position, bounded.parts)
    assert parts[0].start == 0
    parts[0] = with_rolled_values(parts[0])
    result = continued_from(bounded.engine, bounded.tokens, position, parts)
    assert difference(bounded.result.held, result.held, start=position) > VISIBLE
    assert result.continuation != bounded.result.continuation
