"""Bulk transfers as the feed tells them."""

from __future__ import annotations

import pytest

from kakeya_zmq.protocol import effects as fx
from tests.unit.telemetry_kit import PARTS, Rig, arrived, fetch, grant, key, offer, submit, transfers
from wire.events import (
    TransferEvent,
)
from wire.ids import NodeId
from wire.messages import (
    Appended,
    CipherSuite,
    LinkCodec,
    PublishGrant,
)


def test_a_fetch_that_is_served_is_told_with_who_asked() -> None:
    rig = Rig()
    lane = fx.LaneId(3)
    rig.told(arrived(1, fetch(), "primary"), fx.BindSender(lane, CipherSuite.SECRETBOX, 1 << 20, 1 << 24, LinkCodec.ZSTD))
    rig.told(fx.LaneOpened(lane, grant(7, LinkCodec.ZSTD)), fx.SendProgress(key(1), grant(7, LinkCodec.ZSTD)))
    rig.told(fx.FeedSender(lane, PARTS, final=True), fx.SendReply(key(1), Appended))  # type: ignore[arg-type]
    rig.now += 0.02
    (event,) = transfers(rig.told(fx.LaneFinished(lane, ok=True, reason="done", transferred_bytes=99)))
    assert event == TransferEvent(
        direction="out", purpose="fetch", peer="primary", parts=2, payload_bytes=99, elapsed_ms=20.0, codec="zstd"
    )
    assert transfers(rig.told(fx.LaneFinished(lane, ok=True, reason="done", transferred_bytes=99))) == []


def test_a_publish_that_is_received_is_told() -> None:
    rig = Rig()
    lane = fx.LaneId(3)
    rig.told(arrived(1, offer(), "primary"), fx.BindReceiver(lane, CipherSuite.SECRETBOX, 1 << 20, ()))
    rig.told(fx.LaneOpened(lane, grant(7)))
    rig.told(fx.SendProgress(key(1), PublishGrant(wanted=b"\x01", grant=grant(7), credit_bytes=1)))
    rig.told(fx.PartsReceived(lane, PARTS))  # type: ignore[arg-type]
    (event,) = transfers(rig.told(fx.LaneFinished(lane, ok=False, reason="cut at 10.1.2.3:9", transferred_bytes=5)))
    assert (event.direction, event.purpose, event.peer, event.parts) == ("in", "publish", "primary", 2)
    assert (event.ok, event.reason) == (False, "cut at (address)")


@pytest.mark.parametrize(("body", "purpose"), [(fetch(), "fetch"), (submit(1).body, "job")])
def test_what_is_pulled_from_others_is_told_with_its_purpose(body: object, purpose: str) -> None:
    rig = Rig()
    ask, lane = fx.AskId(4), fx.LaneId(5)
    rig.told(fx.Ask(ask, NodeId("worker"), body, 10.0))  # type: ignore[arg-type]
    rig.told(fx.AskProgressed(ask, grant(8)))
    rig.told(fx.ConnectReceiver(lane, NodeId("worker"), grant(8), (), 100, 5.0, verify_digests=False))
    rig.told(fx.PartsReceived(lane, PARTS))  # type: ignore[arg-type]
    (event,) = transfers(rig.told(fx.LaneFinished(lane, ok=True, reason="", transferred_bytes=5)))
    assert (event.direction, event.purpose, event.peer, event.parts) == ("in", purpose, "worker", 2)


def test_what_is_published_is_told() -> None:
    rig = Rig()
    ask, lane = fx.AskId(4), fx.LaneId(5)
    rig.told(fx.Ask(ask, NodeId("cache"), offer(), 10.0))
    rig.told(fx.AskProgressed(ask, PublishGrant(wanted=b"\x03", grant=grant(9), credit_bytes=1)))
    rig.told(fx.ConnectSender(lane, NodeId("cache"), grant(9), 100, PARTS))  # type: ignore[arg-type]
    (event,) = transfers(rig.told(fx.LaneFinished(lane, ok=True, reason="", transferred_bytes=5)))
    assert (event.direction, event.purpose, event.peer, event.parts) == ("out", "publish", "cache", 2)
