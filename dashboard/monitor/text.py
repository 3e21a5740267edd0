"""Text for a terminal of fixed cells: what nodes tell is made harmless, cut and padded; figures get short.

Whatever comes from a node (names, reasons, log lines) is foreign. :func:`clean` leaves only characters that every terminal
draws one after the other, one or two cells wide: nothing that :mod:`wire.text` takes out, and nothing either that joins,
combines, or turns the direction of a line, so that no name can move its neighbours. One character stays one character, as
columns are narrow: an escape in its place would take the room of the rest.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rich.cells import get_character_cell_size

from wire.text import is_visible

REPLACEMENT: Final = "?"
CLEANED_MAX: Final = 400
"""Characters of one text that are looked at; no column is wider."""
_KINDS_SHOWN: Final = frozenset("LNPSZ")
"""First letters of the Unicode categories that are shown: letters, numbers, punctuation, symbols, spaces."""
_TURNING: Final = frozenset(("R", "AL", "AN", "RLE", "RLO", "RLI", "LRE", "LRO", "LRI", "FSI", "PDF", "PDI"))
"""Directions: a terminal that follows them would turn a whole line round."""
_JOINING: Final = frozenset((*range(0x1F1E6, 0x1F200), *range(0x1F3FB, 0x1F400)))
"""Halves of flags and skin tones: drawn together with their neighbours, or not, as the terminal likes."""
NOT_KNOWN: Final = "-"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What lines, bars and charts are drawn with. ``parts``: fractions of a full cell, growing; ``levels``: of a chart."""

    plain: bool
    full: str
    parts: str
    empty: str
    levels: str
    ellipsis: str
    vertical: str


UNICODE: Final = Glyphs(False, "█", "▏▎▍▌▋▊▉", "░", "▁▂▃▄▅▆▇█", "…", "│")
ASCII: Final = Glyphs(True, "#", "", ".", "_.:-=+*#", "~", "|")


def clean(text: str, glyphs: Glyphs) -> str:
    """The text with a question mark for every character that could disturb the frame."""
    text = text[:CLEANED_MAX]
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character, glyphs) for character in unicodedata.normalize("NFC", text))


def _shown(character: str, glyphs: Glyphs) -> str:
    if " " <= character <= "~":
        return character
    kind = unicodedata.category(character)
    if kind == "Zs":
        return " "
    harmless = (
        kind[0] in _KINDS_SHOWN
        and is_visible(character)
        and unicodedata.bidirectional(character) not in _TURNING
        and ord(character) not in _JOINING
        and get_character_cell_size(character) in (1, 2)
    )
    return character if harmless and not glyphs.plain else REPLACEMENT


def width_of(text: str) -> int:
    """Cells of a cleaned text."""
    return len(text) if text.isascii() else sum(map(get_character_cell_size, text))


def fit(text: str, width: int, glyphs: Glyphs, *, right: bool = False) -> str:
    """Cut or pad a cleaned text to exactly ``width`` cells; what was cut shows an ellipsis."""
    have = width_of(text)
    if have > width:
        text, have = _cut(text, width, glyphs.ellipsis)
    padding = " " * (width - have)
    return padding + text if right else text + padding


def _cut(text: str, width: int, ellipsis: str) -> tuple[str, int]:
    """(as much of the text as fits in front of an ellipsis, its cells with it)."""
    if width <= 0:
        return "", 0
    used = 0
    for index, character in enumerate(text):
        cells = get_character_cell_size(character)
        if used + cells > width - 1:
            return text[:index] + ellipsis, used + 1
        used += cells
    return text, used


# --- figures ---------------------------------------------------------------------------------------------------------


def count(value: float) -> str:
    """At most five characters: 999, 1.2k, 340k, 7.1M."""
    return _scaled(value, (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)), "")


def size(value_bytes: float) -> str:
    """At most seven characters: 512 B, 1.2 MB."""
    return _scaled(value_bytes, (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)), " ")


def _scaled(value: float, units: tuple[tuple[str, float], ...], space: str) -> str:
    if not math.isfinite(value) or value < 0:
        return NOT_KNOWN
    name, factor = next((unit for unit in units if value < unit[1] * 999.5), units[-1])
    scaled = value / factor
    if scaled >= 9999.5:
        return f">9999{space}{name}"
    short = f"{scaled:.1f}" if factor > 1 and scaled < 9.95 else f"{scaled:.0f}"
    return f"{short}{space}{name}"


def duration(seconds: float) -> str:
    """At most six characters: 240 ms, 4.2 s, 42 s, 12 min, 3.4 h, 2 d; also for what is not known (0): "-"."""
    if not math.isfinite(seconds) or seconds <= 0:
        return NOT_KNOWN
    if seconds < 0.9995:
        return f"{max(1.0, seconds * 1000):.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for limit, factor, name in ((99.5, 1, "s"), (5970, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / factor:.0f} {name}"
    return f"{min(seconds / 86_400, 9999):.0f} d"


def age(seconds: float) -> str:
    """At most four characters: now, 12s, 3m, 2h, 9d."""
    if not math.isfinite(seconds) or seconds < 1:
        return "now"
    for limit, factor, name in ((99.5, 1, "s"), (5970, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / factor:.0f}{name}"
    return f"{min(seconds / 86_400, 999):.0f}d"


def percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.0f}%" if math.isfinite(share) else NOT_KNOWN


def rate(value: float) -> str:
    """Something a second, "-" when it was not measured."""
    if not math.isfinite(value) or value <= 0:
        return NOT_KNOWN
    return f"{value:.1f}" if value < 99.95 else count(value)


def ratio(part: float, whole: float) -> float:
    """From 0 to 1; 0 when there is nothing to compare with."""
    if not (math.isfinite(part) and math.isfinite(whole)) or whole <= 0:
        return 0.0
    return min(max(part / whole, 0.0), 1.0)


# --- drawings --------------------------------------------------------------------------------------------------------


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """A bar of exactly ``width`` cells."""
    share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    steps = len(glyphs.parts) + 1
    whole, rest = divmod(int(share * width * steps), steps)
    part = glyphs.parts[rest - 1] if rest else ""
    return (glyphs.full * whole + part).ljust(width, glyphs.empty)


def chart(values: Iterable[float | None], glyphs: Glyphs, *, top: float = 0.0) -> str:
    """One cell a value, a space where there is none; the highest cell stands for ``top``, or the largest value."""
    known = [value if value is not None and math.isfinite(value) else None for value in values]
    most = top or max((value for value in known if value is not None), default=0.0)
    last = len(glyphs.levels) - 1
    return "".join(" " if value is None else glyphs.levels[round(last * ratio(value, most))] for value in known)
