"""Where the buses of the nodes on this machine listen: what ``kakeya up`` and starting daemons leave under the home."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kakeya_zmq.io.sockets import Address, parse_address
from wire.errors import ConfigError

FILE_BYTES_MAX: Final = 256 * 1024
READY_FILES_MAX: Final = 64


def local_buses(home: Path) -> frozenset[Address]:
    """Bus addresses of the local nodes. Whatever cannot be read is left out: files come and go while nodes start and end."""
    return frozenset(_found(home / "run"))


def _found(folder: Path) -> Iterator[Address]:
    rows = _read(folder / "fleet.json")
    for row in rows if isinstance(rows, list) else []:
        yield from _address(row, "bus_address")
    for path in sorted(folder.glob("*.ready"))[:READY_FILES_MAX]:
        facts = _read(path)
        if isinstance(facts, dict) and isinstance(facts.get("bus_port"), int):
            for address in _address(facts, "address"):
                if 0 < facts["bus_port"] < 65_536:
                    yield Address(address.host, facts["bus_port"])


def _address(row: Any, field: str) -> Iterator[Address]:
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str) and text:
        try:
            yield parse_address(text)
        except ConfigError:
            return


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
