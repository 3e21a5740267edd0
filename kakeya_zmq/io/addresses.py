"""Addresses and port ranges as people write them: ``host:port``, ``[IPv6]:port``, ``first-last``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from wire.errors import ConfigError

_PORT_MAX: Final = 65_535
_HOST: Final = re.compile(r"[0-9A-Za-z_](?:[0-9A-Za-z_.-]{0,252})|[0-9A-Fa-f:.]{2,45}(?:%[0-9A-Za-z_.-]{1,32})?")
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_RANGE: Final = re.compile(r"(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4 or IPv6 without brackets) and a TCP port; port 0 asks for an ephemeral one when binding."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise ConfigError(_quoted("not a host", self.host), remedy="write a host name or an IP address")
        if not 0 <= self.port <= _PORT_MAX:
            raise ConfigError(f"port {self.port} is out of range", remedy=f"write a port from 0 to {_PORT_MAX}")

    def zmq_endpoint(self) -> str:
        """The libzmq form: ``tcp://host:port``, IPv6 in brackets."""
        return f"tcp://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports ``first`` to ``last``, both included, for sites whose firewall opens only some."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= _PORT_MAX:
            raise ConfigError(
                f"port range {self.first}-{self.last} is wrong",
                remedy=f"write first-last with 1 <= first <= last <= {_PORT_MAX}",
            )


def parse_address(text: str) -> Address:
    """Parse ``host:port``, ``192.0.2.1:port`` or ``[2001:db8::1]:port``.

    Raises:
        ConfigError: anything else, among it a bare IPv6 address and ``*``.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(_quoted("not an address", text), remedy="write host:port, or [IPv6]:port")
    six = match["six"]
    if six is not None and ":" not in six:
        raise ConfigError(_quoted("not an IPv6 address", six), remedy="brackets are for IPv6 addresses only")
    return Address(host=six if six is not None else match["host"], port=int(match["port"]))


def parse_port_range(text: str) -> PortRange:
    """Parse ``first-last`` or one port.

    Raises:
        ConfigError: not a range of ports.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(_quoted("not a port range", text), remedy="write first-last, for example 7000-7099")
    return PortRange(first=int(match["first"]), last=int(match["last"] or match["first"]))


def _quoted(what: str, text: str) -> str:
    return f"{what}: {text[:64]!r}"
