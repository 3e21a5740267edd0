"""A fleet of local processes: ``kakeya up`` starts it, ``kakeya down`` stops it.

What runs is remembered in ``run/fleet.json`` under the Kakeya home. A process id alone is not trusted: a process counts as
ours only when it started when we noted it did.
"""

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
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from daemons.fleet_home import check_room, starting_alone, unwritable
from daemons.node_lock import REMEDY as NODE_REMEDY
from daemons.run import bound_file
from kakeya_zmq.config import kakeya_home
from kakeya_zmq.io.sockets import Address, parse_address
from kakeya_zmq.options import DEFAULT_PORTS
from wire.errors import ConfigError, FailureCode, FleetBusyError, KakeyaError, PortInUseError, RequestFailed, SecretFileError
from wire.keys import FleetKey, write_secret_file

START_TIMEOUT_SECONDS = 180.0
STOP_TIMEOUT_SECONDS = 40.0
"""Longer than daemons drain (--drain-s)."""
POLL_SECONDS = 0.05
PID_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Member:
    """One running daemon of the local fleet. ``created`` is the process's start time, seconds since the epoch."""

    role: str
    node_id: str
    address: str
    pid: int
    created: float
    log: str
    arguments: tuple[str, ...]
    bus_address: str = ""
    """Where its event bus listens, for the dashboard; empty when it has none."""

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            ours = abs(process.create_time() - self.created) < 2.0
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it is gone, or somebody else's
            return False

    def option(self, flag: str) -> str:
        """The value it was started with for ``flag``, or empty."""
        if flag not in self.arguments[:-1]:
            return ""
        return self.arguments[self.arguments.index(flag) + 1]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What ``kakeya up`` should start. ``model`` empty: the demo model. Extra flags go to the daemon of that role."""

    host: str = "127.0.0.1"
    ephemeral: bool = False
    """Free ports instead of the usual ones."""
    model: str = ""
    roles: tuple[str, ...] = ("primary", "worker", "cache")
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


def run_folder() -> Path:
    return kakeya_home() / "run"


def default_psk_file() -> Path:
    return kakeya_home() / "fleet.psk"


def ensure_psk(path: Path) -> bool:
    """Make the PSK if there is none; whether one was made."""
    if path.exists():
        FleetKey.load(path)
        return False
    write_secret_file(path, FleetKey.generate())
    return True


def load_fleet() -> tuple[Member, ...]:
    """The members noted by the last ``kakeya up``, alive or not.

    Raises:
        ConfigError: the notes cannot be read, or are not ours. Taken for none, they would be written over.
    """
    path = run_folder() / "fleet.json"
    try:
        return read_members(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged, or not from `kakeya up`"
        remedy = "`kakeya down` stops what it was about, if that runs, and puts it aside"
        raise ConfigError(f"{path} cannot be used: {why}", remedy=remedy) from None


def read_members(data: bytes) -> tuple[Member, ...]:
    """Read notes of running daemons.

    Raises:
        ValueError: they are none.
    """
    try:
        members = msgspec.json.decode(data, type=tuple[Member, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not all(0 < member.pid <= PID_MAX for member in members):
        raise ValueError("no process has such a number")
    return members


def save_fleet(members: Sequence[Member]) -> None:
    folder = run_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = folder / f"fleet.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps([asdict(member) for member in members], indent=2), encoding="utf-8")
    temporary.replace(folder / "fleet.json")


def live_members() -> tuple[Member, ...]:
    return tuple(member for member in load_fleet() if member.alive)


def find_member(role: str) -> Member | None:
    return next((member for member in live_members() if member.role == role), None)


def primary_address() -> Address:
    """Where the local fleet's primary serves: the running one's, else the usual address."""
    member = find_member("primary")
    return parse_address(member.address) if member else Address("127.0.0.1", DEFAULT_PORTS["primary"])


def start_fleet(plan: FleetPlan, tell: Callable[[str], None]) -> tuple[Member, ...]:
    """Start what the plan names and is not running yet; wait until all serve.

    Raises:
        ConfigError: a daemon refused to start, its last log line says why; or files under the home cannot be written.
        FleetBusyError: another command is starting them, or was killed while it did.
        RequestFailed: DEADLINE_EXCEEDED, one did not get ready in time.
    """
    try:
        with starting_alone(run_folder()):
            return _start_fleet(plan, tell)
    except OSError as error:
        raise unwritable(error) from None


def _start_fleet(plan: FleetPlan, tell: Callable[[str], None]) -> tuple[Member, ...]:
    running = {member.role: member for member in live_members()}
    if set(plan.roles) - set(running):
        check_room(run_folder())
        refuse_leftovers(plan.roles)
    if ensure_psk(default_psk_file()):
        tell("made a new fleet key (mode 0600)")
    starting: list[Starting] = []
    try:
        with contextlib.ExitStack() as undo:
            # The primary's address must be known to the others, so that they find the fleet through it.
            seed = running["primary"].address if "primary" in running else ""
            for role in plan.roles:
                if role in running:
                    continue
                with deferred_signals():
                    process = start_daemon(role, plan, seed)
                    starting.append(process)
                    undo.callback(process.stop)
                if role == "primary" and not seed:
                    seed = process.wait_for_address(tell)
            for process in starting:
                running[process.role] = process.wait_ready(tell)
            undo.pop_all()
    finally:
        for process in starting:
            process.forget_files()
    members = tuple(running[role] for role in plan.roles if role in running)
    save_fleet(members)
    return members


class Starting:
    """A daemon process that is coming up."""

    def __init__(self, role: str, arguments: Sequence[str], ready_file: Path, log: Path, address: str) -> None:
        self.role = role
        self.ready_file = ready_file
        self.log = log
        self.address = address
        self.arguments = tuple(arguments)
        ready_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.forget_files()
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "daemons", role, *arguments, "--ready-file", str(ready_file)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def wait_for_address(self, tell: Callable[[str], None]) -> str:
        """Where it will serve: known at once with a fixed port, else once that is bound. It may still be loading."""
        if not self.address.endswith(":0"):
            return self.address
        return str(self._wait_for(bound_file(self.ready_file), tell)["address"])

    def wait_ready(self, tell: Callable[[str], None]) -> Member:
        return self._member(self._wait_for(self.ready_file, tell))

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
            facts: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
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


def start_daemon(role: str, plan: FleetPlan, seed: str) -> Starting:
    """Start one daemon of the plan in the background."""
    port = 0 if plan.ephemeral else DEFAULT_PORTS[role]
    address = str(Address(plan.host, port))
    arguments = ["--bind", address, "--node-id", f"local-{role}"]
    if seed:
        arguments += ["--peer", seed]
    if role == "primary":
        arguments.append("--enable-prefill-cache")
    if plan.model and role != "cache":
        arguments += ["--model", plan.model]
    for name, flags in plan.extra:
        if name == role:
            arguments += flags
    return Starting(role, arguments, run_folder() / f"{role}.ready", kakeya_home() / "logs" / f"{role}.log", address)


def restart_member(member: Member, tell: Callable[[str], None]) -> Member:
    """Stop one daemon and start it again with the same arguments, on the same address.

    Raises:
        KakeyaError: it does not start, or another command is starting the fleet.
    """
    with starting_alone(run_folder()):
        return _restart_member(member, tell)


def _restart_member(member: Member, tell: Callable[[str], None]) -> Member:
    stop_members([member], tell)
    arguments = list(member.arguments)
    arguments[arguments.index("--bind") + 1] = member.address
    ready_file = run_folder() / f"{member.role}.ready"
    starting: Starting | None = None
    try:
        with deferred_signals():
            starting = Starting(member.role, arguments, ready_file, Path(member.log), member.address)
        fresh = starting.wait_ready(tell)
    except BaseException:
        if starting is not None:
            starting.stop()
        raise
    save_fleet([fresh if other.role == member.role else other for other in load_fleet()])
    return fresh


def stop_members(members: Sequence[Member], tell: Callable[[str], None]) -> None:
    """SIGTERM, wait, then SIGKILL: when this returns none of them runs."""
    processes: list[psutil.Process] = []
    for member in members:
        if not member.alive:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(member.pid))
    stop_processes(processes, tell)


def stop_processes(processes: Sequence[psutil.Process], tell: Callable[[str], None]) -> None:
    """As :func:`stop_members`."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_SECONDS)
    for process in stubborn:
        tell(f"process {process.pid} did not stop in time and was killed")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5.0)


