"""Where a node keeps its state, and the secrets it starts with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kakeya_zmq.config import Settings, kakeya_home
from wire.keyring import KeyFile
from wire.keys import NodeIdentity


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The secrets of one node."""

    fleet_keys: KeyFile
    identity: NodeIdentity


def load_keys(settings: Settings) -> NodeKeys:
    """Read the PSKs and the node's identity key (made on first start).

    Raises:
        SecretFileError: a file is missing, unreadable, too short or readable by others.
    """
    fleet_keys = KeyFile(Path(settings.fleet_psk_file))
    identity = NodeIdentity.load_or_create(node_folder(settings.node_id) / "identity.key")
    return NodeKeys(fleet_keys, identity)


def node_folder(node_id: str) -> Path:
    """Where a node keeps its state; one machine may run several nodes."""
    return kakeya_home() / "nodes" / node_id
