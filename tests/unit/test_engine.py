"""The MLX engine on tiny random models: against mlx-lm itself, across cuts, under interleaving, cancelling and bad input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from kakeya_zmq.blocks import RawPart, needed_parts
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.engine import (
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    DecodeFinished,
    Event,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    Sampling,
    SegmentComputed,
    SessionReady,
    TokenArray,
    TokenDecoded,
)
from kakeya_zmq.model.engine import MlxEngine
from kakeya_zmq.model.loader import engine_from_model
from kakeya_zmq.model.policy import CachePolicy
from tests import tiny_models
from wire.errors import ConfigError
from wire.messages import PartKind, Requirement, StopReason

BLOCK = 64
SEGMENT = 256
KINDS = ["gemma3_text", "qwen3", "lfm2", "mamba2"]
MORE_KINDS = [*KINDS, "llama4", "falcon_h1", "gemma4_shared", "deepseek_v3"]
BOUNDED = CachePolicy.sink_window(4, 96)


@cache
def model_of(kind: str) -> Any:
    return tiny_models.build(kind, seed=3)


def make_engine(kind: str, **options: Any) -> MlxEngine:
    """With steps launched ahead, as on a GPU, unless ``launch_ahead`` says otherwise: the harder way to be exact."""
    options.setdefault("launch_ahead", True)
    return engine_from_model(model_of(kind), name=kind, block_tokens=BLOCK, segment_tokens=SEGMENT, **options)


def prompt(length: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, length, dtype=np.int32)


def run(engine: MlxEngine, command: Command) -> list[Event]:
    return list(engine.handle(command))


def decode_command(session: str, last: int, count: int, eos: tuple[int, ...] = (), **sampling: Any) -> Decode:
    return Decode(session, int(last), count, eos, Sampling(**sampling))


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenDecoded)]


def parts_of(events: Sequence[Event]) -> list[RawPart]:
    return [p for e in events if isinstance(e, SegmentComputed | PartsCaptured) for p in e.parts]


def index(parts: Sequence[RawPart]) -> dict[tuple[PartKind, int, int], RawPart]:
    found = {(part.kind, part.start, part.token_count): part for part in parts}
    assert len(found) == len(parts), "a part was exported twice"
    return found


def select(tokens: TokenArray, position: int, requirement: Requirement, parts: Sequence[RawPart]) -> tuple[RawPart, ...]:
    """What the rest of the system would hand to an import: exactly the needed parts, or KeyError."""
    chain = chain_hashes(tokens[:position], bytes(32), bytes(16), BLOCK)
    blocks = {block.block_hash: block for block in chain.blocks}
    held = index(parts)
    return tuple(
        held[ref.kind, blocks[ref.block_hash].start, blocks[ref.block_hash].token_count]
        for ref in needed_parts(chain, position, requirement)
    )


def opened(engine: MlxEngine, *sessions: str) -> None:
    for session in sessions:
        assert run(engine, OpenSession(session)) == [SessionReady(session)]


def prefilled(engine: MlxEngine, session: str, tokens: TokenArray) -> list[RawPart]:
    """Open a session and prefill all tokens but the last; returns the captured parts."""
    opened(engine, session)
    events = run(engine, Prefill(session, tokens[:-1]))
    assert all(isinstance(event, SegmentComputed) for event in events), events
    return parts_of(events)


def reference_tokens(kind: str, tokens: TokenArray, count: int, **sampling: Any) -> list[int]:
    """mlx-lm's own generation with the same segments."""
    sampler = make_sampler(**sampling) if sampling else None
    steps = generate_step(
        mx.array(tokens),
        model_of(kind),
        max_tokens=count,
        prompt_cache=make_prompt_cache(model_of(kind)),
        prefill_step_size=SEGMENT,
        sampler=sampler,
    )
    return [int(token) for token, _ in steps]


