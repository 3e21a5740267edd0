"""What the keys have chosen: focus, scrolling, filter, pause. A value; every key makes the next one."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

FILTER_MAX: Final = 60
"""Characters of a filter."""
HELP: Final = (
    ("q", "quit"),
    ("tab, right", "next panel"),
    ("shift-tab, left", "panel before"),
    ("1 to 6", "the panel of that number"),
    ("up, down, page up, page down", "scroll the panel with the marker >"),
    ("home, end", "its beginning, its end"),
    ("enter", "show that panel alone, and all again"),
    ("f or /", "filter by node: part of a name, or a pattern with * and ?"),
    ("p or space", "stand still, and go on with what is true then"),
    ("escape", "clear the filter, leave the help or the single panel"),
    ("?", "this help"),
)
"""(keys, what they do)."""


class PanelName(StrEnum):
    """The panels in their order."""

    NODES = "nodes"
    JOBS = "jobs"
    REQUESTS = "requests"
    TRANSFERS = "transfers"
    SECURITY = "security"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class Extent:
    """How many rows a panel has, and how many of them are seen."""

    count: int
    height: int


@dataclass(frozen=True, slots=True)
class Controls:
    """``editing``: the filter as it is being typed, else None. ``nodes``: patterns from the command line."""

    panels: tuple[PanelName, ...] = tuple(PanelName)
    focus: PanelName = PanelName.NODES
    zoomed: bool = False
    helping: bool = False
    paused: bool = False
    quitting: bool = False
    filter: str = ""
    editing: str | None = None
    nodes: tuple[str, ...] = ()
    offsets: Mapping[PanelName, int] = field(default_factory=dict)
    has_keys: bool = True

    def shows(self, *node_ids: str) -> bool:
        """Whether something of one of these nodes is to be shown."""
        return any(
            (not self.nodes or any(_matches(node_id, pattern) for pattern in self.nodes)) and _matches(node_id, self.filter)
            for node_id in node_ids
        )

    @property
    def filtered(self) -> bool:
        return bool(self.nodes or self.filter)


def _matches(node_id: str, pattern: str) -> bool:
    """A pattern with * ? [ has to fit the whole name, anything else has to be in it; case does not count."""
    node_id, pattern = node_id.lower(), pattern.lower()
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(node_id, pattern)
    return pattern in node_id


def press(controls: Controls, key: str, extents: Mapping[PanelName, Extent]) -> Controls:
    """The controls after a key; a key without meaning changes nothing.

    Args:
        extents: of the panels that were last drawn.
    """
    if controls.editing is not None:
        return _edit(controls, controls.editing, key)
    if controls.helping and key != "q":
        return replace(controls, helping=False) if key in ("escape", "enter", "?", "h", " ") else controls
    position = controls.panels.index(controls.focus)
    match key:
        case "q" | "Q":
            return replace(controls, quitting=True)
        case "?" | "h":
            return replace(controls, helping=True)
        case "p" | " ":
            return replace(controls, paused=not controls.paused)
        case "f" | "/":
            return replace(controls, editing=controls.filter)
        case "tab" | "right":
            return replace(controls, focus=controls.panels[(position + 1) % len(controls.panels)])
        case "back-tab" | "left":
            return replace(controls, focus=controls.panels[position - 1])
        case "enter" | "z":
            return replace(controls, zoomed=not controls.zoomed)
        case "escape":
            return replace(controls, zoomed=False) if controls.zoomed else replace(controls, filter="", offsets={})
        case "1" | "2" | "3" | "4" | "5" | "6" if int(key) <= len(controls.panels):
            return replace(controls, focus=controls.panels[int(key) - 1])
        case _:
            return _scroll(controls, key, extents.get(controls.focus, Extent(0, 1)))


def _edit(controls: Controls, text: str, key: str) -> Controls:
    match key:
        case "enter":
            return replace(controls, filter=text.strip(), editing=None, offsets={})
        case "escape":
            return replace(controls, editing=None)
        case "backspace":
            return replace(controls, editing=text[:-1])
        case "clear":
            return replace(controls, editing="")
        case _ if len(key) == 1 and len(text) < FILTER_MAX:
            return replace(controls, editing=text + key)
        case _:
            return controls


def _scroll(controls: Controls, key: str, extent: Extent) -> Controls:
    last = max(0, extent.count - extent.height)
    now = min(controls.offsets.get(controls.focus, 0), last)
    page = max(1, extent.height - 1)
    steps = {"up": -1, "down": 1, "page-up": -page, "page-down": page, "home": -now, "end": last - now}
    if key not in steps:
        return controls
    return replace(controls, offsets={**controls.offsets, controls.focus: min(max(now + steps[key], 0), last)})
