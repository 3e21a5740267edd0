"""A look at a connection that libzmq owns, by its file descriptor, which may stand for anything by now.

The descriptor is duplicated, so that what is looked at and what is cut is one and the same. It is duplicated onto a number
that was set aside at the start: nothing is opened, so nothing can be left open, and it works in a process that has no free
descriptors, which is when connections must be cut.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket as os_socket
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping


class SetAside:
    """One descriptor number for one look at a time; use it on one thread.

    Raises:
        OSError: the process has no free descriptors.
    """

    def __init__(self) -> None:
        self._rest = os.open(os.devnull, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            self._number = os.dup(self._rest)
        except OSError:
            os.close(self._rest)
            raise
        # Also when it is forgotten, as by a socket whose reactor went first.
        self._closing = weakref.finalize(self, _close_all, self._number, self._rest)

    @contextlib.contextmanager
    def connection(self, descriptor: int, port: int | None) -> Iterator[os_socket.socket | None]:
        """The TCP connection to our own ``port`` behind a descriptor; None when it stands for something else by now."""
        if not self._closing.alive:
            yield None
            return
        try:
            os.dup2(descriptor, self._number, inheritable=False)
        except OSError:
            yield None  # gone already
            return
        found: os_socket.socket | None = None
        try:
            with contextlib.suppress(OSError):  # no socket any more, or one whose peer is gone
                found = os_socket.socket(fileno=self._number)
            yield found if found is not None and _leads_to(found, port) else None
        finally:
            if found is not None:
                found.detach()
            # The connection must not live on in the number; that itself stays taken.
            os.dup2(self._rest, self._number, inheritable=False)

    def host(self, descriptor: int, port: int | None) -> str:
        """What the bound of an address goes by; empty when it is not such a connection."""
        with self.connection(descriptor, port) as found, contextlib.suppress(OSError):
            if found is not None:
                return host_of(found.getpeername()[0])
        return ""

    def cut(self, descriptor: int, port: int | None) -> bool:
        """Shut the TCP stream down, so that libzmq sees an ordinary end; False when it is not such a connection."""
        with self.connection(descriptor, port) as found, contextlib.suppress(OSError):
            if found is not None:
                found.shutdown(os_socket.SHUT_RDWR)
                return True
        return False

    def close(self) -> None:
        """Give the number back. Idempotent."""
        self._closing()


def oldest_of_busiest(hosts: Mapping[int, str]) -> int:
    """Who makes room: of connections in the order in which they came, each with its host, the oldest one of the host that
    has most of them, so that whoever comes from elsewhere gets through.
    """
    counts = Counter(hosts.values())
    busiest = max(counts, key=counts.__getitem__)
    return next(descriptor for descriptor, host in hosts.items() if host == busiest)


def host_of(text: str) -> str:
    """An address in one form only; empty when it is none. IPv6 addresses are not taken together by network: a LAN is one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _close_all(*descriptors: int) -> None:
    for each in descriptors:
        os.close(each)


def _leads_to(found: os_socket.socket, port: int | None) -> bool:
    with contextlib.suppress(OSError):
        return found.family in (os_socket.AF_INET, os_socket.AF_INET6) and found.getsockname()[1] == port
    return False
