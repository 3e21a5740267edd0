"""Slow peers and workers are left when something else would have won, no lookup is awaited in vain, decisions are told."""

from __future__ import annotations

import itertools

import pytest

from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskProgressed,
    CancelAsk,
    CloseLane,
    PartsReceived,
    RunCommand,
    Tick,
)
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.prepare_phases import Phase
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationSettings, Unavailable
from tests.unit.preparation_kit import FULL, WINDOWED, all_parts, new_store, tokens_of
from tests.unit.test_prompt_preparation import Desk, desk, fetch_of, found, job_of, kinds, parts_of, pick
from wire.errors import FailureCode
from wire.messages import (
    Decision,
    Fetch,
    JobProgress,
    Lookup,
    PrefillPolicy,
    SourceKind,
    SubmitJob,
    Tail,
)


def here(tokens_per_second: float) -> MeasuredRates:
    rates = MeasuredRates()
    rates.local.assume(tokens_per_second)
    return rates


def decisions(d: Desk, what: str) -> list[Decision]:
    outcome = d.machine.outcome
    assert outcome is not None
    return [one for one in outcome.explanation.decisions if one.what == what]  # type: ignore[union-attr]


def advance(d: Desk, seconds: float) -> None:
    """Let time pass, with every clock of the machine running."""
    end = d.now + seconds
    while (due := d.machine.deadline()) is not None and due <= end:
        d.now = max(d.now, due)
        d.feed(Tick())
    d.now = end


# --- fetches ---------------------------------------------------------------------------------------------------------


def test_a_cache_that_trickles_is_left_for_computing_here_and_what_came_is_used() -> None:
    # 64 tokens take 3.2 s here; the cache brings a block of 16 every four seconds.
    d = desk(65, FULL, caches=["a"], rates=here(20.0))
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 64)))
    lane = d.grant(fetch_of(d)[0].ask)
    advance(d, 4.0)
    d.feed(PartsReceived(lane.lane, pick(65, lane.wanted[:1])))
    # The rest is projected to take 12 s, against 2.4 s here.
    advance(d, 1.0)
    assert [close.lane for close in d.all(CloseLane)] == [lane.lane]
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 16), (SourceKind.COMPUTED, 16, 64)]
    assert (d.count("hedges"), d.count("fallbacks"), d.count("fetch_failures")) == (1, 1, 0)
    (left,) = decisions(d, "switch")
    assert left.chosen == "compute here"
    assert left.costs_ms["compute here"] == pytest.approx(2400.0)
    assert left.costs_ms["stay with cache a"] > 3000.0
    assert any(reason.startswith("cache a was too slow: ") for reason in d.ready().explanation.reasons)


def test_a_silent_cache_is_left_when_computing_would_have_won() -> None:
    d = desk(65, FULL, caches=["a"], rates=here(20.0))
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 64)))
    d.grant(fetch_of(d)[0].ask)
    advance(d, 3.2)
    assert d.all(CloseLane) == []
    advance(d, 1.5)
    assert len(d.all(CloseLane)) == 1
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64)]


def test_a_cache_that_gets_on_is_kept() -> None:
    d = desk(65, FULL, caches=["a"], rates=here(20.0))
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 64)))
    lane = d.grant(fetch_of(d)[0].ask)
    for ref in lane.wanted[:3]:
        advance(d, 0.6)
        d.feed(PartsReceived(lane.lane, pick(65, [ref])))
    advance(d, 0.6)
    assert d.all(CloseLane) == []
    d.deliver(lane, pick(65, lane.wanted[3:]))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 64)]
    assert d.count("hedges") == 0


