"""Endpoints of a node while the fleet's PSK changes: a control server and a bus for each valid key.

A bound socket admits one PSK (its CURVE key pair). So every valid key has a *pair* of its own: the *main* one, at the
configured addresses, admits the oldest key; the others take free ports (of --bulk-ports, where that is set) on that host.
The card lists them all, each with the id of its key, and peers use the newest key they hold.

When a key is retired its pair is given up without losing a request::

    SERVING   key taken out of the file    LEAVING   not on the card any more; peers go to another endpoint by themselves
    LEAVING   no node is left, or LEAVE_S  MOVING    nobody is let in; who is left is sent to the newest key's port
    MOVING    no session is left           gone
    MOVING    after MOVE_LIMIT_S           gone      what is still open then fails

When the main pair is gone, the oldest key's pair is opened at its addresses, and the one that admitted that key so far is
given up the same way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kakeya_zmq.io.addresses import Address, PortRange, parse_address
from kakeya_zmq.io.bus_publisher import Publisher
from kakeya_zmq.io.control_server import ControlServer
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.protocol.identities import CLIENT_ROLES
from wire.bus import Topic
from wire.cards import ENDPOINTS_MAX, Endpoint
from wire.errors import ConfigError, PortInUseError
from wire.keyring import KeyFile, KeyRing
from wire.keys import FleetKey

LEAVE_S: Final = 6.0
"""Peers that know a better endpoint dial it at once and take it after it has held for three seconds."""
MOVE_LIMIT_S: Final = 120.0
"""As long as requests under way keep a connection that is not used for new ones (daemons.peer_links)."""
LOOK_S: Final = 1.0
"""Between two looks at the key file, and at pairs that are being given up."""
STEP_S: Final = 0.1
REBIND_S: Final = 0.02
RETIRED: Final = "its fleet key is retired"
MOVED: Final = "this fleet key is served at its configured address again"

MakeServer: TypeAlias = Callable[[FleetKey, Address, Callable[[], int]], ControlServer]
MakeBus: TypeAlias = Callable[[FleetKey, Address], Publisher]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pair:
    key: FleetKey
    server: ControlServer
    bus: Publisher
    leaving: str = ""
    """Why it is given up; empty: it is not."""
    due: float = 0.0
    """When the next step of giving it up is taken at the latest."""
    moving: bool = False


class KeyedEndpoints:
    """All endpoints of one node. Use it on the reactor's thread.

    Args:
        keys: the node's key file.
        bind, bus_bind: the configured addresses; port 0 picks one.
        ports: for the pairs beside the main one; any free port when None.
        make_bus, make_server: open one socket each, at the address they are given.
        changed: the card has other endpoints now.
        noted: told a line for the audit log when a key came or went.

    Raises:
        PortInUseError: an address is taken.
    """

    def __init__(
        self,
        reactor: Reactor,
        keys: KeyFile,
        *,
        bind: Address,
        bus_bind: Address,
        ports: PortRange | None,
        make_bus: MakeBus,
        make_server: MakeServer,
        changed: Callable[[], None],
        noted: Callable[[str], None],
        leave_s: float = LEAVE_S,
    ) -> None:
        self.keys = keys
        self._reactor = reactor
        self._ports = ports
        self._make_bus = make_bus
        self._make_server = make_server
        self._changed = changed
        self._noted = noted
        self._leave_s = leave_s
        self._sequences: Counter[Topic] = Counter()
        self._told_error = ""
        self._closed = False
        self._others: list[_Pair] = []
        main = self._open(keys.ring.oldest, bind, bus_bind)
        self._main: _Pair | None = main
        self._bind = main.server.address
        self._bus_bind = main.bus.address
        try:
            for key in keys.ring.keys[:-1]:
                self._others.append(self._open_beside(key))
        except BaseException:
            self.close("cannot open")
            raise
        self._next_look = reactor.clock() + LOOK_S
        self._source = reactor.add_deadline_source(lambda: self._next_look, self._look)

    # --- views ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        """Where the node is configured to serve."""
        return self._bind

    @property
    def bus_port(self) -> int:
        return self._bus_bind.port

    @property
    def connections(self) -> int:
        """Connections of all control servers."""
        return sum(pair.server.connections for pair in self._pairs())

    def section(self) -> tuple[str, dict[str, int | float | str | bool | None]]:
        """Status: which keys are valid, and whether an older one is still in use here."""
        newest = self.keys.ring.newest.key_id
        old = [pair for pair in self._pairs() if pair.key.key_id != newest]
        return "keys", {
            "newest_key": newest.hex(),
            "valid_keys": len(self.keys.ring.keys),
            "endpoints": len(self._pairs()),
            "older_key_peers": sum(len(pair.server.peers()) for pair in old),
            "leaving_endpoints": sum(bool(pair.leaving) for pair in self._pairs()),
            "key_file_usable": not self.keys.error,
        }

    def card_endpoints(self, announced: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        """What a card says: the announced endpoints, for each pair with its own port and key id."""
        found: list[Endpoint] = []
        for pair in self._pairs():
            if pair is self._main:
                if not pair.leaving:
                    found += [replace_endpoint(each, None, pair.key.key_id, each.priority) for each in announced]
                continue
            # One that is given up is still told while its key is valid, behind the one that takes its place.
            if pair.leaving and self.keys.ring.find(pair.key.key_id) is None:
                continue
            port = pair.server.address.port
            lower = 1 if pair.leaving else 0
            found += [
                replace_endpoint(each, port, pair.key.key_id, max(0, each.priority - lower))
                for each in announced
                if parse_address(each.address).port == self._announced_port(announced)
            ]
        return tuple(found[:ENDPOINTS_MAX])

    @staticmethod
    def _announced_port(announced: Sequence[Endpoint]) -> int:
        return parse_address(announced[0].address).port if announced else 0

    def _pairs(self) -> list[_Pair]:
        return [*([self._main] if self._main is not None else []), *self._others]

    # --- the bus -----------------------------------------------------------------------------------------------------

    def has_subscribers(self, topic: Topic) -> bool:
        return any(pair.bus.has_subscribers(topic) for pair in self._pairs())

    def publish(self, topic: Topic, payload: bytes) -> bool:
        """Publish on every bus, under one number."""
        self._sequences[topic] += 1
        results = [pair.bus.publish(topic, payload, self._sequences[topic]) for pair in self._pairs()]
        return all(results)

    # --- servers -----------------------------------------------------------------------------------------------------

    def expel(self, identity_public_key: bytes, reason: str) -> None:
        """End the sessions of a node whose key is not accepted any more."""
        for pair in self._pairs():
            pair.server.expel(identity_public_key, reason)

    def close_servers(self, reason: str) -> None:
        for pair in self._pairs():
            pair.server.close(reason)

    def close_buses(self) -> None:
        for pair in self._pairs():
            pair.bus.close()

    def close(self, reason: str) -> None:
        """Close everything. Idempotent."""
        self.close_servers(reason)
        self.close_buses()
        self.stop()

    def stop(self) -> None:
        """Look at the key file no more."""
        if not self._closed:
            self._closed = True
            self._next_look = float("inf")

    # --- opening and giving up ---------------------------------------------------------------------------------------

    def _open(self, key: FleetKey, address: Address, bus_address: Address) -> _Pair:
        bus = self._make_bus(key, bus_address)
        try:
            return _Pair(key, self._make_server(key, address, lambda: bus.port), bus)
        except BaseException:
            bus.close()
            raise

    def _open_beside(self, key: FleetKey) -> _Pair:
        host, bus_host = self._bind.host, self._bus_bind.host
        if self._ports is None:
            return self._open(key, Address(host, 0), Address(bus_host, 0))
        for port in range(self._ports.first, self._ports.last + 1):
            try:
                return self._open(key, Address(host, port), Address(bus_host, 0))
            except PortInUseError:
                continue
        raise PortInUseError("no port of --bulk-ports is free for the new fleet key", remedy="give it more ports")

    def _look(self, now: float) -> None:
        self._next_look = now + LOOK_S
        before = self.keys.ring
        if self.keys.refresh():
            self._apply(before, self.keys.ring, now)
        elif self.keys.error and self.keys.error != self._told_error:
            _log.warning("the fleet key is not read again: %s", self.keys.error)
            self._told_error = self.keys.error
        self._add_missing()
        for pair in [pair for pair in self._pairs() if pair.leaving]:
            self._step(pair, now)
            self._next_look = now + STEP_S
        if self._main is None:
            self._rebind(now)

    def _apply(self, before: KeyRing, ring: KeyRing, now: float) -> None:
        for key_id in ring.key_ids:
            if before.find(key_id) is None:
                self._noted(f"a fleet key is valid from now on: {key_id.hex()}")
        for key_id in before.key_ids:
            if ring.find(key_id) is None:
                self._noted(f"a fleet key is retired: {key_id.hex()}")
        self._add_missing()
        for pair in self._pairs():
            if ring.find(pair.key.key_id) is None and not pair.leaving:
                self._give_up(pair, RETIRED, now)
        self._changed()

    def _add_missing(self) -> None:
        for key in self.keys.ring.keys:
            if any(pair.key.key_id == key.key_id and not pair.leaving for pair in self._pairs()):
                continue
            try:
                self._others.append(self._open_beside(key))
            except ConfigError as error:
                # The node goes on under the keys it has, and tries again; the administrator sees why in the log.
                if str(error) != self._told_error:
                    _log.error("the new fleet key cannot be served: %s", error)
                self._told_error = str(error)
                return
            self._changed()

    def _give_up(self, pair: _Pair, why: str, now: float) -> None:
        pair.leaving, pair.due = why, now + self._leave_s

    def _step(self, pair: _Pair, now: float) -> None:
        target = self._successor(pair)
        # Clients know no other address: they are sent on. Nodes do, and change over without a gap when they are let.
        nodes = [peer for peer in pair.server.peers() if peer.roles != CLIENT_ROLES]
        if target is None or (now < pair.due and nodes and not pair.moving):
            return
        if not pair.moving:
            pair.moving, pair.due = True, now + MOVE_LIMIT_S
            pair.server.move(target.server.address.port, pair.leaving)
        if not pair.server.idle and now < pair.due:
            return
        pair.server.close(pair.leaving)
        pair.bus.close()
        if pair is self._main:
            self._main = None
        else:
            self._others.remove(pair)
        self._changed()

    def _successor(self, leaving: _Pair) -> _Pair | None:
        """Where those go who are still there: the newest key's endpoint."""
        staying = [pair for pair in self._pairs() if not pair.leaving and pair is not leaving]
        for key in self.keys.ring.keys:
            for pair in staying:
                if pair.key.key_id == key.key_id:
                    return pair
        return None

    def _rebind(self, now: float) -> None:
        key = self.keys.ring.oldest
        try:
            main = self._open(key, self._bind, self._bus_bind)
        except PortInUseError:
            self._next_look = now + REBIND_S  # libzmq lets go of a port a moment after its socket is closed
            return
        self._main = main
        for pair in self._others:
            if pair.key.key_id == key.key_id and not pair.leaving:
                self._give_up(pair, MOVED, now)
        self._changed()


def replace_endpoint(endpoint: Endpoint, port: int | None, key_id: bytes, priority: int) -> Endpoint:
    """The same way to the node, to another port, for one key."""
    address = endpoint.address
    if port is not None:
        address = str(replace(parse_address(endpoint.address), port=port))
    return Endpoint(address=address, network=endpoint.network, priority=priority, key_id=key_id)
