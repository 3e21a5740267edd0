"""When a lost child may be started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.decode_worker.restarts import RestartLimits, RestartPolicy

LIMITS = RestartLimits(
    failed_starts_max=3, losses_max=4, window_s=100.0, cool_down_s=50.0, backoff_first_s=1.0, backoff_max_s=5.0
)


def test_the_first_start_and_the_first_restart_are_at_once() -> None:
    policy = RestartPolicy(LIMITS)
    assert policy.wait_s(0.0) == 0.0
    policy.ready()
    policy.lost(10.0, was_ready=True)
    assert policy.wait_s(10.0) == 0.0


def test_a_child_that_never_gets_ready_is_tried_three_times_with_growing_pauses() -> None:
    policy, now, waits = RestartPolicy(LIMITS), 0.0, []
    for _ in range(3):
        wait_s = policy.wait_s(now)
        waits.append(wait_s)
        now += wait_s or 0.0
        policy.lost(now, was_ready=False)
    assert waits == [0.0, 1.0, 2.0]
    assert policy.wait_s(now) is None


def test_a_worn_out_child_is_tried_once_more_after_the_cool_down() -> None:
    policy = RestartPolicy(LIMITS)
    for now in (0.0, 1.0, 2.0):
        policy.lost(now, was_ready=False)
    assert policy.wait_s(51.9) is None
    assert policy.wait_s(52.0) == 0.0
    policy.lost(60.0, was_ready=False)
    assert policy.wait_s(60.0) is None
    policy_ready = policy.wait_s(110.0)
    assert policy_ready == 0.0
    policy.ready()
    policy.lost(111.0, was_ready=True)
    assert policy.wait_s(111.0) is not None


def test_a_child_that_serves_and_dies_is_replaced_so_often_within_the_window() -> None:
    policy = RestartPolicy(LIMITS)
    for now in range(5):
        policy.ready()
        policy.lost(float(now), was_ready=True)
    assert policy.wait_s(5.0) is None
    # Old losses are forgotten.
    assert policy.wait_s(101.0) is not None


def test_the_pause_has_an_upper_bound() -> None:
    policy = RestartPolicy(RestartLimits(losses_max=1000, backoff_first_s=1.0, backoff_max_s=5.0))
    for _ in range(500):
        policy.ready()
        policy.lost(0.0, was_ready=True)
    assert policy.wait_s(0.0) == 5.0


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=200))
def test_starts_are_bounded_whatever_happens(events: list[tuple[float, bool]]) -> None:
    """In any window there are at most so many starts, plus one for every cool-down that fits in it."""
    policy, now, starts = RestartPolicy(LIMITS), 0.0, []
    for pause_s, gets_ready in events:
        now += pause_s
        wait_s = policy.wait_s(now)
        if wait_s is None:
            continue
        assert 0.0 <= wait_s <= LIMITS.backoff_max_s
        now += wait_s
        starts.append(now)
        if gets_ready:
            policy.ready()
        policy.lost(now, was_ready=gets_ready)
    most = LIMITS.losses_max + 1 + int(LIMITS.window_s / LIMITS.cool_down_s) + 1
    for first in starts:
        assert sum(first <= start < first + LIMITS.window_s for start in starts) <= most
