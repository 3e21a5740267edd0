"""One daemon process that comes up in the background: started, waited for, stopped again when it does not get ready."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from daemons.fleet.down import STOP_TIMEOUT_SECONDS
from daemons.fleet.home import check_room, unwritable
from daemons.fleet.notes import Member
from daemons.node_lock import REMEDY as NODE_REMEDY
from daemons.run import READY_BYTES_MAX, bound_file
from kakeya_zmq.io.addresses import Address, parse_address
from wire.errors import ConfigError, FailureCode, KakeyaError, PortInUseError, RequestFailed, SecretFileError
from wire.files import make_private_folder, open_regular, read_regular

START_TIMEOUT_SECONDS = 180.0
POLL_SECONDS = 0.05


class Starting:
    """A daemon process that is coming up."""

    def __init__(self, role: str, arguments: Sequence[str], ready_file: Path, log: Path, address: str) -> None:
        self.role = role
        self.ready_file = ready_file
        self.log = log
        self.address = address
        self.arguments = tuple(arguments)
        make_private_folder(ready_file.parent)
        self.forget_files()
        make_private_folder(log.parent)
        self._log_start = log.stat().st_size if log.exists() else 0
        with os.fdopen(open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "daemons", role, *arguments, "--ready-file", str(ready_file)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def wait_for_address(self, tell: Callable[[str], None]) -> str:
        """Where it will serve, once that is bound; it may still be loading.

        A fixed port is waited for, too: until it is ours, another fleet may have it, and whoever dials it would join that.
        """
        return str(self._wait_for(bound_file(self.ready_file), tell)["address"])

    def wait_ready(self, tell: Callable[[str], None]) -> Member:
        """The member, with the address that it has bound: what it advertises to others may not lead back here."""
        facts = self._wait_for(self.ready_file, tell)
        bound = self._facts(bound_file(self.ready_file)) or {}  # a dashboard has none
        return self._member({**facts, **bound})

    def forget_files(self) -> None:
        """Remove what it told only us."""
        for file in (self.ready_file, bound_file(self.ready_file)):
            file.unlink(missing_ok=True)

    def _wait_for(self, file: Path, tell: Callable[[str], None]) -> dict[str, object]:
        """What the daemon writes there."""
        started = time.monotonic()
        told = started
        while time.monotonic() - started < START_TIMEOUT_SECONDS:
            facts = self._facts(file)
            if facts is not None:
                return facts
            if self.process.poll() is not None:
                raise self._refusal(self.process.returncode)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                tell(f"waiting for the {self.role} ({told - started:.0f} s): {self._last_line() or 'no output'}")
            time.sleep(POLL_SECONDS)
        text = f"the {self.role} was not ready within {START_TIMEOUT_SECONDS:.0f} s: {self._last_line() or 'no output'}"
        raise RequestFailed(FailureCode.DEADLINE_EXCEEDED, text)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _refusal(self, code: int) -> KakeyaError:
        """Why the daemon did not start, with its own exit code."""
        line = self._last_line()
        if not line:
            try:
                check_room(self.log.parent)
            except OSError as error:
                return unwritable(error)
        line = (line or "no output").removeprefix("kakeya: ").replace(NODE_REMEDY, "stop that node")
        kinds: dict[int, type[ConfigError]] = {4: SecretFileError, 5: PortInUseError}
        return kinds.get(code, ConfigError)(f"the {self.role} did not start: {line}")

    def _facts(self, file: Path) -> dict[str, object] | None:
        try:
            facts: dict[str, object] = json.loads(read_regular(file, READY_BYTES_MAX))
        except (OSError, ValueError):
            return None
        return facts if facts.get("pid") == self.process.pid else None

    def _member(self, facts: dict[str, object]) -> Member:
        created = psutil.Process(self.process.pid).create_time()
        return Member(
            role=self.role,
            node_id=str(facts["node_id"]),
            address=str(facts["address"]),
            pid=self.process.pid,
            created=created,
            log=str(self.log),
            arguments=self.arguments,
            bus_address=_bus_address(facts),
        )

    def _last_line(self) -> str:
        try:
            with self.log.open("rb") as stream:
                stream.seek(self._log_start)
                lines = stream.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else ""


def _bus_address(facts: dict[str, object]) -> str:
    port = facts.get("bus_port")
    return str(Address(parse_address(str(facts["address"])).host, port)) if isinstance(port, int) and port else ""


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back Ctrl-C and requests to stop until the end of the block: no process may start without being noted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Not by the signal mask: the new process would inherit it, and could not be stopped.
    previous = {number: signal.signal(number, lambda caught, frame: waiting.append(caught)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])
