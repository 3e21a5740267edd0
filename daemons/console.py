"""What the ``kakeya`` command shows: lines, tables, progress, streamed text.

With ``--json`` everything for people goes to standard error, so that standard output holds the JSON object alone.

Much of it was written by other nodes, so all of it passes through :mod:`wire.text` here, and nothing is read as markup.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from wire.text import clean, clean_prose, json_text


class _Output(RichConsole):
    """Rich's console, but whoever closed the pipe is the command's business."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Console:
    """One command's output."""

    def __init__(self, *, json_mode: bool = False) -> None:
        self.json_mode = json_mode
        self._rich = _Output(stderr=json_mode, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def say(self, text: str) -> None:
        """One line, also when ``text`` has line ends."""
        self._rich.print(clean(text))

    def stream(self, piece: str) -> None:
        """Prose as it comes, without a line end of its own."""
        if piece:
            self._rich.print(clean_prose(piece), end="")
            self._rich.file.flush()

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        # As Text: a table would read markup in a plain string whatever the console says.
        table = Table(title=Text(clean(title)) if title else None, title_justify="left")
        for index, head in enumerate(heads):
            table.add_column(Text(clean(head)), justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(clean(cell)) for cell in row))
        self._rich.print(table)

    def result(self, value: object) -> None:
        """The JSON object of ``--json``: the last line of standard output."""
        text = json_text(value)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(value)  # ASCII alone: the escapes of tolerate_narrow_output are not JSON's
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[float, float], None]]:
        """A bar while a long step runs: call it with (done, total). Silent where there is no terminal."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._rich, transient=True, disable=not self._rich.is_terminal) as bar:
            task = bar.add_task(clean(what), total=None)

            def show(done: float, total: float) -> None:
                bar.update(task, completed=int(done), total=int(total))

            yield show


def tolerate_narrow_output() -> None:
    """Characters that the output's encoding has not are written as escapes: a name must not end a command.

    In the POSIX locale standard output is not strict, but takes no more than bytes of names that could not be decoded.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is still in the buffer of standard output.

    Raises:
        OSError: it cannot be written; it stays in the buffer.
    """
    if sys.stdout is not None:  # None: closed by whoever started us
        sys.stdout.flush()


def probe_output() -> None:
    """Write an empty line: where standard output is not buffered, what it did not take is forgotten.

    Raises:
        OSError: it cannot be written.
    """
    flush_output()
    if sys.stdout is not None:
        os.write(sys.stdout.fileno(), b"\n")


def drop_unwritten_output() -> None:
    """What standard output does not take is dropped: in its buffer it would make a second error when the process ends."""
    try:
        flush_output()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def command_name() -> str:
    """How this command can be called from here: its name when it is on the search path, else its path."""
    if shutil.which("kakeya"):
        return "kakeya"
    path = Path(sys.executable).with_name("kakeya")
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def fail(message: str) -> None:
    """The one line an error gets. Where nobody can be told, the exit code still says it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"kakeya: {clean(message)}\n")
        sys.stderr.flush()
