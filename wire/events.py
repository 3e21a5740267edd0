"""Telemetry events: what nodes tell on the bus about what they do, for dashboards, monitors and metrics.

Each telemetry topic of :class:`wire.bus.Topic` carries exactly one kind of event, as a msgpack map. Readers are not members
of the fleet and may be older or newer than the node they listen to: unknown fields are ignored, missing ones have defaults.
Which node speaks, and in which order, is in the bus message itself (node id, incarnation, sequence).

Readers add, convert and draw what nodes tell. So every number of an event is finite and at most :data:`FIGURE_MAX` from
zero, wherever it stands: an event with another one is refused as a whole. Costs that are estimated from the card of another
node are brought within the bound by the event itself, so that nobody can have the events of a third one refused.

No event holds a prompt, a token, a hash of tokens or a key. Addresses occur in :class:`NodeSnapshot` only: a reader that
shows them to others decides who may see them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from wire.bus import PAYLOAD_BYTES_MAX, Topic
from wire.cards import CARD_TTL_MS_MAX
from wire.codec import decode_bounded, encode_bounded
from wire.errors import RemoteProtocolError
from wire.messages import Ascii, Count, Name, NodeName, OptionalName, OptionalNodeName, Text, Word
from wire.text import ASCII, LINE

ToldAddress = Annotated[str, Meta(max_length=262, pattern=LINE)]
HexText = Annotated[str, Meta(max_length=64, pattern=ASCII)]
TimeToLive = Annotated[int, Meta(ge=0, le=CARD_TTL_MS_MAX)]
"""As of a card: nobody stays for longer after it was last heard."""
Scalar: TypeAlias = int | float | str | bool | None
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e12)]
Ratio = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A rate or quotient that is never negative; 0 when nothing was measured."""
FIGURE_MAX: Final = 2**53
"""How far from zero a number may be. Up to here a float holds every whole number, so that figures survive any reader's
arithmetic, JavaScript's included. It is also the bound of :data:`wire.messages.Count`; bytes (9 PB), milliseconds since the
epoch and the skew of the oddest clock a card may tell (1e15 ms) stay below."""
SECTIONS_MAX: Final = 16
FIGURES_MAX: Final = 512
PEERS_MAX: Final = 256
SOURCES_MAX: Final = 64
REASONS_MAX: Final = 32
DECISIONS_MAX: Final = 32


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class EndpointView(_Event, frozen=True, kw_only=True):
    """One way to reach a node. ``rtt_ms``: measured from the node that tells it, 0 when it is not."""

    address: ToldAddress
    network: OptionalName = "default"
    priority: Count = 0
    rtt_ms: Milliseconds = 0.0


class ModelView(_Event, frozen=True, kw_only=True):
    model_id: Name
    role: OptionalName = ""
    quantization: OptionalName = ""
    tokens_per_second: Ratio = 0.0
    cache_format_version: Ascii = ""
    fingerprint: HexText = ""
    """Hexadecimal SHA-256 of the compatibility tuple (of the model, not of any prompt)."""
    tenant: OptionalNodeName = "default"


class WorkerView(_Event, frozen=True, kw_only=True):
    max_concurrent_jobs: Count = 1
    inflight_jobs: Count = 0
    queued_jobs: Count = 0
    queued_tokens: Count = 0
    load: Ratio = 0.0
    tokens_per_second: Ratio = 0.0
    ram_bytes_free: Count = 0
    accepts_jobs: bool = True


class PeerView(_Event, frozen=True, kw_only=True):
    """Another node as this one sees it. ``bus_address``: where its bus listens, "" when that is not known.

    ``state``: connected, connecting, down, known (by its card only). Rates are measured, 0 when they are not.
    ``card_age_ms``: since its newest card came here. ``ttl_ms``: how long a card lives; 0 when none is known.
    """

    node_id: NodeName
    roles: Annotated[tuple[Word, ...], Meta(max_length=8)] = ()
    state: OptionalName = ""
    bus_address: ToldAddress = ""
    rtt_ms: Milliseconds = 0.0
    megabytes_per_second: Ratio = 0.0
    card_age_ms: Count = 0
    ttl_ms: TimeToLive = 0
    clock_skew_ms: float = 0.0
    """How far the peer's wall clock is ahead of ours, for people; no decision uses it."""


