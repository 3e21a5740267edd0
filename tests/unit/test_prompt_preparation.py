"""Prompt preparation, one situation at a time. (The storm of failures is in tests/property/test_prepare_machine.py.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from kakeya_zmq.backoff import NEWCOMERS_PAUSE_S, Trouble
from kakeya_zmq.blocks import Part, needed_parts
from kakeya_zmq.engine import ImportPrefix, Prefill, TokenArray
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import (
    NO_CONNECTION,
    NO_DATA,
    Ask,
    AskFailed,
    AskId,
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
    LaneId,
    PartsReceived,
    Refuse,
    RunCommand,
    SendUpdate,
    Tick,
    Ticket,
    WantedPart,
)
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.offload_seal import (
    NEWCOMER_PROVES_WITHIN_MAX_S,
    NEWCOMER_PROVES_WITHIN_S,
    PROVE_WITHIN_S,
    QUICK_S,
    UNANSWERED,
    newcomer_proves_within_s,
)
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_phases import TRANSITIONS, Phase
from kakeya_zmq.protocol.prepare_values import (
    Cancelled,
    IdAllocator,
    PreparationSettings,
    Ready,
    Unavailable,
    WorkerView,
)
from tests.unit.preparation_kit import (
    BLOCK,
    FINGERPRINT,
    FULL,
    GRANT,
    JOB_KEYS,
    OWN_KEY,
    STATEFUL,
    WINDOWED,
    FakeEngine,
    accepted,
    all_parts,
    binding_of,
    chain_of,
    key_of,
    new_store,
    preparation,
    tail_of,
    tokens_of,
)
from wire.codec import encode_client, pack_bitmap, unpack_hashes
from wire.errors import AuthenticationError, FailureCode, LocalProtocolError
from wire.ids import NodeId
from wire.job_seal import JobKeys
from wire.messages import (
    Credit,
    Cut,
    Done,
    Fetch,
    JobAccepted,
    JobProgress,
    JobResult,
    Lookup,
    LookupReply,
    PartKind,
    PartRef,
    PrefillPolicy,
    ProgressBody,
    ReleaseLease,
    ReplyBody,
    Request,
    Requirement,
    SourceKind,
    SubmitJob,
    Tail,
    TransferDone,
    TransferResult,
)

LEASE = b"L" * 16
Kind = TypeVar("Kind")


class Desk:
    """Drives one preparation by hand: keeps the effects, runs the engine, answers for peers."""

    def __init__(self, machine: PromptPreparation, engine: FakeEngine, now: float = 10.0) -> None:
        self.machine = machine
        self.engine = engine
        self.now = now
        self.log: list[Effect] = []
        self.done: set[Ticket] = set()
        self.proven: set[AskId] = set()
        self.take(machine.start(self.now))

    def take(self, effects: Sequence[Effect]) -> list[Effect]:
        self.log += effects
        return list(effects)

    def feed(self, event: HostEvent) -> list[Effect]:
        return self.take(self.machine.on(event, self.now))

    def tick(self) -> list[Effect]:
        due = self.machine.deadline()
        assert due is not None
        self.now = due
        return self.feed(Tick())

    def tick_until(self, condition: Callable[[], bool]) -> None:
        """Let its clocks run, with nothing else happening."""
        for _ in range(1000):
            if condition():
                return
            self.tick()
        raise AssertionError("it never happened")

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [effect for effect in self.log if isinstance(effect, kind)]

    def asks(self, body: type) -> list[Ask]:
        return [ask for ask in self.all(Ask) if isinstance(ask.body, body)]

    def count(self, name: str) -> int:
        return sum(effect.amount for effect in self.all(Count) if effect.name == name)

    def command(self) -> RunCommand:
        return self.all(RunCommand)[-1]

    def run_engine(self) -> None:
        """Let the commands that have not run, and those that follow from them, run to their ends."""
        while waiting := [run for run in self.all(RunCommand) if run.ticket not in self.done]:
            run = waiting[0]
            self.done.add(run.ticket)
            for event in self.engine.run(run.command):
                self.feed(CommandEvent(run.ticket, event))
            self.feed(CommandEnded(run.ticket, False, self.engine.position))

    def accept(self, ask: Ask, **fields: int) -> list[Effect]:
        """A worker takes the job, and proves that it may."""
        assert isinstance(ask.body, SubmitJob)
        self.proven.add(ask.ask)
        return self.feed(AskProgressed(ask.ask, accepted(ask.body, ask.node_id, **fields)))

    def grant(self, ask: AskId) -> ConnectReceiver:
        job = next((each for each in self.asks(SubmitJob) if each.ask == ask), None)
        if job is not None and ask not in self.proven:
            self.accept(job)
        (connect,) = [e for e in self.feed(AskProgressed(ask, GRANT)) if isinstance(e, ConnectReceiver)]
        return connect

    def deliver(self, lane: ConnectReceiver, parts: tuple[Part, ...]) -> list[Effect]:
        self.feed(PartsReceived(lane.lane, parts))
        return self.feed(LaneFinished(lane.lane, True, "", 1))

    def ready(self) -> Ready:
        assert isinstance(self.machine.outcome, Ready), self.machine.outcome
        assert self.engine.position == self.machine.outcome.position
        return self.machine.outcome


def slow_here() -> MeasuredRates:
    """A machine so slow that no other one is ever too slow."""
    rates = MeasuredRates()
    rates.local.assume(0.01)
    return rates


def desk(count: int, requirement: Requirement, live: int = 0, now: float = 10.0, **options: Any) -> Desk:
    history = tokens_of(count)
    return Desk(preparation(history, requirement, live=live, **options), FakeEngine(history, requirement, live), now)


def found(lookup: Ask, parts: Iterable[Part], tails: tuple[Tail, ...] = ()) -> AskReplied:
    assert isinstance(lookup.body, Lookup)
    held = {part.meta.ref for part in parts}
    hashes = unpack_hashes(lookup.body.block_hashes)
    full, window, state = (pack_bitmap([PartRef(block_hash=h, kind=kind) in held for h in hashes]) for kind in PartKind)
    reply = LookupReply(
        present=(full, window, state), tails=tails, part_bytes=(48, 48, 48), lease_id=LEASE, lease_ms=30_000, epoch=1
    )
    return AskReplied(lookup.ask, reply)


def own_tail(end: int, requirement: Requirement, count: int) -> Tail:
    """The tail at the end of the first ``end`` tokens of ``tokens_of(count)``."""
    block = chain_of(tokens_of(count)[:end]).blocks[-1]
    kinds = 1 | (2 if requirement.window_tokens else 0) | (4 if requirement.state else 0)
    return Tail(parent_hash=block.parent_hash, block_hash=block.block_hash, token_count=block.token_count, kinds=kinds)


def parts_of(count: int, end: int, requirement: Requirement = FULL) -> tuple[Part, ...]:
    return all_parts(tokens_of(count)[:end], requirement)


def pick(count: int, refs: Iterable[PartRef], requirement: Requirement = FULL) -> tuple[Part, ...]:
    by_ref = {part.meta.ref: part for part in parts_of(count, count - 1, requirement)}
    return tuple(by_ref[ref] for ref in refs)


def kinds(outcome: Ready) -> list[tuple[SourceKind, int, int]]:
    return [(source.kind, source.start, source.end) for source in outcome.explanation.sources]


def fetch_of(d: Desk, index: int = -1) -> tuple[Ask, Fetch]:
    ask = d.asks(Fetch)[index]
    assert isinstance(ask.body, Fetch)
    return ask, ask.body


def job_of(d: Desk) -> tuple[Ask, SubmitJob]:
    ask = d.asks(SubmitJob)[-1]
    assert isinstance(ask.body, SubmitJob)
    return ask, ask.body


# --- at home ---------------------------------------------------------------------------------------------------------


def test_a_single_token_needs_nothing() -> None:
    assert desk(1, FULL, caches=["a"]).ready().position == 0


@pytest.mark.parametrize("requirement", [FULL, WINDOWED, STATEFUL])
def test_a_full_hit_at_home_asks_nobody(requirement: Requirement) -> None:
    d = desk(71, requirement, store=new_store(parts_of(71, 70, requirement)), caches=["a"], workers=["w"])
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.HOT, 0, 70)]
    assert d.all(Ask) == []
    assert (d.count("local_hits"), d.count("tokens_reused"), d.count("tokens_computed")) == (1, 70, 0)


def test_a_hit_at_home_counts_as_use() -> None:
    mine, others = parts_of(71, 70), all_parts(tokens_of(70, seed=1), FULL)
    store = new_store([*mine, *others], max_bytes=10 * 48)
    desk(71, FULL, store=store).run_engine()
    store.put(all_parts(tokens_of(16, seed=2), FULL)[0], fingerprint=FINGERPRINT, now=20.0)
    assert all(store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in mine)
    assert not all(store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in others)


def test_a_cold_prompt_is_computed_kept_and_offered_for_publishing() -> None:
    store = new_store()
    d = desk(71, WINDOWED, store=store)
    d.run_engine()
    outcome = d.ready()
    assert kinds(outcome) == [(SourceKind.COMPUTED, 0, 70)]
    assert {part.meta.ref for part in outcome.new_parts} == {part.meta.ref for part in parts_of(71, 70, WINDOWED)}
    assert all(store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in outcome.new_parts)
    assert d.count("misses") == 1
    first = "own cache ends at token 0: diverged or never stored at token 0"
    assert outcome.explanation.reasons == (first, "no worker is known")


def test_the_sessions_own_kv_wins_over_a_shorter_hit() -> None:
    d = desk(71, FULL, live=50, store=new_store(parts_of(71, 48)))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.LIVE, 0, 50), (SourceKind.COMPUTED, 50, 70)]
    assert len(d.all(RunCommand)) == 1, "no import"
    assert d.count("misses") == 0


def test_a_deeper_hit_wins_over_the_sessions_own_kv() -> None:
    d = desk(71, FULL, live=20, store=new_store(parts_of(71, 48)))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.HOT, 0, 48), (SourceKind.COMPUTED, 48, 70)]


def test_a_tail_of_another_prompt_in_the_own_store_is_used() -> None:
    d = desk(71, FULL, store=new_store(parts_of(71, 59)))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.HOT, 0, 59), (SourceKind.COMPUTED, 59, 70)]


def test_without_store_and_publishing_nothing_is_captured() -> None:
    d = desk(71, FULL, store=None, publish=False)
    d.run_engine()
    command = d.command().command
    assert isinstance(command, Prefill)
    assert not command.capture
    assert d.ready().new_parts == ()


def test_a_store_without_room_costs_nothing_but_later_hits() -> None:
    d = desk(71, FULL, store=new_store(max_bytes=50))
    d.run_engine()
    assert len(d.ready().new_parts) == 5
    assert d.count("hot_store_failures") > 0


def test_the_import_limit_is_about_what_comes_from_elsewhere() -> None:
    limits = PreparationSettings(remote_minimum_tokens=8, max_import_bytes=100)
    d = desk(71, FULL, store=new_store(parts_of(71, 70)), settings=limits)
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.HOT, 0, 70)]
    d = desk(71, FULL, store=new_store(parts_of(71, 16)), caches=["a"], settings=limits)
    d.feed(found(d.asks(Lookup)[0], parts_of(71, 70)))
    ask, fetch = fetch_of(d)
    d.deliver(d.grant(ask.ask), pick(71, fetch.parts))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.HOT, 0, 16), (SourceKind.REMOTE_CACHE, 16, 48), (SourceKind.COMPUTED, 48, 70)]
    assert "only the first 48 tokens fit into the import limit" in d.ready().explanation.reasons


def test_a_refused_import_drops_the_parts_and_computes_everything() -> None:
    store = new_store(parts_of(71, 70))
    d = desk(71, FULL, live=20, store=store)
    d.engine.import_fails = True
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 70)]
    assert (d.count("import_failures"), d.count("fallbacks"), d.count("tokens_computed")) == (1, 1, 70)
    assert any("bad parts" in reason for reason in d.ready().explanation.reasons)
    assert store.stats().entry_count == 5, "fresh parts replaced the bad ones"


def test_a_failing_engine_is_reported_with_the_position_it_reached() -> None:
    d = desk(71, FULL)
    d.engine.prefill_fails_at = 32
    d.run_engine()
    outcome = d.machine.outcome
    assert isinstance(outcome, Unavailable)
    assert (outcome.position, outcome.reason) == (32, "out of memory")
    assert len(outcome.new_parts) == 2


# --- caches ----------------------------------------------------------------------------------------------------------


def test_a_remote_hit_is_fetched_promoted_imported_and_explained() -> None:
    store = new_store(parts_of(71, 32))
    d = desk(71, FULL, store=store, caches=["a", "b"])
    first, second = d.asks(Lookup)
    assert (first.node_id, second.node_id) == ("a", "b")
    d.feed(found(first, parts_of(71, 70), (own_tail(70, FULL, 71),)))
    assert d.all(CancelAsk) == [], "nobody waits for b, but what it answers may be of use"
    ask, fetch = fetch_of(d)
    assert fetch.lease_id == LEASE
    assert len(fetch.parts) == 3, "two blocks are at home"
    lane = d.grant(ask.ask)
    assert lane.wanted == fetch.parts
    d.feed(PartsReceived(lane.lane, pick(71, lane.wanted)))
    assert d.feed(CreditEarned(lane.lane, 144)) == [SendUpdate(ask.ask, Credit(credit_bytes=144))]
    d.now += 0.5
    assert SendUpdate(ask.ask, TransferDone(complete=True)) in d.feed(LaneFinished(lane.lane, True, "", 144))
    assert [release.body for release in d.asks(ReleaseLease)] == [ReleaseLease(lease_id=LEASE)]
    d.feed(AskReplied(ask.ask, TransferResult(sent_parts=3, sent_bytes=144)))
    d.run_engine()
    outcome = d.ready()
    assert d.all(CancelAsk) == [CancelAsk(second.ask)], "now nothing of it is"
    assert kinds(outcome) == [(SourceKind.HOT, 0, 32), (SourceKind.REMOTE_CACHE, 32, 70)]
    source = outcome.explanation.sources[1]
    assert (source.node_id, source.transfer_bytes, source.elapsed_ms) == ("a", 144, 500.0)
    assert (d.count("remote_hits"), d.count("hot_promotions"), d.count("bytes_received")) == (1, 3, 144)
    assert store.has(lane.wanted[-1], fingerprint=FINGERPRINT)
    assert outcome.new_parts == (), "what a cache already has is not published"


@pytest.mark.parametrize("late", ["in the fetch", "after it"])
def test_a_late_answer_to_a_lookup_is_the_other_holder_or_its_lease_is_given_back(late: str) -> None:
    d = desk(65, FULL, caches=["a", "b"], workers=["w"])
    first, second = d.asks(Lookup)
    d.feed(found(first, parts_of(65, 64)))
    ask, fetch = fetch_of(d)
    if late == "in the fetch":
        d.feed(found(second, parts_of(65, 64)))
        d.feed(AskFailed(ask.ask, FailureCode.UNAVAILABLE, "gone"))
        other, again = fetch_of(d)
        assert (other.node_id, set(again.parts)) == ("b", set(fetch.parts))
        d.deliver(d.grant(other.ask), pick(65, again.parts))
        d.run_engine()
        assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 64)]
    else:
        d.feed(AskFailed(ask.ask, FailureCode.UNAVAILABLE, "gone"))
        job, _ = job_of(d)
        given_back = len(d.asks(ReleaseLease))
        d.feed(found(second, parts_of(65, 64)))
        assert [release.node_id for release in d.asks(ReleaseLease)[given_back:]] == ["b"]
        d.feed(AskFailed(job.ask, FailureCode.UNAVAILABLE, "gone"))
        d.run_engine()
        assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64)]


def test_the_result_of_a_fetch_is_not_awaited_but_its_ask_is_closed() -> None:
    d = desk(33, FULL, caches=["a"])
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    ask, fetch = fetch_of(d)
    d.deliver(d.grant(ask.ask), pick(33, fetch.parts))
    d.run_engine()
    assert d.ready().position == 32
    assert d.all(CancelAsk) == [CancelAsk(ask.ask)]


def test_missing_parts_come_from_several_peers() -> None:
    d = desk(65, FULL, caches=["a", "b"])
    first, second = d.asks(Lookup)
    parts = parts_of(65, 64)
    d.feed(found(first, parts[:2]))
    d.feed(found(second, parts[1:]))
    assert [part.meta.ref for part in parts] == [*fetch_of(d, 0)[1].parts, *fetch_of(d, 1)[1].parts]


def test_failover_asks_the_other_peer_for_the_rest_only() -> None:
    d = desk(65, FULL, caches=["a", "b"])
    first, second = d.asks(Lookup)
    parts = parts_of(65, 64)
    d.feed(found(second, parts[:3]))
    d.feed(found(first, parts))
    ask, _ = fetch_of(d)
    lane = d.grant(ask.ask)
    d.feed(PartsReceived(lane.lane, parts[:2]))
    d.feed(LaneFinished(lane.lane, False, "reset", 96))
    assert CancelAsk(ask.ask) in d.log
    rest, fetch = fetch_of(d)
    assert (rest.node_id, fetch.parts) == ("b", (parts[2].meta.ref,)), "b reaches token 48; two blocks have arrived"
    d.deliver(d.grant(rest.ask), (parts[2],))
    d.run_engine()
    stretches = [(source.node_id, source.start, source.end) for source in d.ready().explanation.sources]
    assert stretches == [("a", 0, 32), ("b", 32, 48), ("", 48, 64)]
    assert "cache a broke off a transfer: reset" in d.ready().explanation.reasons
    assert (d.count("fetch_failures"), d.count("fallbacks")) == (1, 1)


@pytest.mark.parametrize("code", [FailureCode.NOT_FOUND, FailureCode.FAILED_PRECONDITION])
def test_a_peer_that_lost_what_it_announced_is_asked_for_the_rest(code: FailureCode) -> None:
    d = desk(65, FULL, caches=["a", "b"])
    first, second = d.asks(Lookup)
    parts = parts_of(65, 64)
    d.feed(found(first, [parts[0], parts[3]]))
    d.feed(found(second, parts[:3]))
    (of_a, at_a), (of_b, at_b) = fetch_of(d, 0), fetch_of(d, 1)
    assert (of_a.node_id, at_a.parts) == ("a", (parts[0].meta.ref, parts[3].meta.ref))
    d.feed(AskFailed(of_a.ask, code, "gone"))
    again, fetch = fetch_of(d)
    assert (again.node_id, fetch.parts) != ("a", at_a.parts), "not asked for the same again"
    d.deliver(d.grant(of_b.ask), pick(65, at_b.parts))
    again, fetch = fetch_of(d)
    assert (again.node_id, fetch.parts) == ("b", (parts[0].meta.ref,)), "b has the first block too"
    d.deliver(d.grant(again.ask), pick(65, fetch.parts))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 48), (SourceKind.COMPUTED, 48, 64)]
    assert "cache a no longer held 2 parts it had announced" in d.ready().explanation.reasons


def test_nothing_is_fetched_from_a_peer_that_gave_no_lease() -> None:
    d = desk(65, FULL, caches=["a"])
    (lookup,) = d.asks(Lookup)
    reply = found(lookup, parts_of(65, 64))
    assert isinstance(reply.body, LookupReply)
    d.feed(AskReplied(lookup.ask, msgspec.structs.replace(reply.body, lease_id=bytes(16), lease_ms=0)))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64)]
    assert d.asks(Fetch) == []


def test_the_lanes_of_a_prompt_share_the_import_limit() -> None:
    settings = PreparationSettings(remote_minimum_tokens=8, max_import_bytes=220)
    d = desk(65, FULL, caches=["a", "b"], settings=settings)
    first, second = d.asks(Lookup)
    parts = parts_of(65, 64)
    d.feed(found(first, parts[:2]))
    d.feed(found(second, parts[2:]))
    lanes = [d.grant(fetch_of(d, index)[0].ask) for index in (0, 1)]
    assert [lane.budget_bytes for lane in lanes] == [96, 96], "what their parts have, not the whole limit each"
    wanted = lanes[0].expected[1]
    meta = parts[1].meta
    assert wanted == WantedPart(meta.ref, parts[0].meta.block_hash, 16, 16, 48, 48)
    assert wanted.admits(meta)
    for wrong in ({"length_bytes": 49}, {"start": 32}, {"token_count": 15}, {"parent_hash": bytes(32)}):
        assert not wanted.admits(msgspec.structs.replace(meta, **wrong))


@pytest.mark.parametrize("case", ["no grant", "no data", "stage", "left"])
def test_a_holder_that_sends_nothing_costs_one_prompt_its_wait_not_all_of_them(case: str) -> None:
    rates = MeasuredRates() if case == "left" else slow_here()
    d = desk(65, FULL, caches=["a"], rates=rates)
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 64)))
    ask, _ = fetch_of(d)
    if case != "no grant":
        lane = d.grant(ask.ask).lane
        if case == "no data":
            d.feed(LaneFinished(lane, False, NO_DATA, 0))
    d.tick_until(lambda: any(isinstance(run.command, Prefill) for run in d.all(RunCommand)))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64)]
    second = desk(65, FULL, now=d.now, caches=["a", "b"], rates=rates)
    assert [each.node_id for each in second.asks(Lookup)] == ["b"]
    second.feed(found(second.asks(Lookup)[0], ()))
    second.run_engine()
    assert any("left alone for 10 s more: nothing came of a fetch" in each for each in second.ready().explanation.reasons)
    again = desk(65, FULL, now=d.now + 11.0, caches=["a"], rates=rates)
    again.feed(found(again.asks(Lookup)[0], parts_of(65, 64)))
    again.deliver(again.grant(fetch_of(again)[0].ask), parts_of(65, 64))
    again.run_engine()
    assert kinds(again.ready()) == [(SourceKind.REMOTE_CACHE, 0, 64)]
    assert rates.backoff.left_alone(NodeId("a"), again.now, Trouble.FETCH) == ""


def test_what_a_worker_sends_is_passed_on_and_must_be_what_it_says() -> None:
    asker = desk(65, FULL, workers=["w"], rates=slow_here())
    assert asker.grant(job_of(asker)[0].ask).verify_digests
    asker = desk(65, FULL, caches=["a"], rates=slow_here())
    asker.feed(found(asker.asks(Lookup)[0], parts_of(65, 64)))
    assert not asker.grant(fetch_of(asker)[0].ask).verify_digests, "hashing would take longer than the fetch"


@pytest.mark.parametrize("holders", [1, 2])
def test_an_import_that_is_refused_names_who_sent_it_and_who_sent_all_of_it_is_left_alone(holders: int) -> None:
    rates = slow_here()
    d = desk(65, FULL, caches=["a", "b"][:holders], rates=rates)
    d.engine.import_fails = True
    held = (parts_of(65, 64),) if holders == 1 else (parts_of(65, 64)[2:], parts_of(65, 32))
    for lookup, part in zip(d.asks(Lookup), held, strict=True):
        d.feed(found(lookup, part))
    for ask in d.asks(Fetch):
        assert isinstance(ask.body, Fetch)
        d.deliver(d.grant(ask.ask), pick(65, ask.body.parts))
    d.run_engine()
    assert kinds(d.ready())[0] == (SourceKind.COMPUTED, 0, 64)
    (said,) = [reason for reason in d.ready().explanation.reasons if reason.startswith("import of what ")]
    assert all(f"cache {name}" in said for name in ["a", "b"][:holders])
    alone = [bool(rates.backoff.left_alone(NodeId(name), d.now, Trouble.FETCH)) for name in ("a", "b")]
    assert alone == ([True, False] if holders == 1 else [False, False]), "of several it is not known whose it was"


def test_a_bulk_port_that_nobody_reaches_costs_one_prompt_its_wait_not_all_of_them() -> None:
    rates = slow_here()
    d = desk(65, FULL, caches=["a"], workers=["w"], rates=rates)
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 64)))
    d.feed(LaneFinished(d.grant(fetch_of(d)[0].ask).lane, False, NO_CONNECTION, 0))
    d.feed(LaneFinished(d.grant(job_of(d)[0].ask).lane, False, NO_CONNECTION, 0))
    d.run_engine()
    for name in ("cache a", "worker w"):
        text = f"{name} sent no data from its bulk port: is it open? (see --bulk-ports)"
        assert text in d.ready().explanation.reasons
    second = desk(65, FULL, caches=["a", "b"], workers=["w"], rates=rates)
    assert [ask.node_id for ask in second.asks(Lookup)] == ["b"]
    second.feed(found(second.asks(Lookup)[0], ()))
    second.run_engine()
    assert second.asks(SubmitJob) == []
    assert any("cache a is left alone for 10 s more" in reason for reason in second.ready().explanation.reasons)
    assert any("worker w is left alone for 10 s more" in reason for reason in second.ready().explanation.reasons)
    required = desk(65, FULL, caches=["a"], workers=["w"], rates=rates, policy=PrefillPolicy.REMOTE_REQUIRED)
    (lookup,) = required.asks(Lookup)
    required.feed(found(lookup, parts_of(65, 64)))
    required.deliver(required.grant(fetch_of(required)[0].ask), parts_of(65, 64))
    required.run_engine()
    third = desk(65, FULL, caches=["a"], rates=rates)
    assert [ask.node_id for ask in third.asks(Lookup)] == ["a"], "who must be asked worked, so it is asked again by all"


def test_a_worker_that_cannot_store_our_kv_is_left_alone_for_a_while() -> None:
    rates = slow_here()
    d = desk(65, FULL, workers=["w"], rates=rates)
    d.feed(AskFailed(job_of(d)[0].ask, FailureCode.DATA_LOSS, "no"))
    d.run_engine()
    assert "worker w cannot store the KV of this model or prompt with its codec" in d.ready().explanation.reasons
    second = desk(65, FULL, workers=["w"], rates=rates)
    second.run_engine()
    assert second.asks(SubmitJob) == []


def cut_at(end: int, longer: TokenArray, requirement: Requirement) -> tuple[Cut, tuple[Part, ...]]:
    """The cut at the first ``end`` tokens of a longer prompt, and all parts of that one up to the cut's block."""
    tail, block = tail_of(longer, end), tail_of(longer, -(-end // BLOCK) * BLOCK)
    cut = Cut(
        parent_hash=tail.parent_hash,
        block_hash=tail.block_hash,
        token_count=tail.token_count,
        within=block.block_hash,
        within_tokens=BLOCK,
        kinds=3 if requirement.window_tokens else 1,
    )
    return cut, all_parts(longer[: block.end], requirement)


@pytest.mark.parametrize("grid", [0, 32])
@pytest.mark.parametrize("requirement", [FULL, WINDOWED])
def test_a_repeat_hits_fully_although_its_tail_has_become_a_cut(requirement: Requirement, grid: int) -> None:
    history = np.concatenate([tokens_of(71), tokens_of(30, seed=5)])  # the prompt, and its answer
    cut, parts = cut_at(70, history, requirement)
    settings = PreparationSettings(remote_minimum_tokens=8, import_grid_tokens=grid)
    store = new_store(parts)
    assert store.cut(cut, fingerprint=FINGERPRINT)
    home = desk(71, requirement, store=store, settings=settings)
    home.run_engine()
    assert kinds(home.ready()) == [(SourceKind.HOT, 0, 70)]

    d = desk(71, requirement, caches=["a"], settings=settings)
    lookup = d.asks(Lookup)[0]
    reply = found(lookup, parts).body
    assert isinstance(reply, LookupReply)
    d.feed(AskReplied(lookup.ask, msgspec.structs.replace(reply, cuts=(cut,))))
    ask, fetch = fetch_of(d)
    lane = d.grant(ask.ask)
    assert {wanted.token_count for wanted in lane.expected} == {BLOCK}, "the whole block comes"
    by_ref = {part.meta.ref: part for part in parts}
    d.deliver(lane, tuple(by_ref[ref] for ref in fetch.parts))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 70)]


