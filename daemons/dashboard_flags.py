"""The flags of ``kakeya dashboard`` and ``kakeya pair``; what they do is only imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

DEFAULT_BIND = "127.0.0.1:8090"


def dashboard_bind(given: str, environment: Mapping[str, str]) -> str:
    """Where a dashboard serves: as --bind says, else ``KAKEYA_DASHBOARD_BIND``, else on loopback."""
    return given or environment.get("KAKEYA_DASHBOARD_BIND", "") or DEFAULT_BIND


def add_dashboard_commands(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Add ``dashboard`` and ``pair``; ``add(name, description, examples)`` makes a subcommand's parser."""
    dashboard = add(
        "dashboard",
        "Serve the dashboard: a page, a JSON API and metrics, fed by the telemetry bus.",
        "examples:\n  kakeya dashboard                                   the nodes of this machine, on 127.0.0.1:8090\n"
        "  kakeya dashboard --bus 192.168.1.20:54100          a fleet elsewhere, with ~/.kakeya/telemetry.key of it\n"
        "  openssl rand -hex 24 > ~/.kakeya/network_api_key && chmod 600 ~/.kakeya/network_api_key    opens writes\n",
    )
    add_dashboard_flags(dashboard)
    dashboard.set_defaults(run=_run_dashboard)
    pair = add(
        "pair",
        "Bind a node of this machine to its registration at a dashboard.",
        "example (the token comes from registering the node at the dashboard, and is read from standard input):\n"
        "  kakeya pair --dashboard http://127.0.0.1:8090 --node-id allens-mini < token.txt\n",
    )
    pair.add_argument("--dashboard", default="http://127.0.0.1:8090", metavar="URL", help="default: http://127.0.0.1:8090")
    pair.add_argument("--node-id", required=True, metavar="NAME", help="the node, which must have been started here before")
    pair.add_argument("--json", action="store_true", help="print one JSON object as the last line of standard output")
    pair.set_defaults(run=_run_pair)


def add_dashboard_flags(dashboard: argparse.ArgumentParser) -> None:
    """The flags of the dashboard alone."""
    bind_help = f"where to serve (default: KAKEYA_DASHBOARD_BIND, else {DEFAULT_BIND})"
    dashboard.add_argument("--bind", default="", metavar="HOST:PORT", help=bind_help)
    host_help = "a further name or address it is reached by, for example through a proxy; repeatable"
    dashboard.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=host_help)
    bus_help = "bus of a node of the fleet; repeatable (default: those of the nodes on this machine); one leads to all"
    dashboard.add_argument("--bus", action="append", default=[], metavar="HOST:PORT", help=bus_help)
    key_help = "the telemetry-read key, mode 0600 (default: ~/.kakeya/telemetry.key, made from fleet.psk where that is)"
    dashboard.add_argument("--telemetry-key-file", default="", metavar="FILE", help=key_help)
    api_help = "the key that opens writes, mode 0600 (default: ~/.kakeya/network_api_key; without it writes are closed)"
    dashboard.add_argument("--api-key-file", default="", metavar="FILE", help=api_help)
    state_help = "database of registrations, groups, tokens, benchmarks (default: ~/.kakeya/dashboard/network.sqlite3)"
    dashboard.add_argument("--state", default="", metavar="FILE", help=state_help)
    dashboard.add_argument("--ready-file", default="", metavar="FILE", help="file to write the address to once it serves")
    dashboard.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    dashboard.add_argument("--check-settings", action="store_true", help="check settings and keys, and leave")


def _run_dashboard(parsed: argparse.Namespace) -> int:
    from daemons.dashboard_command import check_dashboard, options_from, run_dashboard
    from kakeya_zmq.config import kakeya_home

    if parsed.check_settings:
        check_dashboard(options_from(parsed), kakeya_home())
        return 0
    return run_dashboard(options_from(parsed))


def _run_pair(parsed: argparse.Namespace) -> int:
    from daemons.dashboard_command import pair

    return pair(parsed)
