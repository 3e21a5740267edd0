"""Python, packages and libzmq."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator

from daemons.doctor.finding import Finding, ok, problem, warning
from kakeya_zmq import __version__
from kakeya_zmq.io.sockets import check_libzmq
from wire.errors import ConfigError

PYTHON_MIN = (3, 11)
DISTRIBUTION = "kakeya-zmq"
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?P<operator>[<>=!~]=?)?\s*(?P<version>[0-9][0-9.]*)?"
)


def examine_software() -> Iterator[Finding]:
    yield judge_python(tuple(sys.version_info[:3]))
    try:
        check_libzmq()
    except ConfigError as error:
        yield problem("libzmq", error.message, error.remedy)
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield warning("packages", f"{DISTRIBUTION} is not installed as a package", "run: pip install -e .")
        return
    found = list(judge_packages(requirements, installed_version))
    yield from found or [ok("packages", f"{DISTRIBUTION} {__version__} and all that it needs")]


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_python(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version < PYTHON_MIN:
        return problem("python", f"Python {text} is too old", "use Python 3.11 or newer")
    return ok("python", f"Python {text} on {sys.platform}")


def judge_packages(requirements: list[str], installed: object) -> Iterator[Finding]:
    """What of the requirements is missing or has another version. An extra counts when its first package is there.

    Args:
        requirements: as the metadata of a distribution has them.
        installed: name to version, or None.
    """
    assert callable(installed)
    for text in requirements:
        requirement, _, marker = text.partition(";")
        parsed = _REQUIREMENT.match(requirement.strip())
        if parsed is None or not _applies(marker):
            continue
        name, operator, wanted = parsed["name"], parsed["operator"], parsed["version"]
        have = installed(name)
        extra = "extra" in marker
        if have is None:
            if not extra:
                yield problem("packages", f"{name} is not installed", f"run: pip install '{requirement.strip()}'")
            continue
        if operator and wanted and not _fits(have, operator, wanted):
            what = f"{name} is {have}, and this version of kakeya is made for {operator}{wanted}"
            yield (problem if operator == "==" else warning)("packages", what, f"run: pip install '{requirement.strip()}'")


def _applies(marker: str) -> bool:
    """Whether a requirement is for this platform and of an extra that matters to a running daemon."""
    platform = re.search(r"sys_platform == \"(\w+)\"", marker)
    extra = re.search(r"extra == [\"'](\w+)[\"']", marker)
    return (platform is None or platform[1] == sys.platform) and (extra is None or extra[1] == "mlx")


def _fits(have: str, operator: str, wanted: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.split("+")[0])[:4]]

    if operator == "==":
        return have.split("+")[0] == wanted
    return operator != ">=" or numbers(have) >= numbers(wanted)
