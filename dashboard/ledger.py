"""Sums of counters over nodes that restart, vanish and come back: a sum never goes backwards.

A node's counters run since its start and only grow. The ledger remembers for each node what earlier incarnations had
reached (*base*) and the highest value seen of the present one (*current*); the sum over the fleet is the sum of both.
A node that is gone keeps its row, so that it is not counted twice when it was only cut off. Rows are bounded: when the one
heard of longest ago makes room, its share stays in the sum (should that node ever come back, its share counts twice).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from dashboard.figures import total, whole
from kakeya_zmq.telemetry import PREFILL_VALUES

NODES_MAX: Final = 4096
NAMES_MAX: Final = 1024
"""Distinct counters in the sums; further names are ignored."""
BEFORE_ALL: Final = -1
"""An incarnation before every one that a node may have."""
CACHE_COUNTERS: Final = frozenset(
    (
        "lookup_hits",
        "lookup_misses",
        "tokens_served",
        "bytes_served",
        "evictions",
        "bytes_evicted",
        "put_failures",
        "collisions_same_hash",
    )
)
"""Figures of the section ``cache`` that are counters; the others are states."""
REFUSALS: Final = "refusals"
"""The counters of the section ``refusals`` together: their names are sentences, so only the sum is kept."""


def countable(sections: Mapping[str, Mapping[str, object]]) -> dict[str, int]:
    """The counters of a node's sections, as ``section.figure``."""
    found = {
        f"prefill.{name}": count
        for name, count in _counts(sections.get("prefill", {})).items()
        if name not in PREFILL_VALUES
    }
    for name, count in _counts(sections.get("cache", {})).items():
        if name in CACHE_COUNTERS:
            found[f"cache.{name}"] = count
    if refusals := _counts(sections.get(REFUSALS, {})):
        found[REFUSALS] = total(refusals.values())
    return found


def _counts(figures: Mapping[str, object]) -> dict[str, int]:
    return {
        name: whole(value)
        for name, value in figures.items()
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    }


@dataclass(slots=True)
class _Row:
    incarnation: int
    base: dict[str, int] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)
    heard: bool = False
    """False until the node was heard by this process: what it did before is no increase of now."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One node's row, for keeping. ``base``: reached by earlier incarnations; ``current``: by the present one."""

    node_id: str
    incarnation: int
    base: dict[str, int]
    current: dict[str, int]


def ended(row: LedgerRow) -> LedgerRow:
    """The same sums, of a node whose incarnation is over and whose next one may have any number."""
    names = row.base.keys() | row.current.keys()
    reached = {name: row.base.get(name, 0) + row.current.get(name, 0) for name in names}
    return LedgerRow(row.node_id, BEFORE_ALL, reached, {})


def _row_of(kept: LedgerRow) -> _Row:
    return _Row(kept.incarnation, dict(kept.base), dict(kept.current))


class CounterLedger:
    """Totals of named counters over all nodes ever heard."""

    def __init__(self, nodes_max: int = NODES_MAX) -> None:
        self._nodes_max = nodes_max
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        self._totals: Counter[str] = Counter()
        self._changed: set[str] = set()

    def observe(self, node_id: str, incarnation: int, figures: Mapping[str, int]) -> dict[str, int]:
        """Take note of a node's counters.

        Returns:
            What grew since the node was last heard; empty when it is heard for the first time, since nobody knows when that
            was counted, and when the figures are of an incarnation that has ended.
        """
        row = self._rows.get(node_id)
        if row is None:
            row = self._rows[node_id] = _Row(incarnation)
            if len(self._rows) > self._nodes_max:
                self._changed.discard(self._rows.popitem(last=False)[0])
            self._changed.add(node_id)
        elif incarnation < row.incarnation:
            return {}
        elif incarnation > row.incarnation:
            for name, value in row.current.items():
                row.base[name] = row.base.get(name, 0) + value
            row.incarnation, row.current = incarnation, {}
            self._changed.add(node_id)
        self._rows.move_to_end(node_id)
        grown: dict[str, int] = {}
        for name, value in figures.items():
            increase = value - row.current.get(name, 0)
            if increase > 0 and self._admit(name):
                row.current[name] = value
                self._totals[name] += increase
                grown[name] = increase
        if grown:
            self._changed.add(node_id)
        heard, row.heard = row.heard, True
        return grown if heard else {}

    def restart(self, node_id: str) -> None:
        """Another key stands for the name from now on: its sums stay, its incarnation counts no more."""
        row = self._rows.get(node_id)
        if row is not None:
            self._rows[node_id] = _row_of(ended(LedgerRow(node_id, row.incarnation, row.base, row.current)))
            self._changed.add(node_id)

    def totals(self) -> dict[str, int]:
        """Sums over the fleet; they never go backwards, and stop at the bound of all figures."""
        return {name: whole(value) for name, value in self._totals.items()}

    def total(self, name: str) -> int:
        return whole(self._totals.get(name, 0))

    def of_node(self, node_id: str) -> dict[str, int]:
        """One node's counters over all its incarnations."""
        row = self._rows.get(node_id)
        if row is None:
            return {}
        names = row.base.keys() | row.current.keys()
        return {name: whole(row.base.get(name, 0) + row.current.get(name, 0)) for name in names}

    def rows(self) -> Iterator[LedgerRow]:
        """Every row, for keeping."""
        for node_id, row in self._rows.items():
            yield LedgerRow(node_id, row.incarnation, dict(row.base), dict(row.current))

    def take_changed(self) -> list[LedgerRow]:
        """The rows that have changed since this was asked last, for keeping."""
        names, self._changed = self._changed, set()
        return [row for row in self.rows() if row.node_id in names]

    def restore(self, rows: Iterable[LedgerRow]) -> None:
        """Begin with kept rows, the one heard of longest ago first; call it before anything is observed."""
        for kept in rows:
            if kept.node_id in self._rows or len(self._rows) >= self._nodes_max:
                continue
            self._rows[kept.node_id] = _row_of(kept)
            for figures in (kept.base, kept.current):
                for name, value in figures.items():
                    if self._admit(name):
                        self._totals[name] += value

    def _admit(self, name: str) -> bool:
        return name in self._totals or len(self._totals) < NAMES_MAX
