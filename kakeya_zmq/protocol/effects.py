"""Events and effects that the application machines share with their host.

Vocabulary: a *request key* names a request some peer sent us; an *ask* is a request we sent to a node; a *lane* is one
bulk transfer; a *ticket* is one engine command. All four are chosen by the machine (or, for request keys, by the server
shell) and are opaque to the host. Everything here is a frozen value; the unions at the end are closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NewType, TypeAlias

from kakeya_zmq.blocks import Part
from kakeya_zmq.engine import Command, Event
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.messages import (
    CipherSuite,
    LinkCodec,
    PartMeta,
    PartRef,
    ProgressBody,
    ReplyBody,
    RequestBody,
    TransferGrant,
    UpdateBody,
    ValueBytes,
)

RequestKey = NewType("RequestKey", tuple[bytes, int])
"""(control session id, request id) of a request that a peer sent us."""
AskId = NewType("AskId", int)
LaneId = NewType("LaneId", int)
Ticket = NewType("Ticket", int)


NO_CONNECTION: Final = "its bulk port could not be reached"
"""Why a lane ended that never had a connection: a firewall, or a port that is not forwarded."""
NO_DATA: Final = "no data came in time"
UNREACHED_PORT: Final = "sent no data from its bulk port: is it open? (see --bulk-ports)"
"""The same for the user, after the node's name."""


# --- events: what happened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A peer asks us something. ``deadline`` is absolute, seconds on the monotonic clock.

    ``identity_public_key`` is the key the peer has proven, 32 bytes: a name of a client may be another one's after a while.
    """

    key: RequestKey
    node_id: NodeId
    roles: tuple[str, ...]
    body: RequestBody
    deadline: float
    identity_public_key: bytes = b""

    @property
    def account(self) -> str:
        """Whom the bounds of one peer go by: the identity it has proven, whatever it calls itself."""
        return self.identity_public_key.hex() or self.node_id


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    key: RequestKey
    body: UpdateBody


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The peer cancelled, vanished or its deadline passed: no answer is wanted any more (none may be sent)."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class AskReplied:
    ask: AskId
    body: ReplyBody


@dataclass(frozen=True, slots=True)
class AskProgressed:
    ask: AskId
    body: ProgressBody


@dataclass(frozen=True, slots=True)
class AskFailed:
    """The ask ended without a reply: failure from the peer, lost connection or deadline (codes tell)."""

    ask: AskId
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """A lane we bound is ready; ``grant`` is what the peer needs to connect."""

    lane: LaneId
    grant: TransferGrant


@dataclass(frozen=True, slots=True)
class PartsReceived:
    """Parts that arrived whole and verified on a receiving lane."""

    lane: LaneId
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class CreditEarned:
    """The receiving lane has processed this many bytes: tell the sender."""

    lane: LaneId
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class LaneFinished:
    """The lane is closed and its thread is gone. ``ok``: everything fed or expected has been handed over."""

    lane: LaneId
    ok: bool
    reason: str
    transferred_bytes: int


@dataclass(frozen=True, slots=True)
class CommandEvent:
    """The engine produced one event for a command."""

    ticket: Ticket
    event: Event


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """The command's iterator is exhausted or was cancelled; no more events follow.

    ``position`` = tokens whose KV the command's session holds now; None when the session no longer exists.
    """

    ticket: Ticket
    cancelled: bool
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """``deadline()`` has passed."""


# --- effects: what the host must do ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendReply:
    key: RequestKey
    body: ReplyBody


@dataclass(frozen=True, slots=True)
class SendProgress:
    key: RequestKey
    body: ProgressBody


@dataclass(frozen=True, slots=True)
class SendFailure:
    key: RequestKey
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Send ``body`` to a node; answered by AskProgressed*, then exactly one AskReplied or AskFailed."""

    ask: AskId
    node_id: NodeId
    body: RequestBody
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendUpdate:
    ask: AskId
    body: UpdateBody


@dataclass(frozen=True, slots=True)
class CancelAsk:
    """Tell the peer to stop; no further events follow for this ask."""

    ask: AskId


