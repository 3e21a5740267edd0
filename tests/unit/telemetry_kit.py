"""A feed with its listeners and an invented clock, and what machines may be seen to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from kakeya_zmq.engine import Prefill, SegmentComputed
from kakeya_zmq.protocol import effects as fx
from kakeya_zmq.protocol.inference import ExplainPrompt
from kakeya_zmq.telemetry_feed import (
    FeedEffect,
    FeedTick,
    Figures,
    Publish,
    Subscribed,
    TelemetryFeed,
)
from wire.bus import Topic
from wire.codec import pack_tokens
from wire.errors import FailureCode
from wire.events import (
    Event,
    RequestEvent,
    TransferEvent,
)
from wire.ids import NodeId
from wire.job_seal import SEALED_PROMPT_OVERHEAD_BYTES
from wire.messages import (
    Appended,
    AppendTokens,
    CipherSuite,
    Decision,
    Explanation,
    Fetch,
    Generate,
    Generated,
    JobAccepted,
    JobProgress,
    JobResult,
    LinkCodec,
    PartKind,
    PartRef,
    PrefillProgress,
    PublishOffer,
    Source,
    SourceKind,
    StopReason,
    SubmitJob,
    Tokens,
    TransferGrant,
)

ALL = frozenset(Topic)
SUITES = (CipherSuite.SECRETBOX,)


def key(number: int) -> fx.RequestKey:
    return fx.RequestKey((b"s" * 16, number))


class Rig:
    """A feed with its listeners and a clock."""

    def __init__(self, listeners: frozenset[Topic] = ALL, interval_s: float = 2.0) -> None:
        self.listeners = listeners
        self.now = 100.0
        numbers = itertools.count(1)
        self.feed = TelemetryFeed(
            wanted=lambda topic: topic in self.listeners,
            tenant="default",
            interval_s=interval_s,
            random_bytes=lambda count: next(numbers).to_bytes(count, "big"),
        )

    def see(self, *seen: object) -> list[FeedEffect]:
        return [effect for each in seen for effect in self.feed.on(each, self.now)]

    def told(self, *seen: object) -> list[Event]:
        """The events that are published because of this."""
        return [effect.event for effect in self.see(*seen) if isinstance(effect, Publish)]

    def later(self, seconds: float) -> list[FeedEffect]:
        """Let time pass, ticking whenever the feed wants to."""
        end = self.now + seconds
        effects: list[FeedEffect] = []
        for _ in range(10_000):
            due = self.feed.deadline()
            if due is None or due > end:
                self.now = end
                return effects
            self.now = max(self.now, due)
            effects += self.feed.on(FeedTick(), self.now)
        raise AssertionError("the feed's clock never comes to rest")


def published(effects: list[FeedEffect]) -> list[Event]:
    return [effect.event for effect in effects if isinstance(effect, Publish)]


def submit(number: int, tokens: int = 1_001, node: str = "primary", job: bytes = b"j" * 16) -> fx.RequestArrived:
    body = SubmitJob(
        job_id=job,
        fingerprint=b"f" * 32,
        prompt=bytes(SEALED_PROMPT_OVERHEAD_BYTES) + pack_tokens([7] * tokens),
        have_tokens=0,
        suites=SUITES,
        chunk_bytes_max=1 << 20,
        credit_bytes=1 << 24,
    )
    return fx.RequestArrived(key=key(number), node_id=NodeId(node), roles=("primary",), body=body, deadline=1e9)


def accepted(number: int, eta_ms: int = 0) -> fx.SendProgress:
    return fx.SendProgress(key(number), JobAccepted(proof=bytes(32), queued_jobs=0, queued_tokens=0, eta_ms=eta_ms))


def progress(number: int, done: int, total: int = 1_000, reused: int = 0) -> fx.SendProgress:
    return fx.SendProgress(key(number), JobProgress(tokens_done=done, tokens_total=total, tokens_reused=reused))


def result(number: int, computed: int = 1_000, reused: int = 0) -> fx.SendReply:
    body = JobResult(tokens_computed=computed, tokens_reused=reused, compute_ms=500, sent_bytes=10)
    return fx.SendReply(key(number), body)


def grant(number: int = 1, codec: LinkCodec = LinkCodec.NONE) -> TransferGrant:
    return TransferGrant(
        transfer_id=number.to_bytes(16, "big"),
        port=5000,
        token="t" * 64,
        key=b"k" * 32,
        suite=CipherSuite.SECRETBOX,
        chunk_bytes=1 << 20,
        link_codec=codec,
    )


def append(number: int, session: str = "sess-1") -> fx.RequestArrived:
    body = AppendTokens(session_id=session, tokens=pack_tokens([1, 2]))
    return fx.RequestArrived(key=key(number), node_id=NodeId("client-1"), roles=("client",), body=body, deadline=1e9)


def prefilling(number: int, done: int, total: int, source: SourceKind = SourceKind.COMPUTED) -> fx.SendProgress:
    return fx.SendProgress(key(number), PrefillProgress(tokens_done=done, tokens_total=total, source=source))


def prefill(ticket: int, count: int, session: str = "sess-1") -> fx.RunCommand:
    return fx.RunCommand(fx.Ticket(ticket), Prefill(session, np.zeros(count, dtype=np.int32)))


def segment(ticket: int, position: int) -> fx.CommandEvent:
    return fx.CommandEvent(fx.Ticket(ticket), SegmentComputed("sess-1", position, (), 1.0))


def explanation(**changes: object) -> Explanation:
    sources = (
        Source(kind=SourceKind.HOT, start=0, end=64, node_id="", transfer_bytes=0, elapsed_ms=1.0),
        Source(kind=SourceKind.WORKER, start=64, end=900, node_id="w", transfer_bytes=5_000, elapsed_ms=20.0),
        Source(kind=SourceKind.COMPUTED, start=900, end=999, node_id="", transfer_bytes=0, elapsed_ms=9.0),
    )
    decisions = (
        Decision(
            what="prefill", chosen="worker w", costs_ms={"compute": 900.0, "worker w": 30.0, "odd": float("inf")}, text=""
        ),
    )
    fields: dict[str, object] = {
        "prompt_tokens": 1_000,
        "sources": sources,
        "reasons": ("cache b at 192.168.1.7:52051 timed out",),
        "elapsed_ms": 40.0,
        "decisions": decisions,
        "diverged_at": 64,
    }
    return Explanation(**{**fields, **changes})  # type: ignore[arg-type]


def appended(number: int) -> fx.SendReply:
    return fx.SendReply(key(number), Appended(history_tokens=1_000, explanation=explanation()))


def generate(number: int, session: str = "sess-1") -> fx.RequestArrived:
    body = Generate(session_id=session, max_tokens=8)
    return fx.RequestArrived(key=key(number), node_id=NodeId("client-1"), roles=("client",), body=body, deadline=1e9)


def token(number: int) -> fx.SendProgress:
    return fx.SendProgress(key(number), Tokens(tokens=pack_tokens([5])))


def generated(number: int, count: int) -> fx.SendReply:
    body = Generated(stop_reason=StopReason.EOS, token_count=count, history_tokens=1_000, elapsed_ms=1.0)
    return fx.SendReply(key(number), body)


def requests(events: list[Event]) -> list[RequestEvent]:
    return [event for event in events if isinstance(event, RequestEvent)]


REF = PartRef(block_hash=b"h" * 32, kind=PartKind.FULL)
PARTS = ("a part", "another")
"""Only counted."""


def transfers(events: list[Event]) -> list[TransferEvent]:
    return [event for event in events if isinstance(event, TransferEvent)]


def arrived(number: int, body: object, node: str = "peer") -> fx.RequestArrived:
    return fx.RequestArrived(key=key(number), node_id=NodeId(node), roles=(), body=body, deadline=1e9)  # type: ignore[arg-type]


def fetch() -> Fetch:
    return Fetch(lease_id=b"l" * 16, parts=(REF,), suites=SUITES, chunk_bytes_max=1 << 20, credit_bytes=1)


def offer() -> PublishOffer:
    return PublishOffer(fingerprint=b"f" * 32, parts=(), suites=SUITES, chunk_bytes_max=1 << 20)


def figures(evictions: int, size: int = 0) -> Figures:
    return Figures(evictions=evictions, bytes_evicted=size, bytes_used=7, max_bytes=10)


def anything(number: int) -> Iterator[object]:
    yield from (submit(number, job=bytes([number]) * 16), accepted(number), fx.SendProgress(key(number), grant(number)))
    yield from (progress(number, 10), progress(number, 700), progress(number, 1_000), result(number))
    yield from (append(number), prefilling(number, 0, 400), prefill(number, 400), segment(number, 256), segment(number, 400))
    yield from (appended(number), generate(number), token(number), generated(number, 1), ExplainPrompt(explanation()))
    yield from (fx.CommandEnded(fx.Ticket(number), cancelled=False), fx.RequestCancelled(key(number), "gone"))
    yield from (fx.SendFailure(key(number), FailureCode.INTERNAL, "failed"), arrived(number, fetch()))
    yield fx.BindSender(fx.LaneId(number), CipherSuite.SECRETBOX, 1 << 20, 1 << 24)
    yield fx.LaneOpened(fx.LaneId(number), grant(number))
    yield fx.LaneFinished(fx.LaneId(number), ok=True, reason="", transferred_bytes=1)
    yield from (Subscribed(topic) for topic in Topic)
