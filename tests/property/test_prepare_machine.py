"""Prompt preparation against a simulated fleet that lies, stalls, repeats itself and dies.

The invariants, whatever happens: it ends within its deadlines; the engine gets exactly the needed parts with the right bytes
(the fake engine asserts that); Ready means that the whole prefix is there; ``position`` is the engine's; remote-required
never computes; and nothing stays open.
"""

from __future__ import annotations

import heapq
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.blocks import Part
from kakeya_zmq.coverage import best_boundary
from kakeya_zmq.engine import AddParts, BeginImport, Command, Event, Prefill
from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskProgressed,
    AskReplied,
    CancelAsk,
    CancelCommand,
    CloseLane,
    CommandEnded,
    CommandEvent,
    ConnectReceiver,
    Count,
    CreditEarned,
    Effect,
    HostEvent,
    LaneFinished,
    PartsReceived,
    RunCommand,
    SendUpdate,
    Tick,
)
from kakeya_zmq.protocol.prepare_values import Cancelled, PreparationSettings, Ready, Unavailable
from tests.unit.preparation_kit import (
    BLOCK,
    FINGERPRINT,
    GRANT,
    JOB_KEYS,
    REQUIREMENTS,
    FakeEngine,
    accepted,
    all_parts,
    binding_of,
    chain_of,
    new_store,
    preparation,
    tokens_of,
)
from wire.codec import pack_bitmap, unpack_hashes
from wire.errors import FailureCode
from wire.messages import (
    Done,
    Fetch,
    JobProgress,
    JobResult,
    Lookup,
    LookupReply,
    PartKind,
    PartRef,
    PrefillPolicy,
    ReleaseLease,
    Requirement,
    SourceKind,
    SubmitJob,
    Tail,
    TransferResult,
)

LIMITS = PreparationSettings(
    lookup_timeout_s=2.0,
    fetch_timeout_s=10.0,
    fetch_idle_timeout_s=2.0,
    worker_timeout_s=20.0,
    worker_stall_timeout_s=5.0,
    remote_minimum_tokens=8,
    early_import_bytes=100,
)
ENGINE_SLACK_S = 10.0


