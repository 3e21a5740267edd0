"""The ports that daemons would serve on here: free, ours, or somebody else's."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from daemons.doctor.finding import Finding, ok, problem
from daemons.doctor.site import Site
from daemons.port_owner import describe, listener
from kakeya_zmq.io.sockets import Address, parse_address
from wire.errors import ConfigError


def examine_ports(site: Site) -> Iterator[Finding]:
    ours = {member.pid for member in site.members}
    for role, settings in site.settings.items():
        for text in (settings.bind, settings.bus_bind):
            if not text:
                continue
            try:
                address = parse_address(text)
            except ConfigError as error:
                yield problem("ports", f"{role}: {error.message}", error.remedy)
                continue
            if address.port:
                yield examine_port(role, address, ours)


def examine_port(role: str, address: Address, ours: set[int], flag: str = "--bind") -> Finding:
    """Whether something for ``role`` can serve there; ``flag`` chooses another port."""
    error = try_to_bind(address)
    if error == 0:
        return ok("ports", f"{role}: {address} is free")
    if error != errno.EADDRINUSE:
        return problem(
            "ports", f"{role}: {address} cannot be bound on this machine", "check --bind; 0.0.0.0 means everywhere"
        )
    owner = listener(address.port)
    if owner is None:
        text = f"{role}: {address} is taken by a process that this user may not look at"
        return problem("ports", text, f"find it with: sudo lsof -nP -iTCP:{address.port} -sTCP:LISTEN")
    told = describe(owner)
    if owner.pid in ours or told.startswith("a kakeya "):
        return ok("ports", f"{role}: {address} is served by {told}")
    return problem("ports", f"{role}: {address} is taken by {told}", f"stop it, or choose another port with {flag}")


def try_to_bind(address: Address) -> int:
    """0 when the address is free, else the error number."""
    host = "127.0.0.1" if address.host == "localhost" else address.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As libzmq does: a connection of before that is not quite gone is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, address.port))
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0
