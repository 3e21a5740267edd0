"""What the tests of the decode worker share: engines around a child, whole lives of sessions, and kills on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from daemons.decode_child import child_settings
from kakeya_zmq.config import resolve_settings
from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.decode_worker.restarts import RestartLimits
from kakeya_zmq.decode_worker.values import WorkerSettings
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    Capture,
    CloseSession,
    Command,
    CommandFailed,
    Decode,
    Engine,
    Event,
    FinishImport,
    ImportAdvanced,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    Sampling,
    SegmentComputed,
    TokenDecoded,
)

TOY_CHILD = (sys.executable, "-m", "tests.decode_worker.toy_child")
PATIENT = RestartLimits(failed_starts_max=10, losses_max=10_000, backoff_first_s=0.0)
"""For tests that kill many children one after the other."""
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=17)


def tiny_model_settings(folder: Path, **changes: Any) -> WorkerSettings:
    """Settings of a child with the model of :func:`tests.fleet_rig.model_folder`."""
    flags = {"model": str(folder), "blas_threads": "1", "cache_block_tokens": "16", "prefill_compute_chunk_tokens": "32"}
    settings = resolve_settings("primary", {**flags, **changes}, environment={}).settings
    return WorkerSettings(
        program=(sys.executable, "-m", "daemons.decode_child"), settings=child_settings(settings, folder, {}), limits=PATIENT
    )


def toy_settings(**changes: Any) -> WorkerSettings:
    return replace(WorkerSettings(program=TOY_CHILD, settings=b"\xc0", limits=PATIENT), **changes)


@dataclass
class Boundaries:
    """Counts the messages between parent and child, and does something at one of them, once."""

    at: int = -1
    then: Callable[[], None] = lambda: None
    seen: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) - 1 == self.at:
            self.at = -1
            self.then()

    def arm(self, at: int, then: Callable[[], None]) -> None:
        self.seen.clear()
        self.at, self.then = at, then


@contextlib.contextmanager
def worker(settings: WorkerSettings, boundary: Callable[[str], None] = lambda name: None) -> Iterator[DecodeWorkerEngine]:
    engine = DecodeWorkerEngine(settings, boundary=boundary)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def kill(engine: DecodeWorkerEngine) -> None:
    """SIGKILL the child, and wait until it is dead with all its threads, so that what follows is repeatable."""
    process = engine._link._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process._process.wait(20)


def stop(engine: DecodeWorkerEngine) -> None:
    """A hang: the child is there and does nothing."""
    os.kill(engine.figures().pid, signal.SIGSTOP)


def comparable(event: Event) -> Event:
    """Without what differs from run to run; payloads as bytes."""
    match event:
        case SegmentComputed() | PartsCaptured():
            parts: Any = tuple((part.kind, part.start, part.token_count, bytes(part.payload)) for part in event.parts)
            event = replace(event, parts=parts)
        case _:
            pass
    if isinstance(event, ImportAdvanced | PrefixImported | SegmentComputed):
        event = replace(event, elapsed_ms=0.0)
    return event


def run(engine: Engine, commands: Sequence[Command]) -> list[Event]:
    """The events of commands one after the other."""
    return [comparable(event) for command in commands for event in engine.handle(command)]


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenDecoded)]


def failures_of(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, CommandFailed)]


def exported(engine: Engine, tokens: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """The parts of a prompt, as the engine computes them."""
    parts: list[Any] = []
    for command in (OpenSession("export"), Prefill("export", tokens), CloseSession("export")):
        for event in engine.handle(command):
            assert not isinstance(event, CommandFailed), event
            if isinstance(event, SegmentComputed):
                parts += event.parts
    return tuple(sorted(parts, key=lambda part: (part.start, part.kind)))


def life(name: str, prompt: np.ndarray[Any, Any], parts: tuple[Any, ...], count: int, sampling: Sampling) -> list[Command]:
    """A session's whole life: an import in steps, a prefill, an answer, its capture, another turn with an answer, the end.

    ``prompt``: more tokens than ``parts`` cover, in three parts: imported, computed, and the next turn's.
    """
    position = parts[-1].start + parts[-1].token_count
    middle = position + (len(prompt) - position) * 2 // 3
    half = len(parts) // 2
    return [
        OpenSession(name),
        BeginImport(name, position),
        AddParts(name, parts[:half]),
        AddParts(name, parts[half:]),
        FinishImport(name),
        Prefill(name, prompt[position : middle - 1]),
        Decode(name, int(prompt[middle - 1]), count, (), sampling),
        Capture(name, position),
        Prefill(name, prompt[middle:-1]),
        Decode(name, int(prompt[-1]), count, (), sampling),
        CloseSession(name),
    ]


def whole_import(name: str, parts: tuple[Any, ...]) -> ImportPrefix:
    return ImportPrefix(name, parts[-1].start + parts[-1].token_count, parts)


def messages_at_least(commands: Sequence[Command], events: Sequence[Event]) -> int:
    """How many messages these commands with these events take, both ways: each event and each end is asked for and told.

    Opening a session is only written down by the parent.
    """
    opened = sum(isinstance(command, OpenSession) for command in commands)
    return 2 * (len(events) - opened + len(commands) - opened)


def kill_at_every_message(
    engine: DecodeWorkerEngine,
    boundaries: Boundaries,
    before: Sequence[Command],
    then: Sequence[Command],
    wanted: Sequence[Event],
    every: int = 1,
    harm: Callable[[DecodeWorkerEngine], None] = kill,
) -> int:
    """Run ``then`` (after ``before``) again and again, each time killed at another message: when it was sent, or answered.

    Args:
        wanted: the events of ``then``.
        every: 1 takes all of these moments, 3 each third.
        harm: what is done to the child then.

    Returns:
        How many kills there were.
    """
    session_id = then[0].session_id
    names: list[str] = []
    kills = 0
    at = -1
    while True:
        # A child that was killed with the last message is replaced now, so that the messages below are always the same ones.
        run(engine, [OpenSession("revive"), Prefill("revive", np.zeros(1, dtype=np.int32)), CloseSession("revive")])
        run(engine, before)
        boundaries.arm(at, lambda: harm(engine))
        assert run(engine, then) == list(wanted), (at, boundaries.seen)
        assert boundaries.at == -1, "the kill did not come"
        seen = list(boundaries.seen)
        run(engine, [CloseSession(session_id)])
        if not names:
            names = seen
            # "before" a message is the moment after the last one was received.
            moments = [index for index, name in enumerate(names) if name.startswith(("sent", "received"))]
            assert len(moments) >= messages_at_least(then, wanted)
            moments = moments[::every]
        else:
            kills += 1
        if kills == len(moments):
            return kills
        at = moments[kills]
