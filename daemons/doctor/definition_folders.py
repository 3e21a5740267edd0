"""The folders that a service definition counts on: those of its logs, and the one that its program starts in.

launchd and systemd make the files of logs, and no folder for them: where one is missing, the program is never started, and
nothing is written that would tell why.
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from daemons.service_definitions import UNREADABLE
from daemons.unit_files import with_drop_ins

LOGS: Final = "writes its log to"
STARTS: Final = "starts in"
_PLIST_KEYS: Final = {"StandardOutPath": LOGS, "StandardErrorPath": LOGS, "WorkingDirectory": STARTS}
_UNIT_KEYS: Final = {"StandardOutput": LOGS, "StandardError": LOGS, "WorkingDirectory": STARTS}
_FILE: Final = re.compile(r"(?:file|append|truncate):(.*)")


def needed_folders(definition: Path) -> dict[Path, str]:
    """What each is for; only absolute paths that leave nothing for the service manager to fill in."""
    found: dict[Path, str] = {}
    try:
        for what, text in _of_plist(definition) if definition.suffix == ".plist" else _of_unit(definition):
            path = Path(text)
            if path.is_absolute():
                found.setdefault(path.parent if what == LOGS else path, what)
    except UNREADABLE:  # told elsewhere
        return {}
    return found


def _of_plist(path: Path) -> Iterator[tuple[str, str]]:
    document = plistlib.loads(path.read_bytes())
    for key, what in _PLIST_KEYS.items():
        if key in document:
            yield what, str(document[key])


def _of_unit(path: Path) -> Iterator[tuple[str, str]]:
    lines = (line.partition("=") for line in with_drop_ins(path).splitlines())
    last = {key.strip(): value.strip() for key, _, value in lines}
    for key, what in _UNIT_KEYS.items():
        value = last.get(key, "")
        file = _FILE.fullmatch(value)
        text = value if what == STARTS else file[1] if file is not None else ""
        if "%" not in text.replace("%%", ""):
            yield what, text.replace("%%", "%")
