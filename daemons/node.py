"""What every daemon has: identity, control server, bus, membership, peers, store, cache service, lanes, status.

A role (daemons.primary, daemons.worker, daemons.cache) adds its own machines to a node before it opens for service.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict

from daemons.admission import Admission
from daemons.askers import Askers
from daemons.bounded_status import bounded
from daemons.bulk import BulkShell
from daemons.cache_budget import CacheBudget
from daemons.descriptor_watch import DescriptorWatch, connections_bound
from daemons.dispatch import Dispatcher
from daemons.emptying import StoreEmptying
from daemons.membership import Membership, next_incarnation
from daemons.node_card import card_of
from daemons.node_keys import NodeKeys, node_folder
from daemons.node_lock import NodeLock
from daemons.node_status import NodeStatus, roster_section
from daemons.notes import Notes
from daemons.own_endpoints import OwnEndpoints
from daemons.rotation import KeyedEndpoints
from daemons.security import Security
from daemons.telemetry_feed import NodeTelemetry
from kakeya_zmq import __version__
from kakeya_zmq.config import Settings
from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.io.addresses import Address, PortRange, parse_address, parse_port_range
from kakeya_zmq.io.bus_publisher import Publisher as BusPublisher
from kakeya_zmq.io.bus_subscriber import Subscriber
from kakeya_zmq.io.control_client import ControlClient
from kakeya_zmq.io.control_server import ControlServer, IncomingRequest
from kakeya_zmq.io.descriptors import raise_descriptor_limit
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.sockets import check_libzmq
from kakeya_zmq.protocol.effects import Refuse
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.serve import CacheService
from kakeya_zmq.protocol.session import LocalNode, PeerInfo
from kakeya_zmq.store import BlockStore
from kakeya_zmq.telemetry import Counters, Value
from wire.bulk import has_hardware_aes
from wire.bus import BusMessage, Group, Topic
from wire.cards import Card, WorkerOffering, sign_card
from wire.errors import FailureCode
from wire.events import SecurityKind
from wire.ids import NodeId
from wire.keys import FleetKey
from wire.limits import NAME_CHARACTERS_MAX, check_limits
from wire.messages import ExchangeCards, GetRequests, GetStatus, Status

_log = logging.getLogger(__name__)

NOT_READ = "long answers are asked for while those before have not been read"
_LONG_ANSWERS = (ExchangeCards, GetRequests, GetStatus)
"""Whoever asks for these and never reads would fill the backlog of the control server with them."""


class Node:
    """One member of the fleet, on the reactor's thread.

    Args:
        roles: what it is, for its card.

    Raises:
        NodeInUseError: another process of this machine runs this node.
        PortInUseError: --bind or --bus-bind is taken.
        ConfigError: an address or port range cannot be parsed.
    """

    def __init__(self, reactor: Reactor, settings: Settings, keys: NodeKeys, *, roles: tuple[str, ...]) -> None:
        check_limits()
        check_libzmq()
        descriptors_max = raise_descriptor_limit()
        self.reactor = reactor
        self.settings = settings
        self.ids = IdAllocator(itertools.count(1).__next__)
        self.has_aes = has_hardware_aes()
        self.counters = Counters.for_prefill()
        self.facts: ModelFacts | None = None
        self.tenant_key_id = ""
        """Public name of the key that a node with a model hashes with."""
        self.state = "starting"
        self.admission = Admission()
        self.sections: list[Callable[[], tuple[str, dict[str, Value]]]] = []
        """Further status sections, added by roles."""
        self._status = NodeStatus(self)
        self.worker_offering: Callable[[], WorkerOffering] | None = None
        self._keys = keys
        self._lock = NodeLock(node_folder(settings.node_id), settings.node_id)
        self.local = self._make_local(roles)
        self.security = self._make_security()
        bind = parse_address(settings.bind)
        ports = parse_port_range(settings.bulk_ports) if settings.bulk_ports else None
        self.telemetry = NodeTelemetry(self)
        self.notes = Notes(reactor.clock, _log, self.counters, self.telemetry.note)
        self.descriptors = DescriptorWatch(reactor, descriptors_max, note=self.note, refused=self._refused)
        self._connections_max = connections_bound(settings.max_connections, descriptors_max)
        self.subscriber = self._make_subscriber()
        self.membership = self._make_membership()
        self.askers = Askers()
        self._join_membership()
        self.peers, self.directory = self.membership.peers, self.membership.directory
        self.dispatcher = Dispatcher(reactor, find_client=self.find_asked, count=self.counters.add, note=self.note)
        self.dispatcher.observe = self.telemetry.observe
        self.store = BlockStore(settings.cache_bytes, random_bytes=secrets.token_bytes, quota_bytes=self._quota_bytes)
        self.security.entitlement.access.is_held = self.store.holds_namespace
        self.emptying = StoreEmptying(reactor, self.store, told=self._emptied)
        self.security.entitlement.now_revoked = self.emptying.revoked
        if settings.adaptive_cache:
            budget = CacheBudget(reactor, settings, self.store, model_bytes=self._model_bytes)
            self.sections.append(budget.section)
        hides = self.security.entitlement.access.hides
        self.cache_service = CacheService(self.store, lanes=self.ids.lane, has_aes=self.has_aes, hides=hides)
        self.endpoints = self._make_endpoints(bind, ports)
        self.subscriber.use_keys(keys.fleet_keys.ring.keys)
        self.sections.append(lambda: roster_section(self))
        self.sections.append(self.endpoints.section)
        self.bulk = BulkShell(reactor, host=bind.host, ports=ports, deliver=self.dispatcher.lane_event)
        self.dispatcher.lanes = self.bulk
        self.dispatcher.add(self.cache_service, handles=self.cache_service.handles)
        self.own_endpoints = OwnEndpoints(settings, lambda: self.endpoints.address, self.note)
        self.own_endpoints.look_up_names()
        self._tell_narrowed()

    # --- what it is made of --------------------------------------------------------------------------------------------

    def _make_local(self, roles: tuple[str, ...]) -> LocalNode:
        return LocalNode(
            node_id=NodeId(self.settings.node_id),
            identity=self._keys.identity,
            roles=roles,
            incarnation=next_incarnation(node_folder(self.settings.node_id)),
            software=f"kakeya-zmq {__version__}"[:NAME_CHARACTERS_MAX],
        )

    def _make_security(self) -> Security:
        return Security(
            self.reactor,
            self.settings,
            identity=self._keys.identity,
            fleet_key=self._keys.fleet_keys.ring.newest,
            folder=node_folder(self.settings.node_id),
            refused=lambda reason: self._refused(reason, SecurityKind.TRANSFER_REFUSED),
            expel=self._expel,
            forgotten=lambda node_id: self.membership.forget(node_id),
        )

    def _make_subscriber(self) -> Subscriber:
        return Subscriber(
            self.reactor,
            keys=self._keys.fleet_keys.ring.oldest,
            topics=[Topic.CARD],
            on_message=self._bus_message,
            on_gap=lambda *_: None,
            on_refused=lambda node_id, reason: self._refused(reason, SecurityKind.CARD_REFUSED),
        )

    def _make_membership(self) -> Membership:
        return Membership(
            self.reactor,
            self.settings,
            local=self.local,
            fleet_key=lambda: tuple(reversed(self._keys.fleet_keys.ring.keys)),
            identities=self.security.identities,
            make_card=self._make_card,
            publish=lambda card: self.endpoints.publish(Topic.CARD, card),
            subscriber=self.subscriber,
            note=self.note,
            counters=self.counters,
        )

    def _join_membership(self) -> None:
        """Tell the membership's news to those whom they concern."""
        membership, entitlement = self.membership, self.security.entitlement
        membership.restarted.append(self.askers.end_older)
        membership.peers.on_refused = lambda node_id, reason: self._refused(reason, subject=node_id or "")
        membership.noticed += [self.telemetry.security, self._noticed]
        membership.cards_taken.append(entitlement.access.learn)
        membership.gone.append(entitlement.access.forget)
        membership.revocations = entitlement.revocations
        membership.revocations_told = entitlement.merge

    def _make_endpoints(self, bind: Address, ports: PortRange | None) -> KeyedEndpoints:
        return KeyedEndpoints(
            self.reactor,
            self._keys.fleet_keys,
            bind=bind,
            bus_bind=parse_address(self.settings.bus_bind) if self.settings.bus_bind else Address(bind.host, 0),
            ports=ports,
            make_bus=self._make_bus,
            make_server=self._make_server,
            changed=self._keys_changed,
            noted=self._key_noted,
        )

    def _make_bus(self, key: FleetKey, address: Address) -> BusPublisher:
        return BusPublisher(
            self.reactor,
            bind=address,
            local=self.local,
            fleet_key=key,
            on_subscribed=self._subscribed,
            on_refused=lambda reason: self._refused(reason, SecurityKind.BUS_REFUSED),
            connections_max=self._connections_max,
        )

    def _make_server(self, key: FleetKey, address: Address, bus_port: Callable[[], int]) -> ControlServer:
        return ControlServer(
            self.reactor,
            bind=address,
            local=self.local,
            fleet_key=key,
            on_request=self._request,
            on_refused=lambda reason, node_id: self._refused(reason, subject=node_id),
            on_peer_up=self._asker_up,
            on_name_taken=self._name_taken,
            bus_port=bus_port,
            identities=self.security.identities,
            limiter=self.security.limiter,
            connections_max=self._connections_max,
        )

    def _tell_narrowed(self) -> None:
        wanted, allowed = self.settings.max_connections, self._connections_max
        if allowed < wanted:
            text = f"this process may open {self.descriptors.limit} files: of {wanted} connections {allowed} are let in"
            self.note("warning", f"{text} (ulimit -n raises it)")

    def _quota_bytes(self, fingerprint: bytes) -> int | None:
        access = self.security.entitlement.access
        return access.quota_bytes(fingerprint, self.store.usage_by_fingerprint()) if access.roster is not None else None

    def _expel(self, identity_public_key: bytes, node_id: str, reason: str) -> None:
        """A node is not accepted any more: what it has open here ends, and nothing is asked of it."""
        if identity_public_key == self._keys.identity.public_key:
            self.note("error", f"this node is not accepted by the fleet any more: {reason}")
        self.endpoints.expel(identity_public_key, reason)
        self.membership.expel(identity_public_key, node_id, reason)
        self.telemetry.security(SecurityKind.NODE_REVOKED, reason, node_id)
        self.note("warning", f"{node_id or 'a node that is not known here'}: {reason}")

    def _emptied(self, why: str, dropped_bytes: int) -> None:
        self.security.audit.write("revoked", why)
        self.note("warning", f"{why} ({dropped_bytes} bytes)")
        if self.state == "serving":
            self.announce()

    def _keys_changed(self) -> None:
        """Other PSKs are valid, or they are served elsewhere."""
        self.subscriber.use_keys(self._keys.fleet_keys.ring.keys)
        self.peers.keys_changed()
        if self.state == "serving":
            self.announce()

    def _key_noted(self, line: str) -> None:
        self.security.audit.write("key", line)
        self.telemetry.security(SecurityKind.KEY_CHANGED, line)
        self.note("info", line)

    def _model_bytes(self) -> int | None:
        """Memory of the model for the store's budget; None while it is being loaded."""
        runner = self.dispatcher.runner
        if runner is None:
            return 0
        if self.facts is None:
            return None
        return max(runner.memory.active_bytes, self.facts.weight_bytes) + runner.memory.cached_bytes

    # --- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Join the fleet: connect to the configured peers and start to gossip."""
        self.state = "serving"
        self.membership.open()

    def drain(self, reason: str) -> None:
        """Take nothing new, and tell the fleet so; what is under way goes on."""
        serving = self.state == "serving"
        self.state = "draining"
        self.admission.drain(reason)
        if serving:
            self.announce()

    @property
    def quiet(self) -> bool:
        """Whether nothing that others asked for is under way here."""
        figures = self.dispatcher.figures()
        return not any(figures[name] for name in ("open_requests", "open_lanes", "open_commands"))

    def limit_memory(self, why: str) -> None:
        """Take no sessions and jobs while ``why`` is not empty, and tell the fleet when that changes."""
        before = self.admission.accepting
        self.admission.limit_memory(why)
        if self.state == "serving" and before != self.admission.accepting:
            self.announce()

    def close(self, reason: str) -> None:
        """Say goodbye and let go of every socket and lane."""
        self.state = "stopping"
        self.telemetry.leave()
        self.endpoints.stop()
        self.endpoints.close_servers(reason)
        self.bulk.close_all(5.0)
        self.membership.close()
        self.subscriber.close()
        self.endpoints.close_buses()
        self.security.close(reason)
        self._lock.release()

    @property
    def address(self) -> Address:
        """Where other nodes reach this one; without --advertise, where it serves."""
        return self.own_endpoints.address

    # --- notes -------------------------------------------------------------------------------------------------------

    def note(self, level: str, text: str) -> None:
        """Remember and log one noteworthy event; repetitions within a short time are only counted."""
        self.notes.add(level, text)

    def _refused(self, reason: str, kind: SecurityKind = SecurityKind.CONNECTION_REFUSED, *, subject: str = "") -> None:
        self.counters.add("connections_refused")
        self.security.count_refusal(reason, subject=subject)
        self.telemetry.security(kind, reason, subject)
        self.note("warning", reason)

    def carry_out(self, effect: object) -> bool:
        """Effects of any machine that are the security desk's business; whether it was one."""
        if not isinstance(effect, Refuse):
            return False
        self.security.count_refusal(effect.reason, subject=effect.node_id)
        self.note("warning", f"{effect.node_id}: {effect.reason}")
        return True

    # --- requests ------------------------------------------------------------------------------------------------------

    def find_asked(self, node_id: str) -> ControlClient | None:
        """The connection to a node that may be asked for KV and work, if its session is up."""
        return self.peers.find(node_id) if self.security.entitlement.access.may_be_asked(node_id) else None

    def _request(self, incoming: IncomingRequest) -> None:
        refusal = self.admission.refusal(incoming.body)
        if refusal is not None:
            self.counters.add("requests_refused")
            incoming.fail(refusal.code, str(refusal))
            return
        peer = incoming.peer
        if denied := self.security.entitlement.access.refusal(peer.node_id, peer.roles, incoming.body):
            self.security.count_refusal(denied, subject=peer.node_id)
            incoming.fail(FailureCode.PERMISSION_DENIED, denied)
            return
        if isinstance(incoming.body, _LONG_ANSWERS) and incoming.congested:
            self.security.count_refusal(NOT_READ, subject=peer.node_id)
            incoming.fail(FailureCode.RESOURCE_EXHAUSTED, NOT_READ)
            return
        match incoming.body:
            case ExchangeCards() as exchange:
                self.membership.answer(incoming, exchange)
            case GetStatus():
                incoming.reply(bounded(self.status()))
            case GetRequests(count=count) if "primary" in self.local.roles:
                incoming.reply(self.telemetry.requests(count))
            case _:
                if self.dispatcher.request(incoming):
                    self.askers.add(incoming)
                    return
                if self.state == "starting":
                    incoming.fail(FailureCode.UNAVAILABLE, "this node is still loading its model; try again shortly")
                else:
                    roles = ", ".join(self.local.roles)
                    incoming.fail(FailureCode.UNIMPLEMENTED, f"this node does not do that; its roles are {roles}")

    def status(self) -> Status:
        """Everything this node tells about itself."""
        return self._status.tell()

    # --- membership ----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Something on the card changed: tell the fleet now."""
        self.membership.announce()

    def _make_card(self, sequence: int) -> bytes:
        return sign_card(self.describe(sequence), self._keys.identity)

    def describe(self, sequence: int) -> Card:
        """What this node is, holds and can do right now."""
        if self.facts is not None:
            self.security.entitlement.access.learn_tuple(asdict(self.facts.compatibility))
        return card_of(self, sequence)

    def _noticed(self, kind: SecurityKind, text: str, node_id: str) -> None:
        """What the membership tells: refused cards are refusals like others, and the keys of new nodes are kept."""
        if kind is SecurityKind.CARD_REFUSED:
            # Behind the last colon stands fixed text; a name in front of it is data, which names no counter.
            self.security.count_refusal(text.rpartition(": ")[2])
        elif kind is SecurityKind.NODE_APPEARED and (card := self.directory.card(node_id)) is not None:
            self.security.check_card(card)

    def _asker_up(self, peer: PeerInfo) -> None:
        self.security.keep()
        self.askers.end_older(peer.node_id, peer.incarnation)

    def _name_taken(self, node_id: str) -> None:
        self.note("warning", f"another machine uses the node id {node_id}: it is not let in (every node needs its own)")

    def _subscribed(self, topic: Topic) -> None:
        if topic is Topic.CARD:
            self.membership.announce()
        elif topic.group is Group.TELEMETRY:
            self.telemetry.subscribed(topic)

    def _bus_message(self, message: BusMessage) -> None:
        if message.topic is Topic.CARD:
            self.membership.card_arrived(message.payload)
