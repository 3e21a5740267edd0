"""Life of a worker's jobs beyond one: sharing, fairness, deadlines, what is told about them and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from kakeya_zmq.engine import OpenSession
from kakeya_zmq.protocol.effects import RequestKey, RunCommand, SendFailure, Tick
from kakeya_zmq.protocol.work import JobState, WorkSettings
from kakeya_zmq.protocol.work_history import JobHistory, JobView
from tests.unit.preparation_kit import BLOCK, FULL, PART_BYTES, SEGMENT, STATEFUL, WINDOWED, all_parts, new_store, tokens_of
from tests.unit.work_kit import WorkHost
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.messages import JobResult


def outcome(host: WorkHost, key: RequestKey) -> Any:
    return host.ended[key].outcome


def view(host: WorkHost, job_id: int = 1, node: str = "asker") -> JobView:
    (found,) = [job for job in host.service.jobs(host.now) if (job.asker, int(job.job_id, 16)) == (node, job_id)]
    return found


def compute(host: WorkHost, tokens: int) -> None:
    while host.counts.get("job_tokens_computed", 0) < tokens:
        assert host.step()


# --- the same prefix once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", [FULL, WINDOWED, STATEFUL])
def test_two_askers_of_one_prompt_share_the_computation(requirement: Any) -> None:
    host = WorkHost(requirement)
    tokens = tokens_of(100)
    first, second = host.submit(tokens, node="a"), host.submit(tokens, node="b")
    assert host.service.queued_jobs == 1
    host.drain()
    assert (outcome(host, first).tokens_computed, outcome(host, second).tokens_reused) == (99, 99)
    assert (host.counts["job_tokens_computed"], host.counts["jobs_shared"]) == (99, 1)


def test_a_shared_prompt_is_served_before_the_others_in_the_queue_are_computed() -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(100)
    host.submit(tokens, node="a")
    host.submit(tokens_of(100, 2), node="b")
    waiting = host.submit(tokens, node="c")
    compute(host, 99)
    host.step()
    assert view(host, node="c").state is JobState.RUNNING
    assert view(host, node="b").state is JobState.RUNNING or host.service.queued_jobs == 1
    assert view(host, node="c").tokens_done == 99
    host.drain()
    assert outcome(host, waiting).tokens_computed == 0


def test_a_longer_prompt_goes_on_where_the_other_ends() -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(200)
    host.submit(tokens[:97], node="a")
    longer = host.submit(tokens, node="b")
    host.drain()
    assert (outcome(host, longer).tokens_reused, outcome(host, longer).tokens_computed) == (96, 103)


def test_when_the_first_asker_goes_the_second_goes_on_from_what_was_computed() -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(200)
    first, second = host.submit(tokens, node="a"), host.submit(tokens, node="b")
    compute(host, 3 * SEGMENT)
    host.cancel(first)
    host.drain()
    assert outcome(host, second).tokens_reused == 3 * SEGMENT
    assert host.counts["job_tokens_computed"] == 199


def test_what_is_all_in_the_store_does_not_wait_for_the_engine() -> None:
    cached = tokens_of(65, 7)
    host = WorkHost(FULL, store=new_store(all_parts(cached[:64], FULL)))
    host.submit(tokens_of(100), node="a")
    host.submit(tokens_of(100, 2), node="b")
    quick = host.submit(cached, node="c")
    assert not any(isinstance(effect, RunCommand) for effect in host.effects)
    assert (view(host, node="c").state, view(host, node="c").eta_ms) == (JobState.RUNNING, 0)
    host.drain()
    assert isinstance(outcome(host, quick), JobResult)


def test_a_store_too_small_for_both_computes_the_second_prompt_itself() -> None:
    tokens, other = tokens_of(65), tokens_of(65, 2)
    host = WorkHost(FULL, store=new_store(max_bytes=4 * PART_BYTES))
    keys = [host.submit(tokens, node="a"), host.submit(other, node="b"), host.submit(other, node="c")]
    host.drain()
    assert all(isinstance(outcome(host, key), JobResult) for key in keys)
    assert host.counts["job_tokens_computed"] == 128


# --- fairness and bounds ---------------------------------------------------------------------------------------------


def test_the_queue_is_fair_between_askers_and_says_so() -> None:
    host = WorkHost(FULL, settings=WorkSettings(default_tokens_per_second=10.0))
    for number in range(5):
        host.submit(tokens_of(101, 10 + number), node="greedy", job_id=number)
    host.submit(tokens_of(51, 2), node="modest", job_id=99)
    queued = [job for job in host.service.jobs(0.0) if job.state is JobState.QUEUED]
    assert [int(job.job_id, 16) for job in queued] == [99, 1, 2, 3, 4]
    assert [job.eta_ms for job in queued] == [15_000, 25_000, 35_000, 45_000, 55_000]
    opened: list[str] = []
    while host.step(-1):
        opened += [
            e.command.session_id for e in host.effects if isinstance(e, RunCommand) and type(e.command) is OpenSession
        ]
    assert opened[0] == "job-6"
    host.drain()


def test_one_asker_cannot_fill_the_queue() -> None:
    host = WorkHost(FULL, settings=WorkSettings(max_jobs=8, max_jobs_per_asker=2))
    for number in (1, 2):
        host.submit(tokens_of(40, number), node="greedy", job_id=number)
    refused = host.submit(tokens_of(40, 3), node="greedy", job_id=3)
    assert outcome(host, refused) is FailureCode.RESOURCE_EXHAUSTED
    assert host.submit(tokens_of(40, 3), node="modest") in host.requests
    host.drain()


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
def test_a_job_ends_at_its_deadline_whether_it_waits_or_computes(steps: int) -> None:
    host = WorkHost(FULL)
    first, second = host.submit(tokens_of(300)), host.submit(tokens_of(40, 2), job_id=2)
    for _ in range(steps):
        host.step()
    assert host.service.deadline() == 60.0
    host.now = 60.0
    host.send(Tick())
    assert [outcome(host, key) for key in (first, second)] == 2 * [FailureCode.DEADLINE_EXCEEDED]
    assert host.service.deadline() is None
    assert {job.state for job in host.service.jobs(60.0)} == {JobState.CANCELLED}
    host.drain()


# --- views and history -----------------------------------------------------------------------------------------------


def test_a_job_is_seen_from_its_submission_to_its_end() -> None:
    tokens = tokens_of(100)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[:32], FULL)))
    host.submit(tokens)
    assert (view(host).state, view(host).tokens_total, view(host).tokens_done, view(host).tenant) == (
        JobState.RUNNING,
        99,
        0,
        "default",
    )
    seen = host.service.changes
    compute(host, SEGMENT)
    assert host.service.changes > seen
    assert (view(host).tokens_done, view(host).tokens_reused) == (64, 32)
    host.now = 2.0
    assert view(host).tokens_per_second == 16.0
    assert view(host).eta_ms == pytest.approx(35 / 16 * 1000)
    host.drain()
    ended = view(host)
    assert (ended.state, ended.tokens_done, ended.eta_ms, ended.reason) == (JobState.COMPLETED, 99, 0, "")
    host.now += 100
    assert view(host) == ended, "the clock of an ended job stands still"


@pytest.mark.parametrize(
    ("trouble", "state"),
    [
        ("cancel", JobState.CANCELLED),
        ("give up", JobState.CANCELLED),
        ("engine", JobState.FAILED),
        ("lane", JobState.FAILED),
        ("shutdown", JobState.FAILED),
    ],
)
def test_every_ending_has_its_state_and_its_reason(trouble: str, state: JobState) -> None:
    host = WorkHost(FULL)
    key = host.submit(tokens_of(100))
    match trouble:
        case "cancel":
            host.cancel(key)
        case "give up":
            host.done(key, complete=False)
        case "engine":
            host.prefill_fails_at = 32
            host.drain()
        case "lane":
            host.finish_lane(next(iter(host.lanes)))
        case _:
            host.carry_out(host.service.shutdown("stopping", host.now))
    assert view(host).state is state
    assert view(host).reason
    host.drain()


def test_kv_that_the_codec_cannot_store_fails_the_job_at_once_and_is_told_once() -> None:
    host = WorkHost(FULL)
    host.not_encoded = 1
    keys = []
    for seed in (1, 2):
        keys.append(host.submit(tokens_of(100, seed=seed), job_id=seed))
        host.drain()
    assert [host.ended[key].outcome for key in keys] == [FailureCode.DATA_LOSS, FailureCode.DATA_LOSS]
    assert all("--cache-compression" in message for message in host.failures)
    assert host.counts["parts_not_encoded"] == 2
    assert host.counts.get("job_tokens_computed", 0) == 0, "it ends with the first segment that shows it"
    assert len(host.notes) == 1
    host.not_encoded = 0
    key = host.submit(tokens_of(100, seed=3), job_id=3)
    host.drain()
    assert isinstance(host.ended[key].outcome, JobResult)


def test_an_asker_that_gave_up_is_a_cancelled_job_not_a_failed_one() -> None:
    host = WorkHost(FULL)
    host.done(host.submit(tokens_of(40)), complete=False)
    assert host.counts["jobs_cancelled"] == 1
    assert "jobs_failed" not in host.counts
    host.drain()


def test_an_ended_id_is_not_taken_for_other_content_until_it_is_forgotten() -> None:
    host = WorkHost(FULL, settings=WorkSettings(ended_ttl_s=30.0))
    host.submit(tokens_of(40, 1))
    host.drain()
    assert outcome(host, host.submit(tokens_of(40, 2))) is FailureCode.INVALID_ARGUMENT
    again = host.submit(tokens_of(40, 1))
    assert view(host).state is JobState.RUNNING, "the same content runs again, and is one job all the time"
    host.drain()
    assert outcome(host, again).tokens_reused == 39
    host.now += 30.0
    assert host.service.jobs(host.now) == ()
    assert host.submit(tokens_of(40, 2)) in host.requests
    host.drain()


def test_the_history_is_bounded() -> None:
    history = JobHistory(2, 10.0)
    one = WorkHost(FULL)
    one.cancel(one.submit(tokens_of(40)))
    (sample,) = one.service.jobs(0.0)
    for number in range(5):
        named = JobView(**{name: getattr(sample, name) for name in sample.__slots__} | {"job_id": str(number)})
        history.add(named, bytes(32), float(number))
    assert [job.job_id for job in history.views(4.0)] == ["3", "4"]
    assert [job.job_id for job in history.views(13.5)] == ["4"]
    assert history.find(NodeId("asker"), "4", 14.0) is None
    one.drain()


def test_queued_tokens_leave_out_what_the_store_holds() -> None:
    tokens = tokens_of(10 * BLOCK)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[: 8 * BLOCK], FULL)))
    host.submit(tokens_of(41, 3), job_id=2)
    host.submit(tokens)
    assert host.service.queued_tokens == 40 + 10 * BLOCK - 1 - 8 * BLOCK
    assert host.service.load == pytest.approx(2 / 128)
    host.drain()


def test_a_refusal_names_what_is_full() -> None:
    host = WorkHost(FULL, settings=WorkSettings(max_jobs_per_asker=1))
    host.submit(tokens_of(40))
    host.submit(tokens_of(40, 2), job_id=2)
    (failure,) = [effect for effect in host.effects if isinstance(effect, SendFailure)]
    assert "asker already has 1" in failure.message
    host.drain()
