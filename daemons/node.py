"""What every daemon has: identity, control server, bus, membership, peers, store, cache service, lanes, status.

A role (daemons.primary, daemons.worker, daemons.cache) adds its own machines to a node before it opens for service.
"""

from __future__ import annotations

import itertools
import logging
import platform
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from daemons.bulk import BulkShell
from daemons.dispatch import Dispatcher
from daemons.memory import peak_memory_bytes
from daemons.peers import PeerTable
from kakeya_zmq import __version__
from kakeya_zmq.config import Settings, kakeya_home
from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.io.bus import Publisher as BusPublisher
from kakeya_zmq.io.bus import Subscriber
from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.io.control_server import ControlServer, IncomingRequest
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import Address, check_libzmq, parse_address, parse_port_range
from kakeya_zmq.protocol import directory as dm
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.serve import CacheService
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from kakeya_zmq.store import BlockStore
from kakeya_zmq.telemetry import Counters, Value
from wire.bulk import has_hardware_aes
from wire.bus import BusMessage, Topic
from wire.cards import CacheOffering, Card, Endpoint, ModelOffering, WorkerOffering, sign_card
from wire.errors import FailureCode
from wire.ids import NodeId
from wire.keys import FleetKey, NodeIdentity
from wire.limits import NAME_CHARACTERS_MAX, TEXT_CHARACTERS_MAX, check_limits
from wire.messages import CardList, ExchangeCards, GetStatus, ReplyBody, Status

_log = logging.getLogger(__name__)

