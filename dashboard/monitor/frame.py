"""One frame: a pure function of a picture, the controls and the size. Lines have exactly the width, whatever nodes told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from dashboard.monitor import header, panels
from dashboard.monitor.controls import HELP, Controls, Extent, PanelName
from dashboard.monitor.picture import Picture
from dashboard.monitor.table import Panel, body_lines, head_line
from dashboard.monitor.text import UNICODE, Glyphs, clean, fit

COLUMNS_MIN: Final = 60
ROWS_MIN: Final = 12
TWO_SIDES_COLUMNS: Final = 160
"""From this width on the panels stand on two sides."""
TALL_ROWS: Final = 30
"""From this height on there is a fourth line of figures."""
SIDE_BY_SIDE: Final = ((PanelName.JOBS, PanelName.TRANSFERS), (PanelName.SECURITY, PanelName.LOG))
WIDE_ORDER: Final = (
    PanelName.NODES,
    PanelName.JOBS,
    PanelName.TRANSFERS,
    PanelName.REQUESTS,
    PanelName.SECURITY,
    PanelName.LOG,
)
FOOTER: Final = ("q quit", "? help", "f filter", "p pause", "tab panel", "arrows scroll", "enter zoom")
_Group = tuple[PanelName, ...]
COLUMNS_MAX: Final = 1000
ROWS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Frame:
    """``lines``: one a row of the terminal, top first. ``extents``: of the panels that are seen, for scrolling."""

    lines: tuple[Text, ...]
    extents: Mapping[PanelName, Extent]


def render(picture: Picture, controls: Controls, columns: int, rows: int, glyphs: Glyphs = UNICODE) -> Frame:
    """Draw a frame of exactly that size (at least 1 x 1; of a larger one than any terminal's, a part)."""
    columns, rows = min(max(columns, 1), COLUMNS_MAX), min(max(rows, 1), ROWS_MAX)
    if columns < COLUMNS_MIN or rows < ROWS_MIN:
        return Frame(_too_small(columns, rows, glyphs), {})
    top = header.lines(picture, controls, columns, 4 if rows >= TALL_ROWS else 3, glyphs)
    height = rows - len(top) - 1
    if controls.helping:
        return Frame((*top, *_help(columns, height, glyphs), _footer(controls, columns, glyphs)), {})
    body, extents = _body(picture, controls, columns, height, glyphs)
    return Frame((*top, *body, _footer(controls, columns, glyphs)), extents)


def _too_small(columns: int, rows: int, glyphs: Glyphs) -> tuple[Text, ...]:
    said = [
        "kakeya top: too small",
        f"it is {columns}x{rows}",
        f"it needs {COLUMNS_MIN}x{ROWS_MIN}",
        "q quits",
    ]
    return tuple(Text(fit(text, columns, glyphs)) for text in (said + [""] * rows)[:rows])


def _help(columns: int, height: int, glyphs: Glyphs) -> list[Text]:
    said = ["", " keys", ""] + [f"  {keys:<30} {what}" for keys, what in HELP]
    return [Text(fit(text, columns, glyphs)) for text in (said + [""] * height)[:height]]


def _footer(controls: Controls, columns: int, glyphs: Glyphs) -> Text:
    if controls.editing is not None:
        text = f" filter by node: {clean(controls.editing, glyphs)}_   (enter: use it, escape: leave it)"
        return Text(fit(text, columns, glyphs), style="bold")
    text = "  ".join(FOOTER) if controls.has_keys else "no keys here (standard input is no terminal): Ctrl-C ends"
    return Text(fit(f" {text}", columns, glyphs), style="dim")


# --- panels ------------------------------------------------------------------------------------------------------------


def _body(
    picture: Picture, controls: Controls, columns: int, height: int, glyphs: Glyphs
) -> tuple[list[Text], dict[PanelName, Extent]]:
    shown = (controls.focus,) if controls.zoomed else controls.panels
    made = {name: panels.panel(name, picture, controls) for name in shown}
    lines: list[Text] = []
    extents: dict[PanelName, Extent] = {}
    for group, rows in _heights(_groups(shown, columns), made, controls.focus, height).items():
        extents.update({name: Extent(made[name].count, rows) for name in group})
        left_width = columns if len(group) == 1 else (columns - 1) // 2
        sides = [
            _panel(made[name], controls.offsets.get(name, 0), rows, width, glyphs, focused=name is controls.focus)
            for name, width in zip(group, (left_width, columns - left_width - 1), strict=False)
        ]
        rule = Text(glyphs.vertical, style="dim")
        lines += (
            sides[0] if len(sides) == 1 else [Text.assemble(one, rule, other) for one, other in zip(*sides, strict=True)]
        )
    return lines, extents


def _panel(panel: Panel, offset: int, rows: int, width: int, glyphs: Glyphs, *, focused: bool) -> list[Text]:
    first = min(offset, max(0, panel.count - rows))
    return [head_line(panel, first, width, glyphs, focused=focused), *body_lines(panel, first, rows, width, glyphs)]


def _groups(shown: Sequence[PanelName], columns: int) -> list[_Group]:
    """Which panels stand side by side, from the top."""
    if columns < TWO_SIDES_COLUMNS:
        return [(name,) for name in shown]
    groups: list[_Group] = []
    for name in (name for name in WIDE_ORDER if name in shown):
        if groups and (*groups[-1], name) in SIDE_BY_SIDE:
            groups[-1] = (*groups[-1], name)
        else:
            groups.append((name,))
    return groups


def _heights(groups: list[_Group], made: Mapping[PanelName, Panel], focus: PanelName, height: int) -> dict[_Group, int]:
    """Rows of each group below its heads. What finds no room is left out from the end, the panel in focus last."""
    while len(groups) > 1 and 2 * len(groups) > height:
        groups.remove(next(group for group in reversed(groups) if focus not in group))
    count = {group: max(made[name].count for name in group) for group in groups}
    weight = {group: max(made[name].weight for name in group) * (2 if focus in group else 1) for group in groups}
    given = dict.fromkeys(groups, 1)
    for _ in range(height - 2 * len(groups)):
        wanting = [group for group in groups if given[group] < count[group]]
        # What nobody wants becomes empty rows of the last one, so that what is above does not move.
        given[min(wanting, key=lambda group: given[group] / weight[group], default=groups[-1])] += 1
    return given