def test_a_cut_of_other_tokens_and_a_cut_of_state_are_not_used() -> None:
    cut, parts = cut_at(70, tokens_of(101, seed=9), FULL)
    d = desk(71, FULL, caches=["a"])
    lookup = d.asks(Lookup)[0]
    reply = found(lookup, ()).body
    assert isinstance(reply, LookupReply)
    d.feed(AskReplied(lookup.ask, msgspec.structs.replace(reply, cuts=(cut,))))
    assert d.asks(Fetch) == []
    cut, parts = cut_at(70, np.concatenate([tokens_of(71), tokens_of(30, seed=5)]), STATEFUL)
    store = new_store(parts)
    assert store.cut(cut, fingerprint=FINGERPRINT)
    stateful = desk(71, STATEFUL, store=store)
    stateful.run_engine()
    assert kinds(stateful.ready()) == [(SourceKind.HOT, 0, 64), (SourceKind.COMPUTED, 64, 70)]


def test_a_silent_peer_is_given_up_at_the_lookup_timeout() -> None:
    d = desk(65, FULL, caches=["a", "b"], rates=slow_here())
    first, second = d.asks(Lookup)
    d.feed(found(first, parts_of(65, 32)))
    assert d.asks(Fetch) == []
    d.tick()
    assert d.now == 12.0
    assert d.all(CancelAsk) == [CancelAsk(second.ask)]
    assert fetch_of(d)[0].node_id == "a"


