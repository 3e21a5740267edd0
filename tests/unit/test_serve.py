"""The cache service, event by event. Whole random histories: tests/property/test_serve_machine.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from kakeya_zmq.blocks import ROOT_HASH, Part
from kakeya_zmq.protocol.effects import (
    AddCredit,
    BindReceiver,
    BindSender,
    CloseLane,
    Count,
    CreditEarned,
    Effect,
    FeedSender,
    LaneFinished,
    LaneId,
    LaneOpened,
    Note,
    PartsReceived,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    SendFailure,
    SendProgress,
    SendReply,
    Tick,
    UpdateArrived,
)
from kakeya_zmq.protocol.serve import NO_LEASE, CacheService
from kakeya_zmq.protocol.serve_promises import DEBTORS_MAX, FORGIVEN_S, PATIENCE_S_MIN, Promises
from kakeya_zmq.protocol.serve_transfers import PARTS_ON_THE_WAY_BYTES_MAX
from kakeya_zmq.protocol.serve_values import Incoming, TransferPhase
from kakeya_zmq.store import LEASES_MAX, NAMESPACES_PER_PUBLISHER_MAX, BlockStore
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire import limits
from wire.codec import pack_bitmap, pack_hashes
from wire.errors import FailureCode
from wire.ids import LeaseId, NodeId
from wire.messages import (
    CipherSuite,
    Credit,
    Cut,
    Done,
    Fetch,
    GetStatus,
    Lookup,
    LookupReply,
    PartKind,
    PartMeta,
    PartRef,
    PublishGrant,
    PublishOffer,
    PublishResult,
    ReleaseLease,
    RequestBody,
    Requirement,
    TransferDone,
    TransferGrant,
    TransferResult,
)

T = TypeVar("T")
FULL = Requirement(block_tokens=16, full=True)
GRANT = TransferGrant(
    transfer_id=bytes(16),
    port=1,
    token="0" * 32,
    key=bytes(32),
    suite=CipherSuite.SECRETBOX,
    chunk_bytes=limits.CHUNK_BYTES_MIN,
)
BOTH = (CipherSuite.SECRETBOX, CipherSuite.AES_256_GCM)


class Peer:
    """A service with a store, and short ways to ask it."""

    def __init__(self, max_bytes: int = 1000, *, quotas: Mapping[bytes, int] | None = None, **options: object) -> None:
        self.store = BlockStore(max_bytes, random_bytes=CountingBytes(), quota_bytes=(quotas or {}).get)
        lanes = (LaneId(number) for number in itertools.count(1))
        defaults: dict[str, object] = {"has_aes": True, "fetch_idle_s": 10.0}
        self.service = CacheService(self.store, lanes=lanes.__next__, **(defaults | options))  # type: ignore[arg-type]
        self.now = 0.0
        self.requests = 0

    def ask(self, body: RequestBody, *, node: str = "asker", identity: bytes = b"") -> tuple[RequestKey, list[Effect]]:
        self.requests += 1
        key = RequestKey((bytes(16), self.requests))
        return key, self.service.on(RequestArrived(key, NodeId(node), (), body, self.now + 60, identity), self.now)

    def on(self, event: object) -> list[Effect]:
        return self.service.on(event, self.now)  # type: ignore[arg-type]

    def hold(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.store.put(part, fingerprint=FINGERPRINT, now=self.now)

    def lookup(self, chain_hashes: Sequence[bytes], requirement: Requirement = FULL, lease_ms: int = 1000) -> LookupReply:
        body = Lookup(
            fingerprint=FINGERPRINT, requirement=requirement, block_hashes=pack_hashes(chain_hashes), lease_ms=lease_ms
        )
        reply = only(self.ask(body)[1], SendReply).body
        assert isinstance(reply, LookupReply)
        return reply

    def start_fetch(self, parts: Sequence[Part], *, node: str = "asker") -> tuple[RequestKey, LaneId]:
        info = self.store.lease([part.meta.ref for part in parts], self.now, 1000, fingerprint=FINGERPRINT, owner=node)
        key, effects = self.ask(fetch(info.lease_id, parts), node=node)
        return key, only(effects, BindSender).lane

    def start_publish(self, parts: Sequence[Part]) -> tuple[RequestKey, LaneId]:
        key, effects = self.ask(offer(parts))
        lane = only(effects, BindReceiver).lane
        self.on(LaneOpened(lane, GRANT))
        return key, lane

    def assert_clean(self) -> None:
        assert self.service.lane_count == 0
        assert self.store.stats().bytes_reserved == 0


def fetch(lease_id: LeaseId, parts: Sequence[Part], suites: tuple[CipherSuite, ...] = BOTH) -> Fetch:
    return Fetch(
        lease_id=lease_id,
        parts=tuple(part.meta.ref for part in parts),
        suites=suites,
        chunk_bytes_max=limits.CHUNK_BYTES_MAX,
        credit_bytes=limits.CHUNK_BYTES_MIN,
    )


def offer(parts: Sequence[Part], *, suites: tuple[CipherSuite, ...] = BOTH) -> PublishOffer:
    return offer_metas([part.meta for part in parts], suites=suites)


def offer_metas(metas: Sequence[PartMeta], *, suites: tuple[CipherSuite, ...] = BOTH) -> PublishOffer:
    return PublishOffer(fingerprint=FINGERPRINT, parts=tuple(metas), suites=suites, chunk_bytes_max=limits.CHUNK_BYTES_MIN)


def of(effects: Sequence[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def only(effects: Sequence[Effect], kind: type[T]) -> T:
    (found,) = of(effects, kind)
    return found


def counts(effects: Sequence[Effect]) -> dict[str, int]:
    return {effect.name: effect.amount for effect in of(effects, Count)}


def failure_code(effects: Sequence[Effect]) -> FailureCode:
    assert counts(effects).get("cache_refusals") == 1
    return only(effects, SendFailure).code


# --- lookup and release --------------------------------------------------------------------------------------------


def test_a_lookup_tells_what_is_held_and_leases_all_of_it() -> None:
    peer = Peer()
    chain = make_chain(72)
    full, window = make_parts(chain), make_parts(chain, kinds=(PartKind.WINDOW,), length_bytes=4)
    peer.hold([*full[:2], full[3], full[4], window[1], window[3]])
    reply = peer.lookup([block.block_hash for block in chain.blocks[:4]])
    assert reply.present == (pack_bitmap([1, 1, 0, 1]), pack_bitmap([0, 1, 0, 1]), pack_bitmap([0, 0, 0, 0]))
    assert reply.part_bytes == (10, 4, 0)
    assert reply.epoch == peer.store.epoch
    assert [(tail.parent_hash, tail.token_count) for tail in reply.tails] == [(chain.blocks[3].block_hash, 8)]
    leased = peer.store.lease_info(LeaseId(reply.lease_id), 0.5).refs
    held = (full[0], full[1], window[1], full[3], window[3], full[4])
    assert leased == tuple(part.meta.ref for part in held), "what lies behind the hole too: others may fill it"
    assert peer.store.stats().lookup_hits == 1
    assert peer.service.deadline() == 1.0
    peer.now = 1.0
    peer.on(Tick())
    assert peer.store.stats().leases == 0
    assert peer.service.deadline() is None


def test_tails_come_longest_prefix_first_and_are_leased() -> None:
    peer = Peer()
    chains = [make_chain(tokens, seed=tokens, shared_tokens=16) for tokens in (18, 23, 20)]
    root_tail = make_parts(make_chain(3, seed=50))
    parts = [make_parts(chain) for chain in chains]
    peer.hold([*parts[0], *parts[1], *parts[2], *root_tail])
    reply = peer.lookup([chains[0].blocks[0].block_hash])
    assert [tail.token_count for tail in reply.tails] == [7, 4, 2, 3]
    assert reply.tails[-1].parent_hash == ROOT_HASH
    assert len(peer.store.lease_info(LeaseId(reply.lease_id), 0.0).refs) == 5


def test_a_miss_and_a_lookup_without_a_lease_lease_nothing() -> None:
    peer = Peer()
    chain = make_chain(32)
    hashes = [block.block_hash for block in chain.blocks]
    assert peer.lookup(hashes).lease_id == NO_LEASE
    peer.hold(make_parts(chain))
    reply = peer.lookup(hashes, lease_ms=0)
    assert (reply.lease_id, reply.lease_ms) == (NO_LEASE, 0)
    assert reply.present[0] == pack_bitmap([True, True])
    assert (peer.store.stats().lookup_hits, peer.store.stats().lookup_misses) == (1, 1)
    assert peer.store.stats().leases == 0


@pytest.mark.parametrize("held", [{0, 1, 2, 3}, {2, 3}, {0, 2}, {3}])
def test_whatever_a_lookup_reports_can_be_fetched(held: set[int]) -> None:
    peer = Peer()
    chain = make_chain(70)
    blocks, tail = make_parts(chain)[:4], make_parts(chain)[4]
    peer.hold([*(blocks[number] for number in sorted(held)), tail])
    reply = peer.lookup([block.block_hash for block in chain.blocks[:4]])
    assert reply.present[0] == pack_bitmap([number in held for number in range(4)])
    assert [found.block_hash for found in reply.tails] == [tail.meta.block_hash]
    reported = [*(blocks[number] for number in sorted(held)), tail]
    _, effects = peer.ask(fetch(LeaseId(reply.lease_id), reported))
    assert only(effects, FeedSender) == FeedSender(only(effects, BindSender).lane, tuple(reported), final=True)


def test_long_leases_are_cut() -> None:
    peer = Peer(lease_ms_max=500)
    chain = make_chain(32)
    peer.hold(make_parts(chain))
    assert peer.lookup([block.block_hash for block in chain.blocks], lease_ms=600_000).lease_ms == 500


def test_a_lookup_of_no_whole_hashes_is_refused() -> None:
    peer = Peer()
    _, effects = peer.ask(Lookup(fingerprint=FINGERPRINT, requirement=FULL, block_hashes=b"x" * 33))
    assert failure_code(effects) is FailureCode.INVALID_ARGUMENT


def test_when_there_are_too_many_leases_a_lookup_promises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya_zmq.store_leases.LEASES_MAX", 1)
    peer = Peer()
    chain = make_chain(16)
    peer.hold(make_parts(chain))
    hashes = [block.block_hash for block in chain.blocks]
    assert peer.lookup(hashes).lease_id != NO_LEASE
    body = Lookup(fingerprint=FINGERPRINT, requirement=FULL, block_hashes=pack_hashes(hashes), lease_ms=1000)
    _, effects = peer.ask(body)
    second = only(effects, SendReply).body
    assert isinstance(second, LookupReply)
    assert (second.lease_id, second.present[0], second.tails) == (NO_LEASE, b"\0", ())
    assert Count("cache_leases_refused") in effects
    without = peer.lookup(hashes, lease_ms=0)
    assert (without.lease_id, without.present[0]) == (NO_LEASE, b"\1"), "who wants no lease is told what there is"


def test_release_is_answered_also_the_second_time() -> None:
    peer = Peer()
    chain = make_chain(16)
    peer.hold(make_parts(chain))
    lease_id = peer.lookup([chain.blocks[0].block_hash]).lease_id
    for _ in range(2):
        assert only(peer.ask(ReleaseLease(lease_id=lease_id))[1], SendReply).body == Done()
    assert peer.store.stats().leases == 0


def test_other_requests_are_not_its_business() -> None:
    peer = Peer()
    assert not CacheService.handles(GetStatus())
    assert CacheService.handles(ReleaseLease(lease_id=bytes(16)))
    assert peer.ask(GetStatus())[1] == []


# --- fetch ---------------------------------------------------------------------------------------------------------


def test_a_fetch_from_grant_to_result() -> None:
    peer = Peer()
    parts = make_parts(make_chain(32))
    peer.hold(parts)
    info = peer.store.lease([part.meta.ref for part in parts], 0.0, 1000, fingerprint=FINGERPRINT, owner="asker")
    key, effects = peer.ask(fetch(info.lease_id, parts))
    bind = only(effects, BindSender)
    assert (bind.suite, bind.chunk_bytes, bind.credit_bytes) == (
        CipherSuite.AES_256_GCM,
        limits.CHUNK_BYTES_DEFAULT,
        limits.CHUNK_BYTES_MIN,
    )
    assert counts(effects) == {"cache_fetches": 1}
    # Behind the lane's binding, so that the parts are sealed while the asker connects.
    assert effects[-2:] == [bind, FeedSender(bind.lane, parts, final=True)]
    assert peer.service.owns_request(key)
    assert peer.service.owns_lane(bind.lane)
    assert peer.on(LaneOpened(bind.lane, GRANT)) == [SendProgress(key, GRANT)]
    assert peer.on(UpdateArrived(key, Credit(credit_bytes=7))) == [AddCredit(bind.lane, 7)]
    effects = peer.on(UpdateArrived(key, TransferDone(complete=True)))
    assert only(effects, CloseLane).ok
    assert only(effects, SendReply) == SendReply(key, TransferResult(sent_parts=2, sent_bytes=20))
    assert counts(effects) == {"cache_fetched_bytes": 20}
    assert not peer.service.owns_request(key)
    assert peer.on(UpdateArrived(key, TransferDone(complete=True))) == []
    assert peer.service.lane_count == 1
    assert peer.on(LaneFinished(bind.lane, True, "", 20)) == []
    peer.assert_clean()


@pytest.mark.parametrize(
    ("has_aes", "offered", "chosen"),
    [
        (True, (CipherSuite.SECRETBOX,), CipherSuite.SECRETBOX),
        (False, BOTH, CipherSuite.SECRETBOX),
        (False, (CipherSuite.AES_256_GCM,), None),
    ],
)
def test_the_suite_is_one_that_both_can_do(
    has_aes: bool, offered: tuple[CipherSuite, ...], chosen: CipherSuite | None
) -> None:
    peer = Peer(has_aes=has_aes)
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    info = peer.store.lease([part.meta.ref for part in parts], 0.0, 1000, fingerprint=FINGERPRINT, owner="asker")
    _, effects = peer.ask(fetch(info.lease_id, parts, offered))
    if chosen is None:
        assert failure_code(effects) is FailureCode.INVALID_ARGUMENT
    else:
        assert only(effects, BindSender).suite is chosen


def test_fetches_without_a_right_to_the_parts_are_refused() -> None:
    peer = Peer()
    parts = make_parts(make_chain(32))
    peer.hold(parts)
    assert failure_code(peer.ask(fetch(LeaseId(bytes(16)), parts))[1]) is FailureCode.NOT_FOUND
    info = peer.store.lease([parts[0].meta.ref], 0.0, 1000, fingerprint=FINGERPRINT, owner="asker")
    assert failure_code(peer.ask(fetch(info.lease_id, parts))[1]) is FailureCode.FAILED_PRECONDITION
    assert failure_code(peer.ask(fetch(info.lease_id, [parts[0], parts[0]]))[1]) is FailureCode.INVALID_ARGUMENT
    peer.now = 1.0
    assert failure_code(peer.ask(fetch(info.lease_id, parts[:1]))[1]) is FailureCode.NOT_FOUND
    peer.assert_clean()


def test_a_running_fetch_keeps_its_lease_alive() -> None:
    peer = Peer(fetch_idle_s=1000.0)
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, lane = peer.start_fetch(parts)
    peer.on(LaneOpened(lane, GRANT))
    while peer.now < 200.0:
        deadline = peer.service.deadline()
        assert deadline is not None
        assert deadline > peer.now
        peer.now = deadline
        peer.on(Tick())
        assert peer.store.stats().leases == 1
    peer.on(UpdateArrived(key, TransferDone(complete=True)))
    peer.now += limits.LEASE_MS_DEFAULT / 1000
    peer.on(Tick())
    assert peer.store.stats().leases == 0


def test_a_lease_released_in_the_middle_does_not_end_the_fetch() -> None:
    peer = Peer(fetch_idle_s=1000.0)
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    info = peer.store.lease([part.meta.ref for part in parts], 0.0, 1000, fingerprint=FINGERPRINT, owner="asker")
    key, effects = peer.ask(fetch(info.lease_id, parts))
    peer.ask(ReleaseLease(lease_id=info.lease_id))
    peer.store.clear()
    peer.now = 100.0
    peer.on(Tick())
    assert only(effects, FeedSender).parts == parts
    peer.on(LaneOpened(only(effects, BindSender).lane, GRANT))
    assert only(peer.on(UpdateArrived(key, TransferDone(complete=True))), SendReply).key == key
    assert peer.service.deadline() is None


def test_an_asker_that_gives_up_is_told_that_nothing_counts_as_sent() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, lane = peer.start_fetch(parts)
    peer.on(LaneOpened(lane, GRANT))
    effects = peer.on(UpdateArrived(key, TransferDone(complete=False)))
    assert not only(effects, CloseLane).ok
    assert only(effects, SendReply).body == TransferResult(sent_parts=0, sent_bytes=0)
    assert counts(effects) == {"cache_broken_transfers": 1}


def test_done_before_anything_was_sent_is_refused() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, lane = peer.start_fetch(parts)
    assert peer.on(UpdateArrived(key, Credit(credit_bytes=1))) == []
    effects = peer.on(UpdateArrived(key, TransferDone(complete=True)))
    assert failure_code(effects) is FailureCode.INVALID_ARGUMENT
    assert only(effects, CloseLane) == CloseLane(lane, False, "done before anything was sent")


def test_a_broken_lane_fails_its_fetch() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    for opened in (False, True):
        key, lane = peer.start_fetch(parts)
        if opened:
            peer.on(LaneOpened(lane, GRANT))
        effects = peer.on(LaneFinished(lane, False, "no port is free", 0))
        assert only(effects, SendFailure) == SendFailure(key, FailureCode.UNAVAILABLE, "no port is free")
        peer.assert_clean()


def test_a_cancelled_fetch_is_closed_without_an_answer() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, lane = peer.start_fetch(parts)
    effects = peer.on(RequestCancelled(key, "the peer has gone"))
    assert only(effects, CloseLane) == CloseLane(lane, False, "the peer has gone")
    assert of(effects, SendReply) == of(effects, SendFailure) == []
    assert peer.on(LaneOpened(lane, GRANT)) == [], "late"
    assert peer.on(LaneFinished(lane, False, "", 0)) == []
    peer.assert_clean()


def test_a_silent_asker_is_given_up() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, _ = peer.start_fetch(parts)
    assert peer.service.deadline() == 10.0, "the lane did not open"
    peer.now = 10.0
    effects = peer.on(Tick())
    assert only(effects, SendFailure) == SendFailure(key, FailureCode.DEADLINE_EXCEEDED, only(effects, CloseLane).reason)
    assert counts(effects) == {"cache_idle_transfers": 1}


def test_a_fetch_ends_at_last_however_often_its_asker_says_something() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, lane = peer.start_fetch(parts)
    peer.on(LaneOpened(lane, GRANT))
    end = 10.0 + sum(part.meta.length_bytes for part in parts) / limits.SLOWEST_LINK_BYTES_PER_S
    failures: list[SendFailure] = []
    while not failures:
        assert peer.now <= end + 1.0
        peer.now += 1.0
        failures = of(peer.on(UpdateArrived(key, Credit(credit_bytes=1))), SendFailure)
    assert peer.now >= end
    assert failures[0].code is FailureCode.DEADLINE_EXCEEDED


def test_what_lanes_send_stays_in_the_store_also_when_its_lease_is_given_back() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    info = peer.store.lease([part.meta.ref for part in parts], 0.0, 1000, fingerprint=FINGERPRINT, owner="asker")
    keys = []
    for _ in range(2):
        key, effects = peer.ask(fetch(info.lease_id, parts))
        peer.on(LaneOpened(only(effects, BindSender).lane, GRANT))
        keys.append(key)
    assert only(peer.ask(ReleaseLease(lease_id=info.lease_id))[1], SendReply).body == Done()
    assert failure_code(peer.ask(fetch(info.lease_id, parts))[1]) is FailureCode.NOT_FOUND, "it was given back"
    total = sum(part.meta.length_bytes for part in parts)
    for key in keys:
        assert peer.store.stats().bytes_locked == total
        peer.on(UpdateArrived(key, TransferDone(complete=True)))
    assert peer.store.stats().bytes_locked == 0
    assert peer.store.stats().leases == 0


def leased_by_greedy(peer: Peer) -> tuple[list[Part], list[bytes]]:
    """Fill the store, and let a member lease all of it."""
    parts = make_parts(make_chain(16 * peer.store.max_bytes // 10))
    peer.hold(parts)
    hashes = [part.meta.block_hash for part in parts]
    lookup = Lookup(fingerprint=FINGERPRINT, requirement=FULL, block_hashes=pack_hashes(hashes), lease_ms=1000)
    reply = only(peer.ask(lookup, node="greedy")[1], SendReply).body
    assert isinstance(reply, LookupReply)
    assert peer.store.stats().bytes_locked == peer.store.max_bytes
    return parts, [reply.lease_id]


def test_a_member_that_leases_everything_keeps_nobody_from_publishing() -> None:
    peer = Peer(100)
    _, (lease_id,) = leased_by_greedy(peer)
    new = make_parts(make_chain(32, seed=1))
    _, lane = peer.start_publish(new)
    effects = peer.on(PartsReceived(lane, tuple(new)))
    assert only(effects, SendReply).body == PublishResult(stored_parts=2, already_held_parts=0, refused_parts=0, reason="")
    assert failure_code(peer.ask(fetch(LeaseId(lease_id), new), node="greedy")[1]) is FailureCode.NOT_FOUND


def test_a_fetch_whose_lease_has_to_yield_ends() -> None:
    peer = Peer(100)
    parts, (lease_id,) = leased_by_greedy(peer)
    slow, effects = peer.ask(fetch(LeaseId(lease_id), parts), node="greedy")
    slow_lane = only(effects, BindSender).lane
    peer.on(LaneOpened(slow_lane, GRANT))
    modest, modest_lane = peer.start_fetch(parts[:2], node="modest")
    peer.on(LaneOpened(modest_lane, GRANT))
    peer.ask(offer(make_parts(make_chain(16, seed=1))))
    assert peer.service.deadline() == 0.0, "at once"
    effects = peer.on(Tick())
    assert only(effects, CloseLane).lane == slow_lane
    failure = only(effects, SendFailure)
    assert (failure.key, failure.code) == (slow, FailureCode.NOT_FOUND)
    peer.on(LaneFinished(slow_lane, False, "closed", 0))
    assert peer.service.deadline() != 0.0
    assert only(peer.on(UpdateArrived(modest, TransferDone(complete=True))), SendReply).key == modest


def test_what_an_offer_holds_on_to_counts_among_its_nodes_leases() -> None:
    peer = Peer(100)
    parts = make_parts(make_chain(160))
    peer.hold(parts[:9])
    peer.ask(offer(parts), node="greedy")
    assert peer.store.stats().bytes_locked == 90
    new = make_parts(make_chain(48, seed=1))
    peer.start_publish(new)
    assert peer.store.stats().bytes_locked == 0


def test_parts_on_their_way_from_one_peer_are_bounded_and_one_of_any_size_may_come() -> None:
    peer = Peer(1 << 30)
    third = PARTS_ON_THE_WAY_BYTES_MAX // 3
    chains = [make_chain(16, seed=seed) for seed in range(5)]
    metas = [make_parts(chain)[0].meta for chain in chains]
    huge, *offers = [
        offer_metas([replace(meta, length_bytes=third * (10 if n == 0 else 1))]) for n, meta in enumerate(metas)
    ]
    _, effects = peer.ask(huge)
    lane = only(effects, BindReceiver).lane
    _, effects = peer.ask(offers[0])
    assert failure_code(effects) is FailureCode.RESOURCE_EXHAUSTED
    only(peer.ask(huge, node="other")[1], BindReceiver)
    peer.on(LaneFinished(lane, False, "gone", 0))
    for body in offers[:3]:
        only(peer.ask(body)[1], BindReceiver)
    assert failure_code(peer.ask(offers[3])[1]) is FailureCode.RESOURCE_EXHAUSTED


def test_an_identity_has_one_share_whatever_it_calls_itself() -> None:
    peer = Peer(lanes_per_node_max=2)
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    codes = []
    lookup = Lookup(
        fingerprint=FINGERPRINT,
        requirement=FULL,
        block_hashes=pack_hashes([part.meta.block_hash for part in parts]),
        lease_ms=1000,
    )
    for number in range(3):
        name = f"name-{number}"
        reply = only(peer.ask(lookup, node=name, identity=b"i" * 32)[1], SendReply).body
        assert isinstance(reply, LookupReply)
        effects = peer.ask(fetch(LeaseId(reply.lease_id), parts), node=name, identity=b"i" * 32)[1]
        codes.append([effect.code for effect in of(effects, SendFailure)])
    assert codes == [[], [], [FailureCode.RESOURCE_EXHAUSTED]]


def test_lanes_are_bounded_in_all_and_for_one_peer() -> None:
    peer = Peer(lanes_max=3, lanes_per_node_max=2)
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    lanes = [peer.start_fetch(parts, node="a")[1] for _ in range(2)]
    info = peer.store.lease([part.meta.ref for part in parts], 0.0, 1000, fingerprint=FINGERPRINT, owner="asker")
    assert failure_code(peer.ask(fetch(info.lease_id, parts), node="a")[1]) is FailureCode.RESOURCE_EXHAUSTED
    peer.start_fetch(parts, node="b")
    assert failure_code(peer.ask(fetch(info.lease_id, parts), node="c")[1]) is FailureCode.RESOURCE_EXHAUSTED
    unknown = make_parts(make_chain(16, seed=1))
    assert failure_code(peer.ask(offer(unknown), node="c")[1]) is FailureCode.RESOURCE_EXHAUSTED
    peer.on(LaneFinished(lanes[0], False, "broken", 0))
    peer.start_fetch(parts, node="a")


# --- publish -------------------------------------------------------------------------------------------------------


def test_a_publish_from_offer_to_result() -> None:
    peer = Peer()
    parts = make_parts(make_chain(72))
    peer.hold(parts[:2])
    key, effects = peer.ask(offer(parts))
    bind = only(effects, BindReceiver)
    assert bind.expected == tuple(part.meta for part in parts[2:])
    assert bind.chunk_bytes == limits.CHUNK_BYTES_MIN
    (progress,) = peer.on(LaneOpened(bind.lane, GRANT))
    wanted = pack_bitmap([False, False, True, True, True])
    assert progress == SendProgress(key, PublishGrant(wanted=wanted, grant=GRANT, credit_bytes=limits.CREDIT_BYTES_DEFAULT))
    assert peer.on(CreditEarned(bind.lane, 10)) == [SendProgress(key, Credit(credit_bytes=10))]
    assert counts(peer.on(PartsReceived(bind.lane, parts[2:4]))) == {"cache_published_parts": 2}
    effects = peer.on(PartsReceived(bind.lane, parts[3:]))
    assert only(effects, CloseLane).ok
    assert only(effects, SendReply) == SendReply(
        key, PublishResult(stored_parts=3, already_held_parts=2, refused_parts=0, reason="")
    )
    assert all(peer.store.get(part.meta.ref, fingerprint=FINGERPRINT) == part for part in parts)
    assert peer.store.stats().leases == 0
    assert not peer.service.owns_request(key)
    assert peer.on(RequestCancelled(key, "late")) == []
    assert peer.on(LaneFinished(bind.lane, True, "", 30)) == []
    peer.assert_clean()


def test_an_offer_of_what_is_held_is_answered_at_once() -> None:
    peer = Peer()
    parts = make_parts(make_chain(32))
    peer.hold(parts)
    _, effects = peer.ask(offer(parts))
    assert only(effects, SendReply).body == PublishResult(stored_parts=0, already_held_parts=2, refused_parts=0, reason="")
    peer.assert_clean()


def test_the_longest_prefix_that_fits_is_taken() -> None:
    peer = Peer(max_bytes=45)
    parts = make_parts(make_chain(96))
    peer.hold(parts[:2])
    peer.hold(make_parts(make_chain(16, seed=1)))
    key, effects = peer.ask(offer(list(reversed(parts))))
    bind = only(effects, BindReceiver)
    assert {meta.ref for meta in bind.expected} == {part.meta.ref for part in parts[2:4]}
    assert all(peer.store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in parts[:2]), "the prefix they hang on stays"
    assert counts(effects) == {"cache_publishes": 1, "cache_refused_parts": 2}
    peer.on(LaneOpened(bind.lane, GRANT))
    reply = only(peer.on(PartsReceived(bind.lane, parts[2:4])), SendReply)
    assert reply == SendReply(
        key,
        PublishResult(stored_parts=2, already_held_parts=2, refused_parts=2, reason="the store has no room for all of them"),
    )


def test_an_offer_that_contains_a_tail_replaces_it_here_too() -> None:
    peer = Peer()
    tail = make_parts(make_chain(24, seed=4))[1]
    blocks = make_parts(make_chain(32, seed=4))
    peer.hold([blocks[0], tail])
    cut = Cut(
        parent_hash=tail.meta.parent_hash,
        block_hash=tail.meta.block_hash,
        token_count=8,
        within=blocks[1].meta.block_hash,
        within_tokens=16,
        kinds=1,
    )
    offered = msgspec.structs.replace(offer(blocks), cuts=(cut,))
    _, effects = peer.ask(offered)
    lane = only(effects, BindReceiver).lane
    peer.on(LaneOpened(lane, GRANT))
    assert peer.store.has(tail.meta.ref, fingerprint=FINGERPRINT), "not before its rows are there"
    peer.on(PartsReceived(lane, blocks[1:]))
    assert not peer.store.has(tail.meta.ref, fingerprint=FINGERPRINT)
    reply = peer.lookup([blocks[0].meta.block_hash])
    assert (reply.tails, reply.cuts) == ((), (cut,))
    _, effects = peer.ask(fetch(LeaseId(reply.lease_id), [blocks[0], blocks[1]]))
    assert only(effects, BindSender)
    _, effects = peer.ask(offer([tail]))
    result = only(effects, SendReply).body
    assert isinstance(result, PublishResult)
    assert (result.already_held_parts, result.stored_parts) == (1, 0), "the tail is not taken again"
    wrong = msgspec.structs.replace(offered, cuts=(msgspec.structs.replace(cut, within_tokens=15),))
    assert failure_code(peer.ask(wrong)[1]) is FailureCode.INVALID_ARGUMENT


def test_room_is_not_promised_twice_to_one_node() -> None:
    peer = Peer(max_bytes=60)
    peer.start_publish(make_parts(make_chain(64, seed=1)))
    _, effects = peer.ask(offer(make_parts(make_chain(64, seed=2))))
    assert len(only(effects, BindReceiver).expected) == 2, "the first offer counts on 40 of 60 bytes"


def test_an_offer_that_is_never_sent_evicts_nothing_and_counts_on_a_quarter_for_others() -> None:
    peer = Peer(max_bytes=60)
    honest = make_parts(make_chain(96, seed=9))
    peer.hold(honest)
    key, lane = peer.start_publish(make_parts(make_chain(64, seed=1)))
    assert all(peer.store.has(part.meta.ref, fingerprint=FINGERPRINT) for part in honest), "nothing has come yet"
    assert peer.store.stats().bytes_reserved == 0
    _, effects = peer.ask(offer(make_parts(make_chain(64, seed=2))), node="other")
    assert len(only(effects, BindReceiver).expected) == 4, "for others all offers of one node count on 15 of 60 bytes"
    peer.on(PartsReceived(lane, make_parts(make_chain(64, seed=1))[:1]))
    has = peer.store.presence(FINGERPRINT)
    assert sum(has(part.meta.ref) for part in honest) == 5, "what has come makes its own room"
    peer.on(RequestCancelled(key, "gone"))
    _, effects = peer.ask(offer(make_parts(make_chain(64, seed=3))), node="third")
    assert len(only(effects, BindReceiver).expected) == 4


def test_an_offer_for_which_there_is_no_room_is_answered_at_once() -> None:
    peer = Peer(max_bytes=10)
    held = make_parts(make_chain(16, seed=1))
    peer.hold(held)
    peer.store.pin(held[0].meta.ref, fingerprint=FINGERPRINT)
    _, effects = peer.ask(offer(make_parts(make_chain(32))))
    result = only(effects, SendReply).body
    assert isinstance(result, PublishResult)
    assert (result.stored_parts, result.refused_parts) == (0, 2)
    peer.assert_clean()


def test_a_publish_whose_lane_breaks_keeps_what_arrived() -> None:
    peer = Peer()
    parts = make_parts(make_chain(48))
    key, lane = peer.start_publish(parts)
    peer.on(PartsReceived(lane, parts[:1]))
    effects = peer.on(LaneFinished(lane, False, "the sender went silent", 10))
    assert only(effects, SendReply) == SendReply(
        key, PublishResult(stored_parts=1, already_held_parts=0, refused_parts=2, reason="the sender went silent")
    )
    assert peer.store.has(parts[0].meta.ref, fingerprint=FINGERPRINT)
    peer.assert_clean()


def test_a_publish_whose_lane_never_opens_fails() -> None:
    peer = Peer()
    key, effects = peer.ask(offer(make_parts(make_chain(16))))
    lane = only(effects, BindReceiver).lane
    failure = only(peer.on(LaneFinished(lane, False, "no port is free", 0)), SendFailure)
    assert failure == SendFailure(key, FailureCode.UNAVAILABLE, "no port is free")
    peer.assert_clean()


def test_a_cancelled_publish_gives_its_room_back_at_once() -> None:
    peer = Peer()
    parts = make_parts(make_chain(32))
    peer.hold(parts[:1])
    key, lane = peer.start_publish(parts)
    assert peer.store.stats().leases == 1
    peer.on(RequestCancelled(key, "gone"))
    assert (peer.store.stats().bytes_reserved, peer.store.stats().leases) == (0, 0)
    assert peer.on(PartsReceived(lane, parts[1:])) == []
    assert not peer.store.has(parts[1].meta.ref, fingerprint=FINGERPRINT)
    peer.on(LaneFinished(lane, False, "", 0))
    peer.assert_clean()


def test_a_stalled_publish_is_given_up() -> None:
    peer = Peer()
    key, lane = peer.start_publish(make_parts(make_chain(16)))
    peer.now = 10.0
    effects = peer.on(Tick())
    assert only(effects, CloseLane).lane == lane
    assert only(effects, SendFailure).key == key
    assert peer.store.stats().bytes_reserved == 0


def test_a_node_that_keeps_no_offers_takes_a_quarter_of_the_store_from_others_at_most() -> None:
    peer = Peer(max_bytes=400)
    for number in range(8):
        peer.ask(offer(make_parts(make_chain(16 * 30, seed=number))), node="liar")
    _, effects = peer.ask(offer(make_parts(make_chain(16 * 40, seed=99))), node="honest")
    assert len(only(effects, BindReceiver).expected) == 30, "300 of 400 bytes"


def test_what_is_kept_counts_in_full() -> None:
    """A node that is in the middle of a large publish is not crowded out by others that begin one."""
    peer = Peer(max_bytes=400)
    parts = make_parts(make_chain(16 * 40, seed=1))
    _, lane = peer.start_publish(parts)
    peer.on(PartsReceived(lane, parts[:16]))
    _, effects = peer.ask(offer(make_parts(make_chain(16 * 40, seed=2))), node="other")
    # 240 bytes are still to come, 160 came: those once more, and 80 of the quarter.
    assert len(only(effects, BindReceiver).expected) == 16


def test_a_quarter_of_a_quota_is_what_unkept_offers_count_on_there() -> None:
    peer = Peer(quotas={FINGERPRINT: 80})
    peer.ask(offer(make_parts(make_chain(16 * 8, seed=1))), node="liar")
    _, effects = peer.ask(offer(make_parts(make_chain(16 * 8, seed=2))), node="honest")
    assert len(only(effects, BindReceiver).expected) == 6


def test_who_breaks_promises_is_waited_for_less_each_time_until_he_keeps_one_or_time_has_passed() -> None:
    peer = Peer(max_bytes=400, fetch_idle_s=32.0)

    def waited(seed: int, node: str = "liar") -> float:
        """Seconds until an offer of 200 bytes that never comes is given up."""
        began = peer.now
        key, effects = peer.ask(offer(make_parts(make_chain(16 * 20, seed=seed))), node=node)
        lane = only(effects, BindReceiver).lane
        while True:
            peer.now = peer.service.deadline() or 0.0
            ended = [effect for effect in peer.on(Tick()) if isinstance(effect, SendFailure)]
            if ended:
                assert ended[0].key == key
                peer.on(LaneFinished(lane, False, "", 0))
                return peer.now - began

    times = [waited(number) for number in range(6)]
    assert times[0] == 32.0
    assert all(later < earlier for earlier, later in itertools.pairwise(times[:3]))
    assert times[-1] < 12.0
    assert waited(50, "honest") == 32.0
    peer.now += 3600.0
    assert waited(51) == 32.0


def test_what_comes_pays_the_debt_off() -> None:
    promises = Promises(lambda fingerprint: 400, 30.0)
    parts = make_parts(make_chain(16 * 30))
    promises.broken(incoming(parts, "n"), 0.0)
    assert promises.patience(NodeId("n"), 0.0) == 30.0 / 4
    promises.came(NodeId("n"), 200, 0.0)
    assert promises.patience(NodeId("n"), 0.0) == 30.0 / 2
    promises.came(NodeId("n"), 100, 0.0)
    assert promises.patience(NodeId("n"), 0.0) == 30.0
    for _ in range(1000):
        promises.broken(incoming(parts, "n"), 0.0)
    assert promises.patience(NodeId("n"), 0.0) == PATIENCE_S_MIN
    assert promises.patience(NodeId("n"), 10 * FORGIVEN_S * 1000) == 30.0


def test_debts_are_remembered_of_so_many_nodes() -> None:
    promises = Promises(lambda fingerprint: 400, 30.0)
    parts = make_parts(make_chain(16 * 30))
    for number in range(2 * DEBTORS_MAX):
        promises.broken(incoming(parts, f"n{number}"), 0.0)
    assert len(promises._debts) == DEBTORS_MAX


def incoming(parts: Sequence[Part], node: str) -> Incoming:
    return Incoming(
        key=RequestKey((bytes(16), 1)),
        account=node,
        phase=TransferPhase.RUNNING,
        idle_at=0.0,
        fingerprint=FINGERPRINT,
        wanted=b"",
        outstanding={part.meta.ref: part.meta for part in parts},
        held_lease_id=None,
        cuts=(),
        stored=0,
        already_held=0,
        refused=0,
        reason="",
    )


def test_two_publishes_of_the_same_parts_both_succeed() -> None:
    peer = Peer()
    parts = make_parts(make_chain(32))
    first, second = peer.start_publish(parts), peer.start_publish(parts)
    assert only(peer.on(PartsReceived(first[1], parts)), SendReply).key == first[0]
    result = only(peer.on(PartsReceived(second[1], parts)), SendReply).body
    assert result == PublishResult(stored_parts=0, already_held_parts=2, refused_parts=0, reason="")


def test_parts_that_were_not_offered_are_not_stored() -> None:
    peer = Peer()
    parts = make_parts(make_chain(32))
    _, lane = peer.start_publish(parts[:1])
    lying = Part(msgspec.structs.replace(parts[0].meta, length_bytes=3), memoryview(b"abc"))
    assert peer.on(PartsReceived(lane, (parts[1], lying))) == []
    assert peer.store.stats().entry_count == 0


def test_a_namespace_that_is_not_accepted_is_refused() -> None:
    peer = Peer(accepts=lambda fingerprint: False)
    assert failure_code(peer.ask(offer(make_parts(make_chain(16))))[1]) is FailureCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "change",
    [
        {"start": 17},
        {"start": 0},
        {"parent_hash": ROOT_HASH},
        {"block_hash": ROOT_HASH},
        {"length_bytes": 1001},
    ],
)
def test_offers_that_cannot_be_true_are_refused_before_anything_is_reserved(change: dict[str, object]) -> None:
    peer = Peer(part_bytes_max=1000)
    first, second = (part.meta for part in make_parts(make_chain(32)))
    _, effects = peer.ask(offer_metas([first, msgspec.structs.replace(second, **change)]))
    assert failure_code(effects) is FailureCode.INVALID_ARGUMENT
    peer.assert_clean()


def test_offers_that_contradict_themselves_are_refused() -> None:
    peer = Peer()
    full, window = (part.meta for part in make_parts(make_chain(16), kinds=(PartKind.FULL, PartKind.WINDOW)))
    assert failure_code(peer.ask(offer_metas([full, full]))[1]) is FailureCode.INVALID_ARGUMENT
    shorter = msgspec.structs.replace(window, token_count=8)
    assert failure_code(peer.ask(offer_metas([full, shorter]))[1]) is FailureCode.INVALID_ARGUMENT
    huge = [
        msgspec.structs.replace(full, block_hash=number.to_bytes(32, "little"), length_bytes=limits.PART_BYTES_MAX)
        for number in range(1, 66)
    ]
    assert failure_code(peer.ask(offer_metas(huge))[1]) is FailureCode.INVALID_ARGUMENT
    only_aes = Peer(has_aes=False).ask(offer_metas([full], suites=(CipherSuite.AES_256_GCM,)))[1]
    assert failure_code(only_aes) is FailureCode.INVALID_ARGUMENT


def test_what_another_publish_made_untrue_is_refused_when_it_arrives() -> None:
    peer = Peer()
    full, window = make_parts(make_chain(16), kinds=(PartKind.FULL, PartKind.WINDOW))
    _, lane = peer.start_publish([full])
    peer.hold([Part(msgspec.structs.replace(window.meta, token_count=8), window.payload)])
    result = only(peer.on(PartsReceived(lane, (full,))), SendReply).body
    assert isinstance(result, PublishResult)
    assert (result.refused_parts, result.reason) == (1, "the part contradicts what is held")


def test_a_repeated_request_is_not_answered_twice() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    key, _ = peer.start_fetch(parts)
    again = RequestArrived(key, NodeId("asker"), (), ReleaseLease(lease_id=bytes(16)), 60.0)
    assert peer.on(again) == [Count("cache_repeated_requests")]


def test_refs_of_unheld_parts_are_not_found() -> None:
    peer = Peer()
    assert not peer.store.has(PartRef(block_hash=bytes(32), kind=PartKind.FULL), fingerprint=FINGERPRINT)
    assert peer.on(LaneFinished(LaneId(99), True, "", 0)) == []
    assert peer.on(RequestCancelled(RequestKey((bytes(16), 9)), "unknown")) == []
    assert peer.on(UpdateArrived(RequestKey((bytes(16), 9)), Credit(credit_bytes=1))) == []


# --- tenants ---------------------------------------------------------------------------------------------------------

OTHER = b"o" * 32


def test_what_another_namespace_holds_changes_nothing_of_an_offer() -> None:
    peer, parts = Peer(), make_parts(make_chain(48))
    peer.hold(parts)
    _, effects = peer.ask(replace(offer(parts), fingerprint=OTHER))
    assert only(effects, BindReceiver).expected == tuple(part.meta for part in parts)


def test_an_offer_under_way_takes_nothing_of_another_namespaces_quota() -> None:
    peer = Peer(quotas={FINGERPRINT: 40, OTHER: 40})
    first, second = make_parts(make_chain(64)), make_parts(make_chain(64, seed=1))
    assert len(only(peer.ask(offer(first))[1], BindReceiver).expected) == 4
    _, effects = peer.ask(replace(offer(second), fingerprint=OTHER), node="other")
    assert len(only(effects, BindReceiver).expected) == 4
    assert not [effect for effect in peer.ask(offer(second))[1] if isinstance(effect, BindReceiver)], (
        "this quota is promised"
    )


def test_a_lease_is_unknown_to_whom_it_was_not_given() -> None:
    hidden: set[bytes] = set()
    peer = Peer(hides=lambda node, fingerprint: fingerprint in hidden)
    parts = make_parts(make_chain(32))
    peer.hold(parts)
    lease_id = LeaseId(peer.lookup([part.meta.block_hash for part in parts]).lease_id)

    def refusal(node: str, lease: LeaseId) -> tuple[FailureCode, str]:
        failure = only(peer.ask(fetch(lease, parts), node=node)[1], SendFailure)
        return failure.code, failure.message

    assert refusal("thief", lease_id) == refusal("thief", LeaseId(b"z" * 16))
    assert only(peer.ask(ReleaseLease(lease_id=lease_id), node="thief")[1], SendReply).body == Done()
    assert peer.store.stats().leases == 1
    hidden.add(FINGERPRINT)
    assert refusal("asker", lease_id) == refusal("thief", LeaseId(b"z" * 16)), "its tenant was taken from it meanwhile"
    hidden.clear()
    key, effects = peer.ask(fetch(lease_id, parts))
    assert only(effects, BindSender)
    peer.ask(ReleaseLease(lease_id=lease_id))
    peer.on(RequestCancelled(key, "enough"))
    assert peer.store.stats().leases == 0


def test_one_node_cannot_take_all_leases() -> None:
    peer = Peer()
    parts = make_parts(make_chain(16))
    peer.hold(parts)
    hashes = [parts[0].meta.block_hash]
    for _ in range(LEASES_MAX + 1):
        last = peer.lookup(hashes, lease_ms=60_000)
    assert last.lease_id == NO_LEASE
    body = Lookup(fingerprint=FINGERPRINT, requirement=FULL, block_hashes=pack_hashes(hashes), lease_ms=1000)
    reply = only(peer.ask(body, node="other")[1], SendReply).body
    assert isinstance(reply, LookupReply)
    assert reply.lease_id != NO_LEASE


def test_a_namespace_too_many_of_one_node_is_refused_before_anything_is_sent() -> None:
    peer = Peer(max_bytes=10_000)
    (part,) = make_parts(make_chain(16))
    for number in range(NAMESPACES_PER_PUBLISHER_MAX):
        peer.store.put(part, fingerprint=number.to_bytes(32, "big"), now=0.0, publisher="asker")
    result = only(peer.ask(offer([part]))[1], SendReply).body
    assert isinstance(result, PublishResult)
    assert result.refused_parts == 1
    assert only(peer.ask(offer([part]), node="other")[1], BindReceiver)


def test_why_a_lane_could_not_open_is_noted_here_and_what_breaks_later_is_not() -> None:
    """The asker's log has it, too; but the ports are this node's."""
    peer = Peer()
    parts = make_parts(make_chain(16))
    _, effects = peer.ask(offer(parts))
    published = peer.on(LaneFinished(only(effects, BindReceiver).lane, False, "every port is in use", 0))
    peer.hold(parts)
    _, lane = peer.start_fetch(parts)
    fetched = peer.on(LaneFinished(lane, False, "every port is in use", 0))
    for ended in (published, fetched):
        assert only(ended, Note) == Note("warning", "a transfer could not be opened: every port is in use")
    _, lane = peer.start_fetch(parts)
    peer.on(LaneOpened(lane, GRANT))
    assert of(peer.on(LaneFinished(lane, False, "the asker went silent", 0)), Note) == []
    peer.assert_clean()
