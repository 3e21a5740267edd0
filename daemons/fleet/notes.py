"""What runs of the local fleet, as ``run/fleet.json`` under the Kakeya home remembers it.

A process id alone is not trusted: a process counts as ours only when it started when we noted it did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from kakeya_zmq.config import kakeya_home
from kakeya_zmq.io.addresses import Address, parse_address
from kakeya_zmq.options import DEFAULT_PORTS
from wire.errors import ConfigError
from wire.files import make_private_folder, read_regular, write_private_file

PID_MAX = 2**31 - 1
NOTES_BYTES_MAX = 256 * 1024
"""Far more than a few daemons with all their flags."""


@dataclass(frozen=True, slots=True)
class Member:
    """One running daemon of the local fleet. ``created`` is the process's start time, seconds since the epoch."""

    role: str
    node_id: str
    address: str
    pid: int
    created: float
    log: str
    arguments: tuple[str, ...]
    bus_address: str = ""
    """Where its event bus listens, for the dashboard; empty when it has none."""

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            ours = abs(process.create_time() - self.created) < 2.0
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it is gone, or somebody else's
            return False

    def option(self, flag: str) -> str:
        """The value it was started with for ``flag``, or empty."""
        if flag not in self.arguments[:-1]:
            return ""
        return self.arguments[self.arguments.index(flag) + 1]


def run_folder() -> Path:
    return kakeya_home() / "run"


def notes_file() -> Path:
    return run_folder() / "fleet.json"


def load_fleet() -> tuple[Member, ...]:
    """The members noted by the last ``kakeya up``, alive or not.

    Raises:
        ConfigError: the notes cannot be read, or are not ours. Taken for none, they would be written over.
    """
    path = notes_file()
    try:
        return read_members(read_regular(path, NOTES_BYTES_MAX))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged, or not from `kakeya up`"
        remedy = "`kakeya down` stops what it was about, if that runs, and puts it aside"
        raise ConfigError(f"{path} cannot be used: {why}", remedy=remedy) from None


def read_members(data: bytes) -> tuple[Member, ...]:
    """Read notes of running daemons.

    Raises:
        ValueError: they are none.
    """
    try:
        members = msgspec.json.decode(data, type=tuple[Member, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not all(0 < member.pid <= PID_MAX for member in members):
        raise ValueError("no process has such a number")
    return members


def save_fleet(members: Sequence[Member]) -> None:
    path = notes_file()
    make_private_folder(path.parent)
    write_private_file(path, json.dumps([asdict(member) for member in members], indent=2).encode("utf-8"))


def live_members() -> tuple[Member, ...]:
    return tuple(member for member in load_fleet() if member.alive)


def find_member(role: str) -> Member | None:
    return next((member for member in live_members() if member.role == role), None)


def primary_address() -> Address:
    """Where the local fleet's primary serves: the running one's, else the usual address."""
    member = find_member("primary")
    return parse_address(member.address) if member else Address("127.0.0.1", DEFAULT_PORTS["primary"])