def test_a_peer_that_grants_nothing_is_given_up() -> None:
    d = desk(33, FULL, caches=["a"], rates=slow_here())
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    ask, _ = fetch_of(d)
    d.tick_until(lambda: bool(d.all(CancelAsk)))
    assert d.now == 15.0, "the idle timeout"
    assert CancelAsk(ask.ask) in d.log
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 32)]


def test_a_fetch_that_drags_on_ends_with_its_stage_and_keeps_what_arrived() -> None:
    d = desk(33, FULL, caches=["a"], rates=slow_here())
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    lane = d.grant(fetch_of(d)[0].ask)
    d.feed(PartsReceived(lane.lane, pick(33, lane.wanted[:1])))
    d.tick_until(lambda: bool(d.all(CloseLane)))
    assert d.now == 40.0
    assert [close.lane for close in d.all(CloseLane)] == [lane.lane]
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 16), (SourceKind.COMPUTED, 16, 32)]


@pytest.mark.parametrize("requirement", [FULL, WINDOWED, STATEFUL])
def test_a_peers_shorter_tail_is_used_when_its_hash_is_of_our_own_tokens(requirement: Requirement) -> None:
    d = desk(71, requirement, caches=["a"])
    held = parts_of(71, 59, requirement)
    tail = own_tail(59, requirement, 71)
    forged = Tail(parent_hash=tail.parent_hash, block_hash=bytes(32), token_count=14, kinds=7)
    d.feed(found(d.asks(Lookup)[0], held, (forged, tail)))
    ask, fetch = fetch_of(d)
    by_ref = {part.meta.ref: part for part in held}
    d.deliver(d.grant(ask.ask), tuple(by_ref[ref] for ref in fetch.parts))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 59), (SourceKind.COMPUTED, 59, 70)]


