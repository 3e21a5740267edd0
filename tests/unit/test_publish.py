"""Background publishing: every way a delivery can go, and that it never grows or blocks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.backoff import PAUSE_FIRST_S, Trouble
from kakeya_zmq.blocks import Part
from kakeya_zmq.planner import MeasuredRates, rank_replicas
from kakeya_zmq.protocol.effects import (
    NO_CONNECTION,
    AddCredit,
    Ask,
    AskFailed,
    AskId,
    AskProgressed,
    AskReplied,
    CancelAsk,
    CloseLane,
    ConnectSender,
    Count,
    Effect,
    HostEvent,
    LaneFinished,
    LaneId,
    Tick,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.publish import Publisher, PublishSettings, replica_candidates
from tests.unit.preparation_kit import FINGERPRINT, FULL, all_parts, tokens_of
from wire.cards import CacheOffering, Card
from wire.codec import pack_bitmap
from wire.errors import FailureCode, LocalProtocolError
from wire.ids import NodeId
from wire.messages import CipherSuite, Credit, Done, GetStatus, PublishGrant, PublishOffer, PublishResult, TransferGrant

PEERS = (NodeId("a"), NodeId("b"), NodeId("c"))
GRANT = TransferGrant(
    transfer_id=bytes(16), port=1, token="0" * 32, key=bytes(32), suite=CipherSuite.SECRETBOX, chunk_bytes=65_536
)
STORED = PublishResult(stored_parts=4, already_held_parts=0, refused_parts=0, reason="")


class Desk:
    def __init__(self, limits: PublishSettings | None = None) -> None:
        self.values: dict[str, object] = {}
        self.rates = MeasuredRates()
        ids = IdAllocator(itertools.count(1).__next__)
        self.machine = Publisher(limits or PublishSettings(), ids, self.values.__setitem__, self.rates)
        self.now = 5.0
        self.log: list[Effect] = []

    def publish(self, parts: tuple[Part, ...], peers: tuple[NodeId, ...] = PEERS) -> list[Effect]:
        return self.take(self.machine.publish(parts, FINGERPRINT, peers, self.now))

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.log += effects
        return effects

    def feed(self, event: HostEvent) -> list[Effect]:
        return self.take(self.machine.on(event, self.now))

    def asks(self) -> list[Ask]:
        return [effect for effect in self.log if isinstance(effect, Ask)]

    def count(self, name: str) -> int:
        return sum(effect.amount for effect in self.log if isinstance(effect, Count) and effect.name == name)

    def store_all(self) -> None:
        """Answer everything that is open, and what then begins."""
        while opened := [reply for ask in self.asks() if self.machine.owns(reply := AskReplied(ask.ask, STORED))]:
            self.feed(opened[0])

    def grant(self, ask: Ask, wanted: list[bool] | None = None) -> ConnectSender:
        assert isinstance(ask.body, PublishOffer)
        bits = pack_bitmap(wanted or [True] * len(ask.body.parts))
        effects = self.feed(AskProgressed(ask.ask, PublishGrant(wanted=bits, grant=GRANT, credit_bytes=100)))
        (connect,) = [effect for effect in effects if isinstance(effect, ConnectSender)]
        return connect


def parts_of(count: int, seed: int = 0) -> tuple[Part, ...]:
    return all_parts(tokens_of(count, seed), FULL)


def test_parts_go_to_the_peer_that_rendezvous_ranks_first() -> None:
    d = Desk()
    parts = parts_of(64)
    d.publish(parts[::-1])
    (ask,) = d.asks()
    assert ask.node_id == rank_replicas(parts[0].meta.block_hash, PEERS)[0]
    assert isinstance(ask.body, PublishOffer)
    assert ask.body.parts == tuple(part.meta for part in parts)


def test_a_part_that_was_noted_twice_is_offered_once() -> None:
    d = Desk()
    parts = parts_of(64)
    d.publish((*parts, *parts[1:3]))
    (ask,) = d.asks()
    assert isinstance(ask.body, PublishOffer)
    assert ask.body.parts == tuple(part.meta for part in parts)


def test_a_refusal_is_kept_with_its_reason() -> None:
    d = Desk()
    d.publish(parts_of(64))
    (ask,) = d.asks()
    d.feed(AskFailed(ask.ask, FailureCode.INVALID_ARGUMENT, "too many"))
    assert "invalid argument: too many" in str(d.values["last_publish_error"])


def test_only_wanted_parts_are_sent_and_payloads_are_shared() -> None:
    d = Desk()
    parts = parts_of(64)
    d.publish(parts)
    (ask,) = d.asks()
    connect = d.grant(ask, [True, False, False, True])
    assert connect.parts == (parts[0], parts[3])
    assert connect.parts[0].payload is parts[0].payload
    assert (connect.node_id, connect.credit_bytes) == (ask.node_id, 100)
    assert d.feed(AskProgressed(ask.ask, Credit(credit_bytes=7))) == [AddCredit(connect.lane, 7)]
    d.feed(LaneFinished(connect.lane, True, "", 96))
    d.feed(AskReplied(ask.ask, STORED))
    assert d.machine.idle
    assert (d.count("publish_attempts"), d.count("publish_successes"), d.count("publish_failures")) == (1, 1, 0)
    assert d.count("bytes_published") == 96


def test_who_has_taken_something_is_known_before_its_next_card() -> None:
    d = Desk()
    d.publish(parts_of(64))
    (ask,) = d.asks()
    assert d.machine.took_at(ask.node_id) is None
    d.now = 7.0
    d.feed(AskReplied(ask.ask, PublishResult(stored_parts=0, already_held_parts=4, refused_parts=0, reason="")))
    assert [d.machine.took_at(peer) for peer in PEERS] == [7.0 if peer == ask.node_id else None for peer in PEERS]


def test_a_result_that_overtakes_the_lanes_end_counts_the_bytes_once() -> None:
    d = Desk()
    d.publish(parts_of(64))
    (ask,) = d.asks()
    connect = d.grant(ask)
    assert CloseLane(connect.lane, True, "the peer has concluded") in d.feed(AskReplied(ask.ask, STORED))
    d.feed(LaneFinished(connect.lane, True, "", 192))
    assert d.count("bytes_published") == 192


def test_a_peer_that_wants_nothing_is_a_success_without_bytes() -> None:
    d = Desk()
    d.publish(parts_of(64))
    (ask,) = d.asks()
    d.feed(AskProgressed(ask.ask, PublishGrant(wanted=pack_bitmap([False] * 4), grant=None, credit_bytes=0)))
    d.feed(AskReplied(ask.ask, PublishResult(stored_parts=0, already_held_parts=4, refused_parts=0, reason="")))
    assert (d.count("publish_successes"), d.count("bytes_published")) == (1, 0)


@pytest.mark.parametrize("case", ["failure", "other reply", "lane", "refused", "bitmap", "stall"])
def test_a_failed_delivery_is_tried_once_more_on_another_peer(case: str) -> None:
    d = Desk()
    d.publish(parts_of(64))
    for attempt in range(2):
        ask = d.asks()[attempt]
        match case:
            case "failure":
                d.feed(AskFailed(ask.ask, FailureCode.UNAVAILABLE, "gone"))
            case "other reply":
                d.feed(AskReplied(ask.ask, Done()))
            case "lane":
                d.feed(LaneFinished(d.grant(ask).lane, False, "reset", 1))
            case "refused":
                refused = PublishResult(stored_parts=0, already_held_parts=0, refused_parts=4, reason="full")
                d.feed(AskReplied(ask.ask, refused))
            case "bitmap":
                d.feed(AskProgressed(ask.ask, PublishGrant(wanted=b"\xff" * 9, grant=GRANT, credit_bytes=1)))
            case _:
                due = d.machine.deadline()
                assert due is not None
                d.now = due
                d.feed(Tick())
    assert d.machine.idle
    assert len(d.asks()) == 2
    assert d.asks()[0].node_id != d.asks()[1].node_id
    assert (d.count("publish_attempts"), d.count("publish_successes"), d.count("publish_failures")) == (2, 0, 2)
    assert str(d.values["last_publish_error"]).startswith("publish to ")
    assert case != "refused" or str(d.values["last_publish_error"]).endswith("was refused: full")


def test_a_partly_refused_delivery_is_a_success_that_tells_what_was_refused() -> None:
    d = Desk()
    d.publish(parts_of(64))
    d.feed(AskReplied(d.asks()[0].ask, PublishResult(stored_parts=3, already_held_parts=0, refused_parts=1, reason="full")))
    assert (d.count("publish_successes"), d.count("publish_parts_refused")) == (1, 1)


def test_few_deliveries_run_at_once_and_the_oldest_waiting_ones_are_dropped() -> None:
    d = Desk(PublishSettings(in_flight_max=1, queue_deliveries_max=2))
    for seed in range(5):
        d.publish(parts_of(16, seed))
    assert len(d.asks()) == 1
    assert (d.machine.waiting, d.count("publish_dropped")) == (2, 2)
    d.feed(AskReplied(d.asks()[0].ask, STORED))
    second = d.asks()[1].body
    assert isinstance(second, PublishOffer)
    assert second.parts == tuple(part.meta for part in parts_of(16, 3)), "1 and 2 were dropped"


def test_waiting_payloads_are_bounded_in_bytes() -> None:
    d = Desk(PublishSettings(in_flight_max=1, queue_bytes_max=100))
    for seed in range(5):
        d.publish(parts_of(16, seed))
    assert (d.machine.waiting, d.count("publish_dropped")) == (2, 2)


def test_a_long_run_is_cut_into_batches_of_parts_and_bytes() -> None:
    d = Desk(PublishSettings(in_flight_max=9, batch_parts_max=3))
    d.publish(parts_of(128))
    d.store_all()
    assert [len(ask.body.parts) for ask in d.asks() if isinstance(ask.body, PublishOffer)] == [3, 3, 2]
    assert len({ask.node_id for ask in d.asks()}) == 1, "one run stays together"
    d = Desk(PublishSettings(in_flight_max=9, batch_bytes_max=100))
    d.publish(parts_of(80))
    d.store_all()
    assert [len(ask.body.parts) for ask in d.asks() if isinstance(ask.body, PublishOffer)] == [2, 2, 1]


def test_a_peer_that_hangs_delays_only_what_is_for_it() -> None:
    d = Desk(PublishSettings(attempts_max=1))
    hanging = best_for(0)
    for seed in (seed for seed in range(30) if best_for(seed) == hanging):
        d.publish(parts_of(64, seed))
    d.grant(d.asks()[0])
    others = [seed for seed in range(30) if best_for(seed) != hanging]
    for seed in others:
        d.publish(parts_of(64, seed))
        d.feed(AskReplied(d.asks()[-1].ask, STORED))
    assert [ask.node_id for ask in d.asks()] == [hanging, *(best_for(seed) for seed in others)]
    assert d.count("publish_successes") == len(others)


@pytest.mark.parametrize("way", ["no connection", "nothing taken"])
def test_a_peer_whose_bulk_port_cannot_be_reached_is_passed_over(way: str) -> None:
    d = Desk()
    first, rest = best_for(0), tuple(peer for peer in PEERS if peer != best_for(0))
    seeds = [seed for seed in range(1, 40) if best_for(seed) == first]
    d.publish(parts_of(64))
    d.publish(parts_of(64, seeds[0]))
    lane = d.grant(d.asks()[0]).lane
    if way == "no connection":
        d.feed(LaneFinished(lane, False, NO_CONNECTION, 0))
    else:
        d.now += PublishSettings().stall_timeout_s
        assert CloseLane(lane, False, "timed out: nothing was taken at its bulk port") in d.feed(Tick())
    d.store_all()
    d.publish(parts_of(64, seeds[1]))
    d.store_all()
    assert {ask.node_id for ask in d.asks()[1:]} <= set(rest)
    assert d.count("publish_successes") == 3
    d.now += PAUSE_FIRST_S
    d.publish(parts_of(64, seeds[2]))
    assert d.asks()[-1].node_id == first, "it is tried again"


@pytest.mark.parametrize("proof", ["credit", "lane"])
def test_a_peer_that_takes_bytes_is_in_reach(proof: str) -> None:
    d = Desk(PublishSettings(attempts_max=1))
    d.publish(parts_of(64), PEERS[:1])
    lane = d.grant(d.asks()[0]).lane
    d.rates.backoff.failed(PEERS[0], Trouble.BULK_PORT, "a fetch", d.now)
    if proof == "credit":
        d.feed(AskProgressed(d.asks()[0].ask, Credit(credit_bytes=7)))
    else:
        d.feed(LaneFinished(lane, True, "", 96))
    d.now += PublishSettings().stall_timeout_s
    d.feed(Tick())
    assert d.values["last_publish_error"] == "publish to a timed out"
    assert not d.rates.backoff.left_alone(PEERS[0], d.now, Trouble.BULK_PORT)


def test_replication_goes_to_different_peers_and_zero_switches_it_off() -> None:
    d = Desk(PublishSettings(replication_factor=2))
    d.publish(parts_of(16))
    assert len({ask.node_id for ask in d.asks()}) == 2
    assert Desk(PublishSettings(replication_factor=0)).publish(parts_of(16)) == []
    assert Desk().publish(parts_of(16), peers=()) == []
    assert Desk().publish(()) == []


FULL_ANSWER = PublishResult(stored_parts=0, already_held_parts=0, refused_parts=4, reason="full")


def best_for(seed: int, peers: tuple[NodeId, ...] = PEERS) -> NodeId:
    return rank_replicas(parts_of(64, seed)[0].meta.block_hash, peers)[0]


def test_a_peer_that_had_no_room_is_passed_over_for_a_while() -> None:
    d = Desk()
    d.publish(parts_of(64))
    full = d.asks()[0].node_id
    d.feed(AskReplied(d.asks()[0].ask, FULL_ANSWER))
    d.feed(AskReplied(d.asks()[1].ask, STORED))
    seeds = [seed for seed in range(1, 40) if best_for(seed) == full][:2]
    others = tuple(peer for peer in PEERS if peer != full)
    d.publish(parts_of(64, seeds[0]))
    assert d.asks()[2].node_id == best_for(seeds[0], others)
    d.feed(AskReplied(d.asks()[2].ask, STORED))
    d.now += PublishSettings().full_pause_s
    d.publish(parts_of(64, seeds[1]))
    assert d.asks()[3].node_id == full


@pytest.mark.parametrize("code", [FailureCode.RESOURCE_EXHAUSTED, FailureCode.PERMISSION_DENIED])
def test_what_waits_for_a_peer_that_cannot_take_it_goes_to_the_next(code: FailureCode) -> None:
    d = Desk(PublishSettings(in_flight_max=1, attempts_max=1))
    first = best_for(0)
    seed = next(seed for seed in range(1, 40) if best_for(seed) == first)
    d.publish(parts_of(64))
    d.publish(parts_of(64, seed))
    d.feed(AskFailed(d.asks()[0].ask, code, "no"))
    assert d.asks()[1].node_id == best_for(seed, tuple(peer for peer in PEERS if peer != first))
    assert d.count("publish_attempts") == 2


def test_when_no_peer_can_take_it_the_run_is_dropped_and_counted() -> None:
    d = Desk()
    d.publish(parts_of(64), peers=PEERS[:1])
    d.feed(AskFailed(d.asks()[0].ask, FailureCode.PERMISSION_DENIED, "no"))
    d.feed(AskFailed(d.asks()[1].ask, FailureCode.PERMISSION_DENIED, "no"))
    before = d.count("publish_dropped")
    d.publish(parts_of(64, 1), peers=PEERS[:1])
    assert (len(d.asks()), d.count("publish_dropped")) == (2, before + 1)
    d.take(d.machine.publish(parts_of(64, 1), bytes(32), PEERS[:1], d.now))
    assert len(d.asks()) == 3, "another namespace is another matter"


def test_when_a_replica_vanishes_the_next_in_rank_gets_what_comes_later() -> None:
    d = Desk()
    first = best_for(0)
    left = tuple(peer for peer in PEERS if peer != first)
    d.publish(parts_of(64), peers=left)
    assert d.asks()[0].node_id == rank_replicas(parts_of(64)[0].meta.block_hash, PEERS)[1]


def test_candidates_are_caches_that_take_the_namespace() -> None:
    def card(name: str, roles: tuple[str, ...], accepted: tuple[bytes, ...] | None) -> Card:
        names = "bytes_used bytes_free entry_count epoch evictions bytes_evicted put_failures tokens_served"
        figures = dict.fromkeys(names.split(), 0)
        offering = None if accepted is None else CacheOffering(**figures, load=0.0, fingerprints=accepted)
        return Card(
            node_id=name,
            identity_public_key=bytes(32),
            incarnation=1,
            sequence=1,
            roles=roles,
            software="",
            platform="",
            memory_bytes=0,
            endpoints=(),
            bus_port=0,
            cache=offering,
        )

    cards = [
        card("any", ("cache",), ()),
        card("mine", ("cache",), (bytes(32), FINGERPRINT)),
        card("other", ("cache",), (bytes(32),)),
        card("nothing", ("cache",), None),
        card("worker", ("worker", "cache-holder"), ()),
    ]
    assert replica_candidates(cards, FINGERPRINT) == ("any", "mine")


def test_close_leaves_nothing_open() -> None:
    d = Desk(PublishSettings(in_flight_max=1))
    d.publish(parts_of(16))
    d.publish(parts_of(16, 1))
    connect = d.grant(d.asks()[0])
    effects = d.take(d.machine.close())
    assert CancelAsk(d.asks()[0].ask) in effects
    assert CloseLane(connect.lane, False, "shutting down") in effects
    assert d.machine.idle
    assert d.machine.deadline() is None
    assert d.count("publish_dropped") == 2


def test_settings_are_checked() -> None:
    with pytest.raises(LocalProtocolError):
        PublishSettings(attempts_max=0)
    with pytest.raises(LocalProtocolError):
        PublishSettings(batch_parts_max=100_000)
    with pytest.raises(LocalProtocolError):
        PublishSettings(stall_timeout_s=0.0)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 60))
def test_in_any_order_of_events_every_attempt_is_counted_and_nothing_stays_open(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    d = Desk(PublishSettings(in_flight_max=2, queue_deliveries_max=3))
    open_asks: dict[int, Ask] = {}
    open_lanes: set[LaneId] = set()

    def settle(effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(ask=ask):
                    open_asks[ask] = effect
                case CancelAsk(ask=ask):
                    assert open_asks.pop(ask, None) is not None
                case ConnectSender(lane=lane):
                    open_lanes.add(lane)
                case CloseLane(lane=lane):
                    assert lane in open_lanes
                    open_lanes.discard(lane)
                case AddCredit(lane=lane):
                    assert lane in open_lanes
                case _:
                    pass
        assert len(open_asks) <= 2

    def event() -> HostEvent:
        # Every event may hit something open, something long closed, or something that never was.
        ask = rng.choice([*d.asks(), Ask(AskId(999), NodeId("x"), GetStatus(), 1.0)])
        count = len(ask.body.parts) if isinstance(ask.body, PublishOffer) else 1
        bits = pack_bitmap([rng.random() < 0.7 for _ in range(count)])
        grant = PublishGrant(wanted=bits, grant=rng.choice([GRANT, GRANT, None]), credit_bytes=9)
        lane = rng.choice([*open_lanes, LaneId(998)])
        events: list[HostEvent] = [
            AskProgressed(ask.ask, grant),
            AskProgressed(ask.ask, Credit(credit_bytes=5)),
            AskReplied(ask.ask, STORED),
            AskReplied(ask.ask, FULL_ANSWER),
            AskFailed(ask.ask, rng.choice(list(FailureCode)), "gone"),
            LaneFinished(lane, rng.random() < 0.7, "", 5),
            Tick(),
        ]
        return rng.choice(events)

    for _ in range(rounds):
        d.now += rng.choice([0.0, 0.1, 5.0])
        if rng.random() < 0.3:
            settle(d.publish(parts_of(rng.randint(1, 40), rng.randint(0, 50))))
            continue
        happening = event()
        match happening:
            case AskReplied(ask=ask) | AskFailed(ask=ask):
                open_asks.pop(ask, None)
            case LaneFinished(lane=lane):
                open_lanes.discard(lane)
            case _:
                pass
        settle(d.feed(happening))
    attempts, ended = d.count("publish_attempts"), d.count("publish_successes") + d.count("publish_failures")
    assert attempts - ended == len(open_asks)
    settle(d.take(d.machine.close()))
    assert not open_asks
    assert not open_lanes
    assert d.machine.idle