def test_another_cache_is_taken_before_computing_here() -> None:
    d = desk(65, FULL, caches=["a", "b"], rates=here(5.0))
    first, second = d.asks(Lookup)
    d.feed(found(second, parts_of(65, 48)))
    d.feed(found(first, parts_of(65, 64)))
    lane = d.grant(fetch_of(d)[0].ask)
    advance(d, 1.0)
    d.feed(PartsReceived(lane.lane, pick(65, lane.wanted[:1])))
    advance(d, 5.0)
    rest, fetch = fetch_of(d)
    assert rest.node_id == "b"
    assert len(fetch.parts) == 2, "blocks 2 and 3 of four; the first one has come, the last one only a had"
    assert d.count("hedges") == 1


def test_remote_required_never_leaves_a_cache_for_this_machine() -> None:
    d = desk(65, FULL, caches=["a"], rates=here(1e6), policy=PrefillPolicy.REMOTE_REQUIRED)
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 64)))
    d.grant(fetch_of(d)[0].ask)
    advance(d, 29.0)
    assert d.all(CloseLane) == []


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_a_slow_worker_is_left_for_the_next_one_which_is_asked_for_less() -> None:
    d = desk(193, FULL, workers=["v", "w"], rates=here(20.0))
    first, _ = job_of(d)
    lane = d.grant(first.ask)
    d.feed(PartsReceived(lane.lane, pick(193, lane.wanted[:2])))
    d.feed(AskProgressed(first.ask, JobProgress(tokens_done=32, tokens_total=192, tokens_reused=0)))
    advance(d, 1.9)  # the next one is given a second to prove itself
    second, body = job_of(d)
    assert (second.node_id, body.have_tokens) == ("w", 32)
    assert CancelAsk(first.ask) in d.log
    assert (d.count("hedges"), d.count("remote_job_failures"), d.count("remote_jobs")) == (1, 0, 2)


def test_the_last_worker_is_left_for_this_machine() -> None:
    d = desk(65, WINDOWED, workers=["v"], rates=here(20.0))
    ask, _ = job_of(d)
    d.grant(ask.ask)
    advance(d, 4.5)
    assert CancelAsk(ask.ask) in d.log
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 64)]
    (left,) = decisions(d, "switch")
    assert left.text.startswith("left worker v: ")


def test_a_queue_that_the_worker_announced_is_waited_for() -> None:
    d = desk(65, FULL, workers=["v"], rates=here(10.0))
    ask, _ = job_of(d)
    d.accept(ask, queued_jobs=1, queued_tokens=60, eta_ms=7000)
    advance(d, 6.5)
    assert d.all(CancelAsk) == []


def test_under_remote_required_a_slow_worker_is_left_for_another_one_only() -> None:
    d = desk(65, FULL, workers=["v", "w"], rates=here(1e6), policy=PrefillPolicy.REMOTE_REQUIRED)
    advance(d, 3.0)
    assert [ask.node_id for ask in d.asks(SubmitJob)] == ["v", "w"]
    d.accept(d.asks(SubmitJob)[-1])
    advance(d, 20.0)
    assert len(d.asks(SubmitJob)) == 2, "there is no third one, and nothing is computed here"
    assert d.machine.outcome is None


def test_a_worker_left_as_slow_is_asked_again_when_the_one_it_was_left_for_fails() -> None:
    d = desk(65, FULL, workers=["v", "w"], rates=here(1e6), policy=PrefillPolicy.REMOTE_REQUIRED)
    advance(d, 3.0)
    second = d.asks(SubmitJob)[-1]
    assert second.node_id == "w"
    d.feed(AskFailed(second.ask, FailureCode.UNAVAILABLE, "gone"))
    again = d.asks(SubmitJob)[-1]
    assert [ask.node_id for ask in d.asks(SubmitJob)] == ["v", "w", "v"]
    d.feed(AskFailed(again.ask, FailureCode.UNAVAILABLE, "gone"))
    assert len(d.asks(SubmitJob)) == 3, "once more, not for ever"
    assert isinstance(d.machine.outcome, Unavailable)
    assert d.machine.outcome.reason.endswith("worker v job failed (unavailable)")


