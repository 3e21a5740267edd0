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

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.coverage import describe_gap
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.effects import (
    NO_CONNECTION,
    NO_DATA,
    UNREACHED_PORT,
    AskFailed,
    AskId,
    AskProgressed,
    AskReplied,
    CancelAsk,
    Count,
    CreditEarned,
    Effect,
    HostEvent,
    LaneFinished,
    PartsReceived,
    SendUpdate,
)
from kakeya_zmq.protocol.gather_choice import GatherChoice
from kakeya_zmq.protocol.gather_fetch import Fetching, origin
from kakeya_zmq.protocol.gather_holders import CacheHolders, links
from kakeya_zmq.protocol.gather_lookup import Lookups
from kakeya_zmq.protocol.gather_peer import Peer, PeerFetch, words
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask, TailHash
from wire import limits
from wire.errors import FailureCode
from wire.messages import Credit, TransferDone, TransferGrant

LINK_SAMPLE_BYTES_MIN = 256 * limits.KIB
"""A smaller transfer measures the handshake, not the link."""
SILENT_S = 4.0
"""Whoever is left after so long without having sent anything is not only slow."""
_NOT_THERE = frozenset({FailureCode.NOT_FOUND, FailureCode.FAILED_PRECONDITION})
"""Answers to a fetch that blame its parts, not its peer."""


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
        self._account = holdings.account
        self._rates = rates
        self._floor = floor
        self._holders = CacheHolders(task, holdings, ids, rates)
        self._lookups = Lookups(task, holdings, self._holders, ids, hash_tail)
        self._choice = GatherChoice(task, holdings, rates, floor)
        self._fetching = Fetching(task, holdings, self._holders, ids, rates, self._choice.estimates)
        self._lookup_began = 0.0
        self._patience_deadline = math.inf
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
        fetches = self._holders.fetches()
        waiting = (fetch.grant_deadline for fetch in fetches if fetch.lane is None)
        return min((self._stage_deadline, *waiting, *(fetch.check_at for fetch in fetches)))

    def remaining_s(self, now: float) -> float:
        """Projected time until what is being fetched has come; 0 when nothing is."""
        return max((fetch.watch.remaining_s(now) for fetch in self._holders.fetches()), default=0.0)

    def owns(self, event: HostEvent) -> bool:
        """Whether the event belongs to a lookup or fetch that is still open here."""
        match event:
            case AskReplied(ask=ask) | AskProgressed(ask=ask) | AskFailed(ask=ask):
                return ask in self._closing or any(peer.owns(ask) for peer in self._holders.peers)
            case PartsReceived(lane=lane) | CreditEarned(lane=lane) | LaneFinished(lane=lane):
                return any(fetch.lane == lane for fetch in self._holders.fetches())
            case _:
                return False

    def start(self, now: float) -> list[Effect]:
        self.phase = GatherPhase.LOOKING
        self._lookup_began = now
        self._stage_deadline = now + self._settings.lookup_timeout_s
        self._holders.pass_over(now)
        return [*self._lookups.ask(), *self._after_lookup(now)]

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
        effects = [*self._lookups.drop(), *self._fetching.drop_all("no longer wanted")]
        effects += [CancelAsk(ask) for ask in sorted(self._closing)]
        self._closing.clear()
        effects += self._holders.release_leases()
        self.phase = GatherPhase.FINISHED
        return effects

    # --- lookup ------------------------------------------------------------------------------------------------------

    def _ask_event(self, event: AskReplied | AskProgressed | AskFailed, now: float) -> list[Effect]:
        for peer in self._holders.peers:
            if peer.lookup == event.ask:
                return self._lookup_event(peer, event, now)
            if peer.fetch is not None and peer.fetch.ask == event.ask:
                return self._fetch_event(peer, peer.fetch, event, now)
        return []

    def _lookup_event(self, peer: Peer, event: AskReplied | AskProgressed | AskFailed, now: float) -> list[Effect]:
        if isinstance(event, AskProgressed):
            return []
        if self.phase is not GatherPhase.LOOKING:
            return self._lookups.take_late(peer, event, finished=self.finished)
        return [*self._lookups.take(peer, event), *self._after_lookup(now)]

    def _after_lookup(self, now: float) -> list[Effect]:
        if self.phase is not GatherPhase.LOOKING:
            return []
        waiting = self._lookups.waiting()
        if waiting:
            self._patience_deadline = self._lookup_began + self._patience_s(waiting)
            if self._patience_deadline > now:
                return []
            self._note_left(waiting)
        return self._begin_fetching(now)

    def _patience_s(self, waiting: list[Peer]) -> float:
        reach = self._holders.reach()
        known = links(self._holders.shares(reach))
        return self._choice.patience_s(known, reach.position, [peer.view for peer in waiting])

    def _note_left(self, waiting: list[Peer]) -> None:
        if self._holders.reach().position < self._holdings.importable.tokens:
            names = ", ".join(peer.name for peer in waiting)
            self._account.reason(f"{names} had not answered when waiting could save nothing any more")

    def _begin_fetching(self, now: float) -> list[Effect]:
        self.phase = GatherPhase.FETCHING
        self._stage_deadline = now + self._settings.fetch_timeout_s
        return self._plan(now)

    # --- fetch -------------------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> list[Effect]:
        """Ask for what the deepest position lacks; finish when nothing is lacking, nothing is left, or it does not pay."""
        reach = self._holders.reach()
        # Without a peer that failed, what it held looks as if it had never been stored.
        if reach.position < self._task.target and all(peer.trusted for peer in self._holders.peers):
            gap = describe_gap(
                self._holdings.importable, self._task.facts.requirement, self._holders.available, reach.position
            )
            self._account.reason(f"known cache contents end at token {reach.position}: {gap}" if gap else "")
        if reach.position <= self._floor or not self._holdings.missing(reach):
            return self._finish()
        shares = self._holders.shares(reach)
        if shares and not self._choice.fetch_pays(links(shares), reach.position):
            return self._finish()
        self.aim = reach
        self._holdings.hold(reach, now)
        effects: list[Effect] = []
        for peer, refs in shares:
            if peer.fetch is None:
                effects += self._fetching.begin(peer, refs, self._stage_deadline, now)
        return effects

    def _check(self, peer: Peer, fetch: PeerFetch, now: float) -> list[Effect]:
        """Leave a peer when the best way without it would have won."""
        reach, others = self._holders.without(peer)
        aim = self.aim.position if self.aim is not None else self._floor
        why = self._choice.left_because(peer.name, fetch, aim, links(others), reach.position, now)
        if not why:
            return []
        projected_ms = (now - fetch.started + fetch.watch.remaining_s(now)) * 1000.0
        self._rates.link_was_left(peer.view.node_id, int(fetch.watch.total), projected_ms, fetch.codec)
        if fetch.watch.done == 0 and now - fetch.started >= SILENT_S:
            self._was_silent(peer, now)
        return self._fail(peer, why, now, slow=True)

    def _was_silent(self, peer: Peer, now: float) -> None:
        """The next prompts had better not wait for it as long."""
        self._rates.backoff.failed(peer.view.node_id, Trouble.FETCH, "nothing came of a fetch", now)

    def _fetch_event(
        self, peer: Peer, fetch: PeerFetch, event: AskReplied | AskProgressed | AskFailed, now: float
    ) -> list[Effect]:
        match event:
            case AskProgressed(body=TransferGrant() as grant):
                return self._fetching.open_lane(peer, fetch, grant, now) if fetch.lane is None else []
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
                return self._fail(peer, f"fetch failed ({words(code)})", now)

    def _not_there(self, peer: Peer, fetch: PeerFetch, now: float) -> list[Effect]:
        """It has lost what it had promised (an invalidated part, an expired lease): the rest of it is as good as before."""
        peer.presence -= set(fetch.refs)
        peer.fetch = None
        effects = self._account.fallback(f"{peer.name} no longer held {len(fetch.refs)} parts it had announced")
        return [Count("fetch_failures"), *effects, *self._plan(now)]

    def _lane_event(self, event: PartsReceived | CreditEarned | LaneFinished, now: float) -> list[Effect]:
        for peer in self._holders.peers:
            fetch = peer.fetch
            if fetch is None or fetch.lane is None or fetch.lane != event.lane:
                continue
            match event:
                case PartsReceived(parts=parts):
                    for trouble in (Trouble.BULK_PORT, Trouble.FETCH):
                        self._rates.backoff.succeeded(peer.view.node_id, trouble)
                    size_bytes = sum(part.meta.length_bytes for part in parts)
                    fetch.watch.advance_to(fetch.watch.done + size_bytes, now)
                    return self._holdings.accept(parts, origin(peer), now)
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
            if reason == NO_DATA:
                self._was_silent(peer, now)
            return f"broke off a transfer: {reason}"
        self._rates.backoff.failed(peer.view.node_id, Trouble.BULK_PORT, reason, now)
        return UNREACHED_PORT

    def _complete(self, peer: Peer, fetch: PeerFetch, transferred_bytes: int, now: float) -> list[Effect]:
        effects: list[Effect] = [Count("fetches_completed")]
        elapsed_ms = (now - fetch.started) * 1000.0
        self._account.spend_time(origin(peer), elapsed_ms)
        if transferred_bytes >= LINK_SAMPLE_BYTES_MIN:
            self._rates.observe_link(peer.view.node_id, transferred_bytes, elapsed_ms, fetch.codec)
        if fetch.ask_open:
            effects.append(SendUpdate(fetch.ask, TransferDone(complete=True)))
            self._closing.add(fetch.ask)
        absent = {ref for ref in fetch.refs if not self._holdings.has(ref)}
        if absent:
            # The peer no longer has them, or sent something that does not fit the prompt: don't ask it for these again.
            peer.presence -= absent
            effects += self._account.fallback(f"{peer.name} did not send {len(absent)} parts it had announced")
        peer.fetch = None
        return [*effects, *self._plan(now)]

    def _fail(self, peer: Peer, what: str, now: float, *, slow: bool = False) -> list[Effect]:
        count = Count("hedges") if slow else Count("fetch_failures")
        self._fetching.spend_time(peer, now)
        effects = [*self._fetching.drop(peer, what), count, *self._holders.distrust(peer, what)]
        return [*effects, *self._plan(now)]

    # --- ends --------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> list[Effect]:
        if self.phase is GatherPhase.LOOKING:
            if now < self._stage_deadline:
                return self._after_lookup(now)
            return [*self._lookups.time_out(), *self._begin_fetching(now)]
        if now >= self._stage_deadline:
            late_names = ", ".join(peer.name for peer in self._holders.peers if peer.fetch is not None)
            effects = self._account.fallback(f"fetching from {late_names} took too long")
            for peer in self._holders.peers:
                if peer.fetch is not None:
                    if peer.fetch.watch.done == 0 and now - peer.fetch.started >= SILENT_S:
                        self._was_silent(peer, now)
                    self._fetching.spend_time(peer, now)
                    effects += [*self._fetching.drop(peer, "fetch timed out"), Count("fetch_failures")]
            return [*effects, *self._finish()]
        late = [
            peer
            for peer in self._holders.peers
            if peer.fetch and peer.fetch.lane is None and now >= peer.fetch.grant_deadline
        ]
        effects = []
        for peer in late:
            if not self.finished:
                self._was_silent(peer, now)
                effects += self._fail(peer, "did not begin a fetch in time", now)
        for peer in self._holders.peers:
            if not self.finished and peer.fetch is not None and now >= peer.fetch.check_at:
                effects += self._check(peer, peer.fetch, now)
        return effects

    def _finish(self) -> list[Effect]:
        effects = self._fetching.drop_all("no longer wanted")
        self.phase = GatherPhase.FINISHED
        return [*effects, *self._holders.release_leases()]
