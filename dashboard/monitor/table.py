"""Tables whose first line is both the panel's title and the heads of its columns; what does not fit is left out by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from dashboard.monitor.text import Glyphs, bar, clean, fit

GAP: Final = 1
MARGIN: Final = 1
BAR_TEXT_CELLS: Final = 5
"""Of a cell with a bar, what is kept for its text."""


@dataclass(frozen=True, slots=True)
class Column:
    """``width``: least cells. ``rank``: the highest are left out first, 0 never. ``grow``: share of the width to spare."""

    head: str
    width: int
    rank: int = 0
    right: bool = False
    grow: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """``text`` may be foreign: it is cleaned when it is drawn. ``share``: a bar of this share stands before the text."""

    text: str
    style: str = ""
    share: float | None = None


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One table. ``window(start, stop)`` makes rows, so that only what is seen is made; each has a cell a column.

    The first column has no head: the title stands there. ``weight``: its share of the height, when all have more rows than
    there is room for.
    """

    title: str
    columns: tuple[Column, ...]
    count: int
    window: Callable[[int, int], Sequence[Row]]
    when_empty: str
    weight: int = 1
    total: int = 0
    """Shown beside the title."""


def chosen_columns(columns: Sequence[Column], width: int) -> list[tuple[int, int]]:
    """(index, cells) of the columns that fit into ``width``, in their order."""
    chosen = list(range(len(columns)))
    while len(chosen) > 1 and _least(columns, chosen) > width:
        worst = max(chosen, key=lambda index: (columns[index].rank, index))
        if columns[worst].rank == 0:
            break
        chosen.remove(worst)
    widths = {index: columns[index].width for index in chosen}
    spare = width - _least(columns, chosen)
    shares = sum(columns[index].grow for index in chosen)
    for index in chosen:
        if spare > 0 and columns[index].grow:
            part = spare * columns[index].grow // shares
            widths[index] += part
            spare -= part
            shares -= columns[index].grow
    return [(index, widths[index]) for index in chosen]


def _least(columns: Sequence[Column], chosen: Sequence[int]) -> int:
    return sum(columns[index].width for index in chosen) + GAP * (len(chosen) - 1)


def head_line(panel: Panel, first: int, width: int, glyphs: Glyphs, *, focused: bool) -> Text:
    """Title and heads; ``first``: the number of the first row shown, from 0."""
    place = f" {first + 1}/{panel.total}" if first else f" {panel.total}"
    parts = []
    for index, cells in chosen_columns(panel.columns, width - 2 * MARGIN):
        text = panel.title + place if index == 0 else panel.columns[index].head
        parts.append(fit(text, cells, glyphs, right=panel.columns[index].right))
    marker = ">" if focused else " "
    line = fit(marker + (" " * GAP).join(parts), width, glyphs)
    return Text(line, style="bold reverse cyan" if focused else "bold reverse")


def body_lines(panel: Panel, first: int, height: int, width: int, glyphs: Glyphs) -> list[Text]:
    """Exactly ``height`` lines of exactly ``width`` cells."""
    rows = panel.window(first, first + height) if panel.count else ()
    layout = chosen_columns(panel.columns, width - 2 * MARGIN)
    lines = [_row_line(panel.columns, layout, row, width, glyphs) for row in rows[:height]]
    if not panel.count and height:
        lines.append(Text(fit(f" {panel.when_empty}", width, glyphs), style="dim"))
    return lines + [Text(" " * width)] * (height - len(lines))


def _row_line(columns: Sequence[Column], layout: Sequence[tuple[int, int]], row: Row, width: int, glyphs: Glyphs) -> Text:
    line = Text(" " * MARGIN)
    used = MARGIN
    for position, (index, cells) in enumerate(layout):
        if position:
            line.append(" " * GAP)
            used += GAP
        cells = min(cells, max(0, width - used))
        line.append(_cell(row[index], cells, columns[index].right, glyphs), style=row[index].style or None)
        used += cells
    line.append(" " * max(0, width - used))
    return line


def _cell(cell: Cell, width: int, right: bool, glyphs: Glyphs) -> str:
    text = clean(cell.text, glyphs)
    length = width - BAR_TEXT_CELLS
    if cell.share is None or length < 3:
        return fit(text, width, glyphs, right=right)
    return bar(cell.share, length, glyphs) + fit(text, BAR_TEXT_CELLS, glyphs, right=True)
