"""A note of where a node's event bus listens, so that dashboard and monitor find the nodes of this machine by themselves.

``run/NODE.bus`` under the home, for its owner only, is there while the node serves. What a killed process leaves behind
names a process that is gone, and is passed over by readers (:mod:`dashboard.discovery`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kakeya_zmq.io.sockets import Address, parse_address
from wire.errors import ConfigError

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
        text = json.dumps({"pid": os.getpid(), "node_id": self._node_id, "bus_address": str(address)})
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.unlink(missing_ok=True)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            _log.warning("the dashboard will not find this node by itself: %s", error.strerror or "unknown error")

    def remove(self) -> None:
        """Remove it, unless another process of this node has written its own. Idempotent."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(self._path.read_text(encoding="utf-8"))["pid"] == os.getpid():
                self._path.unlink(missing_ok=True)

    def _address(self, facts: Mapping[str, object]) -> Address | None:
        port = facts.get("bus_port")
        if not isinstance(port, int) or not 0 < port < 65_536:
            return None
        try:
            return Address(parse_address(self._bus_bind or str(facts.get("address"))).host, port)
        except ConfigError:
            return None
