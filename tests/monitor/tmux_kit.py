"""A terminal for tests: tmux on a server of its own, with a shell in it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.fleet_rig import PROJECT, clean_environment

PROMPT = "ready$ "
WAIT_S = 60.0
LOOK_S = 0.05


class Pane:
    """One window with a shell whose prompt is :data:`PROMPT`."""

    def __init__(self, socket: Path, environment: Mapping[str, str], columns: int, rows: int) -> None:
        self._socket = socket
        self._environment = {**environment, "PS1": PROMPT}
        size = ("-x", str(columns), "-y", str(rows))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "env", "-u", "ENV", "/bin/sh", "-i")
        self._tmux("set-option", "-g", "status", "off")
        self._tmux("set-option", "-g", "window-size", "manual")
        self.resize(columns, rows)
        self.wait_for(PROMPT.strip())

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words],
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=PROJECT,
            env={**self._environment, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *arguments: str, before: str = "") -> None:
        """Type a kakeya command into the shell; ``before``: what stands in front of it."""
        self.type(f"{before} {shlex.join([sys.executable, '-m', 'daemons', *arguments])}\n".lstrip())

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: Tab, Down, Enter, C-c."""
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def lines(self) -> list[str]:
        """The screen as it is now; blanks at the ends of lines are missing."""
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    def colours(self) -> str:
        """The screen with the sequences that colour it."""
        return self._tmux("capture-pane", "-p", "-e")

    def state(self, name: str) -> str:
        """One of tmux's variables, such as ``alternate_on`` or ``cursor_flag``."""
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()

    def wait(self, condition: Callable[[str], bool], what: str) -> str:
        """Wait until the screen fits; the screen."""
        deadline = time.monotonic() + WAIT_S
        while not condition(seen := "\n".join(self.lines())):
            assert time.monotonic() < deadline, f"timed out after {WAIT_S:.0f} s: {what}; on the screen:\n{seen}"
            time.sleep(LOOK_S)  # looking starts a process each time
        return seen

    def wait_for(self, text: str) -> str:
        return self.wait(lambda screen: text in screen, f"{text!r} on the screen")

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self._tmux("kill-server")


@contextlib.contextmanager
def pane(folder: Path, home: Path, columns: int = 80, rows: int = 24, **environment: str) -> Iterator[Pane]:
    """A pane whose shell has this Kakeya home; all of it is gone afterwards."""
    socket = folder / "s"
    # The path of a Unix socket is short, those of test folders are not.
    link = Path(os.path.relpath(socket, PROJECT))
    shell = {name: value for name, value in clean_environment().items() if name not in ("NO_COLOR", "TMUX", "LC_ALL")}
    shell |= {"KAKEYA_HOME": str(home), "LC_ALL": "C.UTF-8", **environment}
    made = Pane(link, shell, columns, rows)
    try:
        yield made
    finally:
        made.close()
