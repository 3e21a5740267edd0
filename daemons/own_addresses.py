"""What this machine's own addresses and names are, for telling them to others."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final

import psutil

HOSTS_MAX: Final = 8
"""Of this machine's own addresses, told when none is configured: others try them one after the other."""
VIRTUAL: Final = re.compile(r"docker|veth|br-|virbr|vmnet|vboxnet|bridge1\d\d")
"""Interfaces between this machine and what runs on it. A Thunderbolt bridge is bridge0 on macOS."""
TAILSCALE: Final = ipaddress.ip_network("100.64.0.0/10")
LOOKUP_S: Final = 3.0
"""For all names together: a daemon's start does not wait longer for a name server that is silent."""


def is_everywhere(host: str) -> bool:
    """Whether a host stands for all addresses of a machine: one can bind it, and nobody can dial it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def can_be_reached(host: str) -> bool:
    """Whether others could dial a host at all: a name, or an address that one machine has to itself."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        nobody = address.is_unspecified or address.is_multicast
        return not (nobody or (address.version == 4 and (address.is_reserved or int(address) >> 24 == 0)))
    return True


def own_hosts(*, six: bool) -> tuple[str, ...]:
    """The addresses of this machine's networks that others may reach it at, the likelier ones first; at least loopback.

    Args:
        six: IPv6 addresses, too.
    """
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        running = {name for name, state in psutil.net_if_stats().items() if state.isup}
        for name, addresses in psutil.net_if_addrs().items():
            if name not in running or VIRTUAL.match(name):
                continue
            for each in addresses:
                if each.family == socket.AF_INET or (six and each.family == socket.AF_INET6):
                    with contextlib.suppress(ValueError):
                        address = ipaddress.ip_address(each.address)
                        if not address.is_loopback and not (address.version == 6 and address.is_link_local):
                            found.append((address.version + 10 * address.is_link_local, str(address)))
    return tuple(dict.fromkeys(host for _, host in sorted(found)))[:HOSTS_MAX] or ("127.0.0.1",)


def network_of(host: str, configured: str) -> str:
    """The kind of network an own address is on: as configured, but addresses of Tailscale show themselves."""
    return "tailscale" if ":" not in host and ipaddress.ip_address(host) in TAILSCALE else configured


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
