"""Render a service definition of this folder for one machine: launchd property lists and systemd user units.

    python deploy/render_service.py TEMPLATE OUTPUT        write it; it holds no secret
    python deploy/render_service.py TEMPLATE -             print it
    python deploy/render_service.py --arguments TEMPLATE OUTPUT    only its command line, as a JSON list

Templates hold variables of the environment:

    @{NAME}           its value; an error when it is not set
    @{NAME:-TEXT}     its value, or TEXT when it is empty or not set
    @{NAME:=TEXT}     TEXT when it is 1, true, yes or on, TEXT=0 when it is 0, false, no or off; nothing when it is not set

An argument that renders to nothing is left out, together with the flag before it: a definition says what its user has said,
and leaves the rest to kakeya.toml. Values are put into the parsed document, or quoted as systemd reads them, so that no
value can change its structure. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import plistlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = re.compile(r"@\{([A-Z][A-Z0-9_]*)(?::([-=])([^}]*))?\}")
ON = frozenset({"1", "true", "yes", "on"})
OFF = frozenset({"0", "false", "no", "off"})


class TemplateError(Exception):
    """A value is missing or unusable; the text is for the user."""


def substitute(text: str, environment: Mapping[str, str], escape: Callable[[str], str] = str) -> str:
    """``text`` with its variables replaced; each value as ``escape`` writes it.

    Raises:
        TemplateError: a variable without a default is not set, a switch is neither on nor off, or a value has a line break.
    """

    def value_of(match: re.Match[str]) -> str:
        return escape(plain(match))

    def plain(match: re.Match[str]) -> str:
        name, kind, rest = match.group(1), match.group(2), match.group(3)
        value = environment.get(name, "").strip()
        if "\n" in value or "\r" in value or "\0" in value:
            raise TemplateError(f"{name} has a line break in it")
        if kind == "=":
            if value and value.lower() not in ON | OFF:
                raise TemplateError(f"{name} is {value!r}: set it to 1 or 0")
            # Off is said, too: what a file says would hold otherwise.
            return "" if not value else str(rest) if value.lower() in ON else f"{rest}=0"
        if value:
            return value
        if kind is None:
            raise TemplateError(f"{name} is not set")
        return substitute_default(str(rest))

    def substitute_default(rest: str) -> str:
        home = environment.get("HOME", "")
        return home + rest[1:] if rest == "~" or rest.startswith("~/") else rest

    return VARIABLE.sub(value_of, text)


def render_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A command line's arguments; those that render to nothing are left out, with the flag before them."""
    rendered: list[str] = []
    for argument in arguments:
        value = substitute(argument, environment)
        if value or not VARIABLE.search(argument):
            rendered.append(value)
        elif ":=" not in argument and rendered and rendered[-1].startswith("--"):
            rendered.pop()
    return rendered


def render_plist(data: bytes, environment: Mapping[str, str]) -> bytes:
    """A launchd property list (XML) with every string rendered."""

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return substitute(value, environment)
        if isinstance(value, list):
            if key == "ProgramArguments":
                return render_arguments(value, environment)
            return [walk(item) for item in value]
        if isinstance(value, dict):
            walked = {name: walk(item, name) for name, item in value.items()}
            return {name: item for name, item in walked.items() if item != ""}
        return value

    return plistlib.dumps(walk(plistlib.loads(data)), sort_keys=False)


def render_unit(text: str, environment: Mapping[str, str]) -> str:
    """A systemd unit. ExecStart stands on lines of its own, one argument a line, each line but the last ending in ``\\``."""
    lines: list[str] = []
    command: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("ExecStart="):
            command = []
            line = line.removeprefix("ExecStart=")
        if command is None:
            lines.append(render_unit_line(line, environment) if VARIABLE.search(line) else line)
            continue
        command.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            program, *arguments = render_arguments(command, environment)
            quoted = [quote_program(program), *(quote_unit(argument) for argument in arguments)]
            lines.append("ExecStart=" + " ".join(quoted))
            command = None
    return "\n".join(lines) + "\n"


def render_unit_line(line: str, environment: Mapping[str, str]) -> str:
    """Another line of a unit: ``KEY="…"`` is read with quotes and escapes, ``KEY=…`` to its end as it is."""
    if '="' in line:
        return substitute(line, environment, lambda value: _escape_quoted(value.replace("%", "%%")))
    rendered = substitute(line, environment, lambda value: value.replace("%", "%%"))
    # A last backslash would join the next line to this one; a path means the same with a slash after it.
    return rendered + "/" if rendered.endswith("\\") else rendered


def _escape_quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def unit_arguments(text: str) -> list[str]:
    """The lines of a unit template's ExecStart, not rendered."""
    lines = iter(text.splitlines())
    command: list[str] = []
    for line in lines:
        if line.startswith("ExecStart="):
            line = line.removeprefix("ExecStart=")
            while line.endswith("\\"):
                command.append(line.removesuffix("\\").strip())
                line = next(lines, "")
            command.append(line.strip())
    return command


def quote_unit(argument: str) -> str:
    """An argument as ExecStart reads it (systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers")."""
    return _quoted(argument).replace("$", "$$")


def quote_program(path: str) -> str:
    """The first word of ExecStart: variables are not replaced in it, so ``$`` stands for itself.

    Raises:
        TemplateError: systemd starts no program with such a path.
    """
    if re.search(r"[\"'\\]", path):
        raise TemplateError(f"systemd starts no program with a quote or backslash in its path: {path}")
    return _quoted(path)


def _quoted(path: str) -> str:
    escaped = _escape_quoted(path.replace("%", "%%"))
    return f'"{escaped}"' if re.search(r"[\s\"';\\]", path) or not path else escaped


def command_line(template: Path, environment: Mapping[str, str]) -> list[str]:
    """The command of a service, rendered; what :func:`render` puts into its definition."""
    data = read(template)
    if template.suffix == ".plist":
        arguments = plistlib.loads(data)["ProgramArguments"]
    else:
        arguments = unit_arguments(data.decode("utf-8"))
    return render_arguments(arguments, environment)


def read(template: Path) -> bytes:
    try:
        return template.read_bytes()
    except OSError as error:
        raise TemplateError(f"{template.name} cannot be read: {error.strerror}") from None


def render(template: Path, environment: Mapping[str, str]) -> bytes:
    """The service definition of ``template`` for this environment.

    Raises:
        TemplateError: see :func:`substitute`; or the template cannot be read.
    """
    data = read(template)
    if template.suffix == ".plist":
        return render_plist(data, environment)
    return render_unit(data.decode("utf-8"), environment).encode("utf-8")


def write_whole(target: Path, data: bytes) -> None:
    """Write a file under another name and rename it, so that nobody reads half of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Render a service definition for this machine.")
    parser.add_argument("template", type=Path)
    parser.add_argument("output", help="file to write, or - for standard output")
    parser.add_argument("--arguments", action="store_true", help="only the command line, as a JSON list")
    options = parser.parse_args(arguments)
    try:
        if options.arguments:
            data = json.dumps(command_line(options.template, os.environ)).encode("utf-8")
        else:
            data = render(options.template, os.environ)
        if options.output == "-":
            sys.stdout.buffer.write(data)
        else:
            write_whole(Path(options.output), data)
    except (TemplateError, OSError) as error:
        print(f"kakeya: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
