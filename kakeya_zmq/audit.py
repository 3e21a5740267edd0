"""The audit log: who was refused, who came in for the first time, which keys changed. JSON lines in the node's folder.

Rules
- An entry never holds a prompt, token, hash, key or address (docs/privacy.md); texts are fixed or a node id.
- A stranger cannot fill the disk: entries are written at a bounded rate, what is left out is counted in the next one of its
  kind and reason (``suppressed``); files are rotated by size, and only so many are kept.
- Nor can he hide what others do: within a reason each node has a rate of its own, within a kind each reason, within the file
  each kind. What is about nobody in particular (a stranger's) shares one.
- A line that a crash has torn is ended before the next one is written; the rest of it is left out when the log is read.
- A full disk or a lost folder costs the log, never the node: the failure is counted, and writing goes on when it can.
- Files have mode 0600. Entries of several nodes never share a file.
- Of a file that is larger than ours can be the end is read, and what is no regular file is left alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from kakeya_zmq.protocol.limits import KeyedBuckets, TokenBucket
from wire import limits
from wire.files import NotRegularFile, open_regular, unreadable
from wire.text import json_text

AUDIT_FILE: Final = "audit.jsonl"
FILE_BYTES_MAX: Final = 1 * limits.MIB
"""About 6,000 entries."""
OLD_FILES: Final = 3
"""``audit.1.jsonl`` is the youngest of them."""
ENTRIES_PER_S: Final = 0.2
ENTRIES_BURST: Final = 20.0
"""Of one kind, reason and node: a single event is always written at once, a flood once in five seconds."""
REASON_PER_S: Final = 1.0
REASON_BURST: Final = 200.0
"""Of one kind and reason, over all nodes: one that makes up names does not write without end."""
READ_BYTES_MAX: Final = 8 * FILE_BYTES_MAX
"""Of one file: older versions may have kept larger ones."""
REASONS_MAX: Final = 256
OTHER_REASONS: Final = "another reason"
"""What all beyond REASONS_MAX share their rate under."""
SUBJECTS_MAX: Final = 1024
"""Kind, reason and node, of which rates are remembered."""
TOTAL_PER_S: Final = 5.0
TOTAL_BURST: Final = 1000.0
"""Of one kind. Of refusals, the only ones that a stranger can make many of, at most 1 KB a second in the long run."""

KINDS: Final = ("started", "stopped", "refused", "registered", "revoked", "key")


@dataclass(slots=True)
class _Reason:
    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(REASON_PER_S, REASON_BURST))
    suppressed: int = 0


class AuditLog:
    """Appends entries to ``folder/audit.jsonl``. For one thread.

    Args:
        folder: the node's folder; it exists.
        monotonic: clock of the rates, in seconds.
        wall: clock of the entries, Unix time in seconds.

    Raises:
        ConfigError: something that is no regular file has the name of the log.
    """

    def __init__(
        self,
        folder: Path,
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        file_bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self.failures = 0
        """Entries that could not be written."""
        self._folder = folder
        self._monotonic = monotonic
        self._wall = wall
        self._file_bytes_max = file_bytes_max
        self._reasons: dict[tuple[str, str], _Reason] = {}
        self._subjects = KeyedBuckets(ENTRIES_PER_S, ENTRIES_BURST, SUBJECTS_MAX)
        self._totals = {kind: TokenBucket(TOTAL_PER_S, TOTAL_BURST) for kind in KINDS}
        self._torn = self._ends_torn()

    def write(self, kind: str, reason: str, *, subject: str = "", count: int = 1) -> bool:
        """Write one entry, unless there were too many like it lately.

        Args:
            kind: one of KINDS.
            reason: fixed text.
            subject: a node id, where one is known.
            count: how many events it stands for.

        Returns:
            whether it was written.
        """
        reason = reason[: limits.TEXT_CHARACTERS_MAX]
        found = self._reason(kind, reason)
        if not self._may_write(kind, reason, subject, found):
            found.suppressed += count
            return False
        entry: dict[str, Any] = {"time": _timestamp(self._wall()), "kind": kind, "reason": reason, "count": count}
        if subject:
            entry["node_id"] = subject
        if found.suppressed:
            entry["suppressed"] = found.suppressed
        written = self._append(entry)
        if written:
            found.suppressed = 0
        return written

    def _may_write(self, kind: str, reason: str, subject: str, found: _Reason) -> bool:
        now = self._monotonic()
        key = "\0".join((kind, reason, subject))
        total = self._totals[kind]
        # The narrowest first, and nothing is taken from any of them by what is not written.
        if self._subjects.wait(key, now) > 0 or found.bucket.wait(now) > 0 or total.take(now) > 0:
            return False
        self._subjects.take(key, now)
        found.bucket.take(now)
        return True

    def close(self) -> None:
        """Write down what was left out since the last entries."""
        for (kind, reason), found in self._reasons.items():
            if found.suppressed:
                entry = {"time": _timestamp(self._wall()), "kind": kind, "reason": reason, "count": 0}
                if self._append({**entry, "suppressed": found.suppressed}):
                    found.suppressed = 0

    def _reason(self, kind: str, reason: str) -> _Reason:
        key = (kind, reason)
        if key not in self._reasons and len(self._reasons) >= REASONS_MAX:
            key = (kind, OTHER_REASONS)
        return self._reasons.setdefault(key, _Reason())

    def _append(self, entry: dict[str, Any]) -> bool:
        line = json_text(entry).encode("utf-8", errors="replace") + b"\n"
        path = self._folder / AUDIT_FILE
        try:
            with os.fdopen(_open_for_append(path), "ab", buffering=0) as file:
                torn = b"\n" if self._torn else b""
                if file.tell() + len(torn) + len(line) <= self._file_bytes_max:
                    self._write_whole(file, torn + line)
                    return True
            self._rotate(path)
            with os.fdopen(_open_for_append(path), "ab", buffering=0) as file:
                self._write_whole(file, line)
        except OSError:
            self.failures += 1
            return False
        return True

    def _write_whole(self, file: IO[bytes], data: bytes) -> None:
        self._torn = True  # until it is whole: a disk may become full in the middle
        if file.write(data) != len(data):
            raise OSError("the audit log could not be written to its end")
        self._torn = False

    def _ends_torn(self) -> bool:
        """Whether the process before was cut off in the middle of a line."""
        try:
            with os.fdopen(open_regular(self._folder / AUDIT_FILE), "rb") as file:
                if file.seek(0, os.SEEK_END) == 0:
                    return False
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except NotRegularFile as error:
            raise unreadable("the audit log", self._folder / AUDIT_FILE, error) from None
        except OSError:
            return False

    def _rotate(self, path: Path) -> None:
        names = [path, *old_files(self._folder)]
        for older, younger in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if younger.exists():
                younger.replace(older)


def _open_for_append(path: Path) -> int:
    # O_NOFOLLOW: nobody may lead the log somewhere else by a link in its place.
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))


def old_files(folder: Path) -> list[Path]:
    """The rotated files of a folder, there or not, the youngest first."""
    return [folder / f"audit.{number}.jsonl" for number in range(1, OLD_FILES + 1)]


def read_entries(folder: Path) -> Iterator[dict[str, Any]]:
    """All entries of a node's folder, the oldest first. Damaged lines are left out."""
    for path in [*reversed(old_files(folder)), folder / AUDIT_FILE]:
        try:
            data = _end_of(path)
        except OSError:
            continue  # never written, rotated away meanwhile, or none of ours
        for line in data.splitlines():
            entry = parse_entry(line)
            if entry is not None:
                yield entry


def _end_of(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES_MAX))
        return file.read(READ_BYTES_MAX)


def parse_entry(line: bytes) -> dict[str, Any] | None:
    """One line of an audit file; None when it is no entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("kind"), str) else None


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
