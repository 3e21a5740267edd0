"""The nodes of the fleet as they are seen from here: reached or not, how fast, on which clock, with which namespace."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from daemons.bus_note import nodes_here
from daemons.doctor.ports import try_to_bind
from daemons.doctor.site import Site
from kakeya_zmq.client import Client
from kakeya_zmq.io.addresses import Address, parse_address
from wire.errors import KakeyaError

REACH_TIMEOUT_S: Final = 3.0
ROUNDS: Final = 5
MACOS_NO_ROUTE: Final = 65
"""EHOSTUNREACH on macOS: what a Python without the Local Network permission gets, while other programs connect."""


@dataclass(slots=True)
class NodeView:
    """One node that answered. ``peers``: node id → its row about that node; ``round_trip_ms`` is the best of some."""

    address: str
    node_id: str
    sections: dict[str, dict[str, Any]]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    round_trip_ms: float = 0.0
    links: dict[str, float] = field(default_factory=dict)
    """Node id → MB/s of the transfers from there that this node's last requests needed."""

    @property
    def software(self) -> str:
        return str(self.sections.get("node", {}).get("software") or "")


@dataclass(frozen=True, slots=True)
class Reach:
    """A TCP connection from this Python: ``error`` 0 when it came about; ``others_connect``: nc's did, None: not tried."""

    error: int
    others_connect: bool | None = None


# --- looking ---------------------------------------------------------------------------------------------------------


def addresses_of(site: Site) -> list[str]:
    """Whom to ask: what was named, the nodes of this machine, and the configured peers; each once."""
    found = [*site.addresses, *(member.address for member in (*site.members, *site.ended))]
    for settings in site.settings.values():
        found += settings.peer
        if settings.role == "primary":
            found += (*settings.cache_peer, *settings.worker)
    for settings in site.settings.values():
        bind = _loopback_of(settings.bind)
        if bind and bind not in found and try_to_bind(parse_address(bind)) == errno.EADDRINUSE:
            found.append(bind)
    return list(dict.fromkeys(found))


def told_here(site: Site) -> list[str]:
    """Where the running nodes of this home tell others to reach them, however they were started; each once."""
    return list(dict.fromkeys(filter(None, map(_loopback_of, nodes_here(site.home)))))


def each_once(views: Iterable[NodeView]) -> list[NodeView]:
    """Without nodes that were found at two addresses. Two nodes of one name are two: they advertise different addresses."""
    found: dict[tuple[str, object], NodeView] = {}
    for view in views:
        found.setdefault((view.node_id, view.sections.get("node", {}).get("address")), view)
    return list(found.values())


def _loopback_of(bind: str) -> str:
    with contextlib.suppress(KakeyaError):
        address = parse_address(bind)
        if address.port:
            everywhere = address.host in ("0.0.0.0", "::")
            return str(Address("127.0.0.1", address.port) if everywhere else address)
    return ""


def reach(address: Address) -> Reach:
    try:
        socket.create_connection((address.host, address.port), timeout=REACH_TIMEOUT_S).close()
    except TimeoutError:
        return Reach(errno.ETIMEDOUT)
    except socket.gaierror:
        return Reach(errno.ENOENT)
    except OSError as error:
        number = error.errno or errno.EIO
        return Reach(number, _other_program_connects(address) if number in (errno.EHOSTUNREACH, MACOS_NO_ROUTE) else None)
    return Reach(0)


def _other_program_connects(address: Address) -> bool | None:
    netcat = shutil.which("nc")
    if netcat is None:
        return None
    command = [netcat, "-z", "-w", "3", address.host, str(address.port)]
    try:
        return (
            subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def look_at(address: str, site: Site) -> NodeView:
    """Ask one node.

    Raises:
        KakeyaError: it does not answer, or not to our key.
    """
    with Client(address, psk_file=site.psk_file, connect_timeout_s=REACH_TIMEOUT_S) as client:
        status = client.status()
        rows = {str(row.get("node_id")): row for row in status.peers if row.get("node_id")}
        sections: dict[str, dict[str, Any]] = {name: dict(figures) for name, figures in status.sections.items()}
        view = NodeView(address, status.node_id, sections, {name: dict(row) for name, row in rows.items()})
        times = [_timed(client) for _ in range(1 if site.quick else ROUNDS)]
        view.round_trip_ms = min(times)
        if "primary" in status.roles:
            view.links = _links(client)
        return view


def _timed(client: Client) -> float:
    started = time.perf_counter()
    client.status()
    return (time.perf_counter() - started) * 1000


def _links(client: Client) -> dict[str, float]:
    """MB/s from each node, over the fetches that the last requests needed."""
    moved: dict[str, list[float]] = {}
    with contextlib.suppress(KakeyaError):
        for request in client.requests(200):
            for source in request.sources:
                if source.kind == "remote_cache" and source.elapsed_ms > 0:
                    total = moved.setdefault(source.node_id, [0.0, 0.0])
                    total[0] += source.transfer_bytes
                    total[1] += source.elapsed_ms
    return {name: total[0] / 1000 / total[1] for name, total in moved.items() if total[0]}