# --- against mlx-lm --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch_ahead", [True, False])
@pytest.mark.parametrize("kind", MORE_KINDS)
def test_greedy_tokens_are_those_of_mlx_lm(kind: str, launch_ahead: bool) -> None:
    engine = make_engine(kind, launch_ahead=launch_ahead)
    tokens = prompt(601)
    prefilled(engine, "a", tokens)
    events = run(engine, decode_command("a", tokens[-1], 24))
    assert tokens_of(events) == reference_tokens(kind, tokens, 24)
    assert events[-1] == DecodeFinished("a", StopReason.MAX_TOKENS, 600 + 24)


def test_seeded_tokens_are_those_of_mlx_lm() -> None:
    engine = make_engine("qwen3")
    tokens = prompt(100)
    prefilled(engine, "a", tokens)
    mx.random.seed(11)
    expected = reference_tokens("qwen3", tokens, 20, temp=0.9, top_p=0.9, top_k=40)
    got = tokens_of(run(engine, decode_command("a", tokens[-1], 20, temperature=0.9, top_p=0.9, top_k=40, seed=11)))
    assert got == expected
    assert got != reference_tokens("qwen3", tokens, 20)


def test_segments_end_on_the_absolute_grid() -> None:
    engine = make_engine("qwen3")
    opened(engine, "a")
    run(engine, Prefill("a", prompt(100)))
    events = run(engine, Prefill("a", prompt(500, seed=1)))
    assert [event.position for event in events if isinstance(event, SegmentComputed)] == [256, 512, 600]


# --- capture and import ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_and_the_tail_are_captured_once(kind: str) -> None:
    engine = make_engine(kind)
    requirement = engine.facts.requirement
    parts = prefilled(engine, "a", prompt(601))
    held = index(parts)
    spans = [(start, min(BLOCK, 600 - start)) for start in range(0, 600, BLOCK)]
    kinds = [
        kind for kind, used in [(PartKind.FULL, requirement.full), (PartKind.WINDOW, requirement.window_tokens)] if used
    ]
    expected = {(kind, *span) for kind in kinds for span in spans}
    if requirement.state:
        expected |= {(PartKind.STATE, 192, 64), (PartKind.STATE, 448, 64), (PartKind.STATE, 576, 24)}
    assert set(held) == expected
    per_token = engine.facts.part_bytes_per_token
    for part in parts:
        size = per_token[part.kind] * (1 if part.kind is PartKind.STATE else part.token_count)
        assert part.payload.readonly
        assert part.payload.nbytes == size or (part.kind is PartKind.STATE and part.payload.nbytes > size)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_import_then_continue_equals_an_unbroken_run(kind: str) -> None:
    engine = make_engine(kind)
    requirement = engine.facts.requirement
    tokens = prompt(601)
    parts = prefilled(engine, "whole", tokens)
    expected = tokens_of(run(engine, decode_command("whole", tokens[-1], 16)))
    boundaries = [256, 512, 600] if requirement.state else [64, 128, 192, 320, 512, 576, 600]
    for boundary in boundaries:
        session = f"cut-{boundary}"
        opened(engine, session)
        [imported] = run(engine, ImportPrefix(session, boundary, select(tokens, boundary, requirement, parts)))
        assert isinstance(imported, PrefixImported), imported
        assert imported.position == boundary
        later: list[RawPart] = []
        if boundary < 600:
            later = parts_of(run(engine, Prefill(session, tokens[boundary:-1])))
        assert tokens_of(run(engine, decode_command(session, tokens[-1], 16))) == expected
        if boundary % SEGMENT == 0:
            # Same segments, same arithmetic: the recomputed parts are the same bits.
            whole = index(parts)
            assert later
            for key, part in index(later).items():
                assert bytes(part.payload) == bytes(whole[key].payload), key


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_the_beginning_of_a_longer_block_is_as_good_as_the_tail_itself(kind: str) -> None:
    """What a cut is imported from: rows up to a position inside of the last block; state cannot be had like that."""
    engine = make_engine(kind)
    requirement = engine.facts.requirement
    tokens = prompt(601)
    parts = prefilled(engine, "whole", tokens)
    for position in (65, 100, 319, 577):
        session = f"cut-{position}"
        prefilled(engine, f"own-{position}", tokens[: position + 1])
        expected = tokens_of(run(engine, decode_command(f"own-{position}", tokens[position], 16)))
        start = position - requirement.window_tokens
        needed = [
            part
            for part in parts
            if part.start < position
            and (
                part.kind is not PartKind.WINDOW
                or part.start + part.token_count > start
                or part.start < requirement.sink_tokens
            )
        ]
        opened(engine, session)
        (event,) = run(engine, ImportPrefix(session, position, tuple(needed)))
        if requirement.state:
            assert isinstance(event, CommandFailed)
            continue
        assert isinstance(event, PrefixImported), event
        assert tokens_of(run(engine, decode_command(session, tokens[position], 16))) == expected


