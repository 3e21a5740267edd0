"""Bulk transfers of a node: turns lane effects into lane threads, and posts their events to the reactor."""

from __future__ import annotations

from collections.abc import Callable

from kakeya_zmq.io.addresses import PortRange
from kakeya_zmq.io.lane_threads import LaneThreads
from kakeya_zmq.io.lanes import Lane, LaneGroup
from kakeya_zmq.io.memory import BufferPool
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.receiver import ReceiverLane
from kakeya_zmq.io.schedule import TimerHandle
from kakeya_zmq.io.sender import SenderLane
from kakeya_zmq.protocol import effects as fx

POOL_IDLE_SECONDS = 10.0
"""Buffers of evicted parts are kept for the next transfer for this long after the last one."""
LaneEvent = fx.LaneOpened | fx.PartsReceived | fx.CreditEarned | fx.LaneFinished
SENDER_IDLE_SECONDS = 30.0
"""A receiver that processes nothing for this long while something waits for it is gone."""
PUBLISH_IDLE_SECONDS = 15.0


class BulkShell:
    """The lanes of one node.

    Args:
        host: address to bind one-shot sockets on: the one the control socket is bound to.
        ports: range for them, or None for any free port.
        deliver: given each event on the reactor's thread.
    """

    def __init__(
        self, reactor: Reactor, *, host: str, ports: PortRange | None, deliver: Callable[[LaneEvent], None]
    ) -> None:
        self._reactor = reactor
        self._host = host
        self._ports = ports
        self._deliver = deliver
        self._group = LaneGroup()
        self._threads = LaneThreads()
        self.pool = BufferPool()
        self._trim: TimerHandle | None = None
        self.opened = 0
        """Lanes opened so far."""

    def bind_sender(self, effect: fx.BindSender) -> None:
        self._start(
            SenderLane.bind(
                self._reactor.context,
                self._reactor.gate,
                lane=effect.lane,
                host=self._host,
                port_range=self._ports,
                suite=effect.suite,
                chunk_bytes=min(effect.chunk_bytes, effect.credit_bytes),
                credit_bytes=effect.credit_bytes,
                link_codec=effect.link_codec,
                value_bytes=effect.value_bytes,
                post=self._post,
                threads=self._threads,
                idle_timeout_s=SENDER_IDLE_SECONDS,
            )
        )

    def connect_sender(self, effect: fx.ConnectSender, host: str) -> None:
        self._start(
            SenderLane.connect(
                self._reactor.context,
                lane=effect.lane,
                host=host,
                grant=effect.grant,
                credit_bytes=effect.credit_bytes,
                parts=effect.parts,
                value_bytes=effect.value_bytes,
                post=self._post,
                threads=self._threads,
                idle_timeout_s=SENDER_IDLE_SECONDS,
            )
        )

    def bind_receiver(self, effect: fx.BindReceiver) -> None:
        self._start(
            ReceiverLane.bind(
                self._reactor.context,
                self._reactor.gate,
                lane=effect.lane,
                host=self._host,
                port_range=self._ports,
                suite=effect.suite,
                chunk_bytes=effect.chunk_bytes,
                expected=effect.expected,
                allocate_part=self.pool.allocate,
                link_codec=effect.link_codec,
                post=self._post,
                threads=self._threads,
                idle_timeout_s=PUBLISH_IDLE_SECONDS,
            )
        )

    def connect_receiver(self, effect: fx.ConnectReceiver, host: str) -> None:
        self._start(
            ReceiverLane.connect(
                self._reactor.context,
                lane=effect.lane,
                host=host,
                grant=effect.grant,
                expected=effect.expected,
                budget_bytes=effect.budget_bytes,
                idle_timeout_s=effect.idle_timeout_s,
                post=self._post,
                threads=self._threads,
                verify_digests=effect.verify_digests,
                allocate_part=self.pool.allocate,
            )
        )

    def feed(self, effect: fx.FeedSender) -> None:
        lane = self._group.get(effect.lane)
        if isinstance(lane, SenderLane):
            lane.feed(effect.parts, effect.final)

    def add_credit(self, effect: fx.AddCredit) -> None:
        lane = self._group.get(effect.lane)
        if isinstance(lane, SenderLane):
            lane.add_credit(effect.credit_bytes)

    def close(self, effect: fx.CloseLane) -> None:
        lane = self._group.get(effect.lane)
        if lane is not None:
            lane.close(effect.ok, effect.reason)

    def close_all(self, timeout_s: float) -> bool:
        self._threads.close()
        return self._group.close_all(timeout_s)

    def __len__(self) -> int:
        return len(self._group)

    def _start(self, lane: Lane) -> None:
        self._group.add(lane)
        self.opened += 1

    def _post(self, event: LaneEvent) -> None:
        self._reactor.post(lambda: self._delivered(event))

    def _delivered(self, event: LaneEvent) -> None:
        self._deliver(event)
        if isinstance(event, fx.LaneFinished):
            if self._trim is not None:
                self._trim.cancel()
            self._trim = self._reactor.call_later(POOL_IDLE_SECONDS, self.pool.trim)
