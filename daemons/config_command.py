"""``kakeya config``: which settings would hold here, where each came from, and a sample file with all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from daemons.addresses import check_addresses
from daemons.console import Console
from kakeya_zmq.config import ResolvedSettings, find_config_file, resolve_settings
from kakeya_zmq.options import ALL_ROLES, OPTIONS, Option, options_for

SAMPLE_HEAD = """\
# Settings of kakeya's daemons. Copy it to ~/.kakeya/kakeya.toml, or name it with --config.
#
# Every setting is here, commented out, with its default. Keys at the top are for every role that has the setting; a table
# named after a role ([primary], [worker], [cache]) holds what is for that role alone, and wins over the top.
# Flags and KAKEYA_... variables win over this file. `kakeya config show` tells what holds, and why.
# Keys (fleet.psk and the like) never stand in here: only the files that hold them.
"""
LINE_CHARACTERS = 100


def show_config(console: Console, roles: Sequence[str], config: str) -> int:
    """Show the effective settings of some roles, or all; the exit code.

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
        console.table(role, ("setting", "value", "from"), [(name, _shown(value), origin) for name, value, origin in rows])
        answers[role] = {name: {"value": value, "from": origin} for name, value, origin in rows}
    if console.json_mode:
        console.result({"file": str(file) if file is not None else None, "roles": answers})
    return 0


def effective(role: str, resolved: ResolvedSettings) -> list[tuple[str, Any, str]]:
    """(setting, value, where it came from) of what a role knows; made-up defaults (node id, files) are shown as made."""
    known = {option.name for option in options_for(role)}
    names = [field.name for field in fields(resolved.settings) if field.name in known]
    return [(name, getattr(resolved.settings, name), resolved.origins[name]) for name in names]


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


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
