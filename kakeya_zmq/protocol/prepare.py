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

from kakeya_zmq.blocks import Block, Part, bind_parts
from kakeya_zmq.coverage import describe_gap
from kakeya_zmq.engine import (
    KV_NOT_ENCODED,
    CommandFailed,
    FinishImport,
    ImportPrefix,
    Prefill,
    PrefixImported,
    SegmentComputed,
)
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.early_import import EarlyImport
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
    Ticket,
)
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.following import Following
from kakeya_zmq.protocol.gather import Gathering
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.offload import Offload
from kakeya_zmq.protocol.outlook import Outlook
from kakeya_zmq.protocol.prepare_phases import TRANSITIONS, Phase
from kakeya_zmq.protocol.prepare_values import (
    Cancelled,
    IdAllocator,
    PeerView,
    PreparationOutcome,
    PreparationSettings,
    PreparationTask,
    Progress,
    Ready,
    TailHash,
    Unavailable,
    ValueSetter,
    WorkerView,
)
from kakeya_zmq.protocol.superseding import supersede
from kakeya_zmq.store import BlockStore
from wire.errors import LocalProtocolError
from wire.messages import Explanation, PartMeta, PrefillPolicy, SourceKind

__all__ = [
    "TRANSITIONS",
    "Cancelled",
    "IdAllocator",
    "PeerView",
    "Phase",
    "PreparationOutcome",
    "PreparationSettings",
    "PreparationTask",
    "Progress",
    "PromptPreparation",
    "Ready",
    "Unavailable",
    "WorkerView",
]


_WAITING = (Phase.FOLLOW, Phase.REJOIN)


