"""What the session table of a primary holds: one inference session, what it is doing, and the bounds of the table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from kakeya_zmq.blocks import Chain, Part
from kakeya_zmq.engine import CloseSession as CloseEngineSession
from kakeya_zmq.engine import ModelFacts, OpenSession, Sampling, TokenArray
from kakeya_zmq.protocol.effects import Count, Effect, RequestKey, RunCommand, Ticket
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import IdAllocator
from wire.errors import FailureCode, RequestFailed
from wire.ids import NodeId
from wire.limits import TOKEN_BYTES
from wire.messages import CreateSession, Cut, Explanation, Generate, PrefillPolicy, StopReason


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """Bounds of the session table."""

    capacity: int = 4
    """Sessions held at once; see :func:`session_to_evict`."""
    session_idle_s: float = 1800.0
    sharing: bool = True
    """False: every prompt is computed here, whatever a session asks for, and nothing is kept or published."""
    publish_delay_s: float = 5.0
    """How long parts of an append wait for a generation before they are published without one."""


def alone(body: CreateSession) -> CreateSession:
    """The session a primary opens whose prefill cache is off.

    Raises:
        RequestFailed: the session must not compute its prompts here, so there is nothing that could.
    """
    if body.policy is PrefillPolicy.REMOTE_REQUIRED:
        text = "remote prefill is required, and this primary's prefill cache is off"
        raise RequestFailed(FailureCode.FAILED_PRECONDITION, text, remedy="start it with --enable-prefill-cache")
    return msgspec.structs.replace(body, policy=PrefillPolicy.LOCAL_ONLY, use_local_cache=False, publish=False)


# --- effects besides the shared ones -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishParts:
    """Hand these parts to the publisher, and tell which tails are the beginnings of their blocks."""

    parts: tuple[Part, ...]
    cuts: tuple[Cut, ...] = ()


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
    flights: Flights
    """The preparations under way on this primary, for single flight."""


# --- a session -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Appending:
    """An append under way. ``key`` is None once nobody waits for its answer."""

    key: RequestKey | None
    session: Session
    preparation: PromptPreparation
    tokens: TokenArray
    """The history as it will be."""
    reported: tuple[int, int] = (-1, -1)
    following: Following | None = None
    """A generation that was asked for already; it begins when the append has succeeded, and fails with it."""


@dataclass(frozen=True, slots=True)
class Following:
    """A generation that waits for the append before it."""

    key: RequestKey
    body: Generate


@dataclass(slots=True, eq=False)
class Generating:
    """A generation under way. ``key`` is None once nobody waits for its answer."""

    key: RequestKey | None
    ticket: Ticket
    started: float
    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    position: int | None = None
    """Tokens whose KV the engine session holds, as the engine said last."""
    failure: str | None = None


@dataclass(slots=True, eq=False)
class Capturing:
    """An export of new blocks under way, which may outlive its session."""

    session: Session
    chain: Chain
    failed: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One inference session; the engine knows it by the same id."""

    session_id: str
    creator: NodeId
    creator_key: bytes = field(repr=False)
    """Name and identity key of who opened it; for anybody else it does not exist."""
    options: CreateSession
    last_used: float
    history: TokenArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    live_position: int = 0
    """Tokens of the history whose KV the engine session holds."""
    captured: int = 0
    """The blocks of the history up to here have been exported once, or came from a store."""
    operation: Appending | Generating | None = None
    capture: Capturing | None = None
    pending: list[Part] = field(default_factory=list)
    """Parts that wait to be published."""
    publish_at: float | None = None
    closed: bool = False

    @property
    def preparing(self) -> Appending | None:
        """The append under way that no generation waits for yet."""
        operation = self.operation
        return operation if isinstance(operation, Appending) and operation.following is None else None

    @property
    def decodable(self) -> bool:
        """Whether the next generation can start: the KV covers the history but for its last token."""
        return 0 < len(self.history) == self.live_position + 1

    @property
    def lost(self) -> bool:
        """Whether KV of the history has to be brought back before a generation."""
        return self.live_position < len(self.history) - 1


