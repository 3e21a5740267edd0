"""The file that keeps a node's revocations: ``revocations.json`` in its folder, mode 0600, a list of hexadecimal texts.

The node writes it, and so does ``kakeya revoke`` when no node can be reached. Both read, merge and replace it as a whole
under the folder's lock (:mod:`kakeya_zmq.file_lock`), so that neither loses what the other has written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kakeya_zmq.file_lock import locked
from wire.errors import ConfigError
from wire.files import read_regular, unreadable
from wire.keys import write_secret_file
from wire.limits import REVOCATION_BYTES_MAX, REVOCATIONS_MAX

REVOCATIONS_FILE: Final = "revocations.json"
ROWS_MAX: Final = REVOCATIONS_MAX + 64
"""What a node keeps, and what the command has added while it was away."""
FILE_BYTES_MAX: Final = ROWS_MAX * (2 * REVOCATION_BYTES_MAX + 8)


def load_revocations(folder: Path) -> tuple[bytes, ...]:
    """The signed revocations a node keeps; none when there is no file.

    Raises:
        ConfigError: the file cannot be read or is damaged. It is not ignored: a revoked key would be taken again.
    """
    path = folder / REVOCATIONS_FILE
    try:
        rows = json.loads(read_regular(path, FILE_BYTES_MAX))
        if not isinstance(rows, list):
            raise ValueError
        return tuple(bytes.fromhex(row) for row in rows)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise unreadable("", path, error, remedy="check its mode and size") from None
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path} is damaged", remedy="repair it, or remove it to revoke anew") from None


def save_revocations(folder: Path, blobs: Iterable[bytes]) -> None:
    """Replace the file as a whole, mode 0600. Call it under the lock.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps([blob.hex() for blob in blobs], indent=0)
    write_secret_file(folder / REVOCATIONS_FILE, text.encode("ascii") + b"\n", replace=True)


def add_revocation(folder: Path, blob: bytes) -> None:
    """Put one more into the file: the node takes it from there, within a second when it runs.

    Raises:
        ConfigError: the file is damaged, or cannot be written.
    """
    try:
        with locked(folder):
            held = load_revocations(folder)
            if len(held) >= ROWS_MAX:
                raise ConfigError(f"{folder / REVOCATIONS_FILE} is full", remedy="start the node, which sorts it out")
            if blob not in held:
                save_revocations(folder, (*held, blob))
    except OSError as error:
        text = f"{folder / REVOCATIONS_FILE} cannot be written: {error.strerror or error}"
        raise ConfigError(text, remedy="check its mode") from None
