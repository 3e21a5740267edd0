"""Name the KAKEYA_ variables of the environment that do not reach a service; a service starts without this environment.

    python deploy/service_environment.py TEMPLATE

One line on standard output for each: misspelt names, and settings that the service definition does not pass on. Values are
never shown. Needs the standard library only.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
NAME = re.compile(r"\bKAKEYA_[A-Z0-9_]+")
PASSED_ON = re.compile(r"@\{(KAKEYA_[A-Z0-9_]+)")
SETTING = re.compile(r"((?:^# .*\n)+?)^# ([a-z0-9_]+) = ", re.MULTILINE)
ROLES = re.compile(r"\[((?:primary|worker|cache)(?:, (?:primary|worker|cache))*)\]")
OTHERS = frozenset(
    {
        # For the kakeya command itself.
        "KAKEYA_DEBUG",
        "KAKEYA_MODEL_CACHE",
        "KAKEYA_NETWORK_API_KEY",
        # Of an earlier system's runbook; documented as ignored.
        "KAKEYA_SNAPSHOT_BYTES_PER_TOKEN",
        "KAKEYA_WORKER_MAX_CONCURRENT_JOBS",
        "KAKEYA_WORKER_RTT_MS",
    }
)
"""Names that are right, though no service is made from them."""


def settings_of(sample: str, role: str) -> dict[str, str]:
    """The settings of a role in the text of kakeya.sample.toml: variable of the environment → key of the file."""
    found: dict[str, str] = {}
    for match in SETTING.finditer(sample):
        roles = ROLES.search(match.group(1).replace("\n# ", " "))
        if roles is None or role in roles.group(1).split(", "):
            found["KAKEYA_" + match.group(2).upper()] = match.group(2)
    return found


def script_names() -> frozenset[str]:
    """Every variable that the scripts and templates of this folder name."""
    files = [*DEPLOY.glob("*.sh"), *DEPLOY.glob("launchd/*.plist"), *DEPLOY.glob("systemd/*.service")]
    names = {name for file in files for name in NAME.findall(file.read_text(encoding="utf-8"))}
    return frozenset(name for name in names if not name.endswith("_"))


def source_of(flag: str, template: str) -> str:
    """The variable that a template takes the value of ``flag`` from; empty when it does not pass the flag."""
    match = re.search(rf"(?:>|\s){re.escape(flag)}(?:</string>)?[\s\\]+(?:<string>)?@\{{(KAKEYA_[A-Z0-9_]+)", template)
    return match.group(1) if match else ""


def remarks(template: str, role: str, sample: str, known: frozenset[str], environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that has no effect on the service.

    Args:
        template: text of the service definition, not rendered.
        role: the daemon it starts: primary, worker, cache or dashboard.
        sample: text of kakeya.sample.toml.
        known: names that are right, though this service may not use them.
        environment: what the user has set; an empty value counts as not set.
    """
    passed_on = frozenset(PASSED_ON.findall(template))
    settings = {} if role == "dashboard" else settings_of(sample, role)
    file = "the file of KAKEYA_CONFIG" if environment.get("KAKEYA_CONFIG") else "kakeya.toml, in the home folder"
    lines: list[str] = []
    for name in sorted(environment):
        if not NAME.fullmatch(name) or not environment[name].strip() or name in passed_on:
            continue
        if name in settings:
            source = source_of("--" + settings[name].replace("_", "-"), template)
            instead = f"{source} does" if source else f"put {settings[name]} into {file}"
            lines.append(f"{name} does not reach the service: {instead}")
        elif name not in known:
            near = difflib.get_close_matches(name, sorted(known | passed_on | settings.keys()), n=1, cutoff=0.8)
            lines.append(f"{name} is not known and has no effect" + (f": did you mean {near[0]}?" if near else ""))
    return lines


def role_of(template: str) -> str:
    """The daemon that a service definition starts."""
    match = re.search(r"COMMAND\}(?:</string>)?[\s\\]+(?:<string>)?([a-z]+)", template)
    return match.group(1) if match else ""


def main(arguments: Sequence[str]) -> int:
    template = Path(arguments[0]).read_text(encoding="utf-8")
    sample = (DEPLOY / "kakeya.sample.toml").read_text(encoding="utf-8")
    # A setting of another role is a right name as well.
    settings = frozenset(name for role in ("primary", "worker", "cache") for name in settings_of(sample, role))
    known = script_names() | OTHERS | settings
    for line in remarks(template, role_of(template), sample, known, os.environ):
        print(f"kakeya: warning: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
