"""What one tenant does at a cache changes nothing of what another one is answered, although both use the same block hashes.

Two runs of the same requests, one with another tenant's in between: every answer must be the same. Room is plenty: that
a full store evicts what others have is what quotas are for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya_zmq.blocks import Part
from kakeya_zmq.protocol.effects import (
    BindReceiver,
    BindSender,
    Effect,
    FeedSender,
    LaneFinished,
    LaneId,
    LaneOpened,
    PartsReceived,
    RequestArrived,
    RequestKey,
    SendFailure,
    SendProgress,
    SendReply,
)
from kakeya_zmq.protocol.serve import CacheService
from kakeya_zmq.store import BlockStore
from tests.chains import CountingBytes, make_chain, make_parts
from tests.property.test_serve_machine import GRANT
from wire import limits
from wire.codec import pack_hashes
from wire.ids import LeaseId, NodeId
from wire.messages import (
    CipherSuite,
    Cut,
    Fetch,
    Lookup,
    LookupReply,
    PartKind,
    PublishGrant,
    PublishOffer,
    RequestBody,
    Requirement,
)

RED, BLUE = b"r" * 32, b"b" * 32
TENANTS = {"red": RED, "blue": BLUE}
KINDS = (PartKind.FULL, PartKind.WINDOW)
CHAINS = [make_chain(tokens, seed=seed, shared_tokens=16) for seed, tokens in ((0, 60), (1, 48), (1, 41), (2, 20))]
REQUIREMENT = Requirement(block_tokens=16, full=True, window_tokens=20)

Step = tuple[str, str, int, int]
"""Who, what, of which chain, an argument."""
steps = st.tuples(
    st.sampled_from(["red", "blue"]),
    st.sampled_from(["publish", "publish garbage", "publish and stop", "look up", "fetch", "cut"]),
    st.integers(0, len(CHAINS) - 1),
    st.integers(0, 3),
)


class Cache:
    """A cache service whose lanes work at once."""

    def __init__(self) -> None:
        self.store = BlockStore(1 << 30, random_bytes=CountingBytes())
        lanes = (LaneId(number) for number in itertools.count(1))
        self.service = CacheService(
            self.store,
            lanes=lanes.__next__,
            has_aes=False,
            hides=lambda node, fingerprint: TENANTS[node] != fingerprint,
        )
        self.requests = 0
        self.leases: dict[str, LeaseId] = {}

    def ask(self, who: str, body: RequestBody) -> list[Effect]:
        self.requests += 1
        key = RequestKey((bytes(16), self.requests))
        return self.service.on(RequestArrived(key, NodeId(who), (), body, 60.0), 0.0)

    def step(self, who: str, what: str, chain: int, argument: int) -> list[object]:
        """What ``who`` can see of the answer."""
        parts = make_parts(CHAINS[chain], kinds=KINDS)
        match what:
            case "look up":
                hashes = pack_hashes([block.block_hash for block in CHAINS[chain].blocks])
                body = Lookup(fingerprint=TENANTS[who], requirement=REQUIREMENT, block_hashes=hashes, lease_ms=60_000)
                effects = self.ask(who, body)
            case "fetch":
                effects = self._fetch(who, parts[argument:])
            case "publish garbage":
                effects = self._publish(who, [_garbage(part) for part in parts[argument:]])
            case "cut":
                effects = self._publish(who, parts, cuts=_cuts(chain))
            case _:
                effects = self._publish(who, parts[argument:], stop_after=argument if what.endswith("stop") else None)
        for effect in effects:
            if isinstance(effect, SendReply) and isinstance(effect.body, LookupReply):
                self.leases[who] = LeaseId(effect.body.lease_id)
        return [_seen(effect) for effect in effects]

    def _publish(
        self, who: str, parts: Sequence[Part], *, stop_after: int | None = None, cuts: tuple[Cut, ...] = ()
    ) -> list[Effect]:
        metas = tuple(part.meta for part in parts)
        offer = PublishOffer(
            fingerprint=TENANTS[who],
            parts=metas,
            suites=(CipherSuite.SECRETBOX,),
            chunk_bytes_max=limits.CHUNK_BYTES_MIN,
            cuts=cuts,
        )
        effects = self.ask(who, offer)
        lane = next((effect.lane for effect in effects if isinstance(effect, BindReceiver)), None)
        if lane is None:
            return effects
        wanted = {meta.ref for effect in effects if isinstance(effect, BindReceiver) for meta in effect.expected}
        coming = [part for part in parts if part.meta.ref in wanted][:stop_after]
        effects += self.service.on(LaneOpened(lane, GRANT), 0.0)
        effects += self.service.on(PartsReceived(lane, tuple(coming)), 0.0)
        return effects + self.service.on(LaneFinished(lane, True, "", 0), 0.0)

    def _fetch(self, who: str, parts: Sequence[Part]) -> list[Effect]:
        """Under the own lease, and under the other tenant's, if it is known by some mistake."""
        effects: list[Effect] = []
        other = next(name for name in TENANTS if name != who)
        for lease_id in (self.leases.get(who), self.leases.get(other), LeaseId(b"x" * 16)):
            body = Fetch(
                lease_id=lease_id or LeaseId(b"y" * 16),
                parts=tuple(part.meta.ref for part in parts) or (make_parts(CHAINS[0])[0].meta.ref,),
                suites=(CipherSuite.SECRETBOX,),
                chunk_bytes_max=limits.CHUNK_BYTES_MIN,
                credit_bytes=1,
            )
            answered = self.ask(who, body)
            lane = next((effect.lane for effect in answered if isinstance(effect, BindSender)), None)
            effects += answered
            if lane is not None:
                effects += self.service.on(LaneOpened(lane, GRANT), 0.0)
                effects += self.service.on(LaneFinished(lane, True, "", 0), 0.0)
        return effects