def test_an_import_that_costs_more_than_it_saves_is_left_with_the_numbers() -> None:
    rates = MeasuredRates()
    rates.observe_local(1_000_000, 1000.0)
    d = desk(33, FULL, caches=["a"], rates=rates)
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    assert d.asks(Fetch) == []
    assert len(d.asks(ReleaseLease)) == 1
    d.run_engine()
    assert any("does not pay" in reason for reason in d.ready().explanation.reasons)


MALFORMED = LookupReply(present=(b"\xff" * 9, b"", b""), tails=(), part_bytes=(1, 1, 1), lease_id=LEASE, lease_ms=1, epoch=1)


@pytest.mark.parametrize("body", [Done(), MALFORMED, None], ids=["another reply", "a bitmap of another length", "failure"])
def test_a_peer_that_answers_badly_is_a_counted_miss(body: ReplyBody | None) -> None:
    d = desk(33, FULL, caches=["a"])
    ask = d.asks(Lookup)[0].ask
    d.feed(AskReplied(ask, body) if body is not None else AskFailed(ask, FailureCode.UNAVAILABLE, "gone"))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 32)]
    assert d.count("fallbacks") == 1


def test_a_part_that_does_not_fit_the_prompt_is_refused() -> None:
    d = desk(33, FULL, caches=["a"])
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    d.deliver(d.grant(fetch_of(d)[0].ask), all_parts(tokens_of(32, seed=5), FULL))
    assert d.count("parts_refused") == 2
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 32)]


