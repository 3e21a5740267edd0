"""The ready file of a daemon and the file beside it: whose they are, what they say, and when they go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons.command import EXIT_OK, EXIT_PORT_IN_USE
from daemons.run import bound_file, check_ready_file, remove_ready_files, write_ready_file
from tests.fleet_rig import PROJECT, clean_environment, wait_until
from wire.errors import ConfigError
from wire.keys import FleetKey, write_secret_file

STOP_S = 30.0
NOBODY = 2**31 - 1
"""No process has this number."""
STUBBORN = """
import sys
from types import SimpleNamespace
from daemons.run import run_daemon, set_up_logging
from kakeya_zmq.config import resolve_settings

class Stubborn:
    node = SimpleNamespace(endpoints=SimpleNamespace(address="127.0.0.1:1"))

    def begin(self, ready, fail):
        if sys.argv[2] == "serves":
            ready({"address": "127.0.0.1:1"})

    def drain(self, reason): pass
    def drained(self): return False
    def end(self, reason): pass

set_up_logging("info", "text")
run_daemon(resolve_settings("cache", {"ready_file": sys.argv[1], "drain_s": "600"}).settings, lambda reactor: Stubborn())
"""
"""A daemon that loads for ever, or drains for ever."""


class Processes:
    """Daemons of one home; whatever still runs at the end of a test is killed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ready = home / "ready"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=PROJECT,
            env={**clean_environment(), "KAKEYA_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def cache(self, *flags: str) -> subprocess.Popen[str]:
        bind = ("--bind", "127.0.0.1:0", "--node-id", "one")
        return self.start("-m", "daemons", "cache", *bind, "--ready-file", str(self.ready), *flags)

    def dashboard(self) -> subprocess.Popen[str]:
        return self.start("-m", "daemons", "dashboard", "--bind", "127.0.0.1:0", "--ready-file", str(self.ready))

    def facts(self, file: Path) -> dict[str, object]:
        facts: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
        return facts

    def kill(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate(timeout=STOP_S)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Processes]:
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    processes = Processes(tmp_path)
    yield processes
    processes.kill()


def test_what_another_process_has_told_there_is_left(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    write_ready_file(str(ready), {"pid": NOBODY})
    write_ready_file(str(bound_file(ready)), {"pid": os.getpid()})
    remove_ready_files(str(ready))
    assert ready.exists()
    assert not bound_file(ready).exists()
    ready.write_text("[]", encoding="utf-8")
    remove_ready_files(str(ready))
    assert ready.exists(), "whatever this is, it is not ours"


def test_a_folder_in_the_place_of_either_file_is_named(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    bound_file(ready).mkdir()
    with pytest.raises(ConfigError, match=r"ready\.bound cannot be written: it is not a regular file"):
        check_ready_file(str(ready))
    bound_file(ready).rmdir()
    check_ready_file(str(ready))
    ready.mkdir()
    with pytest.raises(ConfigError, match="ready cannot be written: it is not a regular file"):
        check_ready_file(str(ready))


def test_a_second_daemon_that_is_refused_leaves_the_files_of_the_first(daemons: Processes) -> None:
    first = daemons.cache()
    wait_until(daemons.ready.exists, "it serves")
    files = (daemons.ready, bound_file(daemons.ready))
    before = [file.read_bytes() for file in files]
    second = daemons.cache()
    _, told = second.communicate(timeout=STOP_S)
    assert second.returncode == EXIT_PORT_IN_USE
    assert "the node id one is already in use" in told
    assert [file.read_bytes() for file in files] == before
    first.terminate()
    first.communicate(timeout=STOP_S)
    assert first.returncode == EXIT_OK
    assert not any(file.exists() for file in files)


def test_the_bound_file_has_what_is_bound_and_the_ready_file_what_is_advertised(daemons: Processes) -> None:
    process = daemons.cache("--advertise", "192.0.2.1:9")
    wait_until(daemons.ready.exists, "it serves")
    bound = daemons.facts(bound_file(daemons.ready))
    assert bound["pid"] == process.pid
    host, _, port = str(bound["address"]).rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) not in (0, 9)
    assert daemons.facts(daemons.ready)["address"] == "192.0.2.1:9"


def test_what_a_killed_daemon_left_is_gone_while_the_next_one_loads(daemons: Processes) -> None:
    write_ready_file(str(daemons.ready), {"pid": NOBODY, "address": "127.0.0.1:1"})
    write_ready_file(str(bound_file(daemons.ready)), {"pid": NOBODY, "address": "127.0.0.1:1"})
    process = daemons.start("-c", STUBBORN, str(daemons.ready), "loads")
    wait_until(lambda: daemons.facts(bound_file(daemons.ready))["pid"] == process.pid, "its port is bound")
    assert not daemons.ready.exists()


def test_a_dashboard_removes_its_own_file_and_no_other(daemons: Processes) -> None:
    first = daemons.dashboard()
    wait_until(daemons.ready.exists, "it serves")
    second = daemons.dashboard()
    wait_until(lambda: daemons.facts(daemons.ready)["pid"] == second.pid, "another one was given the same name")
    for process, left in ((first, True), (second, False)):
        process.terminate()
        process.communicate(timeout=STOP_S)
        assert process.returncode == EXIT_OK
        assert daemons.ready.exists() is left


def test_a_second_signal_leaves_no_file_behind(daemons: Processes) -> None:
    process = daemons.start("-c", STUBBORN, str(daemons.ready), "serves")
    wait_until(daemons.ready.exists, "it serves")
    process.terminate()
    assert process.stderr is not None
    assert any("a second signal ends at once" in line for line in process.stderr)
    process.terminate()
    assert process.wait(STOP_S) == 128 + signal.SIGTERM
    assert not daemons.ready.exists()
    assert not bound_file(daemons.ready).exists()