def _garbage(part: Part) -> Part:
    """Other bytes at another place, under the same name: the right block can't be stored beside it."""
    payload = bytes(part.payload)[::-1] + b"!"
    meta = msgspec.structs.replace(part.meta, length_bytes=len(payload), parent_hash=b"?" * 32, start=1600)
    return Part(meta, memoryview(payload))


def _cuts(chain: int) -> tuple[Cut, ...]:
    """A made-up beginning of each block, and the last block of another chain as the beginning of the first one."""
    tail = CHAINS[(chain + 1) % len(CHAINS)].blocks[-1].block_hash
    return tuple(
        Cut(
            parent_hash=block.parent_hash,
            block_hash=tail if block.start == 0 else bytes([block.start]) * 32,
            token_count=block.token_count - 1,
            within=block.block_hash,
            within_tokens=block.token_count,
            kinds=1,
        )
        for block in CHAINS[chain].blocks
    )


def _seen(effect: Effect) -> object:
    """An effect without the random names in it; the epoch tells of the whole store, as a card does."""
    match effect:
        case SendReply(body=LookupReply() as reply):
            return msgspec.structs.replace(reply, epoch=0, lease_id=bytes(16) if not any(reply.lease_id) else b"x" * 16)
        case SendReply(body=body) | SendProgress(body=PublishGrant() as body):
            return body
        case SendFailure(code=code, message=message):
            return code, message
        case BindReceiver(expected=expected):
            return expected
        case FeedSender(parts=parts):
            return [(part.meta, bytes(part.payload)) for part in parts]
        case _:
            return type(effect).__name__


@settings(max_examples=150, deadline=None)
@given(history=st.lists(steps, max_size=14))
def test_answers_do_not_depend_on_another_tenant(history: list[Step]) -> None:
    together, alone = Cache(), Cache()
    for who, what, chain, argument in history:
        seen = together.step(who, what, chain, argument)
        if who == "blue":
            assert seen == alone.step(who, what, chain, argument)
    usage = together.store.usage_by_fingerprint()
    assert usage.get(BLUE, 0) == alone.store.usage_by_fingerprint().get(BLUE, 0)


def test_the_comparison_can_tell_a_difference() -> None:
    """The same steps by one tenant are answered differently when it has published before."""
    fresh, used = Cache(), Cache()
    used.step("blue", "publish", 0, 0)
    for what in ("publish", "look up", "publish garbage"):
        assert fresh.step("blue", what, 0, 0) != used.step("blue", what, 0, 0)
        fresh = Cache()
