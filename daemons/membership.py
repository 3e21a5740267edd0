"""Membership of one node in its fleet: joins the directory (who is there) with the peer table (who is connected), the bus
and the exchange of cards over the control plane.

A primary keeps a connection to every node, as it needs them at once; other nodes to their seeds, and for exchanging cards to
a few more in turn.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, assert_never

from msgspec.structs import replace

from daemons.own_addresses import network_of
from daemons.peers import PeerTable
from kakeya_zmq.config import Settings
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.control_client import ControlClient, Keys
from kakeya_zmq.io.control_server import IncomingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol import directory as dm
from kakeya_zmq.protocol.endpoints import DEFAULT_PRIORITIES
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.revocation import RevocationBook
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from kakeya_zmq.telemetry import Counters, Value
from wire.cards import ENDPOINTS_MAX, Card, Endpoint
from wire.errors import ConfigError, FailureCode
from wire.events import SecurityKind
from wire.files import NotRegularFile, make_private_folder, read_regular, unreadable, write_private_file
from wire.ids import NodeId
from wire.keys import FleetKey
from wire.messages import CardList, ExchangeCards, ReplyBody

EXCHANGE_TIMEOUT_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0
"""Between two looks at the clock that goes on while the machine sleeps."""
SLEEP_SECONDS_MIN: Final = 2.0
"""The two clocks are read one after the other, and a busy machine may pause between."""
INCARNATION_FILE: Final = "incarnation"
INCARNATION_MAX: Final = 2**62
INCARNATION_BYTES_MAX: Final = 64
PRIORITY_MAX: Final = 1000


class Membership:
    """Use it on the reactor's thread.

    Args:
        fleet_key: the PSK, or what gives those that are valid now, the oldest first.
        identities: which key belongs to which node id; a book for each part when None.
        make_card: builds and signs our card; called with its sequence number.
        publish: puts our card on the bus.
        subscriber: listens to the buses of the nodes that are connected.
        note: remembers a noteworthy event (level, text).
        counters: of the node.
        asleep: seconds this machine has slept since some moment; a test's own clock.
    """

    def __init__(
        self,
        reactor: Reactor,
        settings: Settings,
        *,
        local: LocalNode,
        fleet_key: FleetKey | Keys,
        identities: IdentityBook | None = None,
        make_card: Callable[[int], bytes],
        publish: Callable[[bytes], object],
        subscriber: Subscriber,
        note: Callable[[str, str], None],
        counters: Counters,
        asleep: Callable[[], float] | None = None,
    ) -> None:
        self._reactor = reactor
        self._settings = settings
        self._local = local
        self._publish = publish
        self._subscriber = subscriber
        self._note = note
        self._counters = counters
        self._asleep = asleep or seconds_asleep
        self._slept = self._asleep()
        self._look_at = reactor.clock()
        self._buses: dict[str, tuple[Address, FleetKey | None]] = {}
        """Whose bus is listened to, where, and under which PSK."""
        self.gone: list[Callable[[NodeId], None]] = []
        """Told the id of each node that has left the fleet."""
        self.restarted: list[Callable[[NodeId, int], object]] = []
        """Told the id and the incarnation of each node that was restarted."""
        self.noticed: list[Callable[[SecurityKind, str, str], None]] = []
        """Told of what concerns security: the kind, one line, and the node's id where it was proven."""
        self.routed: list[Callable[[NodeId, str], None]] = []
        """Told the id of each node that is reached, and the endpoint it is reached through."""
        self.revocations: RevocationBook | None = None
        """What exchanges tell of revoked keys; nothing when None."""
        self.revocations_told: Callable[[tuple[bytes, ...], bytes | str], None] = lambda blobs, teller: None
        """Told the signed revocations that others sent, and who: the key of who came to us, the name of who was asked."""
        self.cards_taken: list[Callable[[Card], None]] = []
        """Told each new card."""
        self.exchanges = 0
        """Exchanges of cards this node has asked for."""
        self.peers = PeerTable(
            reactor,
            local=local,
            fleet_key=fleet_key,
            identities=identities,
            on_up=self._up,
            on_down=self._down,
            on_passed_over=self._passed_over,
        )
        interval_s = settings.gossip_interval_s
        self.directory = dm.Directory(
            node_id=local.node_id,
            make_card=make_card,
            settings=dm.DirectorySettings(interval_s=interval_s, first_interval_s=min(1.0, interval_s)),
            incarnation=local.incarnation,
            identities=identities,
            rng=random.Random(secrets.randbits(64)),
        )

    def open(self) -> None:
        """Connect to the configured addresses and start to gossip."""
        self._reactor.add_deadline_source(self.directory.deadline, lambda now: self._tell(dm.DirectoryTick()))
        self._reactor.add_deadline_source(lambda: self._look_at, self._look)
        for texts, role in (
            (self._settings.peer, ""),
            (self._settings.cache_peer, "cache"),
            (self._settings.worker, "worker"),
        ):
            for text in texts:
                self.peers.add_seed(parse_address(text), role)
        self._tell(dm.DirectoryTick())

    def close(self) -> None:
        self.peers.close()

    def announce(self) -> None:
        """Something on our card changed, or somebody has just subscribed to it: tell the fleet now."""
        self._tell(dm.AnnounceNow())

    def card_arrived(self, card: bytes) -> None:
        """A card came over the bus."""
        self._tell(dm.CardsArrived((card,), (0,), time.time()))

    def answer(self, incoming: IncomingRequest, body: ExchangeCards) -> None:
        """Another node's exchange.

        Raises:
            RemoteProtocolError: its digest is broken.
        """
        self._tell(dm.CardsArrived(body.cards, body.ages_ms, time.time(), incoming.peer.node_id))
        self._take_revocations(body.revocations, incoming.peer.identity_public_key)
        cards, ages, wanted, more = self.directory.answer(
            body.known, incoming.peer.node_id, self._reactor.clock(), incarnation=incoming.peer.incarnation
        )
        reply = CardList(cards=cards, ages_ms=ages, wanted=wanted, more=more)
        if self.revocations is not None and body.known is not None:
            lacking, asked = self.revocations.lacking(body.revoked), self.revocations.wanted(body.revoked)
            reply = replace(reply, revocations=lacking, wanted_revocations=asked)
        incoming.reply(reply)

    def expel(self, identity_public_key: bytes, node_id: str, reason: str) -> None:
        """Have nothing to do any more with the node that has this key."""
        self._tell(dm.Expelled(identity_public_key, reason))
        self.peers.expel(node_id, identity_public_key)

    def forget(self, node_id: str) -> None:
        """Take whatever key comes next for a node id."""
        for effect in self.directory.forget(node_id):
            self._carry_out(effect)

    def _take_revocations(self, blobs: tuple[bytes, ...], teller: bytes | str) -> None:
        if blobs:
            self.revocations_told(blobs, teller)

    def rows(self) -> list[dict[str, Value]]:
        """One row a connected or known node, for status."""
        now = self._reactor.clock()
        rows = self.peers.rows()
        cards = {card.node_id: card for card in self.directory.peers(now)}
        for row in rows:
            card = cards.pop(str(row["node_id"]), None)
            if card is not None:
                row |= self._card_figures(card, now)
                row["cache_entries"] = card.cache.entry_count if card.cache is not None else 0
        for card in cards.values():
            rows.append({"node_id": card.node_id, "state": "known by its card", **self._card_figures(card, now)})
        return rows

    def _card_figures(self, card: Card, now: float) -> dict[str, Value]:
        skew_ms = self.directory.clock_skew_ms(card.node_id)
        return {
            "roles": ", ".join(card.roles),
            "card_age_ms": self.directory.age_ms(card.node_id, now),
            "clock_skew_ms": round(skew_ms) if skew_ms is not None else None,
        }

    # --- the directory -----------------------------------------------------------------------------------------------

    def _tell(self, event: dm.DirectoryEvent) -> None:
        for effect in self.directory.on(event, self._reactor.clock()):
            self._carry_out(effect)

    def _carry_out(self, effect: dm.DirectoryEffect) -> None:
        match effect:
            case dm.Announce(card=card):
                self._publish(card)
            case dm.Exchange():
                self._exchange(effect)
            case dm.PeerChanged():
                self._changed(effect)
            case dm.PeerGone(node_id=node_id, reason=reason):
                self._note("info", f"{node_id} is gone: {reason}")
                self.peers.forget(node_id)
                if not self.peers.keeps(node_id):
                    self._listen(node_id, None)
                for observer in self.gone:
                    observer(node_id)
            case dm.CardRefused(reason=reason):
                self._counters.add("cards_refused")
                self._notice(SecurityKind.CARD_REFUSED, reason)
                self._note("warning", reason)
            case dm.OwnIdClaimed(reason=reason):
                self._counters.add("cards_refused")
                self._notice(SecurityKind.CARD_REFUSED, reason)
                self._note("warning", f"{reason} ({self._local.node_id}): give every node a --node-id of its own")
            case dm.ClockSkewed(node_id=node_id, skew_ms=skew_ms):
                way = "ahead of" if skew_ms > 0 else "behind"
                self._note("warning", f"the clock of {node_id} is {abs(skew_ms) / 1000:.0f} s {way} this machine's")
            case _:
                assert_never(effect)

    def _changed(self, change: dm.PeerChanged) -> None:
        card = change.card
        for learn in self.cards_taken:
            learn(card)
        if change.appeared or change.restarted:
            what = "restarted" if change.restarted else "appeared"
            self._note("info", f"{card.node_id} {what} ({', '.join(card.roles)})")
            self._notice(SecurityKind.NODE_APPEARED, f"the node {what}", card.node_id)
        if "primary" in self._local.roles and card.roles != ("client",):
            self.peers.ensure(card)
        else:
            self.peers.update(card)
        if change.restarted:
            for observer in self.restarted:
                observer(NodeId(card.node_id), card.incarnation)

    def _notice(self, kind: SecurityKind, text: str, node_id: str = "") -> None:
        for observer in self.noticed:
            observer(kind, text, node_id)

    def _exchange(self, effect: dm.Exchange) -> None:
        node_id = effect.node_id
        client = self.peers.find(node_id)
        if client is None and (card := self.directory.card(node_id)) is not None:
            client = self.peers.reach(card)
        if client is None:
            self._reactor.post(lambda: self._tell(dm.ExchangeEnded(node_id, ok=False)))
            return
        self.exchanges += 1

        def merged(reply: ReplyBody) -> None:
            if effect.known is not None and isinstance(reply, CardList):
                self._take_revocations(reply.revocations, node_id)
                if self.revocations is not None and (named := self.revocations.named(reply.wanted_revocations)):
                    told = ExchangeCards(cards=(), ages_ms=(), known=None, revocations=named)
                    client.request(told, timeout_s=EXCHANGE_TIMEOUT_SECONDS, on_reply=done, on_failure=failed_quietly)
                found = (reply.cards, reply.ages_ms, reply.wanted, reply.more)
                self._tell(dm.ExchangeEnded(node_id, True, *found, time.time()))

        def failed(code: FailureCode, message: str) -> None:
            self._counters.add("exchange_failures")
            self._tell(dm.ExchangeEnded(node_id, ok=False))

        def done(reply: ReplyBody) -> None:
            pass  # it has them now

        def failed_quietly(code: FailureCode, message: str) -> None:
            self._counters.add("exchange_failures")

        marks = self.revocations.marks() if self.revocations is not None else b""
        client.request(
            ExchangeCards(cards=effect.cards, ages_ms=effect.ages_ms, known=effect.known, revoked=marks),
            timeout_s=EXCHANGE_TIMEOUT_SECONDS,
            on_reply=merged,
            on_failure=failed,
        )

    # --- connections -------------------------------------------------------------------------------------------------

    def _up(self, peer: PeerInfo, client: ControlClient) -> None:
        if self.peers.keeps(peer.node_id):
            self._note("info", f"connected to {peer.node_id} ({', '.join(peer.roles)})")
        for observer in self.routed:
            observer(NodeId(peer.node_id), str(client.address))
        self._tell(dm.PeerConnected(peer.node_id))
        address = Address(client.host, peer.bus_port) if peer.bus_port else None
        self._listen(peer.node_id, address, client.fleet_key)

    def _down(self, node_id: str | None, reason: str) -> None:
        if node_id is None or self.peers.keeps(node_id):
            self._note("warning", f"connection to {node_id or 'a configured peer'} lost: {reason}")
        elif node_id not in self.peers:
            self._listen(node_id, None)
        if node_id is not None:
            self._tell(dm.PeerDisconnected(node_id))

    def _passed_over(self, node_id: str, count: int) -> None:
        self._counters.add("endpoints_passed_over", count)
        self._note(
            "warning", f"{node_id} names endpoints that are not dialled: they are no plain IP addresses of a network here"
        )

    def _listen(self, node_id: str, address: Address | None, key: FleetKey | None = None) -> None:
        """Listen to a node's bus there and nowhere else: what is not given up is dialled for ever."""
        before = self._buses.pop(node_id, None)
        wanted = (address, key) if address is not None else None
        if before is not None and before != wanted and before not in self._buses.values():
            self._subscriber.disconnect(before[0])
        if address is not None:
            self._buses[node_id] = (address, key)
            self._subscriber.connect(address, key)

    # --- sleep -------------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_SECONDS
        slept = self._asleep()
        seconds, self._slept = slept - self._slept, slept
        if seconds >= SLEEP_SECONDS_MIN:
            self._note("info", f"this machine was asleep for {seconds:.0f} s")
            self._tell(dm.Slept(seconds))


