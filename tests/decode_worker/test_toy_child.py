"""Real child processes around a toy engine: killed at every message, hanging, refusing, dying again and again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.decode_worker.restarts import RestartLimits
from kakeya_zmq.decode_worker.values import WorkerState, WorkerUnavailable
from kakeya_zmq.engine import (
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    EngineMemory,
    Event,
    ImportPrefix,
    OpenSession,
    Prefill,
    PrefixImported,
    Sampling,
    SessionReady,
    TokenDecoded,
)
from kakeya_zmq.engine_runner import EngineFault, StepInterrupted
from tests.decode_worker.kit import (
    GREEDY,
    PATIENT,
    SAMPLED,
    Boundaries,
    comparable,
    exported,
    failures_of,
    kill,
    kill_at_every_message,
    life,
    messages_at_least,
    run,
    stop,
    tokens_of,
    toy_settings,
    worker,
)
from tests.decode_worker.toy_engine import BLOCK, BUG, EXIT, FAIL, HANG, ToyEngine
from wire.errors import ModelError

PROMPT = np.random.default_rng(1).integers(0, 900, 40).astype(np.int32)
PARTS = exported(ToyEngine(), PROMPT[:16])
HANG_TIMEOUT_S = 2.0


def settings_bytes(**values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


@pytest.fixture
def boundaries() -> Boundaries:
    return Boundaries()


@pytest.fixture
def child(boundaries: Boundaries) -> Iterator[DecodeWorkerEngine]:
    with worker(toy_settings(), boundaries) as engine:
        yield engine


def test_undisturbed_it_is_the_engine_itself(child: DecodeWorkerEngine) -> None:
    commands = life("s", PROMPT, PARTS, 3, SAMPLED)
    assert run(child, commands) == run(ToyEngine(), commands)
    assert child.figures().restarts == 0
    assert child.tokens_per_second == 123.0
    assert child.facts == ToyEngine().facts


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_kill_at_every_message_of_a_whole_life_changes_nothing(
    child: DecodeWorkerEngine, boundaries: Boundaries, sampling: Sampling, every: int
) -> None:
    commands = life("s", PROMPT, PARTS, 3, sampling)
    kills = kill_at_every_message(child, boundaries, (), commands, run(ToyEngine(), commands), every)
    assert kills >= messages_at_least(commands, run(ToyEngine(), commands)) // every
    assert child.figures().hangs == 0
    assert child.figures().restarts >= kills - 1  # the last one may have been killed with its last message


def steps(engine: Any, command: Any) -> Iterator[Event]:
    return iter(engine.handle(command))


def test_sessions_that_take_turns_all_come_back(child: DecodeWorkerEngine) -> None:
    names = ["a", "b", "c"]
    reference = ToyEngine()
    wanted: dict[str, list[Event]] = {}
    running: dict[str, Iterator[Event]] = {}
    for index, name in enumerate(names):
        prompt = PROMPT[index:]
        decode = Decode(name, 7 + index, 6, (), (GREEDY, SAMPLED, Sampling(1.0, seed=3))[index])
        wanted[name] = run(reference, [OpenSession(name), Prefill(name, prompt), decode])[-7:]
        run(child, [OpenSession(name), Prefill(name, prompt)])
        running[name] = steps(child, decode)
    found: dict[str, list[Event]] = {name: [] for name in names}
    for turn in range(8):
        for name in names:
            if (turn, name) in ((2, "b"), (4, "a")):
                kill(child)
            found[name] += [event for event in [next(running[name], None)] if event is not None]
    assert found == wanted
    assert child.figures().restarts == 2


def test_an_idle_child_that_dies_is_replaced_when_it_is_wanted(child: DecodeWorkerEngine) -> None:
    run(child, [OpenSession("s"), Prefill("s", PROMPT)])
    before = child.figures()
    kill(child)
    assert child.figures().state == WorkerState.LOST
    assert child.session_position("s") == len(PROMPT)
    events = run(child, [Decode("s", 1, 4, ())])
    assert events == run(ToyEngine(), [OpenSession("s"), Prefill("s", PROMPT), Decode("s", 1, 4, ())])[-5:]
    after = child.figures()
    assert (after.state, after.restarts, after.restored_sessions) == (WorkerState.READY, 1, 1)
    assert after.pid not in (0, before.pid)
    assert child.session_kv_bytes("s") == 4 * (len(PROMPT) + 4)


def test_a_hang_is_recovered_from_inside_its_timeout(boundaries: Boundaries) -> None:
    decode: list[Command] = [OpenSession("s"), Prefill("s", PROMPT), Decode("s", 1, 5, (), SAMPLED)]
    wanted = run(ToyEngine(), decode)
    with worker(toy_settings(step_timeout_s=HANG_TIMEOUT_S), boundaries) as engine:
        boundaries.arm(40, lambda: stop(engine))
        assert run(engine, decode) == wanted
        assert len(boundaries.seen) > 60
        figures = engine.figures()
        assert (figures.hangs, figures.restarts, figures.restored_sessions) == (1, 1, 1)


@pytest.mark.slow
def test_a_hang_at_any_message_of_a_whole_life_changes_nothing(boundaries: Boundaries) -> None:
    """At each seventh message: imports, segments, tokens, captures and ends are all among them."""
    commands = life("s", PROMPT, PARTS, 3, SAMPLED)
    with worker(toy_settings(step_timeout_s=HANG_TIMEOUT_S), boundaries) as engine:
        hangs = kill_at_every_message(engine, boundaries, (), commands, run(ToyEngine(), commands), 7, harm=stop)
        figures = engine.figures()
        # What hangs when its session is closed, or after its last message, is replaced only when it is wanted.
        assert figures.hangs >= hangs - 1
        assert figures.restarts >= figures.hangs - 1


@pytest.mark.parametrize(("token", "said"), [(EXIT, "ended with status 7"), (HANG, "did not answer in time")])
def test_what_kills_every_child_fails_once_tried_twice_and_harms_nobody_else(token: int, said: str) -> None:
    with worker(toy_settings(step_timeout_s=HANG_TIMEOUT_S)) as engine:
        run(engine, [OpenSession("good"), Prefill("good", PROMPT), OpenSession("bad"), Prefill("bad", PROMPT)])
        (failed,) = run(engine, [Prefill("bad", np.array([token], dtype=np.int32))])
        assert isinstance(failed, CommandFailed)
        assert said in failed.message
        assert (failed.position, engine.session_position("bad")) == (0, 0)
        assert engine.figures().restarts == 1  # the second child is gone, too, and replaced when it is wanted
        wanted = run(ToyEngine(), [OpenSession("good"), Prefill("good", PROMPT), Decode("good", 1, 3, ())])[-4:]
        assert run(engine, [Decode("good", 1, 3, ())]) == wanted
        # The emptied session is as good as new.
        assert failures_of(run(engine, [Prefill("bad", PROMPT), Decode("bad", 1, 3, ())])) == []


def test_failures_of_the_engine_stay_what_they_are(child: DecodeWorkerEngine) -> None:
    run(child, [OpenSession("s"), Prefill("s", PROMPT)])
    (failed,) = run(child, [Prefill("s", np.zeros(0, dtype=np.int32))])
    assert failed == CommandFailed("s", "too many tokens, or none", len(PROMPT))
    assert run(child, [Prefill("s", np.array([FAIL], dtype=np.int32))]) == [CommandFailed("s", "the model failed", 0)]
    with pytest.raises(EngineFault, match="ZeroDivisionError"):
        run(child, [Prefill("s", np.array([BUG], dtype=np.int32))])
    assert child.session_position("s") == 0
    assert failures_of(run(child, [Prefill("s", PROMPT), CloseSession("s")])) == []
    assert failures_of(run(child, [Capture("s", 0), CloseSession("s")])) == ["no such session"] * 2
    assert child.figures().restarts == 0


def test_a_failed_import_leaves_what_the_interface_says(child: DecodeWorkerEngine) -> None:
    run(child, [OpenSession("s"), Prefill("s", PROMPT)])
    assert isinstance(run(child, [ImportPrefix("s", 16, PARTS[:2])])[0], CommandFailed)
    kill(child)
    assert run(child, [ImportPrefix("s", 16, PARTS)]) == [PrefixImported("s", 16, 0.0)]
    assert child.figures().kept_bytes == 4 * 16


@pytest.mark.parametrize("left_after", [1, 3])
def test_a_command_that_is_left_stands_where_it_was_left(child: DecodeWorkerEngine, left_after: int) -> None:
    run(child, [OpenSession("s"), Prefill("s", PROMPT[:10])])
    with closing(child.handle(Decode("s", 1, 9, ()))) as decode:  # type: ignore[type-var]
        tokens = [event.token for _ in range(left_after) if isinstance(event := next(decode), TokenDecoded)]
    assert child.session_position("s") == 10 + left_after
    with closing(child.handle(Prefill("s", PROMPT))) as prefill:  # type: ignore[type-var]
        next(prefill)
    position = child.session_position("s")
    kill(child)
    history = [*PROMPT[:10].tolist(), 1, *tokens[:-1], *PROMPT.tolist()][:position]
    wanted = run(ToyEngine(), [OpenSession("s"), Prefill("s", np.array(history, dtype=np.int32)), Decode("s", 5, 3, ())])
    assert run(child, [Decode("s", 5, 3, ())]) == wanted[-4:]


def test_a_decode_that_comes_to_other_tokens_is_not_gone_on_with(child: DecodeWorkerEngine) -> None:
    """Tampering with the journal stands for a machine that does not repeat itself."""
    run(child, [OpenSession("s"), Prefill("s", PROMPT)])
    decode = steps(child, Decode("s", 1, 9, ()))
    next(decode)
    child._sessions["s"].journal._tokens[0] += 1
    kill(child)
    failed = next(decode)
    assert isinstance(failed, CommandFailed)
    assert "another result" in failed.message
    assert next(decode, None) is None
    assert child.session_position("s") == 0
    assert failures_of(run(child, [Prefill("s", PROMPT), Decode("s", 1, 2, ())])) == []


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_kill_while_the_model_is_loaded_is_survived(boundaries: Boundaries) -> None:
    engine = DecodeWorkerEngine(toy_settings(limits=PATIENT), boundary=boundaries)
    # before Load, sent Load, received Told, received Loaded: of the first child, and of the second
    for at in (1, 2):
        boundaries.arm(at, lambda: kill(engine))
        try:
            engine.start()
            assert engine.figures().restarts >= 1
            assert run(engine, [OpenSession("s"), CloseSession("s")]) == [SessionReady("s")] * 2
        finally:
            kill(engine)
            assert failures_of(run(engine, [OpenSession("t"), Prefill("t", PROMPT), CloseSession("t")])) == []
    engine.close()


def test_a_model_that_cannot_be_loaded_is_refused_at_once() -> None:
    engine = DecodeWorkerEngine(toy_settings(settings=settings_bytes(refuse="no such folder")))
    with pytest.raises(ModelError, match=r"no such folder \(another folder\)"):
        engine.start()
    assert engine.figures().restarts == 0
    engine.close()


def test_a_child_that_never_gets_ready_is_given_up_after_a_few() -> None:
    lost: list[str] = []
    limits = RestartLimits(failed_starts_max=2, backoff_first_s=0.01)
    settings = toy_settings(settings=settings_bytes(silent=True), startup_timeout_s=HANG_TIMEOUT_S, limits=limits)
    engine = DecodeWorkerEngine(settings, warn=lost.append)
    with pytest.raises(WorkerUnavailable, match="lost too often"):
        engine.start()
    assert len(lost) == 2
    with pytest.raises(WorkerUnavailable):
        engine.start()  # at once, without another child
    assert len(lost) == 2
    assert engine.figures().pid == 0
    engine.close()


def test_children_that_die_too_often_are_not_replaced_for_a_while_and_sessions_are_kept() -> None:
    now = [1000.0]
    limits = RestartLimits(losses_max=1, backoff_first_s=0.0, cool_down_s=500.0, window_s=1000.0)
    engine = DecodeWorkerEngine(toy_settings(limits=limits), clock=lambda: now[0])
    try:
        engine.start()
        run(engine, [OpenSession("s"), Prefill("s", PROMPT)])
        for _ in range(2):
            kill(engine)
            events = run(engine, [Decode("s", 1, 2, ())])
        (failed,) = events
        assert isinstance(failed, CommandFailed)
        assert "lost too often" in failed.message
        kept = len(PROMPT) + 2
        assert failed.position == engine.session_position("s") == kept
        now[0] += 501
        assert failures_of(run(engine, [Decode("s", 1, 2, ())])) == []
        assert engine.session_position("s") == kept + 2
    finally:
        engine.close()


def test_another_model_in_the_folder_is_noticed(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"1")
    with worker(toy_settings(settings=settings_bytes(weights=str(weights)))) as engine:
        run(engine, [OpenSession("s")])
        weights.write_bytes(b"12")
        kill(engine)
        (failed,) = run(engine, [Prefill("s", PROMPT)])
        assert isinstance(failed, CommandFailed)
        assert "has changed" in failed.message
        assert engine.memory() == EngineMemory()


# --- cancelling and stopping -----------------------------------------------------------------------------------------


def later(engine: DecodeWorkerEngine, then: Any) -> threading.Thread:
    thread = threading.Thread(target=then)
    thread.start()
    return thread


def test_a_cancelled_step_that_does_not_end_is_broken_off() -> None:
    with worker(toy_settings(cancel_grace_s=0.2)) as engine:
        run(engine, [OpenSession("s"), Prefill("s", PROMPT)])
        bad = steps(engine, Prefill("s", np.array([1, HANG], dtype=np.int32)))
        # The step begins after this line, and forgets what was cancelled before: repeat until it is heard.
        heard = threading.Event()

        def cancel() -> None:
            while not heard.wait(0.05):
                engine.step_cancelled("other")
                if engine.figures().hangs == 0 and engine._link._cancelled is not None:
                    engine.step_cancelled("s")
                    return

        thread = later(engine, cancel)
        with pytest.raises(StepInterrupted):
            next(bad)
        heard.set()
        thread.join()
        assert engine.session_position("s") == len(PROMPT)
        assert failures_of(run(engine, [Decode("s", 1, 3, ())])) == []
        assert engine.figures().restarts == 1


def test_cancelling_another_sessions_step_does_nothing() -> None:
    with worker(toy_settings(cancel_grace_s=0.0, step_timeout_s=30.0)) as engine:
        run(engine, [OpenSession("s"), Prefill("s", PROMPT)])
        decode = steps(engine, Decode("s", 1, 3, ()))
        engine.step_cancelled("other")
        assert tokens_of([comparable(event) for event in decode])
        assert engine.figures().restarts == 0


def test_stopping_breaks_a_load_off_at_once_and_a_step_after_its_time() -> None:
    silent = DecodeWorkerEngine(toy_settings(settings=settings_bytes(silent=True)))
    silent.stopping(30.0)
    with pytest.raises(StepInterrupted):
        silent.start()
    silent.close()
    with worker(toy_settings()) as engine:
        run(engine, [OpenSession("s")])
        engine.stopping(0.3)
        with pytest.raises(StepInterrupted):
            run(engine, [Prefill("s", np.array([HANG], dtype=np.int32))])
        with pytest.raises(StepInterrupted):  # and nothing is started any more
            run(engine, [Prefill("s", PROMPT)])
        assert engine.figures().restarts == 0


def test_closing_ends_a_child_that_does_not_listen() -> None:
    engine = DecodeWorkerEngine(toy_settings())
    engine.start()
    process = psutil.Process(engine.figures().pid)
    os.kill(process.pid, signal.SIGSTOP)
    engine.close()
    assert not process.is_running()
    assert engine.figures().state == WorkerState.STOPPED


def test_the_blocks_of_the_toy_are_what_the_tests_assume() -> None:
    assert len(PARTS) * BLOCK == 16
