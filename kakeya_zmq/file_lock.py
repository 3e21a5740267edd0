"""A lock around reading, changing and writing back state files of a node: its process does that, and so does the command."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

from wire.files import open_regular

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no such calls on this system
    fcntl = None

LOCK_FILE: Final = "files.lock"
WAIT_SECONDS: Final = 2.0
"""Who holds it writes a small file: that takes milliseconds."""
LOOK_SECONDS: Final = 0.01


@contextlib.contextmanager
def locked(folder: Path, *, wait_s: float = WAIT_SECONDS) -> Iterator[None]:
    """Nobody else is in such a block for this folder, in any process. Where there are no locks, nothing is locked.

    Raises:
        OSError: the lock file cannot be made, or (TimeoutError) somebody else holds it for too long.
    """
    if fcntl is None:
        yield
        return
    descriptor = open_regular(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
    try:
        _take(fcntl, descriptor, time.monotonic() + wait_s)
        yield
    finally:
        os.close(descriptor)


def _take(calls: ModuleType, descriptor: int, deadline: float) -> None:
    while True:
        try:
            calls.flock(descriptor, calls.LOCK_EX | calls.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{LOCK_FILE} is held by another process") from None
            time.sleep(LOOK_SECONDS)
        except OSError:  # a file system without locks
            return
        else:
            return
