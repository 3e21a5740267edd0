"""The terminal: full screen while a block lasts and as it was afterwards, whatever ended the block.

Only lines that have changed are sent, each at its own place, so that a slow connection has little to do and a line that was
drawn wrongly cannot move another one. Signals that matter to a screen (its size changed, Ctrl-Z, Ctrl-C) end a wait at once.
"""

from __future__ import annotations

import contextlib
import io
import locale
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

from rich.console import Console
from rich.text import Text

from dashboard.monitor.text import ASCII, REPLACEMENT, UNICODE, Glyphs

_ENTER: Final = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The other screen, no cursor, no wrapping at the right edge (a character of unexpected width must not shift lines)."""
_LEAVE: Final = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READ_BYTES: Final = 4096
PLAIN_TERMINALS: Final = ("dumb", "vt1", "vt2", "vt5", "ansi")
"""Beginnings of TERM of terminals that cannot be expected to draw more than ASCII."""


def is_full_screen(environment: Mapping[str, str]) -> bool:
    """Whether standard output is a terminal on which single lines can be drawn."""
    return sys.stdout.isatty() and environment.get("TERM", "") not in ("", "dumb", "unknown")


def glyphs_of(environment: Mapping[str, str], encoding: str) -> Glyphs:
    """What can be drawn, by the terminal and by the locale.

    In the locale "C" Python itself switches to UTF-8 and sets LC_CTYPE, which says nothing of the terminal: LANG is asked
    then.
    """
    chosen = environment.get("LC_ALL") or environment.get("LC_CTYPE") or environment.get("LANG") or ""
    if chosen == "C.UTF-8" and not environment.get("LC_ALL") and environment.get("LANG") in ("C", "POSIX"):
        chosen = "C"
    plain = (
        not encoding.lower().replace("-", "").startswith("utf8")
        or environment.get("TERM", "").startswith(PLAIN_TERMINALS)
        or (chosen != "" and "utf" not in chosen.lower() and not _is_utf8_locale(chosen))
    )
    return ASCII if plain else UNICODE


def _is_utf8_locale(name: str) -> bool:
    """A locale without an encoding in its name, such as "en_US", has the one that the system's tables give it."""
    return name not in ("C", "POSIX") and "utf" in locale.normalize(name).lower()


class Painter:
    """Turns lines into what a terminal understands, with as many colours as it has (rich decides, by TERM and NO_COLOR)."""

    def __init__(self, *, colour: bool) -> None:
        self._console = Console(
            file=io.StringIO(),
            force_terminal=colour,
            legacy_windows=False,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def draw(self, lines: Sequence[Text]) -> list[str]:
        """One string a line, without line ends."""
        with self._console.capture() as capture:
            for line in map(_harmless, lines):
                self._console.print(line, soft_wrap=True, crop=False, overflow="ignore", no_wrap=True)
        return capture.get().split("\n")[: len(lines)]


def _harmless(line: Text) -> Text:
    """The last gate in front of the terminal: panels have cleaned their texts, and no mistake of one may matter."""
    if line.plain.isprintable():
        return line
    plain = "".join(character if character.isprintable() else REPLACEMENT for character in line.plain)
    return Text(plain, style=line.style, spans=line.spans)


class Terminal:
    """Full-screen output, and keys where standard input is a terminal. Make one with :func:`full_screen`."""

    def __init__(self, output: int, keys: int | None) -> None:
        self.has_keys = keys is not None
        self._output = output
        self._keys = keys
        self._painter = Painter(colour=True)
        self._shown: list[str] = []
        self._size = (0, 0)
        self._stop_asked = self._continued = False
        self._saved = termios.tcgetattr(output)
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)

    def size(self) -> tuple[int, int]:
        """(columns, rows); 80 x 24 where the terminal does not say."""
        try:
            columns, rows = os.get_terminal_size(self._output)
        except OSError:
            columns, rows = 0, 0
        return columns or 80, rows or 24

    def paint(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Show these lines, which fill a terminal of that size."""
        drawn = self._painter.draw(lines)
        if size != self._size:
            self.forget()
            self._size = size
        changed = [
            # Erased first: what has two cells here may have one there.
            f"\x1b[{row};1H{line}" if line.isascii() else f"\x1b[{row};1H\x1b[2K{line}"
            for row, line in enumerate(drawn, 1)
            if row > len(self._shown) or self._shown[row - 1] != line
        ]
        if changed:
            start = "" if self._shown else "\x1b[2J"
            self._write((start + "".join(changed)).encode("utf-8", "replace"))
        self._shown = drawn

    def forget(self) -> None:
        """Draw everything anew next time."""
        self._shown = []

    def wait(self, timeout_s: float) -> bytes | None:
        """What was typed within the time; empty when nothing was or a signal came, None when nobody can type any more."""
        watched = [self._wake] if self._keys is None else [self._wake, self._keys]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, READ_BYTES)
        if self._keys is None or self._keys not in ready:
            return b""
        try:
            return os.read(self._keys, READ_BYTES) or None
        except OSError:  # the terminal is gone
            return None

    def obey(self) -> None:
        """Do what signals asked for: stop as Ctrl-Z wants, with the terminal given back, and take it again afterwards."""
        if self._stop_asked:
            self._leave()
            previous = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # returns when somebody lets us go on
            signal.signal(signal.SIGTSTP, previous)
            self._saved = termios.tcgetattr(self._output)
        if self._stop_asked or self._continued:
            self._stop_asked = self._continued = False
            self._enter()

    def _enter(self) -> None:
        tty.setcbreak(self._output, termios.TCSADRAIN)
        self._write(_ENTER)
        self.forget()

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # of a terminal that is gone nothing is left to restore
            self._write(_LEAVE)
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._output, termios.TCSAFLUSH, self._saved)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._output, data) :]
            except BlockingIOError:  # somebody else made the terminal non-blocking
                select.select([], [self._output], [], 1.0)

    def _close(self) -> None:
        for end in (self._wake, self._woken):
            os.close(end)

    def _handlers(self) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
        return {signal.SIGWINCH: self._on_resize, signal.SIGTSTP: self._on_stop, signal.SIGCONT: self._on_continue}

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        self._continued = True

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        """Only there so that the signal ends a wait."""


@contextlib.contextmanager
def full_screen() -> Iterator[Terminal]:
    """The terminal of standard output, full-screen; restored when the block ends. Only on the main thread."""
    sys.stdout.flush()
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    terminal = Terminal(sys.stdout.fileno(), keys)
    previous = {number: signal.signal(number, handler) for number, handler in terminal._handlers().items()}
    previous_wake = signal.set_wakeup_fd(terminal._woken, warn_on_full_buffer=False)
    try:
        terminal._enter()
        yield terminal
    finally:
        # A second Ctrl-C must not come between us and the restoring.
        ending = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
        terminal._leave()
        signal.set_wakeup_fd(previous_wake)
        for number, handler in (previous | ending).items():
            signal.signal(number, handler)
        terminal._close()