def test_few_tokens_are_computed_without_asking() -> None:
    d = desk(71, FULL, live=64, caches=["a"], workers=["w"])
    assert d.all(Ask) == []
    d.run_engine()
    assert d.ready().explanation.reasons == ("6 tokens are too few to ask the fleet",)


def test_local_only_asks_nobody() -> None:
    d = desk(71, FULL, caches=["a"], workers=["w"], policy=PrefillPolicy.LOCAL_ONLY)
    d.run_engine()
    assert d.all(Ask) == []
    assert d.ready().position == 70


# --- workers ---------------------------------------------------------------------------------------------------------


def test_a_worker_computes_the_rest_and_its_parts_are_imported_and_published() -> None:
    values: dict[str, object] = {}
    rates = MeasuredRates()
    d = desk(71, WINDOWED, store=new_store(parts_of(71, 32, WINDOWED)), workers=["w"], values=values, rates=rates)
    ask, body = job_of(d)
    assert body.have_tokens == 32
    assert JOB_KEYS.open(binding_of(body, "w"), body.prompt) == tokens_of(71).tobytes()
    d.accept(ask)
    lane = d.grant(ask.ask)
    chain = chain_of(tokens_of(71)[:-1])
    starts = {block.block_hash: block.start for block in chain.blocks}
    assert lane.wanted == tuple(ref for ref in needed_parts(chain, 70, WINDOWED) if starts[ref.block_hash] >= 32)
    d.feed(AskProgressed(ask.ask, JobProgress(tokens_done=48, tokens_total=70, tokens_reused=0)))
    assert (d.machine.progress.tokens_done, d.machine.progress.source) == (48, SourceKind.WORKER)
    assert (values["remote_job_tokens_computed"], values["remote_job_tokens_total"]) == (48, 70)
    effects = d.deliver(lane, pick(71, lane.wanted, WINDOWED))
    assert SendUpdate(ask.ask, TransferDone(complete=True)) in effects
    d.feed(AskReplied(ask.ask, JobResult(tokens_computed=38, tokens_reused=0, compute_ms=380, sent_bytes=300)))
    assert rates.workers[NodeId("w")].measured == 100.0
    d.run_engine()
    outcome = d.ready()
    assert kinds(outcome) == [(SourceKind.HOT, 0, 32), (SourceKind.WORKER, 32, 70)]
    assert {part.meta.ref for part in outcome.new_parts} == set(lane.wanted)
    assert (d.count("remote_jobs"), d.count("remote_job_failures"), d.count("tokens_computed")) == (1, 0, 0)


def test_the_second_worker_is_asked_for_less_after_the_first_one_died() -> None:
    d = desk(65, FULL, workers=["v", "w"])
    first, _ = job_of(d)
    lane = d.grant(first.ask)
    d.feed(PartsReceived(lane.lane, pick(65, lane.wanted[:2])))
    effects = d.feed(AskFailed(first.ask, FailureCode.UNAVAILABLE, "gone"))
    assert any(isinstance(effect, CloseLane) and effect.lane == lane.lane for effect in effects)
    second, body = job_of(d)
    assert (second.node_id, body.have_tokens) == ("w", 32)
    d.feed(AskFailed(second.ask, FailureCode.RESOURCE_EXHAUSTED, "the job queue is full\n(128 jobs)"))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.WORKER, 0, 32), (SourceKind.COMPUTED, 32, 64)]
    assert d.count("remote_job_failures") == 2
    reasons = d.ready().explanation.reasons
    assert "worker v job failed (unavailable)" in reasons
    assert "worker w job failed (resource exhausted): the job queue is full\\n(128 jobs)" in reasons


def test_the_second_worker_goes_on_from_a_checkpoint_where_a_hit_needs_a_window() -> None:
    d = desk(700, WINDOWED, workers=["v", "w"])
    first, body = job_of(d)
    assert body.checkpoint_tokens == 256
    lane = d.grant(first.ask)
    target = needed_parts(chain_of(tokens_of(699)), 699, WINDOWED)
    assert [part.ref for part in lane.expected if not part.optional] == list(target)
    chain = chain_of(tokens_of(700)[:-1])
    checkpoint = needed_parts(chain, 256, WINDOWED)
    assert set(checkpoint) <= set(lane.wanted)
    d.feed(PartsReceived(lane.lane, pick(700, [*checkpoint, lane.wanted[len(checkpoint)]], WINDOWED)))
    d.feed(AskFailed(first.ask, FailureCode.UNAVAILABLE, "gone"))
    second, body = job_of(d)
    assert (second.node_id, body.have_tokens) == ("w", 256)
    d.feed(AskFailed(second.ask, FailureCode.RESOURCE_EXHAUSTED, "full"))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.WORKER, 0, 256), (SourceKind.COMPUTED, 256, 699)]


