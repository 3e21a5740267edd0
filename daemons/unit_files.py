"""systemd's syntax, as far as the units of the install scripts use it, and what `systemctl edit` puts beside them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

_WORD: Final = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\\.|[^\s"'\\])+""", re.DOTALL)
_PIECE: Final = re.compile(r""""((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|((?:\\.|[^"'\\])+)""", re.DOTALL)
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_SECONDS: Final = {
    **dict.fromkeys(("ms", "msec"), 0.001),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
"""By unit; others exist, and nobody stops a service with them."""


def read_unit(text: str) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a unit, as its process gets them.

    Raises:
        ValueError: it starts nothing.
    """
    arguments: list[str] = []
    environment: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        key, _, value = line.partition("=")
        words = [_unquoted(word).replace("%%", "%") for word in _WORD.findall(value)]
        if key == "ExecStart":
            arguments = [words[0], *(word.replace("$$", "$") for word in words[1:])] if words else []
        elif key == "Environment":
            environment |= dict(word.split("=", 1) for word in words if "=" in word)
    if not arguments:
        raise ValueError("no ExecStart")
    return arguments, environment


def _unquoted(word: str) -> str:
    pieces = ("".join(groups) for groups in _PIECE.findall(word))
    return "".join(re.sub(r"\\(.)", r"\1", piece, flags=re.DOTALL) for piece in pieces)


def with_drop_ins(unit: Path) -> str:
    """The text of a unit, and after it that of the files by which its user changes it (``NAME.service.d/*.conf``).

    Raises:
        OSError, ValueError: the unit cannot be read.
    """
    texts = [unit.read_text(encoding="utf-8")]
    for file in sorted(unit.with_name(f"{unit.name}.d").glob("*.conf")):
        with contextlib.suppress(OSError, ValueError):  # as systemd does, which goes on without it
            texts.append(file.read_text(encoding="utf-8"))
    return "\n".join(texts)


def stop_seconds(text: str) -> float | None:
    """How long a unit gives its process to end before it is killed; None: for ever, or it does not say."""
    found: float | None = None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("TimeoutStopSec", "TimeoutSec"):
            with contextlib.suppress(ValueError):  # systemd ignores what it cannot read
                found = read_time_span(value) or None  # systemd.service(5): zero is for ever
    return None if found == float("inf") else found


def read_time_span(text: str) -> float:
    """A span of systemd.time(7) in seconds: ``45``, ``1min 30s``, ``infinity``.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    if text == "infinity":
        return float("inf")
    amounts = _AMOUNT.findall(text)
    if not amounts or _AMOUNT.sub("", text) or any(unit not in _SECONDS for _, unit in amounts):
        raise ValueError(f"no time span: {text[:40]!r}")
    return sum(float(number) * _SECONDS[unit] for number, unit in amounts)