def test_a_damaged_part_changes_the_result() -> None:
    """The control of the test above: equality means something."""
    engine = make_engine("gemma3_text")
    tokens = prompt(601)
    parts = prefilled(engine, "whole", tokens)
    expected = tokens_of(run(engine, decode_command("whole", tokens[-1], 16)))
    good = select(tokens, 600, engine.facts.requirement, parts)
    damaged = tuple(
        RawPart(part.kind, part.start, part.token_count, memoryview(bytes(reversed(bytes(part.payload)))))
        if part.start + part.token_count == 600
        else part
        for part in good
    )
    opened(engine, "b")
    run(engine, ImportPrefix("b", 600, damaged))
    assert tokens_of(run(engine, decode_command("b", tokens[-1], 16))) != expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounded", [False, True], ids=["native", "bounded"])
def test_several_turns_capture_what_one_prefill_captures(kind: str, bounded: bool) -> None:
    engine = make_engine(kind, policy=BOUNDED if bounded else None)
    requirement = engine.facts.requirement
    first = prompt(301)
    captured = prefilled(engine, "chat", first)
    answer = tokens_of(run(engine, decode_command("chat", first[-1], 40)))
    assert engine.session_position("chat") == 300 + 40
    captured += parts_of(run(engine, Capture("chat", 256)))
    second = prompt(220, seed=5)
    history = np.concatenate([first, np.array(answer, np.int32), second])
    captured += parts_of(run(engine, Prefill("chat", history[340:-1])))
    position = len(history) - 1
    assert engine.session_position("chat") == position

    # The block the first turn's tail lies in is exported again, whole: keep each kind of part once.
    unique = {(part.kind, part.start, part.token_count): part for part in captured}
    fresh = index(prefilled(engine, "fresh", history))
    for key in unique.keys() & fresh.keys():
        if key[0] is not PartKind.STATE:
            ours, theirs = (np.frombuffer(found[key].payload, np.float32) for found in (unique, fresh))
            np.testing.assert_allclose(ours, theirs, atol=2e-3)
    opened(engine, "again")
    selected = select(history, position, requirement, list(unique.values()))
    assert isinstance(run(engine, ImportPrefix("again", position, selected))[-1], PrefixImported)
    expected = tokens_of(run(engine, decode_command("fresh", history[-1], 12)))
    assert tokens_of(run(engine, decode_command("chat", history[-1], 12))) == expected
    assert tokens_of(run(engine, decode_command("again", history[-1], 12))) == expected


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("gemma3_text", None), ("llama4", None), ("qwen3", BOUNDED), ("gemma3_text", BOUNDED)],
    ids=["gemma3_text", "llama4", "qwen3-bounded", "gemma3_text-bounded"],
)
def test_an_answer_longer_than_the_window_can_be_captured(kind: str, policy: CachePolicy | None) -> None:
    """The block that is half out of the window at the end was exported when its first row was about to leave."""
    engine = make_engine(kind, policy=policy)
    tokens = prompt(101)
    captured = prefilled(engine, "a", tokens)
    command = decode_command("a", tokens[-1], 300, temperature=1.0, seed=2)
    history = np.concatenate([tokens, np.array(tokens_of(run(engine, command)), np.int32)])
    assert engine.session_position("a") == 400
    later = parts_of(run(engine, Capture("a", 64)))
    unique = {(part.kind, part.start, part.token_count): part for part in [*captured, *later]}
    opened(engine, "b")
    selected = select(history, 400, engine.facts.requirement, list(unique.values()))
    assert isinstance(run(engine, ImportPrefix("b", 400, selected))[-1], PrefixImported)
    fresh = index(prefilled(engine, "c", history))
    for part in selected:
        ours, theirs = (np.frombuffer(p.payload, np.float32) for p in (part, fresh[part.kind, part.start, part.token_count]))
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert continuation(engine, "a", history) == continuation(engine, "b", history)


