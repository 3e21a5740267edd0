"""Which nodes are left alone, for how long, and what forgets it."""

from __future__ import annotations

from kakeya_zmq.backoff import NODES_MAX, PAUSE_FIRST_S, PAUSE_MAX_S, Backoff, Trouble
from kakeya_zmq.planner import MeasuredRates
from wire.ids import NodeId

A, B = NodeId("a"), NodeId("b")


def test_a_pause_doubles_up_to_its_bound_and_names_its_reason() -> None:
    backoff, now, lengths = Backoff(), 100.0, []
    for _ in range(8):
        backoff.failed(A, Trouble.BULK_PORT, "its port is shut", now)
        length = next(s for s in range(1, 1000) if not backoff.left_alone(A, now + s, Trouble.BULK_PORT))
        lengths.append(length)
        now += length
    assert lengths == [10, 20, 40, 80, 160, 300, 300, 300]
    assert (lengths[0], lengths[-1]) == (PAUSE_FIRST_S, PAUSE_MAX_S)
    backoff.failed(A, Trouble.BULK_PORT, "its port is shut", now)
    assert backoff.left_alone(A, now, Trouble.BULK_PORT) == "left alone for 300 s more: its port is shut"


def test_failures_within_a_pause_are_one_failure() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.failed(A, Trouble.JOB, "why", 0.0)
    assert backoff.left_alone(A, PAUSE_FIRST_S - 1, Trouble.JOB)
    assert not backoff.left_alone(A, PAUSE_FIRST_S, Trouble.JOB)


def test_troubles_and_nodes_are_told_apart() -> None:
    backoff = Backoff()
    backoff.failed(A, Trouble.JOB, "why", 0.0)
    assert not backoff.left_alone(A, 1.0, Trouble.BULK_PORT)
    assert not backoff.left_alone(B, 1.0, Trouble.JOB)
    assert backoff.left_alone(A, 1.0, Trouble.BULK_PORT, Trouble.JOB)


def test_a_success_and_leaving_the_fleet_forget_everything() -> None:
    rates = MeasuredRates()
    rates.backoff.failed(A, Trouble.JOB, "why", 0.0)
    rates.backoff.failed(B, Trouble.BULK_PORT, "why", 0.0)
    rates.backoff.succeeded(A, Trouble.JOB)
    rates.forget(B)
    assert not rates.backoff.left_alone(A, 1.0, *Trouble)
    assert not rates.backoff.left_alone(B, 1.0, *Trouble)
    rates.backoff.failed(A, Trouble.JOB, "why", 2.0)
    assert not rates.backoff.left_alone(A, 2.0 + PAUSE_FIRST_S, Trouble.JOB), "it begins short again"


def test_the_memory_is_bounded() -> None:
    backoff = Backoff()
    for number in range(NODES_MAX + 5):
        backoff.failed(NodeId(f"n{number}"), Trouble.JOB, "why", 0.0)
    assert not backoff.left_alone(NodeId("n4"), 1.0, Trouble.JOB)
    assert backoff.left_alone(NodeId("n5"), 1.0, Trouble.JOB)
