"""Who may be here and do what: roster, revocations and forgotten keys of one node, from files that may change meanwhile."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from kakeya_zmq.audit import AuditLog
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, load_known_nodes
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.revocation import RevocationBook
from kakeya_zmq.roster import Access, Roster
from wire.errors import ConfigError
from wire.keys import write_secret_file
from wire.limits import REVOCATION_BYTES_MAX, REVOCATIONS_MAX

REVOCATIONS_FILE: Final = "revocations.json"
FILE_BYTES_MAX: Final = REVOCATIONS_MAX * (2 * REVOCATION_BYTES_MAX + 8)
LOOK_S: Final = 1.0
REVOKED_HERE: Final = "the identity key of the node is revoked"
OFF_ROSTER: Final = "the roster does not admit the node any more"

_log = logging.getLogger(__name__)


class Entitlement:
    """Use it on the reactor's thread.

    Args:
        folder: the node's folder.
        roster_file: where the roster is, if there is one.
        identities: the node's book; it gets the roster's word and the revoked keys.
        refused: told why a revocation was refused (fixed text).
        expel: ends everything with a node: its key, its name, why.
        forgotten: told the id of each node whose key was taken out of the file of known nodes.

    Raises:
        ConfigError: the roster or a file of ours is damaged.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        folder: Path,
        roster_file: Path,
        identities: IdentityBook,
        audit: AuditLog,
        refused: Callable[[str], None],
        expel: Callable[[bytes, str, str], None],
        forgotten: Callable[[str], None],
    ) -> None:
        self.access = Access()
        self.error = ""
        """Why a changed roster is not used; empty when it is."""
        self._folder = folder
        self._roster_file = roster_file
        self._identities = identities
        self._audit = audit
        self._refused = refused
        self._expel = expel
        self._forgotten = forgotten
        self._roster_seen = _look(roster_file)
        if self._roster_seen is not None:
            self._use(Roster.load(roster_file))
        self.revocations = RevocationBook(self._may_revoke, load_revocations(folder), bound=self._is_bound)
        for key in self.revocations.revoked_keys:
            identities.revoke(key)
        self._known_seen = _look(folder / KNOWN_NODES_FILE)
        self._known = set(identities.nodes())
        """Who was in that file when it was read or written last."""
        self._next_look = reactor.clock() + LOOK_S
        self._clock = reactor.clock
        reactor.add_deadline_source(lambda: self._next_look, self._watch)

    def merge(self, blobs: Iterable[bytes]) -> None:
        """Revocations that somebody told: what is new and right counts from now on.

        A key whose revocation made room for another stays refused until this node is started again.
        """
        merged = self.revocations.merge(blobs)
        for reason in merged.refused:
            self._refused(reason)
        for revocation in merged.revoked:
            self._identities.revoke(revocation.identity_public_key)
            self._audit.write("revoked", f"revoked by {revocation.issuer_id}", subject=revocation.node_id)
            self._expel(revocation.identity_public_key, revocation.node_id, REVOKED_HERE)
        if merged.revoked:
            try:
                save_revocations(self._folder, self.revocations.blobs())
            except ConfigError as error:
                # It counts for this run; the next exchange after a restart brings it back.
                _log.error("revocations cannot be kept: %s", error)

    def known_saved(self) -> None:
        """The node itself has just written its file of known nodes."""
        self._known_seen = _look(self._folder / KNOWN_NODES_FILE)
        self._known = set(self._identities.nodes())

    def stop(self) -> None:
        self._next_look = float("inf")

    # --- files -------------------------------------------------------------------------------------------------------

    def _may_revoke(self, issuer: bytes) -> bool:
        roster = self.access.roster
        return roster.may_revoke(issuer) if roster is not None else self._identities.holds(issuer)

    def _is_bound(self, public_key: bytes) -> bool:
        """Whether a node is known under this key, by the roster or because it was seen; also when the key is revoked."""
        roster = self.access.roster
        listed = roster is not None and any(node.public_key == public_key for node in roster.nodes.values())
        return listed or self._identities.holds(public_key) or public_key in self._identities.nodes().values()

    def _use(self, roster: Roster | None) -> None:
        self.access.roster = roster
        self._identities.judge = roster.judge if roster is not None else None

    def _watch(self, now: float) -> None:
        self._next_look = now + LOOK_S
        self._watch_roster()
        self._watch_known_nodes()

    def _watch_roster(self) -> None:
        seen = _look(self._roster_file)
        if seen == self._roster_seen:
            return
        self._roster_seen = seen
        if seen is None:
            # It may be on its way to being replaced: that must not open the fleet.
            self.error = "the roster file is gone; the roster before stays in force until a restart"
            _log.error("%s", self.error)
            return
        try:
            roster = Roster.load(self._roster_file)
        except ConfigError as error:
            # The one before goes on: a slip of the pen must neither open nor close the fleet.
            self.error = str(error)
            _log.error("the roster is not read again: %s", error)
            return
        self.error = ""
        self._use(roster)
        self._audit.write("key", "the roster was read again")
        for node_id, key in self._identities.nodes().items():
            listed = roster.nodes.get(node_id)
            if listed is None or listed.public_key != key:
                self._expel(key, node_id, OFF_ROSTER)

    def _watch_known_nodes(self) -> None:
        seen = _look(self._folder / KNOWN_NODES_FILE)
        if seen is None or seen == self._known_seen:
            return
        self._known_seen = seen
        try:
            kept = load_known_nodes(self._folder)
        except ConfigError as error:
            _log.error("the file of known nodes is not read again: %s", error)
            return
        gone, self._known = self._known - kept.keys(), set(kept)
        for node_id in sorted(gone):
            if self._identities.forget(node_id):
                self._audit.write("key", "the key of a node was forgotten by the administrator", subject=node_id)
                self._forgotten(node_id)


def load_revocations(folder: Path) -> tuple[bytes, ...]:
    """The signed revocations a node keeps; none when there is no file.

    Raises:
        ConfigError: the file is damaged. It is not ignored: a revoked key would be taken again.
    """
    path = folder / REVOCATIONS_FILE
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        rows = json.loads(data)
        if not isinstance(rows, list):
            raise ValueError
        return tuple(bytes.fromhex(row) for row in rows)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path} is damaged", remedy="repair it, or remove it to revoke anew") from None


def save_revocations(folder: Path, blobs: Iterable[bytes]) -> None:
    """Replace the file as a whole, mode 0600.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps([blob.hex() for blob in blobs], indent=0)
    write_secret_file(folder / REVOCATIONS_FILE, text.encode("ascii") + b"\n", replace=True)


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
