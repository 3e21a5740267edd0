"""A small launchd: starts an agent exactly as its property list says, and keeps it alive by the list's rules.

What is applied: ProgramArguments, WorkingDirectory, EnvironmentVariables (and nothing else of this process's environment but
what launchd gives: HOME, PATH, USER), StandardOutPath and StandardErrorPath, Umask, NumberOfFiles, KeepAlive (true, or
SuccessfulExit), ThrottleInterval, ExitTimeOut. The intervals run ``hurry`` times as fast.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Agent:
    """One loaded agent. ``keep()`` is the supervisor's turn: it restarts what has to run."""

    def __init__(self, plist: Path, home: Path, *, hurry: float = 100.0) -> None:
        self.document: dict[str, Any] = plistlib.loads(plist.read_bytes())
        self._home = home
        self._hurry = hurry
        self._started_at = float("-inf")
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def label(self) -> str:
        return str(self.document["Label"])

    @property
    def log(self) -> Path:
        return Path(self.document["StandardErrorPath"])

    def argument(self, flag: str) -> str:
        arguments = self.document["ProgramArguments"]
        return str(arguments[arguments.index(flag) + 1])

    def load(self) -> None:
        if self.document.get("RunAtLoad"):
            self._start()

    def keep(self) -> bool:
        """Apply KeepAlive to a process that has ended; whether it runs."""
        assert self.process is not None, "it was never started"
        if self.process.poll() is None:
            return True
        keep = self.document.get("KeepAlive", False)
        wanted = keep is True or (isinstance(keep, dict) and keep["SuccessfulExit"] is (self.process.returncode == 0))
        throttled = time.monotonic() - self._started_at < self.document.get("ThrottleInterval", 10) / self._hurry
        if wanted and not throttled:
            self._start()
        return wanted

    def unload(self) -> int:
        """SIGTERM, and SIGKILL after ExitTimeOut (in real time: a daemon drains in real time); the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(self.document.get("ExitTimeOut", 20))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return int(self.process.returncode)

    def _start(self) -> None:
        document = self.document
        files = document.get("SoftResourceLimits", {}).get("NumberOfFiles")

        def limits() -> None:
            if files is not None:
                _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (files if hard < 0 else min(files, hard), hard))

        given = {"HOME": str(self._home), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "USER": os.environ.get("USER", "me")}
        with (
            Path(document["StandardOutPath"]).open("ab") as out,
            Path(document["StandardErrorPath"]).open("ab") as err,
        ):
            self.process = subprocess.Popen(
                document["ProgramArguments"],
                cwd=document["WorkingDirectory"],
                env={**given, **document.get("EnvironmentVariables", {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                umask=document.get("Umask", 0o022),
                preexec_fn=limits,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self.starts += 1


@contextlib.contextmanager
def loaded(agent: Agent) -> Iterator[Agent]:
    """Load an agent for a block; afterwards its process is gone."""
    try:
        agent.load()
        yield agent
    finally:
        if agent.process is not None and agent.process.poll() is None:
            agent.process.kill()
            agent.process.wait()
