"""Whose telemetry is taken under which name, for readers that are no members of the fleet: dashboard, monitor.

Telemetry is signed (:mod:`wire.bus`), and every holder of the telemetry key can sign: what counts is whose key belongs to a
name. In this order:

1. The roster says it, where this machine has one: then no name is taken that is not on it.
2. A node that was paired with this dashboard has the key that it proved then.
3. Else the first key that was heard under a name is its key for good, until ``kakeya key forget`` takes it out of the file.

The file is the one that nodes keep too (:mod:`kakeya_zmq.known_nodes`), in a folder of all readers of one fleet on this
machine: each of them takes over what the others have written. The book behind it is the nodes' own
(:mod:`kakeya_zmq.protocol.identities`): it is bounded, forgets nobody to make room, and takes only so many newcomers a run.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kakeya_zmq.file_lock import locked
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, load_known_nodes, save_known_nodes
from kakeya_zmq.protocol.identities import OTHER_KEY, IdentityBook
from kakeya_zmq.roster import ROSTER_FILE, Roster
from kakeya_zmq.user_paths import user_path
from wire.errors import ConfigError
from wire.files import file_state, make_private_folder
from wire.keys import TelemetryKey

_log = logging.getLogger(__name__)

FOLDER: Final = "telemetry"
"""Below the home."""
SAVE_S: Final = 5.0
"""Newcomers are written down at most this often; made-up names must not keep the disk busy."""
OTHER_SPEAKER: Final = "telemetry is signed with another key than the name had so far (`kakeya key forget` if that is right)"
NOT_PAIRED: Final = "telemetry is signed with another key than the node was paired with"
TELEMETRY_KEY_FILE: Final = "telemetry.key"
_PERSON_FOLDER: Final = b"kz readers"
_NOBODY: Final = ("", b"")
_HEARD: Final = ("heard",)


def _nobody_paired() -> Mapping[str, bytes]:
    return {}


class Speakers:
    """Use it on one thread.

    Args:
        folder: where first keys are kept; made on first use. In memory only when None.
        roster_file: used where there is such a file.
        roster_is_named: there must be one.
        paired: node id → key of the nodes that were paired, asked at each :meth:`look`.

    Raises:
        ConfigError: the file of known nodes or the roster is damaged.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        roster_file: Path | None = None,
        roster_is_named: bool = False,
        paired: Callable[[], Mapping[str, bytes]] = _nobody_paired,
    ) -> None:
        self.rebound: Callable[[str], None] = lambda node_id: None
        """Told the name of each node that another key stands for from now on, or none."""
        self._folder = folder
        self._roster_file = roster_file
        self._ask_paired = paired
        self._paired = paired()
        self._roster: Roster | None = None
        self._roster_seen = file_state(roster_file)
        if roster_file is not None:
            self._roster = Roster.load_if_any(roster_file, named=roster_is_named)
        self._file_seen = file_state(self._file)
        known = load_known_nodes(folder) if folder is not None else {}
        self._written = set(known)
        self._book = IdentityBook(_NOBODY, known)
        self._book.judge = self._judge if self._roster is not None else None
        self._saved_at = float("-inf")
        self._unsaved = False
        self._error_told = False

    @property
    def _file(self) -> Path | None:
        return self._folder / KNOWN_NODES_FILE if self._folder is not None else None

    def knows(self, node_id: str) -> bool:
        """Whether a key is kept for a name."""
        return self._book.key_of(node_id) is not None

    def admit(self, node_id: str, public_key: bytes) -> str:
        """Why a message that this key has signed is not taken under this name (fixed text), or an empty text."""
        before = self._book.key_of(node_id)
        paired = self._paired.get(node_id) if self._roster is None else None
        if paired is not None and paired != public_key:
            return NOT_PAIRED
        if paired is not None and before not in (None, public_key):
            self._book.forget(node_id)
        refusal = self._book.admit(node_id, public_key, _HEARD)
        if refusal:
            return OTHER_SPEAKER if refusal == OTHER_KEY else refusal
        if before != public_key:
            self._unsaved = True
            if before is not None:
                self.rebound(node_id)
        return ""

    def look(self, now: float) -> None:
        """Read what others have changed, write what is new; call it about once a second."""
        self._paired = self._ask_paired()
        self._look_at_roster()
        if self._folder is None:
            return
        try:
            if file_state(self._file) != self._file_seen:
                self._merge()
            if self._unsaved and now - self._saved_at >= SAVE_S:
                self._save(now)
        except (OSError, ConfigError) as error:
            # What was heard first stays bound for this run; the next look tries again.
            if not self._error_told:
                why = error.strerror if isinstance(error, OSError) else str(error)
                _log.error("the file of known nodes in %s cannot be kept: %s", self._folder, why or "unknown error")
            self._error_told = True

    def save(self) -> None:
        """Write what is new, before the end."""
        if self._folder is not None and self._unsaved:
            try:
                self._save(self._saved_at)
            except (OSError, ConfigError):
                _log.error("the file of known nodes in %s could not be written", self._folder)

    def _judge(self, node_id: str, public_key: bytes, roles: object) -> str:
        assert self._roster is not None
        return self._roster.judge(node_id, public_key, ())

    def _look_at_roster(self) -> None:
        seen = file_state(self._roster_file)
        if seen == self._roster_seen or self._roster_file is None:
            return
        self._roster_seen = seen
        if seen is None:
            # As for a node: it may be on its way to being replaced.
            _log.error("the roster file is gone; the roster before stays in force until a restart")
            return
        try:
            self._roster = Roster.load(self._roster_file)
        except ConfigError as error:
            _log.error("the changed roster is not used: %s", error)
            return
        self._book.judge = self._judge

    def _merge(self) -> None:
        """What somebody took out of the file is forgotten, what another reader wrote into it counts."""
        assert self._folder is not None
        self._file_seen = file_state(self._file)
        if self._file_seen is None:
            return  # a file that is gone says nothing; it is written again
        kept = load_known_nodes(self._folder)
        for node_id in sorted(self._written - kept.keys()):
            if self._book.forget(node_id):
                self.rebound(node_id)
        for node_id, key in kept.items():
            if (mine := self._book.key_of(node_id)) == key:
                continue
            if mine is not None:
                self._book.forget(node_id)
                self.rebound(node_id)
            self._book.admit(node_id, key, _HEARD, dialled=True)
        self._written = set(kept)

    def _save(self, now: float) -> None:
        assert self._folder is not None
        self._saved_at = now
        make_private_folder(self._folder)
        with locked(self._folder):
            self._merge()
            known = self._book.nodes()
            save_known_nodes(self._folder, known)
            self._written, self._file_seen = set(known), file_state(self._file)
        self._unsaved = self._error_told = False


