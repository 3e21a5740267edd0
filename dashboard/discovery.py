"""Where the buses of the nodes on this machine listen: what ``kakeya up`` and running daemons leave under the home."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kakeya_zmq.io.addresses import Address, parse_address
from wire.errors import ConfigError
from wire.files import read_regular

FILE_BYTES_MAX: Final = 256 * 1024
FILES_MAX: Final = 64
"""Of each kind."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Who listens on all interfaces is reached through the loopback one."""


def local_buses(home: Path) -> frozenset[Address]:
    """Bus addresses of the local nodes. Whatever cannot be read is left out: files come and go while nodes start and end."""
    return frozenset(_found(home / "run"))


def _found(folder: Path) -> Iterator[Address]:
    rows = _read(folder / "fleet.json")
    for row in rows if isinstance(rows, list) else []:
        yield from _address(row, "bus_address")
    for path in sorted(folder.glob("*.ready"))[:FILES_MAX]:
        facts = _read(path)
        if isinstance(facts, dict) and isinstance(facts.get("bus_port"), int):
            for address in _address(facts, "address"):
                if 0 < facts["bus_port"] < 65_536:
                    yield Address(address.host, facts["bus_port"])
    for path in sorted(folder.glob("*.bus"))[:FILES_MAX]:
        facts = _read(path)
        if isinstance(facts, dict) and _is_alive(facts.get("pid")):
            yield from _address(facts, "bus_address")


def _address(row: Any, field: str) -> Iterator[Address]:
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str) and text:
        try:
            address = parse_address(text)
        except ConfigError:
            return
        yield Address(_EVERYWHERE.get(address.host, address.host), address.port)


def _is_alive(pid: object) -> bool:
    """Whether a process of that number runs; a note of one that was killed would lead to whoever has its port now."""
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, FILE_BYTES_MAX))
    except (OSError, ValueError):
        return None
