"""Random interleavings of askers, lanes, the engine and a small shared store around the worker's job queue.

The host (tests.unit.work_kit) checks every effect: each request ends once, a lane gets exactly what its asker lacks, each
part once and with the right bytes, then one final feed; one engine session at a time. Jobs only move forward, to exactly one
final state, whatever comes first of cancel, deadline, crash and completion. Others lease parts of the store and change its
budget meanwhile: what is leased is never evicted, and used and reserved room never exceed the budget. At the end everything
is drained and nothing may be left: no request, lane, engine session or reservation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kakeya_zmq.protocol.effects import Tick
from kakeya_zmq.protocol.work import JobState, JobView, WorkSettings
from tests.unit.preparation_kit import BLOCK, FINGERPRINT, REQUIREMENTS, all_parts, new_store, tokens_of
from tests.unit.work_kit import WorkHost
from wire import limits
from wire.ids import LeaseId
from wire.messages import PartRef

SHARED = tokens_of(5 * BLOCK, seed=1)
PROMPTS = [
    np.concatenate([SHARED[:shared], tokens_of(own, seed=10 + own)]).astype(np.int32)
    for shared, own in [(0, 2), (16, 1), (16, 17), (40, 8), (48, 33), (64, 1), (80, 16), (80, 50)]
]
pick = st.integers(0, 1 << 16)


class WorkMachine(RuleBasedStateMachine):
    host: WorkHost

    @initialize(requirement=st.sampled_from(REQUIREMENTS), store_bytes=st.sampled_from([700, 1500, 1 << 20]), filled=pick)
    def begin(self, requirement: Any, store_bytes: int, filled: int) -> None:
        prompt = PROMPTS[filled % len(PROMPTS)]
        parts = all_parts(prompt[:-1], requirement)
        store = new_store(parts[: filled % (len(parts) + 1)], max_bytes=store_bytes)
        self.host = WorkHost(requirement, store=store, settings=WorkSettings(max_jobs=4, max_jobs_per_asker=3))
        self.stopped = False
        self.seen: dict[tuple[str, str], JobView] = {}
        self.leases: dict[LeaseId, set[PartRef]] = {}

    @rule(
        prompt=st.sampled_from(range(len(PROMPTS))),
        have=st.integers(0, 140),
        job_id=st.integers(1, 5),
        node=st.sampled_from(["a", "b"]),
        credit=st.sampled_from([1, limits.CHUNK_BYTES_MIN, limits.CHUNK_BYTES_MIN + 1, 1 << 50]),
    )
    def submit(self, prompt: int, have: int, job_id: int, node: str, credit: int) -> None:
        have_tokens = have if have < 120 else 0
        size = limits.CHUNK_BYTES_DEFAULT
        self.host.submit(PROMPTS[prompt], node=node, job_id=job_id, have=have_tokens, credit_bytes=credit, chunk_bytes=size)

    @precondition(lambda self: self.host.requests)
    @rule(choice=pick)
    def submit_again(self, choice: int) -> None:
        request = list(self.host.requests.values())[choice % len(self.host.requests)]
        job_id = int.from_bytes(request.body.job_id, "big")
        self.host.submit(request.tokens, node=request.node, job_id=job_id, have=request.body.have_tokens)

    @precondition(lambda self: self.host.requests)
    @rule(choice=pick)
    def cancel(self, choice: int) -> None:
        self.host.cancel(list(self.host.requests)[choice % len(self.host.requests)])

    @precondition(lambda self: self.host.requests)
    @rule(choice=pick, what=st.sampled_from(["done", "give up", "credit", "credit", "credit"]))
    def update(self, choice: int, what: str) -> None:
        key = list(self.host.requests)[choice % len(self.host.requests)]
        if what == "credit":
            self.host.credit(key)
        else:
            self.host.done(key, what == "done")

    @precondition(lambda self: self.host.lanes)
    @rule(choice=pick)
    def lane_opens(self, choice: int) -> None:
        self.host.open_lane(list(self.host.lanes)[choice % len(self.host.lanes)])

    @precondition(lambda self: any(lane.final and lane.closed is None for lane in self.host.lanes.values()))
    @rule()
    def asker_has_everything(self) -> None:
        self.host.done(next(lane.key for lane in self.host.lanes.values() if lane.final and lane.closed is None))

    @precondition(lambda self: self.host.lanes)
    @rule(choice=pick)
    def lane_finishes(self, choice: int) -> None:
        self.host.finish_lane(list(self.host.lanes)[choice % len(self.host.lanes)])

    @rule(choice=pick, count=st.integers(1, 6), seconds=st.floats(0, 2))
    def engine_steps(self, choice: int, count: int, seconds: float) -> None:
        failures = self.host.counts.get("import_failures", 0)
        for _ in range(count):
            self.host.now += seconds
            self.host.step(choice)
        if self.host.counts.get("import_failures", 0) > failures:
            for refs in self.leases.values():  # a bad part is dropped also out of leases
                refs.intersection_update([ref for ref in refs if self.host.store.has(ref, fingerprint=FINGERPRINT)])

    @rule(imports=st.booleans(), prefill=st.sampled_from([None, None, 0, 32, 64]))
    def engine_mood(self, imports: bool, prefill: int | None) -> None:
        self.host.import_fails, self.host.prefill_fails_at = imports, prefill

    @rule(prompt=st.sampled_from(PROMPTS), start=pick, count=st.integers(1, 9), gone=st.booleans())
    def store_changes(self, prompt: Any, start: int, count: int, gone: bool) -> None:
        parts = all_parts(prompt[:-1], self.host.requirement)
        chosen = parts[start % len(parts) :][:count]
        store = self.host.store
        for part in chosen:
            if gone:
                store.invalidate(part.meta.ref, fingerprint=FINGERPRINT)
                for refs in self.leases.values():
                    refs.discard(part.meta.ref)
            elif store.stats().bytes_used + store.stats().bytes_reserved + 48 <= store.max_bytes:
                store.put(part, fingerprint=FINGERPRINT, now=self.host.now)

    @rule(seconds=st.sampled_from([0.1, 5.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.host.now += seconds
        self.host.send(Tick())
        deadline = self.host.service.deadline()
        assert deadline is None or deadline > self.host.now

    @rule(prompt=st.sampled_from(PROMPTS), start=pick, count=st.integers(1, 4))
    def somebody_leases(self, prompt: Any, start: int, count: int) -> None:
        parts = all_parts(prompt[:-1], self.host.requirement)
        refs = [part.meta.ref for part in parts[start % len(parts) :][:count]]
        store = self.host.store
        # A lease that fills the store would only make every job fail.
        if store.stats().bytes_locked <= store.max_bytes // 4 and any(map(store.presence(FINGERPRINT), refs)):
            info = store.lease(refs, self.host.now, 3_600_000, fingerprint=FINGERPRINT)
            self.leases[info.lease_id] = set(info.refs)

    @precondition(lambda self: self.leases)
    @rule()
    def somebody_releases(self) -> None:
        lease_id, _ = self.leases.popitem()
        self.host.store.release(lease_id)

    @rule(size=st.sampled_from([500, 700, 1500, 1 << 20]))
    def the_budget_changes(self, size: int) -> None:
        self.host.store.resize(size, self.host.now)

    @precondition(lambda self: not self.stopped)
    @rule(really=st.integers(0, 9))
    def shut_down(self, really: int) -> None:
        if really == 0:
            self.stopped = True
            self.host.carry_out(self.host.service.shutdown("stopping", self.host.now))
            assert not self.host.requests

    @invariant()
    def bounded_and_reserved_only_while_computing(self) -> None:
        if not hasattr(self, "host"):
            return
        service = self.host.service
        assert service.queued_jobs + service.running_jobs <= 4
        assert len(self.host.requests) == service.queued_jobs + service.running_jobs
        assert service._table.running is not None or self.host.store.stats().bytes_reserved == 0
        assert sum(lane.closed is not False for lane in self.host.lanes.values()) <= len(self.host.lanes)

    @invariant()
    def leases_and_reservations_hold(self) -> None:
        if not hasattr(self, "host"):
            return
        stats = self.host.store.stats()
        assert stats.bytes_used + stats.bytes_reserved <= stats.max_bytes
        assert all(self.host.store.has(ref, fingerprint=FINGERPRINT) for refs in self.leases.values() for ref in refs)

    @invariant()
    def jobs_only_move_forward(self) -> None:
        if not hasattr(self, "host"):
            return
        views = self.host.service.jobs(self.host.now)
        now_seen = {(job.asker, job.job_id): job for job in views}
        assert len(now_seen) == len(views), "one view a job"
        assert sum(not job.state.final for job in views) == len(self.host.requests)
        for key, job in now_seen.items():
            before = self.seen.get(key)
            assert 0 <= job.tokens_reused <= job.tokens_done <= job.tokens_total or job.tokens_reused == 0
            if before is None or (before.state.final and not job.state.final):
                continue  # a new job, perhaps under an id that was used before
            if before.state.final:
                assert job == before, "a final state is final"
            else:
                assert job.tokens_done >= before.tokens_done, "progress never goes back"
                assert not (before.state is JobState.RUNNING and job.state is JobState.QUEUED)
        for key, before in self.seen.items():
            assert key in now_seen or before.state.final, "a job that has not ended is not forgotten"
        self.seen = now_seen

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.host.import_fails, self.host.prefill_fails_at = False, None
            self.host.drain()
            assert all(job.state.final for job in self.host.service.jobs(self.host.now))


TestWorkMachine = WorkMachine.TestCase
TestWorkMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