class NodeSnapshot(_Event, frozen=True, kw_only=True):
    """The whole present state of a node: published regularly, and at once when a reader subscribes.

    ``sections``: the same named groups of figures as its Status (docs/telemetry.md). ``interval_ms``: a reader that hears
    nothing for three of them calls the node stale; after ``ttl_ms`` it is gone.
    """

    roles: Annotated[tuple[Word, ...], Meta(max_length=8)]
    software: Ascii = ""
    platform: Ascii = ""
    state: OptionalName = ""
    uptime_s: Ratio = 0.0
    memory_bytes: Count = 0
    """Physical memory of the machine."""
    interval_ms: Count = 2000
    ttl_ms: TimeToLive = 120_000
    endpoints: Annotated[tuple[EndpointView, ...], Meta(max_length=16)] = ()
    models: Annotated[tuple[ModelView, ...], Meta(max_length=16)] = ()
    worker: WorkerView | None = None
    sections: Annotated[
        dict[Name, Annotated[dict[Name, Scalar], Meta(max_length=FIGURES_MAX)]], Meta(max_length=SECTIONS_MAX)
    ] = {}
    peers: Annotated[tuple[PeerView, ...], Meta(max_length=PEERS_MAX)] = ()


class JobEvent(_Event, frozen=True, kw_only=True):
    """Progress of one prefill job. ``place``: "worker" (computed for another node) or "primary" (computed here).

    ``state``: queued, running, completed, failed, cancelled; the last three are final. ``job_id`` is random.
    """

    job_id: Name
    place: OptionalName = "worker"
    state: Name
    asker: OptionalName = ""
    tenant: OptionalNodeName = "default"
    tokens_total: Count = 0
    tokens_done: Count = 0
    tokens_reused: Count = 0
    elapsed_ms: Milliseconds = 0.0
    tokens_per_second: Ratio = 0.0
    eta_ms: Milliseconds = 0.0
    """Estimated time until the end, 0 when it is not known."""
    reason: Text = ""


class SourceView(_Event, frozen=True, kw_only=True):
    """One stretch [start, end) of a prompt. ``kind``: computed, hot, remote_cache, worker, live."""

    kind: Name
    start: Count
    end: Count
    node_id: OptionalName = ""
    transfer_bytes: Count = 0
    elapsed_ms: Milliseconds = 0.0


class DecisionView(_Event, frozen=True, kw_only=True):
    """One choice of the planner. ``costs_ms``: by option ("compute", "import", "worker NAME"), what it was estimated at."""

    what: Name
    chosen: OptionalName
    costs_ms: Annotated[dict[Text, float], Meta(max_length=64)] = {}
    text: Text = ""

    def __post_init__(self) -> None:
        # The queue and the rate that a worker's card claims make any cost, and the event is the primary's.
        if any(FIGURE_MAX < cost < math.inf for cost in self.costs_ms.values()):
            costs = {option: cost if cost == math.inf else min(cost, FIGURE_MAX) for option, cost in self.costs_ms.items()}
            msgspec.structs.force_setattr(self, "costs_ms", costs)


class RequestEvent(_Event, frozen=True, kw_only=True):
    """One finished request of a primary: where its KV came from, what it cost, and why it was not better.

    ``operation``: append or generate. ``outcome``: ready, unavailable, cancelled, failed. ``diverged_at``: the first token
    that differs from what was cached, or None. ``ttft_ms``, of a generation: the time of the append that it continues, and
    of the generation up to its first token; what the user did between the two is not counted. A record may be told again, to
    readers that came late; ``request_id`` (random) tells that it is the same.
    """

    request_id: Name
    append_id: OptionalName = ""
    """Of a generation: the ``request_id`` of the append it continues, "" when it continues an answer."""
    operation: Name
    outcome: Name
    source: OptionalName = ""
    """Where most of the prompt came from, a kind of :class:`SourceView`; a generation has its append's."""
    prompt_tokens: Count = 0
    boundary: Count = 0
    """Tokens that did not have to be computed."""
    generated_tokens: Count = 0
    transfer_bytes: Count = 0
    elapsed_ms: Milliseconds = 0.0
    ttft_ms: Milliseconds = 0.0
    decode_tokens_per_second: Ratio = 0.0
    diverged_at: Count | None = None
    stop_reason: OptionalName = ""
    sources: Annotated[tuple[SourceView, ...], Meta(max_length=SOURCES_MAX)] = ()
    decisions: Annotated[tuple[DecisionView, ...], Meta(max_length=DECISIONS_MAX)] = ()
    reasons: Annotated[tuple[Text, ...], Meta(max_length=REASONS_MAX)] = ()