@pytest.mark.parametrize(
    ("requirement", "settings"),
    [(FULL, PreparationSettings()), (WINDOWED, PreparationSettings(max_import_bytes=3 * (699 + 60)))],
)
def test_no_checkpoints_where_none_are_needed_or_there_is_no_room(
    requirement: Requirement, settings: PreparationSettings
) -> None:
    d = desk(700, requirement, workers=["v"], settings=settings, policy=PrefillPolicy.REMOTE_REQUIRED)
    ask, body = job_of(d)
    assert body.checkpoint_tokens == 0
    assert not any(part.optional for part in d.grant(ask.ask).expected)


def test_a_stalled_worker_is_given_up() -> None:
    d = desk(65, FULL, workers=["v"], rates=slow_here())
    ask, _ = job_of(d)
    d.accept(ask)
    d.now += 20.0
    d.feed(AskProgressed(ask.ask, JobProgress(tokens_done=1, tokens_total=64, tokens_reused=0)))
    d.tick_until(lambda: bool(d.all(CancelAsk)))
    assert d.now == pytest.approx(10.0 + 20.0 + 30.0 + 2 * 256 / 1000.0)
    assert CancelAsk(ask.ask) in d.log
    assert d.count("remote_job_failures") == 1
    d.run_engine()
    assert "worker v stalled" in d.ready().explanation.reasons


def test_all_workers_together_end_with_the_stage() -> None:
    d = desk(65, FULL, workers=["v"], rates=slow_here())
    d.accept(job_of(d)[0])
    while isinstance(d.machine.deadline(), float):
        ask, _ = job_of(d)
        d.now = min(d.now + 20.0, 130.0)
        d.feed(AskProgressed(ask.ask, JobProgress(tokens_done=1, tokens_total=64, tokens_reused=0)))
    assert d.now == 130.0
    d.run_engine()
    assert "worker v did not finish in time" in d.ready().explanation.reasons


def test_a_worker_that_is_slower_than_home_is_not_asked() -> None:
    rates = MeasuredRates()
    rates.observe_local(5000, 1000.0)
    d = desk(65, FULL, workers=["v"], rates=rates)
    assert d.all(Ask) == []
    d.run_engine()
    assert any("worker v" in reason and "does not pay" in reason for reason in d.ready().explanation.reasons)


def unproven(d: Desk, event: HostEvent, rates: MeasuredRates) -> None:
    """What a worker without the tenant's key has said is not used, is written down, and ends its part in this."""
    ask, _ = job_of(d)
    effects = d.feed(event)
    assert d.all(ConnectReceiver) == []
    assert [refused.node_id for refused in effects if isinstance(refused, Refuse)] == ["v"]
    assert d.count("remote_job_failures") == 1
    assert rates.workers.get(NodeId("v")) is None, "nothing is learnt of its speed"
    assert d.all(CancelAsk) == ([] if isinstance(event, AskFailed) else [CancelAsk(ask.ask)])
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64)]
    assert "worker v did not prove that it has this tenant's key" in d.ready().explanation.reasons
    again = desk(65, FULL, workers=["v"], rates=rates)
    assert again.asks(SubmitJob) == [], "it is left alone for a while"
    again.run_engine()
    assert any("left alone" in reason for reason in again.ready().explanation.reasons)


@pytest.mark.parametrize(
    "said",
    [
        GRANT,
        JobProgress(tokens_done=64, tokens_total=64, tokens_reused=0),
        JobAccepted(proof=bytes(32), queued_jobs=0, queued_tokens=0, eta_ms=0),
    ],
    ids=["a grant", "progress", "a wrong proof"],
)
def test_a_worker_that_cannot_prove_that_it_has_the_tenants_key_is_not_used(said: ProgressBody) -> None:
    rates = slow_here()
    d = desk(65, FULL, workers=["v"], rates=rates)
    unproven(d, AskProgressed(job_of(d)[0].ask, said), rates)


def test_a_worker_that_could_not_open_the_prompt_is_left_alone() -> None:
    rates = slow_here()
    d = desk(65, FULL, workers=["v"], rates=rates)
    unproven(d, AskFailed(job_of(d)[0].ask, FailureCode.UNAUTHENTICATED, "no"), rates)


def test_a_proof_of_another_worker_or_for_another_asker_or_job_is_none() -> None:
    for change in ("worker", "asker", "job", "prompt", "key"):
        rates = slow_here()
        d = desk(65, FULL, workers=["v"], rates=rates)
        ask, body = job_of(d)
        prompt = bytes([body.prompt[0] ^ 1]) + body.prompt[1:] if change == "prompt" else body.prompt
        body = msgspec.structs.replace(body, job_id=b"k" * 16) if change == "job" else body
        binding = binding_of(body, "w" if change == "worker" else "v", b"q" * 32 if change == "asker" else OWN_KEY)
        keys = JobKeys(b"u" * 32) if change == "key" else JOB_KEYS
        wrong = JobAccepted(proof=keys.proof(binding, prompt), queued_jobs=0, queued_tokens=0, eta_ms=0)
        unproven(d, AskProgressed(ask.ask, wrong), rates)


def test_a_worker_that_does_not_say_whether_it_takes_the_job_is_left_alone() -> None:
    rates = slow_here()
    d = desk(65, FULL, workers=["v"], rates=rates)
    d.tick_until(lambda: bool(d.all(CancelAsk)))
    assert d.now == 10.0 + NEWCOMER_PROVES_WITHIN_S
    d.run_engine()
    assert f"worker v {UNANSWERED}" in d.ready().explanation.reasons
    assert d.all(Refuse) == [], "a node that is too busy to answer has done nothing wrong"
    assert desk(65, FULL, workers=["v"], rates=rates).asks(SubmitJob) == []


def test_who_has_proven_itself_before_is_waited_for_longer_and_taken_among_likes() -> None:
    rates = slow_here()
    rates.backoff.proved(key_of("w"))
    assert [ask.node_id for ask in desk(65, FULL, workers=["v", "w"], rates=rates).asks(SubmitJob)] == ["w"]
    d = desk(65, FULL, workers=["w"], rates=rates)
    d.tick_until(lambda: bool(d.all(CancelAsk)))
    assert d.now == 10.0 + PROVE_WITHIN_S


@pytest.mark.parametrize("code", [None, FailureCode.RESOURCE_EXHAUSTED, FailureCode.UNAVAILABLE, FailureCode.INTERNAL])
def test_a_prompt_waits_for_one_newcomer_and_the_next_ones_for_none(code: FailureCode | None) -> None:
    """It says nothing, or says late that it cannot; then neither it nor others of its kind are tried for a while."""
    rates, names = slow_here(), [f"n{number}" for number in range(5)]

    def asked_at(now: float) -> list[str]:
        d = desk(65, FULL, workers=names, rates=rates, now=now)
        while not d.all(RunCommand):
            if code is None:
                d.tick()
            else:
                d.now += 2 * QUICK_S
                d.feed(AskFailed(job_of(d)[0].ask, code, "no"))
        assert d.now <= now + NEWCOMER_PROVES_WITHIN_S
        return [str(ask.node_id) for ask in d.asks(SubmitJob)]

    assert asked_at(10.0) == ["n0"]
    assert asked_at(12.0) == []
    assert asked_at(12.0 + NEWCOMERS_PAUSE_S) in (["n0"], ["n1"]), "one, now and then"
    rates.backoff.proved(key_of("n3"))
    assert [ask.node_id for ask in desk(65, FULL, workers=names, rates=rates, now=23.0).asks(SubmitJob)] == ["n3"]


