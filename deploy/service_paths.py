"""Open a systemd unit to what its daemon uses outside of the home.

    python deploy/service_paths.py ARGUMENTS HOME UNIT

ARGUMENTS is the command line of the service (a JSON list), HOME the folder of keys and state, UNIT the rendered unit,
which may write to the home alone, and has a /tmp of its own. It is changed in place: ``ReadWritePaths=`` for each folder
that the daemon writes to elsewhere, and the machine's /tmp where it uses something in there. The first line of standard
output is what the user should know, or empty; the others are the folders that have to be made. What could not work is one
line and exit code 2. Needs the standard library only.

What a daemon uses is what its command line and its configuration file name; what they leave out is under the home, or beside
the fleet's key. A file that cannot be understood here is left to the daemon's own check of its settings.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
PATHS = (
    "model",
    "fleet_psk_file",
    "tenant_key_file",
    "roster_file",
    "ready_file",
    "state",
    "api_key_file",
    "telemetry_key_file",
)
"""Settings that are paths, as keys of kakeya.toml; with dashes they are flags."""


class PathError(Exception):
    """The service could not use a path; the text is for the user."""


@dataclass(frozen=True)
class Uses:
    """``paths``: everything the service uses. ``written``: by setting, the files it writes."""

    paths: tuple[Path, ...]
    written: Mapping[str, Path]


def absolute(text: str, home: Path) -> Path:
    """A path as the daemon takes it: it starts in the home."""
    return Path(os.path.normpath(home / Path(text).expanduser()))


def settings_of(arguments: Sequence[str], home: Path) -> dict[str, str]:
    """The paths that the command line names, and those of the configuration file that it does not."""
    flags = {"--" + name.replace("_", "-"): name for name in (*PATHS, "config", "tenant_id")}
    given = {flags[flag]: value for flag, value in pairwise(arguments) if flag in flags}
    role = arguments[1]
    if role == "dashboard":
        return given
    file = absolute(given["config"], home) if "config" in given else home / "kakeya.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):  # missing, or the daemon says what is wrong with it
        document = {}
    table = document.get(role)
    merged: dict[str, Any] = {**document, **(table if isinstance(table, dict) else {})}
    written = {name: value for name, value in merged.items() if name in flags.values() and isinstance(value, str) and value}
    return {**written, **given}


def uses_of(arguments: Sequence[str], home: Path) -> Uses:
    """What a service with this command line uses.

    Raises:
        PathError: a path begins with the home folder of an unknown user.
    """
    settings = settings_of(arguments, home)
    try:
        paths = {name: absolute(settings[name], home) for name in (*PATHS, "config") if name in settings}
    except RuntimeError:  # pathlib's way of saying that nobody has such a home folder
        raise PathError("a path begins with the home folder of a user who is not known: write it in full") from None
    paths.setdefault("config", home / "kakeya.toml")
    written = {name: paths[name] for name in ("state", "ready_file") if name in paths}
    if arguments[1] in ("primary", "worker"):
        beside = paths.get("fleet_psk_file", home / "fleet.psk").parent
        tenant = paths.get("tenant_key_file", beside / "tenants" / f"{settings.get('tenant_id', 'default')}.key")
        if not tenant.exists():  # it is made at the first start, and only read from then on
            written["tenant_key_file"] = tenant
    return Uses((Path(arguments[0]), home, *paths.values()), written)


def within(path: Path, folders: Sequence[Path]) -> bool:
    """Whether a path, or what it leads to, is in one of the folders."""
    real = Path(os.path.realpath(path))
    return any(each.is_relative_to(folder) for each in (path, real) for folder in folders)


def folders_to_open(uses: Uses, home: Path) -> list[Path]:
    """The folders outside of the home that the service writes to.

    Raises:
        PathError: one is not there and cannot be made, or may not be written to.
    """
    inside = Path(os.path.realpath(home))
    found: list[Path] = []
    for name, path in uses.written.items():
        folder = Path(os.path.realpath(path)).parent
        if folder.is_relative_to(inside) or folder in found:
            continue
        flag = "--" + name.replace("_", "-")
        where = f"{flag} {path}"
        if "\n" in str(folder):
            raise PathError(f"{flag} has a line break in it")
        if folder.exists():
            if not folder.is_dir():
                raise PathError(f"{where}: {folder} is no folder")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PathError(f"{where}: this user may not write to {folder}")
        elif not folder.parent.is_dir():
            raise PathError(f"{where}: {folder} cannot be made: there is no {folder.parent}")
        elif not os.access(folder.parent, os.W_OK | os.X_OK):
            raise PathError(f"{where}: {folder} cannot be made: this user may not write to {folder.parent}")
        found.append(folder)
    return found


def clean(path: Path) -> str:
    """A path in one line."""
    return str(path).replace("\n", "?")


def quoted(path: Path) -> str:
    """A path in a unit (systemd.syntax(7))."""
    text = str(path).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def opened(unit: str, folders: Sequence[Path], *, own_temporary: bool) -> str:
    """The unit, with these folders to write to; without ``own_temporary`` it sees the /tmp of the machine."""
    more = [*folders, *(() if own_temporary else TEMPORARY)]
    lines: list[str] = []
    for line in unit.splitlines():
        if line == "PrivateTmp=yes" and not own_temporary:
            line = "PrivateTmp=no"
        lines.append(line)
        if line.startswith("ReadWritePaths="):
            lines += [f"ReadWritePaths={quoted(folder)}" for folder in more]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    command: list[str] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    home, unit = Path(arguments[1]), Path(arguments[2])
    try:
        uses = uses_of(command, home)
        folders = folders_to_open(uses, home)
    except PathError as error:
        print(f"kakeya: error: {error}", file=sys.stderr)
        return 2
    temporary = [path for path in uses.paths if within(path, TEMPORARY)]
    unit.write_text(opened(unit.read_text(encoding="utf-8"), folders, own_temporary=not temporary), encoding="utf-8")
    print(f"the service sees this machine's /tmp, since it uses {clean(temporary[0])}" if temporary else "")
    for folder in folders:
        if not folder.exists():
            print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
