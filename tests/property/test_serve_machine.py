"""Random interleavings of peers, lanes, time and a shared store around the cache service.

A model of the host checks every effect: lanes are bound once, fed and credited only while open, closed at most once;
requests are answered at most once and never after a cancel. At the end everything is drained: every request has ended and
nothing is left behind in the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kakeya_zmq.blocks import Part
from kakeya_zmq.protocol.effects import (
    AddCredit,
    BindReceiver,
    BindSender,
    CloseLane,
    Count,
    CreditEarned,
    FeedSender,
    HostEvent,
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
from kakeya_zmq.store import BlockStore
from tests.chains import FINGERPRINT, CountingBytes, make_chain, make_parts
from wire import limits
from wire.codec import pack_hashes, unpack_bitmap
from wire.errors import CapacityError
from wire.ids import LeaseId, NodeId
from wire.messages import (
    CipherSuite,
    Credit,
    Fetch,
    Lookup,
    LookupReply,
    PartKind,
    PartMeta,
    PartRef,
    PublishGrant,
    PublishOffer,
    ReleaseLease,
    RequestBody,
    Requirement,
    TransferDone,
    TransferGrant,
)

KINDS = (PartKind.FULL, PartKind.WINDOW)
CHAINS = [make_chain(16 * (1 + seed % 4) + 3 * (seed % 3), seed=seed, shared_tokens=16) for seed in range(6)]
CONTENT: dict[PartRef, Part] = {}
"""One content for each part, also for the blocks that chains share; lengths differ from chain to chain."""
for _index, _chain in enumerate(CHAINS):
    for _part in make_parts(_chain, length_bytes=5 + _index, kinds=KINDS):
        CONTENT.setdefault(_part.meta.ref, _part)
PARTS = [
    tuple(CONTENT[PartRef(block_hash=block.block_hash, kind=kind)] for block in chain.blocks for kind in KINDS)
    for chain in CHAINS
]
REQUIREMENT = Requirement(block_tokens=16, full=True, window_tokens=20)
GRANT = TransferGrant(
    transfer_id=bytes(16),
    port=1,
    token="0" * 32,
    key=bytes(32),
    suite=CipherSuite.SECRETBOX,
    chunk_bytes=limits.CHUNK_BYTES_MIN,
)
LANES_MAX = 4

chains = st.integers(0, len(CHAINS) - 1)
pick = st.integers(0, 1 << 16)


class Lane:
    """The host's view of one lane."""

    def __init__(self, expected: tuple[PartMeta, ...] | None) -> None:
        self.expected = expected  # None: a sender
        self.opened = self.closed = self.fed = False


class ServeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = BlockStore(150, random_bytes=CountingBytes())
        numbers = (LaneId(number) for number in itertools.count(1))
        self.service = CacheService(
            self.store, lanes=numbers.__next__, has_aes=False, fetch_idle_s=5.0, lanes_max=LANES_MAX, lanes_per_node_max=3
        )
        self.next_request = 0
        self.open: set[RequestKey] = set()
        self.ended: list[RequestKey] = []
        self.lanes: dict[LaneId, Lane] = {}
        self.lease_ids: list[LeaseId] = []

    # --- the host --------------------------------------------------------------------------------------------------

    def send(self, event: HostEvent) -> None:
        for effect in self.service.on(event, self.now):
            match effect:
                case SendReply(key=key, body=body):
                    self.end(key)
                    if isinstance(body, LookupReply) and body.lease_id != NO_LEASE:
                        self.lease_ids.append(LeaseId(body.lease_id))
                case SendFailure(key=key, message=message):
                    self.end(key)
                    assert 0 < len(message) <= limits.TEXT_CHARACTERS_MAX
                case SendProgress(key=key, body=body):
                    assert key in self.open
                    if isinstance(body, PublishGrant):
                        assert body.grant == GRANT
                case BindSender(lane=lane):
                    assert lane not in self.lanes
                    self.lanes[lane] = Lane(None)
                case BindReceiver(lane=lane, expected=expected):
                    assert lane not in self.lanes
                    assert expected
                    self.lanes[lane] = Lane(expected)
                case FeedSender(lane=lane, parts=parts, final=final):
                    assert not self.lanes[lane].fed
                    assert final
                    assert all(CONTENT[part.meta.ref].payload == part.payload for part in parts)
                    self.lanes[lane].fed = True
                case AddCredit(lane=lane):
                    assert self.lanes[lane].fed
                case CloseLane(lane=lane):
                    if lane in self.lanes:  # else it crossed with LaneFinished
                        assert not self.lanes[lane].closed
                        self.lanes[lane].closed = True
                case Count(amount=amount):
                    assert amount >= 0
                case Note(level=level):
                    assert level == "warning"
                case _:
                    raise AssertionError(f"an effect this machine has no use for: {type(effect).__name__}")

    def end(self, key: RequestKey) -> None:
        assert key in self.open, "answered twice, after a cancel, or never asked"
        self.open.remove(key)
        self.ended.append(key)

    def ask(self, body: RequestBody, node: int) -> None:
        self.next_request += 1
        key = RequestKey((bytes(16), self.next_request))
        self.open.add(key)
        self.send(RequestArrived(key, NodeId(f"node {node}"), (), body, self.now + 60))
        if not isinstance(body, Fetch | PublishOffer):
            assert key not in self.open, "answered at once"

    def choose_lane(self, choice: int) -> tuple[LaneId, Lane]:
        return list(self.lanes.items())[choice % len(self.lanes)]

    def choose_key(self, choice: int) -> RequestKey:
        """Open ones as well as ones that have ended."""
        keys = [*sorted(self.open), *self.ended[-3:]]
        return keys[choice % len(keys)] if keys else RequestKey((bytes(16), 1 << 40))

    # --- what peers do ---------------------------------------------------------------------------------------------

    @rule(chain=chains, lease_ms=st.integers(0, 8000), node=st.integers(0, 1))
    def lookup(self, chain: int, lease_ms: int, node: int) -> None:
        hashes = pack_hashes([block.block_hash for block in CHAINS[chain].blocks if block.token_count == 16])
        body = Lookup(fingerprint=FINGERPRINT, requirement=REQUIREMENT, block_hashes=hashes, lease_ms=lease_ms)
        self.ask(body, node)

    @rule(chain=chains, choice=pick, node=st.integers(0, 1), count=st.integers(1, 6))
    def fetch(self, chain: int, choice: int, node: int, count: int) -> None:
        lease_id = self.lease_ids[choice % len(self.lease_ids)] if self.lease_ids else LeaseId(b"x" * 16)
        refs = tuple(filter(self.store.presence(FINGERPRINT), (part.meta.ref for part in PARTS[chain][:count])))
        if refs:
            self.ask(
                Fetch(
                    lease_id=lease_id,
                    parts=refs,
                    suites=(CipherSuite.SECRETBOX,),
                    chunk_bytes_max=limits.CHUNK_BYTES_MIN,
                    credit_bytes=limits.CHUNK_BYTES_MIN - 1 + choice % 8,
                ),
                node,
            )

    @rule(chain=chains, first=st.integers(0, 3), node=st.integers(0, 1), shuffle=st.randoms(use_true_random=False))
    def publish(self, chain: int, first: int, node: int, shuffle: object) -> None:
        metas = [part.meta for part in PARTS[chain][first:]]
        if metas:
            shuffle.shuffle(metas)  # type: ignore[attr-defined]
            self.ask(
                PublishOffer(
                    fingerprint=FINGERPRINT,
                    parts=tuple(metas),
                    suites=(CipherSuite.AES_256_GCM, CipherSuite.SECRETBOX),
                    chunk_bytes_max=limits.CHUNK_BYTES_MIN,
                ),
                node,
            )

    @rule(choice=pick, node=st.integers(0, 1))
    def release_lease(self, choice: int, node: int) -> None:
        if self.lease_ids:
            self.ask(ReleaseLease(lease_id=self.lease_ids[choice % len(self.lease_ids)]), node)

    @rule(choice=pick, credit=st.booleans(), complete=st.booleans())
    def update(self, choice: int, credit: bool, complete: bool) -> None:
        body = Credit(credit_bytes=1) if credit else TransferDone(complete=complete)
        self.send(UpdateArrived(self.choose_key(choice), body))

    @rule(choice=pick)
    def cancel(self, choice: int) -> None:
        key = self.choose_key(choice)
        self.open.discard(key)
        self.send(RequestCancelled(key, "the peer has gone"))
        self.ended.append(key)

    # --- what lanes do ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.lanes)
    @rule(choice=pick)
    def lane_opens(self, choice: int) -> None:
        lane, state = self.choose_lane(choice)
        if not state.opened:
            state.opened = True
            self.send(LaneOpened(lane, GRANT))

    @precondition(lambda self: self.lanes)
    @rule(choice=pick, count=st.integers(1, 8), backwards=st.booleans())
    def parts_arrive(self, choice: int, count: int, backwards: bool) -> None:
        lane, state = self.choose_lane(choice)
        if state.opened and state.expected:
            cut = len(state.expected) - count if backwards else count
            now = state.expected[max(0, cut) :] if backwards else state.expected[:cut]
            state.expected = tuple(meta for meta in state.expected if meta not in now)
            self.send(CreditEarned(lane, 1))
            self.send(PartsReceived(lane, tuple(Part(meta, CONTENT[meta.ref].payload) for meta in now)))

    @precondition(lambda self: self.lanes)
    @rule(choice=pick, ok=st.booleans())
    def lane_finishes(self, choice: int, ok: bool) -> None:
        lane, state = self.choose_lane(choice)
        all_received = state.expected == ()
        del self.lanes[lane]
        self.send(LaneFinished(lane, all_received or (ok and state.fed), "" if ok else "it broke", 0))

    # --- what else happens -----------------------------------------------------------------------------------------

    @rule(seconds=st.floats(0.0, 4.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick())

    @rule(chain=chains, count=st.integers(1, 8))
    def the_node_stores_its_own(self, chain: int, count: int) -> None:
        for part in PARTS[chain][:count]:
            try:
                self.store.put(part, fingerprint=FINGERPRINT, now=self.now)
            except CapacityError:  # leases and reservations have it all
                break

    @rule(chain=chains, count=st.integers(1, 8))
    def parts_go_bad(self, chain: int, count: int) -> None:
        for part in PARTS[chain][:count]:
            self.store.invalidate(part.meta.ref, fingerprint=FINGERPRINT)

    # --- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def lanes_are_bounded_and_known(self) -> None:
        assert self.service.lane_count == len(self.lanes) <= LANES_MAX
        assert all(self.service.owns_lane(lane) for lane in self.lanes)

    @invariant()
    def every_open_request_has_a_lane_that_will_end_it(self) -> None:
        running = [lane for lane, state in self.lanes.items() if not state.closed]
        assert len(self.open) == len(running)
        assert all(self.service.owns_request(key) for key in self.open)

    @invariant()
    def reservations_belong_to_open_publishes(self) -> None:
        stats = self.store.stats()
        receiving = [state for state in self.lanes.values() if state.expected is not None and not state.closed]
        assert receiving or stats.bytes_reserved == 0
        assert stats.bytes_used + stats.bytes_reserved <= stats.max_bytes

    @invariant()
    def the_deadline_lies_ahead(self) -> None:
        self.send(Tick())
        deadline = self.service.deadline()
        assert deadline is None or deadline > self.now

    def teardown(self) -> None:
        for _ in range(1000):
            deadline = self.service.deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            self.send(Tick())
        assert self.service.deadline() is None
        assert not self.open, "the idle time ends whatever nobody else ends"
        for lane in list(self.lanes):
            del self.lanes[lane]
            self.send(LaneFinished(lane, False, "drained", 0))
        stats = self.store.stats()
        assert (self.service.lane_count, stats.leases, stats.bytes_locked, stats.bytes_reserved) == (0, 0, 0, 0)


TestServeMachine = ServeMachine.TestCase
TestServeMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_wanted_bitmaps_name_what_is_expected() -> None:
    """The bitmap of a grant and the lane's expectation are the same thing, told to two sides."""
    store = BlockStore(1000, random_bytes=CountingBytes())
    service = CacheService(store, lanes=lambda: LaneId(1), has_aes=True)
    parts: Sequence[Part] = PARTS[3]
    store.put(parts[2], fingerprint=FINGERPRINT, now=0.0)
    key = RequestKey((bytes(16), 1))
    offer = PublishOffer(
        fingerprint=FINGERPRINT,
        parts=tuple(part.meta for part in parts),
        suites=(CipherSuite.SECRETBOX,),
        chunk_bytes_max=limits.CHUNK_BYTES_MIN,
    )
    effects = service.on(RequestArrived(key, NodeId("a"), (), offer, 60.0), 0.0)
    (bind,) = (effect for effect in effects if isinstance(effect, BindReceiver))
    (progress,) = service.on(LaneOpened(bind.lane, GRANT), 0.0)
    assert isinstance(progress, SendProgress)
    assert isinstance(progress.body, PublishGrant)
    wanted = unpack_bitmap(progress.body.wanted, len(parts))
    assert bind.expected == tuple(part.meta for part, want in zip(parts, wanted, strict=True) if want)