def test_quick_refusals_of_newcomers_are_bounded_together_and_the_way_there_counts() -> None:
    rates = slow_here()
    d = desk(65, FULL, workers=[f"n{number}" for number in range(20)], rates=rates)
    while not d.all(RunCommand):
        d.now += 0.9 * QUICK_S
        d.feed(AskFailed(job_of(d)[0].ask, FailureCode.RESOURCE_EXHAUSTED, "no"))
    assert 1 < len(d.asks(SubmitJob)) <= 1 + NEWCOMER_PROVES_WITHIN_S / (0.9 * QUICK_S)
    far = WorkerView(NodeId("far"), key_of("far"), round_trip_ms=400.0)
    assert newcomer_proves_within_s(far) > 4 * 0.4
    assert newcomer_proves_within_s(replace(far, round_trip_ms=1e6)) == NEWCOMER_PROVES_WITHIN_MAX_S


def test_where_remote_is_required_silent_newcomers_are_tried_last_and_then_with_patience() -> None:
    rates = slow_here()
    d = desk(65, FULL, workers=["v", "w"], rates=rates, policy=PrefillPolicy.REMOTE_REQUIRED)
    d.tick_until(lambda: len(d.asks(SubmitJob)) == 3)
    assert [str(ask.node_id) for ask in d.asks(SubmitJob)] == ["v", "w", "v"]
    assert d.now == 10.0 + NEWCOMER_PROVES_WITHIN_S + PROVE_WITHIN_S, "the last one that is left is waited for"
    d.deliver(d.grant(d.asks(SubmitJob)[-1].ask), pick(65, d.all(ConnectReceiver)[0].wanted))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.WORKER, 0, 64)]
    again = desk(65, FULL, workers=["v", "w"], rates=rates, policy=PrefillPolicy.REMOTE_REQUIRED)
    assert [str(ask.node_id) for ask in again.asks(SubmitJob)] == ["v"], "it has worked"


def test_another_worker_gets_the_job_sealed_anew() -> None:
    d = desk(65, FULL, workers=["v", "w"], rates=slow_here())
    first, sealed_for_v = job_of(d)
    d.feed(AskProgressed(first.ask, GRANT))
    second, sealed_for_w = job_of(d)
    assert (first.node_id, second.node_id) == ("v", "w")
    with pytest.raises(AuthenticationError):
        JOB_KEYS.open(binding_of(sealed_for_w, "w"), sealed_for_v.prompt)
    d.deliver(d.grant(second.ask), pick(65, d.all(ConnectReceiver)[0].wanted))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.WORKER, 0, 64)]


def test_a_prompt_never_travels_in_clear() -> None:
    d = desk(65, FULL, workers=["v"])
    _, body = job_of(d)
    encoded = encode_client(Request(request_id=1, deadline_ms=1, body=body))
    tokens = tokens_of(65).tobytes()
    assert not any(tokens[start : start + 8] in encoded for start in range(0, len(tokens) - 8, 4))


# --- remote required -------------------------------------------------------------------------------------------------


def test_remote_required_refuses_with_the_reason_and_leaves_the_session_alone() -> None:
    store = new_store(parts_of(71, 48))
    d = desk(71, FULL, live=20, store=store, workers=["w"], policy=PrefillPolicy.REMOTE_REQUIRED)
    ask, body = job_of(d)
    assert body.have_tokens == 48
    d.feed(AskFailed(ask.ask, FailureCode.UNAVAILABLE, "gone"))
    outcome = d.machine.outcome
    assert isinstance(outcome, Unavailable)
    assert outcome.position == d.engine.position == 20
    assert "48 of 70 tokens" in outcome.reason
    assert "worker w job failed" in outcome.reason
    assert d.all(RunCommand) == []
    assert store.stats().leases == 0


def test_remote_required_without_a_fleet_says_so() -> None:
    outcome = desk(71, FULL, policy=PrefillPolicy.REMOTE_REQUIRED).machine.outcome
    assert isinstance(outcome, Unavailable)
    assert outcome.reason.endswith("0 of 70 tokens: no worker is known; no cache is known")


def test_what_is_too_large_to_import_is_blamed_on_the_limit_not_on_the_workers() -> None:
    limits = PreparationSettings(max_import_bytes=100)
    refused = desk(71, FULL, workers=["w"], settings=limits, policy=PrefillPolicy.REMOTE_REQUIRED)
    assert refused.asks(SubmitJob) == []
    assert isinstance(refused.machine.outcome, Unavailable)
    assert refused.machine.outcome.reason.endswith(": only the first 32 tokens fit into the import limit")
    computed = desk(71, FULL, settings=PreparationSettings(remote_minimum_tokens=8, max_import_bytes=100))
    computed.run_engine()
    assert not any("worker" in reason for reason in computed.ready().explanation.reasons)


def test_without_a_worker_the_trouble_with_the_caches_is_still_the_cause() -> None:
    d = desk(65, FULL, caches=["a"], policy=PrefillPolicy.REMOTE_REQUIRED)
    d.feed(AskFailed(d.asks(Lookup)[0].ask, FailureCode.UNAVAILABLE, "gone"))
    assert isinstance(d.machine.outcome, Unavailable)
    assert d.machine.outcome.reason.endswith(": cache a lookup failed (unavailable); no worker is known")


# --- the account -----------------------------------------------------------------------------------------------------


def test_bytes_that_came_in_vain_are_told() -> None:
    d = desk(65, STATEFUL, workers=["w"])
    ask, _ = job_of(d)
    lane = d.grant(ask.ask)
    came = [ref for ref in lane.wanted if ref.kind is not PartKind.STATE][:2]
    d.feed(PartsReceived(lane.lane, pick(65, came, STATEFUL)))
    d.feed(AskFailed(ask.ask, FailureCode.UNAVAILABLE, "gone"))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64), (SourceKind.WORKER, 64, 64)]
    explanation = d.ready().explanation
    assert sum(source.transfer_bytes for source in explanation.sources) == d.count("bytes_received") == 96
    assert "96 bytes arrived from worker w and were not used" in explanation.reasons


def test_a_block_is_named_after_the_node_that_sent_any_part_of_it() -> None:
    only_full = [part for part in parts_of(33, 32, WINDOWED) if part.meta.kind is PartKind.FULL]
    d = desk(33, WINDOWED, store=new_store(only_full), workers=["w"])
    ask, _ = job_of(d)
    lane = d.grant(ask.ask)
    d.deliver(lane, pick(33, lane.wanted, WINDOWED))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.WORKER, 0, 32)]
    assert sum(source.transfer_bytes for source in d.ready().explanation.sources) == d.count("bytes_received") > 0
    assert not any("not used" in reason for reason in d.ready().explanation.reasons)


def test_remote_required_ignores_costs_and_minimum() -> None:
    rates = MeasuredRates()
    rates.observe_local(1_000_000, 1000.0)
    d = desk(33, FULL, live=30, caches=["a"], policy=PrefillPolicy.REMOTE_REQUIRED, rates=rates)
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    assert len(d.asks(Fetch)) == 1