def test_capture_of_a_long_stretch_comes_in_steps() -> None:
    engine = make_engine("qwen3")
    prefilled(engine, "a", prompt(2501))
    events = run(engine, Capture("a", 128))
    assert [type(event) for event in events] == [PartsCaptured] * 3
    spans = sorted((part.start, part.token_count) for part in parts_of(events))
    assert spans == [(start, min(64, 2500 - start)) for start in range(128, 2500, 64)]
    assert run(engine, Capture("a", 2500)) == [PartsCaptured("a", ())]


# --- decode: ends, cancelling, positions -----------------------------------------------------------------------------


def continuation(engine: MlxEngine, session: str, history: TokenArray) -> list[int]:
    """What follows ``history``, whose last token has no KV yet in ``session``."""
    assert engine.session_position(session) == len(history) - 1
    return tokens_of(run(engine, decode_command(session, history[-1], 8)))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, None) for kind in MORE_KINDS), ("gemma3_text", BOUNDED), ("qwen3", BOUNDED)],
    ids=[*MORE_KINDS, "gemma3_text-bounded", "qwen3-bounded"],
)
@pytest.mark.parametrize("length", [64, 190], ids=["short", "past-the-window"])
def test_kv_is_exact_however_a_decode_ends(kind: str, length: int, policy: CachePolicy | None) -> None:
    """After each kind of end, the session continues as one that prefilled the same tokens, and exports no wrong part."""
    engine = make_engine(kind, policy=policy)
    tokens = prompt(length + 1, seed=9)
    prefilled(engine, "plain", tokens)
    random: dict[str, Any] = {"temperature": 1.0, "seed": 4}
    answer = tokens_of(run(engine, decode_command("plain", tokens[-1], 20, **random)))
    count = next(n for n in range(3, 19) if answer[n] not in answer[:n])
    for end in ("eos", "cancel", "max"):
        prefilled(engine, end, tokens)
        if end == "cancel":
            steps = engine.handle(decode_command(end, tokens[-1], 20, **random))
            assert tokens_of([next(steps) for _ in range(count)]) == answer[:count]
            steps.close()  # type: ignore[attr-defined]
        elif end == "max":
            events = run(engine, decode_command(end, tokens[-1], count, **random))
            assert tokens_of(events) == answer[:count]
            assert events[-1] == DecodeFinished(end, StopReason.MAX_TOKENS, length + count)
        else:
            events = run(engine, decode_command(end, tokens[-1], 20, (answer[count],), **random))
            assert tokens_of(events) == answer[:count]
            assert events[-1] == DecodeFinished(end, StopReason.EOS, length + 1 + count)
        # The token sampled last has no KV yet; after EOS that is the one that was not handed out.
        sampled = count + 1 if end == "eos" else count
        history = np.concatenate([tokens, np.array(answer[:sampled], np.int32)])
        fresh = index(prefilled(engine, f"fresh-{end}", history))
        for part in parts_of(run(engine, Capture(end, 0))):
            key = (part.kind, part.start, part.token_count)
            if part.kind is not PartKind.STATE and key in fresh:
                ours, theirs = (np.frombuffer(found.payload, np.float32) for found in (part, fresh[key]))
                np.testing.assert_allclose(ours, theirs, atol=2e-3)
        assert continuation(engine, end, history) == continuation(engine, f"fresh-{end}", history), end


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, None) for kind in MORE_KINDS), ("qwen3", BOUNDED)],
    ids=[*MORE_KINDS, "qwen3-bounded"],
)
def test_a_taken_back_step_continues_bit_for_bit_as_if_it_had_never_run(kind: str, policy: CachePolicy | None) -> None:
    engine = make_engine(kind, policy=policy)
    tokens = prompt(257, seed=2)
    captured = {}
    for session in ("plain", "cancelled"):
        prefilled(engine, session, tokens)
        if session == "plain":
            run(engine, decode_command(session, tokens[-1], 3))
        else:
            steps = engine.handle(decode_command(session, tokens[-1], 30))
            for _ in range(3):
                next(steps)
            steps.close()  # type: ignore[attr-defined]
        assert engine.session_position(session) == 259
        captured[session] = index(parts_of(run(engine, Prefill(session, prompt(5, seed=3)))))
    assert captured["plain"].keys() == captured["cancelled"].keys()
    for key, part in captured["plain"].items():
        assert bytes(part.payload) == bytes(captured["cancelled"][key].payload), key


