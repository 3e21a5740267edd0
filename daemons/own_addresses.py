"""What this machine's own addresses and names are: for judging the addresses that others tell, and for telling ours."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import psutil

from kakeya_zmq.io.sockets import Address
from kakeya_zmq.protocol.dialling import is_dialable

LOOK_AGAIN_S: Final = 10.0
LOOKUP_S: Final = 3.0
"""For all names together: a daemon's start does not wait longer for a name server that is silent."""


class OwnInterfaces:
    """This machine's interfaces, read again after a while: a cable may be plugged in later."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at: float | None = None
        self._names: frozenset[str] = frozenset()
        self._link_local = False

    def may_dial(self, address: Address) -> bool:
        """Whether an address of another node's card leads somewhere that can be meant."""
        now = self._clock()
        if self._read_at is None or now >= self._read_at + LOOK_AGAIN_S:
            self._read_at = now
            with contextlib.suppress(OSError):  # then as it was
                found = psutil.net_if_addrs()
                self._names = frozenset(found)
                own = [each for addresses in found.values() for each in addresses if each.family == socket.AF_INET]
                self._link_local = any(each.address.startswith("169.254.") for each in own)
        return address.port != 0 and is_dialable(address.host, link_local=self._link_local, interfaces=self._names)


def is_literal(host: str) -> bool:
    """Whether a host is an IP address in its canonical form."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host)) == host
    return False


def look_up(hosts: Iterable[str], limit_s: float = LOOKUP_S) -> Mapping[str, str]:
    """The IP address of each host name; without those that have none, or none in time. Literals stand for themselves.

    Not for a reactor's thread: it waits up to ``limit_s`` seconds for all of them together.
    """
    found: dict[str, str] = {}
    threads = []
    for host in dict.fromkeys(hosts):
        if is_literal(host):
            found[host] = host
        elif host == "localhost":
            found[host] = "127.0.0.1"  # as our servers bind it
        else:
            # A look-up cannot be ended; a thread that still waits must not keep the process.
            thread = threading.Thread(target=_look_up, args=(host, found), name="look-up", daemon=True)
            thread.start()
            threads.append(thread)
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)


def _look_up(host: str, found: dict[str, str]) -> None:
    with contextlib.suppress(OSError, UnicodeError):
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for _, _, _, _, address in answers]
        # This machine's own name often means its loopback first, where nobody else finds it.
        best = min(addresses, key=lambda text: (ipaddress.ip_address(text).is_loopback, ":" in text), default="")
        if best:
            found[host] = str(ipaddress.ip_address(best))
