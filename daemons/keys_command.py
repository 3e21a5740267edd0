"""``kakeya key``: makes, rotates and retires keys, forgets pinned ones, and shows their state, never the keys themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kakeya_zmq.config import kakeya_home
from kakeya_zmq.known_nodes import forget_node
from wire.errors import ConfigError, SecretFileError
from wire.keyring import KeyRing
from wire.keys import (
    FleetKey,
    NodeIdentity,
    load_or_create_tenant_key,
    read_fleet_key_file,
    write_secret_file,
)

ACTIONS: Final = ("new", "rotate", "retire", "telemetry", "forget", "show")
KEY_ID_DIGITS: Final = 16


def run_key_action(action: str, argument: str, psk_file: Path) -> str:
    """Carry out one action; lines that say what was done, and what comes next. Empty for ``show``.

    Args:
        argument: of ``retire`` a key id, empty for the oldest key; of ``forget`` a node id.

    Raises:
        ConfigError: the argument or the state of the keys does not allow it.
    """
    if argument and action not in ("retire", "forget"):
        raise ConfigError(f"`kakeya key {action}` takes no argument")
    match action:
        case "new":
            write_secret_file(psk_file, FleetKey.generate())
            return "made a new fleet key (mode 0600); copy it to every machine of the fleet over a safe channel"
        case "rotate":
            return _rotate(psk_file)
        case "retire":
            return _retire(psk_file, argument)
        case "telemetry":
            return _telemetry(psk_file)
        case "forget":
            return _forget(argument)
        case _:
            return ""


def _rotate(psk_file: Path) -> str:
    ring = KeyRing.load(psk_file).rotated(FleetKey.generate())
    ring.save(psk_file)
    return (
        f"made a new fleet key, key id {ring.newest.key_id.hex()}; the others stay valid.\n"
        f"Copy {psk_file.name} to every machine of the fleet over a safe channel: running nodes read it by themselves.\n"
        "When all of them have it, run `kakeya key retire` and copy the file again."
    )


def _retire(psk_file: Path, argument: str) -> str:
    ring = KeyRing.load(psk_file)
    try:
        key_id = bytes.fromhex(argument) if argument else None
    except ValueError:
        raise ConfigError(f"not a key id: {argument[:40]!r}", remedy=f"it has {KEY_ID_DIGITS} hexadecimal digits") from None
    left = ring.retired(key_id)
    left.save(psk_file)
    gone = next(each.hex() for each in ring.key_ids if left.find(each) is None)
    return (
        f"retired the fleet key {gone}: running nodes on this machine finish what runs under it, and take it no more.\n"
        f"Copy {psk_file.name} to the other machines soon; dashboards elsewhere need a new telemetry key, too."
    )


def _telemetry(psk_file: Path) -> str:
    from daemons.dashboard_command import TELEMETRY_KEY_FILE, write_telemetry_key

    made = write_telemetry_key(psk_file.with_name(TELEMETRY_KEY_FILE), psk_file)
    return f"{'made' if made else 'kept'} the telemetry-read key (mode 0600), which opens telemetry and nothing else"


def _forget(node_id: str) -> str:
    if not node_id:
        raise ConfigError("forget whom?", remedy="`kakeya key forget NODE`")
    from dashboard.speakers import reader_folders

    folders = [path.parent for path in sorted((kakeya_home() / "nodes").glob("*/identity.key"))]
    forgotten = [folder.name for folder in folders if forget_node(folder, node_id)]
    if sum(forget_node(folder, node_id) for folder in reader_folders(kakeya_home())):
        forgotten.append("dashboard and monitor")
    if not forgotten:
        raise ConfigError(
            f"no node and no dashboard of this machine has seen {node_id[:64]!r}",
            remedy="`kakeya status` lists them; new ones come within seconds",
        )
    return f"{', '.join(forgotten)} will take the next key that comes under the name {node_id[:64]}; do so on every machine"


def key_states(psk_file: Path) -> list[dict[str, Any]]:
    """One row a key file: name, whether it is usable, and a line that says why not."""
    rows = [_state("fleet key", psk_file, _fleet_key)]
    if rows[0]["usable"]:
        rows = [*_ring_states(psk_file)]
    for path in sorted((psk_file.parent / "tenants").glob("*.key")):
        rows.append(_state(f"tenant {path.stem}", path, _tenant_key))
    for path in sorted((kakeya_home() / "nodes").glob("*/identity.key")):
        rows.append(_state(f"identity of {path.parent.name}", path, _identity))
    return rows


def _ring_states(psk_file: Path) -> list[dict[str, Any]]:
    try:
        ring = KeyRing.load(psk_file)
    except SecretFileError as error:
        return [{"key": "fleet key", "usable": False, "state": str(error)}]
    rows: list[dict[str, Any]] = []
    for number, key in enumerate(ring.keys):
        name = "fleet key" if number == 0 else "older fleet key, still valid"
        rows.append({"key": name, "usable": True, "state": f"ready, mode 0600, key id {key.key_id.hex()}"})
    return rows


def _tenant_key(path: Path) -> str:
    load_or_create_tenant_key(path)
    return ""


def _identity(path: Path) -> str:
    # Public, and what a roster wants.
    return f", public key {NodeIdentity.load_or_create(path).public_key.hex()}"


def _fleet_key(path: Path) -> str:
    read_fleet_key_file(path)
    return ""


def _state(name: str, path: Path, load: Callable[[Path], str]) -> dict[str, Any]:
    """``load`` reads it as a daemon does, so that both say the same of it, and may add to the line."""
    try:
        more = load(path)
    except (SecretFileError, ConfigError) as error:
        return {"key": name, "usable": False, "state": str(error)}
    return {"key": name, "usable": True, "state": f"ready, mode 0600{more}"}
