"""Lines on standard error, for people or as JSON, and rotation of a log file that somebody else holds open.

launchd and systemd open the log file and hand it to the daemon as standard error: renaming it would only move what is being
written to. So the content is copied to ``NAME.1`` and the file is cut to nothing. Every write then goes to the file's end,
which O_APPEND makes sure of.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from wire.text import clean, json_text

KEPT: Final = 3
"""Old files: NAME.1 (the newest) to NAME.3."""
CHECK_SECONDS: Final = 5.0


class HumanFormatter(logging.Formatter):
    """Time, level and text on one line, which nobody's text can break or forge; a traceback is indented below it."""

    def __init__(self, layout: str = "%(asctime)s %(levelname)s %(message)s") -> None:
        super().__init__(layout)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"    {clean(line)}" for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (ISO 8601 with zone), ``level``, ``logger``, ``text``; ``process`` is its number."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "text": record.getMessage(),
        }
        return json_text(line)


def set_up_logging(level: str, log_format: str = "human") -> None:
    """One line an event, on standard error. No line holds prompts, tokens, hashes, keys."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else HumanFormatter())
    logging.basicConfig(level=getattr(logging, level.upper()), handlers=[handler], force=True)


def guard_stray_lines() -> None:
    """Of a command that sets up no log: what a library of it says anyway goes to standard error, a line each, cleaned."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class LogRotation:
    """Keeps the file behind a descriptor below a size; does nothing where that is a terminal, a pipe or a device.

    Args:
        max_bytes: 0 means never.
        descriptors: all that write to the file; the first one counts.
    """

    def __init__(self, max_bytes: int, descriptors: tuple[int, ...] = (2, 1)) -> None:
        self._max_bytes = max_bytes
        self._descriptors = descriptors
        self.rotations = 0

    def look(self) -> bool:
        """Rotate if it is time; whether that was done. A disk that is full keeps the file as it is."""
        path = self._due()
        if path is None:
            return False
        with _quiet_handlers():
            try:
                _shift(path)
                # Made here, or the copy would have the mode that the umask gives until it has the right one.
                os.close(os.open(_numbered(path, 1), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                shutil.copyfile(path, _numbered(path, 1))
                os.chmod(_numbered(path, 1), stat.S_IMODE(os.fstat(self._descriptors[0]).st_mode))
                os.ftruncate(self._descriptors[0], 0)
            except OSError:
                return False
        self.rotations += 1
        return True

    def _due(self) -> Path | None:
        if self._max_bytes <= 0:
            return None
        try:
            status = os.fstat(self._descriptors[0])
            if not stat.S_ISREG(status.st_mode) or status.st_size <= self._max_bytes:
                return None
            path = path_of(self._descriptors[0])
            # It may have been moved away, or replaced: then its name leads elsewhere.
            if path is None or not os.path.samestat(os.stat(path), status):
                return None
            for descriptor in self._descriptors:
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.fstat(descriptor), status):
                        _append_only(descriptor)
        except OSError:
            return None
        return path


def path_of(descriptor: int) -> Path | None:
    """The name under which an open file was opened; None where the system does not tell."""
    get_path = getattr(fcntl, "F_GETPATH", None)
    try:
        if get_path is not None:  # macOS
            return Path(os.fsdecode(fcntl.fcntl(descriptor, get_path, b"\0" * 1024).rstrip(b"\0")))
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None


def _append_only(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_APPEND:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _shift(path: Path) -> None:
    for number in range(KEPT, 1, -1):
        older = _numbered(path, number - 1)
        if older.exists():
            older.replace(_numbered(path, number))


@contextlib.contextmanager
def _quiet_handlers() -> Iterator[None]:
    """Hold back the log lines of this process: one that came between the copy and the cut would be lost."""
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.acquire()
    try:
        yield
    finally:
        for handler in reversed(handlers):
            handler.release()
