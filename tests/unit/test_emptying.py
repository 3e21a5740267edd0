"""A key is revoked: when everything goes that a node holds, and that nothing of it comes back by what is under way."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.protocol.effects import RequestKey
from kakeya_zmq.protocol.emptying import GRACE_S, INTERVAL_S, EmptyingPlan
from kakeya_zmq.protocol.inference import InferenceSettings
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.store import LeaseError
from tests.unit.inference_kit import InferenceHost
from tests.unit.preparation_kit import FINGERPRINT, FULL, SEGMENT, FakeEngine, all_parts, new_store, preparation, tokens_of
from tests.unit.test_prompt_preparation import Desk
from tests.unit.work_kit import WorkHost
from wire.errors import FailureCode
from wire.messages import JobResult

# --- when ------------------------------------------------------------------------------------------------------------


def emptyings(plan: EmptyingPlan, revocations: list[float], until: float) -> list[float]:
    """When it empties, if somebody asks at each deadline and at no other time."""
    found = []
    for at in [*revocations, until]:
        while (due := plan.deadline()) is not None and due < at:
            assert plan.due(due)
            found.append(due)
        if at < until:
            plan.revoked(at)
    return found


def test_one_revocation_empties_twice() -> None:
    assert emptyings(EmptyingPlan(), [5.0], 1000.0) == [5.0, 5.0 + GRACE_S]


def test_without_a_revocation_nothing_goes() -> None:
    plan = EmptyingPlan()
    assert plan.deadline() is None
    assert not plan.due(1e9)


def test_asking_too_early_changes_nothing() -> None:
    plan = EmptyingPlan()
    plan.revoked(5.0)
    assert plan.due(5.0)
    assert not plan.due(5.0)
    assert not plan.due(5.0 + GRACE_S - 0.001)
    assert plan.due(5.0 + GRACE_S)
    assert plan.deadline() is None


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_every_revocation_is_served_twice_and_never_two_within_a_minute(gaps: list[float]) -> None:
    times = list(itertools.accumulate(gaps))
    found = emptyings(EmptyingPlan(), times, times[-1] + 1000.0)
    slack = 1e-6
    assert all(b - a >= INTERVAL_S - slack for a, b in itertools.pairwise(found))
    for at in times:
        assert any(at <= one <= at + INTERVAL_S + slack for one in found)
        assert any(at + GRACE_S - slack <= one <= at + GRACE_S + INTERVAL_S + slack for one in found)
    assert found[-1] <= times[-1] + GRACE_S + INTERVAL_S + slack, "and then it is over"


# --- what ------------------------------------------------------------------------------------------------------------


def test_an_emptied_store_has_nothing_for_anybody_leases_and_pins_included() -> None:
    parts = all_parts(tokens_of(70), FULL)
    store = new_store(parts)
    store.pin(parts[0].meta.ref, fingerprint=FINGERPRINT)
    lease = store.lease([part.meta.ref for part in parts], 0.0, 30_000, fingerprint=FINGERPRINT, owner="peer")
    held = store.stats().bytes_used
    assert store.clear() == held > 0
    assert (store.stats().bytes_used, store.stats().bytes_locked, store.stats().entry_count) == (0, 0, 0)
    with pytest.raises(LeaseError):
        store.leased_parts(lease.lease_id, [parts[0].meta.ref], 1.0)
    assert not store.release(lease.lease_id)
    assert store.clear() == 0
    for part in parts:
        store.put(part, fingerprint=FINGERPRINT, now=2.0)
    assert store.stats().bytes_used == held, "and takes everything anew"


def test_a_preparation_that_is_under_way_keeps_nothing_any_more() -> None:
    history, store, may_keep = tokens_of(200), new_store(), [True]
    machine = preparation(history, FULL, store=store)
    machine = PromptPreparation(
        replace(machine._task, may_keep=lambda: may_keep[0]),
        store=store,
        ids=machine._ids,
        rates=machine._rates,
        hash_tail=machine._hash_tail,
        random_bytes=bytes,
    )
    desk = Desk(machine, FakeEngine(history, FULL, 0))
    may_keep[0] = False
    desk.run_engine()
    desk.ready()
    assert store.stats().entry_count == 0


def test_open_sessions_go_on_and_keep_to_themselves() -> None:
    host = InferenceHost(FULL, settings=InferenceSettings(publish_delay_s=3.0))
    session_id = host.create()
    host.append(session_id, tokens_of(3 * SEGMENT))
    host.settle()
    key = host.generate(session_id, 30)
    while key in host.open:
        host.step()
    # Its capture is under way: what it brings rests on what was imported.
    host.store.clear()
    host.service.isolate()
    host.settle()
    assert (host.store.stats().entry_count, host.published) == (0, set())
    before = len(host.models[session_id].history)
    host.append(session_id, np.array([5, 6, 7], np.int32))
    host.settle()
    host.generate(session_id, 20)
    host.settle()
    host.close(session_id)
    host.settle()
    assert len(host.models[session_id].history) == before + 23, "its user notices nothing"
    assert (host.store.stats().entry_count, host.published) == (0, set())
    fresh = host.create()
    host.append(fresh, tokens_of(3 * SEGMENT))
    host.settle()
    assert host.store.stats().entry_count > 0, "sessions that begin now share as ever"


# --- a worker's jobs -------------------------------------------------------------------------------------------------


def outcome(host: WorkHost, key: RequestKey) -> JobResult | FailureCode | None:
    return host.ended[key].outcome


def distrust(host: WorkHost) -> None:
    host.store.clear()
    host.carry_out(host.service.distrust_store(host.now))


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_job_that_rests_on_the_store_ends_and_one_that_waits_is_computed_anew(steps: int) -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(200)
    host.submit(tokens[:97], job_id=1)
    host.drain()
    resting = host.submit(tokens, job_id=2)
    waiting = host.submit(tokens, job_id=3)
    for _ in range(steps):
        assert host.step()
    distrust(host)
    assert outcome(host, resting) is FailureCode.UNAVAILABLE
    host.drain()
    done = outcome(host, waiting)
    assert isinstance(done, JobResult)
    assert (done.tokens_computed, done.tokens_reused) == (199, 0)


def test_a_job_that_computes_everything_itself_goes_on() -> None:
    host = WorkHost(FULL)
    key = host.submit(tokens_of(200))
    assert host.step()
    distrust(host)
    host.drain()
    done = outcome(host, key)
    assert isinstance(done, JobResult)
    assert done.tokens_computed == 199


def test_what_is_all_in_the_store_and_being_sent_is_not_sent_on() -> None:
    host = WorkHost(FULL)
    host.submit(tokens_of(100), job_id=1)
    host.drain()
    served = host.submit(tokens_of(100), job_id=2)
    distrust(host)
    assert outcome(host, served) is FailureCode.UNAVAILABLE
