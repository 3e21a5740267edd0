"""Prompt preparation: bring one session's KV up to date by whatever is cheapest, and say why it cost what it cost.

Rules
 1. The answer never depends on the fleet: whatever fails, what was verified is kept, the next option is taken, the failure
    is counted and its reason kept for the explanation. No failure of a peer, store or transfer is raised.
 2. A full hit at home waits for nobody; nobody waits for a slow peer when the answer is known.
 3. Only parts that :func:`kakeya_zmq.blocks.needed_parts` names for the position are imported, all of them, from one chain.
 4. REMOTE_REQUIRED never computes here: either the whole prefix is there, or the session stays as it was and the outcome is
    Unavailable. LOCAL_ONLY never asks anybody.
 5. A prompt that begins like one that is being prepared for another session waits for that one while it pays (.following);
    it looks for one at the beginning, and again before it computes what no worker brought.
 6. When ``outcome`` is set, nothing of this machine is open any more, except what nobody waits for: releases of leases, and
    cancelled steps of an early import.

Theory of operation. The phases follow each other as in ``TRANSITIONS``; each is entered at most once, which bounds the
whole. FOLLOW (and REJOIN, the same after OFFLOAD), GATHER and OFFLOAD are machines of their own
(kakeya_zmq.protocol.following, .gather and .offload) that fill the holdings; IMPORT and COMPUTE are one engine command
each; what arrives before IMPORT is copied early (.early_import), so that little is left to do there. Between them stands
one question: how deep do the parts at hand reach, and is that deeper than the session's own KV? An import the engine
refuses empties the session and leads to COMPUTE from 0. ``position`` follows the engine's events only, so that it is right
whenever the machine ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kakeya_zmq.blocks import Block, Part
from kakeya_zmq.coverage import describe_gap
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.account import Account
from kakeya_zmq.protocol.effects import (
    CancelCommand,
    CommandEnded,
    CommandEvent,
    Count,
    Effect,
    HostEvent,
    Note,
    PartsReceived,
    RunCommand,
    Tick,
)
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.gather import Gathering
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.offload import Offload
from kakeya_zmq.protocol.prepare_engine import STOPPED_EARLY, EngineSession
from kakeya_zmq.protocol.prepare_explain import count_reuse, explain, over_limit, shortfall, why_no_job
from kakeya_zmq.protocol.prepare_phases import TRANSITIONS, Phase
from kakeya_zmq.protocol.prepare_sharing import WAITING, Sharing
from kakeya_zmq.protocol.prepare_values import (
    Cancelled,
    IdAllocator,
    PreparationOutcome,
    PreparationTask,
    Progress,
    Ready,
    TailHash,
    Unavailable,
    ValueSetter,
)
from kakeya_zmq.protocol.superseding import supersede
from kakeya_zmq.store import BlockStore
from wire.errors import LocalProtocolError
from wire.messages import PartMeta, PrefillPolicy, SourceKind


def _ignore_value(name: str, value: object) -> None:
    """The default for a host that keeps no values."""


class PromptPreparation:
    """One append on one session. Feed it ``start``, then ``on`` until ``outcome`` is set.

    Args:
        task: what to prepare, for whom, with whose help.
        store: the local block store, or None when the session neither reads nor fills it.
        ids: numbers for asks, lanes and tickets.
        rates: measured rates; read and updated.
        hash_tail: (parent hash, start, count) → chained hash of the prompt's own tokens there.
        random_bytes: n → n random bytes.
        set_value: takes the gauges and last reasons of the ``prefill`` telemetry section.
        flights: the preparations of the same primary, to share work with; None: nothing is shared.
    """

    def __init__(
        self,
        task: PreparationTask,
        *,
        store: BlockStore | None,
        ids: IdAllocator,
        rates: MeasuredRates,
        hash_tail: TailHash,
        random_bytes: Callable[[int], bytes],
        set_value: ValueSetter = _ignore_value,
        flights: Flights | None = None,
    ) -> None:
        self._task = task
        self._store = store
        self._ids = ids
        self._rates = rates
        self._account = Account(set_value)
        self._holdings = Holdings(task, store, self._account)
        self._hash_tail = hash_tail
        captures = store is not None or task.publish
        self._engine = EngineSession(task, self._holdings, ids, rates, captures=captures)
        self._sharing = Sharing(task, self._holdings, rates, flights, store)
        self._offload = Offload(task, self._holdings, ids, rates, random_bytes)
        self._gathering: Gathering | None = None
        self._failure: str | None = None
        self._cancelled = False
        self._started: float | None = None
        self.phase = Phase.LOCAL
        self.outcome: PreparationOutcome | None = None

    # --- what the host sees ------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens whose KV the engine session holds."""
        return self._engine.position

    @property
    def progress(self) -> Progress:
        target, imported = self._task.target, self._engine.imported
        if self.phase is Phase.OFFLOAD and self._offload.progress is not None:
            return self._offload.progress
        if self.phase in WAITING and self._sharing.at_hand > self.position:
            return Progress(self._sharing.at_hand, target, SourceKind.HOT)  # another session brings it into the store
        if self.position == self._engine.live:
            return Progress(self.position, target, SourceKind.LIVE)
        if imported is not None and self.position == imported.position:
            return Progress(self.position, target, max(self._account.origin_kinds(self._holdings.needed(imported))))
        return Progress(self.position, target, SourceKind.COMPUTED)

    @property
    def new_parts(self) -> tuple[Part, ...]:
        """Parts computed for this prompt, here or by a worker, when the session may publish."""
        return tuple(self._holdings.new_parts) if self._task.publish else ()

    @property
    def has_news(self) -> bool:
        """Whether :meth:`look` should be called: what it waits for in another session has changed."""
        return self.phase in WAITING and self._sharing.has_news()

    def deadline(self) -> float | None:
        match self.phase:
            case Phase.FOLLOW | Phase.REJOIN:
                return self._sharing.deadline()
            case Phase.GATHER if self._gathering is not None:
                return self._gathering.deadline()
            case Phase.OFFLOAD:
                return self._offload.deadline()
            case _:
                return None

    def start(self, now: float) -> list[Effect]:
        """Begin.

        Raises:
            LocalProtocolError: it was started before.
        """
        if self._started is not None or self.phase is not Phase.LOCAL:
            raise LocalProtocolError("a preparation starts once")
        self._started = now
        task, holdings = self._task, self._holdings
        if self.position == task.target:
            return self._finish(now)
        reach = self._at_home()
        floor = max(self.position, reach.position)
        if floor == task.target:
            return self._apply(now, reach)
        holdings.hold(reach, now)
        for hint in task.hints:
            self._account.reason(hint)
        effects = self._sharing.start(floor, now)
        if self._sharing.waiting:
            self._enter(Phase.FOLLOW)
            return effects
        effects += self._ask_fleet(now, reach)
        self._tell(now)
        return effects

    def look(self, now: float) -> list[Effect]:
        """What this one waits for in another session has changed (``has_news``), or its clock says so."""
        if self.outcome is not None or self.phase not in WAITING:
            return []
        holdings = self._holdings
        effects = self._sharing.look(max(self.position, holdings.reach(holdings.has).position), now)
        if self._sharing.waiting:
            return effects
        reach = self._at_home()
        if max(self.position, reach.position) == self._task.target:
            return [*effects, *self._apply(now, reach)]
        holdings.hold(reach, now)
        effects += self._ask_fleet(now, reach) if self.phase is Phase.FOLLOW else self._apply(now, reach)
        self._tell(now)
        return effects

    def _at_home(self) -> Reach:
        """What the own store makes possible, tails of other prompts included."""
        holdings = self._holdings
        reach = holdings.reach(holdings.has)
        if reach.position < self._task.target and holdings.find_local_tails(self._hash_tail, reach.position):
            reach = holdings.reach(holdings.has)
        holdings.note_known(holdings.has, self._hash_tail)
        return reach

    def _ask_fleet(self, now: float, reach: Reach) -> list[Effect]:
        """The own store and the other sessions have given what they can: ask caches, then workers, then compute."""
        task, holdings = self._task, self._holdings
        floor = max(self.position, reach.position)
        if self._store is not None:
            gap = describe_gap(holdings.importable, task.facts.requirement, holdings.has, reach.position)
            self._account.reason(f"own cache ends at token {reach.position}: {gap}" if gap else "")
        if holdings.importable.tokens < task.target:
            self._account.reason(over_limit(holdings.importable.tokens))
        if self._wants_help(task.target - floor) and task.caches:
            self._enter(Phase.GATHER)
            self._gathering = Gathering(task, holdings, self._ids, self._rates, self._hash_tail, floor)
            effects = self._gathering.start(now)
            effects += self._import_early(self._gathering.aim, ())
            return [*effects, *self._after_gather(now)]
        return self._begin_offload(now)

    def on(self, event: HostEvent, now: float) -> list[Effect]:
        """Take one event; events of things that are closed already are ignored."""
        if self.outcome is not None:
            return []
        effects = self._take(event, now)
        self._tell(now)
        return effects

    def _take(self, event: HostEvent, now: float) -> list[Effect]:
        gathering = self._gathering
        match event:
            case Tick() if self.phase in WAITING:
                return self.look(now)
            case Tick() if self.phase is Phase.GATHER and gathering is not None:
                effects = gathering.on(event, now)
            case Tick() if self.phase is Phase.OFFLOAD:
                effects = self._offload.on(event, now)
            case CommandEvent():
                return self._engine.on(event, now)
            case CommandEnded():
                return self._engine_ended(now) if self._engine.ended(event) else []
            case _ if gathering is not None and gathering.owns(event):
                effects = gathering.on(event, now)
            case _ if self._offload.owns(event):
                effects = self._offload.on(event, now)
            case _:
                return []
        arrived = event.parts if isinstance(event, PartsReceived) else ()
        if self.phase is Phase.GATHER:
            effects += self._import_early(gathering.aim if gathering is not None else None, arrived)
            effects += self._after_gather(now)
        elif self.phase is Phase.OFFLOAD:
            effects += self._import_early(self._offload.aim, arrived)
            effects += self._after_offload(now)
        # What the engine has to do goes first: peers can wait for their thanks.
        return sorted(effects, key=lambda effect: not isinstance(effect, RunCommand | CancelCommand))

    def _import_early(self, aim: Reach | None, arrived: Sequence[Part]) -> list[Effect]:
        """Copy into the engine what is at hand already.

        A fetch begins it: the engine makes room while the connection is being made. In a job it begins when something has
        come, which may be long after.
        """
        if aim is None or aim.position <= self.position or not (arrived or self.phase is Phase.GATHER):
            return []
        return self._engine.import_early(aim, arrived)

    def cancel(self, now: float) -> list[Effect]:
        """Stop. The outcome follows at once, or when the engine has let go of the session."""
        if self.outcome is not None or self._cancelled:
            return []
        self._cancelled = True
        ticket = self._engine.ticket
        if ticket is None:
            return self._finish(now)
        self._tell(now)
        if self.phase is Phase.IMPORT:
            return []  # one bounded step: its end tells where the session stands
        return [CancelCommand(ticket)]

    # --- phases ------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise LocalProtocolError(f"preparation cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    def _wants_help(self, remaining_tokens: int) -> bool:
        task = self._task
        if task.policy is PrefillPolicy.LOCAL_ONLY or remaining_tokens <= 0:
            return False
        if task.remote_required:
            return True
        wanted = remaining_tokens >= task.settings.remote_minimum_tokens
        if not wanted and (task.caches or task.workers):
            self._account.reason(f"{remaining_tokens} tokens are too few to ask the fleet")
        return wanted

    def _after_gather(self, now: float) -> list[Effect]:
        if self._gathering is None or not self._gathering.finished:
            return []
        return self._begin_offload(now)

    def _begin_offload(self, now: float) -> list[Effect]:
        task = self._task
        reach = self._holdings.reach(self._holdings.has)
        at_hand = max(self.position, reach.position)
        if not self._wants_help(task.target - at_hand):
            return self._apply(now, reach)
        why = why_no_job(task, self._holdings)
        if why:
            self._account.reason(why)
            return self._apply(now, reach)
        self._enter(Phase.OFFLOAD)
        effects = self._offload.start(now)
        return [*effects, *self._after_offload(now)]

    def _after_offload(self, now: float) -> list[Effect]:
        if not self._offload.finished:
            return []
        reach = self._holdings.reach(self._holdings.has)
        at_hand = max(self.position, reach.position)
        effects: list[Effect] = []
        if at_hand < self._task.target:
            effects = self._sharing.rejoin(at_hand, now)
            if self._sharing.waiting:
                self._enter(Phase.REJOIN)
                return effects
        return [*effects, *self._apply(now, reach)]

    def _apply(self, now: float, reach: Reach) -> list[Effect]:
        """All help is in: import what reaches deeper than the session's own KV, or go on from there."""
        task, holdings = self._task, self._holdings
        there = max(reach.position, self.position)
        if task.remote_required and there < task.target:
            self._failure = shortfall(task, holdings, there)
            return self._finish(now)
        if reach.position <= self.position:
            return self._compute(now)
        importing = self._engine.start_import(reach, now)
        if importing is not None:
            self._enter(Phase.IMPORT)
            return importing
        text = "a part was evicted or damaged before its import"
        effects = self._account.fallback(text)
        if task.remote_required:
            self._failure = text
            return [*effects, *self._finish(now)]
        return [*effects, *self._compute(now)]

    def _compute(self, now: float) -> list[Effect]:
        task = self._task
        if self.position == task.target:
            return self._finish(now)
        if task.remote_required:
            self._failure = self._engine.failure or shortfall(task, self._holdings, self.position)
            return self._finish(now)
        self._enter(Phase.COMPUTE)
        return self._engine.compute()

    # --- engine ------------------------------------------------------------------------------------------------------

    def _engine_ended(self, now: float) -> list[Effect]:
        if self._cancelled:
            return self._finish(now)
        if self.phase is Phase.IMPORT:
            return self._import_ended(now)
        if self.position != self._task.target and self._engine.failure is None:
            self._failure = STOPPED_EARLY
        return self._finish(now)

    def _import_ended(self, now: float) -> list[Effect]:
        engine = self._engine
        if engine.has_imported:
            return self._compute(now)
        again = engine.retry_import(now)
        if again is not None:
            return again
        effects = engine.forget_import(now)
        if not self._task.remote_required:
            engine.failure = None
        return [*effects, *self._compute(now)]

    def _tell(self, now: float) -> None:
        """Let sessions that prepare the same prefix know what this one brings."""
        if self.outcome is None:
            way = self._offload if self.phase is Phase.OFFLOAD else self._gathering
            stopped = self._cancelled or self._holdings.store_failed
            self._sharing.tell(self.phase, self._engine, way, now, stopped=stopped)

    # --- end ---------------------------------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        effects = self._let_go(now)
        self._enter(Phase.FINISHED)
        if self._cancelled:
            self.outcome = Cancelled(self.position, self.new_parts)
            return effects
        task, holdings, engine = self._task, self._holdings, self._engine
        explanation = explain(task, holdings, engine, 0.0 if self._started is None else now - self._started)
        failure = self._failure or engine.failure
        if failure is None and self.position == task.target:
            self.outcome = Ready(self.position, explanation, self.new_parts)
            return [*effects, *count_reuse(task, holdings, engine)]
        reason = failure or "the prefix could not be prepared"
        self.outcome = Unavailable(self.position, reason, explanation, self.new_parts)
        return [*effects, Count("preparations_unavailable"), Note("warning", f"prompt not prepared: {reason}"[:512])]

    def _let_go(self, now: float) -> list[Effect]:
        """End what is still open, and drop what is superseded by what was computed."""
        effects: list[Effect] = []
        if self._gathering is not None:
            effects += self._gathering.cancel(now)
        effects += self._offload.cancel(now)
        effects += self._engine.abandon_early_import()
        self._sharing.leave()
        self._holdings.release()
        if self._store is not None and not self._task.facts.requirement.state:
            # Only now: what the prefix was built from was held fast until here, perhaps against the capture of a block.
            blocks: list[Block | PartMeta] = [*self._engine.computed]
            blocks += [block for block in self._task.chain.blocks if block.start in self._holdings.tail_starts]
            supersede(self._store, blocks, fingerprint=self._task.fingerprint, hash_tail=self._hash_tail)
        return effects
