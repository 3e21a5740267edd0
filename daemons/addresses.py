"""Whether the addresses among a daemon's settings can be used, before anything is loaded, bound or dialled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations
from typing import Final

from daemons.health_server import HOST
from daemons.membership import announced_endpoints, parse_endpoint
from daemons.own_addresses import can_be_reached
from kakeya_zmq.config import ResolvedSettings, Settings
from kakeya_zmq.io.addresses import Address, parse_address, parse_port_range
from kakeya_zmq.options import OPTIONS
from wire.errors import ConfigError

_OWN = ("bind", "bus_bind", "advertise")
_OTHERS = ("peer", "cache_peer", "worker")
_BY_NAME = {option.name: option for option in OPTIONS}
SHARED_PORT_REMEDY: Final = "give one of them another port"
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
_OWN_ADDRESS = Address("127.0.0.1", 1)
"""Stands for what will be bound: only the number of endpoints is judged with it."""


def check_addresses(resolved: ResolvedSettings) -> None:
    """Parse every address and port range of the settings.

    Raises:
        ConfigError: one cannot be used, or two are one port; the message names the flag, variable or key that it came from.
    """
    settings = resolved.settings
    for name, text in _texts(settings):
        try:
            if name == "bulk_ports":
                parse_port_range(text)
            elif name == "endpoint":
                need_reachable(parse_address(parse_endpoint(text).address))
            elif parse_address(text).port == 0 and name in (*_OTHERS, "advertise"):
                raise ConfigError(f"no port: {text[:80]!r}", remedy="write the port of --bind there")
            elif name == "advertise":
                need_reachable(parse_address(text))
        except ConfigError as error:
            raise ConfigError(f"{_source(name, resolved)}: {error.message}", remedy=error.remedy) from None
    announced_endpoints(settings, _OWN_ADDRESS)
    for one, other, port in shared_ports(settings):
        text = f"{_source(one, resolved)} and {_source(other, resolved)} are the same port {port} of one daemon"
        raise ConfigError(text, remedy=SHARED_PORT_REMEDY)


def shared_ports(settings: Settings) -> Iterator[tuple[str, str, int]]:
    """Pairs of a daemon's settings that would have it serve twice at one port, of which it would get only the first."""
    for (one, first), (other, second) in combinations(own_ports(settings), 2):
        if meet(first, second):
            yield one, other, first.port


def own_ports(settings: Settings) -> Iterator[tuple[str, Address]]:
    """Where a daemon would serve, by setting: fixed ports only. What cannot be parsed is told elsewhere."""
    health_port = settings.runtime_health_port
    texts = {"bind": settings.bind, "bus_bind": settings.bus_bind, "runtime_health_port": f"{HOST}:{health_port}"}
    for name, text in texts.items():
        with contextlib.suppress(ConfigError):
            address = parse_address(text)
            if address.port:
                yield name, address


def meet(one: Address, other: Address) -> bool:
    """Whether two that serve there would want the same port of the same address."""
    hosts = {"127.0.0.1" if address.host == "localhost" else address.host for address in (one, other)}
    return one.port == other.port and (len(hosts) == 1 or bool(hosts & _EVERYWHERE))


def need_reachable(address: Address) -> None:
    """Refuse an address that no other machine can reach.

    Raises:
        ConfigError: it is one of all machines or of none: 0.0.0.0, [::], multicast, reserved.
    """
    if not can_be_reached(address.host):
        remedy = "--advertise is the address that other machines use; --bind may be 0.0.0.0"
        raise ConfigError(f"nobody can reach this node at {address}", remedy=remedy)


def _texts(settings: Settings) -> Iterator[tuple[str, str]]:
    for name in (*_OWN, "bulk_ports"):
        if text := str(getattr(settings, name)):
            yield name, text
    for name in (*_OTHERS, "endpoint"):
        for text in getattr(settings, name):
            yield name, text


def _source(name: str, resolved: ResolvedSettings) -> str:
    match resolved.origins[name]:
        case "environment":
            return _BY_NAME[name].variable
        case "file":
            return f"{name} in the configuration file"
        case _:
            return _BY_NAME[name].flag
