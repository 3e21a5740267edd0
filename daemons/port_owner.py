"""Who listens on a port of this machine, as far as one may know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import psutil

from kakeya_zmq.io.sockets import parse_address
from wire.errors import ConfigError, PortInUseError

ROLES: Final = ("primary", "worker", "cache", "dashboard")


def listener(port: int) -> psutil.Process | None:
    """The process that listens on a TCP port; None when nobody does, or when it belongs to somebody else."""
    return next((process for process, number in _listeners() if number == port), None)


def _listeners() -> Iterator[tuple[psutil.Process, int]]:
    """Listening processes that may be looked at, with their ports. macOS tells only those of this user."""
    try:
        rows = [
            (row.pid, getattr(row.laddr, "port", 0))
            for row in psutil.net_connections("tcp")
            if row.status == psutil.CONN_LISTEN
        ]
    except psutil.AccessDenied:
        yield from _listeners_one_by_one()
        return
    for pid, port in rows:
        with contextlib.suppress(psutil.Error):
            if pid:
                yield psutil.Process(pid), port


def _listeners_one_by_one() -> Iterator[tuple[psutil.Process, int]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for row in process.net_connections("tcp"):
                if row.status == psutil.CONN_LISTEN:
                    yield process, getattr(row.laddr, "port", 0)


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
    """The same error, naming the process that has the port, where that can be known."""
    address, separator, rest = error.message.partition(" is already in use")
    try:
        port = parse_address(address.rpartition(" ")[2]).port if separator and not rest else 0
    except ConfigError:
        return error
    process = listener(port) if port else None
    if process is None:
        return error
    named = f"{error.message} by {describe(process)}"
    return PortInUseError(named, remedy=error.remedy)
