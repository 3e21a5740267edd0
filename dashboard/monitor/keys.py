"""Keys out of the bytes a terminal sends. Sans-IO: bytes and the time go in, keys come out.

A key is its character, or one of the names in :data:`NAMES`. Escape alone and the beginning of a longer sequence are the
same byte, so an escape is only taken for the key when nothing has followed it for a moment.
"""

from __future__ import annotations

import codecs
from typing import Final

ESCAPE_S: Final = 0.1
SEQUENCE_MAX: Final = 32
"""Bytes of one escape sequence; a longer one is thrown away."""
_CONTROLS: Final = {
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x15": "clear",
    "\x0c": "redraw",
}
_SEQUENCES: Final = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "Z": "back-tab",
    "1~": "home",
    "4~": "end",
    "5~": "page-up",
    "6~": "page-down",
    "7~": "home",
    "8~": "end",
}
"""What follows ``ESC [`` or ``ESC O``, without modifiers."""
NAMES: Final = frozenset((*_CONTROLS.values(), *_SEQUENCES.values(), "escape"))


class KeyDecoder:
    """Keeps what is not complete yet."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        self._waiting_since = 0.0

    def feed(self, data: bytes, now: float) -> list[str]:
        """The keys that are complete with these bytes; call it with none when :meth:`deadline` has come."""
        keys: list[str] = []
        if not data and self._waiting and now >= self._waiting_since + ESCAPE_S:
            self._waiting = ""
            return ["escape"]
        for character in self._decoder.decode(data):
            keys += self._take(character, now)
        return keys

    def deadline(self) -> float | None:
        """When to call :meth:`feed` again even if nothing was typed."""
        return self._waiting_since + ESCAPE_S if self._waiting else None

    def _take(self, character: str, now: float) -> list[str]:
        if character == "\x1b":
            before = ["escape"] if self._waiting == "\x1b" else []
            self._waiting, self._waiting_since = character, now
            return before
        if not self._waiting:
            return _plain(character)
        if self._waiting == "\x1b" and character not in "[O":
            self._waiting = ""
            return ["escape", *_plain(character)]
        self._waiting += character
        if len(self._waiting) == 2 or (not "@" <= character <= "~" and len(self._waiting) < SEQUENCE_MAX):
            return []
        sequence, self._waiting = self._waiting[2:], ""
        name = _SEQUENCES.get(sequence) or _SEQUENCES.get(sequence[-1])
        return [name] if name else []


def _plain(character: str) -> list[str]:
    name = _CONTROLS.get(character)
    if name:
        return [name]
    return [character] if character.isprintable() else []
