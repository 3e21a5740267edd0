"""The watch over a run's home: when the run is gone, it ends what still lives there and removes the folder.

    python -m daemons.bench.watch FOLDER

Only the run holds the other end of the watch's standard input, so the system closes it however the run ends. A process that
the run is just starting holds that end as well, until it is the program that it shall be: whoever is to be found is found.

What lives in a home says so itself: its KAKEYA_HOME is there, or (where the environment of a process cannot be read) the
ready file that it was told to write.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Final

import psutil

GRACE_SECONDS: Final = 5.0
"""For a daemon that is told to stop: nobody waits for its answers any more."""
KILL_SECONDS: Final = 2.0
POLL_SECONDS: Final = 0.02
LOOKS_MAX: Final = 3
"""A process that was ending may have started another."""
STOP_SECONDS_MAX: Final = LOOKS_MAX * (GRACE_SECONDS + KILL_SECONDS) + 10.0
"""How long :func:`end_home` takes at most, with room for looking."""


def end_home(folder: Path) -> None:
    """Nothing lives in ``folder`` any more, and it is not there any more."""
    for _ in range(LOOKS_MAX):
        processes = _living_in(folder)
        if not processes:
            break
        _stop(processes)
    shutil.rmtree(folder, ignore_errors=True)


def _living_in(folder: Path) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _lives_in(process, folder)]


def _lives_in(process: psutil.Process, folder: Path) -> bool:
    places: list[str] = []
    with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
        words = process.cmdline()
        if "--ready-file" in words[:-1]:
            places.append(words[words.index("--ready-file") + 1])
    with contextlib.suppress(psutil.Error, OSError):
        places.append(process.environ().get("KAKEYA_HOME", ""))
    if not any(Path(place).is_relative_to(folder) for place in places):
        return False
    with contextlib.suppress(psutil.Error, OSError):
        return process.terminal() is None  # what a bench starts has none; somebody's shell has one
    return False


def _stop(processes: list[psutil.Process]) -> None:
    """SIGTERM, wait, then SIGKILL."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    stubborn = _await_end(processes, GRACE_SECONDS)
    for process in stubborn:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _await_end(stubborn, KILL_SECONDS)


def _await_end(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run then. One that nobody has waited for has ended: it may stay as it is for ever."""
    deadline = time.monotonic() + timeout_s
    while (processes := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone
        return False


def main() -> None:
    """Wait for the end of the run."""
    sys.stdin.buffer.read()
    end_home(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
