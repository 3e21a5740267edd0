"""Whether the addresses among a daemon's settings can be used, before anything is loaded, bound or dialled."""

from __future__ import annotations

from collections.abc import Iterator

from daemons.membership import announced_endpoints, parse_endpoint
from daemons.own_addresses import can_be_reached
from kakeya_zmq.config import ResolvedSettings, Settings
from kakeya_zmq.io.sockets import Address, parse_address, parse_port_range
from kakeya_zmq.options import OPTIONS
from wire.errors import ConfigError

_OWN = ("bind", "bus_bind", "advertise")
_OTHERS = ("peer", "cache_peer", "worker")
_BY_NAME = {option.name: option for option in OPTIONS}
_OWN_ADDRESS = Address("127.0.0.1", 1)
"""Stands for what will be bound: only the number of endpoints is judged with it."""


def check_addresses(resolved: ResolvedSettings) -> None:
    """Parse every address and port range of the settings.

    Raises:
        ConfigError: one cannot be used; the message names the flag, variable or key that it came from.
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
