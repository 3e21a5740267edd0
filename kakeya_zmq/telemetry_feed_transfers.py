"""Bulk transfers as telemetry tells them: one event for each lane that has ended.

A lane's effect does not say whom it serves. What does is the grant: the same transfer id passes by in LaneOpened and in the
answer to the request (where we bound), or in the answer to our own ask and in the effect (where we connect).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kakeya_zmq.protocol.effects import (
    Ask,
    AskFailed,
    AskId,
    AskProgressed,
    AskReplied,
    BindReceiver,
    BindSender,
    CancelAsk,
    ConnectReceiver,
    ConnectSender,
    FeedSender,
    LaneFinished,
    LaneId,
    LaneOpened,
    PartsReceived,
    RequestArrived,
    RequestCancelled,
    RequestKey,
    SendFailure,
    SendProgress,
    SendReply,
)
from kakeya_zmq.telemetry import bounded_ms, public_text
from wire.events import TransferEvent
from wire.messages import Fetch, LinkCodec, PublishGrant, PublishOffer, SubmitJob, TransferGrant

OPEN_MAX: Final = 4096
"""Requests, asks and lanes remembered; the oldest make room."""

Handler = Callable[[Any, float], list[TransferEvent]]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class _Transfer:
    direction: str
    started: float
    purpose: str = ""
    peer: str = ""
    parts: int = 0
    codec: LinkCodec = LinkCodec.NONE


class TransferLog:
    """Follows lanes."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[LaneId, _Transfer] = OrderedDict()
        self._requests: OrderedDict[RequestKey, tuple[str, str]] = OrderedDict()
        """Of others, for a transfer: its purpose and who asks."""
        self._asks: OrderedDict[AskId, str] = OrderedDict()
        """Ours, for a transfer: its purpose."""
        self._granted: OrderedDict[bytes, str] = OrderedDict()
        """Transfer ids that were granted to us, until we connect: the purpose."""
        self._offered: OrderedDict[bytes, LaneId] = OrderedDict()
        """Transfer ids of lanes that we bound, until they are told to the asker."""

    def handlers(self) -> Mapping[type, Handler]:
        """By type of event or effect, what to call with it and the time."""
        return {
            RequestArrived: self._arrived,
            RequestCancelled: self._request_ended,
            SendReply: self._request_ended,
            SendFailure: self._request_ended,
            SendProgress: self._granted_to_peer,
            Ask: self._asked,
            AskReplied: self._ask_ended,
            AskFailed: self._ask_ended,
            CancelAsk: self._ask_ended,
            AskProgressed: self._granted_to_us,
            BindSender: lambda effect, now: self._opening(effect, "out", now),
            BindReceiver: lambda effect, now: self._opening(effect, "in", now),
            ConnectSender: lambda effect, now: self._connecting(effect, "out", now),
            ConnectReceiver: lambda effect, now: self._connecting(effect, "in", now),
            LaneOpened: self._opened,
            FeedSender: self._fed,
            PartsReceived: self._fed,
            LaneFinished: self._finished,
        }

    # --- whose lane it is --------------------------------------------------------------------------------------------

    def _arrived(self, event: RequestArrived, now: float) -> list[TransferEvent]:
        purpose = _purpose(event.body)
        if purpose:
            _remember(self._requests, event.key, (purpose, str(event.node_id)))
        return []

    def _request_ended(self, seen: SendReply | SendFailure | RequestCancelled, now: float) -> list[TransferEvent]:
        self._requests.pop(seen.key, None)
        return []

    def _granted_to_peer(self, effect: SendProgress, now: float) -> list[TransferEvent]:
        grant = _grant_of(effect.body)
        lane = self._offered.pop(grant.transfer_id, None) if grant is not None else None
        transfer = self._lanes.get(lane) if lane is not None else None
        if transfer is not None and (request := self._requests.get(effect.key)) is not None:
            transfer.purpose, transfer.peer = request
        return []

    def _asked(self, effect: Ask, now: float) -> list[TransferEvent]:
        purpose = _purpose(effect.body)
        if purpose:
            _remember(self._asks, effect.ask, purpose)
        return []

    def _ask_ended(self, seen: AskReplied | AskFailed | CancelAsk, now: float) -> list[TransferEvent]:
        self._asks.pop(seen.ask, None)
        return []

    def _granted_to_us(self, event: AskProgressed, now: float) -> list[TransferEvent]:
        purpose = self._asks.get(event.ask)
        grant = _grant_of(event.body)
        if purpose is not None and grant is not None:
            _remember(self._granted, grant.transfer_id, purpose)
        return []

    # --- lanes -------------------------------------------------------------------------------------------------------

    def _opening(self, effect: BindSender | BindReceiver, direction: str, now: float) -> list[TransferEvent]:
        _remember(self._lanes, effect.lane, _Transfer(direction, now, codec=effect.link_codec))
        return []

    def _connecting(self, effect: ConnectSender | ConnectReceiver, direction: str, now: float) -> list[TransferEvent]:
        grant = effect.grant
        transfer = _Transfer(
            direction, now, self._granted.pop(grant.transfer_id, ""), str(effect.node_id), codec=grant.link_codec
        )
        if isinstance(effect, ConnectSender):
            transfer.parts = len(effect.parts)
        _remember(self._lanes, effect.lane, transfer)
        return []

    def _opened(self, event: LaneOpened, now: float) -> list[TransferEvent]:
        transfer = self._lanes.get(event.lane)
        if transfer is not None:
            transfer.codec = event.grant.link_codec
            _remember(self._offered, event.grant.transfer_id, event.lane)
        return []

    def _fed(self, seen: FeedSender | PartsReceived, now: float) -> list[TransferEvent]:
        transfer = self._lanes.get(seen.lane)
        if transfer is not None:
            transfer.parts += len(seen.parts)
        return []

    def _finished(self, event: LaneFinished, now: float) -> list[TransferEvent]:
        transfer = self._lanes.pop(event.lane, None)
        if transfer is None:
            return []
        told = TransferEvent(
            direction=transfer.direction,
            purpose=transfer.purpose,
            peer=transfer.peer,
            parts=transfer.parts,
            payload_bytes=event.transferred_bytes,
            elapsed_ms=bounded_ms((now - transfer.started) * 1000),
            codec=LinkCodec(transfer.codec).name.lower(),
            ok=event.ok,
            reason="" if event.ok else public_text(event.reason),
        )
        return [told]


def _purpose(body: object) -> str:
    """What a request's transfer is for; empty when it has none."""
    match body:
        case Fetch():
            return "fetch"
        case SubmitJob():
            return "job"
        case PublishOffer():
            return "publish"
        case _:
            return ""


def _grant_of(body: object) -> TransferGrant | None:
    match body:
        case TransferGrant():
            return body
        case PublishGrant(grant=grant):
            return grant
        case _:
            return None


def _remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    table[key] = value
    if len(table) > OPEN_MAX:
        table.popitem(last=False)
