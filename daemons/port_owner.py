"""Who has a port of this machine, as far as one may know: a process that listens, or a connection that goes through it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psutil

from kakeya_zmq.io.addresses import parse_address
from wire.errors import ConfigError, PortInUseError

ROLES: Final = ("primary", "worker", "cache", "dashboard")
_ENDED: Final = frozenset({psutil.CONN_TIME_WAIT, psutil.CONN_FIN_WAIT1, psutil.CONN_FIN_WAIT2, psutil.CONN_LAST_ACK})
"""States of a connection whose process has let go of it, when no process has it any more."""
ENDED: Final = "nobody listens there: a connection that has ended keeps the port for about a minute"


@dataclass(frozen=True, slots=True)
class PortUse:
    """One socket that has a port. ``process`` is None when it has none any more, or belongs to somebody else."""

    process: psutil.Process | None
    status: str
    """As psutil names it: LISTEN, ESTABLISHED, TIME_WAIT, …"""

    @property
    def listens(self) -> bool:
        return self.status == psutil.CONN_LISTEN

    @property
    def ended(self) -> bool:
        return self.process is None and self.status in _ENDED


def port_use(port: int) -> PortUse | None:
    """What has a TCP port: of several sockets one that listens, else one whose process is known. None: nothing is seen."""
    uses = [PortUse(process, status) for process, number, status in _sockets() if number == port]
    return min(uses, key=lambda use: (not use.listens, use.process is None, use.ended), default=None)


def _sockets() -> Iterator[tuple[psutil.Process | None, int, str]]:
    """Sockets that may be looked at, with port and state. macOS tells only those of this user's processes."""
    try:
        rows = [(row.pid, getattr(row.laddr, "port", 0), row.status) for row in psutil.net_connections("tcp")]
    except psutil.AccessDenied:
        yield from _sockets_one_by_one()
        return
    for pid, port, status in rows:
        process = None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid) if pid else None
        yield process, port, status


def _sockets_one_by_one() -> Iterator[tuple[psutil.Process | None, int, str]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for row in process.net_connections("tcp"):
                yield process, getattr(row.laddr, "port", 0), row.status


def describe(process: psutil.Process) -> str:
    """Name and number of a process, and its role when it is one of ours. Never its arguments: they are its own affair."""
    try:
        words = process.cmdline()
        name = process.name()
    except psutil.Error:
        return f"process {process.pid}"
    ours = any(word.endswith("kakeya") or word == "daemons" for word in words[:4])
    role = next((word for word in words[:6] if ours and word in ROLES), "")
    return f"a kakeya {role} (process {process.pid})" if role else f"{name} (process {process.pid})"


def with_owner(error: PortInUseError) -> PortInUseError:
    """The same error, naming who has the port, where that can be known."""
    address, separator, rest = error.message.partition(" is already in use")
    try:
        port = parse_address(address.rpartition(" ")[2]).port if separator and not rest else 0
    except ConfigError:
        return error
    use = port_use(port) if port else None
    if use is None:
        return error
    if use.ended:
        return PortInUseError(f"{error.message}: {ENDED}", remedy="wait a minute, or choose another port")
    if not use.listens:
        named = f"{error.message}: nobody listens there, {connection_of(use)} goes through it"
        remedy = "wait until that ends, or choose another port; docs/operations.md says how to keep ports free"
        return PortInUseError(named, remedy=remedy)
    if use.process is None:
        return error
    return PortInUseError(f"{error.message} by {describe(use.process)}", remedy=error.remedy)


def connection_of(use: PortUse) -> str:
    """A connection, named after its process."""
    return f"a connection of {describe(use.process)}" if use.process is not None else "a connection of another user"
