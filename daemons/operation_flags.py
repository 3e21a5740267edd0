"""The flags of ``kakeya config``, ``logs`` and ``doctor``; what they do is only imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from daemons.flags import config_flag
from kakeya_zmq.option_values import ALL_ROLES

JSON_HELP = "print one JSON object as the last line of standard output"


def add_operation_commands(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Add the three; ``add(name, description, examples)`` makes a subcommand's parser."""
    _add_config(add)
    _add_logs(add)
    _add_doctor(add)


def _add_config(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    config = add(
        "config",
        "Show the settings that hold here and where each came from, or a sample file with all of them.",
        "examples:\n  kakeya config show --role worker\n  kakeya config show --json\n"
        "  kakeya config sample > ~/.kakeya/kakeya.toml\n",
    )
    config.add_argument("action", choices=("show", "sample"))
    config.add_argument(
        "--role", action="append", default=[], choices=ALL_ROLES, help="a role to show (default: all); repeatable"
    )
    config_flag(config)
    config.add_argument("--json", action="store_true", help=JSON_HELP)
    config.set_defaults(run=_run_config)


def _add_logs(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    logs = add(
        "logs",
        "Show the logs of this machine's daemons.",
        "examples:\n  kakeya logs                    the last lines of every log under ~/.kakeya\n"
        "  kakeya logs -f primary         go on with new lines of one, until interrupted\n",
    )
    logs.add_argument("names", nargs="*", metavar="NAME", help="which logs, by name without .log (default: all)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines, until interrupted")
    logs.add_argument("-n", "--last", type=int, default=20, metavar="N", help="how many lines of each so far (default 20)")
    logs.set_defaults(run=_run_logs)


def _add_doctor(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    doctor = add(
        "doctor",
        "Look for everything that is known to go wrong, and say how to mend it.",
        "examples:\n  kakeya doctor                                  this machine, and the fleet its nodes see\n"
        "  kakeya doctor --address 192.168.1.20:51051     the fleet as a node elsewhere sees it\n"
        "  kakeya doctor --quick --json                   without measuring; for scripts\n"
        "\nexit codes: 0 nothing that keeps it from working, 1 problems were found\n",
    )
    doctor.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT", help="a node to ask, besides those of this machine"
    )
    config_flag(doctor)
    doctor.add_argument("--quick", action="store_true", help="do not measure the speed of MLX and of links")
    doctor.add_argument("--json", action="store_true", help=JSON_HELP)
    doctor.set_defaults(run=_run_doctor)


def _run_config(parsed: argparse.Namespace) -> int:
    from daemons.config_command import sample_text, show_config
    from daemons.console import Console

    if parsed.action == "sample":
        print(sample_text(), end="")
        return 0
    return show_config(Console(json_mode=parsed.json), parsed.role, parsed.config)


def _run_logs(parsed: argparse.Namespace) -> int:
    from daemons.logs import show_logs
    from wire.errors import ConfigError

    if parsed.last < 0:
        raise ConfigError("--last is a whole number from 0")
    return show_logs(tuple(parsed.names), last=parsed.last, follow=parsed.follow)


def _run_doctor(parsed: argparse.Namespace) -> int:
    from daemons.console import Console
    from daemons.doctor import examine

    return examine(Console(json_mode=parsed.json), tuple(parsed.address), config=parsed.config, quick=parsed.quick)
