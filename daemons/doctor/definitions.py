"""What the installed service definitions say.

Each must start a program that is there, with settings that its daemon takes and that no file contradicts, give it time to
drain, and leave the other services their ports.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from daemons.addresses import meet, own_ports
from daemons.doctor.definition_folders import needed_folders
from daemons.doctor.finding import Finding, problem, warning
from daemons.doctor.site import naming_file
from daemons.service_definitions import (
    DASHBOARD,
    INSTALL_COMMANDS,
    REQUIRED,
    ServiceDefinition,
    definition_files,
    pinned_values,
    read_definition,
    shown,
)
from kakeya_zmq.config import CONFIG_FILE, ResolvedSettings
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.option_values import ALL_ROLES
from wire.errors import ConfigError

HEAD_BYTES: Final = 4096
"""Far more than the lines of a script that name its interpreter."""
_INTERPRETER: Final = re.compile(rb"#!\s*(\S+)")
_INSTEAD: Final = re.compile(rb"\'\'\'exec\' (?:\"([^\"$]+)\"|\'([^\'$]+)\'|([^\s\"\'$]+))")
"""What pip writes in the place of a path that a first line cannot hold, since it is long or has spaces."""


def examine_definitions() -> Iterator[Finding]:
    """Only what is wrong is told."""
    services = []
    for path in definition_files():
        try:
            services.append(read_definition(path))
        except ConfigError as error:
            yield problem("services", f"{path.stem}: {error.message}", error.remedy or _again(path.stem))
    for service in services:
        yield from judge_role(service)
        yield from judge_program(service)
        yield from judge_folders(service)
        if service.role in ALL_ROLES:
            yield from judge_definition(service)
    yield from judge_shared_ports(services)


def _again(name: str) -> str:
    return f"run its install script again: {INSTALL_COMMANDS[name]}"


# --- the program -----------------------------------------------------------------------------------------------------


def judge_program(service: ServiceDefinition) -> Iterator[Finding]:
    """Whether what the definition starts is there: a virtual environment may have been moved or removed since."""
    fault = fault_of(service.program)
    if fault:
        yield problem("services", f"{service.name} starts {service.program}, {fault}", _again(service.name))


def fault_of(program: str) -> str:
    """Why a program cannot be started; empty when it can, or when its path is for the service manager to find."""
    if not os.path.isabs(program):
        return ""
    if not os.path.exists(program):
        return "which does not exist"
    if not os.path.isfile(program) or not os.access(program, os.X_OK):
        return "which is no program"
    interpreter = interpreter_of(program)
    if interpreter and not os.path.exists(interpreter):
        return f"whose interpreter {interpreter} does not exist"
    return ""


def interpreter_of(program: str) -> str:
    """What a script is run by; empty when it is none, or cannot be read."""
    try:
        with open(program, "rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError:
        return ""
    first = _INTERPRETER.match(head)
    instead = _INSTEAD.search(head)
    if first is None:
        return ""
    return os.fsdecode(next(filter(None, instead.groups())) if instead is not None else first[1])


def judge_role(service: ServiceDefinition) -> Iterator[Finding]:
    """Whether the program would know what it is told to be. What begins with a dash is an interpreter's affair."""
    if service.role in (*ALL_ROLES, DASHBOARD) or service.role.startswith("-"):
        return
    text = f"{service.name} starts `kakeya {service.role}`, which is none of {', '.join((*ALL_ROLES, DASHBOARD))}"
    yield problem("services", text, _again(service.name))


def judge_folders(service: ServiceDefinition) -> Iterator[Finding]:
    """Whether the folders are there that the service manager needs, and does not make, before it starts the program."""
    for folder, what in needed_folders(service.path).items():
        if not folder.is_dir():
            text = f"{service.name} {what} {folder}, which is no folder, so it cannot be started"
            yield problem("services", text, f"mkdir -p '{folder}', or {_again(service.name)}")


# --- settings --------------------------------------------------------------------------------------------------------


def judge_definition(service: ServiceDefinition) -> Iterator[Finding]:
    """Whether a daemon takes its definition, has time to drain, and is told by its file what the file says."""
    file = service.config_file
    try:
        resolved = service.settings()
        pinned = pinned_values(service.role, service.flags, file)
    except ConfigError as error:
        text = f"{service.name}: {naming_file(error.message, file)}"
        yield problem("services", text, error.remedy or "see `kakeya config sample`")
        return
    for each in pinned:
        flag = "--" + each.name.replace("_", "-")
        text = f"{service.name} runs with {flag} {shown(each.given)}, and the configuration file says {shown(each.in_file)}"
        variable = REQUIRED[service.role].get(each.name)
        again = f"with its value in {variable}" if variable else f"without the variable for {flag}"
        yield warning("services", text, f"take {each.name} out of {file}, or install it again {again}")
    yield from judge_drain(service, resolved)


def judge_drain(service: ServiceDefinition, resolved: ResolvedSettings) -> Iterator[Finding]:
    """Whether a daemon that is told to stop may finish what runs, as long as it is configured to."""
    drain_s, stop_s = resolved.settings.drain_s, service.stop_s
    if stop_s is None or drain_s < stop_s:
        return
    in_definition = resolved.origins["drain_s"] not in ("file", "default")
    place = service.path if in_definition else service.config_file or CONFIG_FILE
    text = f"{service.name} may take {drain_s:g} s to drain (drain_s), and its definition has it killed after {stop_s:g} s"
    yield warning("services", text, f"set drain_s to less than {stop_s:g} in {place}, and restart the service")


# --- ports -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a service serves, by which flag."""

    service: ServiceDefinition
    flag: str
    address: Address

    def meets(self, other: _Place) -> bool:
        """Whether two services, under one service manager, would have the same port of the same address."""
        kinds = {self.service.path.suffix, other.service.path.suffix}
        return self.service is not other.service and len(kinds) == 1 and meet(self.address, other.address)


def judge_shared_ports(services: Iterable[ServiceDefinition]) -> Iterator[Finding]:
    """Of two services that serve at one port only the first that starts gets it; the other tries again for ever."""
    places = [place for service in services for place in _places(service)]
    for one, other in combinations(places, 2):
        if one.meets(other):
            names = f"{one.service.name} ({one.flag}) and {other.service.name} ({other.flag})"
            remedy = f"give one of them another: in its table of {CONFIG_FILE}, or by its install script"
            yield warning("services", f"{names} use the same port {one.address.port}", remedy)


def _places(service: ServiceDefinition) -> Iterator[_Place]:
    """Fixed ports only. Settings that cannot be used are told elsewhere."""
    with contextlib.suppress(ConfigError):
        if service.role == DASHBOARD:
            address = parse_address(service.dashboard_bind)
            if address.port:
                yield _Place(service, "--bind", address)
        elif service.role in ALL_ROLES:
            for name, address in own_ports(service.settings().settings):
                yield _Place(service, "--" + name.replace("_", "-"), address)
