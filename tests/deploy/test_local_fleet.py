"""`kakeya up` and `kakeya down` where their notes are damaged or missing, or their folders are not to be used."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemons import fleet
from daemons.command import EXIT_BAD_INPUT, EXIT_OK, EXIT_PORT_IN_USE, main
from daemons.fleet.home import starting_alone
from daemons.node_lock import NodeLock
from kakeya_zmq.client import Client
from tests.fleet_rig import PROJECT, clean_environment, run_kakeya
from wire.errors import PortInUseError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    yield tmp_path
    fleet.stop_processes(fleet.started_here(), print)


START = """
import sys
from daemons import fleet
from daemons.dashboard_process import start_dashboard
(member,) = fleet.start_fleet(fleet.FleetPlan(ephemeral=True, roles=("cache",)), lambda text: None)
print(member.pid)
if sys.argv[1] == "2":
    print(start_dashboard(lambda text: None, ephemeral=True).pid)
"""
"""What needs no model; short-lived, as the command that starts it is."""
ADVERTISED = """
from daemons import fleet
plan = fleet.FleetPlan(ephemeral=True, roles=("cache",), extra=(("cache", ("--advertise", "192.0.2.1:9")),))
(member,) = fleet.start_fleet(plan, lambda text: None)
fresh = fleet.restart_member(member, lambda text: None)
print(member.address, fresh.address, fresh.bus_address)
"""


def _up(count: int, home: Path) -> list[psutil.Process]:
    return [psutil.Process(int(line)) for line in _run(START, home, str(count)).split()]


def _run(script: str, home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PROJECT,
        env={**clean_environment(), "KAKEYA_HOME": str(home)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_down_stops_what_runs_though_its_notes_are_damaged(home: Path) -> None:
    processes = _up(2, home)
    for name in ("fleet.json", "dashboard.json"):
        (home / "run" / name).write_text("{bad", encoding="utf-8")
    assert {process.pid for process in fleet.started_here()} == {process.pid for process in processes}
    told: list[str] = []
    assert fleet.stop_fleet(told.append) == 2
    assert not any(_runs(process) for process in processes)
    damaged, unnoted = told
    assert "fleet.json cannot be used" in damaged
    assert "notes under run/ do not tell of" in unnoted
    assert not (home / "run" / "fleet.json").exists()
    assert (home / "run" / "fleet.json.damaged").read_text(encoding="utf-8") == "{bad"
    assert fleet.stop_fleet(told.append) == 0


def test_down_stops_what_an_interrupted_up_left_without_a_note_and_nothing_of_another_home(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (process,) = _up(1, home)
    (home / "run" / "fleet.json").unlink()
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path_factory.mktemp("another")))
    assert fleet.stop_fleet(print) == 0
    assert _runs(process)
    monkeypatch.setenv("KAKEYA_HOME", str(home))
    assert fleet.stop_fleet(print) == 1
    assert not _runs(process)


ROW = '[{"role": "cache", "node_id": "n", "address": "a:1", "pid": %s, "created": 1, "log": "", "arguments": []}]'
FOREIGN = {
    "damaged": "{bad",
    "empty": "",
    "another program's": '{"members": []}',
    "a list of something else": "[1, 2]",
    "a process that is none": ROW % "-1",
    "types that differ": ROW % '"x"',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=list(FOREIGN))
@pytest.mark.parametrize("command", [["up", "--model", "."], ["status"], ["chat"]], ids=lambda words: words[0])
def test_notes_that_are_not_ours_are_refused_in_one_line_and_kept(
    home: Path, capsys: pytest.CaptureFixture[str], command: list[str], text: str
) -> None:
    notes = home / "run" / "fleet.json"
    notes.parent.mkdir()
    notes.write_text(text, encoding="utf-8")
    assert main(command) == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert str(notes) in line
    assert "`kakeya down`" in line
    assert notes.read_text(encoding="utf-8") == text
    assert fleet.started_here() == []
    assert main(["down"]) == EXIT_OK
    assert notes.with_name("fleet.json.damaged").read_text(encoding="utf-8") == text
    assert fleet.load_fleet() == ()


def test_up_with_a_folder_that_cannot_be_made_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "run").write_text("", encoding="utf-8")
    assert main(["up", "--model", str(home)]) == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert str(home / "run") in line
    assert "KAKEYA_HOME" in line
    assert fleet.started_here() == []


def _both_up(home: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two that start the same fleet at the same moment."""
    command = [sys.executable, "-c", START, "1"]
    environment = {**clean_environment(), "KAKEYA_HOME": str(home)}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT, env=environment)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=100) for process in started]
    return [
        subprocess.CompletedProcess(command, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]


def test_two_at_the_same_moment_start_one_fleet(home: Path) -> None:
    done = _both_up(home)
    (process,) = fleet.started_here()
    assert {each.stdout.strip() for each in done if each.returncode == 0} == {str(process.pid)}
    assert all("is starting the fleet of this home right now" in each.stderr for each in done if each.returncode)
    assert fleet.stop_fleet(print) == 1


def test_who_comes_while_another_starts_the_fleet_is_told_so_and_lets_it_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (process,) = _up(1, home)
    for command in (["up"], ["demo", "--once"]):
        with starting_alone(fleet.run_folder()):
            assert main([*command, "--ephemeral", "--model", str(home)]) == EXIT_PORT_IN_USE
        (line,) = capsys.readouterr().err.splitlines()
        assert "another `kakeya up` (or `kakeya demo`) is starting the fleet" in line
        assert _runs(process)
    assert fleet.started_here() == [process]


def test_what_an_interrupted_up_left_is_named_with_what_stops_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (process,) = _up(1, home)
    (home / "run" / "fleet.json").unlink()
    assert main(["up", "--ephemeral", "--model", str(home)]) == EXIT_PORT_IN_USE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a cache (process {process.pid}) runs here" in line
    assert "`kakeya down` stops it" in line
    assert "--node-id" not in line
    assert _runs(process)


def test_a_node_of_the_same_name_is_to_be_stopped(home: Path) -> None:
    """`kakeya up` has no flag for another name."""
    lock = NodeLock(home / "nodes" / "local-cache", "local-cache")
    try:
        with pytest.raises(PortInUseError, match=r"local-cache is already in use.*stop that node") as raised:
            fleet.start_fleet(fleet.FleetPlan(ephemeral=True, roles=("cache",)), print)
    finally:
        lock.release()
    assert "--node-id" not in str(raised.value)


def test_a_primary_that_is_refused_is_told_before_anything_else_is_started(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would ask who has its port, and join another fleet that serves there."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        ports = {"primary": taken.getsockname()[1], "worker": 0, "cache": 0}
        monkeypatch.setattr("daemons.fleet.up.DEFAULT_PORTS", ports)
        with pytest.raises(PortInUseError, match="the primary did not start"):
            fleet.start_fleet(fleet.FleetPlan(model=str(model)), print)
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["primary.log"]
    assert fleet.started_here() == []


def test_what_a_configuration_file_advertises_does_not_reach_a_local_fleet(home: Path) -> None:
    """It is for other machines, and this fleet serves on loopback."""
    (home / "kakeya.toml").write_text('advertise = "192.0.2.1:9"\n', encoding="utf-8")
    _up(1, home)
    (member,) = fleet.load_fleet()
    with Client(member.address, psk_file=fleet.default_psk_file()) as client:
        assert client.status().sections["node"]["address"] == member.address
    assert not member.address.startswith("192.0.2.1")


def test_a_member_is_noted_by_the_address_that_it_has_bound(home: Path) -> None:
    address, again, bus_address = _run(ADVERTISED, home).split()
    assert address == again
    assert address.startswith("127.0.0.1:")
    assert bus_address.startswith("127.0.0.1:")


ASCII = {"PYTHONIOENCODING": "ascii"}


def test_a_name_that_the_output_cannot_show_ends_no_command(home: Path) -> None:
    strange = home / "zuhause-über"
    strange.mkdir()
    done = run_kakeya(
        "config", "show", "--role", "cache", "--config", str(strange / "none.toml"), home=strange, environment=ASCII
    )
    assert "internal error" not in done.stderr
    (strange / "kakeya.toml").write_text("", encoding="utf-8")
    done = run_kakeya("config", "show", "--role", "cache", home=strange, environment=ASCII)
    assert done.returncode == 0, done.stderr
    assert "\\xfcber" in done.stdout
