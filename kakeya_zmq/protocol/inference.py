"""Inference sessions of a primary: create, append, generate, close.

Rules
- A session's history is append-only; how appends are grouped never changes its state. An append that fails or is cancelled
  leaves the history as it was, and the session usable.
- A session belongs to the node that opened it, by its name and its identity key; for others it does not exist.
- When the table is full, the oldest idle session of whoever has most of them makes room; nobody loses one to an asker that
  has as many.
- One operation at a time on a session; a second one is refused with ABORTED. Different sessions interleave. Only a
  generation may be asked for while the append before it runs: it begins when that has succeeded, and is ABORTED otherwise.
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
This file keeps the table: who may open a session, who has to go, what ends when one is closed. What is under way in the
sessions is kept beside it, each kind in a file of its own:
- an append runs one preparation, which brings the KV up to the last token but one (.inference_append);
- a generation is one Decode command (.inference_generate);
- a capture exports what a generation has made, for the local store and the publisher (.inference_capture).
Sessions themselves, and what is allowed in them, are values (.inference_session).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import msgspec

from kakeya_zmq.blocks import Chain
from kakeya_zmq.engine import CloseSession as CloseEngineSession
from kakeya_zmq.engine import ModelFacts, OpenSession, TokenArray
from kakeya_zmq.protocol.effects import (
    CancelCommand,
    CommandEnded,
    CommandEvent,
    Count,
    HostEvent,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    RunCommand,
    SendFailure,
    SendReply,
    Tick,
)
from kakeya_zmq.protocol.inference_append import Appends
from kakeya_zmq.protocol.inference_capture import Captures
from kakeya_zmq.protocol.inference_generate import Generations
from kakeya_zmq.protocol.inference_session import (
    Appending,
    ExplainPrompt,
    Generating,
    InferenceEffect,
    InferenceSettings,
    PreparationRequest,
    PublishParts,
    Session,
    alone,
    session_to_evict,
)
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.store import BlockStore
from wire.errors import FailureCode, KakeyaError, RequestFailed
from wire.messages import (
    AppendTokens,
    CloseSession,
    CreateSession,
    Generate,
    GetSession,
    SessionClosed,
    SessionCreated,
    SessionState,
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
        self._ids = ids
        self._random_bytes = random_bytes
        self._session_kv_bytes = session_kv_bytes
        self._settings = settings or InferenceSettings()
        self._sessions: dict[str, Session] = {}
        publish_delay_s = self._settings.publish_delay_s
        self._captures = Captures(
            facts=facts,
            store=store,
            ids=ids,
            make_chain=make_chain,
            hash_block=hash_block,
            publish_delay_s=publish_delay_s,
        )
        self._generations = Generations(facts=facts, ids=ids, captures=self._captures)
        self._appends = Appends(
            facts=facts,
            ids=ids,
            captures=self._captures,
            generate=self._generations.start,
            make_preparation=make_preparation,
            publish_delay_s=publish_delay_s,
        )

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
        return waiting or bool(self._captures.sessions()) or self._appends.busy

    @property
    def unpublished(self) -> int:
        """Sessions, closed ones included, whose new parts have not been handed over for publishing yet."""
        captured = [session for session in self._captures.sessions() if session.options.publish]
        waiting = [session for session in self._sessions.values() if session.pending]
        return len({session.session_id for session in [*captured, *waiting]})

    def deadline(self) -> float | None:
        times = self._appends.deadlines()
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
            case CommandEvent() | CommandEnded():
                return self._from_engine(event, now)
            case Tick():
                return self._tick(now)
            case _:
                return self._appends.on(event, now)

    def _request(self, event: RequestArrived, now: float) -> list[InferenceEffect]:
        match event.body:
            case CreateSession() as body:
                return self._create(event, body, now)
            case AppendTokens() as body:
                return self._appends.start(event.key, self._session(body.session_id, event), body, now)
            case Generate() as body:
                return self._generations.start(event.key, self._session(body.session_id, event), body, now)
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
            case Appending(following=following):
                if following is not None:
                    operation.following = None
                    effects.append(SendFailure(following.key, FailureCode.CANCELLED, reason))
                # It lives on until it has let go of its leases; the engine closes the session behind its last command.
                effects += self._appends.cancel(operation, now)
            case Generating():
                effects += self._generations.stop(operation)
            case None:
                pass
            case _:
                assert_never(operation)
        if session.capture is None:
            effects += self._captures.flush(session, now)
        effects.append(RunCommand(self._ids.ticket(), CloseEngineSession(session.session_id)))
        return effects

    def _tick(self, now: float) -> list[InferenceEffect]:
        effects = self._appends.tick(now)
        for session in list(self._sessions.values()):
            if session.operation is not None:
                continue
            if session.last_used + self._settings.session_idle_s <= now:
                effects += [Count("sessions_expired"), *self._close(session, "idle for too long", now)]
            elif session.publish_at is not None and session.publish_at <= now:
                effects += self._captures.flush(session, now, tails=True)
        return effects

    def isolate(self) -> None:
        """What open sessions hold may be wrong: nothing of it goes into the store, or to others, from now on. They go on."""
        for session in {*self._sessions.values(), *self._captures.sessions(), *self._appends.sessions()}:
            session.options = msgspec.structs.replace(session.options, use_local_cache=False, publish=False)
            session.pending.clear()
            session.publish_at = None
        self._captures.forget_handover()

    def flush(self, now: float) -> list[InferenceEffect]:
        """Hand over for publishing what waits for a generation that will not come: the node is going to stop."""
        waiting = [session for session in self._sessions.values() if session.pending]
        idle = [session for session in waiting if session.operation is None and session.capture is None]
        return [effect for session in idle for effect in self._captures.flush(session, now, tails=True)]

    def _from_engine(self, event: CommandEvent | CommandEnded, now: float) -> list[InferenceEffect]:
        if self._appends.owns(event.ticket):
            return self._appends.on(event, now)
        if self._captures.owns(event.ticket):
            return self._captures.on(event, now)
        return self._generations.on(event, now)

    # --- cancel ------------------------------------------------------------------------------------------------------

    def _cancel(self, key: RequestKey, now: float) -> list[InferenceEffect]:
        operations = [session.operation for session in self._sessions.values()]
        for append in operations:
            if isinstance(append, Appending) and append.following is not None and append.following.key == key:
                append.following = None
                return [Count("generations_cancelled")]
        operation = next((operation for operation in operations if operation is not None and operation.key == key), None)
        if operation is None:
            return []
        operation.key = None
        match operation:
            case Appending():
                return [Count("appends_cancelled"), *self._appends.cancel(operation, now)]
            case Generating(ticket=ticket):
                return [Count("generations_cancelled"), CancelCommand(ticket)]
            case _:
                assert_never(operation)
