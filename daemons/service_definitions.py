"""The service definitions that the install scripts have made here, read back: what each tells its daemon.

What a definition says on its command line wins over ``kakeya.toml``; `kakeya config show` and `kakeya doctor` tell where.
"""

from __future__ import annotations

import argparse
import os
import plistlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn
from xml.parsers.expat import ExpatError

from daemons.daemon_flags import add_daemon_flags
from daemons.dashboard_flags import add_dashboard_flags, dashboard_bind
from daemons.unit_files import read_unit, stop_seconds, with_drop_ins
from kakeya_zmq.config import ResolvedSettings, find_config_file, read_config_file, resolve_settings
from kakeya_zmq.option_values import ALL_ROLES, parse_file_value, parse_value
from kakeya_zmq.options import options_for
from kakeya_zmq.user_paths import home_folder
from wire.errors import ConfigError

AGENTS: Final = (
    "ai.kakeya.zmq-runtime-prefill",
    "ai.kakeya.prefill-network",
    "ai.kakeya.prefill-network-peer",
    "ai.kakeya.prefill-worker",
)
UNITS: Final = ("kakeya-runtime", "kakeya-worker", "kakeya-cache", "kakeya-dashboard")
INSTALL_COMMANDS: Final[Mapping[str, str]] = {
    "ai.kakeya.zmq-runtime-prefill": "bash deploy/install_runtime_launchd.sh",
    "ai.kakeya.prefill-network": "bash deploy/install_prefill_network_launchd.sh",
    "ai.kakeya.prefill-network-peer": "bash deploy/install_prefill_network_launchd.sh --cache-peer",
    "ai.kakeya.prefill-worker": "bash deploy/install_prefill_worker_launchd.sh",
    **{unit: f"bash deploy/install_systemd.sh {unit.removeprefix('kakeya-')}" for unit in UNITS},
}
"""By definition: what makes it."""
DASHBOARD: Final = "dashboard"
UNREADABLE: Final = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    plistlib.InvalidFileException,
    ExpatError,
)
"""What reading a file raises that is no definition: it is missing, cut off, no property list, or has not what one has."""


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """``role``: primary, worker, cache or dashboard. ``flags``: by setting, as they stand on its command line.

    ``defaults``: NAME=VALUE of its own, weaker than the file. ``environment``: what it sets for the daemon.
    ``stop_s``: how long the daemon has to end before it is killed; None: for ever, or the definition does not say.
    ``dashboard_bind``: where a dashboard serves; empty for the others.
    """

    name: str
    path: Path
    role: str
    program: str
    stop_s: float | None = None
    dashboard_bind: str = ""
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
            in_file = parse_file_value(option, from_file[option.name], f"{option.name} in the configuration file")
            if given != in_file:
                found.append(Pinned(option.name, given, in_file))
    return tuple(found)


def agents_folder() -> Path:
    return Path(os.environ.get("KAKEYA_LAUNCH_AGENTS", "") or home_folder() / "Library" / "LaunchAgents")


def units_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME", "") or home_folder() / ".config") / "systemd" / "user"


def definition_files() -> list[Path]:
    """Of the services that are installed here for this user."""
    try:
        agents = [agents_folder() / f"{name}.plist" for name in AGENTS]
        units = [units_folder() / f"{name}.service" for name in UNITS]
    except ConfigError:  # a user without a home folder has no services
        return []
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
        command = _read_plist(path) if path.suffix == ".plist" else _read_unit(path)
        role = command.arguments[0]
    except UNREADABLE as error:
        remedy = "run its install script again"
        raise ConfigError(f"the service definition {path} cannot be read: {type(error).__name__}", remedy=remedy) from None
    read = ServiceDefinition(path.stem, path, role, command.program, command.stop_s, environment=command.environment)
    if role == DASHBOARD:
        given = _parsed(add_dashboard_flags, command)
        return replace(read, dashboard_bind=dashboard_bind(given["bind"], command.environment))
    if role not in ALL_ROLES:
        return read
    given = _parsed(lambda parser: add_daemon_flags(parser, role), command)
    flags = {option.name: given[option.name] for option in options_for(role) if given[option.name] is not None}
    return replace(read, flags=flags, defaults=tuple(given["default"]), config=given["config"])


@dataclass(frozen=True, slots=True)
class _Command:
    """What a service manager starts, and how it ends that; ``arguments``: the role and what follows it."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    stop_s: float | None


def _read_plist(path: Path) -> _Command:
    document = plistlib.loads(path.read_bytes())
    program, *arguments = map(str, document["ProgramArguments"])
    seconds = document.get("ExitTimeOut")
    # launchd.plist(5): zero is for ever, and what holds without the key is the system's affair.
    stop_s = float(seconds) if isinstance(seconds, int | float) and seconds > 0 else None
    environment = {name: str(value) for name, value in document.get("EnvironmentVariables", {}).items()}
    return _Command(str(document.get("Program", program)), arguments, environment, stop_s)


def _read_unit(path: Path) -> _Command:
    text = with_drop_ins(path)
    (program, *arguments), environment = read_unit(text)
    return _Command(program.lstrip("@-:+!|"), arguments, environment, stop_seconds(text))


def _parsed(add_flags: Callable[[argparse.ArgumentParser], None], command: _Command) -> dict[str, Any]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    return vars(parser.parse_args(command.arguments[1:]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"a service definition has a command line of another version: {message}", remedy="install it again"
        )
