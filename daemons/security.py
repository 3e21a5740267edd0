"""A node's security desk: limits on peers, identities that last, refusals that are counted and written down."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from daemons.entitlement import Entitlement
from kakeya_zmq.audit import REASONS_MAX, AuditLog, read_entries
from kakeya_zmq.config import Settings
from kakeya_zmq.file_lock import locked
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.schedule import TimerHandle
from kakeya_zmq.known_nodes import load_known_nodes, save_known_nodes, taken_out
from kakeya_zmq.protocol.identities import IdentityBook
from kakeya_zmq.protocol.limits import RequestLimiter, RequestLimits
from kakeya_zmq.roster import Roster
from wire.cards import Card
from wire.keys import FleetKey, NodeIdentity

_log = logging.getLogger(__name__)
SAVE_INTERVAL_SECONDS: Final = 5.0
STRANGER: Final = "another identity key claims the name of a node that is known here"


class Security:
    """The security desk of one node, on the reactor's thread.

    Args:
        folder: the node's folder, which exists.
        refused: told each reason that sockets do not tell by themselves (the gate's).
        expel, forgotten: see :class:`daemons.entitlement.Entitlement`.

    Raises:
        ConfigError: the file of known nodes is damaged.
    """

    def __init__(
        self,
        reactor: Reactor,
        settings: Settings,
        *,
        identity: NodeIdentity,
        fleet_key: FleetKey,
        folder: Path,
        refused: Callable[[str], None],
        expel: Callable[[bytes, str, str], None],
        forgotten: Callable[[str], None],
    ) -> None:
        self.refusals: Counter[str] = Counter()
        """Everything that was refused, by reason."""
        self.limiter = RequestLimiter(
            RequestLimits(
                requests_per_s=settings.peer_requests_per_s,
                lookups_per_s=settings.peer_lookups_per_s,
                publishes_per_s=settings.peer_publishes_per_s,
                jobs_per_s=settings.peer_jobs_per_s,
            )
        )
        self.identities = IdentityBook((settings.node_id, identity.public_key), load_known_nodes(folder))
        self.audit = AuditLog(folder, monotonic=reactor.clock, wall=time.time)
        # A roster that was named and is not there would open the fleet; the rest is read and judged there.
        Roster.load_if_any(Path(settings.roster_file), named=settings.roster_is_named)
        self.entitlement = Entitlement(
            reactor,
            folder=folder,
            roster_file=Path(settings.roster_file),
            identities=self.identities,
            audit=self.audit,
            refused=self.count_refusal,
            expel=expel,
            forgotten=forgotten,
        )
        self._reactor = reactor
        self._folder = folder
        self._refused = refused
        self._gate_counts: dict[tuple[str, str], int] = {}
        self._gate_asked = False
        reactor.gate.watch(self._gate_refused)
        self._saved_at = float("-inf")
        self._save_timer: TimerHandle | None = None
        self._audit_start(settings.role, fleet_key.key_id.hex())

    def _audit_start(self, role: str, key_id: str) -> None:
        known = [str(entry.get("reason", "")) for entry in read_entries(self._folder) if entry["kind"] == "started"]
        if known and not known[-1].endswith(key_id):
            self.audit.write("key", f"another fleet key than at the last start: {key_id}")
        self.audit.write("started", f"{role} with fleet key {key_id}")

    def count_refusal(self, reason: str, *, subject: str = "", count: int = 1) -> None:
        """Count a refusal, or several, and write it down. Reasons are fixed texts: no peer may be able to make new ones."""
        if reason not in self.refusals and len(self.refusals) >= REASONS_MAX:
            reason = "another reason"
        self.refusals[reason] += count
        self.audit.write("refused", reason, subject=subject, count=count)

    def check_card(self, card: Card) -> None:
        """A node that is known by its card is bound to its key as one that said hello is."""
        if not self.identities.bind(card.node_id, card.identity_public_key, card.roles):
            self.count_refusal(STRANGER, subject=card.node_id)
        self.keep()

    def keep(self) -> None:
        """Write down the nodes that were bound since the last call."""
        new = self.identities.take_new()
        if not new:
            return
        for node_id in new:
            self.audit.write("registered", "a node was seen for the first time", subject=node_id)
        # Writing takes some milliseconds: a member that comes under ever new names must not keep the reactor at it.
        wait_s = max(0.0, self._saved_at + SAVE_INTERVAL_SECONDS - self._reactor.clock())
        if wait_s == 0:
            self._save()
        elif self._save_timer is None or not self._save_timer.pending:
            self._save_timer = self._reactor.call_later(wait_s, self._save)

    def _save(self) -> None:
        self._saved_at = self._reactor.clock()
        try:
            with locked(self._folder):
                self.entitlement.forget(taken_out(self._folder, self.entitlement.known_written))
                save_known_nodes(self._folder, self.identities.nodes())
                self.entitlement.known_saved()
        except OSError as error:
            # Until it can be written these names are bound for this run only.
            _log.error("the file of known nodes cannot be written: %s", error.strerror or "unknown error")

    def close(self, reason: str) -> None:
        """Nothing is watched any more; what waits to be written is written."""
        self.entitlement.stop()
        if self._save_timer is not None and self._save_timer.pending:
            self._save_timer.cancel()
            self._save()
        self.audit.close()
        self.audit.write("stopped", reason)

    def _gate_refused(self, reason: str) -> None:
        """On the gate's thread. A flood of refusals must not become a flood of posts."""
        if not self._gate_asked:
            self._gate_asked = True
            self._reactor.post(self._take_gate_counts)

    def _take_gate_counts(self) -> None:
        self._gate_asked = False
        counts = self._reactor.gate.refused
        for key, count in counts.items():
            kind, reason = key
            new = count - self._gate_counts.get(key, 0)
            # CURVE refusals are told by the monitors of their sockets.
            if new and kind not in ("control", "bus"):
                text = f"a bulk connection was refused: {reason}"
                self._refused(text)
                if new > 1:
                    self.count_refusal(text, count=new - 1)
        self._gate_counts = counts
