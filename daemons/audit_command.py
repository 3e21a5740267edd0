"""``kakeya audit``: what the nodes of this machine wrote into their audit logs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kakeya_zmq.audit import AUDIT_FILE, READ_BYTES_MAX, old_files, parse_entry, read_entries
from kakeya_zmq.config import kakeya_home
from wire.errors import InvalidInput
from wire.files import open_regular
from wire.text import clean, json_text

POLL_SECONDS: Final = 0.5


def show_audit(node_ids: tuple[str, ...], *, last: int, follow: bool, as_json: bool) -> int:
    """Print entries, the oldest first: one line an entry, as text or as JSON.

    Args:
        node_ids: whose; all nodes of this machine when empty.
        last: how many of the entries so far.
        follow: go on with what comes, until interrupted.

    Returns:
        0.

    Raises:
        InvalidInput: there is no node of that name here.
    """
    folders = node_folders(node_ids)
    tails = [_Tail(folder) for folder in folders] if follow else []
    entries = [{"node": folder.name, **entry} for folder in folders for entry in read_entries(folder)]
    entries.sort(key=lambda entry: str(entry.get("time", "")))
    for entry in entries[-last:] if last else []:
        _print(entry, as_json)
    if not entries and not as_json and not follow:
        print("no audit entries on this machine", file=sys.stderr)
    while follow:
        for tail in tails:
            for entry in tail.read():
                _print({"node": tail.folder.name, **entry}, as_json)
        time.sleep(POLL_SECONDS)
    return 0


def node_folders(node_ids: tuple[str, ...]) -> list[Path]:
    """The folders of the nodes of this machine.

    Raises:
        InvalidInput: a name without a folder.
    """
    nodes = kakeya_home() / "nodes"
    if not node_ids:
        return sorted(folder for folder in nodes.glob("*") if folder.is_dir())
    known = {folder.name: folder for folder in nodes.glob("*") if folder.is_dir()}
    for node_id in node_ids:
        if node_id not in known:
            names = ", ".join(sorted(known)) or "none so far"
            raise InvalidInput(f"there is no node {node_id[:100]!r} on this machine", remedy=f"nodes here: {names}")
    return [known[node_id] for node_id in node_ids]


def _print(entry: dict[str, Any], as_json: bool) -> None:
    # What is in the file may have been written by an older version, or by others.
    print(json_text(entry) if as_json else clean(_as_text(entry)), flush=True)


def _as_text(entry: dict[str, Any]) -> str:
    parts = [str(entry.get("time", "")), str(entry.get("node", "")), str(entry["kind"]), str(entry.get("reason", ""))]
    if entry.get("node_id"):
        parts.append(f"({entry['node_id']})")
    if entry.get("suppressed"):
        parts.append(f"and {entry['suppressed']} more since")
    return "  ".join(parts)


class _Tail:
    """What is added to a node's audit file from now on; survives rotation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / AUDIT_FILE
        status = _status(self._path)
        self._inode = status.st_ino if status else 0
        self._position = status.st_size if status else 0
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        status = _status(self._path)
        if status is not None and status.st_ino != self._inode:
            if self._inode:
                yield from self._read(old_files(self.folder)[0])
            self._inode, self._position, self._rest = status.st_ino, 0, b""
        yield from self._read(self._path)

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                file.seek(self._position)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from filter(None, map(parse_entry, lines))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