@pytest.mark.parametrize("kept", [True, False])
def test_the_row_a_taken_back_step_overwrote_is_never_exported(kept: bool) -> None:
    """Position - window lies on the block grid here, so the oldest held block is the one whose first row is damaged."""
    engine = make_engine("gemma3_text")
    length = tiny_models.WINDOW + BLOCK
    tokens = prompt(length, seed=4)
    prefilled(engine, "a", tokens[:-1])
    steps = engine.handle(decode_command("a", tokens[-2], 10))
    answer = tokens_of([next(steps), next(steps)])
    steps.close()  # type: ignore[attr-defined]
    assert engine.session_position("a") == length
    history = np.concatenate([tokens[:-1], np.array(answer, np.int32)])
    good = index(prefilled(engine, "b", history))
    if not kept:
        engine._sessions["a"].leaving_windows.clear()
    window_parts = [part for part in parts_of(run(engine, Capture("a", 0))) if part.kind is PartKind.WINDOW]
    # The damaged block was exported before the damage; without that copy it must be missing, not wrong.
    assert [part.start for part in window_parts] == ([64, 128] if kept else [128])
    for part in window_parts:
        ours, theirs = (np.frombuffer(p.payload, np.float32) for p in (part, good[part.kind, part.start, BLOCK]))
        np.testing.assert_allclose(ours, theirs, atol=2e-3)


@pytest.mark.parametrize("steps_taken", [0, 1, 2])
def test_cancel_in_the_middle_of_prefill_leaves_whole_segments(steps_taken: int) -> None:
    engine = make_engine("lfm2")
    tokens = prompt(601)
    opened(engine, "a", "b")
    steps = engine.handle(Prefill("a", tokens[:-1]))
    for _ in range(steps_taken):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    position = SEGMENT * steps_taken
    assert engine.session_position("a") == position
    run(engine, Prefill("a", tokens[position:-1]))
    run(engine, Prefill("b", tokens[:-1], capture=False))
    assert continuation(engine, "a", tokens) == continuation(engine, "b", tokens)


def test_decode_stops_when_the_context_is_full() -> None:
    model = tiny_models.build("qwen3", seed=1)
    model.args.max_position_embeddings = 70
    engine = engine_from_model(model, name="small")
    tokens = prompt(66)
    prefilled(engine, "a", tokens)
    events = run(engine, decode_command("a", tokens[-1], 50))
    assert len(tokens_of(events)) == 5
    assert events[-1] == DecodeFinished("a", StopReason.CONTEXT_FULL, 70)
    assert run(engine, decode_command("a", 1, 5)) == [DecodeFinished("a", StopReason.CONTEXT_FULL, 70)]
    [failed] = run(engine, Prefill("a", prompt(1)))
    assert isinstance(failed, CommandFailed)
    assert "exceed the context" in failed.message


# --- sessions --------------------------------------------------------------------------------------------------------


