"""Requests of a primary as telemetry tells them: each append and each generation, once it has ended, and a ring of the last.

Rules
- A record is made when the request ends, whether anybody listens or not: ``kakeya explain`` asks for the ring.
- A record holds no prompt, token, hash or session id; what a generation continues is named by the append's own random id.
- The explanation of an append that could not be prepared comes right before its failure, and only there is it taken for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kakeya_zmq.protocol.effects import (
    RequestArrived,
    RequestCancelled,
    RequestKey,
    SendFailure,
    SendProgress,
    SendReply,
)
from kakeya_zmq.protocol.inference import ExplainPrompt
from kakeya_zmq.telemetry import bounded_ms, public_text
from wire.errors import FailureCode
from wire.events import DECISIONS_MAX, REASONS_MAX, SOURCES_MAX, DecisionView, RequestEvent, SourceView
from wire.limits import REQUEST_RECORDS_MAX
from wire.messages import (
    Appended,
    AppendTokens,
    CloseSession,
    Decision,
    Explanation,
    Generate,
    Generated,
    SourceKind,
    StopReason,
    Tokens,
)

REPLAY_MAX: Final = 64
"""Records told again to a reader that has just come."""
OPEN_MAX: Final = 4096
"""Requests and sessions remembered; the oldest make room."""
COSTS_MAX: Final = 16
"""Options of one decision that are told; more would let one record outgrow a bus message."""
COST_NAME_CHARACTERS_MAX: Final = 160

Handler = Callable[[Any, float], list[RequestEvent]]


@dataclass(slots=True)
class _Open:
    request_id: str
    session_id: str
    started: float
    first_token_at: float | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is remembered of a session's last append."""

    append_id: str
    source: str
    prompt_tokens: int
    elapsed_ms: float
    ended_at: float


class RequestLog:
    """Follows appends and generations.

    Args:
        random_bytes: makes request ids.
    """

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._appends: OrderedDict[RequestKey, _Open] = OrderedDict()
        self._generations: OrderedDict[RequestKey, _Open] = OrderedDict()
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()
        """The last append of each session that no generation has continued yet."""
        self._records: deque[RequestEvent] = deque(maxlen=REQUEST_RECORDS_MAX)
        self._explanation: Explanation | None = None
        """Of the effect before, if it was one."""

    def handlers(self) -> Mapping[type, Handler]:
        """By type of event or effect, what to call with it and the time."""
        return {
            RequestArrived: self._arrived,
            RequestCancelled: self._cancelled,
            ExplainPrompt: self._explained,
            SendProgress: self._progress,
            SendReply: self._replied,
            SendFailure: self._failed,
        }

    def last(self, count: int) -> tuple[RequestEvent, ...]:
        """The last ``count`` records, oldest first."""
        return tuple(self._records)[-count:] if count > 0 else ()

    def forget_explanation(self) -> None:
        """Something else came between an explanation and an answer."""
        self._explanation = None

    # --- what passes by --------------------------------------------------------------------------------------------

    def _arrived(self, event: RequestArrived, now: float) -> list[RequestEvent]:
        match event.body:
            case AppendTokens(session_id=session_id):
                _remember(self._appends, event.key, self._open(session_id, now))
            case Generate(session_id=session_id):
                _remember(self._generations, event.key, self._open(session_id, now))
            case CloseSession(session_id=session_id):
                self._prompts.pop(session_id, None)
            case _:
                pass
        return []

    def _explained(self, effect: ExplainPrompt, now: float) -> list[RequestEvent]:
        self._explanation = effect.explanation
        return []

    def _progress(self, effect: SendProgress, now: float) -> list[RequestEvent]:
        if isinstance(effect.body, Tokens):
            request = self._generations.get(effect.key)
            if request is not None:
                request.tokens += 1
                if request.first_token_at is None:
                    request.first_token_at = now
        return []

    def _replied(self, effect: SendReply, now: float) -> list[RequestEvent]:
        self._explanation = None
        match effect.body:
            case Appended(explanation=explanation):
                request = self._appends.pop(effect.key, None)
                if request is None:
                    return []
                record = self._append_record(request, "ready", explanation, now)
                prompt = _Prompt(record.request_id, record.source, record.prompt_tokens, record.elapsed_ms, now)
                _remember(self._prompts, request.session_id, prompt)
                return self._keep(record)
            case Generated(stop_reason=stop_reason, token_count=token_count):
                request = self._generations.pop(effect.key, None)
                if request is None:
                    return []
                request.tokens = token_count
                return self._keep(self._generation_record(request, "ready", StopReason(stop_reason).name.lower(), now))
            case _:
                return []

    def _failed(self, effect: SendFailure, now: float) -> list[RequestEvent]:
        explanation, self._explanation = self._explanation, None
        outcome = _OUTCOMES.get(effect.code, "failed")
        if (request := self._appends.pop(effect.key, None)) is not None:
            return self._keep(self._append_record(request, outcome, explanation, now, effect.message))
        if (request := self._generations.pop(effect.key, None)) is not None:
            return self._keep(self._generation_record(request, outcome, "", now, effect.message))
        return []

    def _cancelled(self, event: RequestCancelled, now: float) -> list[RequestEvent]:
        if (request := self._appends.pop(event.key, None)) is not None:
            return self._keep(self._append_record(request, "cancelled", None, now, event.reason))
        if (request := self._generations.pop(event.key, None)) is not None:
            return self._keep(self._generation_record(request, "cancelled", "cancelled", now, event.reason))
        return []

    # --- records ---------------------------------------------------------------------------------------------------

    def _open(self, session_id: str, now: float) -> _Open:
        return _Open(self._random_bytes(8).hex(), session_id, now)

    def _keep(self, record: RequestEvent) -> list[RequestEvent]:
        self._records.append(record)
        return [record]

    def _append_record(
        self, request: _Open, outcome: str, explanation: Explanation | None, now: float, reason: str = ""
    ) -> RequestEvent:
        return append_record(
            explanation,
            request_id=request.request_id,
            outcome=outcome,
            elapsed_ms=(now - request.started) * 1000,
            reason=reason,
        )

    def _generation_record(
        self, request: _Open, outcome: str, stop_reason: str, now: float, reason: str = ""
    ) -> RequestEvent:
        # Only the first generation after an append continues that prompt; a later one continues an answer.
        prompt = self._prompts.pop(request.session_id, None)
        first = request.first_token_at
        # One that was asked for while its append ran has waited for that, which counts already.
        began = max(request.started, prompt.ended_at) if prompt else request.started
        waited_ms = (first - began) * 1000 if first is not None else 0.0
        decoding_s = now - first if first is not None else 0.0
        return RequestEvent(
            request_id=request.request_id,
            append_id=prompt.append_id if prompt else "",
            operation="generate",
            outcome=outcome,
            source=prompt.source if prompt else "",
            prompt_tokens=prompt.prompt_tokens if prompt else 0,
            generated_tokens=request.tokens,
            elapsed_ms=bounded_ms((now - request.started) * 1000),
            ttft_ms=bounded_ms(waited_ms + (prompt.elapsed_ms if prompt else 0.0)) if first is not None else 0.0,
            decode_tokens_per_second=bounded_ms((request.tokens - 1) / decoding_s) if decoding_s > 0 else 0.0,
            stop_reason=stop_reason,
            reasons=(public_text(reason),) if reason else (),
        )


