"""Gathering: ask cache holders what they hold of a prefix, and fetch the parts that are missing.

Rules
 1. All peers are asked at once. Nobody waits for a slow one: fetching begins as soon as what is known covers the whole
    prompt, or the open lookups have been awaited for as long as the best answer they could give would save, and at the
    lookup timeout at the latest. What is answered later tells where to go when a fetch fails.
 2. Only missing parts are fetched, from the peer with the best link that holds them, side by side when they lie apart.
 3. A fetch that fails costs its peer the trust of this prompt; what arrived is kept, and the rest is planned anew over those
    that are left: another peer, or else a shorter prefix. A peer that no longer has what it had announced, and says so, is
    only not asked for that again.
 4. Whatever happens, the stage ends by ``lookup_timeout_s + fetch_timeout_s``. Before that a peer is left when the next best
    way (another peer, a worker, computing here) would have won by now; what it has sent is kept (see .hedge).
 5. Nothing is fetched that a worker or this machine would bring sooner (see .routes).

Theory of operation: ``LOOKING → FETCHING → FINISHED``. Each time something changes, ``_plan`` looks for the deepest position
that parts at hand and parts of trusted peers can build; if parts of it are neither at hand nor on their way, it asks for
them; if nothing is missing, the stage is finished. A finished fetch leaves its ask open until the peer's TransferResult
arrives or the preparation ends, which nobody waits for. Leases are released without waiting for an answer: those asks are
the only ones that may outlive the machine.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import TypeAlias

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.blocks import ROOT_HASH
from kakeya_zmq.coverage import best_boundary, describe_gap
from kakeya_zmq.planner import MeasuredRates, decide_link_codec
from kakeya_zmq.protocol.effects import (
    NO_CONNECTION,
    UNREACHED_PORT,
    Ask,
    AskFailed,
    AskId,
    AskProgressed,
    AskReplied,
    CancelAsk,
    CloseLane,
    ConnectReceiver,
    Count,
    CreditEarned,
    Effect,
    HostEvent,
    LaneFinished,
    PartsReceived,
    SendUpdate,
    WantedPart,
)
from kakeya_zmq.protocol.estimates import LinkShare
from kakeya_zmq.protocol.gather_choice import GatherChoice
from kakeya_zmq.protocol.gather_peer import NO_LEASE, Peer, PeerFetch, link_order
from kakeya_zmq.protocol.hedge import OBSERVE_MIN_S, Watch
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask, TailHash
from wire import limits
from wire.codec import pack_hashes
from wire.errors import FailureCode, RemoteProtocolError
from wire.messages import (
    Credit,
    Cut,
    Fetch,
    LinkCodec,
    Lookup,
    LookupReply,
    PartRef,
    ReleaseLease,
    SourceKind,
    Tail,
    TransferDone,
    TransferGrant,
)

LINK_SAMPLE_BYTES_MIN = 256 * limits.KIB
"""A smaller transfer measures the handshake, not the link."""


_NOT_THERE = frozenset({FailureCode.NOT_FOUND, FailureCode.FAILED_PRECONDITION})
"""Answers to a fetch that blame its parts, not its peer."""
Shares: TypeAlias = list[tuple[Peer, tuple[PartRef, ...]]]
"""Which peer is to deliver what."""


class GatherPhase(enum.Enum):
    IDLE = enum.auto()
    LOOKING = enum.auto()
    FETCHING = enum.auto()
    FINISHED = enum.auto()


class Gathering:
    """Bring the missing parts of the deepest known position into ``holdings``.

    Args:
        task: the preparation's.
        holdings: where parts go.
        ids: numbers for asks and lanes.
        rates: measured; link rates are added.
        hash_tail: hashes the prompt's own tokens, to match tails of other prompts.
        floor: tokens that are there without asking anybody.
    """

    def __init__(
        self,
        task: PreparationTask,
        holdings: Holdings,
        ids: IdAllocator,
        rates: MeasuredRates,
        hash_tail: TailHash,
        floor: int,
    ) -> None:
        self._task = task
        self._settings = task.settings
        self._holdings = holdings
        self._ids = ids
        self._rates = rates
        self._hash_tail = hash_tail
        self._floor = floor
        views = sorted(task.caches, key=link_order)[: self._settings.peers_max]
        self._peers = [Peer(view) for view in views]
        self._workers = {worker.node_id for worker in task.workers}
        self._choice = GatherChoice(task, holdings, rates, floor)
        self._lookup_began = 0.0
        self._patience_deadline = math.inf
        block_tokens = task.facts.requirement.block_tokens
        self._asked = tuple(block for block in task.chain.blocks if block.token_count == block_tokens)
        self._ends = {ROOT_HASH: 0} | {block.block_hash: block.end for block in self._asked}
        self._closing: set[AskId] = set()
        self._stage_deadline = 0.0
        self.aim: Reach | None = None
        """What the fetches under way are to make possible; None while nothing is fetched."""
        self.phase = GatherPhase.IDLE

    @property
    def finished(self) -> bool:
        return self.phase is GatherPhase.FINISHED

    def deadline(self) -> float | None:
        if self.phase not in (GatherPhase.LOOKING, GatherPhase.FETCHING):
            return None
        if self.phase is GatherPhase.LOOKING:
            return min(self._stage_deadline, self._patience_deadline)
        fetches = [peer.fetch for peer in self._peers if peer.fetch is not None]
        waiting = (fetch.grant_deadline for fetch in fetches if fetch.lane is None)
        return min((self._stage_deadline, *waiting, *(fetch.check_at for fetch in fetches)))

    def remaining_s(self, now: float) -> float:
        """Projected time until what is being fetched has come; 0 when nothing is."""
        return max((peer.fetch.watch.remaining_s(now) for peer in self._peers if peer.fetch is not None), default=0.0)

    def owns(self, event: HostEvent) -> bool:
        """Whether the event belongs to a lookup or fetch that is still open here."""
        match event:
            case AskReplied(ask=ask) | AskProgressed(ask=ask) | AskFailed(ask=ask):
                return ask in self._closing or any(peer.owns(ask) for peer in self._peers)
            case PartsReceived(lane=lane) | CreditEarned(lane=lane) | LaneFinished(lane=lane):
                return any(peer.fetch is not None and peer.fetch.lane == lane for peer in self._peers)
            case _:
                return False

    def start(self, now: float) -> list[Effect]:
        self.phase = GatherPhase.LOOKING
        self._lookup_began = now
        self._stage_deadline = now + self._settings.lookup_timeout_s
        body = Lookup(
            fingerprint=self._task.fingerprint,
            requirement=self._task.facts.requirement,
            block_hashes=pack_hashes([block.block_hash for block in self._asked]),
            lease_ms=self._task.stages_ms,
        )
        effects: list[Effect] = []
        self._peers = [peer for peer in self._peers if not self._left_alone(peer, now)]
        for peer in self._peers:
            peer.lookup = self._ids.ask()
            effects.append(Ask(peer.lookup, peer.view.node_id, body, self._settings.lookup_timeout_s))
        return [*effects, *self._after_lookup(now)]

    def _left_alone(self, peer: Peer, now: float) -> bool:
        """Whether nothing could be fetched from a peer anyway; one that must help is asked all the same."""
        why = self._rates.backoff.left_alone(peer.view.node_id, now, Trouble.BULK_PORT)
        self._holdings.reason(f"{peer.name} is {why}" if why else "")
        return bool(why) and not self._task.remote_required

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case AskReplied(ask=ask) | AskFailed(ask=ask) if ask in self._closing:
                self._closing.discard(ask)
            case AskReplied() | AskFailed() | AskProgressed():
                effects = self._ask_event(event, now)
            case PartsReceived() | CreditEarned() | LaneFinished():
                effects = self._lane_event(event, now)
            case _:
                pass
        due = self.deadline()
        if due is not None and now >= due:
            effects += self._expire(now)
        return effects

    def cancel(self, now: float) -> list[Effect]:
        """Leave nothing open; also called when the preparation ends."""
        effects: list[Effect] = list(self._drop_lookups())
        for peer in self._peers:
            effects += self._drop_fetch(peer, "no longer wanted")
        effects += [CancelAsk(ask) for ask in sorted(self._closing)]
        self._closing.clear()
        effects += self._release_leases()
        self.phase = GatherPhase.FINISHED
        return effects

    # --- lookup ------------------------------------------------------------------------------------------------------

    def _ask_event(self, event: AskReplied | AskProgressed | AskFailed, now: float) -> list[Effect]:
        for peer in self._peers:
            if peer.lookup == event.ask:
                return self._lookup_event(peer, event, now)
            if peer.fetch is not None and peer.fetch.ask == event.ask:
                return self._fetch_event(peer, peer.fetch, event, now)
        return []

    def _lookup_event(self, peer: Peer, event: AskReplied | AskProgressed | AskFailed, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.phase is not GatherPhase.LOOKING and not isinstance(event, AskProgressed):
            return self._late_lookup(peer, event)
        match event:
            case AskReplied(body=LookupReply() as reply):
                peer.lookup = None
                try:
                    self._note_presence(peer, reply)
                except RemoteProtocolError:  # a peer that breaks the protocol is not asked again for this prompt
                    effects = self._distrust(peer, "broke the protocol in its lookup reply")
            case AskReplied():
                peer.lookup = None
                effects = self._distrust(peer, "answered a lookup with something else")
            case AskFailed(code=code):
                peer.lookup = None
                effects = self._distrust(peer, f"lookup failed ({_words(code.name)})")
            case AskProgressed():
                return []
        return [*effects, *self._after_lookup(now)]

    def _late_lookup(self, peer: Peer, event: AskReplied | AskFailed) -> list[Effect]:
        """An answer that nobody waited for: it tells whom to ask when a fetch fails, and its lease is to be given back."""
        peer.lookup = None
        if not isinstance(event, AskReplied) or not isinstance(event.body, LookupReply):
            return []
        if self.phase is GatherPhase.FINISHED:
            peer.lease_id = event.body.lease_id
            return self._release_leases()
        try:
            self._note_presence(peer, event.body)
        except RemoteProtocolError:
            return self._distrust(peer, "broke the protocol in its lookup reply")
        return []

    def _note_presence(self, peer: Peer, reply: LookupReply) -> None:
        for tail in peer.take_reply(reply, self._asked, self._ends, self._is_own_tokens):
            self._holdings.add_tail(tail)
        self._holdings.note_known(peer.has, self._hash_tail)
        if peer.view.node_id in self._workers:
            boundary = best_boundary(self._task.chain, self._task.facts.requirement, peer.has)
            self._holdings.held_by[peer.view.node_id] = boundary

    def _is_own_tokens(self, tail: Tail | Cut) -> bool:
        """Whether the tail's tokens are the prompt's own: only the hash of our own tokens can tell."""
        start = self._ends.get(tail.parent_hash)
        if start is None or start + tail.token_count > self._task.target:
            return False
        if self._hash_tail(tail.parent_hash, start, tail.token_count) == tail.block_hash:
            return True
        self._holdings.note_branch(start)
        return False

    def _after_lookup(self, now: float) -> list[Effect]:
        if self.phase is not GatherPhase.LOOKING:
            return []
        waiting = [peer for peer in self._peers if peer.lookup is not None]
        if waiting:
            self._patience_deadline = self._lookup_began + self._patience_s(waiting)
            if self._patience_deadline > now:
                return []
            self._note_left(waiting)
        return self._begin_fetching(now)

    def _patience_s(self, waiting: list[Peer]) -> float:
        reach = self._reach()
        known = _links(self._shares(reach))
        return self._choice.patience_s(known, reach.position, [peer.view for peer in waiting])

    def _note_left(self, waiting: list[Peer]) -> None:
        if self._reach().position < self._holdings.importable.tokens:
            names = ", ".join(peer.name for peer in waiting)
            self._holdings.reason(f"{names} had not answered when waiting could save nothing any more")

    def _begin_fetching(self, now: float) -> list[Effect]:
        self.phase = GatherPhase.FETCHING
        self._stage_deadline = now + self._settings.fetch_timeout_s
        return self._plan(now)

    def _drop_lookups(self) -> list[Effect]:
        effects: list[Effect] = []
        for peer in self._peers:
            if peer.lookup is not None:
                effects.append(CancelAsk(peer.lookup))
                peer.lookup = None
        return effects

    # --- fetch -------------------------------------------------------------------------------------------------------

    def _available(self, ref: PartRef) -> bool:
        return self._holdings.has(ref) or any(peer.has(ref) for peer in self._peers)

    def _reach(self) -> Reach:
        return self._holdings.reach(self._available)

    def _plan(self, now: float) -> list[Effect]:
        """Ask for what the deepest position lacks; finish when nothing is lacking, nothing is left, or it does not pay."""
        reach = self._reach()
        # Without a peer that failed, what it held looks as if it had never been stored.
        if reach.position < self._task.target and all(peer.trusted for peer in self._peers):
            gap = describe_gap(self._holdings.importable, self._task.facts.requirement, self._available, reach.position)
            self._holdings.reason(f"known cache contents end at token {reach.position}: {gap}" if gap else "")
        if reach.position <= self._floor or not self._holdings.missing(reach):
            return self._finish()
        shares = self._shares(reach)
        if shares and not self._choice.fetch_pays(_links(shares), reach.position):
            return self._finish()
        self.aim = reach
        self._holdings.hold(reach, now)
        effects: list[Effect] = []
        for peer, refs in shares:
            if peer.fetch is None:
                effects += self._begin_fetch(peer, refs, now)
        return effects

    def _shares(self, reach: Reach) -> Shares:
        """Who is to deliver what of ``reach`` is neither at hand nor on its way."""
        on_the_way = {ref for peer in self._peers if peer.fetch is not None for ref in peer.fetch.refs}
        return self._assign(ref for ref in self._holdings.missing(reach) if ref not in on_the_way)

    def _assign(self, refs: Iterable[PartRef]) -> Shares:
        shares: dict[int, list[PartRef]] = {}
        for ref in refs:
            holders = [index for index, peer in enumerate(self._peers) if peer.has(ref)]
            # Peers are in link order; one that is busy with an earlier fetch would only be asked after it.
            index = min(holders, key=lambda index: (self._peers[index].fetch is not None, index))
            shares.setdefault(index, []).append(ref)
        return [(self._peers[index], tuple(found[: limits.PARTS_PER_REQUEST_MAX])) for index, found in shares.items()]

    def _check(self, peer: Peer, fetch: PeerFetch, now: float) -> list[Effect]:
        """Leave a peer when the best way without it would have won."""
        peer.trusted = False
        reach = self._reach()
        others = _links(self._assign(self._holdings.missing(reach)))
        peer.trusted = True
        aim = self.aim.position if self.aim is not None else self._floor
        why = self._choice.left_because(peer.name, fetch, aim, others, reach.position, now)
        if not why:
            return []
        projected_ms = (now - fetch.started + fetch.watch.remaining_s(now)) * 1000.0
        self._rates.link_was_left(peer.view.node_id, int(fetch.watch.total), projected_ms, fetch.codec)
        return self._fail(peer, why, now, slow=True)

    def _begin_fetch(self, peer: Peer, refs: tuple[PartRef, ...], now: float) -> list[Effect]:
        ask = self._ids.ask()
        remaining_s = max(0.001, self._stage_deadline - now)
        settings = self._settings
        share = peer.share(refs)
        size_bytes = share.size_bytes
        expected_s = self._choice.estimates.transfer_ms([share]) / 1000.0
        watch = Watch(now, expected_s, max(1, size_bytes))
        peer.fetch = PeerFetch(ask, refs, now, now + settings.fetch_idle_timeout_s, watch, now + OBSERVE_MIN_S)
        link = decide_link_codec(
            settings.link_compression, peer.view.node_id, size_bytes, self._rates, frame_bytes=settings.chunk_bytes
        )
        if link.codec is not LinkCodec.NONE:
            self._holdings.reason(link.describe())
        body = Fetch(
            lease_id=peer.lease_id,
            parts=refs,
            suites=settings.suites,
            chunk_bytes_max=settings.chunk_bytes,
            credit_bytes=settings.credit_bytes,
            link_codec=link.codec,
            value_bytes=settings.value_bytes,
        )
        return [Count("fetches"), Ask(ask, peer.view.node_id, body, remaining_s)]

    def _fetch_event(
        self, peer: Peer, fetch: PeerFetch, event: AskReplied | AskProgressed | AskFailed, now: float
    ) -> list[Effect]:
        match event:
            case AskProgressed(body=TransferGrant() as grant):
                if fetch.lane is not None:
                    return []
                fetch.lane = self._ids.lane()
                fetch.codec = grant.link_codec
                fetch.watch.begin(now)
                expected = self._holdings.expected(fetch.refs)
                fetch.budget_bytes = self._lane_budget(expected)
                idle_s = self._settings.fetch_idle_timeout_s
                return [ConnectReceiver(fetch.lane, peer.view.node_id, grant, expected, fetch.budget_bytes, idle_s)]
            case AskProgressed():
                return []
            case AskReplied():
                fetch.ask_open = False
                # With a lane the bytes may still be under way: the lane tells. Without one nothing will ever come.
                return [] if fetch.lane is not None else self._fail(peer, "ended a fetch without sending", now)
            case AskFailed(code=code) if code in _NOT_THERE and fetch.lane is None:
                fetch.ask_open = False
                return self._not_there(peer, fetch, now)
            case AskFailed(code=code):
                fetch.ask_open = False
                return self._fail(peer, f"fetch failed ({_words(code.name)})", now)

    def _lane_budget(self, expected: tuple[WantedPart, ...]) -> int:
        """Bytes a new lane may bring: what its parts can have, within what the other lanes leave of the import limit."""
        fetches = [peer.fetch for peer in self._peers if peer.fetch is not None]
        promised = sum(max(0, fetch.budget_bytes - int(fetch.watch.done)) for fetch in fetches)
        left = self._settings.max_import_bytes - self._holdings.received_bytes - promised
        return max(1, min(left, sum(part.bytes_max for part in expected)))

    def _not_there(self, peer: Peer, fetch: PeerFetch, now: float) -> list[Effect]:
        """It has lost what it had promised (an invalidated part, an expired lease): the rest of it is as good as before."""
        peer.presence -= set(fetch.refs)
        peer.fetch = None
        effects = self._holdings.fallback(f"{peer.name} no longer held {len(fetch.refs)} parts it had announced")
        return [Count("fetch_failures"), *effects, *self._plan(now)]

    def _lane_event(self, event: PartsReceived | CreditEarned | LaneFinished, now: float) -> list[Effect]:
        for peer in self._peers:
            fetch = peer.fetch
            if fetch is None or fetch.lane is None or fetch.lane != event.lane:
                continue
            match event:
                case PartsReceived(parts=parts):
                    self._rates.backoff.succeeded(peer.view.node_id, Trouble.BULK_PORT)
                    size_bytes = sum(part.meta.length_bytes for part in parts)
                    fetch.watch.advance_to(fetch.watch.done + size_bytes, now)
                    return self._holdings.accept(parts, self._origin(peer), now)
                case CreditEarned(credit_bytes=credit_bytes):
                    return [SendUpdate(fetch.ask, Credit(credit_bytes=credit_bytes))] if fetch.ask_open else []
                case LaneFinished(ok=True):
                    return self._complete(peer, fetch, event.transferred_bytes, now)
                case LaneFinished(reason=reason):
                    fetch.lane = None
                    return self._fail(peer, self._lane_trouble(peer, reason, now), now)
        return []

    def _lane_trouble(self, peer: Peer, reason: str, now: float) -> str:
        """What to say of a lane that ended early; a port that nobody can reach is not tried by the next prompts."""
        if reason != NO_CONNECTION:
            return f"broke off a transfer: {reason}"
        self._rates.backoff.failed(peer.view.node_id, Trouble.BULK_PORT, reason, now)
        return UNREACHED_PORT

    def _complete(self, peer: Peer, fetch: PeerFetch, transferred_bytes: int, now: float) -> list[Effect]:
        effects: list[Effect] = [Count("fetches_completed")]
        elapsed_ms = (now - fetch.started) * 1000.0
        self._holdings.spend(self._origin(peer), 0, elapsed_ms)
        if transferred_bytes >= LINK_SAMPLE_BYTES_MIN:
            self._rates.observe_link(peer.view.node_id, transferred_bytes, elapsed_ms, fetch.codec)
        if fetch.ask_open:
            effects.append(SendUpdate(fetch.ask, TransferDone(complete=True)))
            self._closing.add(fetch.ask)
        absent = {ref for ref in fetch.refs if not self._holdings.has(ref)}
        if absent:
            # The peer no longer has them, or sent something that does not fit the prompt: don't ask it for these again.
            peer.presence -= absent
            effects += self._holdings.fallback(f"{peer.name} did not send {len(absent)} parts it had announced")
        peer.fetch = None
        return [*effects, *self._plan(now)]

    def _fail(self, peer: Peer, what: str, now: float, *, slow: bool = False) -> list[Effect]:
        count = Count("hedges") if slow else Count("fetch_failures")
        self._spend_time(peer, now)
        effects = [*self._drop_fetch(peer, what), count, *self._distrust(peer, what)]
        return [*effects, *self._plan(now)]

    def _spend_time(self, peer: Peer, now: float) -> None:
        """Account for the time of a fetch that came to nothing."""
        if peer.fetch is not None:
            self._holdings.spend(self._origin(peer), 0, (now - peer.fetch.started) * 1000.0)

    def _drop_fetch(self, peer: Peer, reason: str) -> list[Effect]:
        fetch, peer.fetch = peer.fetch, None
        if fetch is None:
            return []
        effects: list[Effect] = []
        if fetch.lane is not None:
            effects.append(CloseLane(fetch.lane, ok=False, reason=reason))
        if fetch.ask_open:
            effects.append(CancelAsk(fetch.ask))
        return effects

    # --- ends --------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> list[Effect]:
        if self.phase is GatherPhase.LOOKING:
            if now < self._stage_deadline:
                return self._after_lookup(now)
            effects: list[Effect] = []
            for peer in self._peers:
                if peer.lookup is not None:
                    effects += self._distrust(peer, "did not answer a lookup in time")
            return [*effects, *self._drop_lookups(), *self._begin_fetching(now)]
        if now >= self._stage_deadline:
            late_names = ", ".join(peer.name for peer in self._peers if peer.fetch is not None)
            effects = self._holdings.fallback(f"fetching from {late_names} took too long")
            for peer in self._peers:
                if peer.fetch is not None:
                    self._spend_time(peer, now)
                    effects += [*self._drop_fetch(peer, "fetch timed out"), Count("fetch_failures")]
            return [*effects, *self._finish()]
        late = [peer for peer in self._peers if peer.fetch and peer.fetch.lane is None and now >= peer.fetch.grant_deadline]
        effects = []
        for peer in late:
            if not self.finished:
                effects += self._fail(peer, "did not begin a fetch in time", now)
        for peer in self._peers:
            if not self.finished and peer.fetch is not None and now >= peer.fetch.check_at:
                effects += self._check(peer, peer.fetch, now)
        return effects

    def _finish(self) -> list[Effect]:
        effects: list[Effect] = []
        for peer in self._peers:
            effects += self._drop_fetch(peer, "no longer wanted")
        self.phase = GatherPhase.FINISHED
        return [*effects, *self._release_leases()]

    def _release_leases(self) -> list[Effect]:
        effects: list[Effect] = []
        for peer in self._peers:
            if peer.lease_id != NO_LEASE:
                body = ReleaseLease(lease_id=peer.lease_id)
                effects.append(Ask(self._ids.ask(), peer.view.node_id, body, self._settings.release_timeout_s))
                peer.lease_id = NO_LEASE
        return effects

    def _distrust(self, peer: Peer, what: str) -> list[Effect]:
        peer.trusted = False
        return self._holdings.fallback(f"{peer.name} {what}")

    def _origin(self, peer: Peer) -> tuple[SourceKind, str]:
        return (SourceKind.REMOTE_CACHE, peer.view.node_id)


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _links(shares: Shares) -> list[LinkShare]:
    return [peer.share(refs) for peer, refs in shares]
