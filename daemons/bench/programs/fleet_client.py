"""A node of the fleet without a model or a store of its own: publishes parts to a cache peer and fetches prefixes from it.

Control connection, dispatcher, lanes and the gathering and publishing machines are those of a primary.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemons.bulk import BulkShell
from daemons.dispatch import Dispatcher
from daemons.peers import PeerTable
from kakeya_zmq.blocks import Part, RawPart
from kakeya_zmq.io.addresses import parse_address
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol import effects as fx
from kakeya_zmq.protocol.account import Account
from kakeya_zmq.protocol.gather import Gathering
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask, TailHash
from kakeya_zmq.protocol.publish import Publisher, PublishSettings
from kakeya_zmq.protocol.session import LocalNode
from kakeya_zmq.store import BlockStore
from kakeya_zmq.telemetry import Counters
from wire.errors import FailureCode, RequestFailed
from wire.ids import NodeId
from wire.keys import FleetKey, NodeIdentity

CONNECT_TIMEOUT_SECONDS = 20.0
TRANSFER_TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.002
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished fetch. ``parts``: everything a hit at ``position`` needs, as an engine takes it."""

    position: int
    parts: tuple[RawPart, ...]
    moved_bytes: int
    elapsed_s: float
    """From the request until the last part was verified and at hand."""


class FetchMachine:
    """Runs one gathering at a time; the dispatcher sees one machine that lives on."""

    def __init__(self, ids: IdAllocator) -> None:
        self._ids = ids
        self._gathering: Gathering | None = None
        self._done: Callable[[], None] = lambda: None

    def begin(
        self, task: PreparationTask, holdings: Holdings, hash_tail: TailHash, now: float, done: Callable[[], None]
    ) -> list[fx.Effect]:
        self._gathering = Gathering(task, holdings, self._ids, MeasuredRates(), hash_tail, 0)
        self._done = done
        return self._settle(self._gathering.start(now), now)

    def on(self, event: fx.HostEvent, now: float) -> list[fx.Effect]:
        if self._gathering is None:
            return []
        return self._settle(self._gathering.on(event, now), now)

    def deadline(self) -> float | None:
        return None if self._gathering is None else self._gathering.deadline()

    def _settle(self, effects: list[fx.Effect], now: float) -> list[fx.Effect]:
        gathering = self._gathering
        if gathering is None or not gathering.finished:
            return effects
        self._done()
        self._gathering = None
        return [*effects, *gathering.cancel(now)]


class FleetClient:
    """Connected to one cache peer. Methods are called on one thread, which isn't the reactor's.

    Args:
        address: of the cache peer.
        psk_file: the fleet's key.

    Raises:
        RequestFailed: UNAVAILABLE, the peer doesn't answer in time.
    """

    def __init__(self, address: str, psk_file: Path) -> None:
        self.reactor = Reactor()
        self.counters = Counters.for_prefill()
        self._ids = IdAllocator(itertools.count(1).__next__)
        self._up: queue.SimpleQueue[str] = queue.SimpleQueue()
        local = LocalNode(
            node_id=NodeId(f"bench-{secrets.token_hex(4)}"),
            identity=NodeIdentity.generate(),
            roles=("primary",),
            incarnation=time.time_ns(),
            software="kakeya-bench",
        )
        self._peers = PeerTable(
            self.reactor,
            local=local,
            fleet_key=FleetKey.load(psk_file),
            on_up=lambda peer, client: self._up.put(peer.node_id),
            on_down=lambda node_id, reason: None,
        )
        self._dispatcher = Dispatcher(
            self.reactor, find_client=self._peers.find, count=self.counters.add, note=lambda level, text: None
        )
        self._bulk = BulkShell(self.reactor, host=HOST, ports=None, deliver=self._dispatcher.lane_event)
        self._dispatcher.lanes = self._bulk
        self._machine = FetchMachine(self._ids)
        self._publisher = Publisher(PublishSettings(), self._ids)
        self._dispatcher.add(self._machine)
        self._dispatcher.add(self._publisher)
        self.reactor.start_thread("bench-client")
        self.reactor.call(lambda: self._peers.add_seed(parse_address(address)))
        try:
            self.peer_id = NodeId(self._up.get(timeout=CONNECT_TIMEOUT_SECONDS))
        except queue.Empty:
            self.close()
            raise RequestFailed(FailureCode.UNAVAILABLE, "the cache peer does not answer") from None

    def publish(self, parts: Sequence[Part], fingerprint: bytes) -> int:
        """Offer parts and send what the peer lacks; returns the bytes sent.

        Raises:
            RequestFailed: the peer didn't take them, or not in time.
        """
        before_bytes = self._figure("bytes_published")
        self.reactor.call(
            lambda: self._dispatcher.apply(
                self._publisher, self._publisher.publish(parts, fingerprint, (self.peer_id,), self.reactor.clock())
            )
        )
        deadline = time.monotonic() + TRANSFER_TIMEOUT_SECONDS
        while not self.reactor.call(lambda: self._publisher.idle):
            if time.monotonic() > deadline:
                raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, "the cache peer took too long to take its copy")
            time.sleep(POLL_SECONDS)
        if self._figure("publish_failures"):
            raise RequestFailed(FailureCode.UNAVAILABLE, "the cache peer did not take its copy")
        return self._figure("bytes_published") - before_bytes

    def _figure(self, name: str) -> int:
        value = self.reactor.call(self.counters.snapshot).get(name)
        return value if isinstance(value, int) else 0

    def fetch(self, task: PreparationTask, hash_tail: TailHash, store: BlockStore | None = None) -> Fetched:
        """Bring everything the task's prompt needs here.

        Raises:
            RequestFailed: not all of it came.
        """
        done: queue.SimpleQueue[float] = queue.SimpleQueue()
        holdings = Holdings(task, store, Account(lambda name, value: None))

        def begin() -> None:
            effects = self._machine.begin(
                task, holdings, hash_tail, self.reactor.clock(), lambda: done.put(time.perf_counter())
            )
            self._dispatcher.apply(self._machine, effects)

        started = time.perf_counter()
        self.reactor.post(begin)
        try:
            ended = done.get(timeout=TRANSFER_TIMEOUT_SECONDS)
        except queue.Empty:
            raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, "the fetch did not end in time") from None
        reach = Reach(task.target, task.chain)
        parts = self.reactor.call(lambda: holdings.collect(reach, self.reactor.clock()))
        if parts is None or self.reactor.call(lambda: holdings.missing(reach)):
            raise RequestFailed(FailureCode.UNAVAILABLE, "; ".join(holdings.account.reasons) or "the fetch is incomplete")
        return Fetched(task.target, parts, holdings.received_bytes, ended - started)

    def close(self) -> None:
        self.reactor.call(self._close_on_reactor)
        self.reactor.close(5.0)

    def _close_on_reactor(self) -> None:
        self._bulk.close_all(5.0)
        self._peers.close()
