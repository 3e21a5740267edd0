"""Which names the dashboard answers to.

A web page elsewhere can have its own name resolved to this machine's address (DNS rebinding): the browser then takes our
answers for that page's. Such a request carries the other name in its Host header, so names that are not ours are refused.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from wire.errors import ConfigError

_LOOPBACK_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))
_HEADER: Final = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9_.-]{1,253}))(?::[0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class HostRule:
    """``names``: lower case, no port, no brackets. ``literals``: any IP address too, which cannot be rebound by a name."""

    names: frozenset[str] = _LOOPBACK_NAMES
    literals: bool = False

    def allows(self, header: str) -> bool:
        """Whether a Host header names this dashboard; its port does not count."""
        found = _HEADER.fullmatch(header)
        if found is None:
            return False
        name = _plain(found["ipv6"] or found["name"])
        return name in self.names or (self.literals and _is_address(name))


def host_rule(bound: str, further: Iterable[str] = ()) -> HostRule:
    """The rule for a dashboard that is bound to ``bound``.

    On a loopback address: the names of the loopback interface. Elsewhere: the address and the machine's own names; on the
    address of all interfaces, any IP address. ``further`` names are allowed in any case.

    Raises:
        ConfigError: a further name is none.
    """
    allowed = frozenset(map(_checked, further))
    plain = _plain(bound)
    if plain == "localhost" or (_is_address(plain) and ipaddress.ip_address(plain).is_loopback):
        return HostRule(_LOOPBACK_NAMES | {plain} | allowed)
    everywhere = not plain or (_is_address(plain) and ipaddress.ip_address(plain).is_unspecified)
    machine = _plain(socket.gethostname())
    short = machine.partition(".")[0]
    names = {plain, machine, short, f"{short}.local"} - {"", ".local"}
    return HostRule(frozenset(names) | allowed | (_LOOPBACK_NAMES if everywhere else frozenset()), literals=everywhere)


def _checked(name: str) -> str:
    plain = _plain(name)
    if not (_is_address(plain) if ":" in plain else _HEADER.fullmatch(plain)):
        raise ConfigError(f"{name!r} is no host name", remedy="write --allow-host NAME, without scheme and port")
    return plain


def _plain(host: str) -> str:
    return host.strip("[]").partition("%")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
