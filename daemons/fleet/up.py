"""What ``kakeya up`` does: start the daemons of a plan that do not run yet, and wait until all serve."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from daemons.fleet.down import started_here, stop_members
from daemons.fleet.home import check_room, starting_alone, unwritable
from daemons.fleet.notes import Member, live_members, load_fleet, run_folder, save_fleet
from daemons.fleet.starting import Starting, deferred_signals
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.io.addresses import Address
from kakeya_zmq.options import DEFAULT_PORTS
from wire.errors import FleetBusyError
from wire.keys import FleetKey, write_secret_file


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What ``kakeya up`` should start. ``model`` empty: the demo model. Extra flags go to the daemon of that role."""

    host: str = "127.0.0.1"
    ephemeral: bool = False
    """Free ports instead of the usual ones."""
    model: str = ""
    roles: tuple[str, ...] = ("primary", "worker", "cache")
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


def default_psk_file() -> Path:
    return kakeya_home() / "fleet.psk"


def ensure_psk(path: Path) -> bool:
    """Make the PSK if there is none; whether one was made."""
    if path.exists():
        FleetKey.load(path)
        return False
    write_secret_file(path, FleetKey.generate())
    return True


def start_fleet(plan: FleetPlan, tell: Callable[[str], None]) -> tuple[Member, ...]:
    """Start what the plan names and is not running yet; wait until all serve.

    Raises:
        ConfigError: a daemon refused to start, its last log line says why; or files under the home cannot be written.
        FleetBusyError: another command is starting them, or was killed while it did.
        RequestFailed: DEADLINE_EXCEEDED, one did not get ready in time.
    """
    try:
        with starting_alone(run_folder()):
            return _start_fleet(plan, tell)
    except OSError as error:
        raise unwritable(error) from None


def _start_fleet(plan: FleetPlan, tell: Callable[[str], None]) -> tuple[Member, ...]:
    running = {member.role: member for member in live_members()}
    if set(plan.roles) - set(running):
        check_room(run_folder())
        refuse_leftovers(plan.roles)
    if ensure_psk(default_psk_file()):
        tell("made a new fleet key (mode 0600)")
    starting: list[Starting] = []
    try:
        with contextlib.ExitStack() as undo:
            # The primary's address must be known to the others, so that they find the fleet through it.
            seed = running["primary"].address if "primary" in running else ""
            for role in plan.roles:
                if role in running:
                    continue
                with deferred_signals():
                    process = start_daemon(role, plan, seed)
                    starting.append(process)
                    undo.callback(process.stop)
                if role == "primary" and not seed:
                    seed = process.wait_for_address(tell)
            for process in starting:
                running[process.role] = process.wait_ready(tell)
            undo.pop_all()
    finally:
        for process in starting:
            process.forget_files()
    members = tuple(running[role] for role in plan.roles if role in running)
    save_fleet(members)
    return members


def start_daemon(role: str, plan: FleetPlan, seed: str) -> Starting:
    """Start one daemon of the plan in the background."""
    port = 0 if plan.ephemeral else DEFAULT_PORTS[role]
    address = str(Address(plan.host, port))
    # An address that a configuration file advertises is that of a daemon for other machines, and leads to none of these.
    arguments = ["--bind", address, "--node-id", f"local-{role}", "--advertise", ""]
    if seed:
        arguments += ["--peer", seed]
    if role == "primary":
        arguments.append("--enable-prefill-cache")
    if plan.model and role != "cache":
        arguments += ["--model", plan.model]
    for name, flags in plan.extra:
        if name == role:
            arguments += flags
    return Starting(role, arguments, run_folder() / f"{role}.ready", kakeya_home() / "logs" / f"{role}.log", address)


def refuse_leftovers(roles: Sequence[str]) -> None:
    """Daemons that no notes tell of have the names and ports of those that are to be started.

    Raises:
        FleetBusyError: there are some of these roles.
    """
    noted = {member.pid for member in live_members()}
    for process in started_here():
        with contextlib.suppress(psutil.Error):
            role = process.cmdline()[3]
            if process.pid not in noted and role in roles:
                text = f"a {role} (process {process.pid}) runs here that an interrupted `kakeya up` has left behind"
                raise FleetBusyError(text, remedy="`kakeya down` stops it; then `kakeya up` again")


def restart_member(member: Member, tell: Callable[[str], None]) -> Member:
    """Stop one daemon and start it again with the same arguments, on the same address.

    Raises:
        KakeyaError: it does not start, or another command is starting the fleet.
    """
    with starting_alone(run_folder()):
        return _restart_member(member, tell)


def _restart_member(member: Member, tell: Callable[[str], None]) -> Member:
    stop_members([member], tell)
    arguments = list(member.arguments)
    arguments[arguments.index("--bind") + 1] = member.address
    ready_file = run_folder() / f"{member.role}.ready"
    starting: Starting | None = None
    try:
        with deferred_signals():
            starting = Starting(member.role, arguments, ready_file, Path(member.log), member.address)
        fresh = starting.wait_ready(tell)
    except BaseException:
        if starting is not None:
            starting.stop()
        raise
    save_fleet([fresh if other.role == member.role else other for other in load_fleet()])
    return fresh
