"""What the engine does for one preparation: it copies a prefix into the session and computes what is missing.

Rules
 1. One command at a time changes the session's KV; the steps of an early import (.early_import) only prepare for it.
 2. ``position`` follows the engine's events only, so that it is right whenever the preparation ends.
 3. An import that began early and could not be finished is tried once more in one piece: the session is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya_zmq.backoff import Trouble
from kakeya_zmq.blocks import Part, bind_parts
from kakeya_zmq.engine import (
    KV_NOT_ENCODED,
    CommandFailed,
    FinishImport,
    ImportPrefix,
    Prefill,
    PrefixImported,
    SegmentComputed,
)
from kakeya_zmq.planner import MeasuredRates
from kakeya_zmq.protocol.account import name_of
from kakeya_zmq.protocol.early_import import EarlyImport
from kakeya_zmq.protocol.effects import CommandEnded, CommandEvent, Count, Effect, RunCommand, Ticket
from kakeya_zmq.protocol.holdings import Holdings, Reach
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationTask
from wire.ids import NodeId
from wire.messages import PartMeta

STOPPED_EARLY = "the engine stopped early"


class EngineSession:
    """The session's KV, and the command that is under way for it.

    Args:
        captures: whether what is computed is exported, to be kept or published.
    """

    def __init__(
        self, task: PreparationTask, holdings: Holdings, ids: IdAllocator, rates: MeasuredRates, *, captures: bool
    ) -> None:
        self._task = task
        self._holdings = holdings
        self._account = holdings.account
        self._ids = ids
        self._rates = rates
        self._captures = captures
        self._early = EarlyImport(task.session_id, holdings, ids, batch_bytes=task.settings.early_import_bytes)
        self._finishing_early = False
        self._imported_bytes = 0
        self.position = task.live_position
        """Tokens whose KV the session holds."""
        self.live = task.live_position
        """Tokens of the session's own KV that were there before and still are."""
        self.ticket: Ticket | None = None
        """Of the command that is under way."""
        self.imported: Reach | None = None
        """What is being imported, then what was imported; None when nothing was."""
        self.failure: str | None = None
        """What the engine said when the latest command failed."""
        self.computed: list[PartMeta] = []
        """What was computed here, oldest first."""

    # --- commands ----------------------------------------------------------------------------------------------------

    def import_early(self, aim: Reach, arrived: Sequence[Part]) -> list[Effect]:
        """Copy what is at hand of ``aim`` while the rest is on its way."""
        return self._early.follow(aim, arrived)

    def start_import(self, reach: Reach, now: float) -> list[Effect] | None:
        """Make ``reach`` the session's KV; None when one of its parts is gone or damaged."""
        early = self._early.complete(reach)
        if early is not None:
            self._imported_bytes = self._holdings.bytes_of(reach)
            self._finishing_early = True
            return [*early, self._import(reach, FinishImport(self._task.session_id))]
        parts = self._holdings.collect(reach, now)
        self._imported_bytes = sum(part.payload.nbytes for part in parts or ())
        return None if parts is None else [self._import(reach, ImportPrefix(self._task.session_id, reach.position, parts))]

    def retry_import(self, now: float) -> list[Effect] | None:
        """After an import that began early and failed: do it in one piece; None when that is not possible."""
        reach = self.imported
        if not self._finishing_early or reach is None:
            return None
        self._finishing_early = False
        parts = self._holdings.collect(reach, now)
        if parts is None:
            return None
        self.failure = None
        effects = self._early.abandon()
        return [*effects, self._import(reach, ImportPrefix(self._task.session_id, reach.position, parts))]

    def forget_import(self, now: float) -> list[Effect]:
        """The engine has refused the parts: nobody shall try them again."""
        senders = self._account.senders(self._holdings.needed(self.imported)) if self.imported is not None else ()
        of_whom = f" of what {' and '.join(name_of(sender) for sender in senders)} sent" if senders else ""
        effects: list[Effect] = [Count("import_failures")]
        effects += self._account.fallback(f"import{of_whom} failed: {self.failure or STOPPED_EARLY}")
        if self.imported is not None:
            self._holdings.invalidate(self.imported)
        if len(senders) == 1 and self.failure:  # of several it is not known whose it was
            why = "what it sent could not be imported"
            self._rates.backoff.failed(NodeId(senders[0][1]), Trouble.FETCH, why, now)
        self.imported = None
        self.live = min(self.live, self.position)
        return effects

    def compute(self) -> list[Effect]:
        """Compute what is missing between ``position`` and the target."""
        task = self._task
        tokens = task.tokens[self.position : task.target]
        return [self._run(Prefill(task.session_id, tokens, self._captures))]

    def abandon_early_import(self) -> list[Effect]:
        """It is not wanted any more."""
        return self._early.abandon()

    def _import(self, reach: Reach, command: ImportPrefix | FinishImport) -> Effect:
        self.imported = reach
        return self._run(command)

    def _run(self, command: ImportPrefix | FinishImport | Prefill) -> Effect:
        self.ticket = self._ids.ticket()
        return RunCommand(self.ticket, command)

    # --- events ------------------------------------------------------------------------------------------------------

    @property
    def has_imported(self) -> bool:
        """Whether the import that has ended did what it should."""
        return self.imported is not None and self.position == self.imported.position and self.failure is None

    def ended(self, event: CommandEnded) -> bool:
        """Take the end of a command; False when it was not the one that is under way."""
        if self._early.owns(event.ticket):
            self._early.on(event)
            return False
        if event.ticket != self.ticket:
            return False
        self.ticket = None
        if event.position is not None:
            self.position = event.position
        return True

    def on(self, event: CommandEvent, now: float) -> list[Effect]:
        """Take an event of a command; those of nobody's are ignored."""
        if self._early.owns(event.ticket):
            self._early.on(event)
            return []
        if event.ticket != self.ticket:
            return []
        match event.event:
            case PrefixImported(position=position, elapsed_ms=elapsed_ms):
                self.position = position
                early_ms = self._early.elapsed_ms if self._finishing_early else 0.0
                self._rates.observe_import(self._imported_bytes, elapsed_ms + early_ms)
            case SegmentComputed() as segment:
                return self._take_segment(segment, now)
            case CommandFailed(message=message, position=position):
                self.position = position
                self.failure = message
            case _:
                pass
        return []

    def _take_segment(self, segment: SegmentComputed, now: float) -> list[Effect]:
        computed = segment.position - self.position
        self.position = segment.position
        self._rates.observe_local(computed, segment.elapsed_ms)
        effects: list[Effect] = [Count("tokens_computed", computed)]
        if segment.parts_not_encoded:
            self._account.reason(KV_NOT_ENCODED)
            effects.append(Count("parts_not_encoded", segment.parts_not_encoded))
        try:
            parts = bind_parts(self._task.chain, segment.parts)
        except ValueError:  # parts the chain does not know cannot be kept; the session's KV is right all the same
            return [*effects, Count("capture_mismatches")]
        self.computed += [part.meta for part in parts]
        return [*effects, *self._holdings.keep_computed(parts, now)]
