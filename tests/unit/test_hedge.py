"""Projections of what is under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.protocol.hedge import Watch, is_too_slow, switch_decision


def test_before_anything_has_come_the_estimate_holds_and_then_silence_doubles() -> None:
    watch = Watch(started=100.0, expected_s=2.0, total=1000)
    assert watch.remaining_s(100.5) == 1.5
    assert watch.remaining_s(103.0) == 3.0, "awaited for three seconds: three more"
    assert not watch.observed(100.9)
    assert watch.observed(101.0)


def test_time_in_a_queue_is_not_held_against_the_work() -> None:
    watch = Watch(started=100.0, expected_s=12.0, total=1000, work_s=2.0)
    assert watch.remaining_s(110.0) == 2.0
    watch.begin(110.0)
    assert watch.remaining_s(110.5) == 1.5
    assert watch.remaining_s(113.0) == 3.0


def test_progress_is_projected_from_the_first_sign_of_life() -> None:
    watch = Watch(started=100.0, expected_s=2.0, total=1000)
    watch.begin(110.0)  # ten seconds in a queue say nothing of the rate
    watch.advance_to(250, 111.0)
    assert watch.remaining_s(111.0) == pytest.approx(3.0)
    assert watch.remaining_s(115.0) == pytest.approx(4.0), "silent for longer than the rest should take"
    watch.advance_to(100, 116.0)
    assert watch.done == 250, "what goes back is ignored"
    watch.advance_to(1000, 117.0)
    assert watch.remaining_s(200.0) == 0.0


def test_it_takes_a_clear_advantage_to_leave() -> None:
    assert not is_too_slow(1.0, 1.0)
    assert not is_too_slow(1.5, 1.0)
    assert is_too_slow(1.51, 1.0)
    assert not is_too_slow(0.25, 0.0), "a moment is not worth it"
    assert not is_too_slow(1e9, float("inf")), "there is nothing else"


@given(
    rate=st.floats(0.01, 1000.0),
    local_s=st.floats(0.1, 100.0),
    step=st.floats(0.01, 1.0),
)
def test_leaving_costs_at_most_two_and_a_quarter_times_computing_here(rate: float, local_s: float, step: float) -> None:
    """Whatever the peer's rate is: wait by the rule, then compute everything here."""
    total, now = 100.0, 0.0
    watch = Watch(0.0, expected_s=local_s / 2, total=total)
    watch.begin(0.0)
    while watch.remaining_s(now) > 0 and not (watch.observed(now) and is_too_slow(watch.remaining_s(now), local_s)):
        now += step
        watch.advance_to(min(total, rate * now), now)
        assert now < 3 * local_s + 2
    spent = now if watch.remaining_s(now) == 0 else now + local_s
    assert spent <= 2.25 * local_s + 1.25 + 2 * step
    if total / rate <= local_s:
        assert spent <= total / rate + 2 * step, "a peer that keeps up is never left"


def test_the_explanation_has_the_numbers() -> None:
    decision = switch_decision("cache a", 12.0, "compute here", 1.5)
    assert (decision.what, decision.chosen) == ("switch", "compute here")
    assert decision.costs_ms == {"stay with cache a": 12_000.0, "compute here": 1500.0}
    assert decision.text == "left cache a: 12000 ms more expected, against 1500 ms to compute here"
