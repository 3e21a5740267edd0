"""The file that keeps which identity key belongs to which node id, so that a stolen name is refused after a restart, too.

``known_nodes.json`` in the node's folder, mode 0600: ``{"node id": "64 hexadecimal digits", …}``, the node seen longest ago
first. A machine that was set up anew has a new key: ``kakeya key forget`` takes its line out, and a node that runs forgets
what somebody else took out of its file, also when it is just about to write it anew: both happen under the folder's lock
(:mod:`kakeya_zmq.file_lock`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from kakeya_zmq.file_lock import locked
from kakeya_zmq.protocol.identities import NODES_MAX
from wire.errors import ConfigError
from wire.files import read_regular, unreadable, write_private_file
from wire.keys import KEY_BYTES
from wire.limits import NAME_CHARACTERS_MAX
from wire.text import is_node_id

KNOWN_NODES_FILE: Final = "known_nodes.json"
FILE_BYTES_MAX: Final = NODES_MAX * (6 * NAME_CHARACTERS_MAX + 2 * KEY_BYTES + 16)
"""With every character of every name escaped."""


def load_known_nodes(folder: Path) -> dict[str, bytes]:
    """node id → public key; nothing when there is no file yet.

    Raises:
        ConfigError: the file cannot be read or is damaged. It is not ignored: without it a stolen name would be taken.
    """
    path = folder / KNOWN_NODES_FILE
    try:
        data = read_regular(path, FILE_BYTES_MAX)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable("", path, error, remedy="check its mode and size") from None
    try:
        return _parse(data)
    except (ValueError, RecursionError):
        remedy = "repair it, or remove it to trust every node anew"
        raise ConfigError(f"{path} is damaged", remedy=remedy) from None


def _parse(data: bytes) -> dict[str, bytes]:
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    found = {}
    for node_id, text in document.items():
        key = bytes.fromhex(text) if isinstance(text, str) else b""
        if not is_node_id(node_id) or len(key) != KEY_BYTES:
            raise ValueError("not a node")
        found[node_id] = key
    return found


def forget_node(folder: Path, node_id: str) -> bool:
    """Take a node out of the file; whether it was there.

    Raises:
        ConfigError: the file cannot be read or written, or is damaged.
    """
    try:
        with locked(folder):
            known = load_known_nodes(folder)
            if known.pop(node_id, None) is None:
                return False
            save_known_nodes(folder, known)
    except OSError as error:
        text = f"{folder / KNOWN_NODES_FILE} cannot be written: {error.strerror or 'unknown error'}"
        raise ConfigError(text, remedy="check its mode") from None
    return True


def taken_out(folder: Path, written: Collection[str]) -> set[str]:
    """Which of the nodes that were written into the file somebody has taken out since: to be forgotten.

    A file that is gone or damaged says nothing.
    """
    if not (folder / KNOWN_NODES_FILE).exists():
        return set()
    try:
        return set(written) - load_known_nodes(folder).keys()
    except ConfigError:
        return set()


def save_known_nodes(folder: Path, nodes: Mapping[str, bytes]) -> None:
    """Replace the file as a whole. Call it under the lock where others may write, too.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    text = json.dumps({node_id: key.hex() for node_id, key in nodes.items()}, indent=0)
    write_private_file(folder / KNOWN_NODES_FILE, text.encode("utf-8") + b"\n")
