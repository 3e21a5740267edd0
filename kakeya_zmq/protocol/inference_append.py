"""Appends of sessions: each runs one preparation, which brings the KV up to the last token but one.

The events of a preparation are routed by the ids it drew, until it has ended, also when its session was closed meanwhile:
it may hold leases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskProgressed,
    AskReplied,
    CommandEnded,
    CommandEvent,
    ConnectReceiver,
    Count,
    CreditEarned,
    Effect,
    HostEvent,
    LaneFinished,
    PartsReceived,
    RequestKey,
    RunCommand,
    SendFailure,
    SendProgress,
    SendReply,
    Tick,
    Ticket,
)
from kakeya_zmq.protocol.flights import Flights
from kakeya_zmq.protocol.inference_capture import Captures
from kakeya_zmq.protocol.inference_session import (
    Appending,
    ExplainPrompt,
    InferenceEffect,
    PreparationRequest,
    Session,
    appended_history,
    refuse_when_busy,
    start_over,
)
from kakeya_zmq.protocol.prepare import PromptPreparation
from kakeya_zmq.protocol.prepare_values import Cancelled, IdAllocator, PreparationOutcome, Ready, Unavailable
from wire.errors import FailureCode, KakeyaError
from wire.messages import Appended, AppendTokens, Explanation, Generate, PrefillProgress


class Appends:
    """The preparations under way.

    Args:
        captures: counts what could not be stored, and hands over what the preparations have brought.
        generate: begins a generation that waited for its append.
        make_preparation: builds the preparation of one append from what the host knows of the fleet right now.
        publish_delay_s: how long the parts of an append wait for a generation before they are published without one.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        ids: IdAllocator,
        captures: Captures,
        generate: Callable[[RequestKey, Session, Generate, float], list[InferenceEffect]],
        make_preparation: Callable[[PreparationRequest, float], PromptPreparation],
        publish_delay_s: float,
    ) -> None:
        self._facts = facts
        self._ids = ids
        self._captures = captures
        self._generate = generate
        self._make_preparation = make_preparation
        self._publish_delay_s = publish_delay_s
        self._flights = Flights()
        self._running: dict[Appending, None] = {}
        """Whose preparations have not ended, oldest first; some of their sessions may be closed."""
        self._owners: dict[tuple[str, int], Appending] = {}
        """Asks, lanes and tickets that a preparation drew, by ("ask" | "lane" | "ticket", number)."""

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def sessions(self) -> list[Session]:
        """Whose preparations are under way; some of them may be closed."""
        return [append.session for append in self._running]

    def deadlines(self) -> list[float]:
        return [due for append in self._running if (due := append.preparation.deadline()) is not None]

    def owns(self, ticket: Ticket) -> bool:
        """Whether an event of this command is for :meth:`on`."""
        return ("ticket", ticket) in self._owners

    def start(self, key: RequestKey, session: Session, body: AppendTokens, now: float) -> list[InferenceEffect]:
        refuse_when_busy(session)
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
        self._running[operation] = None
        return self._advance(operation, preparation.start(now), now)

    def on(self, event: HostEvent, now: float) -> list[InferenceEffect]:
        """Take an event of an ask, a lane or a command; those of nobody's are ignored."""
        match event:
            case AskReplied(ask=number) | AskProgressed(ask=number) | AskFailed(ask=number):
                operation = self._owners.get(("ask", number))
            case PartsReceived(lane=number) | CreditEarned(lane=number) | LaneFinished(lane=number):
                operation = self._owners.get(("lane", number))
            case CommandEvent(ticket=number) | CommandEnded(ticket=number):
                operation = self._owners.get(("ticket", number))
            case _:
                operation = None
        return [] if operation is None else self._advance(operation, operation.preparation.on(event, now), now)

    def tick(self, now: float) -> list[InferenceEffect]:
        effects: list[InferenceEffect] = []
        for append in list(self._running):
            if append.preparation.outcome is not None:
                continue  # another one's end has ended it
            due = append.preparation.deadline()
            if due is not None and due <= now:
                effects += self._advance(append, append.preparation.on(Tick(), now), now)
        return effects

    def cancel(self, operation: Appending, now: float) -> list[InferenceEffect]:
        """Stop a preparation; it lives on until it has let go of its leases."""
        return self._advance(operation, operation.preparation.cancel(now), now)

    def _advance(self, operation: Appending, raw_effects: list[Effect], now: float) -> list[InferenceEffect]:
        """Carry on with a preparation, and with those that wait for what it has brought."""
        effects = self._advance_one(operation, raw_effects, now)
        while (follower := next((one for one in self._running if one.preparation.has_news), None)) is not None:
            effects += self._advance_one(follower, follower.preparation.look(now), now)
        return effects

    def _advance_one(self, operation: Appending, raw_effects: list[Effect], now: float) -> list[InferenceEffect]:
        effects = self._own(operation, raw_effects)
        outcome = operation.preparation.outcome
        if outcome is None:
            return [*effects, *self._report(operation)]
        self._running.pop(operation, None)
        self._owners = {number: owner for number, owner in self._owners.items() if owner is not operation}
        session = operation.session
        if session.options.publish:
            session.pending += outcome.new_parts
        if session.closed:
            return [*effects, *(self._captures.flush(session, now) if session.capture is None else [])]
        session.operation = None
        session.last_used = now
        effects += self._conclude(operation, outcome)
        if session.pending:
            session.publish_at = now + self._publish_delay_s
        return [*effects, *self._follow(operation, outcome, now)]

    def _follow(self, operation: Appending, outcome: PreparationOutcome, now: float) -> list[InferenceEffect]:
        following = operation.following
        if following is None:
            return []
        if not isinstance(outcome, Ready):
            return [SendFailure(following.key, FailureCode.ABORTED, "the append before it did not succeed")]
        try:
            return self._generate(following.key, operation.session, following.body, now)
        except KakeyaError as error:
            return [SendFailure(following.key, error.code, str(error))]

    def _conclude(self, operation: Appending, outcome: PreparationOutcome) -> list[InferenceEffect]:
        session, key = operation.session, operation.key
        before, session.live_position = session.live_position, outcome.position
        effects: list[InferenceEffect] = []
        match outcome:
            case Ready(explanation=explanation):
                session.history = operation.tokens
                # What was computed now has been exported; what is older may still wait for a capture that failed.
                if session.captured >= self._captures.whole_blocks(before):
                    session.captured = self._captures.whole_blocks(session.live_position)
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
            effects += start_over(session, self._ids)
        return effects

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
                    told += self._captures.not_encoded(lost)[1:]
                case _:
                    pass
        return [*raw_effects, *told]