NOTES_KEPT = 100
NOTE_REPEAT_SECONDS = 10.0
"""The same line is logged at most this often: a stranger knocking must not fill the log."""
EXCHANGE_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The secrets of one node."""

    fleet_key: FleetKey
    identity: NodeIdentity


def load_keys(settings: Settings) -> NodeKeys:
    """Read the PSK and the node's identity key (made on first start).

    Raises:
        SecretFileError: a file is missing, unreadable, too short or readable by others.
    """
    fleet_key = FleetKey.load(Path(settings.fleet_psk_file))
    identity = NodeIdentity.load_or_create(node_folder(settings.node_id) / "identity.key")
    return NodeKeys(fleet_key, identity)


def node_folder(node_id: str) -> Path:
    """Where a node keeps its state; one machine may run several nodes."""
    return kakeya_home() / "nodes" / node_id


class Node:
    """One member of the fleet, on the reactor's thread.

    Args:
        roles: what it is, for its card.
        on_peers_changed: called when a node appeared, changed or vanished.

    Raises:
        PortInUseError: --bind or --bus-bind is taken.
        ConfigError: an address or port range cannot be parsed.
    """

    def __init__(self, reactor: Reactor, settings: Settings, keys: NodeKeys, *, roles: tuple[str, ...]) -> None:
        check_limits()
        check_libzmq()
        self.reactor = reactor
        self.settings = settings
        self.ids = IdAllocator(itertools.count(1).__next__)
        self.has_aes = has_hardware_aes()
        self.started_unix = time.time()
        self.counters = Counters.for_prefill()
        self.notes: deque[str] = deque(maxlen=NOTES_KEPT)
        self.facts: ModelFacts | None = None
        self.state = "starting"
        self.exchanges = 0
        """Exchanges of cards this node has asked for."""
        self.sections: list[Callable[[], tuple[str, dict[str, Value]]]] = []
        """Further status sections, added by roles."""
        self.worker_offering: Callable[[], WorkerOffering] | None = None
        self._note_times: dict[str, float] = {}
        self._keys = keys
        self.local = LocalNode(
            node_id=NodeId(settings.node_id),
            identity=keys.identity,
            roles=roles,
            incarnation=time.time_ns(),
            software=f"kakeya-zmq {__version__}"[:NAME_CHARACTERS_MAX],
        )
        bind = parse_address(settings.bind)
        self.bus = BusPublisher(
            reactor,
            bind=parse_address(settings.bus_bind) if settings.bus_bind else Address(bind.host, 0),
            local=self.local,
            fleet_key=keys.fleet_key,
            on_subscribed=self._subscribed,
        )
        self.subscriber = Subscriber(
            reactor, keys=keys.fleet_key, topics=[Topic.CARD], on_message=self._bus_message, on_gap=lambda *_: None
        )
        self.peers = PeerTable(
            reactor, local=self.local, fleet_key=keys.fleet_key, on_up=self._peer_up, on_down=self._peer_down
        )
        self.dispatcher = Dispatcher(reactor, find_client=self.peers.find, count=self.counters.add, note=self.note)
        self.store = BlockStore(settings.cache_bytes, random_bytes=secrets.token_bytes)
        self.cache_service = CacheService(self.store, lanes=self.ids.lane, has_aes=self.has_aes)
        self.directory = dm.Directory(
            node_id=settings.node_id,
            make_card=self._make_card,
            settings=dm.DirectorySettings(
                interval_s=settings.gossip_interval_s, first_interval_s=min(1.0, settings.gossip_interval_s)
            ),
        )
        self.server = ControlServer(
            reactor,
            bind=bind,
            local=self.local,
            fleet_key=keys.fleet_key,
            on_request=self._request,
            on_refused=self._refused,
            bus_port=self.bus.port,
        )
        ports = parse_port_range(settings.bulk_ports) if settings.bulk_ports else None
        self.bulk = BulkShell(reactor, host=bind.host, ports=ports, deliver=self.dispatcher.lane_event)
        self.dispatcher.lanes = self.bulk
        self.dispatcher.add(self.cache_service, handles=self.cache_service.handles)
        self._cpu = psutil.Process()

    # --- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Join the fleet: connect to the configured peers and start to gossip."""
        self.state = "serving"
        self.reactor.add_deadline_source(self.directory.deadline, self._directory_tick)
        for text in self.settings.peer:
            self.peers.add_seed(parse_address(text))
        self._apply_directory(self.directory.on(dm.DirectoryTick(), self.reactor.clock()))

    def close(self, reason: str) -> None:
        """Say goodbye and let go of every socket and lane."""
        self.state = "stopping"
        self.server.close(reason)
        self.bulk.close_all(5.0)
        self.peers.close()
        self.subscriber.close()
        self.bus.close()

    @property
    def address(self) -> Address:
        """Where other nodes reach this one."""
        if self.settings.advertise:
            return parse_address(self.settings.advertise)
        return self.server.address

    # --- notes -------------------------------------------------------------------------------------------------------

    def note(self, level: str, text: str) -> None:
        """Remember and log one noteworthy event; repetitions within a short time are only counted."""
        now = self.reactor.clock()
        line = text[:TEXT_CHARACTERS_MAX]
        if now - self._note_times.get(line, float("-inf")) < NOTE_REPEAT_SECONDS:
            self.counters.add("notes_repeated")
            return
        if len(self._note_times) >= NOTES_KEPT:
            self._note_times.clear()
        self._note_times[line] = now
        self.notes.append(f"{time.strftime('%H:%M:%S')} {line}"[:TEXT_CHARACTERS_MAX])
        _log.log({"info": logging.INFO, "warning": logging.WARNING}.get(level, logging.ERROR), "%s", line)

    def _refused(self, reason: str) -> None:
        self.counters.add("connections_refused")
        self.note("warning", reason)

    # --- requests ------------------------------------------------------------------------------------------------------

    def _request(self, incoming: IncomingRequest) -> None:
        match incoming.body:
            case ExchangeCards(cards=cards, ages_ms=ages_ms):
                self._merge(cards, ages_ms)
                own, ages = self.directory.exchange(self.reactor.clock())
                incoming.reply(CardList(cards=own, ages_ms=ages))
            case GetStatus():
                incoming.reply(self.status())
            case _:
                if self.dispatcher.request(incoming):
                    return
                if self.state == "starting":
                    incoming.fail(FailureCode.UNAVAILABLE, "this node is still loading its model; try again shortly")
                else:
                    roles = ", ".join(self.local.roles)
                    incoming.fail(FailureCode.UNIMPLEMENTED, f"this node does not do that; its roles are {roles}")

    def status(self) -> Status:
        """Everything this node tells about itself."""
        sections: dict[str, dict[str, Value]] = {
            "node": {
                "state": self.state,
                "software": self.local.software,
                "uptime_s": round(time.time() - self.started_unix, 1),
                "address": str(self.address),
                "bus_port": self.bus.port,
                "memory_bytes": self._cpu.memory_info().rss,
                "memory_peak_bytes": peak_memory_bytes(),
                "open_lane_threads": len(self.bulk),
                "pooled_buffer_bytes": self.bulk.pool.idle_bytes,
                "lanes_opened": self.bulk.opened,
                **self.peers.traffic(),
                "fleet_exchanges": self.exchanges,
                "sealing": "aes-256-gcm" if self.has_aes else "secretbox",
                **self.dispatcher.figures(),
            },
            "cache": vars_of(self.store.stats()),
            "prefill": self.counters.snapshot(),
            "refusals": dict(self.server.refusals),
        }
        for section in self.sections:
            name, figures = section()
            sections[name] = figures
        return Status(
            node_id=self.local.node_id,
            roles=self.local.roles,
            sections=sections,
            peers=tuple(self._peer_rows()),
            recent=tuple(self.notes),
        )

    def _peer_rows(self) -> list[dict[str, Value]]:
        rows = self.peers.rows()
        cards = {card.node_id: card for card in self.directory.peers(self.reactor.clock())}
        for row in rows:
            card = cards.pop(str(row["node_id"]), None)
            if card is not None:
                row["roles"] = ", ".join(card.roles)
                row["cache_entries"] = card.cache.entry_count if card.cache is not None else 0
        rows += [
            {"node_id": card.node_id, "roles": ", ".join(card.roles), "state": "known by its card"}
            for card in cards.values()
        ]
        return rows

    # --- membership ----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Something on the card changed: tell the fleet now."""
        self._apply_directory(self.directory.on(dm.AnnounceNow(), self.reactor.clock()))
        self._pull_round()

    def _make_card(self, sequence: int) -> bytes:
        stats = self.store.stats()
        settings = self.settings
        facts = self.facts
        models: tuple[ModelOffering, ...] = ()
        if facts is not None:
            compatibility = facts.compatibility
            models = (
                ModelOffering(
                    model_id=compatibility.model_id,
                    role=settings.role,
                    quantization=compatibility.quantization[:NAME_CHARACTERS_MAX],
                    tokens_per_second=0.0,
                ),
            )
        card = Card(
            node_id=self.local.node_id,
            identity_public_key=self._keys.identity.public_key,
            incarnation=self.local.incarnation,
            sequence=sequence,
            roles=self.local.roles,
            software=self.local.software,
            platform=f"{platform.system()} {platform.machine()}",
            memory_bytes=psutil.virtual_memory().total,
            endpoints=(Endpoint(address=str(self.address), network=settings.network, priority=settings.priority),),
            bus_port=self.bus.port,
            models=models,
            cache=CacheOffering(
                bytes_used=stats.bytes_used,
                bytes_free=max(0, stats.max_bytes - stats.bytes_used),
                entry_count=stats.entry_count,
                epoch=stats.cache_epoch,
                load=0.0,
                evictions=stats.evictions,
                bytes_evicted=stats.bytes_evicted,
                put_failures=stats.put_failures,
                tokens_served=stats.tokens_served,
            ),
            worker=self.worker_offering() if self.worker_offering is not None else None,
            announced_at_unix=time.time(),
            ttl_ms=int(settings.ttl_seconds * 1000),
        )
        return sign_card(card, self._keys.identity)

    def _directory_tick(self, now: float) -> None:
        self._apply_directory(self.directory.on(dm.DirectoryTick(), now))

    def _merge(self, cards: tuple[bytes, ...], ages_ms: tuple[int, ...]) -> None:
        self._apply_directory(self.directory.on(dm.CardsArrived(cards, ages_ms), self.reactor.clock()))

    def _apply_directory(self, effects: list[dm.DirectoryEffect]) -> None:
        for effect in effects:
            match effect:
                case dm.Announce(card=card):
                    self.bus.publish(Topic.CARD, card)
                case dm.PullRound():
                    self._pull_round()
                case dm.PeerChanged(card=card, appeared=appeared, restarted=restarted):
                    if appeared or restarted:
                        what = "restarted" if restarted else "appeared"
                        self.note("info", f"{card.node_id} {what} ({', '.join(card.roles)})")
                    if "primary" in self.local.roles and card.roles != ("client",):
                        self.peers.ensure(card)
                case dm.PeerGone(node_id=node_id, reason=reason):
                    self.note("info", f"{node_id} is gone: {reason}")
                    self.peers.forget(node_id)
                case dm.CardRefused(reason=reason):
                    self.counters.add("cards_refused")
                    self.note("warning", reason)

    def _pull_round(self) -> None:
        for _, client in self.peers.connected():
            self._exchange(client)

    def _exchange(self, client: ControlClient) -> None:
        cards, ages = self.directory.exchange(self.reactor.clock())
        self.exchanges += 1

        def merged(reply: ReplyBody) -> None:
            if isinstance(reply, CardList):
                self._merge(reply.cards, reply.ages_ms)

        client.request(
            ExchangeCards(cards=cards, ages_ms=ages),
            timeout_s=EXCHANGE_TIMEOUT_SECONDS,
            on_reply=merged,
            on_failure=lambda code, message: self.counters.add("exchange_failures"),
        )

    def _peer_up(self, peer: PeerInfo, client: ControlClient) -> None:
        self.note("info", f"connected to {peer.node_id} ({', '.join(peer.roles)})")
        self._exchange(client)
        if peer.bus_port:
            self.subscriber.connect(Address(client.host, peer.bus_port))

    def _peer_down(self, node_id: str | None, reason: str) -> None:
        self.note("warning", f"connection to {node_id or 'a configured peer'} lost: {reason}")

    def _subscribed(self, topic: Topic) -> None:
        if topic is Topic.CARD:
            self._apply_directory(self.directory.on(dm.AnnounceNow(), self.reactor.clock()))

    def _bus_message(self, message: BusMessage) -> None:
        if message.topic is Topic.CARD:
            self._merge((message.payload,), (0,))


def vars_of(value: object) -> dict[str, Value]:
    """The fields of a frozen dataclass of plain figures."""
    return {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
