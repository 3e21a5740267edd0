"""The frame every daemon process runs in: logging, signals, ready file, exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

from daemons.bus_note import BusNote
from daemons.log_files import CHECK_SECONDS, LogRotation, set_up_logging
from daemons.port_owner import with_owner
from kakeya_zmq.config import Settings, kakeya_home
from kakeya_zmq.io.failures import describe_exception
from kakeya_zmq.io.memory import tune_heap
from kakeya_zmq.io.reactor import Reactor
from wire.errors import ConfigError, PortInUseError
from wire.files import make_private_folder, read_regular
from wire.limits import MIB

__all__ = [
    "Daemon",
    "check_ready_file",
    "leave",
    "remove_ready_files",
    "run_daemon",
    "set_up_logging",
    "stop_signals",
    "write_ready_file",
]
DRAIN_LOOK_SECONDS = 0.02
READY_BYTES_MAX = 64 * 1024
"""Of a ready file."""

if TYPE_CHECKING:
    from daemons.node import Node

_log = logging.getLogger(__name__)


class Daemon(Protocol):
    """A role, ready to run on the reactor's thread."""

    @property
    def node(self) -> Node:
        """What it is in the fleet; its port is bound."""
        ...

    def begin(self, ready: Callable[[dict[str, object]], None], fail: Callable[[BaseException], None]) -> None:
        """Start; call ``ready(facts)`` once it serves, or ``fail(error)`` when it never will."""
        ...

    def drain(self, reason: str) -> None:
        """Take nothing new from now on; what is under way goes on."""
        ...

    def drained(self) -> bool:
        """Whether all that was under way has ended."""
        ...

    def end(self, reason: str) -> None:
        """Hand back what has not ended, say goodbye, let go of everything."""
        ...


@contextlib.contextmanager
def stop_signals(stop: Callable[[str], None], abandon: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call ``stop(reason)`` at the first SIGTERM, SIGINT or SIGHUP; a second one ends the process at once.

    Args:
        abandon: what is done even then; only what cannot block.
    """
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            try:
                abandon()
            finally:
                os._exit(128 + number)
        stop(f"received {signal.Signals(number).name}")

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def write_ready_file(path: str, facts: dict[str, object]) -> None:
    """Tell a waiting script where this daemon serves: written whole, then renamed into place."""
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        make_private_folder(target.parent)
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unusable_ready_file(target, error.strerror or "unknown error") from None


def bound_file(path: str | Path) -> Path:
    """Beside a ready file: where the address stands as soon as the port is bound, while a model may still be loading."""
    ready = Path(path)
    return ready.with_name(f"{ready.name}.bound")


def check_ready_file(path: str) -> None:
    """Whether a ready file and the file beside it can be written there, before minutes of loading.

    Raises:
        ConfigError: one is a directory or device, or their folder cannot be made or written.
    """
    target = Path(path)
    _check_regular(target)
    _check_regular(bound_file(target))
    try:
        make_private_folder(target.parent)
    except OSError as error:
        raise _unusable_ready_file(target, error.strerror or "unknown error") from None
    if not os.access(target.parent, os.W_OK):
        raise _unusable_ready_file(target, "its folder is not writable")


def _check_regular(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise _unusable_ready_file(file, "it is not a regular file")


def remove_ready_files(path: str) -> None:
    """Remove what this process has told there; another daemon that was given the same name keeps its own. Idempotent."""
    for file in (Path(path), bound_file(path)):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(read_regular(file, READY_BYTES_MAX))["pid"] == os.getpid():
                file.unlink(missing_ok=True)


def _tell_bound(path: str, node: Node) -> None:
    """Write where the node's port is bound, which may be elsewhere than others are told to reach it (--advertise).

    This process is the one that runs now: a ready file that is still there was left by one that was killed.
    """
    with contextlib.suppress(OSError):
        Path(path).unlink(missing_ok=True)
    write_ready_file(str(bound_file(path)), {"pid": os.getpid(), "address": str(node.endpoints.address)})


def _unusable_ready_file(file: Path, why: str) -> ConfigError:
    return ConfigError(f"the ready file {file} cannot be written: {why}", remedy="check --ready-file")


def run_daemon(settings: Settings, make: Callable[[Reactor], Daemon]) -> int:
    """Run a role until it is told to stop: then it drains for at most ``--drain-s``, and ends.

    Returns:
        Exit code: 0 after a stop that was asked for.

    Raises:
        KakeyaError: it could not start.
    """
    tune_heap()
    if settings.ready_file:
        check_ready_file(settings.ready_file)
    reactor = Reactor()
    failure: list[BaseException] = []
    reasons: list[str] = []
    note = BusNote(kakeya_home(), settings.node_id, settings.bus_bind)

    def stop(reason: str) -> None:
        reasons.append(reason)
        reactor.post(lambda: _drain(reactor, daemon, reason, settings.drain_s) if daemon is not None else reactor.stop())

    def ready(facts: dict[str, object]) -> None:
        described = {"pid": os.getpid(), "role": settings.role, "node_id": settings.node_id, **facts}
        if settings.ready_file:
            write_ready_file(settings.ready_file, described)
        note.write(facts)
        _log.info("%s %s serves on %s", settings.role, settings.node_id, facts.get("address"))

    def forget() -> None:
        note.remove()
        if settings.ready_file:
            remove_ready_files(settings.ready_file)

    def fail(error: BaseException) -> None:
        failure.append(error)
        reactor.stop()

    daemon: Daemon | None = None
    try:
        # Signals are handled as long as there is anything to let go of: one that interrupts that would leave threads behind,
        # and a process that never ends.
        with stop_signals(stop, forget):
            try:
                daemon = make(reactor)
                if settings.ready_file:
                    _tell_bound(settings.ready_file, daemon.node)
                _rotate_log(reactor, LogRotation(int(settings.log_max_mb * MIB)))
                daemon.begin(ready, fail)
                reactor.run()
            finally:
                note.remove()
                if daemon is not None:
                    daemon.end(reasons[0] if reasons else "stopping")
                reactor.close(5.0)
                forget()
    except PortInUseError as error:
        raise with_owner(error) from None
    if failure:
        raise failure[0]
    _log.info("stopped: %s", reasons[0] if reasons else "done")
    return 0


def _drain(reactor: Reactor, daemon: Daemon, reason: str, limit_s: float) -> None:
    """Stop the reactor once the daemon has nothing under way, or its time is over."""
    deadline = reactor.clock() + limit_s

    def look() -> None:
        try:
            done = daemon.drained()
        except Exception as error:  # a bug must not keep the daemon from ending
            _log.error("draining failed: %s", describe_exception(error))
            done = True
        if not done and reactor.clock() < deadline:
            reactor.call_later(DRAIN_LOOK_SECONDS, look)
            return
        if not done:
            _log.warning("what was not finished within %g s is handed back", limit_s)
        reactor.stop()

    _log.info("%s: taking nothing new, finishing what runs (at most %g s; a second signal ends at once)", reason, limit_s)
    try:
        daemon.drain(reason)
    finally:
        look()


def _rotate_log(reactor: Reactor, rotation: LogRotation) -> None:
    rotation.look()
    reactor.call_later(CHECK_SECONDS, lambda: _rotate_log(reactor, rotation))


def leave(code: int) -> NoReturn:
    """End the process of a daemon that has used MLX, without the C++ destructors of static objects.

    Now and then MLX's own threads still run when theirs comes, and the C++ runtime aborts the process: a daemon that has
    done all its duties would end with a signal instead of its exit code.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
