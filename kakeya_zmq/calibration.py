"""How fast does this machine prefill? A first figure for the planner, before any prompt has been measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kakeya_zmq.engine import CloseSession, CommandFailed, Engine, OpenSession, Prefill

SHORT_TOKENS = 32
LONG_TOKENS = 256
SHORT_ENOUGH_SECONDS = 0.5
"""A machine that takes longer for the short run is slow enough for the short run to tell."""
_SESSION = "calibration"


def measure_prefill(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second of a prefill of made-up tokens; 0 when it cannot be measured. Takes a second or two.

    Call it on the engine's thread, before the engine serves anybody.
    """
    rate = 0.0
    for count in (SHORT_TOKENS, LONG_TOKENS):
        tokens = (np.arange(count, dtype=np.int32) * 7 + 3) % engine.facts.vocabulary_size
        list(engine.handle(OpenSession(_SESSION)))
        started = clock()
        events = list(engine.handle(Prefill(_SESSION, tokens.astype(np.int32), capture=False)))
        elapsed_s = clock() - started
        list(engine.handle(CloseSession(_SESSION)))
        if elapsed_s <= 0 or any(isinstance(event, CommandFailed) for event in events):
            return rate
        rate = count / elapsed_s
        if elapsed_s > SHORT_ENOUGH_SECONDS:
            break
    return rate
