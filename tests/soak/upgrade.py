"""A fleet that is operated without end: nodes are drained, killed, started, and changed to another format or protocol.

Two formats of stored KV are in it side by side. Of each node it is known when it was down and which format it had, so
that every failure and every source of every answer can be judged.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kakeya_zmq.client import Client
from tests.fleet_rig import BLOCK_TOKENS, Fleet, Node
from tests.soak.load import COUNT, TIMEOUT_S, Actor, Script, Turn
from wire.errors import FailureCode, RequestFailed
from wire.messages import Explanation

WITNESS: Final = "primary"
"""The one node that is never stopped: its every request must be answered, and its memory can be watched."""
SECOND: Final = "primary-2"
HOLDER: Final = "cache"
"""Without a model; it holds parts of all formats."""
OLD: Final = "none"
NEW: Final = "zlib"
"""Another cache format version, and as lossless as the old one: all answers are still known."""
NEXT_PROTOCOL: Final = ("tests.soak.next_protocol",)
USUAL: Final = ("daemons",)


@dataclass(slots=True)
class Past:
    """What happened to a node, by the monotonic clock."""

    formats: list[tuple[float, str]] = field(default_factory=list)
    """From when on it had each format."""
    down: list[tuple[float, float]] = field(default_factory=list)
    """From just before it was told to stop until it served again."""

    def formats_within(self, since: float, until: float) -> set[str]:
        ends = [*(start for start, _ in self.formats[1:]), float("inf")]
        return {name for (start, name), end in zip(self.formats, ends, strict=True) if start <= until and end >= since}

    def was_down(self, since: float, until: float) -> bool:
        return any(start <= until and end >= since for start, end in self.down)


class Operations:
    """The fleet and its past. One node at a time is down, and none but by :meth:`down`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._lock = threading.Lock()
        self._pasts: dict[str, Past] = {}
        self._base: dict[str, tuple[str, ...]] = {}

    def add(self, role: str, name: str, stored_as: str, *flags: str) -> Node:
        self._base[name] = flags
        self._pasts[name] = Past()
        node = self.fleet.add(role, name=name)
        self.set_format(name, stored_as)
        return node

    def set_format(self, name: str, stored_as: str) -> None:
        """How the node stores KV from its next start on; a holder stores what it is given."""
        node = self.fleet[name]
        node.flags = self._base[name] if node.role == "cache" else (*self._base[name], "--cache-compression", stored_as)
        with self._lock:
            self._pasts[name].formats.append((time.monotonic(), stored_as))

    def format_of(self, name: str) -> str:
        with self._lock:
            return self._pasts[name].formats[-1][1]

    @contextmanager
    def down(self, name: str) -> Iterator[Node]:
        """The block stops the node; after it, it is started, and serves."""
        node = self.fleet[name]
        past = self._pasts[name]
        with self._lock:
            past.down.append((time.monotonic(), float("inf")))
        yield node
        node.launch(self.fleet.seed_for(node))
        node.wait_ready()
        with self._lock:
            past.down[-1] = (past.down[-1][0], time.monotonic())

    def was_down(self, name: str, since: float) -> bool:
        with self._lock:
            return self._pasts[name].was_down(since, time.monotonic())

    def mixed(self, asked: str, explanation: Explanation, since: float) -> list[str]:
        """Sources of an answer that had another format than the node which was asked, all the time."""
        now = time.monotonic()
        with self._lock:
            own = self._pasts[asked].formats_within(since, now)
            return [
                f"{asked} ({own}) took {source.end - source.start} tokens of {source.node_id}"
                for source in explanation.sources
                if source.node_id not in ("", asked, HOLDER)
                and not own & self._pasts[source.node_id].formats_within(since, now)
            ]


KINDS: Final = ("drained", "killed", "upgraded", "next protocol")
"""What an operator does to a node before it is started again."""


class Operator(Actor):
    """Takes one node after the other: drains and restarts it, kills it, or brings it back as another version."""

    def __init__(self, operations: Operations, seed: int) -> None:
        super().__init__("operator")
        self._operations = operations
        self._chosen = random.Random(seed)
        self._to_do: list[tuple[str, str]] = []

    def step(self) -> None:
        chosen = self._chosen
        self.pause(chosen.uniform(0.2, 1.5))
        if not self._to_do:
            # Each kind comes, as does each node, in every four steps.
            names = [name for name in self._operations.fleet.nodes if name != WITNESS]
            self._to_do = list(zip(chosen.sample(names, len(names)), chosen.sample(KINDS, len(KINDS)), strict=True))
        name, what = self._to_do.pop()
        node = self._operations.fleet[name]
        with self._operations.down(name):
            if what == "killed":
                node.kill()
            else:
                code = node.terminate()
                assert code == 0, f"{name} was told to stop, and ended with {code}"
            node.program = NEXT_PROTOCOL if what == "next protocol" and name != SECOND else USUAL
            if what == "upgraded":
                self._operations.set_format(name, NEW if self._operations.format_of(name) == OLD else OLD)
        self.done[what] += 1


class Visitor(Actor):
    """Has conversations with either primary. One that fails because its primary is down is had with the witness."""

    def __init__(self, number: int, operations: Operations, script: Script, seed: int) -> None:
        super().__init__(f"visitor-{number}")
        self._operations = operations
        self._script = script
        self._chosen = random.Random(seed)
        self.wrong: list[str] = []
        self.mixed: list[str] = []

    def step(self) -> None:
        chosen = self._chosen
        turns = chosen.choice(self._script.conversations)
        options: dict[str, Any] = {"use_local_cache": chosen.random() < 0.3, "publish": chosen.random() < 0.9}
        first = chosen.choice([WITNESS, SECOND])
        begun = time.monotonic()
        try:
            self._converse(first, turns, options)
        except RequestFailed as error:
            allowed = error.code in (FailureCode.UNAVAILABLE, FailureCode.CANCELLED)
            if first == WITNESS or not allowed or not self._operations.was_down(first, begun):
                raise
            self.done["retried"] += 1
            self._converse(WITNESS, turns, options)

    def _converse(self, name: str, turns: tuple[Turn, ...], options: dict[str, Any]) -> None:
        with ExitStack() as stack:
            client: Client = stack.enter_context(self._operations.fleet[name].client())
            session = stack.enter_context(client.create_session(**options))
            for turn in turns:
                begun = time.monotonic()
                appended = session.append(turn.tokens, timeout_s=TIMEOUT_S)
                answer = tuple(session.generate(COUNT, inter_token_timeout_s=TIMEOUT_S))
                self.mixed += self._operations.mixed(name, appended.explanation, begun)
                if answer != turn.answer:
                    self.wrong.append(f"{name}: {appended.explanation.sources}")
                self.done["answers"] += 1
                self.done["tokens of others"] += sum(
                    source.end - source.start
                    for source in appended.explanation.sources
                    if source.node_id and source.end - source.start >= BLOCK_TOKENS
                )
