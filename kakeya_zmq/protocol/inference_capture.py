"""New KV of sessions: exported after every answer, kept in the own store, handed over for publishing.

A generation leaves KV that nobody has a copy of. When it has ended, one Capture command exports the blocks that became
complete; they go to the local store and, with what an append has brought, to the publisher, also when the session is closed
before they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kakeya_zmq.blocks import Chain, Part, RawPart, bind_parts
from kakeya_zmq.engine import KV_NOT_ENCODED, Capture, CommandFailed, ModelFacts, PartsCaptured, TokenArray
from kakeya_zmq.protocol.effects import CommandEnded, CommandEvent, Count, Note, RunCommand, Ticket
from kakeya_zmq.protocol.handover import Handover
from kakeya_zmq.protocol.inference_session import Capturing, InferenceEffect, PublishParts, Session
from kakeya_zmq.protocol.prepare_values import IdAllocator
from kakeya_zmq.protocol.superseding import supersede
from kakeya_zmq.store import BlockStore
from wire.errors import CapacityError, InvalidInput


class Captures:
    """The exports under way, and what of their parts waits to be published.

    Args:
        make_chain: hashes tokens into the chain of the served tenant.
        hash_block: hashes the tokens of one block under its parent's hash, for the same tenant.
        publish_delay_s: how long parts wait for the next generation.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        store: BlockStore,
        ids: IdAllocator,
        make_chain: Callable[[TokenArray], Chain],
        hash_block: Callable[[TokenArray, bytes], bytes],
        publish_delay_s: float,
    ) -> None:
        self._facts = facts
        self._fingerprint = facts.compatibility.fingerprint()
        self._block_tokens = facts.requirement.block_tokens
        self._store = store
        self._ids = ids
        self._make_chain = make_chain
        self._hash_block = hash_block
        self._publish_delay_s = publish_delay_s
        self._handover = Handover()
        self._running: dict[Ticket, Capturing] = {}
        self._told_not_encoded = False

    def sessions(self) -> list[Session]:
        """Whose exports are under way; some of them may be closed."""
        return [capture.session for capture in self._running.values()]

    def forget_handover(self) -> None:
        """What was handed over for publishing is not held by anybody any more."""
        self._handover = Handover()

    def owns(self, ticket: Ticket) -> bool:
        """Whether an event of this command is for :meth:`on`."""
        return ticket in self._running

    def whole_blocks(self, position: int) -> int:
        """Tokens before ``position`` that are in complete blocks."""
        return position // self._block_tokens * self._block_tokens

    def begin(self, session: Session, now: float) -> list[InferenceEffect]:
        """A generation has ended: export what it made, or hand over what waits when there is nothing to export."""
        if session.capture is not None:
            # The generation was cancelled before its turn, so this capture exports all there is; its end publishes.
            return []
        wanted = session.options.use_local_cache or session.options.publish
        if not wanted or session.live_position <= session.captured:
            return self.flush(session, now)
        ticket = self._ids.ticket()
        session.capture = Capturing(session, self._make_chain(session.history[: session.live_position]))
        self._running[ticket] = session.capture
        return [RunCommand(ticket, Capture(session.session_id, session.captured))]

    def on(self, event: CommandEvent | CommandEnded, now: float) -> list[InferenceEffect]:
        """Take an event of a command that :meth:`owns` knows."""
        capture = self._running[event.ticket]
        session = capture.session
        if isinstance(event, CommandEnded):
            del self._running[event.ticket]
            session.capture = None
            if not (capture.failed or event.cancelled):
                session.captured = max(session.captured, self.whole_blocks(capture.chain.tokens))
            # While another operation runs the parts wait for its end.
            return self.flush(session, now) if session.operation is None or session.closed else []
        match event.event:
            case PartsCaptured(parts=raw_parts, parts_not_encoded=lost):
                return [*self.not_encoded(lost), *self._take(capture, raw_parts, now)]
            case CommandFailed(message=message):
                capture.failed = True
                return [Count("capture_failures"), Note("warning", f"new KV could not be stored: {message}")]
            case _:
                return []

    def _take(self, capture: Capturing, raw_parts: Sequence[RawPart], now: float) -> list[InferenceEffect]:
        session = capture.session
        try:
            parts = bind_parts(capture.chain, raw_parts)
        except ValueError:  # the engine cut other blocks than the chain has: only later reuse is lost
            capture.failed = True
            return [Count("capture_mismatches")]
        if session.options.publish:
            session.pending += parts
        if not session.options.use_local_cache:
            return []
        effects = self._keep(parts, now)
        self._supersede(session, parts)
        return effects

    def _keep(self, parts: tuple[Part, ...], now: float) -> list[InferenceEffect]:
        failures = 0
        for part in parts:
            try:
                self._store.put(part, fingerprint=self._fingerprint, now=now)
            except (CapacityError, InvalidInput):
                # No room, or somebody published nonsense under this hash. Only later reuse is lost: the answer was given.
                failures += 1
        return [Count("put_failures", failures)] if failures else []

    def _supersede(self, session: Session, parts: tuple[Part, ...]) -> None:
        """Let go of tails of this session, or of others that began alike, which the new blocks contain."""
        if self._facts.requirement.state:
            return

        def hash_tail(parent_hash: bytes, start: int, count: int) -> bytes:
            return self._hash_block(session.history[start : start + count], parent_hash)

        supersede(self._store, [part.meta for part in parts], fingerprint=self._fingerprint, hash_tail=hash_tail)

    def not_encoded(self, lost_parts: int) -> list[InferenceEffect]:
        """Count parts that the codec could not store; the user is told once, however often it happens."""
        if not lost_parts:
            return []
        told, self._told_not_encoded = self._told_not_encoded, True
        return [Count("parts_not_encoded", lost_parts), *([] if told else [Note("error", KV_NOT_ENCODED)])]

    def flush(self, session: Session, now: float, *, tails: bool = False) -> list[InferenceEffect]:
        """Hand over what waits to be published. A tail waits on while the session is in use: the next turn is likely to
        make a block of it, and then nobody has to send it twice.

        Args:
            tails: hand the tails over, too.
        """
        session.publish_at = None
        pending, session.pending = session.pending, []
        cuts_within = partial(self._store.cuts_within, fingerprint=self._fingerprint)
        cuts = {cut.block_hash: cut for part in pending for cut in cuts_within(part.meta.block_hash)}
        ready = [part for part in pending if part.meta.block_hash not in cuts]
        if not (tails or session.closed):
            session.pending = [part for part in ready if part.meta.token_count < self._block_tokens]
            ready = [part for part in ready if part.meta.token_count == self._block_tokens]
            if session.pending:
                session.publish_at = now + self._publish_delay_s
        # A block goes along with what is said of it, although another session may have handed it over: it is not sent twice.
        told = {cuts[part.meta.block_hash].within for part in pending if part.meta.block_hash in cuts}
        fresh = self._handover.select(ready, now)
        sent = {part.meta.ref for part in fresh}
        parts = (*fresh, *(part for part in ready if part.meta.block_hash in told and part.meta.ref not in sent))
        blocks = {part.meta.block_hash for part in parts}
        return [PublishParts(parts, tuple(cut for cut in cuts.values() if cut.within in blocks))] if parts else []
