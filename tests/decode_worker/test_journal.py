"""Journals against a toy engine that is lost at every event: the stream of events is that of an undisturbed engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.decode_worker.journal import Journal
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Capture,
    Command,
    CommandFailed,
    Decode,
    DecodeFinished,
    Event,
    FinishImport,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    Sampling,
    SegmentComputed,
    TokenDecoded,
)
from tests.decode_worker.kit import comparable, exported, life, run
from tests.decode_worker.toy_engine import BLOCK, FAIL, ToyEngine
from wire.errors import LocalProtocolError
from wire.messages import StopReason

SEED = 99


def prompt(length: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 900, length).astype(np.int32)


class Restored:
    """Runs commands of one session through a journal, in an engine that is lost whenever ``lose`` says so."""

    def __init__(self, losses: Sequence[bool]) -> None:
        self._losses = iter(losses)
        self.journal = Journal("s")
        self._engine = ToyEngine()
        list(self._engine.handle(OpenSession("s")))

    def _lost(self) -> bool:
        return next(self._losses, False)

    def _replace_engine(self) -> None:
        self._engine = ToyEngine()
        list(self._engine.handle(OpenSession("s")))
        for command in self.journal.replay():
            assert not any(isinstance(event, CommandFailed) for event in self._engine.handle(command))
        assert self._engine.session_position("s") == self.journal.position

    def run(self, command: Command, steps: int) -> list[Event]:
        """The command's first ``steps`` events; left after them."""
        self.journal.begin(command, lambda: SEED)
        events: list[Event] = []
        iterator = self._resumed()
        while len(events) < steps:
            if self._lost():
                self._replace_engine()
                iterator = self._resumed()
                continue
            event = next(iterator, None)
            if event is None:
                break
            if self._lost():  # after the engine's work, before its answer
                self._replace_engine()
                iterator = self._resumed()
                continue
            self.journal.acknowledge(event)
            events.append(comparable(event))
        getattr(iterator, "close", lambda: None)()
        assert self.journal.end() == self.journal.position
        if self._engine.session_position("s") != self.journal.position:
            self._replace_engine()
        return events

    def _resumed(self) -> Iterator[Event]:
        resume = self.journal.resume()
        if resume is None:
            return iter(())
        iterator = iter(self._engine.handle(resume.command))
        for index in range(resume.known_events):
            assert self.journal.is_known(index, next(iterator))
        return iterator


def undisturbed(engine: ToyEngine, command: Command, steps: int) -> list[Event]:
    if isinstance(command, Decode) and command.sampling.temperature and command.sampling.seed is None:
        command = replace(command, sampling=replace(command.sampling, seed=SEED))
    iterator = iter(engine.handle(command))
    events: list[Event] = []
    while len(events) < steps and (event := next(iterator, None)) is not None:
        events.append(comparable(event))
    # As the real engine: the token handed out last has no KV when a decode is left.
    getattr(iterator, "close", lambda: None)()
    return events


PARTS = exported(ToyEngine(), prompt(40, 7))
SAMPLINGS = st.sampled_from([Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=1.0)])


def command_lists() -> st.SearchStrategy[list[tuple[Command, int]]]:
    lengths = st.integers(1, 30)
    positions = st.integers(1, 10).map(lambda blocks: blocks * BLOCK)
    commands: st.SearchStrategy[Command] = st.one_of(
        lengths.map(lambda length: Prefill("s", prompt(length, length))),
        st.just(Prefill("s", np.array([1, 2, 3, FAIL], dtype=np.int32))),
        st.builds(
            lambda token, count, sampling, eos: Decode("s", token, count, tuple(range(eos)), sampling),
            st.integers(0, 899),
            st.integers(1, 9),
            SAMPLINGS,
            st.sampled_from([0, 0, 200]),
        ),
        positions.map(lambda position: ImportPrefix("s", position, PARTS[: position // BLOCK])),
        positions.map(lambda position: BeginImport("s", position)),
        st.integers(0, 9).map(lambda index: AddParts("s", PARTS[index : index + 1])),
        st.just(FinishImport("s")),
        st.just(Capture("s", 0)),
    )
    return st.lists(st.tuples(commands, st.sampled_from([1, 2, 99, 99, 99])), max_size=12)


@settings(max_examples=300, deadline=None)
@given(command_lists(), st.lists(st.booleans(), max_size=60))
def test_losses_change_nothing(commands: list[tuple[Command, int]], losses: list[bool]) -> None:
    engine, restored = ToyEngine(), Restored(losses)
    list(engine.handle(OpenSession("s")))
    for command, steps in commands:
        assert restored.run(command, steps) == undisturbed(engine, command, steps)
        assert restored.journal.position == engine.session_position("s")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=1.0)])
