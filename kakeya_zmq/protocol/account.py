"""The account of one preparation: what was decided, what failed and why, and who sent how much.

Not a machine: whoever takes part in a preparation writes into it, and nothing is ever decided by it. It becomes the
explanation that the client gets (.prepare_explain).

Rules
 1. It is bounded, however long a preparation tries: the first reasons are kept, of the decisions the latest as well.
 2. Its bytes add up to what came: a sender of which nothing was used is named, too.
 3. A part whose sender is not known here was in the own store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from kakeya_zmq.blocks import Block
from kakeya_zmq.protocol.effects import Count, Effect, Note
from kakeya_zmq.protocol.prepare_values import ValueSetter
from wire.limits import TEXT_CHARACTERS_MAX
from wire.messages import Decision, PartRef, Source, SourceKind

REASONS_MAX: Final = 32
"""Reasons in one explanation: enough for every peer and worker of a prompt to fail in its own way."""
DECISIONS_MAX: Final = 32
"""Decisions in one explanation (wire.messages.Explanation): the first ones and, in the last place, the latest."""

Origin: TypeAlias = tuple[SourceKind, str]
"""Source kind and node id ("" for this machine)."""
_Stretch: TypeAlias = tuple[Origin, int, int]
"""Tokens [start, end), and where their KV came from."""
_OWN_STORE: Final[Origin] = (SourceKind.HOT, "")


class Account:
    """What is known of how one prompt was prepared.

    Args:
        set_value: takes gauges and last reasons.
    """

    def __init__(self, set_value: ValueSetter) -> None:
        self.set_value = set_value
        self.reasons: list[str] = []
        self.last_failure = ""
        """The latest of the reasons that something failed."""
        self.decisions: list[Decision] = []
        self._origins: dict[PartRef, Origin] = {}
        self._spent: dict[Origin, tuple[int, float]] = {}
        """Bytes and milliseconds."""

    # --- what happens is written down --------------------------------------------------------------------------------

    def reason(self, text: str) -> None:
        """Remember why the prompt did not go better; repeated reasons are kept once."""
        text = text[:TEXT_CHARACTERS_MAX]
        if text and text not in self.reasons and len(self.reasons) < REASONS_MAX:
            self.reasons.append(text)

    def decide(self, decision: Decision) -> None:
        """Remember a choice of the planner for the explanation; equal ones are kept once."""
        if decision in self.decisions:
            return
        if len(self.decisions) >= DECISIONS_MAX:
            self.decisions.pop()
        self.decisions.append(decision)

    def fallback(self, text: str) -> list[Effect]:
        """Something failed and the next option is taken: count it and give the reason."""
        self.reason(text)
        self.last_failure = text
        self.set_value("last_fallback_reason", text)
        return [Count("fallbacks"), Note("warning", text[:TEXT_CHARACTERS_MAX])]

    def receive(self, ref: PartRef, size_bytes: int, origin: Origin) -> None:
        """A part has come from another node."""
        self._origins[ref] = origin
        self._spend(origin, size_bytes, 0.0)

    def spend_time(self, origin: Origin, elapsed_ms: float) -> None:
        """A node was waited for, whether it brought anything or not."""
        self._spend(origin, 0, elapsed_ms)

    def _spend(self, origin: Origin, size_bytes: int, elapsed_ms: float) -> None:
        before_bytes, before_ms = self._spent.get(origin, (0, 0.0))
        self._spent[origin] = (before_bytes + size_bytes, before_ms + elapsed_ms)

    # --- what it comes to --------------------------------------------------------------------------------------------

    def origin_kinds(self, used: Iterable[PartRef]) -> set[SourceKind]:
        """What kinds of places the parts ``used`` came from."""
        return {self._origins.get(ref, _OWN_STORE)[0] for ref in used}

    def senders(self, used: Iterable[PartRef]) -> tuple[Origin, ...]:
        """The other nodes that sent some of the parts ``used``, in the order of the parts."""
        return tuple(dict.fromkeys(self._origins[ref] for ref in used if ref in self._origins))

    def explain_unused(self, used: Iterable[PartRef]) -> None:
        """Give the reason for what came and was in vain, when the parts ``used`` were imported."""
        senders = {self._origins.get(ref) for ref in used}
        for (kind, node_id), (size_bytes, _) in self._spent.items():
            if size_bytes and (kind, node_id) not in senders:
                self.reason(f"{size_bytes} bytes arrived from {name_of((kind, node_id))} and were not used")

    def sources(self, live: int, imported: Sequence[Block], used: Iterable[PartRef], end: int) -> tuple[Source, ...]:
        """The stretches of [0, end), and behind them, as empty ones, whoever sent something that is not in their names.

        Args:
            live: tokens of the session's own KV that were there before and still are; an import replaces them.
            imported: the blocks that were imported, from the prompt's beginning; none when nothing was.
            used: the parts that they were imported from.
            end: tokens whose KV is there; those behind the others were computed.
        """
        stretches: list[_Stretch] = []
        start = live
        if imported:
            stretches = self._imported_stretches(imported, used)
            start = imported[-1].end
        elif live > 0:
            stretches = [((SourceKind.LIVE, ""), 0, live)]
        if end > start:
            stretches.append(((SourceKind.COMPUTED, ""), start, end))
        named = {origin for origin, _, _ in stretches}
        stretches += [(each, end, end) for each, (size_bytes, _) in self._spent.items() if size_bytes and each not in named]
        return self._as_sources(stretches)

    def _imported_stretches(self, imported: Sequence[Block], used: Iterable[PartRef]) -> list[_Stretch]:
        senders: dict[bytes, Origin] = {}
        for ref in used:
            # Whoever sent any part of a block made it possible.
            if ref in self._origins or ref.block_hash not in senders:
                senders[ref.block_hash] = self._origins.get(ref, _OWN_STORE)
        stretches: list[_Stretch] = []
        origin = _OWN_STORE
        # From the back: a block out of which nothing is needed (before the window) belongs to the stretch after it.
        for block in reversed(imported):
            origin = senders.get(block.block_hash, origin)
            if stretches and stretches[-1][0] == origin:
                stretches[-1] = (origin, block.start, stretches[-1][2])
            else:
                stretches.append((origin, block.start, block.end))
        return stretches[::-1]

    def _as_sources(self, stretches: Iterable[_Stretch]) -> tuple[Source, ...]:
        """What an origin has sent and cost stands in its first stretch."""
        unreported = dict(self._spent)
        result: list[Source] = []
        for origin, first, last in stretches:
            size_bytes, elapsed_ms = unreported.pop(origin, (0, 0.0))
            kind, node_id = origin
            result.append(
                Source(kind=kind, start=first, end=last, node_id=node_id, transfer_bytes=size_bytes, elapsed_ms=elapsed_ms)
            )
        return tuple(result)


def name_of(origin: Origin) -> str:
    """Another node, as an explanation calls it."""
    kind, node_id = origin
    return f"{'worker' if kind is SourceKind.WORKER else 'cache'} {node_id}"
