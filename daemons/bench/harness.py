"""What every benchmark is made of: bars, series of samples, interleaving, and the processes that are measured.

A *program* is a module of :mod:`daemons.bench.programs`. It runs in a process of its own, reads one JSON object a line from
standard input (``{"do": NAME, ...}``) and answers each with one JSON object a line: ``{"ok": true, ...}`` or
``{"ok": false, "error": LINE}``. It ends when its standard input does, so a run that is killed leaves none behind (for
daemons, see :mod:`daemons.bench.home`).
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from wire.errors import FailureCode, KakeyaError, RequestFailed

ANSWER_TIMEOUT_SECONDS = 300.0
"""A cold prefill of the longest prompt measured here, on a machine several times slower than the reference."""
STOP_TIMEOUT_SECONDS = 10.0


class Direction(enum.Enum):
    AT_MOST = "≤"
    AT_LEAST = "≥"


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit that a measured value must keep. ``unit`` is for people: "×", "µs", "%"."""

    name: str
    measured: float
    limit: float
    direction: Direction
    unit: str = "×"

    @property
    def passed(self) -> bool:
        """NaN never passes: nothing was measured."""
        if self.direction is Direction.AT_MOST:
            return self.measured <= self.limit
        return self.measured >= self.limit

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "measured": self.measured if math.isfinite(self.measured) else None,
            "limit": self.limit,
            "direction": self.direction.value,
            "unit": self.unit,
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one thing, in the order they were taken."""

    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"no samples of {self.name}")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median: 0 with one sample or with samples around 0."""
        return (max(self.values) - min(self.values)) / self.median if self.median > 0 else 0.0

    def as_json(self) -> dict[str, object]:
        return {"median": self.median, "spread": round(self.spread, 4), "samples": list(self.values)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one benchmark found.

    ``heads`` and ``rows``: the table for people. ``figures``: the same and more for ``--json``. ``skipped``: why nothing
    was measured, or empty.
    """

    name: str
    title: str
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    bars: tuple[Bar, ...] = ()
    figures: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.skipped and all(bar.passed for bar in self.bars)

    def as_json(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "skipped": self.skipped,
            "bars": [bar.as_json() for bar in self.bars],
            "figures": dict(self.figures),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How much to measure. ``rounds`` 0: each benchmark's own number. ``smoke``: tiny sizes, for tests of the bench."""

    long: bool = False
    peers: bool = False
    rounds: int = 0
    threads: int = 1
    """BLAS threads of every process that computes, ours and references."""
    model: str = ""
    """Folder of the MLX model."""
    smoke: bool = False

    def choose(self, default: int, long: int, smoke: int = 1) -> int:
        """A size or number of samples for this kind of run."""
        return smoke if self.smoke else long if self.long else default

    def rounds_or(self, default: int, long: int, smoke: int = 1) -> int:
        return self.rounds or self.choose(default, long, smoke)


def interleave(rounds: int, sides: Mapping[str, Callable[[int], float]]) -> dict[str, Series]:
    """Call every side once in each round, in the given order; a round's number is the argument.

    Noise that lasts longer than one round then falls on all sides alike, and ratios of medians survive it.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, measure in sides.items():
            samples[name].append(measure(number))
    return {name: Series(name, tuple(values)) for name, values in samples.items()}


def ratio(ours: Series, reference: Series) -> float:
    """Median against median."""
    return ours.median / reference.median if reference.median > 0 else math.nan


class Program:
    """A running program of :mod:`daemons.bench.programs`, by its name there.

    Raises:
        RequestFailed: from :meth:`ask`: the program answered with an error, died, or did not answer in time.
    """

    def __init__(self, name: str, arguments: Sequence[str] = ()) -> None:
        self.name = name
        # Its last words, if it dies: a pipe nobody reads would block it, so they go to a file that has no name.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"daemons.bench.programs.{name}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # NumPy's own matrix library must keep to one core; MLX's gets its threads from prepare_blas.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then ends its programs in order
        )
        self._unread = b""
        self._unanswered = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, do: str, **arguments: object) -> None:
        """Send a command; :meth:`hear` takes its answer. So several programs can work at the same time."""
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        self._unanswered += 1
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def hear(self, timeout_s: float = ANSWER_TIMEOUT_SECONDS) -> dict[str, Any]:
        line = self._read_line(timeout_s)
        self._unanswered -= 1
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # a library that prints when it is imported
            text = f"bench program {self.name}: no answer but {line[:200].decode('utf-8', 'replace')!r}"
            raise RequestFailed(FailureCode.INTERNAL, text) from None
        if not answer.get("ok"):
            raise RequestFailed(FailureCode.INTERNAL, f"bench program {self.name}: {answer.get('error')}")
        return answer

    def ask(self, do: str, timeout_s: float = ANSWER_TIMEOUT_SECONDS, **arguments: object) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.hear(timeout_s)

    def close(self) -> None:
        """End of input ends the program, SIGTERM one that is busy; one that does not listen is killed. Idempotent."""
        if self._process.poll() is None:
            if self._unanswered:
                self._process.terminate()
            with contextlib.suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, f"bench program {self.name} did not answer in time")
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise self._died()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> RequestFailed:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else "no output"
        return RequestFailed(FailureCode.INTERNAL, f"bench program {self.name} ended with code {code}: {last}")


def serve(commands: Mapping[str, Callable[..., Mapping[str, object] | None]]) -> None:
    """A program's main loop: run commands from standard input until it ends.

    Standard output belongs to the answers: whatever else prints goes to standard error.
    """
    # Stopped in the middle of a command: what the program itself started must still be ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with answers:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"ok": True, **(commands[request.pop("do")](**request) or {})}
            except KakeyaError as error:  # the bench tells the user
                answer = {"ok": False, "error": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not interrupt what the first one began: every process and folder must be gone afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM now."""
    return int(psutil.Process(pid).memory_info().rss)


def processor_seconds(*pids: int) -> float:
    """Processor time the processes have used: the rest of a busy machine changes it far less than it does wall time."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(each.user + each.system for each in times))


def machine() -> dict[str, object]:
    """The facts that explain a figure: processors, memory, load when the run began."""
    return {
        "platform": sys.platform,
        "processors": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": round(os.getloadavg()[0], 2),
        "python": ".".join(map(str, sys.version_info[:3])),
    }
