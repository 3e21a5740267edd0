"""The dashboard that ``kakeya up`` starts in the background, and ``kakeya down`` stops.

It is no member of the fleet: the fleet works without it, so what goes wrong with it is told and nothing else happens.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from daemons.fleet import Member, Starting, deferred_signals, read_members, run_folder, stop_members
from daemons.fleet.home import starting_alone, unwritable
from daemons.fleet.notes import NOTES_BYTES_MAX
from dashboard.server import DEFAULT_ADDRESS
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.io.addresses import Address
from wire.errors import FleetBusyError, KakeyaError
from wire.files import read_regular, write_private_file

ROLE = "dashboard"


def url_of(member: Member) -> str:
    return f"http://{member.address}/"


def running_dashboard() -> Member | None:
    """The one that was started, if it still runs."""
    try:
        (member,) = read_members(b"[" + read_regular(_note(), NOTES_BYTES_MAX) + b"]")
    except (OSError, ValueError):
        return None
    return member if member.alive else None


def start_dashboard(tell: Callable[[str], None], *, ephemeral: bool) -> Member | None:
    """Start it unless it runs; None, after telling why, when it cannot be started."""
    try:
        with starting_alone(run_folder()):
            return running_dashboard() or _start(tell, ephemeral=ephemeral)
    except FleetBusyError:
        tell("another `kakeya up` is starting the dashboard")
        return None
    except OSError as error:
        tell(f"the fleet runs without a dashboard: {unwritable(error)}")
        return None


def _start(tell: Callable[[str], None], *, ephemeral: bool) -> Member | None:
    address = Address(DEFAULT_ADDRESS.host, 0) if ephemeral else DEFAULT_ADDRESS
    ready_file = run_folder() / f"{ROLE}.started"
    log = kakeya_home() / "logs" / f"{ROLE}.log"
    starting: Starting | None = None
    try:
        with deferred_signals():
            starting = Starting(ROLE, ["--bind", str(address)], ready_file, log, str(address))
        member = starting.wait_ready(tell)
        write_private_file(_note(), json.dumps(asdict(member), indent=2).encode("utf-8"))
        return member
    except KakeyaError as error:
        if starting is not None:
            starting.stop()
        tell(f"the fleet runs without a dashboard: {error}")
        return None
    except OSError as error:
        if starting is not None:
            starting.stop()
        tell(f"the fleet runs without a dashboard: {unwritable(error)}")
        return None
    except BaseException:
        if starting is not None:
            starting.stop()
        raise
    finally:
        with contextlib.suppress(OSError):
            ready_file.unlink(missing_ok=True)


def stop_dashboard(tell: Callable[[str], None]) -> int:
    """Stop it; how many processes were stopped."""
    member = running_dashboard()
    if member is not None:
        stop_members([member], tell)
    with contextlib.suppress(OSError):  # it names a process that is gone, and is passed over
        _note().unlink(missing_ok=True)
    return 1 if member is not None else 0


def _note() -> Path:
    return run_folder() / "dashboard.json"
