"""Importing while parts still arrive: what is at hand is copied into the engine while the rest is on the wire.

Rules
 1. The session's own KV stays untouched until FinishImport; an early import that comes to nothing costs only the copying.
 2. A changed aim (another peer, a shorter prefix) starts over; nothing is ever mixed between two aims.
 3. Any failure ends early importing for this prompt; the preparation then imports in one piece, as if it had never begun.

Parts are handed over in batches of at least ``batch_bytes``, so that a command costs little beside the copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kakeya_zmq.blocks import Part, raw_part
from kakeya_zmq.engine import AddParts, BeginImport, CommandFailed, ImportAdvanced
from kakeya_zmq.protocol.effects import CancelCommand, CommandEnded, CommandEvent, Effect, RunCommand, Ticket
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_values import IdAllocator
from wire.messages import PartRef


class EarlyImport:
    """The early import of one preparation; its tickets are its own.

    Args:
        session_id: engine session.
        holdings: where parts are found.
    """

    def __init__(self, session_id: str, holdings: Holdings, ids: IdAllocator, *, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._session_id = session_id
        self._holdings = holdings
        self._ids = ids
        self._tickets: set[Ticket] = set()
        self._aim: Reach | None = None
        self._waiting: dict[PartRef, None] = {}
        """Needed parts that are not at hand yet, in order."""
        self._ready: list[Part] = []
        """Parts at hand that have not been handed over."""
        self._ready_bytes = 0
        self._failed = False
        self.elapsed_ms = 0.0
        """What the engine has spent on it."""

    def owns(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def on(self, event: CommandEvent | CommandEnded) -> None:
        """Take an event of one of the tickets."""
        match event:
            case CommandEnded(ticket=ticket, cancelled=cancelled):
                self._tickets.discard(ticket)
                self._failed = self._failed or cancelled
            case CommandEvent(event=CommandFailed()):
                self._failed = True
            case CommandEvent(event=ImportAdvanced(elapsed_ms=elapsed_ms)):
                self.elapsed_ms += elapsed_ms
            case _:
                pass

    def follow(self, aim: Reach | None, arrived: Sequence[Part] = ()) -> list[Effect]:
        """Hand over what is at hand of ``aim``; called when parts have arrived or the aim may have changed."""
        if self._failed or aim is None or aim.position == 0:
            return []
        effects: list[Effect] = []
        if not self._is_aim(aim):
            self._aim = aim
            self._waiting = dict.fromkeys(self._holdings.needed(aim))
            self._ready, self._ready_bytes, self.elapsed_ms = [], 0, 0.0
            effects.append(self._run(BeginImport(self._session_id, aim.position)))
            self._take(list(self._waiting))
        else:
            self._take([part.meta.ref for part in arrived if part.meta.ref in self._waiting])
        if self._ready_bytes >= self._batch_bytes:
            effects.append(self._add())
        return effects

    def complete(self, reach: Reach) -> list[Effect] | None:
        """Hand over the rest for a FinishImport at ``reach``; None when the import must be done in one piece."""
        if self._failed or not self._is_aim(reach):
            return None
        self._take(list(self._waiting))
        if self._waiting:
            return None
        return [self._add()] if self._ready else []

    def abandon(self) -> list[Effect]:
        """It is not wanted any more."""
        self._failed = True
        return [CancelCommand(ticket) for ticket in sorted(self._tickets)]

    def _is_aim(self, reach: Reach) -> bool:
        return self._aim is not None and reach.position == self._aim.position and reach.chain is self._aim.chain

    def _take(self, refs: Iterable[PartRef]) -> None:
        for ref in refs:
            part = self._holdings.take(ref)
            if part is not None:
                del self._waiting[ref]
                self._ready.append(part)
                self._ready_bytes += part.meta.length_bytes

    def _add(self) -> Effect:
        parts, self._ready, self._ready_bytes = self._ready, [], 0
        return self._run(AddParts(self._session_id, tuple(raw_part(part) for part in parts)))

    def _run(self, command: BeginImport | AddParts) -> Effect:
        ticket = self._ids.ticket()
        self._tickets.add(ticket)
        return RunCommand(ticket, command)