def alternate(*iterators: Iterator[Event]) -> list[list[Event]]:
    results: list[list[Event]] = [[] for _ in iterators]
    live = list(zip(iterators, results, strict=True))
    while live:
        for item in list(live):
            event = next(item[0], None)
            if event is None:
                live.remove(item)
            else:
                item[1].append(event)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_sessions_equal_sequential_ones(kind: str) -> None:
    engine = make_engine(kind)
    prompts = {"a": prompt(601, seed=1), "b": prompt(430, seed=2)}
    sampling: dict[str, Any] = {"a": {"temperature": 1.0, "seed": 7}, "b": {"temperature": 0.7, "top_p": 0.9, "seed": 8}}
    outcomes = []
    for interleaved in (False, True):
        names = [f"{name}-{interleaved}" for name in prompts]
        opened(engine, *names)
        prefills = [engine.handle(Prefill(n, prompts[n[0]][:-1])) for n in names]
        decodes = [engine.handle(decode_command(n, prompts[n[0]][-1], 20, **sampling[n[0]])) for n in names]
        if interleaved:
            # A prefill of one session runs between the decode steps of the other.
            alternate(prefills[0])
            results = alternate(decodes[0], prefills[1])
            results += alternate(decodes[1])
        else:
            alternate(prefills[0])
            results = [*alternate(decodes[0]), *alternate(prefills[1]), *alternate(decodes[1])]
        outcomes.append(([tokens_of(events) for events in results], [bytes(p.payload) for p in parts_of(results[1])]))
    assert outcomes[0] == outcomes[1]
    assert [len(tokens) for tokens in outcomes[0][0]] == [20, 0, 20]


def test_one_seed_repeats_and_another_differs() -> None:
    engine = make_engine("qwen3", eos_token_ids=(3,))
    tokens = prompt(65)
    outcomes = []
    for session, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        prefilled(engine, session, tokens)
        outcomes.append(tokens_of(run(engine, decode_command(session, tokens[-1], 30, temperature=2.0, seed=seed))))
    assert outcomes[0] == outcomes[1]
    assert len({tuple(outcome) for outcome in outcomes}) == 4


def test_sampling_leaves_the_global_random_state_alone() -> None:
    engine = make_engine("qwen3")
    tokens = prompt(65)
    prefilled(engine, "a", tokens)
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    run(engine, decode_command("a", tokens[-1], 5, temperature=1.0, seed=1))
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_close_frees_the_session() -> None:
    engine = make_engine("qwen3")
    prefilled(engine, "a", prompt(200))
    assert engine.session_kv_bytes("a") > 0
    assert run(engine, CloseSession("a")) == [SessionReady("a")]
    assert engine.session_kv_bytes("a") == 0
    assert engine.session_position("a") is None
    [failed] = run(engine, CloseSession("a"))
    assert failed == CommandFailed("a", "no such session", 0)
    opened(engine, "a")
    assert engine.session_position("a") == 0
    engine.close()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (OpenSession("a"), "already open"),
        (Prefill("nobody", prompt(3)), "no such session"),
        (Capture("nobody", 0), "no such session"),
        (Prefill("a", np.empty(0, np.int32)), "at least one token"),
        (Prefill("a", np.zeros((2, 2), np.int32)), "at least one token"),
        (Prefill("a", np.array([1, 512], np.int32)), "outside the vocabulary of 512"),
        (Prefill("a", np.array([-1], np.int32)), "outside the vocabulary of 512"),
        (Prefill("a", np.zeros(5000, np.int32)), "exceed the context of 4096"),
        (decode_command("a", 512, 5), "outside the vocabulary"),
        (decode_command("a", 1, 0), "max_tokens must be at least 1"),
        (decode_command("a", 1, 1, temperature=-1.0), "temperature must be at least 0"),
        (decode_command("a", 1, 1, temperature=float("nan")), "temperature must be at least 0"),
        (decode_command("a", 1, 1, top_p=1.5), "top_p must be between 0 and 1"),
        (decode_command("a", 1, 1, top_k=-1), "top_k must be at least 0"),
        (decode_command("a", 1, 1, seed=-1), "seed must be at least 0"),
        (Capture("a", 101), "cannot capture from position 101"),
        (Capture("a", -1), "cannot capture from position -1"),
    ],
)
def test_bad_commands_fail_in_one_line_and_change_nothing(command: Command, message: str) -> None:
    engine = make_engine("qwen3")
    tokens = prompt(101)
    prefilled(engine, "a", tokens)
    prefilled(engine, "control", tokens)
    [failed] = run(engine, command)
    assert isinstance(failed, CommandFailed)
    assert message in failed.message
    assert "\n" not in failed.message
    assert failed.position == (100 if command.session_id == "a" else 0)
    assert continuation(engine, "a", tokens) == continuation(engine, "control", tokens)


