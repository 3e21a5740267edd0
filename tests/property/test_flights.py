"""Prompts that begin alike, prepared at the same time, in any order of progress, failure, cancelling and silence.

Several preparations share one store and one table of flights; a simulated engine and a worker that may be slow, fail or fall
silent work for them on a virtual clock. Everybody ends, nobody waits in a circle, nobody gets wrong KV (the engine checks
every byte), and without trouble no token is computed twice.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.engine import Event, SegmentComputed
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskProgressed,
    CancelAsk,
    CancelCommand,
    CloseLane,
    CommandEnded,
    CommandEvent,
    ConnectReceiver,
    Count,
    Effect,
    HostEvent,
    LaneFinished,
    PartsReceived,
    RunCommand,
    Tick,
)
from kakeya_zmq.protocol.flights import Flight, Flights
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_phases import Phase
from kakeya_zmq.protocol.prepare_values import Cancelled, IdAllocator, PreparationSettings, Ready, Unavailable
from kakeya_zmq.store import BlockStore
from tests.unit.preparation_kit import (
    BLOCK,
    GRANT,
    REQUIREMENTS,
    STATEFUL,
    FakeEngine,
    accepted,
    all_parts,
    chain_of,
    new_store,
    preparation,
    tokens_of,
)
from wire.errors import FailureCode
from wire.messages import PrefillPolicy, Requirement, SourceKind, SubmitJob

LIMITS = PreparationSettings(
    worker_timeout_s=20.0,
    worker_stall_timeout_s=5.0,
    remote_minimum_tokens=8,
    early_import_bytes=100,
    segment_tokens=32,
)
END_S = 300.0


@dataclass(eq=False)
class Member:
    """One preparation and its engine session."""

    machine: PromptPreparation
    engine: FakeEngine
    starts_at: float
    cancels_at: float | None
    asks: dict[int, Ask] = field(default_factory=dict)
    lanes: dict[int, ConnectReceiver] = field(default_factory=dict)
    running: dict[int, Iterator[Event]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    started: bool = False


class Crowd:
    """Drives members on a virtual clock."""

    def __init__(
        self,
        rng: random.Random,
        requirement: Requirement,
        lengths: list[int],
        *,
        trouble: float = 0.0,
        workers: bool = False,
        store: BlockStore | None = None,
        apart_s: float = 0.0,
        policy: PrefillPolicy = PrefillPolicy.LOCAL_FALLBACK,
    ) -> None:
        self.rng, self.requirement, self.trouble = rng, requirement, trouble
        self.now = 0.0
        self.order = itertools.count()
        self.agenda: list[tuple[float, int, Member, HostEvent | int]] = []
        self.counts: dict[str, int] = {}
        self.store = store if store is not None else new_store()
        self.flights = Flights()
        self.rates = MeasuredRates()
        ids = IdAllocator(itertools.count(1).__next__)
        self.members: list[Member] = []
        for number, length in enumerate(lengths):
            history = tokens_of(200, seed=0)[:length]
            machine = preparation(
                history,
                requirement,
                store=self.store,
                flights=self.flights,
                ids=ids,
                rates=self.rates,
                settings=LIMITS,
                policy=policy,
                workers=["v", "w"] if workers else [],
            )
            engine = FakeEngine(history, requirement, 0)
            if rng.random() < trouble / 2:
                engine.prefill_fails_at = rng.randint(0, length)
            engine.import_fails = engine.early_import_fails = rng.random() < trouble / 2
            cancels_at = rng.uniform(0, 10) if rng.random() < trouble else None
            self.members.append(Member(machine, engine, number * apart_s, cancels_at))

    # --- the world ---------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, member: Member, event: HostEvent | int) -> None:
        heapq.heappush(self.agenda, (self.now + delay_s, next(self.order), member, event))

    def perform(self, member: Member, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(ask=ask, node_id=node_id, body=SubmitJob() as job):
                    member.asks[ask] = effect
                    if self.rng.random() < self.trouble:
                        if self.rng.random() < 0.5:
                            self.later(0.1, member, AskFailed(ask, FailureCode.UNAVAILABLE, "no"))
                    else:
                        self.later(0.01, member, AskProgressed(ask, accepted(job, node_id)))
                        self.later(0.05, member, AskProgressed(ask, GRANT))
                case ConnectReceiver(lane=lane):
                    member.lanes[lane] = effect
                    self.stream(member, effect)
                case CancelAsk(ask=ask):
                    del member.asks[ask]
                case CloseLane(lane=lane):
                    del member.lanes[lane]
                case RunCommand(ticket=ticket, command=command):
                    member.running[ticket] = iter(member.engine.run(command))
                    self.later(0.0 if len(member.running) == 1 else 0.01, member, int(ticket))
                case CancelCommand(ticket=ticket):
                    member.cancelled.add(ticket)
                case Count(name=name, amount=amount):
                    self.counts[name] = self.counts.get(name, 0) + amount
                case _:
                    pass

    def stream(self, member: Member, lane: ConnectReceiver) -> None:
        by_ref = {part.meta.ref: part for part in all_parts(member.engine.history[:-1], self.requirement)}
        delay = self.rng.choice([0.01, 0.2]) if self.trouble else 0.01
        for number, ref in enumerate(lane.wanted):
            if self.rng.random() < self.trouble / 4:
                if self.rng.random() < 0.5:
                    self.later(delay * number, member, LaneFinished(lane.lane, False, "broken", 0))
                return
            self.later(delay * (number + 1), member, PartsReceived(lane.lane, (by_ref[ref],)))
        self.later(delay * (len(lane.wanted) + 1), member, LaneFinished(lane.lane, True, "", 1))

    def engine_step(self, member: Member, ticket: int) -> None:
        """One step of a command; the machine hears of it."""
        name = next(key for key in member.running if key == ticket)
        event = None if name in member.cancelled else next(member.running[name], None)
        if event is not None:
            step_s = self.rng.choice([0.1, 1.6])
            self.later(step_s, member, ticket)
            if isinstance(event, SegmentComputed):
                event = replace(event, elapsed_ms=step_s * 1000)
            self.feed(member, CommandEvent(name, event))  # type: ignore[arg-type]
            return
        del member.running[name]
        ended = CommandEnded(name, name in member.cancelled, member.engine.position)  # type: ignore[arg-type]
        self.feed(member, ended)

    def feed(self, member: Member, event: HostEvent) -> None:
        match event:
            case AskFailed(ask=ask):
                if member.asks.pop(ask, None) is None:
                    return
            case AskProgressed(ask=ask) if ask not in member.asks:
                return
            case PartsReceived(lane=lane) if lane not in member.lanes:
                return
            case LaneFinished(lane=lane):
                if member.lanes.pop(lane, None) is None:
                    return
            case _:
                pass
        self.perform(member, member.machine.on(event, self.now))
        self.pass_on()

    def pass_on(self) -> None:
        """As the session table does."""
        while follower := next((m for m in self.members if m.started and m.machine.has_news), None):
            self.perform(follower, follower.machine.look(self.now))
        self.check_nobody_waits_in_a_circle()

    def check_nobody_waits_in_a_circle(self) -> None:
        for flight in self.flights._flights:
            if flight.leader is not None:
                assert flight.forecast is None, "one that brings something waits"
                assert flight.leader.leader is None, "one waits for another that waits"

    # --- the run -----------------------------------------------------------------------------------------------------

    def due(self, member: Member) -> float | None:
        if not member.started:
            return member.starts_at
        times = [member.machine.deadline(), member.cancels_at]
        return min((at for at in times if at is not None), default=None)

    def run(self) -> None:
        for _ in range(20_000):
            active = [m for m in self.members if m.machine.outcome is None]
            if not active:
                return
            due = {m: at for m in active if (at := self.due(m)) is not None}
            first = min(due, key=lambda m: due[m], default=None)
            upcoming = self.agenda[0][0] if self.agenda else None
            assert first is not None or upcoming is not None, "somebody waits for nothing: a deadlock"
            if first is not None and (upcoming is None or due[first] <= upcoming):
                self.now = max(self.now, due[first])
                self.wake(first)
            else:
                at, _, member, event = heapq.heappop(self.agenda)
                self.now = max(self.now, at)
                if isinstance(event, int):
                    self.engine_step(member, event)
                else:
                    self.feed(member, event)
            assert self.now < END_S, "it takes too long"
        raise AssertionError("it never ends")

    def wake(self, member: Member) -> None:
        if not member.started:
            member.started = True
            self.perform(member, member.machine.start(self.now))
        elif member.cancels_at is not None and member.cancels_at <= self.now:
            member.cancels_at = None
            self.perform(member, member.machine.cancel(self.now))
        else:
            self.perform(member, member.machine.on(Tick(), self.now))
        self.pass_on()

    def check(self) -> None:
        assert len(self.flights) == 0
        assert self.store.stats().leases == 0
        for member in self.members:
            outcome = member.machine.outcome
            assert outcome is not None
            assert outcome.position == member.engine.position
            assert not member.asks
            assert not member.lanes
            match outcome:
                case Ready():
                    assert outcome.position == len(member.engine.history) - 1
                case Unavailable():
                    assert member.engine.prefill_fails_at is not None or self.trouble > 0
                case Cancelled():
                    pass


LENGTHS = st.lists(st.integers(2, 200), min_size=1, max_size=6)


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requirement=st.sampled_from(REQUIREMENTS),
    lengths=LENGTHS,
    trouble=st.sampled_from([0.0, 0.1, 0.4]),
    workers=st.booleans(),
    room=st.sampled_from([1 << 20, 1 << 20, 600, 60]),
    apart_s=st.sampled_from([0.0, 0.3, 2.0]),
    policy=st.sampled_from(list(PrefillPolicy)),
)
def test_whatever_happens_to_the_others_everybody_ends_with_the_right_kv(
    seed: int,
    requirement: Requirement,
    lengths: list[int],
    trouble: float,
    workers: bool,
    room: int,
    apart_s: float,
    policy: PrefillPolicy,
) -> None:
    rng = random.Random(seed)
    crowd = Crowd(
        rng,
        requirement,
        lengths,
        trouble=trouble,
        workers=workers,
        store=new_store(max_bytes=room),
        apart_s=apart_s,
        policy=policy,
    )
    crowd.run()
    if policy is not PrefillPolicy.REMOTE_REQUIRED:
        crowd.check()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), requirement=st.sampled_from(REQUIREMENTS), lengths=LENGTHS)
def test_without_trouble_equal_beginnings_are_computed_once(seed: int, requirement: Requirement, lengths: list[int]) -> None:
    crowd = Crowd(random.Random(seed), requirement, lengths)
    crowd.run()
    crowd.check()
    computed = crowd.counts.get("tokens_computed", 0)
    # Recurrent state exists at the ends of segments only, so a shorter or longer prompt begins at the last one.
    spare = LIMITS.segment_tokens if requirement.state else BLOCK
    assert computed <= max(lengths) - 1 + spare * (len(lengths) - 1)


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_equal_prompts_share_one_computation_and_one_job(requirement: Requirement) -> None:
    for workers in (False, True):
        crowd = Crowd(random.Random(1), requirement, [150] * 4, workers=workers)
        crowd.run()
        crowd.check()
        assert crowd.counts.get("remote_jobs", 0) == int(workers)
        assert crowd.counts.get("tokens_computed", 0) == (0 if workers else 149)
        assert crowd.counts["prefills_shared"] == 3
        assert sum(len(m.machine.new_parts) for m in crowd.members) == len(crowd.members[0].machine.new_parts)


def test_a_follower_takes_over_with_what_has_arrived_when_its_leader_is_cancelled() -> None:
    crowd = Crowd(random.Random(3), REQUIREMENTS[0], [193, 193, 193])
    leader, second, third = crowd.members
    for member in crowd.members:
        crowd.wake(member)
    assert [m.machine.phase for m in crowd.members] == [Phase.COMPUTE, Phase.FOLLOW, Phase.FOLLOW]
    seen = []
    while leader.engine.position < 96:
        _, _, member, event = heapq.heappop(crowd.agenda)
        assert isinstance(event, int)
        crowd.engine_step(member, event)
        crowd.pass_on()
        seen.append(second.machine.progress.tokens_done)
    assert sorted(seen) == seen, "who waits sees what the other one has brought"
    assert seen[-1] >= 64
    assert second.machine.progress.source is SourceKind.HOT
    crowd.perform(leader, leader.machine.cancel(crowd.now))
    crowd.pass_on()
    crowd.run()
    crowd.check()
    assert isinstance(leader.machine.outcome, Cancelled)
    assert isinstance(second.machine.outcome, Ready)
    assert isinstance(third.machine.outcome, Ready)
    assert crowd.counts["tokens_computed"] <= 192 + 32, "what was computed before was not computed again"


def test_a_full_hit_waits_for_nobody() -> None:
    crowd = Crowd(random.Random(3), REQUIREMENTS[0], [193])
    crowd.run()
    again = Crowd(random.Random(3), REQUIREMENTS[0], [200, 193], store=crowd.store)
    for member in again.members:
        again.wake(member)
    assert again.members[1].machine.phase is Phase.IMPORT


def test_without_a_store_or_room_nothing_is_shared() -> None:
    crowd = Crowd(random.Random(3), REQUIREMENTS[0], [193, 193], store=new_store(max_bytes=60))
    crowd.run()
    crowd.check()
    assert "prefills_shared" not in crowd.counts
    assert crowd.counts["tokens_computed"] == 2 * 192


def test_recurrent_state_is_promised_where_segments_end() -> None:
    crowd = Crowd(random.Random(3), STATEFUL, [150, 100])
    crowd.run()
    crowd.check()
    assert crowd.counts["prefills_shared"] == 1
    assert crowd.counts["tokens_computed"] == 149 + 99 - 96


def test_a_leader_that_falls_silent_is_left() -> None:
    crowd = Crowd(random.Random(3), REQUIREMENTS[0], [193, 193], workers=True, trouble=0.0)
    crowd.rates.local.assume(100.0)
    leader, follower = crowd.members
    crowd.wake(leader)
    crowd.wake(follower)
    assert follower.machine.phase is Phase.FOLLOW
    assert isinstance(crowd.flights, Flights)
    leader.machine.deadline = lambda: None  # type: ignore[method-assign]  # a leader that is stuck, against its own rules
    crowd.agenda.clear()
    while follower.machine.outcome is None:
        due = follower.machine.deadline()
        if due is not None and (not crowd.agenda or due <= crowd.agenda[0][0]):
            crowd.now = due
            crowd.wake(follower)
        else:
            at, _, member, event = heapq.heappop(crowd.agenda)
            crowd.now = at
            if isinstance(event, int):
                crowd.engine_step(member, event)
            else:
                crowd.feed(member, event)
        assert crowd.now < 30.0
    assert crowd.counts["prefill_waits_abandoned"] == 1


def test_the_table_forgets_who_has_left() -> None:
    flights = Flights()
    flight = flights.board(chain_of(tokens_of(40)))
    assert isinstance(flight, Flight)
    flights.leave(flight)
    flights.leave(flight)
    assert len(flights) == 0