class Fleet:
    """Peers, lanes and engine around one preparation, driven by one random generator and a virtual clock."""

    def __init__(self, rng: random.Random, requirement: Requirement, trouble: float) -> None:
        self.rng = rng
        self.trouble = trouble
        self.requirement = requirement
        count = rng.randint(1, 150)
        self.history = tokens_of(count, seed=rng.randint(0, 99))
        self.target = count - 1
        self.chain = chain_of(self.history[:-1])
        live = rng.choice([0, 0, rng.randint(0, self.target)])
        self.engine = FakeEngine(self.history, requirement, live)
        self.engine.import_fails = self._bad()
        self.engine.early_import_fails = self.engine.import_fails or self._bad()
        if rng.random() < trouble / 4:
            self.engine.prefill_fails_at = rng.randint(0, self.target)
        self.universe = self._universe()
        self.peers = {name: self._sample() for name in rng.sample(["a", "b", "c"], rng.randint(0, 3))}
        self.workers = rng.sample(["v", "w"], rng.randint(0, 2))
        self.store = new_store(self._sample(), max_bytes=rng.choice([1 << 20, 600])) if rng.random() < 0.8 else None
        self.policy = rng.choice(list(PrefillPolicy))
        self.machine = preparation(
            self.history,
            requirement,
            live=live,
            store=self.store,
            policy=self.policy,
            caches=self.peers,
            workers=self.workers,
            settings=LIMITS,
        )
        self.now = 100.0
        self.order = itertools.count()
        self.agenda: list[tuple[float, int, HostEvent]] = []
        self.asks: dict[int, Ask] = {}
        self.lanes: dict[int, ConnectReceiver] = {}
        self.lane_of: dict[int, int] = {}
        self.tickets: dict[int, RunCommand] = {}
        self.detached: set[int] = set()
        self.cancelled: set[int] = set()
        self.bytes_received = 0

    # --- the world -----------------------------------------------------------------------------------------------------

    def _bad(self) -> bool:
        return self.rng.random() < self.trouble

    def _universe(self) -> tuple[Part, ...]:
        """Parts of this prompt, and of prompts that end earlier in the same tokens (other tails)."""
        parts = {part.meta.ref: part for part in all_parts(self.history[:-1], self.requirement)}
        for _ in range(3):
            shorter = all_parts(self.history[: self.rng.randint(0, self.target)], self.requirement)
            parts.update({part.meta.ref: part for part in shorter})
        return tuple(sorted(parts.values(), key=lambda part: (part.meta.start, part.meta.token_count, part.meta.kind)))

    def _sample(self) -> list[Part]:
        density = self.rng.choice([0.0, 0.7, 0.97, 1.0])
        reach = self.rng.randint(0, self.target + BLOCK)
        return [part for part in self.universe if part.meta.end <= reach and self.rng.random() < density]

    def _later(self, delay_s: float, event: HostEvent) -> float:
        at = self.now + delay_s
        heapq.heappush(self.agenda, (at, next(self.order), event))
        if self.rng.random() < self.trouble / 2:
            heapq.heappush(self.agenda, (at + self.rng.random() * 3, next(self.order), event))
        return delay_s

    def _delay(self) -> float:
        return self.rng.choice([0.001, 0.01, 0.3]) if not self._bad() else self.rng.choice([1.0, 4.0, 30.0])

    # --- effects -------------------------------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(ask=ask, body=body):
                    assert self.policy is not PrefillPolicy.LOCAL_ONLY
                    assert effect.timeout_s > 0
                    if isinstance(body, ReleaseLease):
                        self.detached.add(ask)
                        self._later(0.01, AskReplied(ask, Done()))
                        continue
                    self.asks[ask] = effect
                    self._answer(effect)
                case CancelAsk(ask=ask):
                    assert self.asks.pop(ask, None) is not None, "only an open ask can be cancelled"
                case SendUpdate(ask=ask):
                    assert ask in self.asks, "updates go to open asks only"
                case ConnectReceiver(lane=lane):
                    assert len(set(effect.wanted)) == len(effect.wanted) > 0
                    self.lanes[lane] = effect
                    self._stream(effect)
                case CloseLane(lane=lane):
                    assert self.lanes.pop(lane, None) is not None, "only an open lane can be closed"
                    self._later(0.01, LaneFinished(lane, False, "closed", 0))
                case RunCommand(ticket=ticket, command=command):
                    others = [run.command for run in self.tickets.values()]
                    early = all(isinstance(other, BeginImport | AddParts) for other in others)
                    assert early, "one engine command at a time, steps of an early import aside"
                    self.tickets[ticket] = effect
                    for event in self._run(command):
                        self._later(0.01, CommandEvent(ticket, event))
                    self._later(0.02, CommandEnded(ticket, False, self.engine.position))
                case Count(name="bytes_received", amount=amount):
                    self.bytes_received += amount
                case CancelCommand(ticket=ticket):
                    assert ticket in self.tickets
                    self.cancelled.add(ticket)
                case _:
                    pass

    def _run(self, command: Command) -> list[Event]:
        if isinstance(command, Prefill):
            assert self.policy is not PrefillPolicy.REMOTE_REQUIRED
        return list(self.engine.run(command))

    def _answer(self, ask: Ask) -> None:
        delay = self._delay()
        if self._bad():
            code = self.rng.choice([None, FailureCode.UNAVAILABLE, FailureCode.DEADLINE_EXCEEDED])
            if code is not None:
                self._later(delay, AskFailed(ask.ask, code, "no"))
            return
        if self._bad():
            self._later(delay, AskReplied(ask.ask, Done()))
            return
        match ask.body:
            case Lookup() as lookup:
                self._later(delay, AskReplied(ask.ask, self._found(ask.node_id, lookup)))
            case Fetch() as fetch:
                assert len(fetch.parts) > 0
                self._later(delay, AskProgressed(ask.ask, GRANT))
            case SubmitJob() as job:
                assert JOB_KEYS.open(binding_of(job, ask.node_id), job.prompt) == self.history.tobytes()
                self._later(0.001, AskProgressed(ask.ask, accepted(job, ask.node_id, eta_ms=10)))
                self._later(delay, AskProgressed(ask.ask, GRANT))
                progress = JobProgress(tokens_done=self.target // 2, tokens_total=self.target, tokens_reused=0)
                self._later(delay + 0.1, AskProgressed(ask.ask, progress))
            case _:
                raise AssertionError("unexpected ask")

    def _found(self, name: str, lookup: Lookup) -> LookupReply:
        held = {part.meta.ref for part in self.peers[name]}
        hashes = unpack_hashes(lookup.block_hashes)
        rows = [[PartRef(block_hash=h, kind=kind) in held for h in hashes] for kind in PartKind]
        if self._bad():
            rows[0] = [True] * (len(hashes) + 9)  # a bitmap for another number of blocks
        tails: dict[bytes, Tail] = {}
        for part in self.peers[name]:
            if part.meta.token_count < BLOCK:
                before = tails[part.meta.block_hash].kinds if part.meta.block_hash in tails else 0
                tails[part.meta.block_hash] = Tail(
                    parent_hash=part.meta.parent_hash,
                    block_hash=part.meta.block_hash if not self._bad() else bytes(32),
                    token_count=part.meta.token_count,
                    kinds=before | 1 << part.meta.kind,
                )
        return LookupReply(
            present=(pack_bitmap(rows[0]), pack_bitmap(rows[1]), pack_bitmap(rows[2])),
            tails=tuple(tails.values()),
            part_bytes=(48, 48, 48),
            lease_id=b"L" * 16 if held else bytes(16),
            lease_ms=1000,
            epoch=1,
        )

    def _stream(self, lane: ConnectReceiver) -> None:
        ask = next(ask for ask in self.asks.values() if ask.node_id == lane.node_id)
        by_ref = {part.meta.ref: part for part in self.universe}
        sent = [by_ref[ref] for ref in lane.wanted if not (self.rng.random() < self.trouble / 4)]
        delay = 0.01
        while sent:
            group, sent = sent[:3], sent[3:]
            if self._bad() and self._bad():
                if self.rng.random() < 0.5:
                    self._later(delay, LaneFinished(lane.lane, False, "broken", 0))
                return  # else silence
            self._later(delay, PartsReceived(lane.lane, tuple(group)))
            self._later(delay, CreditEarned(lane.lane, 144))
            delay += 0.01
        self._later(delay, LaneFinished(lane.lane, True, "", 1000))
        result = JobResult(tokens_computed=self.target, tokens_reused=0, compute_ms=100, sent_bytes=1000)
        body = result if isinstance(ask.body, SubmitJob) else TransferResult(sent_parts=1, sent_bytes=1000)
        if not self._bad():
            self._later(delay + self.rng.choice([-0.005, 0.005, 1.0]), AskReplied(ask.ask, body))

    # --- the run ---------------------------------------------------------------------------------------------------------

    def deliver(self, event: HostEvent) -> None:
        match event:
            case AskReplied(ask=ask) | AskFailed(ask=ask):
                self.asks.pop(ask, None)
            case LaneFinished(lane=lane):
                self.lanes.pop(lane, None)
            case CommandEnded(ticket=ticket):
                self.tickets.pop(ticket, None)
            case _:
                pass
        self.perform(self.machine.on(event, self.now))

    def run(self, cancel_after: int | None) -> None:
        end = self.now + LIMITS.lookup_timeout_s + LIMITS.fetch_timeout_s + LIMITS.worker_timeout_s + ENGINE_SLACK_S
        self.perform(self.machine.start(self.now))
        for step in itertools.count():
            if self.machine.outcome is not None:
                return
            if step == cancel_after:
                self.perform(self.machine.cancel(self.now))
                continue
            due = self.machine.deadline()
            times = [at for at in (due, self.agenda[0][0] if self.agenda else None) if at is not None]
            assert times, "nothing is scheduled, and the machine waits for nothing: it hangs"
            self.now = max(self.now, min(times))
            assert self.now <= end, "it must end within its deadlines"
            assert step < 5000
            if self.agenda and self.agenda[0][0] <= self.now:
                self.deliver(heapq.heappop(self.agenda)[2])
            else:
                self.deliver(Tick())

    def check(self) -> None:
        machine, outcome = self.machine, self.machine.outcome
        assert not self.asks, "an ask was left open"
        assert not self.lanes, "a lane was left open"
        assert set(self.tickets) <= self.cancelled, "an engine command was left open"
        assert self.store is None or self.store.stats().leases == 0
        assert machine.deadline() is None
        assert outcome is not None
        assert outcome.position == machine.position == self.engine.position
        match outcome:
            case Ready(explanation=explanation):
                assert outcome.position == self.target
                at = 0
                for source in explanation.sources:
                    assert source.start == at
                    assert at < source.end or (at == self.target and source.transfer_bytes > 0)
                    at = source.end
                assert at == self.target
                assert sum(source.transfer_bytes for source in explanation.sources) == self.bytes_received
            case Unavailable(reason=reason, explanation=explanation):
                assert reason
                assert sum(source.transfer_bytes for source in explanation.sources) == self.bytes_received
                required = self.policy is PrefillPolicy.REMOTE_REQUIRED
                assert required or self.engine.prefill_fails_at is not None
            case Cancelled():
                pass
        by_ref = {part.meta.ref: part for part in all_parts(self.history[:-1], self.requirement)}
        for part in outcome.new_parts:
            assert part.payload == by_ref[part.meta.ref].payload
        # Late events must find nothing to do.
        while self.agenda:
            assert machine.on(heapq.heappop(self.agenda)[2], self.now) == []
        assert machine.cancel(self.now) == []


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requirement=st.sampled_from(REQUIREMENTS),
    trouble=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    cancel_after=st.none() | st.integers(0, 40),
)
def test_whatever_the_fleet_does_the_prompt_is_prepared_rightly_or_refused_with_a_reason(
    seed: int, requirement: Requirement, trouble: float, cancel_after: int | None
) -> None:
    fleet = Fleet(random.Random(seed), requirement, trouble)
    fleet.run(cancel_after)
    fleet.check()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), requirement=st.sampled_from(REQUIREMENTS))
def test_without_trouble_everything_the_fleet_holds_is_used(seed: int, requirement: Requirement) -> None:
    fleet = Fleet(random.Random(seed), requirement, trouble=0.0)
    known = {part.meta.ref for parts in fleet.peers.values() for part in parts}
    if fleet.store is not None:
        known |= set(filter(fleet.store.presence(FINGERPRINT), (part.meta.ref for part in fleet.universe)))
    boundary = best_boundary(fleet.chain, requirement, known.__contains__)
    fleet.run(cancel_after=None)
    fleet.check()
    outcome = fleet.machine.outcome
    if fleet.policy is PrefillPolicy.LOCAL_ONLY:
        return
    if boundary == fleet.target or fleet.workers:
        assert isinstance(outcome, Ready)
        computed = sum(s.end - s.start for s in outcome.explanation.sources if s.kind is SourceKind.COMPUTED)
        assert computed < LIMITS.remote_minimum_tokens, "only what is too little to ask for is computed here"
    elif isinstance(outcome, Ready):
        begin = [s.start for s in outcome.explanation.sources if s.kind is SourceKind.COMPUTED]
        assert max(begin, default=fleet.target) > boundary - LIMITS.remote_minimum_tokens
