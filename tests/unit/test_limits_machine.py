"""Token buckets and the request limiter: what may pass in a stretch of time, whatever the order of calls."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.protocol.limits import BURST_SECONDS, KeyedBuckets, RequestLimiter, RequestLimits, TokenBucket
from wire.errors import LocalProtocolError
from wire.messages import GetStatus, Lookup, PublishOffer, ReleaseLease, RequestBody, Requirement

LOOKUP = Lookup(fingerprint=bytes(32), requirement=Requirement(block_tokens=64, full=True), block_hashes=bytes(32))
STATUS = GetStatus()
RELEASE = ReleaseLease(lease_id=bytes(16))

STEPS = st.lists(st.floats(0, 3, allow_nan=False), max_size=200)


@given(st.floats(0.1, 100), st.floats(1, 50), STEPS)
def test_a_bucket_gives_no_more_than_burst_and_rate(rate: float, burst: float, steps: list[float]) -> None:
    bucket = TokenBucket(rate, burst)
    taken: list[float] = []
    for now in itertools.accumulate(steps):
        if bucket.take(now) == 0:
            taken.append(now)
    for first, last in itertools.combinations(range(len(taken)), 2):
        assert last - first + 1 <= burst + rate * (taken[last] - taken[first]) + 1e-6


@given(st.floats(0.1, 100), st.floats(1, 50), st.integers(1, 100))
def test_what_a_bucket_refuses_it_gives_after_the_time_it_told(rate: float, burst: float, takes: int) -> None:
    bucket = TokenBucket(rate, burst)
    waits = [bucket.take(0.0) for _ in range(takes)]
    assert sum(wait == 0 for wait in waits) == min(takes, int(burst))
    if waits[-1] > 0:
        assert bucket.take(waits[-1] * 0.5) > 0
        assert bucket.take(waits[-1] * (1 + 1e-9) + 1e-9) == 0


def test_a_clock_that_goes_back_refills_nothing() -> None:
    bucket = TokenBucket(1.0, 1.0)
    assert bucket.take(100.0) == 0
    assert bucket.take(50.0) > 0
    assert bucket.take(100.5) > 0
    assert bucket.take(101.0) == 0


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0.5), (1, float("nan"))])
def test_senseless_buckets_are_refused(rate: float, burst: float) -> None:
    with pytest.raises(LocalProtocolError):
        TokenBucket(rate, burst)
    with pytest.raises(LocalProtocolError):
        KeyedBuckets(rate, burst)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 2, allow_nan=False)), max_size=300))
def test_the_table_of_keys_is_bounded(calls: list[tuple[int, float]]) -> None:
    table = KeyedBuckets(1.0, 2.0, keys_max=8)
    now = 0.0
    for key, step in calls:
        now += step
        table.take(str(key), now)
        assert len(table) <= 8


def test_one_peer_cannot_use_up_what_another_may_take() -> None:
    table = KeyedBuckets(1.0, 2.0)
    assert [table.take("greedy", 0.0) == 0 for _ in range(5)] == [True, True, False, False, False]
    assert table.take("modest", 0.0) == 0


# --- the limiter -----------------------------------------------------------------------------------------------------


def test_an_agent_with_fifty_requests_a_second_does_not_notice() -> None:
    limiter = RequestLimiter()
    offer = PublishOffer(fingerprint=bytes(32), parts=(), suites=(), chunk_bytes_max=65_536)
    bodies: tuple[RequestBody, ...] = (LOOKUP, RELEASE, offer, STATUS, STATUS, STATUS)
    for number in range(50 * 60):
        now = number / 50
        for body in bodies:
            assert limiter.admit("agent", body, 4096, now) is None
            limiter.release("agent", 4096)


def test_over_a_rate_the_peer_hears_when_to_try_again_and_others_go_on() -> None:
    limiter = RequestLimiter(RequestLimits(lookups_per_s=2))
    burst = int(2 * BURST_SECONDS)
    assert [limiter.admit("a", LOOKUP, 10, 0.0) for _ in range(burst)] == [None] * burst
    over = limiter.admit("a", LOOKUP, 10, 0.0)
    assert over is not None
    assert (over.reason, over.retry_after_ms) == ("a peer makes too many lookups", 500)
    assert "try again in 500 ms" in over.message
    assert limiter.admit("a", STATUS, 10, 0.0) is None
    assert limiter.admit("b", LOOKUP, 10, 0.0) is None
    assert limiter.admit("a", LOOKUP, 10, 0.501) is None


def test_a_refusal_costs_nothing() -> None:
    limiter = RequestLimiter(RequestLimits(lookups_per_s=0.5, requests_per_s=1))
    assert limiter.admit("a", LOOKUP, 1, 0.0) is None
    for _ in range(20):  # each refused for the lookups: the one request that is left must stay
        assert limiter.admit("a", LOOKUP, 1, 0.0) is not None
    assert limiter.admit("a", STATUS, 1, 0.0) is None
    assert limiter.open_bytes == 2


def test_open_requests_and_bytes_are_bounded_for_a_node_and_for_all() -> None:
    limiter = RequestLimiter(RequestLimits(open_requests_max=3, open_bytes_per_node_max=100, open_bytes_max=150))
    assert limiter.admit("a", STATUS, 60, 0.0) is None
    assert limiter.admit("a", STATUS, 41, 0.0) is not None
    assert limiter.admit("a", STATUS, 40, 0.0) is None
    assert limiter.admit("b", STATUS, 51, 0.0) is not None
    assert limiter.admit("b", STATUS, 50, 0.0) is None
    limiter.release("a", 60)
    assert limiter.admit("a", STATUS, 1, 0.0) is None
    assert limiter.admit("a", STATUS, 1, 0.0) is None
    over = limiter.admit("a", STATUS, 1, 0.0)
    assert over is not None
    assert over.reason == "a peer has too many requests open"


OPERATIONS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 60), st.floats(0, 1)), max_size=200)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_what_is_open_is_what_was_admitted_and_not_released(operations: list[tuple[str, bool, int, float]]) -> None:
    allowed = RequestLimits(open_requests_max=4, open_bytes_per_node_max=120, open_bytes_max=200)
    limiter = RequestLimiter(allowed)
    held: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    now = 0.0
    for node, release, size, step in operations:
        now += step
        if release and held[node]:
            limiter.release(node, held[node].pop())
        elif limiter.admit(node, STATUS, size, now) is None:
            held[node].append(size)
        assert limiter.open_bytes == sum(map(sum, held.values())) <= 200
        assert all(len(sizes) <= 4 and sum(sizes) <= 120 for sizes in held.values())
    for node, sizes in held.items():
        for size in sizes:
            limiter.release(node, size)
    assert limiter.open_bytes == 0


def test_a_release_too_many_is_a_bug() -> None:
    limiter = RequestLimiter()
    limiter.admit("a", STATUS, 5, 0.0)
    limiter.release("a", 5)
    with pytest.raises(LocalProtocolError):
        limiter.release("a", 5)


@pytest.mark.parametrize("bad", [{"lookups_per_s": 0}, {"requests_per_s": 0.1}, {"open_requests_max": 0}])
def test_senseless_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(LocalProtocolError):
        RequestLimits(**bad)  # type: ignore[arg-type]
