"""Mixed load for a soak: users whose every answer is known beforehand, chaos that kills and freezes peers, and a watcher."""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from kakeya_zmq.client import Client
from tests.fleet_rig import Fleet, Reference, prompt
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillPolicy

COUNT: Final = 8
TIMEOUT_S: Final = 60.0
PROMPTS: Final = 30
CONVERSATIONS: Final = 6
GIVEN_UP_AFTER_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and what the model must answer."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


class Script:
    """All conversations of a soak with their answers; the first ones share beginnings."""

    def __init__(
        self, reference: Reference, seed: int, *, prompts: int = PROMPTS, conversations: int = CONVERSATIONS
    ) -> None:
        chosen = random.Random(seed)
        beginnings = [prompt(chosen.randrange(200, 500), seed * 1_000 + number) for number in range(5)]
        self.conversations: list[tuple[Turn, ...]] = []
        for number in range(prompts + conversations):
            first = [*chosen.choice(beginnings), *prompt(chosen.randrange(1, 300), seed * 1_000 + 100 + number)]
            turns = 1 if number < prompts else 3
            history: list[int] = []
            made: list[Turn] = []
            for turn in range(turns):
                said = first if turn == 0 else prompt(chosen.randrange(1, 90), seed * 1_000 + 500 + 10 * number + turn)
                history += said
                answer = reference.answer(history, COUNT)
                history += answer
                made.append(Turn(tuple(said), tuple(answer)))
            self.conversations.append(tuple(made))


class Actor(ABC):
    """Does something on a thread of its own until told to stop; what it raises is kept."""

    def __init__(self, name: str) -> None:
        self.failure: BaseException | None = None
        self.done: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(3 * TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self._thread.name} hangs"

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.step()
        except BaseException as error:  # the test's thread must see it
            self.failure = error

    def pause(self, seconds: float) -> None:
        """Wait, unless it is time to stop."""
        self._stop.wait(seconds)

    @abstractmethod
    def step(self) -> None: ...


class User(Actor):
    """Asks, compares, goes away in the middle."""

    def __init__(self, number: int, client: Client, script: Script, seed: int) -> None:
        super().__init__(f"user-{number}")
        self._client = client
        self._script = script
        self._chosen = random.Random(seed)
        self.wrong = 0

    def step(self) -> None:
        chosen = self._chosen
        turns = chosen.choice(self._script.conversations)
        with self._client.create_session(
            policy=chosen.choice([None, None, PrefillPolicy.LOCAL_ONLY]),
            use_local_cache=chosen.random() < 0.5,
            publish=chosen.random() < 0.8,
            exclude_nodes=chosen.choice([(), (), ("worker",), ("cache",)]),
        ) as session:
            if chosen.random() < 0.1:
                self.done["given up"] += 1
                try:
                    session.append(turns[0].tokens, timeout_s=GIVEN_UP_AFTER_S)
                except RequestFailed as error:
                    if error.code is not FailureCode.DEADLINE_EXCEEDED:
                        raise
                return
            for turn in turns:
                session.append(turn.tokens, timeout_s=TIMEOUT_S)
                if chosen.random() < 0.1:
                    self.done["cut short"] += 1
                    stream = session.generate(COUNT, inter_token_timeout_s=TIMEOUT_S)
                    self._compare([next(stream)], turn.answer[:1])
                    stream.close()
                    return
                self._compare(list(session.generate(COUNT, inter_token_timeout_s=TIMEOUT_S)), turn.answer)
                self.done["answers"] += 1

    def _compare(self, found: Sequence[int], expected: Sequence[int]) -> None:
        self.wrong += tuple(found) != tuple(expected)


class Chaos(Actor):
    """Kills, stops and freezes the worker and the cache peer, and starts them again."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__("chaos")
        self._fleet = fleet
        self._chosen = random.Random(seed)

    def step(self) -> None:
        chosen = self._chosen
        self.pause(chosen.uniform(0.5, 3.0))
        node = self._fleet[chosen.choice(["worker", "cache"])]
        what = chosen.choice(["killed", "terminated", "frozen", "frozen"])
        self.done[what] += 1
        if what == "frozen":
            node.signal(signal.SIGSTOP)
            self.pause(chosen.choice([0.2, 1.0, 7.0]))
            node.signal(signal.SIGCONT)
            return
        if what == "killed":
            node.kill()
        else:
            node.terminate()
        self.pause(chosen.uniform(0.0, 4.0))
        node.launch(self._fleet.seed_for(node))
        node.wait_ready()


@dataclass(frozen=True, slots=True)
class Sample:
    memory_bytes: int
    descriptors: int
    threads: int


class Watcher(Actor):
    """Samples a process twice a second."""

    def __init__(self, pid: int) -> None:
        super().__init__("watcher")
        self._process = psutil.Process(pid)
        self.samples: list[Sample] = []

    def step(self) -> None:
        with self._process.oneshot():
            found = Sample(self._process.memory_info().rss, self._process.num_fds(), self._process.num_threads())
        self.samples.append(found)
        self.pause(0.5)

    def medians(self, warm_up: float) -> tuple[Sample, Sample]:
        """Of the first and of the last quarter of the samples after a warm-up, which is a share of them all."""
        steady = self.samples[int(len(self.samples) * warm_up) :]
        quarter = max(1, len(steady) // 4)
        return _median(steady[:quarter]), _median(steady[-quarter:])


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        int(statistics.median(sample.memory_bytes for sample in samples)),
        int(statistics.median(sample.descriptors for sample in samples)),
        int(statistics.median(sample.threads for sample in samples)),
    )


def run(actors: Sequence[Actor], duration_s: float) -> None:
    """Let them act; stops early when one fails.

    Raises:
        the first actor's failure.
    """
    ends = time.monotonic() + duration_s
    for actor in actors:
        actor.start()
    try:
        while time.monotonic() < ends and not any(actor.failure for actor in actors):
            actors[0].pause(0.5)
    finally:
        for actor in actors:
            actor.stop()
        for actor in actors:
            actor.join()
    for actor in actors:
        if actor.failure is not None:
            raise actor.failure
