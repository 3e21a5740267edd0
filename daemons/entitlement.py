"""Who may be here and do what: roster, revocations and forgotten keys of one node, from files that may change meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from kakeya_zmq.audit import AuditLog
from kakeya_zmq.file_lock import locked
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, load_known_nodes
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.limits import KeyedBuckets, TokenBucket
from kakeya_zmq.protocol.revocation import RevocationBook
from kakeya_zmq.revocation_file import REVOCATIONS_FILE, load_revocations, save_revocations
from kakeya_zmq.roster import Access, Roster
from wire.errors import ConfigError
from wire.files import file_state
from wire.limits import REVOCATIONS_MAX
from wire.revocations import Revocation

LOOK_S: Final = 1.0
REVOKED_HERE: Final = "the identity key of the node is revoked"
OFF_ROSTER: Final = "the roster does not admit the node any more"
LAPSED: Final = "a revocation does not count any more: who made it is no administrator of the roster"
MADE_ROOM: Final = "a revocation does not count any more: it made room for others"
FINGERPRINT_DIGITS: Final = 16
NEW_PER_S: Final = 2.0
"""New revocations of one teller that are looked at: each costs a signature and perhaps room in a full book."""
NEW_BURST: Final = 64.0
"""Two issuers' full shares."""
NEW_OF_ALL_PER_S: Final = 32.0
NEW_OF_ALL_BURST: Final = 1024.0
"""A whole book, once."""
SAVE_INTERVAL_S: Final = 5.0
"""Between two writings of the file, unless the node's own operator has revoked something: a full one is 345 kB, flushed."""

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
        self.now_revoked: Callable[[], None] = lambda: None
        """Called when keys are refused that were not before."""
        self._folder = folder
        self._roster_file = roster_file
        self._identities = identities
        self._audit = audit
        self._refused = refused
        self._expel = expel
        self._forgotten = forgotten
        self._roster_seen = file_state(roster_file)
        if self._roster_seen is not None:
            self._use(Roster.load(roster_file))
        self._told_by = KeyedBuckets(NEW_PER_S, NEW_BURST)
        self._told = TokenBucket(NEW_OF_ALL_PER_S, NEW_OF_ALL_BURST)
        self._unsaved = False
        self._saved_at = float("-inf")
        self.revocations = RevocationBook(
            self._may_revoke, valid=self._still_valid, bound=self._is_bound, trusted=self._is_trusted
        )
        for reason in self.revocations.merge_own(load_revocations(folder)).refused:
            refused(reason)
        self._revocations_seen = file_state(folder / REVOCATIONS_FILE)
        for key in self.revocations.revoked_keys:
            identities.revoke(key)
        self._known_seen = file_state(folder / KNOWN_NODES_FILE)
        self._known = set(identities.nodes())
        """Who was in that file when it was read or written last."""
        self._next_look = reactor.clock() + LOOK_S
        self._clock = reactor.clock
        reactor.add_deadline_source(lambda: self._next_look, self._watch)

    def merge(self, blobs: Iterable[bytes], teller: bytes | str = b"") -> None:
        """Revocations that somebody told: what is new and right counts from now on.

        Args:
            teller: who: a node's identity key or name.
        """
        now = self._clock()
        merged = self.revocations.merge(blobs, lambda claimed: self._affordable(claimed, teller, now))
        for reason in merged.refused:
            self._refused(reason)
        self._now_revoked(merged.revoked)
        self._now_reinstated(merged.reinstated, MADE_ROOM)
        if merged.taken:
            self._unsaved = True
            own = any(self._identities.is_own(each.issuer_public_key) for each in merged.taken)
            self._save_when_due(now, at_once=own)

    @property
    def known_written(self) -> Collection[str]:
        """Who was in the file of known nodes when it was read or written last."""
        return self._known

    def known_saved(self) -> None:
        """The node itself has just written its file of known nodes, and still holds the lock."""
        self._known_seen = file_state(self._folder / KNOWN_NODES_FILE)
        self._known = set(self._identities.nodes())

    def forget(self, node_ids: Iterable[str]) -> None:
        """The administrator has taken these out of the file of known nodes."""
        for node_id in sorted(node_ids):
            if self._identities.forget(node_id):
                self._audit.write("key", "the key of a node was forgotten by the administrator", subject=node_id)
                self._forgotten(node_id)

    def stop(self) -> None:
        """Nothing is watched any more; what waits to be written is written."""
        self._next_look = float("inf")
        self._save_when_due(self._clock(), at_once=True)

    # --- revocations -----------------------------------------------------------------------------------------------

    def _may_revoke(self, issuer: bytes) -> bool:
        roster = self.access.roster
        if roster is not None:
            return roster.may_revoke(issuer)
        # A revoked key may have been bound elsewhere only: all nodes have to come to the same.
        return self._identities.knows(issuer) or issuer in self.revocations

    def _affordable(self, claimed: Revocation, teller: bytes | str, now: float) -> bool:
        """Whether one more new revocation may be looked at now: so many of one teller, so many of all. What others tell does
        not take from what the own operator, or an administrator of the roster, may revoke: that is bounded by its teller."""
        if self._told_by.wait(teller, now) > 0:
            return False
        if not self._is_trusted(claimed.issuer_public_key) and self._told.take(now) > 0:
            return False
        self._told_by.take(teller, now)
        return True

    def _is_trusted(self, issuer: bytes) -> bool:
        roster = self.access.roster
        return self._identities.is_own(issuer) if roster is None else roster.may_revoke(issuer)

    def _still_valid(self, issuer: bytes) -> bool:
        roster = self.access.roster
        return roster is None or roster.may_revoke(issuer)

    def _is_bound(self, public_key: bytes) -> bool:
        """Whether a node is known under this key, by the roster or because it was seen; also when the key is revoked."""
        return self._identities.knows(public_key) or bool(self._listed_names(public_key))

    def _listed_names(self, public_key: bytes) -> tuple[str, ...]:
        roster = self.access.roster
        nodes = roster.nodes.items() if roster is not None else ()
        return tuple(node_id for node_id, node in nodes if node.public_key == public_key)

    def _names_of(self, public_key: bytes) -> tuple[str, ...]:
        """The names a key is known under here, whatever others say of it."""
        return tuple(dict.fromkeys((*self._listed_names(public_key), *self._identities.names_of(public_key))))

    def _shown(self, public_key: bytes) -> str:
        names = self._names_of(public_key)
        return ", ".join(names[:4]) if names else f"the unknown key {public_key.hex()[:FINGERPRINT_DIGITS]}"

    def _now_revoked(self, revocations: Collection[Revocation]) -> None:
        if revocations:
            self.now_revoked()
        for revocation in revocations:
            key = revocation.identity_public_key
            self._identities.revoke(key)
            by = self._shown(revocation.issuer_public_key)
            names = self._names_of(key)
            for name in names:
                self._audit.write("revoked", f"revoked by {by}", subject=name)
            if not names:
                self._audit.write("revoked", f"{self._shown(key)} is revoked by {by}")
            for name in names or ("",):
                self._expel(key, name, REVOKED_HERE)

    def _now_reinstated(self, keys: Iterable[bytes], why: str) -> None:
        for key in keys:
            self._identities.reinstate(key)
            for name in self._names_of(key) or ("",):
                self._audit.write("revoked", why, subject=name)

    def _save_when_due(self, now: float, *, at_once: bool = False) -> None:
        """Write down what was taken since the last time: many that come in a row cost one writing."""
        if self._unsaved and (at_once or now >= self._saved_at + SAVE_INTERVAL_S):
            self._exchange_with_file(write=True)

    def _exchange_with_file(self, *, write: bool) -> None:
        """Take what somebody else has put into the file of revocations, and write down what it lacks."""
        if write:
            self._saved_at, self._unsaved = self._clock(), False
        try:
            with locked(self._folder):
                kept = load_revocations(self._folder)
                merged = self.revocations.merge_own(kept)
                if write:
                    save_revocations(self._folder, self.revocations.blobs())
                elif len(kept) > REVOCATIONS_MAX:
                    self._unsaved = True  # what has found no room must not keep the command from adding more
                self._revocations_seen = file_state(self._folder / REVOCATIONS_FILE)
        except (ConfigError, OSError) as error:
            # They count for this run; the next exchange after a restart brings them back.
            self._revocations_seen = file_state(self._folder / REVOCATIONS_FILE)
            _log.error("revocations cannot be kept: %s", error)
            return
        self._now_revoked(merged.revoked)
        self._now_reinstated(merged.reinstated, MADE_ROOM)

    # --- files -------------------------------------------------------------------------------------------------------

    def _use(self, roster: Roster | None) -> None:
        self.access.roster = roster
        self._identities.judge = roster.judge if roster is not None else None

    def _watch(self, now: float) -> None:
        self._next_look = now + LOOK_S
        self._watch_roster()
        self._watch_known_nodes()
        if (seen := file_state(self._folder / REVOCATIONS_FILE)) is not None and seen != self._revocations_seen:
            self._exchange_with_file(write=False)
        self._save_when_due(now)

    def _watch_roster(self) -> None:
        seen = file_state(self._roster_file)
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
        revoked, reinstated = self.revocations.judge_again()
        self._now_revoked(revoked)
        self._now_reinstated(reinstated, LAPSED)

    def _watch_known_nodes(self) -> None:
        seen = file_state(self._folder / KNOWN_NODES_FILE)
        if seen is None or seen == self._known_seen:
            return
        self._known_seen = seen
        try:
            kept = load_known_nodes(self._folder)
        except ConfigError as error:
            _log.error("the file of known nodes is not read again: %s", error)
            return
        gone, self._known = self._known - kept.keys(), set(kept)
        self.forget(gone)
