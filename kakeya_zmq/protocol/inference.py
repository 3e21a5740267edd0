"""Inference sessions of a primary: create, append, generate, close.

Rules
- A session's history is append-only; how appends are grouped never changes its state. An append that fails or is cancelled
  leaves the history as it was.
- One operation at a time on a session; a second one is refused with ABORTED. Different sessions interleave.
- Between the first and the last token of a generation nothing is asked of the fleet on the session's behalf: what a turn
  produced is handed over for publishing when its generation has ended, when the session is closed, or when no generation
  followed within ``publish_delay_s``.
- The KV of a session covers its history except the last token (which the next generation runs first), or all of it after
  an answer that ended with an end-of-sequence token.

Theory of operation
An append runs one :class:`PromptPreparation`, which brings the KV up to the last token but one by whatever is cheapest; its
events are routed by the ids it drew. A generation is one Decode command; when it ends, one Capture command exports the
blocks that became complete, which go to the local store and to the publisher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import numpy as np

from kakeya_zmq.blocks import Chain, Part, bind_parts
from kakeya_zmq.engine import (
    Capture,
    CommandFailed,
    Decode,
    DecodeFinished,
    ModelFacts,
    OpenSession,
    PartsCaptured,
    Sampling,
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
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import (
    Cancelled,
    IdAllocator,
    Ready,
    Unavailable,
)
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError, FailureCode, RequestFailed
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


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """Bounds of the session table."""

    capacity: int = 4
    """Sessions held at once; the least recently used idle one makes room."""
    session_idle_s: float = 1800.0
    publish_delay_s: float = 5.0
    """How long parts of an append wait for a generation before they are published without one."""


@dataclass(frozen=True, slots=True)
class PublishParts:
    """Hand these parts to the publisher (an effect of this machine besides the shared ones)."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ExplainPrompt:
    """Remember why a prompt cost what it cost."""

    explanation: Explanation


InferenceEffect: TypeAlias = Effect | PublishParts | ExplainPrompt


@dataclass(frozen=True, slots=True)
class PreparationRequest:
    """What the host needs to build a PromptPreparation for one append."""

    engine_session: str
    tokens: TokenArray
    live_position: int
    options: CreateSession


@dataclass(slots=True)
class _Appending:
    key: RequestKey
    preparation: PromptPreparation
    tokens: TokenArray
    reported: tuple[int, int] = (-1, -1)


@dataclass(slots=True)
class _Generating:
    key: RequestKey | None
    ticket: Ticket
    started: float
    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    position: int | None = None
    failure: str | None = None


@dataclass(slots=True)
class _Session:
    session_id: str
    options: CreateSession
    history: TokenArray
    last_used: float
    live_position: int = 0
    captured: int = 0
    """Tokens whose parts have been exported; a tail counts as not yet exported."""
    operation: _Appending | _Generating | None = None
    capture_ticket: Ticket | None = None
    capture_chain: Chain | None = None
    pending: list[Part] = field(default_factory=list)
    publish_at: float | None = None