def test_a_worker_that_failed_is_not_asked_again() -> None:
    d = desk(65, FULL, workers=["v", "w"], rates=here(1e6), policy=PrefillPolicy.REMOTE_REQUIRED)
    for ask in (d.asks(SubmitJob)[0], None):
        d.feed(AskFailed((ask or d.asks(SubmitJob)[-1]).ask, FailureCode.UNAVAILABLE, "gone"))
    assert [ask.node_id for ask in d.asks(SubmitJob)] == ["v", "w"]
    assert isinstance(d.machine.outcome, Unavailable)


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_another_that_asks_caches_although_a_worker_is_quicker_than_this_machine() -> None:
    store, flights, rates = new_store(), Flights(), here(5.0)
    ids = IdAllocator(itertools.count(1).__next__)
    desks = [
        desk(193, FULL, store=store, flights=flights, rates=rates, ids=ids, caches=["a"], workers=["w"]) for _ in range(3)
    ]
    leader, *others = desks
    assert leader.machine.phase is Phase.GATHER
    assert [d.machine.phase for d in others] == [Phase.FOLLOW, Phase.FOLLOW]
    leader.feed(found(leader.asks(Lookup)[0], ()))
    ask, _ = job_of(leader)
    lane = leader.grant(ask.ask)
    leader.deliver(lane, pick(193, lane.wanted))
    leader.run_engine()
    for d in others:
        d.take(d.machine.look(d.now))
        d.run_engine()
        assert kinds(d.ready()) == [(SourceKind.HOT, 0, 192)]
    assert sum(d.count("remote_jobs") for d in desks) == 1


# --- lookups ---------------------------------------------------------------------------------------------------------


def test_a_lookup_is_awaited_no_longer_than_it_could_save() -> None:
    # Computing everything takes 0.32 s: nobody waits two seconds for a cache.
    d = desk(33, FULL, caches=["a", "b"], rates=here(100.0))
    first, second = d.asks(Lookup)
    d.feed(found(first, ()))
    advance(d, 0.31)
    assert d.all(RunCommand) == []
    advance(d, 0.02)
    assert len(d.all(RunCommand)) == 1
    d.run_engine()
    assert d.all(CancelAsk) == [CancelAsk(second.ask)]
    assert kinds(d.ready()) == [(SourceKind.COMPUTED, 0, 32)]
    assert any("b had not answered" in reason for reason in d.ready().explanation.reasons)


def test_the_better_the_known_answer_the_shorter_the_wait() -> None:
    d = desk(65, FULL, caches=["a", "b"], rates=here(100.0))
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 48)))
    advance(d, 0.2)
    assert len(d.asks(Fetch)) == 1, "what b could add saves 160 ms"


def test_remote_required_waits_for_every_answer() -> None:
    d = desk(33, FULL, caches=["a", "b"], rates=here(1e6), policy=PrefillPolicy.REMOTE_REQUIRED)
    d.feed(found(d.asks(Lookup)[0], ()))
    advance(d, 1.9)
    assert d.all(CancelAsk) == []


# --- what is told ----------------------------------------------------------------------------------------------------


def test_the_decision_between_cache_worker_and_home_is_told_with_its_numbers() -> None:
    d = desk(193, FULL, caches=["a"], workers=["w"], rates=here(100.0))
    d.feed(found(d.asks(Lookup)[0], parts_of(193, 192)))
    ask, fetch = fetch_of(d)
    d.deliver(d.grant(ask.ask), pick(193, fetch.parts))
    d.run_engine()
    (decision,) = decisions(d, "prefix")
    assert decision.chosen == "import from a"
    assert decision.costs_ms.keys() == {"import from a", "worker w", "compute here"}
    assert decision.costs_ms["compute here"] == pytest.approx(1920.0)
    # 192 tokens at 1,000 a second, one segment, and 576 bytes at 125 MB/s after the default round trip.
    assert decision.costs_ms["worker w"] == pytest.approx(192.0 + 2.0, abs=0.1)


