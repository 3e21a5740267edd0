"""How fast does this machine prefill? A first figure for the planner, before any prompt has been measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kakeya_zmq.engine import CloseSession, CommandFailed, Engine, OpenSession, Prefill

SHORT_TOKENS = 32
LONG_TOKENS = 256
SHORT_ENOUGH_SECONDS = 0.5
"""A machine that takes longer for the short run is slow enough for the short run to tell."""
SHORT_BUDGET_SECONDS = 4.0
"""A short run that takes longer than enough is repeated once however long it took: the first one reads the weights from
disk, or compiles kernels, and has been seen to take a hundred times as long as the next. From the second one on it is
repeated while all of them but the first together take less."""
RUNS = 3
REPEAT_BUDGET_SECONDS = 1.0
"""The long run is repeated while all of them together take less."""
LONG_SHARE_MIN = 0.5
"""Of the short run's speed. A first long run below it was held up (a model of experts reads more of them from disk), and is
repeated however long it took."""
_SESSION = "calibration"


def measure_prefill(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second of a prefill of made-up tokens; 0 when it cannot be measured. Takes a second or two.

    The first run of all never counts alone, unless it is quick. Of several runs the best one counts: whatever else the
    machine does at start only makes it slower.
    Call it on the engine's thread, before the engine serves anybody.
    """
    short_s = _short_seconds(engine, clock)
    if short_s is None:
        return 0.0
    best = SHORT_TOKENS / short_s
    if short_s > SHORT_ENOUGH_SECONDS:
        return best
    long_rates: list[float] = []
    spent_s = 0.0
    while len(long_rates) < RUNS and (spent_s < REPEAT_BUDGET_SECONDS or _held_up(long_rates, best)):
        elapsed_s = _run_seconds(engine, LONG_TOKENS, clock)
        if elapsed_s is None:
            break
        spent_s += elapsed_s
        long_rates.append(LONG_TOKENS / elapsed_s)
    return max(long_rates, default=best)


def _held_up(long_rates: Sequence[float], short_rate: float) -> bool:
    """Whether the only long run so far was so slow that something else must have taken the time."""
    return len(long_rates) == 1 and long_rates[0] < LONG_SHARE_MIN * short_rate


def _short_seconds(engine: Engine, clock: Callable[[], float]) -> float | None:
    """Time of the best short run; None when the first one failed, or was slow and could not be repeated."""
    times: list[float] = []
    while len(times) < RUNS and sum(times[1:]) < SHORT_BUDGET_SECONDS:
        elapsed_s = _run_seconds(engine, SHORT_TOKENS, clock)
        if elapsed_s is None:
            break
        times.append(elapsed_s)
        if elapsed_s <= SHORT_ENOUGH_SECONDS:
            return elapsed_s
    return min(times) if len(times) > 1 else None


def _run_seconds(engine: Engine, count: int, clock: Callable[[], float]) -> float | None:
    """Time of one prefill; None when it failed, or took no time."""
    tokens = (np.arange(count, dtype=np.int32) * 7 + 3) % engine.facts.vocabulary_size
    list(engine.handle(OpenSession(_SESSION)))
    started = clock()
    # With capture, as prompts are computed.
    events = list(engine.handle(Prefill(_SESSION, tokens.astype(np.int32))))
    elapsed_s = clock() - started
    list(engine.handle(CloseSession(_SESSION)))
    failed = any(isinstance(event, CommandFailed) for event in events)
    return None if failed or elapsed_s <= 0 else elapsed_s
