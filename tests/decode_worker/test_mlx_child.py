"""The real child with a tiny model: killed at every message of a generation, in loads and imports; hangs; codecs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.engine import (
    CloseSession,
    Command,
    Decode,
    Engine,
    Event,
    OpenSession,
    Prefill,
    Sampling,
    TokenDecoded,
)
from kakeya_zmq.model.loader import load_engine
from tests import fleet_rig
from tests.decode_worker.kit import (
    GREEDY,
    SAMPLED,
    Boundaries,
    comparable,
    exported,
    failures_of,
    kill,
    kill_at_every_message,
    life,
    run,
    tiny_model_settings,
    tokens_of,
    whole_import,
    worker,
)

PROMPT = np.array(fleet_rig.prompt(150, 3), dtype=np.int32)
IMPORTED = 64


@pytest.fixture(scope="module")
def local(model: Path) -> Engine:
    """The same model in this process."""
    return load_engine(model, blas_threads=1, block_tokens=16, segment_tokens=32)


@pytest.fixture
def boundaries() -> Boundaries:
    return Boundaries()


@pytest.fixture
def child(model: Path, boundaries: Boundaries) -> Iterator[DecodeWorkerEngine]:
    with worker(tiny_model_settings(model), boundaries) as engine:
        yield engine


def opened(prompt: Any, name: str = "s") -> list[Command]:
    return [OpenSession(name), Prefill(name, prompt[:-1])]


def test_a_kill_at_every_message_of_a_generation_changes_no_token(
    child: DecodeWorkerEngine, boundaries: Boundaries, local: Engine
) -> None:
    """Sampled, which greedy is a case of; test_toy_child and the slow tests below do both, and whole lives."""
    before: list[Command] = [
        OpenSession("s"),
        whole_import("s", exported(local, PROMPT[:IMPORTED])),
        Prefill("s", PROMPT[IMPORTED:-1]),
    ]
    then: list[Command] = [Decode("s", int(PROMPT[-1]), 3, (), SAMPLED)]
    wanted = run(local, [*before, *then, CloseSession("s")])[-5:-1]
    assert len(tokens_of(wanted)) == 3
    assert kill_at_every_message(child, boundaries, before, then, wanted) == 2 * 5


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_kill_at_every_message_of_a_whole_life_changes_nothing(
    child: DecodeWorkerEngine, boundaries: Boundaries, local: Engine, sampling: Sampling
) -> None:
    commands = life("s", PROMPT, exported(local, PROMPT[:IMPORTED]), 6, sampling)
    wanted = run(local, commands)
    assert len(tokens_of(wanted)) == 12
    kills = kill_at_every_message(child, boundaries, (), commands, wanted)
    assert child.figures().restarts >= kills - 1  # the last one may have been killed with its last message


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_compression": "int8"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"kv_policy": "sink-window", "window": "48"}, marks=pytest.mark.slow),
        pytest.param({"cache_compression": "zlib"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: "-".join(changes.values()) or "as it is",
)
def test_a_kill_in_prefill_decode_and_capture_with_each_storage(
    model: Path, local: Engine, boundaries: Boundaries, changes: dict[str, str]
) -> None:
    """Parts that a codec packs lose something: a session is made again from what it was made of, not from its own export."""
    with worker(tiny_model_settings(model, **changes), boundaries) as engine:
        parts = exported(engine, PROMPT[:IMPORTED])
        commands = life("s", PROMPT, parts, 4, SAMPLED)
        boundaries.arm(-1, lambda: None)
        wanted = run(engine, commands)
        names = list(boundaries.seen)
        assert failures_of(wanted) == []
        middle, last = len(names) // 2, len(names) * 3 // 4
        for at in (middle, last):
            boundaries.arm(at, lambda: kill(engine))
            assert run(engine, commands) == wanted
        assert engine.figures().restarts == 2


def test_two_sessions_in_turn_are_made_again(child: DecodeWorkerEngine, boundaries: Boundaries, local: Engine) -> None:
    prompts = {"a": PROMPT, "b": PROMPT[40:]}
    samplings = {"a": GREEDY, "b": SAMPLED}
    wanted: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {name: [] for name in prompts}
    running: dict[str, Iterator[Event]] = {}
    for name, prompt in prompts.items():
        decode = Decode(name, int(prompt[-1]), 5, (), samplings[name])
        wanted[name] = tokens_of(run(local, [*opened(prompt, name), decode, CloseSession(name)]))
        run(child, opened(prompt, name))
        running[name] = iter(child.handle(decode))
    for turn in range(6):
        for name, steps in running.items():
            if (turn, name) == (3, "a"):
                kill(child)
            event = comparable(next(steps))
            if isinstance(event, TokenDecoded):
                found[name].append(event.token)
    assert found == wanted
    assert (child.figures().restarts, child.figures().restored_sessions) == (1, 2)
    assert [next(steps, None) for steps in running.values()] == [None, None]


def test_a_kill_while_the_model_is_loaded_again_is_survived(
    child: DecodeWorkerEngine, boundaries: Boundaries, local: Engine
) -> None:
    commands = [*opened(PROMPT), Decode("s", int(PROMPT[-1]), 3, ())]
    wanted = tokens_of(run(local, [*commands, CloseSession("s")]))
    run(child, commands[:-1])
    kill(child)
    loads: list[str] = []

    def kill_first_load(name: str) -> None:
        if name == "received Told" and not loads:
            loads.append(name)
            kill(child)

    child._link._boundary = kill_first_load
    assert tokens_of(run(child, commands[-1:])) == wanted
    assert loads
    assert child.figures().restarts == 2


def test_it_ignores_signals_that_stop_a_daemon(child: DecodeWorkerEngine) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(child.figures().pid, number)
    assert failures_of(run(child, [*opened(PROMPT), Decode("s", 1, 2, ())])) == []
    assert child.figures().restarts == 0
