"""The feed: a thread that listens to the telemetry bus and keeps the view of the fleet up to date.

It holds the telemetry-read key and nothing else of the fleet's secrets. It starts from the addresses it was given and from
those found on this machine, and learns all others from what nodes tell of their peers. It can start before the fleet, and
outlive it: libzmq connects again by itself, and a node tells its present state to whoever subscribes.

What is not signed with the key that belongs to the name it came under (:mod:`dashboard.speakers`) is refused, counted and
told as a refusal.

A reader that is too slow loses messages and nothing else happens: a publisher drops what a full connection cannot take, and
here the oldest of what waits for the view is dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from dashboard.fleet_view import BusState, FleetView
from dashboard.hub import LiveFleet
from dashboard.speakers import Speakers
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.interfaces import OwnInterfaces
from kakeya_zmq.io.reactor import Reactor
from wire.bus import BusMessage, Group, Topic
from wire.errors import ConfigError
from wire.keys import TelemetryKey

_log = logging.getLogger(__name__)

TELEMETRY_TOPICS: Final = tuple(topic for topic in Topic if topic.group is Group.TELEMETRY)
BATCH_S: Final = 0.1
"""Messages wait at most this long for the view: one lock for many of them."""
WAITING_MAX: Final = 10_000
TICK_S: Final = 0.5
CONNECT_S: Final = 1.0
"""How often new addresses are looked for."""
ADDRESSES_MAX: Final = 1024
REFUSALS_MAX: Final = 64
"""Names told of one second's refusals; more are summed up under none."""
FORGET_S: Final = 600.0
"""An address that nobody has told for so long is given up."""
DIAL_AGAIN_S: Final = 15.0
"""libzmq gives an address up for good after a peer that is none of ours: who stays unheard is dialled anew."""


class BusFeed:
    """Keeps ``fleet`` fed until :meth:`close`.

    Args:
        addresses: buses to listen to in any case.
        discover: asked now and then for further ones; must be quick.
        speakers: whose key belongs to which name; by default the first that is heard, for as long as this feed lives.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        key: TelemetryKey,
        *,
        addresses: Iterable[Address] = (),
        discover: Callable[[], Iterable[Address]] = tuple,
        speakers: Speakers | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """``dropped`` (too slow), ``missed`` (lost on the bus), ``addresses_refused`` (not to be dialled, or too many)."""
        self._fleet = fleet
        self._fixed = frozenset(addresses)
        self._discover = discover
        self._interfaces = OwnInterfaces(fleet.clock)
        self._refusal_told = False
        self._speakers = speakers or Speakers()
        self._speakers.rebound = self._rebound
        self._refused: Counter[tuple[str, str]] = Counter()
        """(under whose name, why) of the messages refused since the last look."""
        self._waiting: deque[tuple[BusMessage, float]] = deque(maxlen=WAITING_MAX)
        self._wanted_at: dict[Address, float] = {}
        self._dialled_at: dict[Address, float] = {}
        self._reactor = Reactor(clock=fleet.clock)
        self._subscriber = Subscriber(
            self._reactor,
            keys=key,
            topics=TELEMETRY_TOPICS,
            on_message=self._on_message,
            on_gap=self._on_gap,
            admit=self._speakers.admit,
            on_refused=self._on_refused,
        )

    def start(self) -> None:
        """Listen, on a thread of its own."""
        for every_s, work in (
            (BATCH_S, self._flush),
            (TICK_S, self._fleet.tick),
            (CONNECT_S, self._connect),
            (CONNECT_S, self._look_at_speakers),
        ):
            self._repeat(every_s, work)
        self._reactor.start_thread("kakeya-feed")

    def close(self) -> bool:
        """Stop and close every socket; whether that went well in time. Idempotent."""
        closed = self._reactor.close()
        if closed:
            self._speakers.save()
        return closed

    def figures(self) -> dict[str, int]:
        """Counters of feed and subscriber, and how many addresses are listened to."""
        return {**self._subscriber.counters, **self.counters, "addresses": len(self._dialled_at)}

    def _repeat(self, every_s: float, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # one failed round must not end all later ones
                _log.error("the feed: %s", describe_exception(error))
            self._reactor.call_later(every_s, run)

        run()

    def _on_message(self, message: BusMessage) -> None:
        self.counters["dropped"] += len(self._waiting) == WAITING_MAX
        self._waiting.append((message, self._reactor.clock()))

    def _on_gap(self, node_id: str, topic: Topic, missed: int) -> None:
        self.counters["missed"] += missed

    def _on_refused(self, node_id: str, reason: str) -> None:
        which = (node_id, reason)
        if which not in self._refused and len(self._refused) >= REFUSALS_MAX:
            which = ("", reason)
        self._refused[which] += 1

    def _look_at_speakers(self) -> None:
        refused, self._refused = self._refused, Counter()
        for (node_id, reason), count in refused.items():
            self._fleet.refuse(node_id, reason, count)
        self._speakers.look(self._reactor.clock())

    def _rebound(self, node_id: str) -> None:
        self._flush()  # what waits is of the key before
        self._fleet.forget(node_id)

    def _flush(self) -> None:
        if self._waiting:
            batch = list(self._waiting)
            self._waiting.clear()
            self._fleet.apply(batch)

    def _connect(self) -> None:
        self._tell_refusal()
        now = self._reactor.clock()
        told, unheard, silent = self._fleet.read(_what_is_told)
        learnt = {address for address in map(self._parsed, told) if address is not None}
        for address in self._fixed | frozenset(self._discover()) | learnt:
            self._wanted_at[address] = now
        for address, wanted_at in list(self._wanted_at.items()):
            if now - wanted_at > FORGET_S:
                self._give_up(address)
                continue
            lost = silent or str(address) in unheard
            if lost and now - self._dialled_at.get(address, now) > DIAL_AGAIN_S:
                self._subscriber.disconnect(address)
                del self._dialled_at[address]
            if address not in self._dialled_at:
                self._dial(address, now)

    def _tell_refusal(self) -> None:
        """One line for all of them: libzmq tries again and again."""
        if not self._refusal_told and self._subscriber.counters["handshakes_rejected"]:
            self._refusal_told = True
            _log.warning(
                "a bus refused this dashboard, or is none of the fleet: check the telemetry key (kakeya key telemetry)"
            )

    def _dial(self, address: Address, now: float) -> None:
        if len(self._dialled_at) >= ADDRESSES_MAX:
            self.counters["addresses_refused"] += 1
            del self._wanted_at[address]
            return
        self._subscriber.connect(address)
        self._dialled_at[address] = now

    def _give_up(self, address: Address) -> None:
        del self._wanted_at[address]
        if self._dialled_at.pop(address, None) is not None:
            self._subscriber.disconnect(address)

    def _parsed(self, text: str) -> Address | None:
        """An address that a node tells: like those of cards it must be a plain IP address, so that no name is looked up."""
        with contextlib.suppress(ConfigError):
            address = parse_address(text)
            if self._interfaces.may_dial(address):
                return address
        self.counters["addresses_refused"] += 1
        return None


def _what_is_told(view: FleetView, now: float) -> tuple[frozenset[str], frozenset[str], bool]:
    """(buses of all nodes, buses of nodes that are not heard, whether nothing at all is heard)."""
    unheard = frozenset(peer.bus_address for peer in view.unheard())
    return view.bus_addresses(), unheard, view.bus_state(now) is not BusState.LIVE
