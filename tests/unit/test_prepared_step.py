"""The first step after an import, prepared before the parts are there: it must change nothing but the time it takes."""

from __future__ import annotations

import pytest

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Capture,
    CloseSession,
    Command,
    Decode,
    FinishImport,
    OpenSession,
    PartsCaptured,
    Prefill,
    SegmentComputed,
    TokenDecoded,
)
from kakeya_zmq.model.engine import MlxEngine
from tests import tiny_models
from tests.unit.test_engine import BOUNDED, make_engine, prefilled, prompt, run, select

POSITIONS = (64, 128, 250)
"""Below, at and above the window of the tiny models, at the end of a block and within one."""
SINK_WINDOW = "sink-window"
"""Stands for a model with our own bounded cache."""


def engine_of(kind: str) -> MlxEngine:
    return make_engine("qwen3", policy=BOUNDED) if kind == SINK_WINDOW else make_engine(kind)


def results(engine: MlxEngine, session: str, command: Command) -> list[object]:
    """What a command gives that may not depend on how the session came to its KV."""
    found: list[object] = []
    for event in run(engine, command):
        match event:
            case TokenDecoded(token=token):
                found.append(token)
            case SegmentComputed(parts=parts) | PartsCaptured(parts=parts):
                found += [(part.kind, part.start, bytes(part.payload)) for part in parts]
            case _:
                pass
    return [*found, engine.session_position(session)]


def imported(engine: MlxEngine, session: str, position: int, parts: tuple[RawPart, ...], token: int | None) -> None:
    run(engine, OpenSession(session))
    run(engine, BeginImport(session, position, token))
    for part in reversed(parts):
        run(engine, AddParts(session, (part,)))
    run(engine, FinishImport(session))
    assert engine.session_position(session) == position


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", [*tiny_models.KINDS, SINK_WINDOW])
def test_whatever_follows_is_bitwise_the_same(kind: str, position: int) -> None:
    engine = engine_of(kind)
    tokens = prompt(420)
    token = int(tokens[position])
    parts = select(tokens, position, engine.facts.requirement, prefilled(engine, "whole", tokens[: position + 1]))
    start = position - position % 64
    followed: dict[str, list[Command]] = {
        "the expected answer": [Decode("s", token, 5, ()), Capture("s", start)],
        "an answer to another token": [Decode("s", token + 1, 5, ()), Capture("s", start)],
        "more of the prompt": [Prefill("s", tokens[position:]), Decode("s", int(tokens[0]), 3, ())],
        "a look at what is there": [Capture("s", start), Decode("s", token, 5, ())],
        "an answer that is refused": [Decode("s", token, 0, ()), Decode("s", token, 3, ()), Capture("s", start)],
        "another import": [BeginImport("s", position, token), Prefill("s", tokens[position:]), Capture("s", start)],
    }
    for what, commands in followed.items():
        outcomes = []
        for next_token in (None, token):
            imported(engine, "s", position, parts, next_token)
            outcomes.append([results(engine, "s", command) for command in commands])
            run(engine, CloseSession("s"))
        assert outcomes[0] == outcomes[1], what


@pytest.mark.parametrize("token", [-1, tiny_models.VOCABULARY])
def test_a_token_that_cannot_be_is_not_prepared_for(token: int) -> None:
    engine = make_engine("gemma3_text")
    tokens = prompt(300)
    parts = select(tokens, 256, engine.facts.requirement, prefilled(engine, "whole", tokens))
    imported(engine, "s", 256, parts, token)
    assert any(isinstance(event, TokenDecoded) for event in run(engine, Decode("s", int(tokens[256]), 1, ())))


def test_a_step_is_prepared_and_used_where_nothing_is_against_it() -> None:
    engine = make_engine("gemma3_text")
    tokens = prompt(300)
    parts = select(tokens, 250, engine.facts.requirement, prefilled(engine, "whole", tokens[:251]))
    calls: list[int] = []
    model = engine._model

    def counted(tokens: object, cache: object) -> object:
        calls.append(1)
        return model(tokens, cache=cache)

    engine._model = counted
    imported(engine, "s", 250, parts, int(tokens[250]))
    assert len(calls) == 1, "before the parts were there"
    steps = engine.handle(Decode("s", int(tokens[250]), 1, ()))
    assert isinstance(next(steps), TokenDecoded)
    assert len(calls) == 1, "and not again"
