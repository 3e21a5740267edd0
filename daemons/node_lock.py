"""One process at a time runs a node id on this machine: two would share its identity key, and take each other's jobs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Final

from wire.errors import NodeInUseError
from wire.files import NotRegularFile, make_private_folder, open_regular, unreadable

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no such calls on this system
    fcntl = None

WAIT_SECONDS: Final = 1.0
"""For a process that is ending right now, as when a service manager restarts a node."""
LOOK_SECONDS: Final = 0.05
REMEDY: Final = "stop that node, or give this one a --node-id of its own"


class NodeLock:
    """Held from here on until :meth:`release`, or until the process ends in whatever way.

    Where the file system or the system has no locks, nothing is locked.

    Args:
        folder: the node's; made when it is not there.

    Raises:
        NodeInUseError: another process runs this node.
        ConfigError: something that is no regular file has the name of the lock.
    """

    def __init__(self, folder: Path, node_id: str, *, wait_s: float = WAIT_SECONDS) -> None:
        self._descriptor: int | None = None
        if fcntl is None:
            return
        try:
            make_private_folder(folder)
            descriptor = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
        except NotRegularFile as error:
            raise unreadable("", folder / "lock", error) from None
        except OSError:  # what cannot be written here is told with its own name and remedy where it is needed
            return
        try:
            self._take(descriptor, node_id, time.monotonic() + wait_s)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    @staticmethod
    def _take(descriptor: int, node_id: str, deadline: float) -> None:
        assert fcntl is not None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOOK_SECONDS)
                    continue
                raise _in_use(descriptor, node_id) from None
            except OSError:  # a file system without locks
                return
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            return

    def release(self) -> None:
        """Let another process run this node. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _in_use(descriptor: int, node_id: str) -> NodeInUseError:
    owner = ""
    with contextlib.suppress(OSError, ValueError):
        owner = f" by process {int(os.pread(descriptor, 20, 0))}"
    return NodeInUseError(
        f"the node id {node_id} is already in use on this machine{owner}",
        remedy=REMEDY,
    )
