"""The audit log: who was refused, who came in for the first time, which keys changed. JSON lines in the node's folder.

Rules
- An entry never holds a prompt, token, hash, key or address (docs/privacy.md); texts are fixed or a node id.
- A stranger cannot fill the disk: entries of one kind and reason are written at a bounded rate, what is left out is counted
  in the next one (``suppressed``); files are rotated by size, and only so many are kept.
- A full disk or a lost folder costs the log, never the node: the failure is counted, and writing goes on when it can.
- Files have mode 0600. Entries of several nodes never share a file.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kakeya_zmq.protocol.limits import TokenBucket
from wire import limits

AUDIT_FILE: Final = "audit.jsonl"
FILE_BYTES_MAX: Final = 1 * limits.MIB
"""About 6,000 entries."""
OLD_FILES: Final = 3
"""``audit.1.jsonl`` is the youngest of them."""
ENTRIES_PER_S: Final = 0.2
ENTRIES_BURST: Final = 20.0
"""Of one kind and reason: a single event is always written at once, a flood once in five seconds."""
REASONS_MAX: Final = 256
TOTAL_PER_S: Final = 5.0
TOTAL_BURST: Final = 1000.0
"""Of all kinds together: at most 1 KB a second in the long run, whatever happens."""

KINDS: Final = ("started", "stopped", "refused", "registered", "revoked", "key")


@dataclass(slots=True)
class _Rate:
    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(ENTRIES_PER_S, ENTRIES_BURST))
    suppressed: int = 0


class AuditLog:
    """Appends entries to ``folder/audit.jsonl``. For one thread.

    Args:
        folder: the node's folder; it exists.
        monotonic: clock of the rates, in seconds.
        wall: clock of the entries, Unix time in seconds.
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
        self._rates: OrderedDict[tuple[str, str], _Rate] = OrderedDict()
        self._total = TokenBucket(TOTAL_PER_S, TOTAL_BURST)

    def write(self, kind: str, reason: str, *, subject: str = "", count: int = 1) -> bool:
        """Write one entry, unless there were too many of its kind and reason lately.

        Args:
            kind: one of KINDS.
            reason: fixed text.
            subject: a node id, where one is known.
            count: how many events it stands for.

        Returns:
            whether it was written.
        """
        reason = reason[: limits.TEXT_CHARACTERS_MAX]
        rate, now = self._rate(kind, reason), self._monotonic()
        if rate.bucket.take(now) > 0 or self._total.take(now) > 0:
            rate.suppressed += count
            return False
        entry: dict[str, Any] = {"time": _timestamp(self._wall()), "kind": kind, "reason": reason, "count": count}
        if subject:
            entry["node_id"] = subject
        if rate.suppressed:
            entry["suppressed"] = rate.suppressed
        written = self._append(entry)
        if written:
            rate.suppressed = 0
        return written

    def close(self) -> None:
        """Write down what was left out since the last entries."""
        for (kind, reason), rate in self._rates.items():
            if rate.suppressed:
                entry = {"time": _timestamp(self._wall()), "kind": kind, "reason": reason, "count": 0}
                if self._append({**entry, "suppressed": rate.suppressed}):
                    rate.suppressed = 0

    def _rate(self, kind: str, reason: str) -> _Rate:
        key = (kind, reason)
        if key not in self._rates and len(self._rates) >= REASONS_MAX:
            self._rates.popitem(last=False)
        return self._rates.setdefault(key, _Rate())

    def _append(self, entry: dict[str, Any]) -> bool:
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
        path = self._folder / AUDIT_FILE
        try:
            descriptor = _open_for_append(path)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                if file.tell() + len(line) <= self._file_bytes_max:
                    file.write(line)
                    return True
            self._rotate(path)
            with os.fdopen(_open_for_append(path), "ab", buffering=0) as file:
                file.write(line)
        except OSError:
            self.failures += 1
            return False
        return True

    def _rotate(self, path: Path) -> None:
        names = [path, *old_files(self._folder)]
        for older, younger in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if younger.exists():
                younger.replace(older)


def _open_for_append(path: Path) -> int:
    # O_NOFOLLOW: nobody may lead the log somewhere else by a link in its place.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o600)


def old_files(folder: Path) -> list[Path]:
    """The rotated files of a folder, there or not, the youngest first."""
    return [folder / f"audit.{number}.jsonl" for number in range(1, OLD_FILES + 1)]


def read_entries(folder: Path) -> Iterator[dict[str, Any]]:
    """All entries of a node's folder, the oldest first. Damaged lines are left out."""
    for path in [*reversed(old_files(folder)), folder / AUDIT_FILE]:
        try:
            data = path.read_bytes()
        except OSError:
            continue  # never written, or rotated away meanwhile
        for line in data.splitlines():
            entry = parse_entry(line)
            if entry is not None:
                yield entry


def parse_entry(line: bytes) -> dict[str, Any] | None:
    """One line of an audit file; None when it is no entry."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("kind"), str) else None


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
