"""The ``kakeya`` command: one entry, subcommands, errors as one clear line with a documented exit code."""

from __future__ import annotations

import argparse
import errno
import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final, NoReturn

from daemons.bench_flags import add_bench_commands
from daemons.console import drop_unwritten_output, fail, flush_output, probe_output, tolerate_narrow_output
from daemons.daemon_flags import add_daemons
from daemons.dashboard_flags import add_dashboard_commands
from daemons.exit_codes import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_AUTHENTICATED,
    EXIT_OK,
    EXIT_PORT_IN_USE,
    EXIT_UNAVAILABLE,
    exit_code,
)
from daemons.fleet_flags import add_fleet_commands
from daemons.key_flags import add_key_commands
from daemons.log_files import guard_stray_lines
from daemons.operation_flags import add_operation_commands
from daemons.primary_flags import add_primary_commands
from daemons.top_command import add_top_command
from kakeya_zmq import __version__
from wire.errors import ConfigError, KakeyaError, PortInUseError

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_AUTHENTICATED",
    "EXIT_OK",
    "EXIT_PORT_IN_USE",
    "EXIT_UNAVAILABLE",
    "build_parser",
    "exit_code",
    "main",
]

EPILOG = """\
start here:
  kakeya demo                 set up a fleet on this machine and watch one prompt answered four ways
  kakeya up                   start primary, worker and cache peer in the background
  kakeya chat                 talk to the primary; every turn says what it cost
  kakeya status               what runs, who knows whom, what was reused
  kakeya top                  watch it live in the terminal
  kakeya explain              what the last requests cost, and why
  kakeya doctor               look for what is wrong, and how to mend it
  kakeya down                 stop the fleet

exit codes:
  0 done   1 the request failed   2 bad input or settings   3 nothing answers or no capacity
  4 key missing, unusable or not accepted   5 an address or node id is in use, or another `kakeya up` runs
  130 interrupted

files (under ~/.kakeya, or $KAKEYA_HOME):
  fleet.psk                   the fleet's pre-shared key, mode 0600
  tenants/NAME.key            a tenant's key for prompt hashes, mode 0600
  nodes/NODE/identity.key     a node's identity, mode 0600
  logs/  run/                 logs and state of `kakeya up`
"""


DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})
"""What a full, read-only or broken disk says: no fault of the program."""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage text, and exit with code 2. Help that cannot be written is an error."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is not None:
            file.write(message)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. No traceback reaches the user unless KAKEYA_DEBUG is set."""
    try:
        tolerate_narrow_output()
        try:
            code = _run(arguments)
        except SystemExit:  # of --help and --version, which have written
            flush_output()
            raise
        flush_output()
        return code
    except KeyboardInterrupt:
        fail("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_OK  # the reader of our output went away; there is nobody left to tell
    except KakeyaError as error:
        if os.environ.get("KAKEYA_DEBUG"):
            raise
        fail(str(_with_owner(error)))
        return exit_code(error)
    except Exception as error:
        if os.environ.get("KAKEYA_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            fail(_disk_trouble(error))
            return EXIT_FAILED
        fail(f"internal error: {type(error).__name__} (set KAKEYA_DEBUG=1 to see where, and please report it)")
        return EXIT_FAILED
    finally:
        drop_unwritten_output()


def _run(arguments: Sequence[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    # Asked to stop by a service manager or a closed terminal: clean up as for Ctrl-C. Daemons set handlers of their own.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    guard_stray_lines()
    code: int = options.run(options)
    return code


def _disk_trouble(error: OSError) -> str:
    """One line for what could not be written: a named file, else our output, where that takes nothing."""
    reason = error.strerror or type(error).__name__
    if isinstance(error.filename, str):
        return f"{error.filename} cannot be written: {reason}"
    try:
        probe_output()
    except OSError:
        return f"standard output cannot be written: {reason}"
    return f"a file cannot be written: {reason}"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _with_owner(error: KakeyaError) -> KakeyaError:
    """Of an address in use: who has it."""
    if not isinstance(error, PortInUseError):
        return error
    from daemons.port_owner import with_owner

    return with_owner(error)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _command_parser(None, "kakeya", "Share prompt prefill between machines that run the same MLX model.", EPILOG)
    parser.add_argument("--version", action="version", version=f"kakeya-zmq {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, description: str, examples: str) -> argparse.ArgumentParser:
        return _command_parser(commands, name, description, examples)

    # In the order of the help.
    add_fleet_commands(add)
    add_primary_commands(add)
    add_daemons(add)
    add_key_commands(add)
    add_bench_commands(add)
    add_operation_commands(add)
    add_dashboard_commands(add)
    add_top_command(add)
    return parser


def _command_parser(commands: Any, name: str, description: str, examples: str) -> argparse.ArgumentParser:
    shared: dict[str, Any] = {
        "description": description,
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    if commands is None:
        return _Parser(prog=name, **shared)
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=description[0].lower() + description[1:].rstrip("."), **shared
    )
    return parser