@dataclass(frozen=True, slots=True)
class BindSender:
    """Serve one transfer: bind a one-shot PUSH, answer with LaneOpened. Feed it with FeedSender."""

    lane: LaneId
    suite: CipherSuite
    chunk_bytes: int
    credit_bytes: int
    link_codec: LinkCodec = LinkCodec.NONE
    value_bytes: ValueBytes = 1


@dataclass(frozen=True, slots=True)
class ConnectSender:
    """Push ``parts`` to the peer behind ``node_id`` that granted us a publish; the lane finishes by itself."""

    lane: LaneId
    node_id: NodeId
    grant: TransferGrant
    credit_bytes: int
    parts: tuple[Part, ...]
    value_bytes: ValueBytes = 1


@dataclass(frozen=True, slots=True)
class FeedSender:
    """Queue parts on a sending lane; ``final``: nothing follows."""

    lane: LaneId
    parts: tuple[Part, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class AddCredit:
    """The receiver has processed this many bytes: the sending lane may send as many more."""

    lane: LaneId
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class BindReceiver:
    """Accept one publish: bind a one-shot PULL for exactly these parts, answer with LaneOpened; digests are verified."""

    lane: LaneId
    suite: CipherSuite
    chunk_bytes: int
    expected: tuple[PartMeta, ...]
    link_codec: LinkCodec = LinkCodec.NONE


@dataclass(frozen=True, slots=True)
class WantedPart:
    """A part that may come, and what its asker knows of it beforehand: its place, and between which sizes it must be."""

    ref: PartRef
    parent_hash: bytes
    start: int
    token_count: int
    bytes_min: int
    bytes_max: int
    optional: bool = False
    """The transfer is whole without it."""

    @classmethod
    def like(cls, meta: PartMeta) -> WantedPart:
        """Exactly this place and size."""
        size_bytes = meta.length_bytes
        return cls(meta.ref, meta.parent_hash, meta.start, meta.token_count, size_bytes, size_bytes)

    def admits(self, meta: PartMeta) -> bool:
        """Whether a description that came can be of this part."""
        return (
            meta.ref == self.ref
            and (meta.parent_hash, meta.start, meta.token_count) == (self.parent_hash, self.start, self.token_count)
            and self.bytes_min <= meta.length_bytes <= self.bytes_max
        )


@dataclass(frozen=True, slots=True)
class ConnectReceiver:
    """Pull a granted transfer from the peer behind ``node_id``; a part that is not as expected is a protocol violation."""

    lane: LaneId
    node_id: NodeId
    grant: TransferGrant
    expected: tuple[WantedPart, ...]
    budget_bytes: int
    idle_timeout_s: float
    verify_digests: bool
    """Whether to check each part's SHA-256, too: what is passed on to others has to be what it says."""

    @property
    def wanted(self) -> tuple[PartRef, ...]:
        return tuple(part.ref for part in self.expected)


@dataclass(frozen=True, slots=True)
class CloseLane:
    """The transfer is over (``ok``) or given up; LaneFinished follows."""

    lane: LaneId
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Run an engine command; answered by CommandEvent*, then CommandEnded."""

    ticket: Ticket
    command: Command


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Stop a command at its next step; CommandEnded follows."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter (names in docs/telemetry.md)."""

    name: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Note:
    """A noteworthy event for status and log: one line, no prompt, token, hash, key or address in it."""

    level: str
    """"info", "warning" or "error"."""
    text: str
    fields: Mapping[str, int | float | str | bool] | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """A node could not prove what it must: to be counted and written down. ``reason`` is fixed text."""

    node_id: NodeId
    reason: str


HostEvent: TypeAlias = (
    RequestArrived
    | UpdateArrived
    | RequestCancelled
    | AskReplied
    | AskProgressed
    | AskFailed
    | LaneOpened
    | PartsReceived
    | CreditEarned
    | LaneFinished
    | CommandEvent
    | CommandEnded
    | Tick
)

Effect: TypeAlias = (
    SendReply
    | SendProgress
    | SendFailure
    | Ask
    | SendUpdate
    | CancelAsk
    | BindSender
    | ConnectSender
    | FeedSender
    | AddCredit
    | BindReceiver
    | ConnectReceiver
    | CloseLane
    | RunCommand
    | CancelCommand
    | Count
    | Note
    | Refuse
)