def test_a_failed_import_leaves_an_empty_usable_session() -> None:
    engine = make_engine("gemma3_text")
    tokens = prompt(601)
    parts = select(tokens, 600, engine.facts.requirement, prefilled(engine, "a", tokens))
    short = RawPart(parts[0].kind, parts[0].start, parts[0].token_count, parts[0].payload[:-4])
    empty = RawPart(parts[0].kind, parts[0].start, parts[0].token_count, memoryview(b""))
    opened(engine, "b")
    for position, wrong in [
        (600, parts[1:]),
        (600, (short, *parts[1:])),
        (600, (empty, *parts[1:])),
        (600, ()),
        (-1, parts),
        (9999, parts),
        (64, parts),
    ]:
        run(engine, Prefill("b", tokens[:70]))
        [failed] = run(engine, ImportPrefix("b", position, wrong))
        assert isinstance(failed, CommandFailed)
        assert failed.position == 0
        assert failed.message
        assert "\n" not in failed.message
        assert ("cannot be decoded" in failed.message) == (wrong[:1] == (empty,))
        assert engine.session_position("b") == 0
    [emptied] = run(engine, ImportPrefix("b", 0, ()))
    assert isinstance(emptied, PrefixImported)
    run(engine, Prefill("b", tokens[:-1]))
    assert continuation(engine, "b", tokens) == continuation(engine, "a", tokens)


class _Exploding:
    """A model that fails in the middle of a forward pass, after some caches were written, when told to."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.broken = False
        self.error: Exception = RuntimeError("out of memory\nwith a second line")

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        logits = self.model(tokens, cache=cache)
        if self.broken:
            raise self.error
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize("decoding", [False, True])
def test_a_failing_model_empties_only_its_session(decoding: bool) -> None:
    model = _Exploding(model_of("gemma3_text"))
    engine = engine_from_model(model, name="exploding")
    tokens = prompt(301)
    prefilled(engine, "a", tokens)
    prefilled(engine, "b", tokens)
    steps = engine.handle(decode_command("a", tokens[-1], 9) if decoding else Prefill("a", prompt(400)))
    next(steps)
    model.broken = True
    rest = list(steps)
    model.broken = False
    assert rest[-1] == CommandFailed("a", "the model failed: out of memory", 0)
    run(engine, Prefill("a", tokens[:-1]))
    assert continuation(engine, "a", tokens) == continuation(engine, "b", tokens)


def test_a_bug_in_the_model_escapes_and_empties_the_session() -> None:
    model = _Exploding(model_of("gemma3_text"))
    engine = engine_from_model(model, name="exploding")
    tokens = prompt(301)
    prefilled(engine, "a", tokens)
    model.broken, model.error = True, TypeError("a bug")
    with pytest.raises(TypeError, match="a bug"):
        run(engine, Prefill("a", prompt(400)))
    model.broken = False
    assert engine.session_position("a") == 0
    run(engine, Prefill("a", tokens[:-1]))
    prefilled(engine, "b", tokens)
    assert continuation(engine, "a", tokens) == continuation(engine, "b", tokens)


def test_a_session_takes_one_command_at_a_time() -> None:
    engine = make_engine("qwen3")
    tokens = prompt(300)
    opened(engine, "a")
    steps = engine.handle(Prefill("a", tokens))
    next(steps)
    assert run(engine, CloseSession("a")) == [CommandFailed("a", "the session is busy with another command", 256)]
    assert len(list(steps)) == 1
    assert run(engine, CloseSession("a")) == [SessionReady("a")]


def test_segments_must_be_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="not whole blocks"):
        engine_from_model(model_of("qwen3"), name="x", block_tokens=64, segment_tokens=100)


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    engine = make_engine("qwen3")
    tokens = prompt(100)
    prefilled(engine, "a", tokens)
    prefilled(engine, "b", tokens)
    greedy = tokens_of(run(engine, decode_command("a", tokens[-1], 8)))
    assert tokens_of(run(engine, decode_command("b", tokens[-1], 8, temperature=temperature, seed=2))) == greedy