def _over_limit(tokens: int) -> str:
    return f"only the first {tokens} tokens fit into the import limit"


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
        self._holdings = Holdings(task, store, set_value)
        self._hash_tail = hash_tail
        self._computed: list[PartMeta] = []
        """What was computed here, oldest first."""
        self._following = (
            Following(task, self._holdings, rates, flights, store) if flights is not None and store is not None else None
        )
        self._outlook = Outlook(task, self._holdings, rates)
        self._offload = Offload(task, self._holdings, ids, rates, random_bytes)
        self._early = EarlyImport(
            task.session_id,
            self._holdings,
            ids,
            batch_bytes=task.settings.early_import_bytes,
        )
        self._finishing_early = False
        self._gathering: Gathering | None = None
        self._ticket: Ticket | None = None
        self._import: Reach | None = None
        """What is being imported, then what was imported; None when nothing was."""
        self._failure: str | None = None
        self._cancelled = False
        self._started: float | None = None
        self._live = task.live_position
        """Tokens of the session's own KV that were there before and still are."""
        self._imported_bytes = 0
        self.phase = Phase.LOCAL
        self.position = task.live_position
        """Tokens whose KV the engine session holds."""
        self.outcome: PreparationOutcome | None = None

    # --- what the host sees ------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        target = self._task.target
        if self.phase is Phase.OFFLOAD and self._offload.progress is not None:
            return self._offload.progress
        if self.position == self._live:
            return Progress(self.position, target, SourceKind.LIVE)
        if self._import is not None and self.position == self._import.position:
            return Progress(self.position, target, max(self._holdings.origin_kinds(self._import)))
        return Progress(self.position, target, SourceKind.COMPUTED)

    @property
    def new_parts(self) -> tuple[Part, ...]:
        """Parts computed for this prompt, here or by a worker, when the session may publish."""
        return tuple(self._holdings.new_parts) if self._task.publish else ()

    @property
    def has_news(self) -> bool:
        """Whether :meth:`look` should be called: what it waits for in another session has changed."""
        return self.phase in _WAITING and self._following is not None and self._following.has_news()

    def deadline(self) -> float | None:
        match self.phase:
            case Phase.FOLLOW | Phase.REJOIN if self._following is not None:
                return self._following.deadline()
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
            holdings.reason(hint)
        effects: list[Effect] = []
        if self._following is not None:
            effects = self._following.start(floor, now)
            if self._following.waiting:
                self._enter(Phase.FOLLOW)
                return effects
        effects += self._ask_fleet(now, reach)
        self._tell(now)
        return effects

    def look(self, now: float) -> list[Effect]:
        """What this one waits for in another session has changed (``has_news``), or its clock says so."""
        following = self._following
        if self.outcome is not None or self.phase not in _WAITING or following is None:
            return []
        holdings = self._holdings
        effects = following.look(max(self.position, holdings.reach(holdings.has).position), now)
        if following.waiting:
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
            holdings.reason(f"own cache ends at token {reach.position}: {gap}" if gap else "")
        if holdings.importable.tokens < task.target:
            holdings.reason(_over_limit(holdings.importable.tokens))
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
            case Tick() if self.phase in _WAITING:
                return self.look(now)
            case Tick() if self.phase is Phase.GATHER and gathering is not None:
                effects = gathering.on(event, now)
            case Tick() if self.phase is Phase.OFFLOAD:
                effects = self._offload.on(event, now)
            case CommandEvent(ticket=ticket) | CommandEnded(ticket=ticket):
                if self._early.owns(ticket):
                    self._early.on(event)
                    return []
                return self._engine_event(event, now) if ticket == self._ticket else []
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
        return effects

    def _import_early(self, aim: Reach | None, arrived: Sequence[Part]) -> list[Effect]:
        """Copy into the engine what is at hand already.

        A fetch begins it: the engine makes room while the connection is being made. In a job it begins when something has
        come, which may be long after.
        """
        if aim is None or aim.position <= self.position or not (arrived or self.phase is Phase.GATHER):
            return []
        return self._early.follow(aim, arrived)

    def cancel(self, now: float) -> list[Effect]:
        """Stop. The outcome follows at once, or when the engine has let go of the session."""
        if self.outcome is not None or self._cancelled:
            return []
        self._cancelled = True
        if self._ticket is None:
            return self._finish(now)
        self._tell(now)
        if self.phase is Phase.IMPORT:
            return []  # one bounded step: its end tells where the session stands
        return [CancelCommand(self._ticket)]

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
            self._holdings.reason(f"{remaining_tokens} tokens are too few to ask the fleet")
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
        why = self._no_job_because()
        if why:
            self._holdings.reason(why)
            return self._apply(now, reach)
        self._enter(Phase.OFFLOAD)
        effects = self._offload.start(now)
        return [*effects, *self._after_offload(now)]

    def _no_job_because(self) -> str:
        """Why no worker is asked for anything; empty when they are."""
        importable = self._holdings.importable.tokens
        if importable < self._task.target:
            return _over_limit(importable)
        return "" if self._task.workers else self._task.no_worker

    def _after_offload(self, now: float) -> list[Effect]:
        if not self._offload.finished:
            return []
        reach = self._holdings.reach(self._holdings.has)
        at_hand, following = max(self.position, reach.position), self._following
        effects: list[Effect] = []
        if following is not None and at_hand < self._task.target:
            effects = following.rejoin(at_hand, now)
            if following.waiting:
                self._enter(Phase.REJOIN)
                return effects
        return [*effects, *self._apply(now, reach)]

    def _apply(self, now: float, reach: Reach) -> list[Effect]:
        """All help is in: import what reaches deeper than the session's own KV, or go on from there."""
        task, holdings = self._task, self._holdings
        if task.remote_required and max(reach.position, self.position) < task.target:
            self._failure = self._shortfall(reach)
            return self._finish(now)
        if reach.position <= self.position:
            return self._compute(now)
        early = self._early.complete(reach)
        if early is not None:
            self._imported_bytes = holdings.bytes_of(reach)
            self._finishing_early = True
            return [*early, *self._run_import(reach, FinishImport(task.session_id))]
        parts = holdings.collect(reach, now)
        self._imported_bytes = sum(part.payload.nbytes for part in parts or ())
        if parts is None:
            text = "a part was evicted or damaged before its import"
            effects = holdings.fallback(text)
            if task.remote_required:
                self._failure = text
                return [*effects, *self._finish(now)]
            return [*effects, *self._compute(now)]
        return self._run_import(reach, ImportPrefix(task.session_id, reach.position, parts))

    def _run_import(self, reach: Reach, command: ImportPrefix | FinishImport) -> list[Effect]:
        if self.phase is not Phase.IMPORT:
            self._enter(Phase.IMPORT)
        self._import = reach
        self._ticket = self._ids.ticket()
        return [RunCommand(self._ticket, command)]

    def _shortfall(self, reach: Reach) -> str:
        there = max(reach.position, self.position)
        text = f"remote prefill is required, and the fleet delivered {there} of {self._task.target} tokens"
        return f"{text}: {'; '.join(self._causes_of_shortfall())}"

    def _causes_of_shortfall(self) -> list[str]:
        task, holdings = self._task, self._holdings
        if holdings.importable.tokens < task.target:
            return [_over_limit(holdings.importable.tokens)]
        causes = [holdings.last_failure] if holdings.last_failure else []
        if not task.workers:
            causes += [*task.hints, task.no_worker]
            causes += [] if task.caches else ["no cache is known"]
        return causes or holdings.reasons[-1:] or ["nothing that could help is known"]

    def _compute(self, now: float) -> list[Effect]:
        task = self._task
        if self.position == task.target:
            return self._finish(now)
        if task.remote_required:
            self._failure = self._failure or self._shortfall(Reach(self.position, task.chain))
            return self._finish(now)
        self._enter(Phase.COMPUTE)
        self._ticket = self._ids.ticket()
        capture = self._store is not None or task.publish
        tokens = task.tokens[self.position : task.target]
        return [RunCommand(self._ticket, Prefill(task.session_id, tokens, capture))]

    # --- engine ------------------------------------------------------------------------------------------------------

    def _engine_event(self, event: CommandEvent | CommandEnded, now: float) -> list[Effect]:
        if isinstance(event, CommandEnded):
            return self._engine_ended(event, now)
        match event.event:
            case PrefixImported(position=position, elapsed_ms=elapsed_ms):
                self.position = position
                early_ms = self._early.elapsed_ms if self._finishing_early else 0.0
                self._rates.observe_import(self._imported_bytes, elapsed_ms + early_ms)
            case SegmentComputed(position=position, parts=raw_parts, elapsed_ms=elapsed_ms, parts_not_encoded=lost):
                computed = position - self.position
                self.position = position
                self._rates.observe_local(computed, elapsed_ms)
                effects: list[Effect] = [Count("tokens_computed", computed)]
                if lost:
                    self._holdings.reason(KV_NOT_ENCODED)
                    effects.append(Count("parts_not_encoded", lost))
                try:
                    parts = bind_parts(self._task.chain, raw_parts)
                except ValueError:  # parts the chain does not know cannot be kept; the session's KV is right all the same
                    return [*effects, Count("capture_mismatches")]
                self._computed += [part.meta for part in parts]
                return [*effects, *self._holdings.keep_computed(parts, now)]
            case CommandFailed(message=message, position=position):
                self.position = position
                self._failure = message
            case _:
                pass
        return []

    def _engine_ended(self, event: CommandEnded, now: float) -> list[Effect]:
        self._ticket = None
        if event.position is not None:
            self.position = event.position
        if self._cancelled:
            return self._finish(now)
        if self.phase is Phase.IMPORT:
            return self._import_ended(now)
        if self.position != self._task.target and self._failure is None:
            self._failure = "the engine stopped early"
        return self._finish(now)

    def _import_ended(self, now: float) -> list[Effect]:
        reach = self._import
        if reach is not None and self.position == reach.position and self._failure is None:
            return self._compute(now)
        if self._finishing_early and reach is not None:
            # The session's KV is as it was: try once more in one piece.
            self._finishing_early = False
            parts = self._holdings.collect(reach, now)
            if parts is not None:
                self._failure = None
                return [
                    *self._early.abandon(),
                    *self._run_import(reach, ImportPrefix(self._task.session_id, reach.position, parts)),
                ]
        effects: list[Effect] = [Count("import_failures")]
        effects += self._holdings.fallback(f"import failed: {self._failure or 'the engine stopped early'}")
        if reach is not None:
            self._holdings.invalidate(reach)
        self._import = None
        self._live = min(self._live, self.position)
        if not self._task.remote_required:
            self._failure = None
        return [*effects, *self._compute(now)]

    # --- other sessions ----------------------------------------------------------------------------------------------

    def _tell(self, now: float) -> None:
        """Let sessions that prepare the same prefix know what this one brings; worked out only when somebody listens."""
        following, outlook = self._following, self._outlook
        if following is None or self.outcome is not None or self.phase in _WAITING:
            return
        stopped = self._cancelled or self._holdings.store_failed
        if stopped or following.followed or not outlook.is_told(self.phase):
            way = self._offload if self.phase is Phase.OFFLOAD else self._gathering
            begin = self._import.position if self._import is not None else self.position
            following.tell(outlook.forecast(self.phase, self.position, begin, way, now, stopped=stopped))

    # --- end ---------------------------------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._gathering is not None:
            effects += self._gathering.cancel(now)
        effects += self._offload.cancel(now)
        effects += self._early.abandon()
        if self._following is not None:
            self._following.leave()
        self._holdings.release()
        if self._store is not None and not self._task.facts.requirement.state:
            # Only now: what the prefix was built from was held fast until here, perhaps against the capture of a block.
            blocks: list[Block | PartMeta] = [*self._computed]
            blocks += [block for block in self._task.chain.blocks if block.start in self._holdings.tail_starts]
            supersede(self._store, blocks, fingerprint=self._task.fingerprint, hash_tail=self._hash_tail)
        self._enter(Phase.FINISHED)
        if self._cancelled:
            self.outcome = Cancelled(self.position, self.new_parts)
            return effects
        explanation = self._explain(now)
        if self._failure is None and self.position == self._task.target:
            self.outcome = Ready(self.position, explanation, self.new_parts)
            return [*effects, *self._count_reuse()]
        reason = self._failure or "the prefix could not be prepared"
        self.outcome = Unavailable(self.position, reason, explanation, self.new_parts)
        return [*effects, Count("preparations_unavailable"), Note("warning", f"prompt not prepared: {reason}"[:512])]

    def _explain(self, now: float) -> Explanation:
        live = self._live if self._import is None else 0
        holdings = self._holdings
        diverged_at, known_to = holdings.diverged_at, holdings.known_to
        if known_to <= self._task.live_position:
            diverged_at = None
        elif diverged_at is not None:
            holdings.reason(f"diverged at token {diverged_at} from everything cached that begins like it")
        elif known_to < self._task.target:
            holdings.reason(f"nothing cached is known beyond token {known_to}")
        holdings.explain_unused(self._import)
        return Explanation(
            prompt_tokens=len(self._task.tokens),
            sources=self._holdings.sources(live, self._import, self.position),
            reasons=tuple(self._holdings.reasons),
            elapsed_ms=max(0.0, (now - (now if self._started is None else self._started)) * 1000.0),
            decisions=tuple(self._holdings.decisions),
            diverged_at=diverged_at,
        )

    def _count_reuse(self) -> list[Effect]:
        reach = self._import
        if reach is None:
            # The session's own KV is no hit of a cache; a prompt that had to begin at nothing is a miss.
            return [Count("misses")] if self._live == 0 and self._task.target > 0 else []
        remote = self._holdings.origin_kinds(reach) & {SourceKind.REMOTE_CACHE, SourceKind.WORKER}
        return [Count("remote_hits" if remote else "local_hits"), Count("tokens_reused", reach.position)]
