"""What may lie where a file of ours belongs, for tests: a FIFO, a device, a socket, a folder, a file of somebody else."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

BLOCKED_AFTER_S: Final = 20.0


def _socket(path: Path) -> None:
    # The name stays when the socket is closed. Bound by its name alone: a whole path may be too long for one.
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(before)
        os.close(before)


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


ODD: Final[dict[str, Callable[[Path], None]]] = {"fifo": _fifo, "device": _device, "socket": _socket, "folder": _folder}


@contextmanager
def not_blocking() -> Iterator[None]:
    """Fail a block that waits for somebody to write into a FIFO, or for the end of a device."""

    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def give_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file somebody else's, who is not root."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
