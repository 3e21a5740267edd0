"""``kakeya key``: the state of the keys on this machine, never the keys themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kakeya_zmq.config import kakeya_home
from wire.errors import SecretFileError
from wire.keys import KEY_BYTES, PSK_BYTES_MIN, FleetKey, read_secret_file


def key_states(psk_file: Path) -> list[dict[str, Any]]:
    """One row a key file: name, whether it is usable, and a line that says why not."""
    rows = [_state("fleet key", psk_file, PSK_BYTES_MIN)]
    if rows[0]["usable"]:
        rows[0]["state"] += f", key id {FleetKey.load(psk_file).key_id.hex()}"
    for path in sorted((psk_file.parent / "tenants").glob("*.key")):
        rows.append(_state(f"tenant {path.stem}", path, KEY_BYTES))
    for path in sorted((kakeya_home() / "nodes").glob("*/identity.key")):
        rows.append(_state(f"identity of {path.parent.name}", path, KEY_BYTES))
    return rows


def _state(name: str, path: Path, minimum_bytes: int) -> dict[str, Any]:
    try:
        read_secret_file(path, minimum_bytes=minimum_bytes, what=name)
    except SecretFileError as error:
        return {"key": name, "usable": False, "state": str(error)}
    return {"key": name, "usable": True, "state": "ready, mode 0600"}
