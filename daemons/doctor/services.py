"""The services that launchd or systemd keep running here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.service_definitions import AGENTS, UNITS, agents_folder, units_folder

ASK_TIMEOUT_S: Final = 10.0


def examine_services() -> Iterator[Finding]:
    """Only what is installed is asked for; a machine without services is in order."""
    found = list(_launchd() if sys.platform == "darwin" or _has_agents() else _systemd())
    yield from found or [ok("services", "none are installed here")]


def _has_agents() -> bool:
    return shutil.which("launchctl") is not None and any((agents_folder() / f"{name}.plist").exists() for name in AGENTS)


def _launchd() -> Iterator[Finding]:
    for label in AGENTS:
        plist = agents_folder() / f"{label}.plist"
        if plist.exists():
            code, text = _ask("launchctl", "print", f"gui/{os.getuid()}/{label}")
            yield judge_agent(label, code, text, str(plist))


def judge_agent(label: str, code: int, printed: str, plist: str) -> Finding:
    """What ``launchctl print`` says of an agent: loaded, running, how it ended last."""
    domain = f"gui/{os.getuid()}"
    if code != 0:
        return problem("services", f"{label} is installed and not loaded", f"launchctl bootstrap {domain} {plist}")
    state = re.search(r"^\s*state = (.+)$", printed, flags=re.MULTILINE)
    ended = re.search(r"^\s*last exit code = (-?\d+)", printed, flags=re.MULTILINE)
    if state is not None and state[1].strip() == "running":
        return ok("services", f"{label} runs")
    why = f", its last exit code is {ended[1]}" if ended is not None else ""
    remedy = f"look at its log (kakeya logs); launchctl kickstart -k {domain}/{label}"
    return problem("services", f"{label} does not run{why}", remedy)


def _systemd() -> Iterator[Finding]:
    folder = units_folder()
    for name in UNITS:
        if (folder / f"{name}.service").exists():
            code, text = _ask("systemctl", "--user", "is-active", f"{name}.service")
            yield judge_unit(name, code, text.strip())


def judge_unit(name: str, code: int, state: str) -> Finding:
    if code == 0 and state == "active":
        return ok("services", f"{name} runs")
    if code < 0:
        return warning(
            "services", f"{name} is installed and systemd does not answer", "loginctl enable-linger; log in again"
        )
    return problem(
        "services", f"{name} is installed and {state or 'not running'}", f"systemctl --user restart {name}; kakeya logs"
    )


def _ask(*command: str) -> tuple[int, str]:
    """Exit code and output; -1 when the command is missing or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout
