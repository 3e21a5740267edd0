"""References that ``transfer`` is measured against: two programs, one that holds the bytes and one that takes them.

Bare pyzmq is what every ratio is taken of. The others are peers: one that is not installed, does not start, or fails while
it is measured costs only its own line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
from collections.abc import Callable

from daemons.bench.rig import Rig
from wire.errors import KakeyaError

PEER_PROGRAMS = {"raw TCP": "raw_tcp", "gRPC": "grpc_stream", "Redis": "redis_get"}
TIMEOUT_SECONDS = 60.0
"""For one transfer: of 128 MiB at 2 MB/s."""
PREPARING = ("grpc_stream", "redis_get")
"""Programs whose ``run`` only prepares, and must have done so before the clock runs."""


class Reference:
    """Both ends of a reference.

    Args:
        program: the name of both in daemons.bench.programs.

    Raises:
        RequestFailed: it cannot run here; also from :meth:`move`.
    """

    def __init__(self, rig: Rig, program: str) -> None:
        self._preparing = program in PREPARING
        with contextlib.ExitStack() as stack:
            self._sender = stack.enter_context(rig.program(program, "sender"))
            self._receiver = stack.enter_context(rig.program(program, "receiver"))
            port = self._sender.ask("open", TIMEOUT_SECONDS)["port"]
            self._receiver.ask("connect", TIMEOUT_SECONDS, port=port)
            self._stack = stack.pop_all()

    def move(self, total_bytes: int) -> float:
        """Move that many bytes; how long it took, in seconds."""
        self._sender.tell("run", total_bytes=total_bytes)
        if self._preparing:
            self._sender.hear(TIMEOUT_SECONDS)
        wall_s = float(self._receiver.ask("fetch", TIMEOUT_SECONDS, total_bytes=total_bytes)["wall_s"])
        if not self._preparing:
            self._sender.hear(TIMEOUT_SECONDS)
        return wall_s

    def close(self) -> None:
        """End both programs. Idempotent."""
        self._stack.close()


class Peers:
    """The peers of ``--peers`` that run. ``failed``: those that do no more; ``notes``: why something is not measured."""

    def __init__(self, rig: Rig) -> None:
        self.failed: set[str] = set()
        self.notes: list[str] = []
        self._rig = rig
        self._running: dict[str, Reference] = {}

    def start(self) -> None:
        for name, program in PEER_PROGRAMS.items():
            if missing := _missing(program):
                self.notes.append(f"{name} is not measured: {missing} is not installed")
                continue
            try:
                self._running[name] = Reference(self._rig, program)
            except KakeyaError as error:  # the others, and ours above all, can still be measured
                self.notes.append(f"{name} is not measured: {error}")

    def sides(self, load: str, total_bytes: int) -> dict[str, Callable[[int], float]]:
        """What to measure, by the name of the peer. One that fails takes no more turns; its samples are worth nothing."""

        def side(name: str, reference: Reference) -> Callable[[int], float]:
            def measure(number: int) -> float:
                if name in self.failed:
                    return math.nan
                try:
                    return reference.move(total_bytes)
                except KakeyaError as error:
                    self._drop(name, f"{name} is not measured with {load}: {error}")
                    return math.nan

            return measure

        return {name: side(name, reference) for name, reference in self._running.items()}

    def close(self) -> None:
        for reference in self._running.values():
            reference.close()

    def _drop(self, name: str, why: str) -> None:
        self.failed.add(name)
        self.notes.append(why)
        self._running.pop(name).close()


def _missing(program: str) -> str:
    """What the reference lacks on this machine, or empty."""
    if program == "grpc_stream" and importlib.util.find_spec("grpc") is None:
        return "grpcio"
    if program == "redis_get":
        if importlib.util.find_spec("redis") is None:
            return "the redis package"
        if shutil.which("redis-server") is None:
            return "redis-server"
    return ""
