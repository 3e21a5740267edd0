"""The ports that daemons would serve on here: free, ours, or somebody else's."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from daemons.addresses import SHARED_PORT_REMEDY, shared_ports
from daemons.doctor.finding import Finding, ok, problem
from daemons.doctor.site import Site
from daemons.port_owner import ENDED, PortUse, connection_of, describe, port_use
from kakeya_zmq.io.addresses import Address, parse_address
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
        for one, other, port in shared_ports(settings):
            flags = " and ".join("--" + name.replace("_", "-") for name in (one, other))
            yield problem("ports", f"{role}: {flags} are the same port {port} of one daemon", SHARED_PORT_REMEDY)


def examine_port(role: str, address: Address, ours: set[int], flag: str = "--bind", *, only: str = "") -> Finding:
    """Whether something for ``role`` can serve there; ``flag`` chooses another port. For ``only`` see judge_use."""
    error = try_to_bind(address)
    if error == 0:
        return ok("ports", f"{role}: {address} is free")
    if error != errno.EADDRINUSE:
        return problem(
            "ports", f"{role}: {address} cannot be bound on this machine", "check --bind; 0.0.0.0 means everywhere"
        )
    return judge_use(f"{role}: {address}", address.port, port_use(address.port), ours, flag, only=only)


def judge_use(what: str, port: int, use: PortUse | None, ours: set[int], flag: str, *, only: str = "") -> Finding:
    """What it means that a port is taken; ``what`` names role and address.

    Args:
        ours: processes that may have it.
        only: the one role whose daemon may have it, else any role's.
    """
    if use is None or (use.listens and use.process is None):
        text = f"{what} is taken by {'something' if use is None else 'a process'} that this user may not look at"
        waiting = "" if use is not None else "; when that shows nothing, a connection has just ended: wait a minute"
        return problem("ports", text, f"find it with: sudo lsof -nP -iTCP:{port}{waiting}")
    if use.ended:
        return problem("ports", f"{what} is taken: {ENDED}", f"wait a minute, or choose another port with {flag}")
    if not use.listens or use.process is None:
        remedy = f"wait until that ends, or choose another port with {flag}; docs/operations.md says how to keep ports free"
        return problem("ports", f"{what} is taken: nobody listens there, {connection_of(use)} goes through it", remedy)
    told = describe(use.process)
    if use.process.pid in ours or told.startswith(f"a kakeya {only}"):
        return ok("ports", f"{what} is served by {told}")
    return problem("ports", f"{what} is taken by {told}", f"stop it, or choose another port with {flag}")


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
