"""Importing while parts arrive: the commands a preparation issues, and what the MLX engine makes of them."""

from __future__ import annotations

import pytest

from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    CommandFailed,
    FinishImport,
    ImportAdvanced,
    ImportPrefix,
    OpenSession,
    Prefill,
    PrefixImported,
)
from kakeya_zmq.protocol.effects import AskFailed, CancelCommand, ConnectReceiver, LaneFinished, PartsReceived, RunCommand
from kakeya_zmq.protocol.prepare_values import PreparationSettings, Unavailable
from tests.unit.preparation_kit import FULL
from tests.unit.test_engine import make_engine, prefilled, prompt, run, select
from tests.unit.test_prompt_preparation import Desk, desk, found, parts_of
from wire.errors import FailureCode
from wire.messages import Fetch, Lookup, PrefillPolicy

SMALL_BATCHES = PreparationSettings(remote_minimum_tokens=8, early_import_bytes=48)


def fetching(d: Desk) -> ConnectReceiver:
    """Answer the lookup with everything and grant the fetch; returns the lane."""
    (lookup,) = d.asks(Lookup)
    d.feed(found(lookup, parts_of(65, 64)))
    (fetch,) = d.asks(Fetch)
    return d.grant(fetch.ask)


def kinds(d: Desk) -> list[str]:
    return [type(run.command).__name__ for run in d.all(RunCommand)]


def test_parts_are_copied_as_they_arrive_and_the_rest_is_quick() -> None:
    d = desk(65, FULL, caches=["a"], settings=SMALL_BATCHES)
    lane = fetching(d)
    parts = parts_of(65, 64)
    d.feed(PartsReceived(lane.lane, parts[:2]))
    assert kinds(d) == ["BeginImport", "AddParts"]
    d.feed(PartsReceived(lane.lane, parts[2:3]))
    assert kinds(d) == ["BeginImport", "AddParts", "AddParts"]
    d.deliver(lane, parts[3:])
    assert kinds(d)[-1] == "FinishImport"
    d.run_engine()
    assert d.ready().position == 64
    assert ImportPrefix not in [type(command) for command in d.engine.commands]


def test_small_arrivals_wait_for_a_batch() -> None:
    settings = PreparationSettings(remote_minimum_tokens=8, early_import_bytes=1000)
    d = desk(65, FULL, caches=["a"], settings=settings)
    lane = fetching(d)
    d.deliver(lane, parts_of(65, 64))
    assert kinds(d) == ["BeginImport", "AddParts", "FinishImport"]


def test_an_early_import_that_fails_is_done_in_one_piece() -> None:
    d = desk(65, FULL, caches=["a"], settings=SMALL_BATCHES)
    d.engine.early_import_fails = True
    d.deliver(fetching(d), parts_of(65, 64))
    d.run_engine()
    assert d.ready().position == 64
    assert [type(command) for command in d.engine.commands][-2:] == [FinishImport, ImportPrefix]
    assert d.count("import_failures") == 0, "nothing was wrong with the parts"


def test_parts_that_no_import_takes_are_dropped_and_computed_again() -> None:
    d = desk(65, FULL, caches=["a"], settings=SMALL_BATCHES)
    d.engine.early_import_fails = d.engine.import_fails = True
    d.deliver(fetching(d), parts_of(65, 64))
    d.run_engine()
    assert d.ready().position == 64
    assert isinstance(d.engine.commands[-1], Prefill)
    assert d.count("import_failures") == 1


def test_a_shorter_prefix_after_a_failure_is_a_new_import() -> None:
    d = desk(65, FULL, caches=["a"], settings=SMALL_BATCHES)
    lane = fetching(d)
    d.feed(PartsReceived(lane.lane, parts_of(65, 64)[:2]))
    d.feed(LaneFinished(lane.lane, False, "broken", 0))
    d.run_engine()
    assert d.ready().position == 64
    imported = [command for command in d.engine.commands if isinstance(command, ImportPrefix)]
    assert [command.position for command in imported] == [32], "what arrived whole is used, the rest computed"


def test_a_preparation_that_ends_lets_go_of_its_early_import() -> None:
    d = desk(65, FULL, caches=["a"], settings=SMALL_BATCHES, policy=PrefillPolicy.REMOTE_REQUIRED)
    lane = fetching(d)
    d.feed(PartsReceived(lane.lane, parts_of(65, 64)[:2]))
    (fetch,) = d.asks(Fetch)
    effects = d.feed(AskFailed(fetch.ask, FailureCode.UNAVAILABLE, "gone"))
    assert isinstance(d.machine.outcome, Unavailable)
    assert [type(effect) for effect in effects].count(CancelCommand) == 2


# --- the real engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3", "lfm2"])
def test_parts_in_any_order_make_the_same_session_as_an_import_in_one_piece(kind: str) -> None:
    engine = make_engine(kind)
    tokens = prompt(321)
    parts = select(tokens, 256, engine.facts.requirement, prefilled(engine, "whole", tokens))
    continued = []
    for session in ("one", "early"):
        run(engine, OpenSession(session))
        if session == "one":
            (event,) = run(engine, ImportPrefix(session, 256, parts))
        else:
            assert isinstance(run(engine, BeginImport(session, 256))[0], ImportAdvanced)
            for part in reversed(parts):
                assert isinstance(run(engine, AddParts(session, (part,)))[0], ImportAdvanced)
            assert engine.session_position(session) == 0, "the session's own KV stays until the end"
            (event,) = run(engine, FinishImport(session))
        assert isinstance(event, PrefixImported)
        assert event.position == engine.session_position(session) == 256
        events = run(engine, Prefill(session, tokens[256:320]))
        continued.append([bytes(p.payload) for e in events for p in e.parts])
    assert continued[0] == continued[1]


def test_a_failed_early_import_leaves_the_session_as_it_was() -> None:
    engine = make_engine("gemma3_text")
    tokens = prompt(321)
    parts = select(tokens, 256, engine.facts.requirement, prefilled(engine, "a", tokens))
    for spoiled in (parts[1:], (*parts, parts[0])):
        run(engine, BeginImport("a", 256))
        events = [*run(engine, AddParts("a", spoiled)), *run(engine, FinishImport("a"))]
        assert any(isinstance(event, CommandFailed) for event in events)
        assert engine.session_position("a") == 320
    (event,) = run(engine, FinishImport("a"))
    assert isinstance(event, CommandFailed), "nothing was begun"
    run(engine, BeginImport("a", 256))
    run(engine, Prefill("a", tokens[320:321]))
    (event,) = run(engine, AddParts("a", parts))
    assert isinstance(event, CommandFailed), "another command forgets what was begun"
    assert engine.session_position("a") == 321
