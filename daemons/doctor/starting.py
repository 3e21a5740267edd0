"""What would keep a daemon from starting here, or from being of any use: asked of the same code that it starts with."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.doctor.ports import examine_port
from daemons.doctor.site import Site
from daemons.engine_host import parse_assertions
from daemons.health_server import HOST
from daemons.membership import INCARNATION_FILE
from daemons.memory import physical_memory_bytes
from daemons.memory_guard import memory_levels
from daemons.own_addresses import can_be_reached, look_up
from kakeya_zmq.audit import AUDIT_FILE
from kakeya_zmq.config import Settings
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.known_nodes import load_known_nodes
from kakeya_zmq.model.revision import weight_files
from kakeya_zmq.revocation_file import load_revocations
from kakeya_zmq.roster import Roster
from wire.errors import ConfigError, KakeyaError
from wire.files import ODD_FILE_REMEDY
from wire.limits import GIB, MIB

FOLDERS: Final = ("nodes", "run", "logs", "tenants")
"""Under the home; daemons and `kakeya up` make them when they are not there."""
PROCESS_BYTES_MIN: Final = 128 * MIB
"""A process that has imported MLX holds more than this before it has loaded anything."""


def examine_starting(site: Site) -> Iterator[Finding]:
    """A finding for each thing that is wrong; one good one when nothing is."""
    found = [*_home(site.home), *_state(site)]
    if site.notes_error is not None:
        found.append(_refused(site.notes_error, "kakeya down"))
    for role, settings in site.settings.items():
        found += _role(role, settings)
    yield from found or [ok("start", "nothing that keeps daemons from starting was found")]


# --- files -----------------------------------------------------------------------------------------------------------


def _home(home: Path) -> Iterator[Finding]:
    if home.exists() and not home.is_dir():
        yield problem("start", f"{home} is not a folder", "move it away, or set KAKEYA_HOME to a folder")
        return
    for folder in (home, *(home / name for name in FOLDERS), *_node_folders(home)):
        if _is_dangling(folder):
            text = f"{folder} is a link to {os.readlink(folder)}, which is not there"
            yield problem("start", text, f"make that folder (is its disk mounted?), or remove the link: rm {folder}")
        elif folder.exists() and not folder.is_dir():
            yield problem("start", f"{folder} is not a folder", f"move it away: mv {folder} {folder}.old")
        elif folder.exists() and not is_writable(folder):
            yield problem("start", f"this user may not write to {folder}", f"chmod u+rwx {folder}, or see who owns it")


def is_writable(folder: Path) -> bool:
    """Whether this process may make files there."""
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def _node_folders(home: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in (home / "nodes").iterdir() if path.is_dir() or _is_dangling(path))
    return []


def _is_dangling(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _state(site: Site) -> Iterator[Finding]:
    rosters = {(settings.roster_file, settings.roster_is_named) for settings in site.settings.values()}
    for roster, named in sorted(rosters):
        try:
            Roster.load_if_any(Path(roster), named=named)
        except ConfigError as error:
            yield _refused(error, "repair it: docs/security.md has an example")
    for folder in _node_folders(site.home):
        for load in (load_known_nodes, load_revocations):
            try:
                load(folder)
            except ConfigError as error:
                yield _refused(error, "check its mode")
        for path in (folder / AUDIT_FILE, folder / INCARNATION_FILE):
            if path.exists() and not path.is_file():
                yield problem("start", f"{path} is not a regular file", ODD_FILE_REMEDY)


def _refused(error: KakeyaError, remedy: str) -> Finding:
    return problem("start", error.message, error.remedy or remedy)


# --- settings --------------------------------------------------------------------------------------------------------


def _role(role: str, settings: Settings) -> Iterator[Finding]:
    yield from _advertised(role, settings)
    if role == "cache":
        return
    try:
        parse_assertions(settings.assert_compatibility)
    except ConfigError as error:
        yield _refused(error, "see --assert-compatibility")
    if settings.runtime_health_port:
        yield examine_port(
            f"health endpoint of the {role}",
            Address(HOST, settings.runtime_health_port),
            ours=set(),
            flag="--runtime-health-port",
        )
    drain_bytes = memory_levels(settings, physical_memory_bytes()).drain_bytes
    yield from judge_levels(role, drain_bytes, _weights_bytes(settings))


def _advertised(role: str, settings: Settings) -> Iterator[Finding]:
    if not settings.advertise:
        return
    try:
        host = parse_address(settings.advertise).host
    except ConfigError as error:
        yield _refused(error, "check --advertise")
        return
    if not can_be_reached(host):
        text = f"{role}: it advertises {settings.advertise}, where nobody can reach it"
        yield problem("start", text, "--advertise is the address that other machines use; --bind may be 0.0.0.0")
        return
    literal = look_up([host]).get(host)
    if literal is None:
        text = f"{role}: the host name in --advertise {settings.advertise} has no address here: it is not announced"
        yield warning("start", text, "write an IP address, or see that this machine can look the name up")
    elif is_loopback(literal) and not settings.endpoint and not _is_for_this_machine(settings.bind):
        for peer in _elsewhere(settings)[:1]:
            text = f"{role}: it advertises {settings.advertise}, which leads {peer} to itself, not to here"
            yield problem("start", text, "--advertise is the address that other machines use; --bind may be 0.0.0.0")


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_for_this_machine(bind: str) -> bool:
    """Whether nobody else could reach what serves there; so it is when that cannot be told."""
    with contextlib.suppress(ConfigError):
        return is_loopback(parse_address(bind).host)
    return True


def _elsewhere(settings: Settings) -> list[str]:
    """The configured peers that are other machines for sure."""
    hosts: dict[str, str] = {}
    for text in (*settings.peer, *((*settings.cache_peer, *settings.worker) if settings.role == "primary" else ())):
        with contextlib.suppress(ConfigError):
            hosts[text] = parse_address(text).host
    literals = look_up(hosts.values())
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    found = {text: literals.get(host, "127.0.0.1") for text, host in hosts.items()}
    return [text for text, literal in found.items() if literal not in own and not is_loopback(literal)]


def _weights_bytes(settings: Settings) -> int:
    """What the model takes at least; 0 when it cannot be told (daemons.doctor.model says why)."""
    if not settings.model:
        return 0
    try:
        return sum(file.stat().st_size for file in weight_files(Path(settings.model)))
    except (KakeyaError, OSError):
        return 0


def judge_levels(role: str, drain_bytes: int, weights_bytes: int) -> Iterator[Finding]:
    """Whether the memory guard would ever let a session or job in."""
    needed = max(PROCESS_BYTES_MIN, weights_bytes)
    if drain_bytes <= needed:
        what = "the model's weights alone take" if needed == weights_bytes else "a process with MLX takes"
        text = f"{role}: it would take no work: {what} {needed / GIB:.2f} GiB, and it drains from {drain_bytes / GIB:.2f} on"
        yield problem("start", text, "raise --memory-drain-gb (and --memory-unhealthy-gb), or take a smaller model")
