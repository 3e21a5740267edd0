"""What `kakeya up` needs of the home before it starts anything: to be alone there, and room on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kakeya_zmq.file_lock import locked
from wire.errors import ConfigError, FleetBusyError
from wire.files import ODD_FILE_REMEDY, NotRegularFile, make_private_folder

ROOM_BYTES: Final = 64 * 1024
"""What daemons write before they serve: keys, known nodes, the first lines of their logs."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def starting_alone(folder: Path) -> Iterator[None]:
    """No other command starts daemons of this home in the meantime: they would share names, ports and ready files.

    Args:
        folder: the home's ``run/``; made when it is not there.

    Raises:
        FleetBusyError: another one does, for longer than a look at what runs takes.
        OSError: the folder or the lock cannot be made.
    """
    make_private_folder(folder)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder))
        except TimeoutError:
            text = "another `kakeya up` (or `kakeya demo`) is starting the fleet of this home right now"
            raise FleetBusyError(text, remedy="wait until it is done; `kakeya down` stops what it has started") from None
        yield


def check_room(folder: Path) -> None:
    """Write a little there, and take it away again.

    Raises:
        OSError: it does not reach the disk; the error names the folder.
    """
    probe = folder / f"room.{os.getpid()}.tmp"
    try:
        with probe.open("wb") as stream:
            stream.write(os.urandom(ROOM_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def unwritable(error: OSError) -> ConfigError:
    """What to tell of a file of the fleet that cannot be made or written."""
    what = error.filename if isinstance(error.filename, str) else "a file under the home"
    if isinstance(error, NotRegularFile):
        return ConfigError(f"{what} cannot be used: {error.strerror}", remedy=ODD_FILE_REMEDY)
    if error.errno in _FULL:
        remedy = "make room on the disk of KAKEYA_HOME, or set it to a folder on another disk"
        return ConfigError(f"{what} cannot be written: the disk is full", remedy=remedy)
    if error.errno == errno.EROFS:
        remedy = "set KAKEYA_HOME to a folder that can be written"
        return ConfigError(f"{what} cannot be written: its disk is read-only", remedy=remedy)
    reason = error.strerror or type(error).__name__
    return ConfigError(f"{what} cannot be used: {reason}", remedy="check the owner and mode of KAKEYA_HOME, and its disk")