def speakers_of(
    home: Path,
    key: TelemetryKey,
    named_key_file: Path | None,
    *,
    paired: Callable[[], Mapping[str, bytes]] = _nobody_paired,
) -> Speakers:
    """The speakers for a reader with this key.

    Args:
        named_key_file: a key file that was named may be another fleet's, where the same names may be other nodes: then first
            keys are kept apart, and the roster of this machine does not count.

    Raises:
        ConfigError: see :class:`Speakers`.
    """
    own = named_key_file is None or _is_same(named_key_file, home / TELEMETRY_KEY_FILE)
    if not own:
        mark = hashlib.blake2b(key=key.seal_key, digest_size=8, person=_PERSON_FOLDER).hexdigest()
        return Speakers(home / FOLDER / mark, paired=paired)
    psk_file = os.environ.get("KAKEYA_FLEET_PSK_FILE", "")
    beside = user_path(psk_file, "KAKEYA_FLEET_PSK_FILE").parent if psk_file else home
    roster_file = os.environ.get("KAKEYA_ROSTER_FILE", "")
    return Speakers(
        home / FOLDER,
        roster_file=user_path(roster_file, "KAKEYA_ROSTER_FILE") if roster_file else beside / ROSTER_FILE,
        roster_is_named=bool(roster_file),
        paired=paired,
    )


def reader_folders(home: Path) -> list[Path]:
    """Every folder where readers on this machine keep first keys."""
    return [path.parent for path in sorted((home / FOLDER).rglob(KNOWN_NODES_FILE))]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