def stop_fleet(tell: Callable[[str], None]) -> int:
    """Stop everything noted, and what was started here without being noted; how many were running.

    Notes that cannot be read are put aside as ``fleet.json.damaged``: the processes tell themselves that they are ours.

    Raises:
        ConfigError: the notes of what ran cannot be removed.
    """
    from daemons.dashboard_process import stop_dashboard

    notes = run_folder() / "fleet.json"
    try:
        members = live_members()
    except ConfigError as error:
        members = ()
        aside = notes.with_name(f"{notes.name}.damaged")
        try:
            notes.replace(aside)
        except OSError as reason:
            raise unwritable(reason) from None
        tell(f"{error.message}; it is kept as {aside}")
    stop_members(members, tell)
    count = len(members) + stop_dashboard(tell)
    unnoted = started_here()
    if unnoted:
        tell("stopping processes that `kakeya up` started here, and that its notes under run/ do not tell of")
        stop_processes(unnoted, tell)
    try:
        notes.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(error) from None
    return count + len(unnoted)


def started_here() -> list[psutil.Process]:
    """Running processes that ``kakeya up`` started for this home, by the ready file that it named to them.

    The notes of what runs may be damaged, or may not have been written when ``kakeya up`` was killed.
    """
    folder = run_folder().absolute()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if words[1:3] != ["-m", "daemons"] or "--ready-file" not in words[:-1]:
                continue
            ready_file = Path(process.cwd(), words[words.index("--ready-file") + 1])
            if _same_folder(ready_file.parent, folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def refuse_leftovers(roles: Sequence[str]) -> None:
    """Daemons that no notes tell of have the names and ports of those that are to be started.

    Raises:
        FleetBusyError: there are some of these roles.
    """
    noted = {member.pid for member in live_members()}
    for process in started_here():
        with contextlib.suppress(psutil.Error):
            role = process.cmdline()[3]
            if process.pid not in noted and role in roles:
                text = f"a {role} (process {process.pid}) runs here that an interrupted `kakeya up` has left behind"
                raise FleetBusyError(text, remedy="`kakeya down` stops it; then `kakeya up` again")


def _same_folder(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()
