"""Generations of sessions: each is one Decode command, whose tokens are streamed to who asked.

Between the first and the last token nothing is asked of the fleet on the session's behalf: what a turn produced is captured
when the command has ended (kakeya_zmq.protocol.inference_capture).
"""

from __future__ import annotations

import numpy as np

from kakeya_zmq.engine import CommandFailed, Decode, DecodeFinished, ModelFacts, TokenDecoded
from kakeya_zmq.protocol.effects import (
    CancelCommand,
    CommandEnded,
    CommandEvent,
    Count,
    Note,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Ticket,
)
from kakeya_zmq.protocol.inference_capture import Captures
from kakeya_zmq.protocol.inference_session import (
    Following,
    Generating,
    InferenceEffect,
    Session,
    checked_sampling,
    refuse_when_busy,
    start_over,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator
from wire.errors import FailureCode, RequestFailed
from wire.messages import Generate, Generated, StopReason, Tokens


class Generations:
    """The Decode commands under way.

    Args:
        captures: exports what each has made.
    """

    def __init__(self, *, facts: ModelFacts, ids: IdAllocator, captures: Captures) -> None:
        self._facts = facts
        self._ids = ids
        self._captures = captures
        self._sessions: dict[Ticket, Session] = {}

    def start(self, key: RequestKey, session: Session, body: Generate, now: float) -> list[InferenceEffect]:
        """Begin, or wait for the append that is under way: who sends both at once saves a round trip."""
        sampling = checked_sampling(body)
        append = session.preparing
        if append is not None and append.key is not None:
            append.following = Following(key, body)
            return []
        refuse_when_busy(session)
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
        self._sessions[ticket] = session
        eos = session.options.eos_token_ids or self._facts.eos_token_ids
        last_token = int(session.history[-1])
        return [
            Count("generations"),
            RunCommand(ticket, Decode(session.session_id, last_token, body.max_tokens, eos, sampling)),
        ]

    def stop(self, operation: Generating) -> list[InferenceEffect]:
        """Its session is closed: nobody wants the tokens any more."""
        del self._sessions[operation.ticket]
        return [CancelCommand(operation.ticket)]

    def on(self, event: CommandEvent | CommandEnded, now: float) -> list[InferenceEffect]:
        """Take an event of a command; those of nobody's are ignored."""
        session = self._sessions.get(event.ticket)
        if session is None or not isinstance(session.operation, Generating):
            return []
        if isinstance(event, CommandEvent):
            return self._progressed(session.operation, event)
        del self._sessions[event.ticket]
        return self._ended(session, session.operation, event, now)

    def _progressed(self, operation: Generating, event: CommandEvent) -> list[InferenceEffect]:
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

    def _ended(self, session: Session, operation: Generating, event: CommandEnded, now: float) -> list[InferenceEffect]:
        session.operation = None
        session.last_used = now
        produced = np.array(operation.tokens, dtype=np.int32)
        session.history = np.concatenate([session.history, produced]).astype(np.int32, copy=False)
        effects: list[InferenceEffect] = [Count("tokens_generated", len(produced))]
        if operation.key is not None:
            effects.append(self._answer(session, operation, operation.key, now))
        position = event.position if event.position is not None else operation.position
        if position is None and not operation.tokens:
            position = session.live_position  # cancelled before the engine had even opened the session
        if position is None or position > len(session.history):
            effects.append(Note("error", "the engine did not say where a generation stopped; the session starts over"))
            return [*effects, *start_over(session, self._ids), *self._captures.flush(session, now)]
        session.live_position = position
        return [*effects, *self._captures.begin(session, now)]

    def _answer(self, session: Session, operation: Generating, key: RequestKey, now: float) -> InferenceEffect:
        if operation.failure is not None:
            return SendFailure(key, FailureCode.INTERNAL, f"decoding failed: {operation.failure}")
        generated = Generated(
            stop_reason=operation.stop_reason or StopReason.CANCELLED,
            token_count=len(operation.tokens),
            history_tokens=len(session.history),
            elapsed_ms=(now - operation.started) * 1000,
        )
        return SendReply(key, generated)