class TransferEvent(_Event, frozen=True, kw_only=True):
    """One bulk transfer that has ended. ``direction``: in or out; ``purpose``: fetch, job, publish."""

    direction: Name
    purpose: OptionalName = ""
    peer: OptionalName = ""
    parts: Count = 0
    payload_bytes: Count = 0
    elapsed_ms: Milliseconds = 0.0
    codec: OptionalName = "none"
    ok: bool = True
    reason: Text = ""


class EvictionEvent(_Event, frozen=True, kw_only=True):
    """Parts that a store evicted within ``interval_ms``."""

    parts: Count
    size_bytes: Count
    interval_ms: Count = 0
    bytes_used: Count = 0
    max_bytes: Count = 0


class SecurityKind(StrEnum):
    """What a :class:`SecurityEvent` is about."""

    CONNECTION_REFUSED = "connection_refused"
    """The control server refused a connection or dropped a message."""
    BUS_REFUSED = "bus_refused"
    """A reader did not get onto the bus, or asked for what is no topic."""
    TRANSFER_REFUSED = "transfer_refused"
    """Somebody without the one-time token knocked at a bulk transfer."""
    CARD_REFUSED = "card_refused"
    """A card has a bad signature, or claims a node id of another identity."""
    TELEMETRY_REFUSED = "telemetry_refused"
    """A reader's own: telemetry came under the name of a node (the subject) that is not signed with that node's key."""
    NODE_APPEARED = "node_appeared"
    """A node joined, or came back under a new incarnation."""
    NODE_REVOKED = "node_revoked"
    """A node's identity key is refused from now on."""
    KEY_CHANGED = "key_changed"
    """A fleet key is valid from now on, or retired."""


class SecurityEvent(_Event, frozen=True, kw_only=True):
    """Something was refused, revoked, registered or changed, ``count`` times within a second.

    ``kind`` is one of :class:`SecurityKind`, or a newer name.
    """

    kind: Name
    subject: OptionalName = ""
    """A node id, where one was proven."""
    count: Count = 1
    text: Text = ""


class LogEvent(_Event, frozen=True, kw_only=True):
    """A noteworthy line. ``level``: info, warning, error."""

    level: Name
    text: Text


Event: TypeAlias = NodeSnapshot | JobEvent | RequestEvent | TransferEvent | EvictionEvent | SecurityEvent | LogEvent

EVENT_TYPES: Final[Mapping[Topic, type[Event]]] = {
    Topic.NODE: NodeSnapshot,
    Topic.JOB: JobEvent,
    Topic.REQUEST: RequestEvent,
    Topic.TRANSFER: TransferEvent,
    Topic.EVICTION: EvictionEvent,
    Topic.SECURITY: SecurityEvent,
    Topic.LOG: LogEvent,
}
TOPIC_OF: Final[Mapping[type[Event], Topic]] = {kind: topic for topic, kind in EVENT_TYPES.items()}
_DECODERS: Final = {topic: msgspec.msgpack.Decoder(kind) for topic, kind in EVENT_TYPES.items()}


def encode_event(event: Event) -> bytes:
    """The payload of a bus message on the topic of this kind of event.

    Raises:
        LocalProtocolError: larger than one bus message.
    """
    return encode_bounded(event, PAYLOAD_BYTES_MAX)


def decode_event(topic: Topic, payload: bytes) -> Event:
    """The event a bus message carries.

    Raises:
        RemoteProtocolError: no telemetry topic, oversize, malformed, or with a number that is not finite or out of bounds.
    """
    decoder = _DECODERS.get(topic)
    if decoder is None:
        raise RemoteProtocolError(f"topic {topic.name} carries no telemetry event")
    event = decode_bounded(decoder, payload, PAYLOAD_BYTES_MAX, "telemetry event")
    if not _fits(event):
        raise RemoteProtocolError("telemetry event with a number out of bounds")
    return event


def _fits(event: Event) -> bool:
    """Whether every number in it is finite and within :data:`FIGURE_MAX`.

    All values are looked at, whatever types their fields have, so that no field can be forgotten. The payload's size bounds
    how many there are, and the types how deep they lie.
    """
    waiting: list[Iterable[Any]] = [(event,)]
    while waiting:
        for value in waiting.pop():
            kind = type(value)
            if kind is str or kind is bool:
                continue
            if kind is int or kind is float:
                if not -FIGURE_MAX <= value <= FIGURE_MAX:  # also when it is no number
                    return False
            elif kind is tuple:
                waiting.append(value)
            elif kind is dict:
                waiting.append(value.values())
            elif isinstance(value, Struct):
                waiting.append(msgspec.structs.astuple(value))
    return True
