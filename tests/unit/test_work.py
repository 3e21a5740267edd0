"""The worker's job queue: what is refused, what is sent, who comes next, and how each kind of trouble ends."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kakeya_zmq.blocks import needed_parts
from kakeya_zmq.engine import CloseSession, ImportPrefix, OpenSession, Prefill, TokenArray
from kakeya_zmq.protocol.effects import (
    BindSender,
    CancelCommand,
    CloseLane,
    CommandEnded,
    FeedSender,
    LaneFinished,
    Note,
    RequestArrived,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    Tick,
)
from kakeya_zmq.protocol.work import JobState, WorkSettings
from kakeya_zmq.protocol.work_door import NOT_SEALED_FOR_US
from kakeya_zmq.protocol.work_job import DRAIN_S, LANE_GRACE_S
from tests.unit.preparation_kit import (
    BLOCK,
    FINGERPRINT,
    FULL,
    JOB_KEYS,
    PART_BYTES,
    REQUIREMENTS,
    WINDOWED,
    all_parts,
    chain_of,
    key_of,
    new_store,
    tokens_of,
)
from tests.unit.work_kit import Request, WorkHost, submission
from wire import limits
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.job_seal import PREFIX_BYTES, JobBinding, JobKeys
from wire.messages import CipherSuite, JobAccepted, JobResult, Requirement, SubmitJob

each_requirement = pytest.mark.parametrize("requirement", REQUIREMENTS)


def ahead(host: WorkHost) -> tuple[int, int, int]:
    """What the last job was told: jobs and tokens in front of it, and how long they take in ms."""
    body = next(e.body for e in host.effects if isinstance(e, SendProgress) and isinstance(e.body, JobAccepted))
    return body.queued_jobs, body.queued_tokens, body.eta_ms


def commands(host: WorkHost) -> list[Any]:
    return [effect.command for effect in host.effects if isinstance(effect, RunCommand)]


def outcome(host: WorkHost, key: RequestKey) -> Any:
    return host.ended[key].outcome


def only_lane(host: WorkHost) -> Any:
    (lane,) = host.lanes
    return lane


# --- submission ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"fingerprint": bytes(32)}, FailureCode.FAILED_PRECONDITION),
        ({"have": 40}, FailureCode.INVALID_ARGUMENT),
        ({"have": 39}, FailureCode.INVALID_ARGUMENT),
        ({"credit_bytes": limits.CHUNK_BYTES_MIN - 1}, FailureCode.INVALID_ARGUMENT),
        ({"credit_bytes": 0}, FailureCode.INVALID_ARGUMENT),
    ],
)
def test_what_can_never_be_served_is_refused(options: dict[str, Any], code: FailureCode) -> None:
    host = WorkHost(FULL)
    key = host.submit(tokens_of(40), **options)
    assert outcome(host, key) is code
    host.check_drained()


@pytest.mark.parametrize("tokens", [tokens_of(1), tokens_of(0), np.array([1, 1000], np.int32), np.array([-1, 1], np.int32)])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    host = WorkHost(FULL)
    assert outcome(host, host.submit(tokens)) is FailureCode.INVALID_ARGUMENT


def test_prompts_beyond_the_limit_are_refused_with_both_numbers() -> None:
    host = WorkHost(FULL, settings=WorkSettings(max_prompt_tokens=30))
    assert outcome(host, host.submit(tokens_of(31))) is FailureCode.INVALID_ARGUMENT
    (failure,) = [effect for effect in host.effects if isinstance(effect, SendFailure)]
    assert "31" in failure.message
    assert "30" in failure.message


def test_a_prompt_whose_kv_can_never_fit_does_not_enter_the_queue() -> None:
    host = WorkHost(FULL, store=new_store(max_bytes=3 * 64 - 1))
    assert outcome(host, host.submit(tokens_of(65))) is FailureCode.RESOURCE_EXHAUSTED
    key = host.submit(tokens_of(64))
    assert key in host.requests
    host.drain()


def sealed_for(asker: str, worker: str, tokens: TokenArray) -> SubmitJob:
    body = submission(tokens)
    binding = JobBinding(FINGERPRINT, body.job_id, key_of(asker), key_of(worker))
    return msgspec.structs.replace(body, prompt=JOB_KEYS.seal(binding, bytes(PREFIX_BYTES), tokens.tobytes()))


@pytest.mark.parametrize(
    ("body", "from_whom"),
    [
        (submission(tokens_of(40), keys=JobKeys(b"u" * 32)), "asker"),
        (submission(tokens_of(40), node="victim"), "asker"),
        (sealed_for("asker", "another worker", tokens_of(40)), "asker"),
        (msgspec.structs.replace(submission(tokens_of(40)), job_id=b"k" * 16), "asker"),
        (msgspec.structs.replace(submission(tokens_of(40)), prompt=b""), "asker"),
        (msgspec.structs.replace(submission(tokens_of(40)), prompt=tokens_of(40).tobytes()), "asker"),
        (submission(tokens_of(40), node=""), ""),
    ],
    ids=["another key", "another asker's", "another worker's", "another job's", "nothing", "in clear", "no identity"],
)
def test_a_prompt_that_was_not_sealed_for_this_worker_is_refused_and_written_down(body: SubmitJob, from_whom: str) -> None:
    host = WorkHost(FULL)
    key = RequestKey((bytes(16), 1))
    host.requests[key] = Request(body, tokens_of(40), from_whom)
    identity = key_of(from_whom) if from_whom else b""
    host.send(RequestArrived(key, NodeId(from_whom), (), body, host.now + 60, identity))
    assert outcome(host, key) is FailureCode.UNAUTHENTICATED
    assert host.refusals == [NOT_SEALED_FOR_US]
    assert host.service.idle


def test_who_attaches_to_a_job_is_given_a_proof_of_its_own() -> None:
    host = WorkHost(FULL)
    first = host.submit(tokens_of(40))
    second = host.submit(tokens_of(40))  # the host checks the proof against this submission
    assert outcome(host, first) is FailureCode.ABORTED
    assert second in host.requests
    host.drain()


def test_a_full_queue_refuses_and_an_ended_job_makes_room() -> None:
    host = WorkHost(FULL, settings=WorkSettings(max_jobs=2))
    first, _ = host.submit(tokens_of(40, 1), job_id=1), host.submit(tokens_of(40, 2), job_id=2)
    refused = host.submit(tokens_of(40, 3), job_id=3)
    assert outcome(host, refused) is FailureCode.RESOURCE_EXHAUSTED
    host.cancel(first)
    assert host.submit(tokens_of(40, 3), job_id=3) in host.requests
    host.drain()


def test_a_credit_smaller_than_the_chunks_makes_the_chunks_smaller() -> None:
    host = WorkHost(FULL)
    host.submit(tokens_of(40), chunk_bytes=limits.CHUNK_BYTES_MAX, credit_bytes=limits.CHUNK_BYTES_MIN + 1)
    (bind,) = [effect for effect in host.effects if isinstance(effect, BindSender)]
    assert (bind.chunk_bytes, bind.credit_bytes) == (limits.CHUNK_BYTES_MIN + 1, limits.CHUNK_BYTES_MIN + 1)
    host.drain()


def test_the_wait_is_told_from_the_tokens_ahead_and_the_measured_speed() -> None:
    host = WorkHost(FULL, settings=WorkSettings(default_tokens_per_second=10.0))
    host.submit(tokens_of(41, 1), job_id=1)
    assert ahead(host) == (0, 0, 0)
    host.submit(tokens_of(21, 2), job_id=2)
    assert ahead(host) == (1, 40, 4000)
    host.submit(tokens_of(31, 3), job_id=3)
    assert ahead(host) == (2, 60, 6000)
    host.drain()


# --- what is sent ----------------------------------------------------------------------------------------------------


@each_requirement
@pytest.mark.parametrize("length", [2, BLOCK + 1, 2 * BLOCK, 65, 100])
@pytest.mark.parametrize("have", [0, 1, 15, 16, 17, 40, 64])
def test_the_asker_gets_exactly_what_it_lacks(requirement: Requirement, length: int, have: int) -> None:
    """Also with odd ``have_tokens`` and with prompts that end on a block; the host compares with its own list."""
    host = WorkHost(requirement)
    if have >= length - 1:
        return
    key = host.submit(tokens_of(length), have=have)
    host.drain()
    assert outcome(host, key) == JobResult(
        tokens_computed=length - 1, tokens_reused=0, compute_ms=outcome(host, key).compute_ms, sent_bytes=7
    )


@each_requirement
@pytest.mark.parametrize("every", [BLOCK, 2 * BLOCK, 3 * BLOCK, 256])
@pytest.mark.parametrize("have", [0, 17, 40])
def test_checkpoints_come_on_the_way_and_each_makes_a_hit_possible(requirement: Requirement, every: int, have: int) -> None:
    host = WorkHost(requirement)
    tokens = tokens_of(150)
    host.submit(tokens, have=have, checkpoints=every)
    host.drain()
    chain = chain_of(tokens[:-1])
    at_hand = {ref for block in chain.blocks if block.end <= have for ref in needed_parts(chain, block.end, requirement)}
    at_hand |= {part.meta.ref for part in host.sent}
    assert all(at_hand.issuperset(needed_parts(chain, end, requirement)) for end in range(every, 149, every))


@each_requirement
@pytest.mark.parametrize("cached", [0, 10, BLOCK, 40, 64, 99])
def test_what_the_worker_holds_is_not_computed_again(requirement: Requirement, cached: int) -> None:
    tokens = tokens_of(100)
    host = WorkHost(requirement, store=new_store(all_parts(tokens[:cached], requirement)))
    key = host.submit(tokens)
    host.drain()
    # a tail is a boundary only of the prompt that ends there
    reused = cached if cached == 99 else cached // BLOCK * BLOCK
    assert outcome(host, key).tokens_reused == reused
    assert host.counts.get("job_tokens_computed", 0) == 99 - reused


def test_a_job_that_is_all_cached_needs_no_engine_and_no_room() -> None:
    tokens = tokens_of(65)
    parts = all_parts(tokens[:64], FULL)
    host = WorkHost(FULL, store=new_store(parts, max_bytes=len(parts) * PART_BYTES))
    host.submit(tokens)
    assert not commands(host)
    assert host.store.stats().evictions == 0
    host.drain()


def test_room_for_the_rest_is_not_made_out_of_the_jobs_own_prefix() -> None:
    """The oldest parts of the store are the ones the job starts from: they count as used before room is made."""
    tokens = tokens_of(129)
    own, other = all_parts(tokens[:64], FULL), all_parts(tokens_of(64, seed=9), FULL)
    host = WorkHost(FULL, store=new_store([*own, *other], max_bytes=8 * PART_BYTES))
    key = host.submit(tokens)
    assert any(isinstance(command, ImportPrefix) for command in commands(host))
    assert all(host.store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in own)
    assert not any(host.store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in other)
    host.drain()
    assert outcome(host, key).tokens_reused == 64
    assert "put_failures" not in host.counts


def test_parts_evicted_after_the_import_began_are_sent_all_the_same() -> None:
    tokens = tokens_of(100)
    host = WorkHost(WINDOWED, store=new_store(all_parts(tokens[:64], WINDOWED)))
    key = host.submit(tokens)
    for part in all_parts(tokens[:64], WINDOWED):
        host.store.invalidate(part.meta.ref, fingerprint=FINGERPRINT)
    host.drain()
    assert isinstance(outcome(host, key), JobResult)


def test_a_prefix_that_cannot_be_imported_is_computed_again_and_dropped() -> None:
    tokens = tokens_of(100)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[:64], FULL)))
    found = [host.store.get(part.meta.ref, fingerprint=FINGERPRINT) for part in all_parts(tokens[:64], FULL)]
    bad = {id(part.payload.obj) for part in found if part is not None}
    host.import_fails = True
    key = host.submit(tokens)
    host.open_lane(only_lane(host))
    assert not any(isinstance(effect, FeedSender) for effect in host.effects), "nothing of it is sent before it is proved"
    host.drain()
    assert len(bad) == 4
    assert not bad & {id(part.payload.obj) for part in host.sent}, "what is sent was computed"
    assert (outcome(host, key).tokens_reused, outcome(host, key).tokens_computed) == (0, 99)
    assert host.counts["import_failures"] == 1


def test_an_import_that_just_ends_does_not_go_on_from_a_prefix_that_is_not_there() -> None:
    tokens = tokens_of(100)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[:64], FULL)))
    key = host.submit(tokens)
    host.step()
    host.step()
    (task,) = host.queues["job-1"]
    assert isinstance(task.command, ImportPrefix)
    host.send(CommandEnded(task.ticket, cancelled=True))
    assert outcome(host, key) is FailureCode.INTERNAL
    host.drain()


def test_nonsense_published_under_a_hash_costs_only_its_reuse() -> None:
    tokens = tokens_of(40)
    part = all_parts(tokens[:39], FULL)[1]
    wrong_place = type(part)(meta=type(part.meta)(**{**_fields(part.meta), "start": 64}), payload=part.payload)
    host = WorkHost(FULL)
    host.store.put(wrong_place, fingerprint=FINGERPRINT, now=0.0)
    key = host.submit(tokens)
    host.drain()
    assert isinstance(outcome(host, key), JobResult)
    assert host.counts["put_failures"] >= 1


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


# --- one after the other -----------------------------------------------------------------------------------------------


def test_the_next_job_starts_when_the_last_ones_session_is_closed_not_when_its_asker_is_done() -> None:
    host = WorkHost(FULL)
    host.submit(tokens_of(40, 1), job_id=1)
    host.submit(tokens_of(40, 2), job_id=2)
    assert not commands(host)
    opened: list[str] = []
    while host.step(-1):  # the engine prefers the newest session, as far as there is a choice
        opened += [command.session_id for command in commands(host) if isinstance(command, OpenSession)]
    assert opened == ["job-2"], "it did not wait for the asker of the first, whose lane is not even open"
    assert host.service.running_jobs == 2
    host.drain()


def test_a_job_that_comes_while_the_last_session_is_being_closed_waits_for_it() -> None:
    host = WorkHost(FULL)
    host.cancel(host.submit(tokens_of(40, 1)))
    key = host.submit(tokens_of(40, 2), job_id=2)
    assert not commands(host)
    host.drain()
    assert isinstance(outcome(host, key), JobResult)


@pytest.mark.parametrize("phase", ["queued", "importing", "computing", "draining", "closing"])
@pytest.mark.parametrize("trouble", ["cancel", "lane", "give up", "shutdown", "attach"])
def test_every_trouble_in_every_phase_leaves_nothing_behind(phase: str, trouble: str) -> None:
    tokens = tokens_of(100)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[:32], FULL)))
    if phase == "queued":
        host.submit(tokens_of(50, 3), job_id=9, node="other")
    key = host.submit(tokens)
    if phase in ("computing", "draining", "closing"):
        for _ in range({"computing": 4, "draining": 8, "closing": 30}[phase]):
            host.step()
    match trouble:
        case "cancel":
            host.cancel(key)
        case "lane":
            for lane in [lane for lane, state in host.lanes.items() if state.key == key]:
                host.finish_lane(lane)
                assert outcome(host, key) is FailureCode.UNAVAILABLE
        case "give up":
            host.done(key, complete=False)
            assert outcome(host, key) is FailureCode.ABORTED
        case "shutdown":
            host.carry_out(host.service.shutdown("stopping", host.now))
            assert outcome(host, key) is FailureCode.UNAVAILABLE
            assert outcome(host, host.submit(tokens, job_id=7)) is FailureCode.UNAVAILABLE
        case _:
            again = host.submit(tokens)
            assert outcome(host, key) is FailureCode.ABORTED
            host.drain()
            assert isinstance(outcome(host, again), JobResult)
    host.drain()


def test_a_cancelled_computation_is_stopped_before_its_session_is_closed() -> None:
    host = WorkHost(FULL)
    key = host.submit(tokens_of(100))
    host.cancel(key)
    kinds = [type(effect) for effect in host.effects if isinstance(effect, CancelCommand | RunCommand | CloseLane)]
    assert kinds == [CloseLane, CancelCommand, RunCommand]
    assert isinstance(commands(host)[0], CloseSession)
    host.drain()


# --- the same job again ---------------------------------------------------------------------------------------------------


def test_a_newer_request_takes_the_job_over_with_its_own_lane_terms() -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(100)
    host.submit(tokens)
    while "job_tokens_computed" not in host.counts:
        host.step()
    computed = host.counts["job_tokens_computed"]
    host.submit(tokens, credit_bytes=2 * limits.CHUNK_BYTES_MIN, chunk_bytes=2 * limits.CHUNK_BYTES_MIN)
    (bind,) = [effect for effect in host.effects if isinstance(effect, BindSender)]
    assert bind.chunk_bytes == 2 * limits.CHUNK_BYTES_MIN
    host.drain()
    assert computed < 99
    assert host.counts["job_tokens_computed"] == 99, "nothing was computed twice"


def test_a_used_id_with_another_prompt_is_refused_and_other_nodes_have_their_own_ids() -> None:
    host = WorkHost(FULL)
    host.submit(tokens_of(40, 1))
    assert outcome(host, host.submit(tokens_of(40, 2))) is FailureCode.INVALID_ARGUMENT
    assert host.submit(tokens_of(40, 2), node="b") in host.requests
    host.drain()


def test_an_attach_after_the_asker_was_done_waits_for_the_new_asker() -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(40)
    first = host.submit(tokens)
    while host.step():
        pass
    host.open_lane(only_lane(host))
    host.done(first)
    again = host.submit(tokens)
    assert outcome(host, first) is FailureCode.ABORTED
    for lane in list(host.lanes):
        if host.lanes[lane].closed:
            host.send(LaneFinished(lane, True, "", 7))
            del host.lanes[lane]
    assert again in host.requests
    host.drain()
    assert isinstance(outcome(host, again), JobResult)


# --- lanes that break ----------------------------------------------------------------------------------------------------


def with_a_broken_lane(*, computed: bool) -> tuple[WorkHost, RequestKey]:
    """A job whose lane has just ended, before or after it was given the last part."""
    host = WorkHost(FULL)
    key = host.submit(tokens_of(100))
    host.open_lane(only_lane(host))
    while computed and host.step():
        pass
    host.finish_lane(only_lane(host))
    assert key in host.requests, "its asker may be about to say why"
    return host, key


def last_state(host: WorkHost) -> JobState:
    (view,) = host.service.jobs(host.now)
    return view.state


@pytest.mark.parametrize("computed", [False, True])
def test_a_lane_that_breaks_just_before_the_cancellation_comes_makes_the_job_cancelled(computed: bool) -> None:
    host, key = with_a_broken_lane(computed=computed)
    host.cancel(key)
    assert last_state(host) is JobState.CANCELLED
    host.drain()


@pytest.mark.parametrize("computed", [False, True])
def test_a_broken_lane_of_which_nobody_says_anything_fails_the_job(computed: bool) -> None:
    host, key = with_a_broken_lane(computed=computed)
    due = host.service.deadline()
    assert due == pytest.approx(host.now + LANE_GRACE_S)
    host.now = due
    host.send(Tick())
    assert outcome(host, key) is FailureCode.UNAVAILABLE
    assert host.failures == ["the transfer ended early: it ended"]
    host.drain()


def test_an_asker_that_has_everything_may_close_the_lane_before_its_word_arrives() -> None:
    host, key = with_a_broken_lane(computed=True)
    host.done(key)
    assert isinstance(outcome(host, key), JobResult)
    host.drain()


def test_an_asker_that_claims_to_have_more_than_it_was_sent_ends_its_job() -> None:
    host, key = with_a_broken_lane(computed=False)
    host.done(key)
    assert outcome(host, key) is FailureCode.ABORTED
    host.drain()


def test_an_asker_may_attach_again_while_its_broken_lane_is_waited_for() -> None:
    host, first = with_a_broken_lane(computed=False)
    again = host.submit(tokens_of(100))
    assert outcome(host, first) is FailureCode.ABORTED
    host.now += 2 * LANE_GRACE_S
    host.send(Tick())
    assert again in host.requests
    host.drain()
    assert isinstance(outcome(host, again), JobResult)


# --- figures -----------------------------------------------------------------------------------------------------------


def test_speed_counts_computed_tokens_only() -> None:
    tokens = tokens_of(97)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[:64], FULL)))
    host.submit(tokens)
    while host.step():
        host.now += 1.0
    host.drain()
    prefill_s = host.ended.popitem()[1].outcome.compute_ms / 1000  # type: ignore[union-attr]
    assert host.service.tokens_per_second == pytest.approx(32 / prefill_s)
    before = host.service.tokens_per_second
    host.submit(tokens, job_id=2)
    host.drain()
    assert host.service.tokens_per_second == before, "a job out of the cache says nothing about the engine"


def test_a_transfer_declared_done_before_it_began_ends_at_once() -> None:
    host = WorkHost(FULL)
    host.submit(tokens_of(40, 1), job_id=1)
    waiting = host.submit(tokens_of(40, 2), job_id=2)
    host.done(waiting)
    assert outcome(host, waiting) is FailureCode.ABORTED
    host.drain()


def test_aes_is_used_where_both_have_it() -> None:
    host = WorkHost(FULL)
    host.service._has_aes = True
    host.submit(tokens_of(40), suites=(CipherSuite.SECRETBOX, CipherSuite.AES_256_GCM))
    (bind,) = [effect for effect in host.effects if isinstance(effect, BindSender)]
    assert bind.suite is CipherSuite.AES_256_GCM
    host.drain()


def test_prefill_runs_from_the_position_the_import_reached() -> None:
    tokens = tokens_of(100)
    host = WorkHost(FULL, store=new_store(all_parts(tokens[:64], FULL)))
    host.submit(tokens)
    prefill: list[Prefill] = []
    while host.step():
        prefill += [command for command in commands(host) if isinstance(command, Prefill)]
    (command,) = prefill
    assert np.array_equal(command.tokens, tokens[64:99])
    host.drain()


# --- bounds of one member ----------------------------------------------------------------------------------------------


def test_a_computed_job_is_kept_as_long_as_a_very_slow_link_takes_and_no_longer() -> None:
    host = WorkHost(FULL)
    key = host.submit(tokens_of(100))
    while host.step():
        pass
    host.open_lane(only_lane(host))
    due = host.service.deadline()
    assert due is not None
    assert host.now + DRAIN_S <= due < host.now + DRAIN_S + 1.0
    host.now = due
    host.send(Tick())
    assert outcome(host, key) is FailureCode.DEADLINE_EXCEEDED
    host.drain()


def test_jobs_are_counted_by_identity_not_by_name() -> None:
    host = WorkHost(FULL, settings=WorkSettings(max_jobs_per_asker=2))
    for number in range(2):
        assert host.submit(tokens_of(40, number), job_id=number + 1, node="asker") in host.requests
    key = RequestKey((bytes(16), 99))
    body = submission(tokens_of(40, 3), job_id=3)
    host.requests[key] = Request(body, tokens_of(40, 3), "asker")
    host.send(RequestArrived(key, NodeId("another name"), (), body, host.now + 60, key_of("asker")))
    assert outcome(host, key) is FailureCode.RESOURCE_EXHAUSTED
    host.drain()


def test_checkpoints_between_blocks_are_refused() -> None:
    host = WorkHost(FULL)
    assert outcome(host, host.submit(tokens_of(40), checkpoints=BLOCK + 1)) is FailureCode.INVALID_ARGUMENT
    host.check_drained()


def test_why_a_lane_could_not_open_is_noted_here() -> None:
    """The asker's log has it, too; but the ports are this node's."""
    host = WorkHost(FULL)
    key = host.submit(tokens_of(40))
    lane = only_lane(host)
    del host.lanes[lane]
    host.send(LaneFinished(lane, False, "every port is in use", 0))
    assert [effect for effect in host.effects if isinstance(effect, Note)] == [
        Note("warning", "a transfer could not be opened: every port is in use")
    ]
    assert outcome(host, key) is FailureCode.UNAVAILABLE
    host.drain()
