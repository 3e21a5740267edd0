"""The service definitions that the install scripts have made here, read back: what each tells its daemon.

What a definition says on its command line wins over ``kakeya.toml``; `kakeya config show` and `kakeya doctor` tell where.
"""

from __future__ import annotations

import argparse
import os
import plistlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from daemons.daemon_flags import add_daemon_flags
from kakeya_zmq.config import ResolvedSettings, find_config_file, read_config_file, resolve_settings
from kakeya_zmq.option_values import ALL_ROLES, parse_value
from kakeya_zmq.options import options_for
from wire.errors import ConfigError

AGENTS: Final = (
    "ai.kakeya.zmq-runtime-prefill",
    "ai.kakeya.prefill-network",
    "ai.kakeya.prefill-network-peer",
    "ai.kakeya.prefill-worker",
)
UNITS: Final = ("kakeya-runtime", "kakeya-worker", "kakeya-cache", "kakeya-dashboard")


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """``role``: primary, worker, cache or dashboard. ``flags``: by setting, as they stand on its command line.

    ``defaults``: NAME=VALUE of its own, weaker than the file. ``environment``: what it sets for the daemon.
    """

    name: str
    path: Path
    role: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()
    config: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def config_file(self) -> Path | None:
        return find_config_file(self.config, self.environment)

    def settings(self) -> ResolvedSettings:
        """What the daemon of a service runs with.

        Raises:
            ConfigError: a value of the definition or of the file cannot be used.
        """
        file, environment = self.config_file, self.environment
        return resolve_settings(self.role, self.flags, environment=environment, file=file, defaults=self.defaults)


REQUIRED: Final[Mapping[str, Mapping[str, str]]] = {
    "primary": {"model": "KAKEYA_RUNTIME_MODEL"},
    "worker": {
        "node_id": "KAKEYA_WORKER_NODE_ID",
        "model": "KAKEYA_WORKER_MODEL",
        "advertise": "KAKEYA_WORKER_ADVERTISE",
    },
    "cache": {"node_id": "KAKEYA_CACHE_NODE_ID", "advertise": "KAKEYA_CACHE_ADVERTISE"},
}
"""By role: settings that an install script must be told, and its variables for them. They are in every definition."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A setting that a command line or a definition gives, and the file gives otherwise: ``given`` holds."""

    name: str
    given: Any
    in_file: Any

    def __str__(self) -> str:
        flag = "--" + self.name.replace("_", "-")
        return f"{flag} {shown(self.given)} wins over {self.name} = {shown(self.in_file)} in the configuration file"


def shown(value: Any) -> str:
    """A setting's value in one line."""
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def pinned_values(role: str, flags: Mapping[str, Any], file: Path | None) -> tuple[Pinned, ...]:
    """The settings that flags and file give differently.

    Raises:
        ConfigError: the file or a value cannot be used.
    """
    from_file = read_config_file(file, role) if file is not None else {}
    found = []
    for option in options_for(role):
        if flags.get(option.name) is not None and option.name in from_file:
            given = parse_value(option, flags[option.name], option.flag)
            in_file = parse_value(option, from_file[option.name], f"{option.name} in the configuration file")
            if given != in_file:
                found.append(Pinned(option.name, given, in_file))
    return tuple(found)


def agents_folder() -> Path:
    return Path(os.environ.get("KAKEYA_LAUNCH_AGENTS", "") or Path.home() / "Library" / "LaunchAgents")


def units_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME", "") or Path.home() / ".config") / "systemd" / "user"


def definition_files() -> list[Path]:
    """Of the services that are installed here for this user."""
    agents = [agents_folder() / f"{name}.plist" for name in AGENTS]
    units = [units_folder() / f"{name}.service" for name in UNITS]
    return [path for path in (*agents, *units) if path.is_file()]


def installed_definitions() -> Iterator[ServiceDefinition]:
    """All of them; one that cannot be read is passed over."""
    for path in definition_files():
        try:
            yield read_definition(path)
        except ConfigError:
            continue


def read_definition(path: Path) -> ServiceDefinition:
    """Read a property list or a unit that an install script has made.

    Raises:
        ConfigError: it is none, or starts something else.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".plist":
            document = plistlib.loads(data)
            arguments, environment = list(document["ProgramArguments"]), dict(document.get("EnvironmentVariables", {}))
        else:
            arguments, environment = read_unit(data.decode("utf-8"))
        role = arguments[1]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, plistlib.InvalidFileException) as error:
        remedy = "run its install script again"
        raise ConfigError(f"the service definition {path} cannot be read: {type(error).__name__}", remedy=remedy) from None
    if role not in ALL_ROLES:
        return ServiceDefinition(path.stem, path, role, environment=environment)
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_daemon_flags(parser, role)
    given = vars(parser.parse_args(arguments[2:]))
    flags = {option.name: given[option.name] for option in options_for(role) if given[option.name] is not None}
    return ServiceDefinition(path.stem, path, role, flags, tuple(given["default"]), given["config"], environment)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"a service definition has a command line of another version: {message}", remedy="install it again"
        )


# --- systemd's syntax ----------------------------------------------------------------------------------------------------

_WORD: Final = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\\.|[^\s"'\\])+""", re.DOTALL)
_PIECE: Final = re.compile(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|((?:\\.|[^"'\\])+)""", re.DOTALL)


def read_unit(text: str) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a unit, as its process gets them.

    Raises:
        ValueError: it starts nothing.
    """
    arguments: list[str] = []
    environment: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        key, _, value = line.partition("=")
        words = [_unquoted(word).replace("%%", "%") for word in _WORD.findall(value)]
        if key == "ExecStart":
            arguments = [words[0], *(word.replace("$$", "$") for word in words[1:])] if words else []
        elif key == "Environment":
            environment |= dict(word.split("=", 1) for word in words if "=" in word)
    if not arguments:
        raise ValueError("no ExecStart")
    return arguments, environment


def _unquoted(word: str) -> str:
    pieces = ("".join(groups) for groups in _PIECE.findall(word))
    return "".join(re.sub(r"\\(.)", r"\1", piece, flags=re.DOTALL) for piece in pieces)
