"""The flags of the daemons, made from the table of settings; the daemons are only imported when they run."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from daemons.console import fail
from daemons.exit_codes import EXIT_OK, exit_code
from daemons.flags import AddCommand, config_flag
from kakeya_zmq.option_values import Option
from kakeya_zmq.options import options_for
from wire.errors import KakeyaError

DAEMON_TEXTS = {
    "primary": (
        "Run a primary: serve sessions and decode.",
        "examples:\n  kakeya primary --enable-prefill-cache --bind 0.0.0.0:51051 --advertise 192.168.1.20:51051 \\\n"
        "      --model ~/models/Qwen3-8B-4bit\n"
        "  kakeya primary --enable-prefill-cache --peer 192.168.1.21:53051 --prefill-policy remote-required\n",
    ),
    "worker": (
        "Run a prefill worker: compute prompts for others.",
        "example (first copy ~/.kakeya/fleet.psk and ~/.kakeya/tenants/default.key from the primary's machine):\n"
        "  kakeya worker --bind 0.0.0.0:53051 --advertise 192.168.1.21:53051 --peer 192.168.1.20:51051 \\\n"
        "      --model ~/models/Qwen3-8B-4bit --cache-gb 8\n",
    ),
    "cache": (
        "Run a cache peer: hold KV for others, without a model.",
        "example (first copy ~/.kakeya/fleet.psk from the primary's machine):\n"
        "  kakeya cache --bind 0.0.0.0:52051 --advertise 192.168.1.22:52051 --peer 192.168.1.20:51051 \\\n"
        "      --cache-gb 8\n",
    ),
}


METAVARS = {
    "bind": "HOST:PORT",
    "bus_bind": "HOST:PORT",
    "advertise": "HOST:PORT",
    "peer": "HOST:PORT",
    "bulk_ports": "LOW-HIGH",
    "assert_compatibility": "FIELD=VALUE",
}
"""What stands for the value in the help; other settings show their kind."""


def add_daemons(add: AddCommand) -> None:
    """Add one command for each role."""
    for role, (description, examples) in DAEMON_TEXTS.items():
        parser = add(
            role,
            description,
            examples + "\nEvery setting can also come from the environment (KAKEYA_…) or from the file given by --config;\n"
            "a flag wins over the environment, which wins over the file.\n",
        )
        add_daemon_flags(parser, role)
        parser.set_defaults(run=_run_daemon, role=role)


def add_daemon_flags(parser: argparse.ArgumentParser, role: str) -> None:
    """The flags of one role; what is not given is None."""
    config_flag(parser)
    default_help = "a default of a service definition, below flag, environment and file; may be repeated"
    parser.add_argument("--default", action="append", default=[], metavar="NAME=VALUE", help=default_help)
    check_help = "check settings, keys and model folder, and leave"
    parser.add_argument("--check-settings", action="store_true", help=check_help)
    for option in options_for(role):
        _add_option(parser, option)


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    default = "" if option.default in ("", ()) else f" (default: {option.default})"
    metavar = METAVARS.get(option.name, option.kind.upper())
    text = f"{option.help}{default}".replace("%", "%%")
    if option.kind == "list":
        parser.add_argument(option.flag, action="append", default=None, metavar=metavar, help=text)
    elif option.kind == "choice":
        parser.add_argument(option.flag, default=None, metavar="{" + ",".join(option.choices) + "}", help=text)
    elif option.kind == "switch":
        parser.add_argument(option.flag, nargs="?", const="1", default=None, metavar="0|1", help=text)
    else:
        parser.add_argument(option.flag, default=None, metavar=metavar, help=text)


def _run_daemon(options: argparse.Namespace) -> int:
    # Before NumPy is loaded: its own BLAS must not fight with the model's over the cores. The model's is set by name.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from daemons.run import leave

    used_before = "mlx.core" in sys.modules
    try:
        code = _serve(options)
    except KakeyaError as error:
        if used_before or "mlx.core" not in sys.modules or os.environ.get("KAKEYA_DEBUG"):
            raise
        fail(str(error))
        code = exit_code(error)
    if not used_before and "mlx.core" in sys.modules:
        leave(code)
    return code


def _serve(options: argparse.Namespace) -> int:
    from daemons.addresses import check_addresses
    from daemons.environment_names import unknown_variables
    from daemons.run import run_daemon, set_up_logging
    from kakeya_zmq.config import find_config_file, resolve_settings

    flags = {option.name: getattr(options, option.name) for option in options_for(options.role)}
    file = find_config_file(options.config)
    resolved = resolve_settings(options.role, flags, file=file, defaults=options.default)
    settings = resolved.settings
    if options.check_settings:
        from daemons.check import check_settings
        from daemons.service_definitions import pinned_values

        check_settings(resolved)
        for pinned in pinned_values(options.role, flags, file):
            fail(f"warning: {pinned}")
        return EXIT_OK
    check_addresses(resolved)
    set_up_logging(settings.log_level, settings.log_format)
    for unknown in unknown_variables():
        logging.getLogger(__name__).warning("%s", unknown)
    match options.role:
        case "primary":
            from daemons.primary import Primary

            return run_daemon(settings, lambda reactor: Primary(reactor, settings))
        case "worker":
            from daemons.worker import Worker

            return run_daemon(settings, lambda reactor: Worker(reactor, settings))
        case _:
            from daemons.cache import Cache

            return run_daemon(settings, lambda reactor: Cache(reactor, settings))
