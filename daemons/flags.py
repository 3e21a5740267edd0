"""What the flags of several commands have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

AddCommand: TypeAlias = Callable[[str, str, str], argparse.ArgumentParser]
"""(name, description, examples) → the parser of a new subcommand."""


def config_flag(parser: argparse.ArgumentParser) -> None:
    """``--config``; ``kakeya_zmq.config.find_config_file`` takes what it says, and finds the file."""
    text = "TOML file (default: the one that KAKEYA_CONFIG names, else ~/.kakeya/kakeya.toml, if any)"
    parser.add_argument("--config", default="", metavar="FILE", help=text)


def json_flag(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of standard output")


def psk_flag(parser: argparse.ArgumentParser) -> None:
    """``--fleet-psk-file``."""
    parser.add_argument(
        "--fleet-psk-file", default="", metavar="FILE", help="the fleet's key (default: ~/.kakeya/fleet.psk)"
    )


def psk_file(options: argparse.Namespace) -> Path:
    """The PSK file: as the flag says, else the environment, else the home's.

    Raises:
        ConfigError: its path begins with the home folder of a user who is not known.
    """
    from daemons.fleet import default_psk_file
    from kakeya_zmq.user_paths import user_path

    named = options.fleet_psk_file or os.environ.get("KAKEYA_FLEET_PSK_FILE", "")
    return user_path(named, "the fleet's key (--fleet-psk-file, KAKEYA_FLEET_PSK_FILE)") if named else default_psk_file()
