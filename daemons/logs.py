"""``kakeya logs``: the log files of this machine's daemons, followed across rotations."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from daemons.log_files import KEPT
from kakeya_zmq.config import kakeya_home
from wire.errors import ConfigError
from wire.text import clean

POLL_SECONDS = 0.2
READ_BYTES_MAX = 1 << 20
HEAD_BYTES = 256
"""Enough for a few lines, each with its time."""


@dataclass(slots=True)
class Followed:
    """A log file and how far it has been read."""

    name: str
    path: Path
    position: int = 0
    head: bytes = b""
    """Its first bytes, by which it is known again after a rotation."""
    rest: bytes = b""


def log_files(home: Path) -> dict[str, Path]:
    """The log files under a home by name: those of services (``~/.kakeya/*.log``) and of ``kakeya up`` (``logs/``)."""
    found = {path.stem: path for path in sorted(home.glob("*.log")) if path.is_file()}
    for path in sorted((home / "logs").glob("*.log")):
        if not path.is_file():
            continue
        found[path.stem if path.stem not in found else f"logs/{path.stem}"] = path
    return found


def show_logs(names: Sequence[str], *, last: int, follow: bool) -> int:
    """Print the last lines of the named files (all, when none is named), then go on if that is wanted.

    Of all files, one that appears while they are followed is taken in from its beginning.

    Returns:
        0; 2 is raised as an error.

    Raises:
        ConfigError: there is no such log, or none at all, or it cannot be read.
    """
    home = kakeya_home()
    known = log_files(home)
    for name in names:
        if name not in known:
            there = f"there are: {', '.join(known)}" if known else "nothing has been started here yet"
            raise ConfigError(f"there is no log named {name[:60]!r}", remedy=there)
    chosen = [Followed(name, path) for name, path in known.items() if not names or name in names]
    if not chosen:
        raise ConfigError("there are no logs here", remedy="`kakeya up` and the services write them")
    for log in chosen:
        _print(log, last_lines(log, last), several=len(chosen) > 1)
    while follow:
        if not names:
            take_in(chosen, log_files(home))
        for log in chosen:
            _print(log, new_lines(log), several=len(chosen) > 1)
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)
    sys.stdout.flush()
    return 0


def take_in(followed: list[Followed], known: Mapping[str, Path]) -> None:
    """Add the files that are not followed yet, and give all of them the names that tell them apart now."""
    followed_paths = {log.path: log for log in followed}
    for name, path in known.items():
        if path in followed_paths:
            followed_paths[path].name = name
        else:
            followed.append(Followed(name, path))


def last_lines(log: Followed, count: int) -> list[str]:
    """The last lines of a file now; :func:`new_lines` goes on behind them."""
    lines: deque[str] = deque(maxlen=count)
    for line in new_lines(log):
        lines.append(line)
    return list(lines)


def new_lines(log: Followed) -> Iterator[str]:
    """Whole lines that were written since the last call.

    A file that was cut, or replaced, is read from its beginning, after what is left of it in the copy that the rotation
    made (:mod:`daemons.log_files`).

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with log.path.open("rb") as stream:
            if not _is_the_same(stream, log):
                yield from _rotated_away(log)
            stream.seek(log.position)
            yield from _read_on(stream, log)
    except FileNotFoundError:
        return
    except OSError as error:
        reason = error.strerror or "unknown error"
        raise ConfigError(f"the log {log.name} cannot be read: {reason}", remedy="check its owner and mode") from None


def _is_the_same(stream: BinaryIO, log: Followed) -> bool:
    """Whether this file begins as the one that was read, and goes as far."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    return size >= log.position and stream.read(len(log.head)) == log.head


def _rotated_away(log: Followed) -> Iterator[str]:
    """What was not read yet of the file as it was, and of those that came and went since; then the next one begins."""
    copies = [log.path.with_name(f"{log.path.name}.{number}") for number in range(1, KEPT + 1)]
    for age, copy in enumerate(copies):
        with contextlib.suppress(FileNotFoundError), copy.open("rb") as stream:
            if log.position and _is_the_same(stream, log):
                stream.seek(log.position)
                yield from _read_on(stream, log)
                for younger in reversed(copies[:age]):
                    log.position, log.head = 0, b""
                    with younger.open("rb") as following:
                        yield from _read_on(following, log)
                break
    else:
        log.rest = b""
    log.position, log.head = 0, b""


def _read_on(stream: BinaryIO, log: Followed) -> Iterator[str]:
    while data := stream.read(READ_BYTES_MAX):
        log.head = (log.head + data)[:HEAD_BYTES]
        log.position += len(data)
        *lines, log.rest = (log.rest + data).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)


def _print(log: Followed, lines: Iterable[str], *, several: bool) -> None:
    for line in lines:
        # Whatever a library, or a daemon of an older version, has written there.
        sys.stdout.write(clean(f"{log.name}: {line}" if several else line) + "\n")
