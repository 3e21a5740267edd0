"""The first measurement of prefill, on a machine with other things to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kakeya_zmq.calibration import LONG_TOKENS, SHORT_TOKENS, measure_prefill
from kakeya_zmq.engine import Command, CommandFailed, Event, ModelFacts, Prefill, SegmentComputed, SessionReady
from tests.unit.preparation_kit import FULL, facts_of


class TimedEngine:
    """Each prefill takes the next of the given times."""

    def __init__(self, *seconds: float, fails_at: int | None = None) -> None:
        self.seconds = list(seconds)
        self.fails_at = fails_at
        self.now = 100.0
        self.sizes: list[int] = []
        self.open = 0

    @property
    def facts(self) -> ModelFacts:
        return facts_of(FULL)

    def handle(self, command: Command) -> Iterator[Event]:
        if not isinstance(command, Prefill):
            self.open += 1 if type(command).__name__ == "OpenSession" else -1
            yield SessionReady(command.session_id)
            return
        self.sizes.append(len(command.tokens))
        self.now += self.seconds.pop(0)
        if self.fails_at == len(self.sizes):
            yield CommandFailed(command.session_id, "no memory", 0)
        else:
            yield SegmentComputed(command.session_id, len(command.tokens), (), 1.0)

    def session_kv_bytes(self, session_id: str) -> int:
        return 0

    def session_position(self, session_id: str) -> int | None:
        return None

    def close(self) -> None:
        pass


def test_the_best_of_the_long_runs_counts() -> None:
    engine = TimedEngine(0.01, 0.4, 0.1, 0.3)
    assert measure_prefill(engine, lambda: engine.now) == pytest.approx(LONG_TOKENS / 0.1)
    assert engine.sizes == [SHORT_TOKENS, LONG_TOKENS, LONG_TOKENS, LONG_TOKENS]
    assert engine.open == 0


def test_a_slow_machine_is_not_kept_busy() -> None:
    engine = TimedEngine(5.0, 4.8)
    assert measure_prefill(engine, lambda: engine.now) == pytest.approx(SHORT_TOKENS / 4.8)
    several = TimedEngine(0.9, 0.8, 0.85)
    assert measure_prefill(several, lambda: several.now) == pytest.approx(SHORT_TOKENS / 0.8)
    once = TimedEngine(0.3, 2.4)
    assert measure_prefill(once, lambda: once.now) == pytest.approx(LONG_TOKENS / 2.4)


@pytest.mark.parametrize("first_s", [3.5, 4.5, 10.0, 300.0])
def test_a_first_run_that_reads_the_weights_from_disk_does_not_count(first_s: float) -> None:
    engine = TimedEngine(first_s, 0.2, 1.2)
    assert measure_prefill(engine, lambda: engine.now) == pytest.approx(LONG_TOKENS / 1.2)
    assert engine.sizes == [SHORT_TOKENS, SHORT_TOKENS, LONG_TOKENS]


def test_runs_after_a_first_one_from_disk_have_the_whole_budget() -> None:
    engine = TimedEngine(60.0, 3.0, 0.8)
    assert measure_prefill(engine, lambda: engine.now) == pytest.approx(SHORT_TOKENS / 0.8)
    assert engine.sizes == [SHORT_TOKENS] * 3


def test_a_first_long_run_that_reads_more_weights_from_disk_does_not_count_alone() -> None:
    engine = TimedEngine(0.05, 20.0, 0.5)
    assert measure_prefill(engine, lambda: engine.now) == pytest.approx(LONG_TOKENS / 0.5)
    slow = TimedEngine(0.05, 20.0, 19.0)
    assert measure_prefill(slow, lambda: slow.now) == pytest.approx(LONG_TOKENS / 19.0)
    assert slow.sizes == [SHORT_TOKENS, LONG_TOKENS, LONG_TOKENS]


def test_what_cannot_be_measured_is_0_or_the_short_run() -> None:
    failing = TimedEngine(0.1, fails_at=1)
    assert measure_prefill(failing, lambda: failing.now) == 0.0
    short = TimedEngine(0.1, 0.2, fails_at=2)
    assert measure_prefill(short, lambda: short.now) == pytest.approx(SHORT_TOKENS / 0.1)
    second = TimedEngine(0.7, 0.7, fails_at=2)
    assert measure_prefill(second, lambda: second.now) == 0.0
    assert measure_prefill(TimedEngine(0.0), lambda: 5.0) == 0.0