def test_a_quick_worker_is_preferred_to_a_slow_link() -> None:
    d = desk(193, FULL, caches=["a"], workers=["w"], rates=here(100.0))
    lookup = d.asks(Lookup)[0]
    reply = found(lookup, parts_of(193, 192))
    big = type(reply.body)(
        **{
            **{name: getattr(reply.body, name) for name in reply.body.__struct_fields__},
            "part_bytes": (100_000_000, 0, 0),
        }
    )
    assert isinstance(reply.ask, int)
    d.feed(type(reply)(reply.ask, big))
    assert d.asks(Fetch) == []
    assert len(d.asks(SubmitJob)) == 1


def test_where_the_prompt_left_what_is_cached_is_told() -> None:
    other = tokens_of(65).copy()
    other[40] += 1
    store = new_store(all_parts(other[:64], FULL))
    d = desk(65, FULL, store=store)
    d.run_engine()
    assert d.ready().explanation.diverged_at == 32
    assert any("diverged at token 32" in reason for reason in d.ready().explanation.reasons)


def test_a_prompt_that_only_goes_on_has_not_diverged() -> None:
    d = desk(71, FULL, store=new_store(parts_of(71, 59)))
    d.run_engine()
    assert d.ready().explanation.diverged_at is None
    fresh = desk(71, FULL, store=new_store())
    fresh.run_engine()
    assert fresh.ready().explanation.diverged_at is None


def test_what_a_peer_holds_behind_the_prompts_blocks_is_not_called_divergence() -> None:
    d = desk(65, FULL, caches=["a"], rates=here(1e5))
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 48)))
    d.run_engine()
    assert d.ready().explanation.diverged_at is None
    assert "nothing cached is known beyond token 48" in d.ready().explanation.reasons


def test_a_lookup_tells_of_divergence_too() -> None:
    d = desk(65, FULL, caches=["a"], rates=here(1e5))
    other = Tail(parent_hash=parts_of(65, 48)[-1].meta.block_hash, block_hash=b"x" * 32, token_count=7, kinds=1)
    d.feed(found(d.asks(Lookup)[0], parts_of(65, 48), (other,)))
    d.run_engine()
    assert d.ready().explanation.diverged_at == 48


def test_the_plain_beginning_of_a_cached_prompt_has_not_diverged() -> None:
    d = desk(72, FULL, store=new_store(parts_of(200, 192)))
    d.run_engine()
    assert d.ready().explanation.diverged_at is None
    assert "nothing cached is known beyond token 64" in d.ready().explanation.reasons


# --- the import grid -------------------------------------------------------------------------------------------------


def test_with_a_grid_prefixes_are_cut_at_its_multiples_but_a_whole_prompt_is_taken_whole() -> None:
    grid = PreparationSettings(remote_minimum_tokens=8, import_grid_tokens=32)
    d = desk(71, FULL, store=new_store(parts_of(71, 59)), settings=grid)
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.HOT, 0, 32), (SourceKind.COMPUTED, 32, 70)]
    whole = desk(71, FULL, store=new_store(parts_of(71, 70)), settings=grid)
    whole.run_engine()
    assert kinds(whole.ready()) == [(SourceKind.HOT, 0, 70)]


def test_with_a_grid_only_what_it_needs_is_fetched() -> None:
    grid = PreparationSettings(remote_minimum_tokens=8, import_grid_tokens=32)
    d = desk(71, WINDOWED, caches=["a"], settings=grid, rates=here(20.0))
    d.feed(found(d.asks(Lookup)[0], parts_of(71, 48, WINDOWED)))
    ask, fetch = fetch_of(d)
    d.deliver(d.grant(ask.ask), pick(71, fetch.parts, WINDOWED))
    d.run_engine()
    assert kinds(d.ready()) == [(SourceKind.REMOTE_CACHE, 0, 32), (SourceKind.COMPUTED, 32, 70)]
    assert isinstance(d.asks(Fetch)[0], Ask)
