"""Inference sessions of a primary: create, append, generate, close.

Rules
- A session's history is append-only; how appends are grouped never changes its state. An append that fails or is cancelled
  leaves the history as it was, and the session usable.
- A session belongs to the node that opened it, by its name and its identity key; for others it does not exist.
- When the table is full, the oldest idle session of whoever has most of them makes room; nobody loses one to an asker that
  has as many.
- One operation at a time on a session; a second one is refused with ABORTED. Different sessions interleave.
- Between the first and the last token of a generation nothing is asked of the fleet on the session's behalf: what a turn
  produced is handed over for publishing when its generation has ended, when the session is closed, or when no generation
  followed within ``publish_delay_s``.
- The KV of a session covers its history except the last token (which the next generation runs first), or all of it after
  an answer that ended with an end-of-sequence token. It may cover less after a failure: then the next append brings it
  back, also an empty one.
- Prompts that begin alike and are prepared at the same time share the work (kakeya_zmq.protocol.flights); what was handed
  over for publishing is not handed over again soon (.handover).
- A request ends exactly once: by a reply, a failure, or silently when nobody waits any more.

Theory of operation
An append runs one :class:`PromptPreparation`, which brings the KV up to the last token but one by whatever is cheapest; its
events are routed by the ids it drew, until it has ended, also when its session was closed meanwhile: it may hold leases. A
generation is one Decode command; when it ends, one Capture command exports the blocks that became complete, which go to the
local store and to the publisher, also when the session is closed before they come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

import numpy as np

from kakeya_zmq.blocks import Chain, Part, bind_parts
from kakeya_zmq.engine import (
    KV_NOT_ENCODED,
    Capture,
    CommandFailed,
    Decode,
    DecodeFinished,
    ModelFacts,
    OpenSession,
    PartsCaptured,
    TokenArray,
    TokenDecoded,
)
from kakeya_zmq.engine import CloseSession as CloseEngineSession
from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskProgressed,
    AskReplied,
    CancelCommand,
    CommandEnded,
    CommandEvent,
    ConnectReceiver,
    Count,
    CreditEarned,
    Effect,
    HostEvent,
    LaneFinished,
    Note,
    PartsReceived,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Tick,
    Ticket,
)
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.handover import Handover
from kakeya_zmq.protocol.inference_session import (
    Appending,
    Capturing,
    ExplainPrompt,
    Generating,
    InferenceEffect,
    InferenceSettings,
    PreparationRequest,
    PublishParts,
    Session,
    alone,
    appended_history,
    checked_sampling,
    session_to_evict,
)
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import Cancelled, IdAllocator, PreparationOutcome, Ready, Unavailable
from kakeya_zmq.protocol.superseding import supersede
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError, FailureCode, InvalidInput, KakeyaError, RequestFailed
from wire.messages import (
    Appended,
    AppendTokens,
    CloseSession,
    CreateSession,
    Explanation,
    Generate,
    Generated,
    GetSession,
    PrefillProgress,
    SessionClosed,
    SessionCreated,
    SessionState,
    StopReason,
    Tokens,
)

__all__ = [
    "ExplainPrompt",
    "InferenceEffect",
    "InferenceService",
    "InferenceSettings",
    "PreparationRequest",
    "PublishParts",
]


class InferenceService:
    """The session table of a primary. Events and effects: kakeya_zmq.protocol.effects, plus PublishParts and ExplainPrompt.

    Args:
        facts: the loaded model's.
        store: the primary's own store (hot tier).
        make_preparation: builds the preparation of one append from what the host knows of the fleet right now.
        make_chain: hashes tokens into the chain of the served tenant.
        hash_block: hashes the tokens of one block under its parent's hash, for the same tenant.
        session_kv_bytes: live KV bytes of an engine session, as last known.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        store: BlockStore,
        ids: IdAllocator,
        random_bytes: Callable[[int], bytes],
        make_preparation: Callable[[PreparationRequest, float], PromptPreparation],
        make_chain: Callable[[TokenArray], Chain],
        hash_block: Callable[[TokenArray, bytes], bytes],
        session_kv_bytes: Callable[[str], int],
        settings: InferenceSettings | None = None,
    ) -> None:
        self._facts = facts
        self._fingerprint = facts.compatibility.fingerprint()
        self._block_tokens = facts.requirement.block_tokens
        self._store = store
        self._ids = ids
        self._random_bytes = random_bytes
        self._make_preparation = make_preparation
        self._make_chain = make_chain
        self._hash_block = hash_block
        self._session_kv_bytes = session_kv_bytes
        self._settings = settings or InferenceSettings()
        self._sessions: dict[str, Session] = {}
        self._flights = Flights()
        self._handover = Handover()
        self._appends: dict[Appending, None] = {}
        """Whose preparations have not ended, oldest first; some of their sessions may be closed."""
        self._owners: dict[tuple[str, int], Appending] = {}
        """Asks, lanes and tickets that a preparation drew, by ("ask" | "lane" | "ticket", number)."""
        self._decodes: dict[Ticket, Session] = {}
        self._captures: dict[Ticket, Capturing] = {}
        self._told_not_encoded = False

    # --- what others may ask -----------------------------------------------------------------------------------

    @staticmethod
    def handles(body: object) -> bool:
        """Whether a request body is this service's business."""
        return isinstance(body, CreateSession | AppendTokens | Generate | CloseSession | GetSession)

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def decoding(self) -> bool:
        """Whether any session is between its first and last token."""
        return any(isinstance(session.operation, Generating) for session in self._sessions.values())

    @property
    def busy(self) -> bool:
        """Whether anything is under way, or parts wait to be published."""
        waiting = any(session.operation or session.pending for session in self._sessions.values())
        return waiting or bool(self._captures) or bool(self._appends)

    @property
    def unpublished(self) -> int:
        """Sessions, closed ones included, whose new parts have not been handed over for publishing yet."""
        captured = [capture.session for capture in self._captures.values() if capture.session.options.publish]
        waiting = [session for session in self._sessions.values() if session.pending]
        return len({session.session_id for session in [*captured, *waiting]})

    def deadline(self) -> float | None:
        times = [due for append in self._appends if (due := append.preparation.deadline()) is not None]
        for session in self._sessions.values():
            if session.operation is None:
                times.append(session.last_used + self._settings.session_idle_s)
                if session.publish_at is not None:
                    times.append(session.publish_at)
        return min(times, default=None)

    # --- the machine -----------------------------------------------------------------------------------------------

    def on(self, event: HostEvent, now: float) -> list[InferenceEffect]:
        """Advance by one event; events that are not this machine's are ignored."""
        match event:
            case RequestArrived():
                try:
                    return self._request(event, now)
                except KakeyaError as error:
                    return [SendFailure(event.key, error.code, str(error))]
            case RequestCancelled(key=key):
                return self._cancel(key, now)
            case CommandEvent(ticket=ticket) | CommandEnded(ticket=ticket):
                return self._from_engine(event, ticket, now)
            case AskReplied(ask=number) | AskProgressed(ask=number) | AskFailed(ask=number):
                return self._to_preparation(event, ("ask", number), now)
            case PartsReceived(lane=number) | CreditEarned(lane=number) | LaneFinished(lane=number):
                return self._to_preparation(event, ("lane", number), now)
            case Tick():
                return self._tick(now)
            case _:
                return []

    def _request(self, event: RequestArrived, now: float) -> list[InferenceEffect]:
        match event.body:
            case CreateSession() as body:
                return self._create(event, body, now)
            case AppendTokens() as body:
                return self._append(event.key, self._session(body.session_id, event), body, now)
            case Generate() as body:
                return self._generate(event.key, self._session(body.session_id, event), body, now)
            case CloseSession(session_id=session_id):
                session = self._session(session_id, event)
                reply = SendReply(event.key, SessionClosed(history_tokens=len(session.history)))
                return [*self._close(session, "the session was closed", now), reply]
            case GetSession(session_id=session_id):
                session = self._session(session_id, event)
                state = SessionState(
                    history_tokens=len(session.history),
                    kv_bytes=self._session_kv_bytes(session.session_id),
                    idle_ms=max(0, int((now - session.last_used) * 1000)),
                    busy=session.operation is not None,
                )
                return [SendReply(event.key, state)]
            case _:
                return []

    def _session(self, session_id: str, event: RequestArrived) -> Session:
        session = self._sessions.get(session_id)
        asker = (event.node_id, event.identity_public_key)
        if session is None or (session.creator, session.creator_key) != asker:
            raise RequestFailed(FailureCode.NOT_FOUND, "no such session", remedy="it was closed, evicted or never created")
        return session

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _create(self, event: RequestArrived, body: CreateSession, now: float) -> list[InferenceEffect]:
        if not self._settings.sharing:
            body = alone(body)
        effects: list[InferenceEffect] = []
        if len(self._sessions) >= self._settings.capacity:
            evicted = session_to_evict(self._sessions.values(), event.identity_public_key)
            effects += [Count("sessions_evicted"), *self._close(evicted, "evicted to make room", now)]
        session = Session("sess-" + self._random_bytes(16).hex(), event.node_id, event.identity_public_key, body, now)
        self._sessions[session.session_id] = session
        created = SessionCreated(
            session_id=session.session_id,
            model_id=self._facts.compatibility.model_id,
            max_context_tokens=self._facts.max_context_tokens,
            eos_token_ids=body.eos_token_ids or self._facts.eos_token_ids,
        )
        effects.append(RunCommand(self._ids.ticket(), OpenSession(session.session_id)))
        return [*effects, Count("sessions_created"), SendReply(event.key, created)]

    def _close(self, session: Session, reason: str, now: float) -> list[InferenceEffect]:
        effects: list[InferenceEffect] = []
        del self._sessions[session.session_id]
        session.closed = True
        operation = session.operation
        if operation is not None and operation.key is not None:
            effects.append(SendFailure(operation.key, FailureCode.CANCELLED, reason))
            operation.key = None
        match operation:
            case Appending():
                # It lives on until it has let go of its leases; the engine closes the session behind its last command.
                effects += self._advance(operation, operation.preparation.cancel(now), now)
            case Generating(ticket=ticket):
                del self._decodes[ticket]
                effects.append(CancelCommand(ticket))
            case None:
                pass
            case _:
                assert_never(operation)
        if session.capture is None:
            effects += self._flush(session, now)
        effects.append(RunCommand(self._ids.ticket(), CloseEngineSession(session.session_id)))
        return effects

    def _start_over(self, session: Session) -> list[InferenceEffect]:
        """Empty the session's KV (the store still has the blocks): it does not belong to the history any more."""
        session.live_position = 0
        close, reopen = CloseEngineSession(session.session_id), OpenSession(session.session_id)
        commands = [RunCommand(self._ids.ticket(), close), RunCommand(self._ids.ticket(), reopen)]
        return [Count("sessions_restarted"), *commands]

    def _tick(self, now: float) -> list[InferenceEffect]:
        effects: list[InferenceEffect] = []
        for append in list(self._appends):
            if append.preparation.outcome is not None:
                continue  # another one's end has ended it
            due = append.preparation.deadline()
            if due is not None and due <= now:
                effects += self._advance(append, append.preparation.on(Tick(), now), now)
        for session in list(self._sessions.values()):
            if session.operation is not None:
                continue
            if session.last_used + self._settings.session_idle_s <= now:
                effects += [Count("sessions_expired"), *self._close(session, "idle for too long", now)]
            elif session.publish_at is not None and session.publish_at <= now:
                effects += self._flush(session, now, tails=True)
        return effects

    def flush(self, now: float) -> list[InferenceEffect]:
        """Hand over for publishing what waits for a generation that will not come: the node is going to stop."""
        waiting = [session for session in self._sessions.values() if session.pending]
        idle = [session for session in waiting if session.operation is None and session.capture is None]
        return [effect for session in idle for effect in self._flush(session, now, tails=True)]

    def _flush(self, session: Session, now: float, *, tails: bool = False) -> list[InferenceEffect]:
        """Hand over what waits to be published. A tail waits on while the session is in use: the next turn is likely to
        make a block of it, and then nobody has to send it twice.

        Args:
            tails: hand the tails over, too.
        """
        session.publish_at = None
        pending, session.pending = session.pending, []
        cuts_within = partial(self._store.cuts_within, fingerprint=self._fingerprint)
        cuts = {cut.block_hash: cut for part in pending for cut in cuts_within(part.meta.block_hash)}
        ready = [part for part in pending if part.meta.block_hash not in cuts]
        if not (tails or session.closed):
            session.pending = [part for part in ready if part.meta.token_count < self._block_tokens]
            ready = [part for part in ready if part.meta.token_count == self._block_tokens]
            if session.pending:
                session.publish_at = now + self._settings.publish_delay_s
        # A block goes along with what is said of it, although another session may have handed it over: it is not sent twice.
        told = {cuts[part.meta.block_hash].within for part in pending if part.meta.block_hash in cuts}
        fresh = self._handover.select(ready, now)
        sent = {part.meta.ref for part in fresh}
        parts = (*fresh, *(part for part in ready if part.meta.block_hash in told and part.meta.ref not in sent))
        blocks = {part.meta.block_hash for part in parts}
        return [PublishParts(parts, tuple(cut for cut in cuts.values() if cut.within in blocks))] if parts else []

    def _refuse_when_busy(self, session: Session) -> None:
        if session.operation is not None:
            raise RequestFailed(FailureCode.ABORTED, "the session is busy with another operation")

    # --- append ------------------------------------------------------------------------------------------------------

    def _append(self, key: RequestKey, session: Session, body: AppendTokens, now: float) -> list[InferenceEffect]:
        self._refuse_when_busy(session)
        tokens = appended_history(session.history, body.tokens, self._facts)
        session.last_used = now
        if len(body.tokens) == 0 and not session.lost:
            explanation = Explanation(prompt_tokens=len(tokens), sources=(), reasons=(), elapsed_ms=0.0)
            return [SendReply(key, Appended(history_tokens=len(tokens), explanation=explanation))]
        request = PreparationRequest(session.session_id, tokens, session.live_position, session.options, self._flights)
        preparation = self._make_preparation(request, now)
        operation = Appending(key, session, preparation, tokens)
        session.operation = operation
        session.publish_at = None
        self._appends[operation] = None
        return self._advance(operation, preparation.start(now), now)

    def _advance(self, operation: Appending, raw_effects: list[Effect], now: float) -> list[InferenceEffect]:
        """Carry on with a preparation, and with those that wait for what it has brought."""
        effects = self._advance_one(operation, raw_effects, now)
        while (follower := next((one for one in self._appends if one.preparation.has_news), None)) is not None:
            effects += self._advance_one(follower, follower.preparation.look(now), now)
        return effects

    def _advance_one(self, operation: Appending, raw_effects: list[Effect], now: float) -> list[InferenceEffect]:
        effects = self._own(operation, raw_effects)
        outcome = operation.preparation.outcome
        if outcome is None:
            return [*effects, *self._report(operation)]
        self._appends.pop(operation, None)
        self._owners = {number: owner for number, owner in self._owners.items() if owner is not operation}
        session = operation.session
        if session.options.publish:
            session.pending += outcome.new_parts
        if session.closed:
            return [*effects, *(self._flush(session, now) if session.capture is None else [])]
        session.operation = None
        session.last_used = now
        effects += self._conclude(operation, outcome)
        if session.pending:
            session.publish_at = now + self._settings.publish_delay_s
        return effects

    def _conclude(self, operation: Appending, outcome: PreparationOutcome) -> list[InferenceEffect]:
        session, key = operation.session, operation.key
        before, session.live_position = session.live_position, outcome.position
        effects: list[InferenceEffect] = []
        match outcome:
            case Ready(explanation=explanation):
                session.history = operation.tokens
                # What was computed now has been exported; what is older may still wait for a capture that failed.
                if session.captured >= self._whole_blocks(before):
                    session.captured = self._whole_blocks(session.live_position)
                effects.append(ExplainPrompt(explanation))
                if key is not None:
                    appended = Appended(history_tokens=len(session.history), explanation=explanation)
                    effects.append(SendReply(key, appended))
            case Unavailable(reason=reason, explanation=explanation):
                effects.append(ExplainPrompt(explanation))
                if key is not None:
                    effects.append(SendFailure(key, FailureCode.UNAVAILABLE, reason))
            case Cancelled():
                pass
            case _:
                assert_never(outcome)
        if session.live_position > len(session.history):
            effects += self._start_over(session)
        return effects

    def _whole_blocks(self, position: int) -> int:
        return position // self._block_tokens * self._block_tokens

    def _report(self, operation: Appending) -> list[InferenceEffect]:
        progress = operation.preparation.progress
        seen = (progress.tokens_done, int(progress.source))
        # What a user sees never goes back, also when another stage begins to count anew.
        unchanged = seen == operation.reported or progress.tokens_done < operation.reported[0]
        if operation.key is None or unchanged or progress.tokens_total == 0:
            return []
        operation.reported = seen
        body = PrefillProgress(tokens_done=progress.tokens_done, tokens_total=progress.tokens_total, source=progress.source)
        return [SendProgress(operation.key, body)]

    def _to_preparation(self, event: HostEvent, name: tuple[str, int], now: float) -> list[InferenceEffect]:
        operation = self._owners.get(name)
        return [] if operation is None else self._advance(operation, operation.preparation.on(event, now), now)

    def _own(self, operation: Appending, raw_effects: list[Effect]) -> list[InferenceEffect]:
        """Note whose the drawn ids are, so that their events find the preparation."""
        told: list[InferenceEffect] = []
        for effect in raw_effects:
            match effect:
                case Ask(ask=ask):
                    self._owners["ask", ask] = operation
                case ConnectReceiver(lane=lane):
                    self._owners["lane", lane] = operation
                case RunCommand(ticket=ticket):
                    self._owners["ticket", ticket] = operation
                case Count(name="parts_not_encoded", amount=lost):
                    told += self._not_encoded(lost)[1:]
                case _:
                    pass
        return [*raw_effects, *told]

    # --- generate ------------------------------------------------------------------------------------------------------

    def _generate(self, key: RequestKey, session: Session, body: Generate, now: float) -> list[InferenceEffect]:
        self._refuse_when_busy(session)
        sampling = checked_sampling(body)
        if len(session.history) == 0:
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, "nothing to continue", remedy="append tokens first")
        if session.lost:
            text, remedy = "the session's KV was lost by a failure", "append again; appending no tokens brings it back"
            raise RequestFailed(FailureCode.FAILED_PRECONDITION, text, remedy=remedy)
        if not session.decodable:
            text = "the last answer ended with an end-of-sequence token"
            raise RequestFailed(FailureCode.FAILED_PRECONDITION, text, remedy="append the next turn before generating")
        ticket = self._ids.ticket()
        session.operation = Generating(key, ticket, now)
        session.publish_at = None
        session.last_used = now
        self._decodes[ticket] = session
        eos = session.options.eos_token_ids or self._facts.eos_token_ids
        last_token = int(session.history[-1])
        return [
            Count("generations"),
            RunCommand(ticket, Decode(session.session_id, last_token, body.max_tokens, eos, sampling)),
        ]

    def _from_engine(self, event: CommandEvent | CommandEnded, ticket: Ticket, now: float) -> list[InferenceEffect]:
        if ("ticket", ticket) in self._owners:
            return self._to_preparation(event, ("ticket", ticket), now)
        if ticket in self._captures:
            return self._capture_event(ticket, self._captures[ticket], event, now)
        session = self._decodes.get(ticket)
        if session is None or not isinstance(session.operation, Generating):
            return []
        if isinstance(event, CommandEvent):
            return self._decode_event(session.operation, event)
        del self._decodes[ticket]
        return self._decode_ended(session, session.operation, event, now)

    def _decode_event(self, operation: Generating, event: CommandEvent) -> list[InferenceEffect]:
        match event.event:
            case TokenDecoded(token=token):
                operation.tokens.append(token)
                if operation.key is None:
                    return []
                packed = token.to_bytes(4, "little", signed=True)
                return [SendProgress(operation.key, Tokens(tokens=packed))]
            case DecodeFinished(stop_reason=stop_reason, position=position):
                operation.stop_reason = stop_reason
                operation.position = position
            case CommandFailed(message=message, position=position):
                operation.failure = message
                operation.position = position
            case _:
                pass
        return []

    def _decode_ended(
        self, session: Session, operation: Generating, event: CommandEnded, now: float
    ) -> list[InferenceEffect]:
        session.operation = None
        session.last_used = now
        produced = np.array(operation.tokens, dtype=np.int32)
        session.history = np.concatenate([session.history, produced]).astype(np.int32, copy=False)
        effects: list[InferenceEffect] = [Count("tokens_generated", len(produced))]
        if operation.key is not None:
            effects.append(self._decode_answer(session, operation, operation.key, now))
        position = event.position if event.position is not None else operation.position
        if position is None and not operation.tokens:
            position = session.live_position  # cancelled before the engine had even opened the session
        if position is None or position > len(session.history):
            effects.append(Note("error", "the engine did not say where a generation stopped; the session starts over"))
            return [*effects, *self._start_over(session), *self._flush(session, now)]
        session.live_position = position
        return [*effects, *self._begin_capture(session, now)]

    def _decode_answer(self, session: Session, operation: Generating, key: RequestKey, now: float) -> InferenceEffect:
        if operation.failure is not None:
            return SendFailure(key, FailureCode.INTERNAL, f"decoding failed: {operation.failure}")
        generated = Generated(
            stop_reason=operation.stop_reason or StopReason.CANCELLED,
            token_count=len(operation.tokens),
            history_tokens=len(session.history),
            elapsed_ms=(now - operation.started) * 1000,
        )
        return SendReply(key, generated)

    # --- capture after a generation --------------------------------------------------------------------------------

    def _begin_capture(self, session: Session, now: float) -> list[InferenceEffect]:
        if session.capture is not None:
            # The generation was cancelled before its turn, so this capture exports all there is; its end publishes.
            return []
        wanted = session.options.use_local_cache or session.options.publish
        if not wanted or session.live_position <= session.captured:
            return self._flush(session, now)
        ticket = self._ids.ticket()
        session.capture = Capturing(session, self._make_chain(session.history[: session.live_position]))
        self._captures[ticket] = session.capture
        return [RunCommand(ticket, Capture(session.session_id, session.captured))]

    def _capture_event(
        self, ticket: Ticket, capture: Capturing, event: CommandEvent | CommandEnded, now: float
    ) -> list[InferenceEffect]:
        session = capture.session
        if isinstance(event, CommandEnded):
            del self._captures[ticket]
            session.capture = None
            if not (capture.failed or event.cancelled):
                session.captured = max(session.captured, self._whole_blocks(capture.chain.tokens))
            # While another operation runs the parts wait for its end.
            return self._flush(session, now) if session.operation is None or session.closed else []
        match event.event:
            case PartsCaptured(parts=raw_parts, parts_not_encoded=lost):
                effects = self._not_encoded(lost)
                try:
                    parts = bind_parts(capture.chain, raw_parts)
                except ValueError:  # the engine cut other blocks than the chain has: only later reuse is lost
                    capture.failed = True
                    return [*effects, Count("capture_mismatches")]
                if session.options.publish:
                    session.pending += parts
                if session.options.use_local_cache:
                    effects += self._keep(parts, now)
                    self._supersede(session, parts)
                return effects
            case CommandFailed(message=message):
                capture.failed = True
                return [Count("capture_failures"), Note("warning", f"new KV could not be stored: {message}")]
            case _:
                return []

    def _supersede(self, session: Session, parts: tuple[Part, ...]) -> None:
        """Let go of tails of this session, or of others that began alike, which the new blocks contain."""
        if self._facts.requirement.state:
            return

        def hash_tail(parent_hash: bytes, start: int, count: int) -> bytes:
            return self._hash_block(session.history[start : start + count], parent_hash)

        supersede(self._store, [part.meta for part in parts], fingerprint=self._fingerprint, hash_tail=hash_tail)

    def _not_encoded(self, lost_parts: int) -> list[InferenceEffect]:
        """Count parts that the codec could not store; the user is told once, however often it happens."""
        if not lost_parts:
            return []
        told, self._told_not_encoded = self._told_not_encoded, True
        return [Count("parts_not_encoded", lost_parts), *([] if told else [Note("error", KV_NOT_ENCODED)])]

    def _keep(self, parts: tuple[Part, ...], now: float) -> list[InferenceEffect]:
        failures = 0
        for part in parts:
            try:
                self._store.put(part, fingerprint=self._fingerprint, now=now)
            except (CapacityError, InvalidInput):
                # No room, or somebody published nonsense under this hash. Only later reuse is lost: the answer was given.
                failures += 1
        return [Count("put_failures", failures)] if failures else []

    # --- cancel ------------------------------------------------------------------------------------------------------

    def _cancel(self, key: RequestKey, now: float) -> list[InferenceEffect]:
        operations = (session.operation for session in self._sessions.values())
        operation = next((operation for operation in operations if operation is not None and operation.key == key), None)
        if operation is None:
            return []
        operation.key = None
        match operation:
            case Appending(preparation=preparation):
                return [Count("appends_cancelled"), *self._advance(operation, preparation.cancel(now), now)]
            case Generating(ticket=ticket):
                return [Count("generations_cancelled"), CancelCommand(ticket)]
            case _:
                assert_never(operation)
