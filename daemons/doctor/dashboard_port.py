"""The port of the dashboard: free, the dashboard's, or somebody else's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from daemons.dashboard_flags import dashboard_bind
from daemons.doctor.finding import Finding, Level, problem
from daemons.doctor.ports import examine_port
from daemons.service_definitions import DASHBOARD, installed_definitions
from kakeya_zmq.io.addresses import parse_address
from wire.errors import ConfigError


def examine_dashboard_port() -> Iterator[Finding]:
    """Of an installed dashboard the port of its definition; else that of one which is started from here.

    Where nobody has asked for a dashboard, one that could not be started is worth a warning: the fleet works without it.
    """
    installed = [service.dashboard_bind for service in installed_definitions() if service.role == DASHBOARD]
    for bind in dict.fromkeys(installed):
        yield _examine(bind, "KAKEYA_NETWORK_HTTP_PORT, told to its install script")
    if not installed:
        found = _examine(dashboard_bind("", os.environ), "--bind (KAKEYA_DASHBOARD_BIND)")
        asked_for = bool(os.environ.get("KAKEYA_DASHBOARD_BIND"))
        yield found if asked_for or found.level is Level.OK else replace(found, level=Level.WARNING)


def _examine(bind: str, flag: str) -> Finding:
    try:
        address = parse_address(bind)
    except ConfigError as error:
        return problem("ports", f"{DASHBOARD}: {error.message}", error.remedy)
    return examine_port(DASHBOARD, address, set(), flag, only=DASHBOARD)