def test_remote_required_does_not_compute_after_a_refused_import() -> None:
    d = desk(33, FULL, live=10, store=new_store(parts_of(33, 32)), policy=PrefillPolicy.REMOTE_REQUIRED)
    d.engine.import_fails = True
    d.run_engine()
    outcome = d.machine.outcome
    assert isinstance(outcome, Unavailable)
    assert (outcome.position, outcome.reason) == (0, "bad parts")


# --- cancelling, and events that come at the wrong time --------------------------------------------------------------


def test_cancel_while_asking_leaves_nothing_open() -> None:
    store = new_store(parts_of(65, 16))
    d = desk(65, FULL, store=store, caches=["a", "b"])
    first, second = d.asks(Lookup)
    d.feed(found(first, parts_of(65, 32)))
    assert CancelAsk(second.ask) in d.take(d.machine.cancel(d.now))
    assert len(d.asks(ReleaseLease)) == 1
    assert d.machine.outcome == Cancelled(0, ())
    assert store.stats().leases == 0


def test_cancel_while_computing_waits_for_the_engine_and_keeps_its_work() -> None:
    d = desk(71, FULL)
    run = d.command()
    d.feed(CommandEvent(run.ticket, next(iter(d.engine.run(run.command)))))
    assert d.take(d.machine.cancel(d.now)) == [CancelCommand(run.ticket)]
    assert d.machine.cancel(d.now) == [], "once is enough"
    assert d.machine.outcome is None
    d.feed(CommandEnded(run.ticket, True, d.engine.position))
    outcome = d.machine.outcome
    assert isinstance(outcome, Cancelled)
    assert outcome.position == 32
    assert len(outcome.new_parts) == 2


def test_cancel_while_importing_waits_for_its_end_and_computes_nothing() -> None:
    d = desk(71, FULL, store=new_store(parts_of(71, 48)))
    assert isinstance(d.command().command, ImportPrefix)
    assert d.machine.cancel(d.now) == []
    d.run_engine()
    assert d.machine.outcome == Cancelled(48, ())
    assert len(d.all(RunCommand)) == 1


def behind_one_that_computes(policy: PrefillPolicy = PrefillPolicy.LOCAL_FALLBACK) -> tuple[Desk, Desk]:
    """One computes here; another one had the same prompt's job done by a worker, which failed after a block."""
    common: dict[str, Any] = {"store": new_store(), "flights": Flights(), "rates": slow_here()}
    common["ids"] = IdAllocator(itertools.count(1).__next__)
    first = desk(71, FULL, policy=PrefillPolicy.LOCAL_ONLY, **common)
    second = desk(71, FULL, policy=policy, workers=["w"], **common)
    assert (first.machine.phase, second.machine.phase) == (Phase.COMPUTE, Phase.OFFLOAD)
    ask, _ = job_of(second)
    lane = second.grant(ask.ask)
    second.feed(PartsReceived(lane.lane, pick(71, lane.wanted[:1])))
    second.feed(AskFailed(ask.ask, FailureCode.UNAVAILABLE, "gone"))
    return first, second


@pytest.mark.parametrize("policy", [PrefillPolicy.LOCAL_FALLBACK, PrefillPolicy.REMOTE_REQUIRED])
def test_what_no_worker_brought_is_not_computed_twice_at_the_same_time(policy: PrefillPolicy) -> None:
    first, second = behind_one_that_computes(policy)
    assert second.machine.phase is Phase.REJOIN
    assert not any(isinstance(run.command, Prefill) for run in second.all(RunCommand))
    first.run_engine()
    assert second.machine.has_news
    second.take(second.machine.look(second.now))
    second.run_engine()
    assert (second.ready().position, second.count("tokens_computed"), second.count("prefills_shared")) == (70, 0, 1)
    assert "tokens 16 to 70 were prepared for another session at the same time" in second.ready().explanation.reasons


def test_one_that_waited_after_all_goes_on_alone_when_the_other_is_cancelled() -> None:
    first, second = behind_one_that_computes()
    first.take(first.machine.cancel(first.now))
    first.feed(CommandEnded(first.command().ticket, True, 0))
    second.take(second.machine.look(second.now))
    second.run_engine()
    assert kinds(second.ready()) == [(SourceKind.WORKER, 0, 16), (SourceKind.COMPUTED, 16, 70)]


def at_phase(phase: Phase) -> Desk:
    match phase:
        case Phase.FOLLOW:
            flights, store = Flights(), new_store()
            desk(71, FULL, store=store, flights=flights)
            return desk(71, FULL, store=store, flights=flights)
        case Phase.GATHER:
            return desk(71, FULL, caches=["a"])
        case Phase.OFFLOAD:
            return desk(71, FULL, workers=["w"])
        case Phase.REJOIN:
            return behind_one_that_computes()[1]
        case Phase.IMPORT:
            return desk(71, FULL, store=new_store(parts_of(71, 48)))
        case Phase.COMPUTE:
            return desk(71, FULL)
        case _:
            return desk(1, FULL)


STRANGERS: tuple[HostEvent, ...] = (
    AskReplied(AskId(999), Done()),
    AskProgressed(AskId(999), GRANT),
    AskFailed(AskId(999), FailureCode.INTERNAL, "?"),
    PartsReceived(LaneId(999), ()),
    CreditEarned(LaneId(999), 1),
    LaneFinished(LaneId(999), True, "", 0),
    CommandEnded(Ticket(999), False, 3),
    Tick(),
)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.LOCAL])
@pytest.mark.parametrize("event", STRANGERS, ids=lambda event: type(event).__name__)
def test_events_of_nothing_that_is_open_change_nothing(phase: Phase, event: HostEvent) -> None:
    d = at_phase(phase)
    assert d.machine.phase is phase
    before = d.machine.position
    assert d.feed(event) == []
    assert (d.machine.phase, d.machine.position) == (phase, before)


def test_the_transition_table_names_every_phase_and_never_goes_back() -> None:
    order = list(Phase)
    assert set(TRANSITIONS) == set(order)
    assert all(order.index(after) > order.index(before) for before, afters in TRANSITIONS.items() for after in afters)


def test_a_machine_starts_once_and_its_task_must_make_sense() -> None:
    d = desk(71, FULL)
    with pytest.raises(LocalProtocolError):
        d.machine.start(d.now)
    with pytest.raises(LocalProtocolError):
        preparation(tokens_of(BLOCK), FULL, live=BLOCK)
    with pytest.raises(LocalProtocolError):
        PreparationSettings(lookup_timeout_s=0.0)


def test_why_a_worker_cannot_be_used_is_part_of_the_answer() -> None:
    hint = "worker w is not compatible: rope_hash differs"
    refused = desk(71, FULL, policy=PrefillPolicy.REMOTE_REQUIRED, hints=(hint,))
    assert isinstance(refused.machine.outcome, Unavailable)
    assert hint in refused.machine.outcome.reason
    computed = desk(71, FULL, hints=(hint,))
    computed.run_engine()
    assert hint in computed.ready().explanation.reasons


def test_a_damaged_part_of_the_own_store_is_dropped_and_computed_again() -> None:
    (first, *others) = parts_of(65, 64)
    payload = bytearray(first.payload)
    payload[7] ^= 1
    store = new_store((Part(first.meta, memoryview(bytes(payload))), *others))
    d = desk(65, FULL, store=store)
    d.run_engine()
    assert d.ready().position == 64
    assert not any(isinstance(command, ImportPrefix) for command in d.engine.commands)
    stored = store.get(first.meta.ref, fingerprint=FINGERPRINT)
    assert stored is not None
    assert stored.payload == first.payload, "the damaged part has made room for the right one"
