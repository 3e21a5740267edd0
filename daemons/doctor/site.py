"""What is examined: this machine's settings, keys and nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from daemons.fleet import Member, load_fleet
from daemons.service_definitions import installed_definitions
from kakeya_zmq.config import Settings, find_config_file, kakeya_home, resolve_settings
from kakeya_zmq.option_values import ALL_ROLES
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Site:
    """``settings``: by role; empty when ``config_error`` says what is wrong with them.

    ``members``: what ``kakeya up`` has started and still runs; ``ended``: what it has started and nobody has stopped since.
    """

    home: Path
    psk_file: Path
    settings: Mapping[str, Settings] = field(default_factory=dict)
    config_error: ConfigError | None = None
    config_file: Path | None = None
    members: tuple[Member, ...] = ()
    addresses: tuple[str, ...] = ()
    quick: bool = False
    services: Mapping[str, Path | None] = field(default_factory=dict)
    """Those whose settings are judged in the place of what the environment would give their roles, and their files."""
    ended: tuple[Member, ...] = ()
    notes_error: ConfigError | None = None
    """Why nothing is known of what `kakeya up` started."""


def this_site(addresses: tuple[str, ...], *, config: str, quick: bool) -> Site:
    """The settings as daemons that are started here would see them; of a role that is a service here, the service's."""
    home = kakeya_home()
    file = find_config_file(config)
    try:
        settings = {role: resolve_settings(role, {}, file=file).settings for role in ALL_ROLES}
    except ConfigError as error:
        return Site(home, home / "fleet.psk", config_error=error, config_file=file, addresses=addresses, quick=quick)
    services: dict[str, Path | None] = {}
    for service in installed_definitions():
        with contextlib.suppress(ConfigError):  # daemons.doctor.definitions tells why
            if service.role in settings:
                settings[service.role] = service.settings().settings
                services[service.name] = service.config_file
    psk_file = Path(settings["primary"].fleet_psk_file)
    try:
        noted = load_fleet()
    except ConfigError as error:
        return Site(home, psk_file, settings, None, file, (), addresses, quick, services, notes_error=error)
    alive = tuple(member for member in noted if member.alive)
    ended = tuple(member for member in noted if member not in alive)
    return Site(home, psk_file, settings, None, file, alive, addresses, quick, services, ended)


def naming_file(message: str, file: Path | None) -> str:
    """What is wrong in "the configuration file", with the name of the one that was read."""
    if file is None or str(file) in message:
        return message
    return message.replace("the configuration file", f"the configuration file {file}", 1)