def seconds_asleep() -> float:
    """How long this machine has slept since it was started, plus a constant.

    ``time.monotonic`` stands still while a machine sleeps. Linux has a clock that does not; on macOS it is the one that
    clock_gettime calls monotonic. Where there is neither, sleep is not noticed, and cards live longer by it.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None) or getattr(time, "CLOCK_MONOTONIC", None)
    if clock is None:
        return 0.0
    return time.clock_gettime(clock) - time.monotonic()


def next_incarnation(folder: Path) -> int:
    """A number greater than every one this node had before: the wall clock in ns, unless that was set back since.

    Others take a smaller one for an older card and would not see this node until that has expired.

    Raises:
        ConfigError: something that is no regular file has the name of the file that keeps it.
    """
    path = folder / INCARNATION_FILE
    incarnation = time.time_ns()
    try:
        last = int(read_regular(path, INCARNATION_BYTES_MAX))
    except NotRegularFile as error:
        raise unreadable("", path, error) from None
    except (OSError, ValueError):  # none yet, or not ours: the clock alone then
        last = -1
    if 0 <= last < INCARNATION_MAX:
        incarnation = max(incarnation, last + 1)
    with contextlib.suppress(OSError):
        make_private_folder(folder)
        write_private_file(path, b"%d" % incarnation)
    return incarnation


# --- endpoints -------------------------------------------------------------------------------------------------------


def announced_endpoints(settings: Settings, address: Address, own: Sequence[str] = ()) -> tuple[Endpoint, ...]:
    """All ways to reach this node, for its card: ``address`` as --network and --priority describe it, then every --endpoint.

    Args:
        own: this machine's addresses, told in the place of an ``address`` that stands for all of them.

    Raises:
        ConfigError: an --endpoint cannot be parsed, or there are too many.
    """
    endpoints: dict[str, Endpoint] = {}
    for host in own[: max(1, ENDPOINTS_MAX - len(settings.endpoint))] or (address.host,):
        network = network_of(host, settings.network) if own else settings.network
        priority = settings.priority or DEFAULT_PRIORITIES[network]
        first = Endpoint(address=str(Address(host, address.port)), network=network, priority=priority)
        endpoints[first.address] = first
    for text in settings.endpoint:
        endpoint = parse_endpoint(text)
        endpoints.setdefault(endpoint.address, endpoint)
    if len(endpoints) > ENDPOINTS_MAX:
        raise ConfigError(f"{len(endpoints)} endpoints are too many", remedy=f"at most {ENDPOINTS_MAX}")
    return tuple(endpoints.values())


def with_literal_hosts(endpoints: Sequence[Endpoint], literals: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """Endpoints by address and not by name, since others don't look names up; without those that have no literal."""
    found: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        address = parse_address(endpoint.address)
        if literal := literals.get(address.host):
            shown = str(Address(literal, address.port))
            found.setdefault(
                shown,
                Endpoint(address=shown, network=endpoint.network, priority=endpoint.priority, key_id=endpoint.key_id),
            )
    return tuple(found.values())


def parse_endpoint(text: str) -> Endpoint:
    """Parse ``ADDRESS[/NETWORK[/PRIORITY]]``.

    Raises:
        ConfigError: anything else.
    """
    address, _, rest = text.partition("/")
    network, _, priority = rest.partition("/")
    network = network or "lan"
    if network not in DEFAULT_PRIORITIES:
        raise ConfigError(f"no such network: {text[:80]!r}", remedy=f"one of: {', '.join(DEFAULT_PRIORITIES)}")
    usable = not priority or (priority.isascii() and priority.isdigit() and int(priority) <= PRIORITY_MAX)
    if not usable:
        raise ConfigError(f"not a priority: {text[:80]!r}", remedy=f"a whole number up to {PRIORITY_MAX}")
    parsed = parse_address(address)
    if parsed.port == 0:
        raise ConfigError(f"no port: {text[:80]!r}", remedy="write the port of --bind")
    return Endpoint(address=str(parsed), network=network, priority=int(priority or DEFAULT_PRIORITIES[network]))
