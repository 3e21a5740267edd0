"""Files of this program's own: read without waiting and within bounds, and made for their owner alone.

Rules
- What is no regular file is never waited for. Opening a FIFO and reading a device can take for ever, and a daemon that hangs
  there cannot even be told to stop. So it is looked at first (opening a device can have effects), opened without waiting,
  and looked at again, as something else may have taken the name in between.
- Nothing is read that is larger than the caller expects.
- Folders are made with mode 0700 and files with 0600, whatever the umask. The mode of what is there already is its owner's.
- A file that says who may do what is taken only when nobody but this user and root can change it.

What is wrong with a file is an OSError like others that a file system gives: whoever bears those bears these.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final, TypeAlias

from wire.errors import ConfigError, UnsafeFileError

ODD_FILE_REMEDY: Final = "move it away: a file of ours belongs there"

FileState: TypeAlias = tuple[int, int, int, int, int]
"""What tells that a file is another one, or was changed: its number, size, time, mode and owner."""

_CLOSE_ON_EXEC: Final = getattr(os, "O_CLOEXEC", 0)
_WITHOUT_WAITING: Final = getattr(os, "O_NONBLOCK", 0)


class NotRegularFile(OSError):
    """A FIFO, device, socket or folder has the name of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


class FileTooLarge(OSError):
    """A file is larger than anything that belongs there."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        super().__init__(errno.EFBIG, f"it is larger than {bytes_max} bytes", str(path))


# --- reading -----------------------------------------------------------------------------------------------------------


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """As :func:`os.open`, of a regular file and nothing else; a symbolic link is followed unless ``flags`` say no.

    Raises:
        NotRegularFile: it is none.
        OSError: it cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _require_regular(os.stat(path), path)
    descriptor = os.open(path, flags | _CLOSE_ON_EXEC | _WITHOUT_WAITING, mode)
    try:
        _require_regular(os.fstat(descriptor), path)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, bytes_max: int) -> bytes:
    """The content of a regular file that has at most so many bytes.

    Raises:
        NotRegularFile: it is none.
        FileTooLarge: it has more.
        OSError: it cannot be read.
    """
    descriptor = open_regular(path)
    try:
        return _read_whole(descriptor, path, bytes_max)
    finally:
        os.close(descriptor)


def read_guarded(path: Path, bytes_max: int, what: str) -> bytes:
    """As :func:`read_regular`, of a file that says who may do what: only this user and root may be able to change it.

    Args:
        what: what it is, for the error line, e.g. "the roster".

    Raises:
        UnsafeFileError: others can change it, or put another one in its place. What they could change if its folder were not
            this user's alone is taken.
        NotRegularFile, FileTooLarge, OSError: see :func:`read_regular`.
    """
    descriptor = open_regular(path)
    try:
        _check_guarded(os.fstat(descriptor), path, what)
        return _read_whole(descriptor, path, bytes_max)
    finally:
        os.close(descriptor)


def read_at_most(descriptor: int, count: int) -> bytes:
    """So many bytes, or all there are."""
    pieces = bytearray()
    while len(pieces) < count:
        piece = os.read(descriptor, count - len(pieces))
        if not piece:
            break
        pieces += piece
    return bytes(pieces)


def file_state(path: Path | None) -> FileState | None:
    """What is another value when the file was changed or replaced, or may be used by others; None when there is none."""
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    if status is None:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid


def open_folder_of(path: Path) -> Path | None:
    """The folder of a file that everybody may write to: where its name is, or, of a symbolic link, where the file is.

    Whoever may write there could put another file of ours in its place, or take it away.

    Raises:
        OSError: a folder cannot be looked at.
    """
    if os.name != "posix":
        return None
    for folder in dict.fromkeys((path.absolute().parent, Path(os.path.realpath(path)).parent)):
        # With the sticky bit, as of /tmp, everybody may put files there and touch his own only.
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return folder
    return None


def unreadable(what: str, path: Path, error: OSError, *, remedy: str = "") -> ConfigError:
    """What to tell of a file that cannot be read.

    Args:
        what: what it is, in front of its name; may be empty.
        remedy: where it is a regular file.
    """
    named = f"{what} {path}" if what else f"{path}"
    if isinstance(error, NotRegularFile):
        remedy = ODD_FILE_REMEDY
    return ConfigError(f"{named} cannot be read: {error.strerror or 'unknown error'}", remedy=remedy)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularFile(path)


def _read_whole(descriptor: int, path: Path, bytes_max: int) -> bytes:
    data = read_at_most(descriptor, bytes_max + 1)
    if len(data) > bytes_max:
        raise FileTooLarge(path, bytes_max)
    return data


def _check_guarded(status: os.stat_result, path: Path, what: str) -> None:
    if os.name != "posix":
        return
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafeFileError(f"{what} {path} belongs to another user", remedy=f"chown it to this user: {path}")
    # Who may not even look into the folder cannot use what the file's mode allows: umask 002 gives all files group write.
    folder_mode = Path(os.path.realpath(path)).parent.stat().st_mode
    by_group = status.st_mode & stat.S_IWGRP and folder_mode & stat.S_IXGRP
    by_others = status.st_mode & stat.S_IWOTH and folder_mode & stat.S_IXOTH
    if by_group or by_others:
        raise UnsafeFileError(f"{what} {path} can be changed by other users", remedy=f"chmod go-w {path}")
    if (folder := open_folder_of(path)) is not None:
        text = f"{what} {path} is in a folder that everybody may write to"
        raise UnsafeFileError(text, remedy=f"chmod o-w {folder}")


# --- making ------------------------------------------------------------------------------------------------------------


def make_private_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, all with mode 0700.

    Raises:
        OSError: one cannot be made, or something else has its name.
    """
    missing = []
    each = folder
    while not each.exists():
        missing.append(each)
        each = each.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process has made it in the meantime: that is as good
            each.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def write_private_file(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a file with mode 0600, in a folder that exists: it appears whole or not at all, and the old one stays till then.

    Raises:
        FileExistsError: there is one, and it is not to be replaced.
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSE_ON_EXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Some file systems refuse fsync on folders; the file itself is already on disk then.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
