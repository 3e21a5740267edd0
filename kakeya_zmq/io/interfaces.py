"""This machine's network interfaces: for judging the addresses that others tell."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final

import psutil

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.protocol.dialling import is_dialable

LOOK_AGAIN_S: Final = 10.0


class OwnInterfaces:
    """This machine's interfaces, read again after a while: a cable may be plugged in later."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at: float | None = None
        self._names: frozenset[str] = frozenset()
        self._link_local = False

    def may_dial(self, address: Address) -> bool:
        """Whether an address that another node tells leads somewhere that can be meant."""
        return address.port != 0 and self.may_dial_host(address.host)

    def may_dial_host(self, host: str) -> bool:
        """The same of a host by itself, without brackets."""
        now = self._clock()
        if self._read_at is None or now >= self._read_at + LOOK_AGAIN_S:
            self._read_at = now
            with contextlib.suppress(OSError):  # then as it was
                found = psutil.net_if_addrs()
                self._names = frozenset(found)
                own = [each for addresses in found.values() for each in addresses if each.family == socket.AF_INET]
                self._link_local = any(each.address.startswith("169.254.") for each in own)
        return is_dialable(host, link_local=self._link_local, interfaces=self._names)