def test_a_loss_at_every_event_of_a_whole_life(sampling: Sampling) -> None:
    commands = life("s", prompt(60, 7), PARTS, 5, sampling)[1:-1]
    expected = Restored(())
    wanted = [event for command in commands for event in expected.run(command, 99)]
    assert any(isinstance(event, TokenDecoded) for event in wanted)
    looks = 2 * (len(wanted) + len(commands))
    for at in range(looks):
        disturbed = Restored([False] * at + [True])
        assert [event for command in commands for event in disturbed.run(command, 99)] == wanted, at


def test_a_journal_that_forgets_a_token_would_be_found_out() -> None:
    engine = ToyEngine()
    decode = Decode("s", 3, 4, ())
    first = run(engine, [OpenSession("s"), Prefill("s", prompt(10)), decode])
    other = run(ToyEngine(), [OpenSession("s"), Prefill("s", prompt(10)[:-1]), decode])
    assert first[-5:] != other[-5:]


def begun(command: Command) -> Journal:
    journal = Journal("s")
    journal.begin(command, lambda: SEED)
    return journal


def test_a_decode_without_a_seed_gets_one_only_when_it_samples() -> None:
    sampled = begun(Decode("s", 1, 2, (), Sampling(temperature=0.5))).resume()
    assert sampled is not None
    assert isinstance(sampled.command, Decode)
    assert sampled.command.sampling.seed == SEED
    greedy = begun(Decode("s", 1, 2, ())).resume()
    assert greedy is not None
    assert greedy.command == Decode("s", 1, 2, ())


def test_a_prefill_goes_on_with_the_tokens_that_are_left() -> None:
    journal = begun(Prefill("s", prompt(20)))
    journal.acknowledge(SegmentComputed("s", 8, (), 0.0))
    resume = journal.resume()
    assert resume is not None
    assert isinstance(resume.command, Prefill)
    assert resume.command.tokens.tolist() == prompt(20)[8:].tolist()
    assert [command.tokens.tolist() for command in journal.replay() if isinstance(command, Prefill)] == [
        prompt(20)[:8].tolist()
    ]


def test_what_is_acknowledged_to_its_end_is_not_run_again() -> None:
    journal = begun(Prefill("s", prompt(8)))
    journal.acknowledge(SegmentComputed("s", 8, (), 0.0))
    assert journal.resume() is None


def test_parts_are_kept_until_another_import() -> None:
    journal = begun(ImportPrefix("s", 8, PARTS[:2]))
    journal.acknowledge(PrefixImported("s", 8, 0.0))
    journal.end()
    assert journal.kept_bytes == 2 * 4 * BLOCK
    journal.begin(ImportPrefix("s", 0, ()), lambda: SEED)
    journal.acknowledge(PrefixImported("s", 0, 0.0))
    journal.end()
    assert journal.kept_bytes == 0
    assert list(journal.replay()) == []


def test_tokens_to_be_run_again_are_counted() -> None:
    journal = begun(Decode("s", 5, 3, ()))
    for token in (1, 2, 3):
        journal.acknowledge(TokenDecoded("s", token))
    journal.acknowledge(DecodeFinished("s", StopReason.MAX_TOKENS, 3))
    journal.end()
    assert journal.replayed_tokens == 3
    assert [command.last_token for command in journal.replay() if isinstance(command, Decode)] == [5, 1, 2]


@pytest.mark.parametrize(
    ("command", "event"),
    [
        (Prefill("s", prompt(8)), SegmentComputed("s", 9, (), 0.0)),
        (Prefill("s", prompt(8)), SegmentComputed("s", 0, (), 0.0)),
        (Prefill("s", prompt(8)), TokenDecoded("s", 1)),
        (Prefill("s", prompt(8)), SegmentComputed("other", 8, (), 0.0)),
        (Prefill("s", prompt(8)), CommandFailed("s", "no", 5)),
        (Decode("s", 1, 2, ()), DecodeFinished("s", StopReason.EOS, 2)),
        (Decode("s", 1, 2, ()), PartsCaptured("s", ())),
        (ImportPrefix("s", 8, ()), PrefixImported("s", 4, 0.0)),
        (FinishImport("s"), PrefixImported("s", 4, 0.0)),
    ],
)
def test_an_impossible_event_is_refused_and_changes_nothing(command: Command, event: Event) -> None:
    journal = begun(command)
    with pytest.raises(LocalProtocolError):
        journal.acknowledge(event)
    assert journal.position == 0
    assert list(journal.replay()) == []


def test_commands_of_a_session_follow_each_other() -> None:
    journal = begun(Capture("s", 0))
    with pytest.raises(LocalProtocolError):
        journal.begin(Capture("s", 0), lambda: SEED)
    journal.end()
    with pytest.raises(LocalProtocolError):
        journal.begin(Capture("other", 0), lambda: SEED)