_OUTCOMES: Final = {FailureCode.UNAVAILABLE: "unavailable", FailureCode.CANCELLED: "cancelled"}


def append_record(
    explanation: Explanation | None, *, request_id: str, outcome: str, elapsed_ms: float, reason: str = ""
) -> RequestEvent:
    """The record of an append.

    Args:
        explanation: why it cost what it cost; None when the append did not come that far.
        elapsed_ms: from the request's arrival to its answer.
        reason: why it failed, before the explanation's own reasons.
    """
    sources = tuple(_source_view(source) for source in explanation.sources[:SOURCES_MAX]) if explanation else ()
    reasons = [public_text(text) for text in (reason, *(explanation.reasons if explanation else ())) if text]
    return RequestEvent(
        request_id=request_id,
        operation="append",
        outcome=outcome,
        source=_main_source(sources),
        prompt_tokens=explanation.prompt_tokens if explanation else 0,
        boundary=sum(source.end - source.start for source in sources if source.kind != "computed"),
        transfer_bytes=sum(source.transfer_bytes for source in explanation.sources) if explanation else 0,
        elapsed_ms=bounded_ms(elapsed_ms),
        diverged_at=explanation.diverged_at if explanation else None,
        sources=sources,
        decisions=tuple(_decision_view(each) for each in explanation.decisions[:DECISIONS_MAX]) if explanation else (),
        reasons=tuple(reasons[:REASONS_MAX]),
    )


def _main_source(sources: tuple[SourceView, ...]) -> str:
    """Where most of the prompt came from."""
    tokens: dict[str, int] = {}
    for source in sources:
        tokens[source.kind] = tokens.get(source.kind, 0) + source.end - source.start
    return max(tokens, key=lambda kind: tokens[kind], default="")


def _source_view(source: Any) -> SourceView:
    return SourceView(
        kind=SourceKind(source.kind).name.lower(),
        start=source.start,
        end=source.end,
        node_id=source.node_id,
        transfer_bytes=source.transfer_bytes,
        elapsed_ms=bounded_ms(source.elapsed_ms),
    )


def _decision_view(decision: Decision) -> DecisionView:
    costs = [(name, cost) for name, cost in decision.costs_ms.items() if math.isfinite(cost)]
    return DecisionView(
        what=decision.what,
        chosen=decision.chosen,
        costs_ms={public_text(name)[:COST_NAME_CHARACTERS_MAX]: round(cost, 3) for name, cost in costs[:COSTS_MAX]},
        text=public_text(decision.text),
    )


def _remember(table: OrderedDict[Any, Any], key: object, value: object) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > OPEN_MAX:
        table.popitem(last=False)
