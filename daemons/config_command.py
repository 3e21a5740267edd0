"""``kakeya config``: which settings would hold here, where each came from, and a sample file with all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from daemons.addresses import check_addresses
from daemons.console import Console
from daemons.environment_names import unknown_variables
from daemons.service_definitions import installed_definitions, pinned_values, shown
from kakeya_zmq.config import ResolvedSettings, find_config_file, resolve_settings
from kakeya_zmq.option_values import ALL_ROLES, Option
from kakeya_zmq.options import OPTIONS, options_for
from wire.errors import ConfigError

SAMPLE_HEAD = """\
# Settings of kakeya's daemons. Copy it to ~/.kakeya/kakeya.toml, or name it with --config.
#
# Every setting is here, commented out, with its default. Keys at the top are for every role that has the setting; a table
# named after a role ([primary], [worker], [cache]) holds what is for that role alone, and wins over the top.
# Flags and KAKEYA_... variables win over this file. `kakeya config show` tells what holds, and why.
# Keys (fleet.psk and the like) never stand in here: only the files that hold them.
"""
LINE_CHARACTERS = 100
SERVICE_ORIGINS = {"flag": "service definition", "environment": "service definition"}


def show_config(console: Console, roles: Sequence[str], config: str) -> int:
    """Show the effective settings of some roles, or all, and of the services that are installed here; the exit code.

    Raises:
        ConfigError: a value of the environment or the file cannot be used.
    """
    file = find_config_file(config)
    answers: dict[str, Any] = {}
    console.say(f"configuration file: {file if file is not None else 'none'}")
    for role in roles or ALL_ROLES:
        resolved = resolve_settings(role, {}, file=file)
        check_addresses(resolved)
        rows = effective(role, resolved)
        console.table(role, ("setting", "value", "from"), [(name, shown(value), origin) for name, value, origin in rows])
        answers[role] = _by_name(rows)
    services = _show_services(console, roles or ALL_ROLES)
    unknown = unknown_variables()
    for each in unknown:
        console.say(f"warning: {each}")
    if console.json_mode:
        names = {each.name: each.suggestion or None for each in unknown}
        told = {"file": str(file) if file is not None else None, "roles": answers, "services": services}
        console.result({**told, "unknown_variables": names})
    return 0


def _show_services(console: Console, roles: Sequence[str]) -> dict[str, Any]:
    """What the installed services run with: they see their definition and its file, and not this environment."""
    answers: dict[str, Any] = {}
    for service in installed_definitions():
        if service.role not in roles:
            continue
        try:
            resolved = service.settings()
        except ConfigError as error:
            console.say(f"warning: {service.name}: {error}")
            answers[service.name] = {"role": service.role, "definition": str(service.path), "error": str(error)}
            continue
        rows = [
            (name, value, SERVICE_ORIGINS.get(origin, origin)) for name, value, origin in effective(service.role, resolved)
        ]
        title = f"{service.name}, installed as a service ({service.role}); what is not shown has its default"
        given = [(name, shown(value), origin) for name, value, origin in rows if origin != "default"]
        console.table(title, ("setting", "value", "from"), given)
        for pinned in pinned_values(service.role, service.flags, service.config_file):
            console.say(f"warning: {service.name}: {pinned}")
        file = service.config_file
        answers[service.name] = {
            "role": service.role,
            "definition": str(service.path),
            "file": str(file) if file is not None else None,
            "settings": _by_name(rows),
        }
    return answers


def _by_name(rows: Sequence[tuple[str, Any, str]]) -> dict[str, dict[str, Any]]:
    return {name: {"value": value, "from": origin} for name, value, origin in rows}


def effective(role: str, resolved: ResolvedSettings) -> list[tuple[str, Any, str]]:
    """(setting, value, where it came from) of what a role knows; made-up defaults (node id, files) are shown as made."""
    known = {option.name for option in options_for(role)}
    names = [field.name for field in fields(resolved.settings) if field.name in known]
    return [(name, getattr(resolved.settings, name), resolved.origins[name]) for name in names]


def sample_text() -> str:
    """The sample file: deploy/kakeya.sample.toml is this."""
    return SAMPLE_HEAD + "".join(f"\n{_sample(option)}" for option in OPTIONS)


def _sample(option: Option) -> str:
    roles = "" if len(option.roles) == len(ALL_ROLES) else f" [{', '.join(option.roles)}]"
    choices = f"; one of {', '.join(option.choices)}" if option.choices else ""
    lines = _wrapped(f"{option.help}{choices}{roles}")
    return "\n".join([*(f"# {line}" for line in lines), f"# {option.name} = {toml_value(option.default)}"]) + "\n"


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > LINE_CHARACTERS:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def toml_value(value: Any) -> str:
    """A default as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(json.dumps(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
