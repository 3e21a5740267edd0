"""Text of others on its way to a terminal, a log or a page, and the grammar of names on the wire.

Two lines of defence. The decoders refuse a message whose names break their grammar (:data:`NODE_ID`, :data:`WORD`,
:data:`ASCII`, :data:`LINE`). Free text has no grammar: reasons, error messages, log lines. So whatever is shown goes through
one function of this module, whoever wrote it:

- :func:`clean` for a line: nothing in it steers a terminal, starts another line, turns its direction, or hides;
- :func:`clean_prose` for an answer of a model: lines and the joiners that scripts need stay;
- :func:`json_text` for JSON: the same characters, escaped as JSON does, so that nothing is lost.

What is taken out stands there as an escape that can be read: ``\\x1b``, ``\\u202e``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Final

LINE_CHARACTERS_MAX: Final = 4096
"""Of one line that is shown: an error with the longest path a system allows still fits, nearly."""
ELLIPSIS: Final = "…"
MARKS_MAX: Final = 2
"""Combining marks on one letter, more than any script stacks in one line; a hundred of them cover the lines above."""

_HIDDEN: Final = (
    "\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
"""Controls, line ends, invisible and direction characters: no name has them."""
NODE_ID_CHARACTERS_MAX: Final = 100
NODE_ID: Final = rf"\A[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NODE_ID_CHARACTERS_MAX - 1}}}\Z"
"""Node and tenant ids: they are names of folders, too."""
OPTIONAL_NODE_ID: Final = rf"\A([A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NODE_ID_CHARACTERS_MAX - 1}}})?\Z"
WORD: Final = r"\A[A-Za-z][A-Za-z0-9_+-]{0,31}\Z"
"""Roles and other names of a closed vocabulary that a newer version may have added to."""
OPTIONAL_WORD: Final = r"\A([A-Za-z][A-Za-z0-9_+-]{0,31})?\Z"
ASCII: Final = r"\A[ -~]*\Z"
"""Versions, platforms, formats."""
LINE: Final = rf"\A[^{_HIDDEN}]*\Z"
"""Every other name: any script, on one line, all of it visible."""

_NODE_ID: Final = re.compile(NODE_ID)
_WORD: Final = re.compile(WORD)
_LINE: Final = re.compile(LINE)
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters, marks and symbols that show nothing."""
_SELECTORS: Final = frozenset((*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
"""Variation selectors: marks that show nothing by themselves."""
_JOINERS: Final = frozenset("\u200c\u200d\u200e\u200f\u061c")
"""Needed to write some scripts, and emoji. Harmless in prose."""
_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_JSON_ESCAPED: Final = re.compile(r"[^ -~]")


def is_node_id(text: str) -> bool:
    """Whether a node or tenant may be called so: letters, digits, ``-``, ``_``, ``.``, the last one not in front."""
    return _NODE_ID.search(text) is not None


def is_word(text: str) -> bool:
    """Whether a role may be called so."""
    return _WORD.search(text) is not None


def is_ascii_line(text: str) -> bool:
    """Whether a version or platform is plain."""
    return text.isascii() and text.isprintable()


def is_line(text: str) -> bool:
    """Whether a name has only characters that can be seen, on one line."""
    return _LINE.search(text) is not None


def is_visible(character: str) -> bool:
    """Whether a character shows itself, moves nothing and turns nothing: a letter, digit, sign or the plain space."""
    return character.isprintable() and character not in _BLANK and ord(character) not in _SELECTORS


def clean(text: str, characters_max: int = LINE_CHARACTERS_MAX) -> str:
    """One line of any text.

    Args:
        characters_max: of ``text`` that are kept; behind them stands an ellipsis.
    """
    cut = text[:characters_max]
    shown = cut if cut.isascii() and cut.isprintable() else _escaped(cut)
    return shown + ELLIPSIS if len(text) > characters_max else shown


def clean_prose(text: str) -> str:
    """Any number of lines, as a model answers: line ends, tabs and joiners stay, all else is as in :func:`clean`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c in _JOINERS or _is_prose(c) else _escape(c) for c in text)


def json_text(value: object) -> str:
    """A value as one line of JSON that steers no terminal; reading it gives the value back.

    Raises:
        TypeError, ValueError: as :func:`json.dumps`.
    """
    return escape_json(json.dumps(value, ensure_ascii=False))


def escape_json(text: str) -> str:
    """JSON whose strings have their invisible characters escaped: outside of strings JSON has none but line ends."""
    if text.isascii() and text.isprintable():
        return text
    return _JSON_ESCAPED.sub(_json_escape, text)


def _escaped(text: str) -> str:
    pieces: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character)[0] == "M" else 0
        pieces.append(character if is_visible(character) and marks <= MARKS_MAX else _escape(character))
    return "".join(pieces)


def _is_prose(character: str) -> bool:
    # Unlike in a name, an unusual space or a variation selector misleads nobody.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    if character == "\n" or is_visible(character):
        return character
    number = ord(character)
    if number < 0x10000:
        return f"\\u{number:04x}"
    number -= 0x10000
    return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
