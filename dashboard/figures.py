"""Numbers that nodes tell, made fit to be added, converted and drawn, whatever they are.

The decoder of events refuses what is not finite or out of bounds (:data:`wire.events.FIGURE_MAX`). Sums of what it lets
through grow beyond that, and one node must not be able to spoil an answer about all of them: so whatever is kept or summed
up goes through here, and stops at the same bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from wire.events import FIGURE_MAX


def bounded(value: float) -> float:
    """The nearest finite number within the bound; 0 for what is no number. Whole numbers stay whole."""
    if -FIGURE_MAX <= value <= FIGURE_MAX:
        return value
    return FIGURE_MAX if value > 0 else -FIGURE_MAX if value < 0 else 0


def whole(value: float) -> int:
    """The same without what is behind the point."""
    return int(bounded(value))


def total(values: Iterable[float]) -> int:
    """Their sum, within the bound."""
    return whole(sum(map(bounded, values)))