class InferenceService:
    """The session table of a primary. Events and effects: kakeya_zmq.protocol.effects, plus PublishParts and ExplainPrompt.

    Args:
        facts: the loaded model's.
        store: the primary's own store (hot tier).
        make_preparation: builds the preparation of one append from what the host knows of the fleet right now.
        make_chain: hashes tokens into the chain of the served tenant.
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
        session_kv_bytes: Callable[[str], int],
        settings: InferenceSettings | None = None,
    ) -> None:
        self._facts = facts
        self._fingerprint = facts.compatibility.fingerprint()
        self._store = store
        self._ids = ids
        self._random_bytes = random_bytes
        self._make_preparation = make_preparation
        self._make_chain = make_chain
        self._session_kv_bytes = session_kv_bytes
        self._settings = settings or InferenceSettings()
        self._sessions: dict[str, _Session] = {}
        self._owners: dict[tuple[str, int], PromptPreparation] = {}
        """Asks, lanes and tickets that a preparation drew, by ("ask" | "lane" | "ticket", number)."""
        self._preparations: dict[int, str] = {}
        """id() of a running preparation → its session."""

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
        return any(isinstance(session.operation, _Generating) for session in self._sessions.values())

    @property
    def busy(self) -> bool:
        return any(s.operation or s.capture_ticket or s.pending for s in self._sessions.values())

    def deadline(self) -> float | None:
        times: list[float] = []
        for session in self._sessions.values():
            if isinstance(session.operation, _Appending):
                due = session.operation.preparation.deadline()
                if due is not None:
                    times.append(due)
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
                except RequestFailed as error:
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
                return self._create(event.key, body, now)
            case AppendTokens() as body:
                return self._append(event.key, self._session(body.session_id), body, now)
            case Generate() as body:
                return self._generate(event.key, self._session(body.session_id), body, now)
            case CloseSession(session_id=session_id):
                session = self._session(session_id)
                reply = SendReply(event.key, SessionClosed(history_tokens=len(session.history)))
                return [*self._close(session, "the session was closed", now), reply]
            case GetSession(session_id=session_id):
                session = self._session(session_id)
                state = SessionState(
                    history_tokens=len(session.history),
                    kv_bytes=self._session_kv_bytes(session_id),
                    idle_ms=max(0, int((now - session.last_used) * 1000)),
                    busy=session.operation is not None,
                )
                return [SendReply(event.key, state)]
            case _:
                return []

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestFailed(FailureCode.NOT_FOUND, "no such session", remedy="it was closed, evicted or never created")
        return session

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _create(self, key: RequestKey, body: CreateSession, now: float) -> list[InferenceEffect]:
        effects: list[InferenceEffect] = []
        if len(self._sessions) >= self._settings.capacity:
            idle = [session for session in self._sessions.values() if session.operation is None]
            if not idle:
                text = f"all {self._settings.capacity} sessions are busy"
                raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, text, remedy="try again, or raise --capacity")
            oldest = min(idle, key=lambda session: session.last_used)
            effects += [Count("sessions_evicted"), *self._close(oldest, "evicted to make room", now)]
        session_id = "sess-" + self._random_bytes(16).hex()
        session = _Session(session_id, body, np.zeros(0, dtype=np.int32), now)
        self._sessions[session_id] = session
        created = SessionCreated(
            session_id=session_id,
            model_id=self._facts.compatibility.model_id,
            max_context_tokens=self._facts.max_context_tokens,
            eos_token_ids=body.eos_token_ids or self._facts.eos_token_ids,
        )
        effects.append(RunCommand(self._ticket(), OpenSession(session_id)))
        return [*effects, Count("sessions_created"), SendReply(key, created)]

    def _close(self, session: _Session, reason: str, now: float) -> list[InferenceEffect]:
        effects: list[InferenceEffect] = []
        match session.operation:
            case _Appending(key=key, preparation=preparation):
                effects += self._own(session.operation, preparation.cancel(now))
                self._forget(preparation)
                effects.append(SendFailure(key, FailureCode.CANCELLED, reason))
            case _Generating(key=key, ticket=ticket):
                effects.append(CancelCommand(ticket))
                if key is not None:
                    effects.append(SendFailure(key, FailureCode.CANCELLED, reason))
            case None:
                pass
        effects += self._flush(session)
        del self._sessions[session.session_id]
        effects.append(RunCommand(self._ticket(), CloseEngineSession(session.session_id)))
        return effects

    def _tick(self, now: float) -> list[InferenceEffect]:
        effects: list[InferenceEffect] = []
        for session in list(self._sessions.values()):
            operation = session.operation
            if isinstance(operation, _Appending):
                due = operation.preparation.deadline()
                if due is not None and due <= now:
                    effects += self._advance(session, operation, operation.preparation.on(Tick(), now), now)
            elif operation is None and session.last_used + self._settings.session_idle_s <= now:
                effects += [Count("sessions_expired"), *self._close(session, "idle for too long", now)]
                continue
            if session.publish_at is not None and session.publish_at <= now and session.operation is None:
                effects += self._flush(session)
        return effects

    def _flush(self, session: _Session) -> list[InferenceEffect]:
        session.publish_at = None
        if not session.pending:
            return []
        parts, session.pending = tuple(session.pending), []
        return [PublishParts(parts)]

    # --- append ------------------------------------------------------------------------------------------------------

    def _append(self, key: RequestKey, session: _Session, body: AppendTokens, now: float) -> list[InferenceEffect]:
        self._refuse_when_busy(session)
        session.last_used = now
        if len(body.tokens) == 0:
            explanation = Explanation(prompt_tokens=len(session.history), sources=(), reasons=(), elapsed_ms=0.0)
            return [SendReply(key, Appended(history_tokens=len(session.history), explanation=explanation))]
        tokens = self._validated(session, body.tokens)
        request = PreparationRequest(session.session_id, tokens, session.live_position, session.options)
        preparation = self._make_preparation(request, now)
        session.operation = _Appending(key, preparation, tokens)
        session.publish_at = None
        self._preparations[id(preparation)] = session.session_id
        return self._advance(session, session.operation, preparation.start(now), now)

    def _validated(self, session: _Session, packed: bytes) -> TokenArray:
        if len(packed) % 4:
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, "tokens must be packed 32-bit integers")
        added = np.frombuffer(packed, dtype="<i4").astype(np.int32, copy=False)
        if int(added.min()) < 0 or int(added.max()) >= self._facts.vocabulary_size:
            text = f"a token id is outside the model's vocabulary of {self._facts.vocabulary_size}"
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, text, remedy="use the tokenizer of the model that is loaded")
        total = len(session.history) + len(added)
        if total > self._facts.max_context_tokens:
            text = f"the session would hold {total} tokens and the model's context is {self._facts.max_context_tokens}"
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, text, remedy="shorten the prompt or start a new session")
        return np.concatenate([session.history, added]).astype(np.int32, copy=False)

    def _refuse_when_busy(self, session: _Session) -> None:
        if session.operation is not None:
            raise RequestFailed(FailureCode.ABORTED, "the session is busy with another operation")

    def _advance(
        self, session: _Session, operation: _Appending, raw_effects: list[Effect], now: float
    ) -> list[InferenceEffect]:
        effects = self._own(operation, raw_effects)
        outcome = operation.preparation.outcome
        if outcome is None:
            return [*effects, *self._report(operation)]
        self._forget(operation.preparation)
        session.operation = None
        session.last_used = now
        session.live_position = outcome.position
        block = self._facts.requirement.block_tokens
        if session.options.publish and outcome.new_parts:
            session.pending += outcome.new_parts
            session.publish_at = now + self._settings.publish_delay_s
        match outcome:
            case Ready(explanation=explanation):
                session.history = operation.tokens
                session.captured = session.live_position // block * block
                reply = Appended(history_tokens=len(session.history), explanation=explanation)
                effects += [ExplainPrompt(explanation), SendReply(operation.key, reply)]
            case Unavailable(reason=reason, explanation=explanation):
                effects += [ExplainPrompt(explanation), SendFailure(operation.key, FailureCode.UNAVAILABLE, reason)]
                effects += self._rewind(session)
            case Cancelled():
                effects += self._rewind(session)
            case _:
                assert_never(outcome)
        session.captured = min(session.captured, session.live_position // block * block)
        return effects

    def _report(self, operation: _Appending) -> list[InferenceEffect]:
        progress = operation.preparation.progress
        seen = (progress.tokens_done, int(progress.source))
        if seen == operation.reported or progress.tokens_total == 0:
            return []
        operation.reported = seen
        body = PrefillProgress(tokens_done=progress.tokens_done, tokens_total=progress.tokens_total, source=progress.source)
        return [SendProgress(operation.key, body)]

    def _rewind(self, session: _Session) -> list[InferenceEffect]:
        """After a failed append the KV may be ahead of the history: start it over (the store still has the blocks)."""
        if session.live_position <= max(0, len(session.history) - 1):
            return []
        session.live_position = session.captured = 0
        close = RunCommand(self._ticket(), CloseEngineSession(session.session_id))
        return [close, RunCommand(self._ticket(), OpenSession(session.session_id))]

    # --- generate ------------------------------------------------------------------------------------------------------

    def _generate(self, key: RequestKey, session: _Session, body: Generate, now: float) -> list[InferenceEffect]:
        self._refuse_when_busy(session)
        if len(session.history) == 0:
            raise RequestFailed(FailureCode.INVALID_ARGUMENT, "nothing to continue", remedy="append tokens first")
        if session.live_position >= len(session.history):
            text = "the last answer ended with an end-of-sequence token"
            raise RequestFailed(FailureCode.FAILED_PRECONDITION, text, remedy="append the next turn before generating")
        if session.live_position < len(session.history) - 1:
            text = "the session's KV was lost by a failed append"
            raise RequestFailed(FailureCode.FAILED_PRECONDITION, text, remedy="append again")
        sampling = Sampling(body.temperature, body.top_p, body.top_k, body.seed)
        ticket = self._ticket()
        session.operation = _Generating(key, ticket, now)
        session.publish_at = None
        session.last_used = now
        eos = session.options.eos_token_ids or self._facts.eos_token_ids
        return [
            Count("generations"),
            RunCommand(ticket, Decode(session.session_id, int(session.history[-1]), body.max_tokens, eos, sampling)),
        ]

    def _from_engine(self, event: CommandEvent | CommandEnded, ticket: Ticket, now: float) -> list[InferenceEffect]:
        if ("ticket", ticket) in self._owners:
            return self._to_preparation(event, ("ticket", ticket), now)
        for session in self._sessions.values():
            if isinstance(session.operation, _Generating) and session.operation.ticket == ticket:
                return self._decode_event(session, session.operation, event, now)
            if session.capture_ticket == ticket:
                return self._capture_event(session, event, now)
        return []

    def _decode_event(
        self, session: _Session, operation: _Generating, event: CommandEvent | CommandEnded, now: float
    ) -> list[InferenceEffect]:
        if isinstance(event, CommandEnded):
            if event.position is not None:
                operation.position = event.position
            return self._decode_ended(session, operation, now)
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

    def _decode_ended(self, session: _Session, operation: _Generating, now: float) -> list[InferenceEffect]:
        session.operation = None
        session.last_used = now
        produced = np.array(operation.tokens, dtype=np.int32)
        session.history = np.concatenate([session.history, produced]).astype(np.int32, copy=False)
        effects: list[InferenceEffect] = [Count("tokens_generated", len(produced))]
        position = operation.position
        if position is None or position > len(session.history):
            effects.append(Note("error", "the engine did not say where a generation stopped; the session starts over"))
            position = len(session.history) + 1
        session.live_position = position
        if operation.key is not None:
            effects.append(self._decode_reply(session, operation, operation.key, now))
        effects += self._rewind_if_ahead(session)
        return [*effects, *self._begin_capture(session)]

    def _rewind_if_ahead(self, session: _Session) -> list[InferenceEffect]:
        return self._rewind(session) if session.live_position > len(session.history) else []

    def _decode_reply(self, session: _Session, operation: _Generating, key: RequestKey, now: float) -> InferenceEffect:
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

    def _begin_capture(self, session: _Session) -> list[InferenceEffect]:
        wanted = session.options.use_local_cache or session.options.publish
        if not wanted or session.live_position <= session.captured:
            return self._flush(session)
        session.capture_ticket = self._ticket()
        session.capture_chain = self._make_chain(session.history[: session.live_position])
        return [RunCommand(session.capture_ticket, Capture(session.session_id, session.captured))]

    def _capture_event(self, session: _Session, event: CommandEvent | CommandEnded, now: float) -> list[InferenceEffect]:
        if isinstance(event, CommandEnded):
            session.capture_ticket = None
            session.capture_chain = None
            return self._flush(session) if session.operation is None else []
        effects: list[InferenceEffect] = []
        match event.event:
            case PartsCaptured(parts=raw_parts) if session.capture_chain is not None:
                parts = bind_parts(session.capture_chain, raw_parts)
                block = self._facts.requirement.block_tokens
                session.captured = session.capture_chain.tokens // block * block
                if session.options.use_local_cache:
                    effects += self._keep(parts, now)
                if session.options.publish:
                    session.pending += parts
            case CommandFailed(message=message):
                effects += [Count("capture_failures"), Note("warning", f"new KV could not be stored: {message}")]
            case _:
                pass
        return effects

    def _keep(self, parts: tuple[Part, ...], now: float) -> list[InferenceEffect]:
        for index, part in enumerate(parts):
            try:
                self._store.put(part, fingerprint=self._fingerprint, now=now)
            except CapacityError:
                # Only later reuse is lost; the answer was given already.
                return [Count("put_failures", len(parts) - index)]
        return []

    # --- preparations ----------------------------------------------------------------------------------------------

    def _to_preparation(self, event: HostEvent, name: tuple[str, int], now: float) -> list[InferenceEffect]:
        preparation = self._owners.get(name)
        if preparation is None:
            return []
        session = self._sessions.get(self._preparations.get(id(preparation), ""))
        if session is None or not isinstance(session.operation, _Appending):
            return []
        return self._advance(session, session.operation, preparation.on(event, now), now)

    def _own(self, operation: _Appending, raw_effects: list[Effect]) -> list[InferenceEffect]:
        """Note whose the drawn ids are, so that their events find the preparation."""
        for effect in raw_effects:
            match effect:
                case Ask(ask=ask):
                    self._owners["ask", ask] = operation.preparation
                case ConnectReceiver(lane=lane):
                    self._owners["lane", lane] = operation.preparation
                case RunCommand(ticket=ticket):
                    self._owners["ticket", ticket] = operation.preparation
                case _:
                    pass
        return list(raw_effects)

    def _forget(self, preparation: PromptPreparation) -> None:
        self._preparations.pop(id(preparation), None)
        self._owners = {number: owner for number, owner in self._owners.items() if owner is not preparation}

    def _cancel(self, key: RequestKey, now: float) -> list[InferenceEffect]:
        for session in self._sessions.values():
            match session.operation:
                case _Appending(key=operation_key, preparation=preparation) as operation if operation_key == key:
                    effects = self._advance(session, operation, preparation.cancel(now), now)
                    return [Count("appends_cancelled"), *effects]
                case _Generating(key=operation_key, ticket=ticket) as generating if operation_key == key:
                    generating.key = None
                    return [Count("generations_cancelled"), CancelCommand(ticket)]
                case _:
                    pass
        return []

    def _ticket(self) -> Ticket:
        return self._ids.ticket()
