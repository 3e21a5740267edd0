"""A note of where a node and its event bus listen, so that status, dashboard and monitor find the nodes of this machine.

``run/NODE.bus`` under the home, for its owner only, is there while the node serves. What a killed process leaves behind
names a process that is gone, and is passed over by readers (:mod:`dashboard.discovery`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from kakeya_zmq.io.addresses import Address, parse_address
from wire.errors import ConfigError
from wire.files import make_private_folder, read_regular, write_private_file

NOTE_BYTES_MAX = 4096
CLOCK_GRAIN_SECONDS = 1.0
"""A process that began later than its note was written has only inherited the number."""

_log = logging.getLogger(__name__)


class BusNote:
    """The note of one node. Nothing depends on it: what cannot be written is told in the log and goes without.

    Args:
        home: the folder of keys, state and logs.
        bus_bind: the address the bus was told to use, "" for the host of the node's own.
    """

    def __init__(self, home: Path, node_id: str, bus_bind: str = "") -> None:
        self._path = home / "run" / f"{node_id}.bus"
        self._node_id = node_id
        self._bus_bind = bus_bind

    def write(self, facts: Mapping[str, object]) -> None:
        """Write it, from what the daemon tells once it serves: ``address`` and ``bus_port``."""
        address = self._address(facts)
        if address is None:
            return
        known = {"address": str(facts["address"])} if "address" in facts else {}
        text = json.dumps({"pid": os.getpid(), "node_id": self._node_id, "bus_address": str(address), **known})
        try:
            make_private_folder(self._path.parent)
            write_private_file(self._path, text.encode("utf-8"))
        except OSError as error:
            _log.warning("the dashboard will not find this node by itself: %s", error.strerror or "unknown error")

    def remove(self) -> None:
        """Remove it, unless another process of this node has written its own. Idempotent."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(read_regular(self._path, NOTE_BYTES_MAX))["pid"] == os.getpid():
                self._path.unlink(missing_ok=True)

    def _address(self, facts: Mapping[str, object]) -> Address | None:
        port = facts.get("bus_port")
        if not isinstance(port, int) or not 0 < port < 65_536:
            return None
        try:
            return Address(parse_address(self._bus_bind or str(facts.get("address"))).host, port)
        except ConfigError:
            return None


def nodes_here(home: Path) -> tuple[str, ...]:
    """Control addresses, ``host:port``, of the nodes that serve on this machine now, however they were started; by name."""
    return tuple(_served(home / "run"))


def _served(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.bus")):
        # Whatever cannot be read is left out: notes come and go while nodes start and end.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, ConfigError, psutil.Error):
            note = json.loads(read_regular(path, NOTE_BYTES_MAX))
            if psutil.Process(int(note["pid"])).create_time() <= path.stat().st_mtime + CLOCK_GRAIN_SECONDS:
                yield str(parse_address(note["address"]))
