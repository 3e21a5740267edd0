"""Fleets whose links can be broken: each peer stands behind a proxy (tests/proxy.py), if wanted in a network namespace.

The proxy has the same ports as its node, on another address, and the node advertises that address. In namespaces the proxy
stands beside the primary, and the veth pair is between it and the node.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from kakeya_zmq.client import Client
from tests.fleet_rig import Fleet, Node
from tests.namespaces import Star
from tests.proxy import Plane, Proxy, free_ports, other_loopback

LOCAL: Final = "127.0.0.1"
PEERS_MAX: Final = 3
BULK_PORTS: Final = 12
"""More than can be open at once in these tests, also when some still wait for a frozen node."""


class LinkedNode(Node):
    """A node with known ports, reached directly by tests and through its proxy by the primary."""

    direct = ""
    enter: Callable[[Callable[[], Client]], Client] | None = None

    def wait_ready(self) -> None:
        super().wait_ready()
        # The ready file names the advertised address; the next start must bind the node's own again.
        self.forget_address()
        if self.direct:
            self.address = self.direct

    def client(self) -> Client:
        if self.enter is None:
            return super().client()
        return self.enter(super().client)


class LinkedFleet(Fleet):
    """A primary, and peers behind proxies.

    Args:
        star: the namespaces to run in; its middle is the primary's.
        proxied: False: in namespaces, without the proxies.
    """

    def __init__(
        self, model: Path, home: Path, kept: set[int] | None = None, star: Star | None = None, *, proxied: bool = True
    ) -> None:
        super().__init__(model, home, kept)
        self.proxies: dict[str, Proxy] = {}
        self._proxied = proxied
        self._star = star
        self._stack = ExitStack()
        # All at once: in namespaces nothing else keeps two nodes from drawing the same ones.
        self._ports = free_ports(1 + PEERS_MAX * (2 + BULK_PORTS), [LOCAL, other_loopback()])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.mend_all()
            super().__exit__(kind, error, trace)
        finally:
            self._stack.close()

    def add(self, role: str, *flags: str, name: str = "", program: tuple[str, ...] = ("daemons",)) -> Node:
        name = name or role
        place = self._primary_place() if role == "primary" else self._peer_place(name)
        own_flags, wrapper, direct, enter = place
        node = LinkedNode(self, role, name, (*own_flags, *flags), program)
        node.wrapper, node.direct, node.enter = wrapper, direct, enter
        self.nodes[name] = node
        return node

    def seed_for(self, node: Node) -> str:
        if self._star is None or node.role == "primary":
            return super().seed_for(node)
        port = self.nodes["primary"].address.rpartition(":")[2]
        return f"{self._star.middle_address(node.name)}:{port}"

    def cut(self, name: str) -> None:
        """Pull the cable of a node."""
        if self._star is None:
            self.proxies[name].cut()
        else:
            self._star.cut(name)

    def mend(self, name: str) -> None:
        """Undo everything that was done to the link of a node."""
        if self._star is not None:
            self._star.mend(name)
        if name in self.proxies:
            self.proxies[name].repair()

    def mend_all(self) -> None:
        for name, node in self.nodes.items():
            if node.role != "primary":
                self.mend(name)

    def heal(self) -> None:
        self.mend_all()
        super().heal()

    # --- places ----------------------------------------------------------------------------------------------------

    def _take_ports(self, count: int) -> range:
        taken, self._ports = self._ports[:count], self._ports[count:]
        return taken

    def _primary_place(self) -> _Place:
        if self._star is None:
            return (), (), "", None
        middle = self._star.middle
        (port,) = self._take_ports(1)
        own = f"{LOCAL}:{port}"
        return ("--bind", f"0.0.0.0:{port}", "--advertise", own), middle.wrapper, own, middle.call

    def _peer_place(self, name: str) -> _Place:
        star = self._star
        host = LOCAL if star is None else star.address(name)
        if star is not None and not self._proxied:
            (port,) = self._take_ports(1)
            leaf = star.leaves[name]
            return ("--bind", f"{host}:{port}"), leaf.wrapper, f"{host}:{port}", leaf.call
        proxy_host = other_loopback()
        ports = self._take_ports(2 + BULK_PORTS)
        control, bus, bulk = ports[0], ports[1], ports[2:]
        planes = {control: Plane.CONTROL, bus: Plane.BUS, **dict.fromkeys(bulk, Plane.BULK)}
        enter = (lambda: None) if star is None else star.middle.enter
        self.proxies[name] = self._stack.enter_context(Proxy(proxy_host, host, planes, enter))
        advertised = f"[{proxy_host}]" if ":" in proxy_host else proxy_host
        flags = (
            *("--bind", f"{host}:{control}", "--bus-bind", f"{host}:{bus}", "--bulk-ports", f"{bulk[0]}-{bulk[-1]}"),
            *("--advertise", f"{advertised}:{control}"),
        )
        if star is None:
            return flags, (), f"{host}:{control}", None
        return flags, star.leaves[name].wrapper, f"{host}:{control}", star.leaves[name].call


_Place = tuple[tuple[str, ...], tuple[str, ...], str, Callable[[Callable[[], Client]], Client] | None]
"""Flags, wrapper, address for tests, and how a client gets there."""
