"""All PSKs of a fleet that are valid now: more than one while a new one takes an old one's place.

The file ``fleet.psk`` holds one key, as text, or a *ring*: the header line and then one key a line, newest first::

    # kakeya fleet keys, newest first
    6f2c…
    91ab…
    # end of 2 keys

Servers admit every key of the ring, each at an endpoint of its own; the oldest has the configured address, where everybody
looks first. Clients use the newest key that a node offers. A key is retired by taking it out of the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from wire.errors import ConfigError, SecretFileError
from wire.keys import (
    KEY_RING_HEADER,
    FleetKey,
    key_ring_end,
    read_fleet_key_file,
    split_keys,
    write_secret_file,
)

KEYS_MAX: Final = 4
"""Valid at one time. Two are what a rotation needs; each costs a node two listening sockets."""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The valid PSKs, newest first.

    Raises:
        ConfigError: none, more than KEYS_MAX, or one twice.
    """

    keys: tuple[FleetKey, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= KEYS_MAX or len({key.psk for key in self.keys}) < len(self.keys):
            raise ConfigError(f"a fleet has 1 to {KEYS_MAX} valid keys, all different", remedy="retire the old ones")

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Read the key file.

        Raises:
            SecretFileError: the file or one of its keys cannot be used (see :func:`wire.keys.read_secret_file`).
        """
        data = read_fleet_key_file(path)
        try:
            return cls(tuple(map(FleetKey, split_keys(data))))
        except ConfigError as error:
            raise SecretFileError(f"the fleet key file {path} is not usable: {error.message}", remedy=error.remedy) from None

    def save(self, path: Path) -> None:
        """Replace the key file as a whole, mode 0600.

        Raises:
            ConfigError: it cannot be written.
        """
        lines = [key.psk for key in self.keys]
        text = b"\n".join([KEY_RING_HEADER, *lines, key_ring_end(len(lines))] if len(lines) > 1 else lines)
        write_secret_file(path, text + b"\n", replace=True)

    @property
    def newest(self) -> FleetKey:
        return self.keys[0]

    @property
    def oldest(self) -> FleetKey:
        """The one that is admitted at a node's configured address."""
        return self.keys[-1]

    @property
    def key_ids(self) -> tuple[bytes, ...]:
        """8 public bytes each, newest first."""
        return tuple(key.key_id for key in self.keys)

    def find(self, key_id: bytes) -> FleetKey | None:
        return next((key for key in self.keys if key.key_id == key_id), None)

    def rotated(self, psk: bytes) -> KeyRing:
        """With a new key in front.

        Raises:
            ConfigError: there are too many already, the key is too short, or a key of the ring cannot stand in a line.
        """
        # A PSK is any bytes; one with a line break in it would be read back as two.
        if any(len(key.psk.splitlines()) != 1 or key.psk != key.psk.strip() for key in self.keys):
            raise ConfigError("the present fleet key is not one line of text", remedy="stop the fleet to replace it")
        return KeyRing((FleetKey(psk), *self.keys))

    def retired(self, key_id: bytes | None = None) -> KeyRing:
        """Without one key: the oldest, or the one with this id.

        Raises:
            ConfigError: there is no such key, or it is the only one.
        """
        if len(self.keys) == 1:
            raise ConfigError("the fleet has only one key", remedy="make a new one first: `kakeya key rotate`")
        gone = self.oldest if key_id is None else self.find(key_id)
        if gone is None:
            raise ConfigError("the fleet has no key with this id", remedy="`kakeya key show` lists the ids")
        return KeyRing(tuple(key for key in self.keys if key is not gone))


class KeyFile:
    """The key file of a process that runs on while keys change: what it holds now, read again when the file has changed.

    Raises:
        SecretFileError: it cannot be used at the beginning. Later that is told in :attr:`error`, and the last keys stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""
        self.ring = KeyRing.load(path)
        self._seen = self._look()

    def refresh(self) -> bool:
        """Look at the file; whether it holds other keys than before."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            ring, self.error = KeyRing.load(self.path), ""
        except SecretFileError as error:  # half copied, or a wrong mode: it will be looked at again
            self.error = str(error)
            return False
        changed, self.ring = ring != self.ring, ring
        return changed

    def valid_keys(self) -> tuple[FleetKey, ...]:
        """The valid keys, the oldest first: the order in which an unknown endpoint is tried."""
        self.refresh()
        return tuple(reversed(self.ring.keys))

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