def refuse_when_busy(session: Session) -> None:
    """One operation at a time.

    Raises:
        RequestFailed: ABORTED, another one is under way.
    """
    if session.operation is not None:
        raise RequestFailed(FailureCode.ABORTED, "the session is busy with another operation")


def start_over(session: Session, ids: IdAllocator) -> list[InferenceEffect]:
    """Empty the session's KV (the store still has the blocks): it does not belong to the history any more."""
    session.live_position = 0
    close, reopen = CloseEngineSession(session.session_id), OpenSession(session.session_id)
    commands = [RunCommand(ids.ticket(), close), RunCommand(ids.ticket(), reopen)]
    return [Count("sessions_restarted"), *commands]


def appended_history(history: TokenArray, packed: bytes, facts: ModelFacts) -> TokenArray:
    """``history`` and the packed tokens after it, int32, a new array.

    Raises:
        RequestFailed: INVALID_ARGUMENT, the tokens cannot be used.
    """
    if len(packed) % TOKEN_BYTES:
        raise RequestFailed(FailureCode.INVALID_ARGUMENT, "tokens must be packed 32-bit integers")
    added = np.frombuffer(packed, dtype="<i4").astype(np.int32, copy=False)
    if len(added) and (int(added.min()) < 0 or int(added.max()) >= facts.vocabulary_size):
        text = f"a token id is outside the model's vocabulary of {facts.vocabulary_size}"
        raise RequestFailed(FailureCode.INVALID_ARGUMENT, text, remedy="use the tokenizer of the model that is loaded")
    total = len(history) + len(added)
    if len(added) and total > facts.max_context_tokens:
        text = f"the session would hold {total} tokens and the model's context is {facts.max_context_tokens}"
        raise RequestFailed(FailureCode.INVALID_ARGUMENT, text, remedy="shorten the prompt or start a new session")
    return np.concatenate([history, added]).astype(np.int32, copy=False)


def session_to_evict(sessions: Collection[Session], asker_key: bytes) -> Session:
    """The session of a full table that makes room for a new one of ``asker_key``.

    It is the idle one used longest ago of the identity key that has the most sessions: the asker's, when others have no
    more. So whoever opens sessions without end ends its own.

    Raises:
        RequestFailed: RESOURCE_EXHAUSTED, there is none: all are busy, or the idle ones belong to others that have no more
            than the asker.
    """
    remedy = "close a session or try again later, or raise --capacity"
    idle = [session for session in sessions if session.operation is None]
    if not idle:
        raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, f"all {len(sessions)} sessions are busy", remedy=remedy)
    held = Counter(session.creator_key for session in sessions)

    def order(session: Session) -> tuple[int, bool, float]:
        return held[session.creator_key], session.creator_key == asker_key, -session.last_used

    chosen = max(idle, key=order)
    if chosen.creator_key != asker_key and held[chosen.creator_key] <= held[asker_key]:
        text = f"all {len(sessions)} sessions are taken, and those that are idle belong to others that have no more than you"
        raise RequestFailed(FailureCode.RESOURCE_EXHAUSTED, text, remedy=remedy)
    return chosen


def checked_sampling(body: Generate) -> Sampling:
    """How to sample.

    Raises:
        RequestFailed: INVALID_ARGUMENT, naming the field that is out of its range.
    """
    problem = ""
    if body.max_tokens < 1:
        problem = f"max_tokens must be at least 1, not {body.max_tokens}"
    elif not (math.isfinite(body.temperature) and body.temperature >= 0):
        problem = f"temperature must be at least 0, not {body.temperature}"
    elif not 0 <= body.top_p <= 1:
        problem = f"top_p must be between 0 and 1, not {body.top_p}"
    elif body.top_k < 0:
        problem = f"top_k must be at least 0, not {body.top_k}"
    elif body.seed is not None and not 0 <= body.seed < 2**64:
        problem = f"seed must be at least 0 and below 2^64, not {body.seed}"
    if problem:
        raise RequestFailed(FailureCode.INVALID_ARGUMENT, problem)
    return Sampling(body.temperature, body.top_p, body.top_k, body.seed)
