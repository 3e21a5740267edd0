"""Tell of a service definition that is installed already whether it is for another home.

    python deploy/installed_home.py DEFINITION HOME

A user has one service of a role: one for another home would take its place. Standard output is that other home; nothing when
the definition is for HOME, or says no home. Needs the standard library only.
"""

from __future__ import annotations

import os
import plistlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

UNIT_HOME = re.compile(r'^Environment="KAKEYA_HOME=(.*)"$', re.MULTILINE)


def installed_home(definition: Path) -> str:
    """The home of a definition that an install script has made; empty when it says none or cannot be read."""
    try:
        data = definition.read_bytes()
        if definition.suffix == ".plist":
            return str(plistlib.loads(data)["EnvironmentVariables"]["KAKEYA_HOME"])
        match = UNIT_HOME.search(data.decode("utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, plistlib.InvalidFileException, ExpatError):
        return ""
    return re.sub(r"\\(.)", r"\1", match.group(1)).replace("%%", "%") if match else ""


def main(arguments: Sequence[str]) -> int:
    found = installed_home(Path(arguments[0]))
    if found and os.path.realpath(found) != os.path.realpath(arguments[1]):
        print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
