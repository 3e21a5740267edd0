"""What one session holds of KV, and which parts of it can be handed out.

Rules
- The position counts exactly the tokens whose KV the caches hold, whenever no step is running.
- A part is handed out whole and right, or not at all: what is missing is computed once more, what is wrong would be stored.

Theory of operation
A windowed cache forgets: the row of a new token takes the place of the one that has left the window. Two things follow.
A step that is taken back (kakeya_zmq.model.undo) has destroyed the row it overwrote, though the cache counts it as held
again; such rows are noted, and no window part over them is exported. And while decoding, the window part whose first row is
about to be overwritten is exported beforehand, since hits at later positions still need its other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.model.adapters import ROWS_ADAPTERS, leaves
from kakeya_zmq.model.layout import CacheLayout
from kakeya_zmq.model.rebuild import Rebuild
from wire.messages import PartKind


@dataclass(slots=True)
class SessionKv:
    """One session of the engine."""

    session_id: str
    caches: list[Any]
    position: int = 0
    busy: bool = False
    destroyed_rows: set[int] = field(default_factory=set)
    """Positions whose window rows a taken-back step has overwritten, though the caches count them as held."""
    rebuild: Rebuild | None = None
    """The import that was begun and not finished."""
    leaving_windows: dict[int, RawPart] = field(default_factory=dict)
    """By start: window parts exported while decoding, because their first rows were about to be overwritten."""

    def empty(self, caches: list[Any]) -> None:
        """Hold no token's KV any more; ``caches`` are new ones."""
        self.caches = caches
        self.position = 0
        self.rebuild = None
        self.destroyed_rows = set()
        self.leaving_windows = {}


class PartExporter:
    """Takes parts out of the sessions of one model.

    Args:
        layout: how the model's caches are cut into parts.
        caches: any of the model's.
        window_tokens: the window that hits of this model need.
    """

    def __init__(self, layout: CacheLayout, caches: Sequence[Any], *, window_tokens: int) -> None:
        self._layout = layout
        self._block_tokens = layout.requirement.block_tokens
        self._window_tokens = window_tokens
        self._narrowest_window = _narrowest_window(caches)

    def export(self, session: SessionKv, start: int, stop: int, *, with_tail: bool) -> tuple[RawPart, ...]:
        """The held parts of every block that ends in (start, stop], and of the tail if asked for; ``stop`` <= position."""
        if start == stop:
            return ()
        size = self._block_tokens
        parts: list[RawPart] = []
        for block_start in range(start - start % size, stop, size):
            count = min(size, stop - block_start)
            if count < size and not with_tail:
                break
            held = self._layout.export(session.caches, block_start, count, position=session.position)
            block = {part.kind: part for part in held if not _is_damaged(session, part)}
            kept = session.leaving_windows.get(block_start)
            if kept is not None and count == size:
                block.setdefault(PartKind.WINDOW, kept)
            parts.extend(block[kind] for kind in sorted(block))
        return tuple(parts)

    def keep_leaving_window(self, session: SessionKv) -> None:
        """Export the window part whose first row the next step overwrites.

        A hit at a later position still needs that block's other rows, and by then it could not be exported whole. So a
        Capture after a long answer finds every window part it needs; the cost is one export in ``block_tokens`` steps.
        """
        size = self._block_tokens
        start = session.position - self._narrowest_window
        if self._narrowest_window < size or start < 0 or start % size:
            return
        still_needed = session.position - self._window_tokens
        session.leaving_windows = {at: part for at, part in session.leaving_windows.items() if at + size > still_needed}
        for part in self._layout.export(session.caches, start, size, position=session.position):
            if part.kind is PartKind.WINDOW and not _is_damaged(session, part):
                session.leaving_windows[start] = part


def _is_damaged(session: SessionKv, part: RawPart) -> bool:
    return part.kind is PartKind.WINDOW and any(
        part.start <= row < part.start + part.token_count for row in session.destroyed_rows
    )


def _narrowest_window(caches: Sequence[Any]) -> int:
    """Tokens of the narrowest windowed cache, 0 when there is none."""
    adapters = [ROWS_ADAPTERS[type(cache)](cache) for cache in leaves(caches) if type(cache) in ROWS_ADAPTERS]
    return min((adapter.window_tokens for adapter in adapters if adapter.kind is PartKind.WINDOW), default=0)
