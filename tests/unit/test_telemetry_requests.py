"""Requests of a primary as the feed tells them, and the ring of the last."""

from __future__ import annotations

from kakeya_zmq.protocol import effects as fx
from kakeya_zmq.protocol.inference import ExplainPrompt
from kakeya_zmq.telemetry_feed import (
    Noted,
    encode_fitting,
)
from kakeya_zmq.telemetry_feed_requests import COSTS_MAX, append_record
from tests.unit.telemetry_kit import Rig, append, appended, explanation, generate, generated, key, requests, token
from wire.bus import PAYLOAD_BYTES_MAX, Topic
from wire.errors import FailureCode
from wire.events import (
    RequestEvent,
    decode_event,
)
from wire.messages import (
    Decision,
    Source,
    SourceKind,
)


def test_an_append_and_its_generation_are_told_with_what_they_cost() -> None:
    rig = Rig()
    rig.told(append(1))
    rig.now += 0.5
    (first,) = requests(rig.told(ExplainPrompt(explanation()), appended(1)))
    assert (first.operation, first.outcome, first.source) == ("append", "ready", "worker")
    assert (first.prompt_tokens, first.boundary, first.transfer_bytes, first.diverged_at) == (1_000, 900, 5_000, 64)
    assert first.elapsed_ms == 500.0
    assert [(s.kind, s.start, s.end) for s in first.sources] == [("hot", 0, 64), ("worker", 64, 900), ("computed", 900, 999)]
    assert first.decisions[0].costs_ms == {"compute": 900.0, "worker w": 30.0}
    assert first.reasons == ("cache b at (address) timed out",)
    rig.now += 60  # the user thinks
    rig.told(generate(2))
    rig.now += 0.25
    assert rig.told(token(2)) == []
    rig.now += 1.0
    rig.told(token(2), token(2))
    (second,) = requests(rig.told(generated(2, 3)))
    assert (second.operation, second.outcome, second.stop_reason) == ("generate", "ready", "eos")
    assert (second.append_id, second.source, second.prompt_tokens) == (first.request_id, "worker", 1_000)
    assert (second.ttft_ms, second.generated_tokens, second.decode_tokens_per_second) == (750.0, 3, 2.0)
    rig.told(generate(3), token(3))
    (third,) = requests(rig.told(generated(3, 1)))
    assert (third.append_id, third.source, third.ttft_ms) == ("", "", 0.0)
    assert rig.feed.last_requests(2) == (second, third)


def test_an_append_that_could_not_be_prepared_keeps_its_explanation() -> None:
    rig = Rig()
    rig.told(append(1))
    failure = fx.SendFailure(key(1), FailureCode.UNAVAILABLE, "remote prefill is required")
    (event,) = requests(rig.told(ExplainPrompt(explanation()), Noted("info", "explained"), failure))
    assert (event.outcome, event.source) == ("unavailable", "worker")
    assert event.reasons[0] == "remote prefill is required"


def test_an_explanation_is_not_taken_for_another_request() -> None:
    rig = Rig()
    rig.told(append(1), append(2, "sess-2"))
    rig.told(ExplainPrompt(explanation()))
    rig.told(fx.CommandEnded(fx.Ticket(9), cancelled=True))
    (event,) = requests(rig.told(fx.SendFailure(key(2), FailureCode.ABORTED, "busy")))
    assert (event.outcome, event.sources, event.reasons) == ("failed", (), ("busy",))


def test_requests_that_nobody_waits_for_any_more_are_cancelled() -> None:
    rig = Rig()
    rig.told(append(1), appended(1), generate(2), token(2))
    rig.now += 1
    (event,) = requests(rig.told(fx.RequestCancelled(key(2), "cancelled by the client")))
    assert (event.outcome, event.stop_reason, event.generated_tokens) == ("cancelled", "cancelled", 1)
    rig.told(append(3))
    (event,) = requests(rig.told(fx.RequestCancelled(key(3), "cancelled by the client")))
    assert (event.operation, event.outcome) == ("append", "cancelled")


def test_the_ring_is_kept_without_listeners() -> None:
    rig = Rig(frozenset())
    for number in range(300):
        assert rig.see(append(number), appended(number)) == []
    assert len(rig.feed.last_requests(1_000)) == 256
    assert rig.feed.last_requests(0) == ()


def test_the_largest_explanation_becomes_an_event_that_fits() -> None:
    source = Source(kind=SourceKind.HOT, start=0, end=1, node_id="n" * 128, transfer_bytes=1, elapsed_ms=1.0)
    decision = Decision(
        what="w" * 128, chosen="c" * 128, costs_ms={f"{n}" + "x" * 500: 1.0 for n in range(64)}, text="ü" * 512
    )
    huge = explanation(sources=(source,) * 500, reasons=("ü" * 512,) * 32, decisions=(decision,) * 32)
    record = append_record(huge, request_id="r", outcome="ready", elapsed_ms=float("nan"))
    payload = encode_fitting(record)
    assert len(payload) <= PAYLOAD_BYTES_MAX
    found = decode_event(Topic.REQUEST, payload)
    assert isinstance(found, RequestEvent)
    assert (found.request_id, found.elapsed_ms) == ("r", 0.0)
    assert all(len(view.costs_ms) <= COSTS_MAX for view in record.decisions)
