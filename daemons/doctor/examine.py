"""Runs every examination and shows what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from daemons.console import Console
from daemons.doctor.dashboard_port import examine_dashboard_port
from daemons.doctor.definitions import examine_definitions
from daemons.doctor.finding import Finding, Level, ok, problem, warning
from daemons.doctor.keys import examine_keys
from daemons.doctor.machine import examine_machine
from daemons.doctor.model import examine_model
from daemons.doctor.nodes import examine_fleet
from daemons.doctor.ports import examine_ports
from daemons.doctor.services import examine_services
from daemons.doctor.site import Site, naming_file, this_site
from daemons.doctor.software import examine_software
from daemons.doctor.starting import examine_starting
from daemons.environment_names import UnknownVariable, unknown_variables
from kakeya_zmq.io.addresses import parse_address

MARKS = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}


def examine(console: Console, addresses: tuple[str, ...], *, config: str = "", quick: bool = False) -> int:
    """Look at everything, and print one line a finding; with ``--json`` also one object.

    Returns:
        0 when there is no problem, 1 otherwise.

    Raises:
        ConfigError: an address cannot be parsed.
    """
    for text in addresses:
        parse_address(text)
    findings: list[Finding] = []
    for finding in findings_of(this_site(addresses, config=config, quick=quick)):
        findings.append(finding)
        console.say(f"{MARKS[finding.level]:>7}  {finding.subject}: {finding.text}")
        if finding.remedy:
            console.say(f"         → {finding.remedy}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    console.say("")
    console.say(f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    if console.json_mode:
        rows = [{"subject": f.subject, "level": f.level.value, "text": f.text, "remedy": f.remedy} for f in findings]
        console.result({"findings": rows, "problems": problems, "warnings": warnings})
    return 1 if problems else 0


def findings_of(site: Site) -> Iterator[Finding]:
    """All examinations, one after the other, each finding once: several may meet the same fault (of a file of two roles).

    An examination that fails itself is a finding, and keeps no other from being made.
    """
    examinations: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("software", examine_software),
        ("settings", lambda: _settings(site)),
        ("keys", lambda: examine_keys(site)),
        ("start", lambda: examine_starting(site)),
        ("machine", lambda: examine_machine(site)),
        ("model", lambda: examine_model(site)),
        ("ports", lambda: examine_ports(site)),
        ("ports", examine_dashboard_port),
        ("services", examine_services),
        ("services", examine_definitions),
        ("nodes", lambda: examine_fleet(site)),
    )
    told: set[tuple[Level, str]] = set()
    for subject, look in examinations:
        try:
            for finding in look():
                if (finding.level, finding.text) not in told:
                    told.add((finding.level, finding.text))
                    yield finding
        except Exception as error:  # the doctor must not die of the illness
            remedy = "set KAKEYA_DEBUG=1 and run a single command; please report it"
            yield problem(subject, f"this could not be examined: {type(error).__name__}", remedy)


def _settings(site: Site) -> Iterator[Finding]:
    if site.config_error is not None:
        remedy = site.config_error.remedy or "see `kakeya config sample`"
        yield problem("settings", naming_file(site.config_error.message, site.config_file), remedy)
    else:
        yield ok("settings", "; ".join(_sources(site)))
    for unknown in unknown_variables():
        yield warning("settings", f"{unknown.name} is not known and has no effect", _spelling(unknown))


def _sources(site: Site) -> Iterator[str]:
    """Where the settings come from: those of this shell, then those of each service."""
    yield f"from {site.config_file} and the environment" if site.config_file else "defaults and the environment"
    for name, file in site.services.items():
        source = "the same file" if file == site.config_file else file
        yield f"of {name}, as it is installed" + (f", and from {source}" if file else "")


def _spelling(unknown: UnknownVariable) -> str:
    meant = f"did you mean {unknown.suggestion}? else " if unknown.suggestion else ""
    return f"{meant}take it out of the environment; docs/configuration.md lists the names"
