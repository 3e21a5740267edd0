"""Stopping: daemons that are named, or with ``kakeya down`` everything that ``kakeya up`` started for this home."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from daemons.fleet.home import unwritable
from daemons.fleet.notes import Member, live_members, notes_file, run_folder
from wire.errors import ConfigError

STOP_TIMEOUT_SECONDS = 40.0
"""Longer than daemons drain (--drain-s)."""


def stop_fleet(tell: Callable[[str], None]) -> int:
    """Stop everything noted, and what was started here without being noted; how many were running.

    Notes that cannot be read are put aside as ``fleet.json.damaged``: the processes tell themselves that they are ours.

    Raises:
        ConfigError: the notes of what ran cannot be removed.
    """
    from daemons.dashboard_process import stop_dashboard

    notes = notes_file()
    try:
        members = live_members()
    except ConfigError as error:
        members = ()
        aside = notes.with_name(f"{notes.name}.damaged")
        try:
            notes.replace(aside)
        except OSError as reason:
            raise unwritable(reason) from None
        tell(f"{error.message}; it is kept as {aside}")
    stop_members(members, tell)
    count = len(members) + stop_dashboard(tell)
    unnoted = started_here()
    if unnoted:
        tell("stopping processes that `kakeya up` started here, and that its notes under run/ do not tell of")
        stop_processes(unnoted, tell)
    try:
        notes.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(error) from None
    return count + len(unnoted)


def stop_members(members: Sequence[Member], tell: Callable[[str], None]) -> None:
    """SIGTERM, wait, then SIGKILL: when this returns none of them runs."""
    processes: list[psutil.Process] = []
    for member in members:
        if not member.alive:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(member.pid))
    stop_processes(processes, tell)


def stop_processes(processes: Sequence[psutil.Process], tell: Callable[[str], None]) -> None:
    """As :func:`stop_members`."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)
    for process in stubborn:
        tell(f"process {process.pid} did not stop in time and was killed")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5.0)


def started_here() -> list[psutil.Process]:
    """Running processes that ``kakeya up`` started for this home, by the ready file that it named to them.

    The notes of what runs may be damaged, or may not have been written when ``kakeya up`` was killed.
    """
    folder = run_folder().absolute()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if words[1:3] != ["-m", "daemons"] or "--ready-file" not in words[:-1]:
                continue
            ready_file = Path(process.cwd(), words[words.index("--ready-file") + 1])
            if _same_folder(ready_file.parent, folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _same_folder(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()
