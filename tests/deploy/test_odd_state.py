"""Real daemons where something odd lies in the place of a state file, and a home that is made under any umask."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons import fleet
from daemons.command import EXIT_BAD_INPUT
from tests.deploy.doctor_rig import Doctor
from tests.fleet_rig import PROJECT, clean_environment, run_kakeya, wait_until
from tests.unit.card_kit import identity
from wire.keys import FleetKey, write_secret_file

START = """
import os
os.umask(0)
from daemons import fleet
fleet.start_fleet(fleet.FleetPlan(ephemeral=True, roles=("cache",)), lambda text: None)
"""
ROSTER = f'[nodes.me]\nkey = "{identity("box").public_key.hex()}"\n'
PLACES = ("fleet.toml", "kakeya.toml", *(f"nodes/me/{name}" for name in ("known_nodes.json", "revocations.json")))
PLACES += ("nodes/me/incarnation", "nodes/me/audit.jsonl")
CACHE = ("cache", "--bind", "127.0.0.1:0", "--node-id", "me")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    monkeypatch.setenv("KAKEYA_HOME", str(home))
    yield home
    fleet.stop_processes(fleet.started_here(), print)


@pytest.mark.parametrize("place", PLACES)
def test_a_daemon_refuses_a_fifo_at_its_start_in_one_line(home: Path, place: str) -> None:
    write_secret_file(home / "fleet.psk", FleetKey.generate())
    path = home / place
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.mkfifo(path, 0o600)
    done = run_kakeya(*CACHE, home=home)
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    lines = [line for line in done.stderr.splitlines() if "not a regular file" in line]
    assert len(lines) == 1
    assert str(path) in lines[0]


def test_a_daemon_refuses_a_roster_that_others_may_write_to(home: Path) -> None:
    write_secret_file(home / "fleet.psk", FleetKey.generate())
    (home / "fleet.toml").write_text(ROSTER, encoding="utf-8")
    (home / "fleet.toml").chmod(0o666)
    home.chmod(0o755)
    done = run_kakeya(*CACHE, home=home)
    assert done.returncode == EXIT_BAD_INPUT
    assert f"chmod go-w {home / 'fleet.toml'}" in done.stderr


def test_a_daemon_ends_when_it_is_told_to_though_its_roster_has_become_a_fifo(home: Path) -> None:
    write_secret_file(home / "fleet.psk", FleetKey.generate())
    log = home / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "daemons", *CACHE],
            cwd=PROJECT,
            env={**clean_environment(), "KAKEYA_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stderr=stream,
        )
    try:
        wait_until(lambda: "serves on" in log.read_text(encoding="utf-8"), "it serves")
        os.mkfifo(home / "fleet.toml", 0o600)
        wait_until(lambda: "fleet.toml cannot be read: it is not a regular file" in log.read_text(encoding="utf-8"), "told")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_home_is_private_whatever_the_umask(home: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", START],
        timeout=120,
        cwd=PROJECT,
        env={**clean_environment(), "KAKEYA_HOME": str(home)},
        check=True,
    )
    open_to_others = {
        str(path.relative_to(home.parent)): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in (home, *home.rglob("*"))
        if stat.S_IMODE(path.lstat().st_mode) & 0o077
    }
    assert open_to_others == {}
    assert (home / "logs" / "cache.log").exists()
    assert (home / "nodes" / "local-cache" / "audit.jsonl").exists()


def test_the_doctor_finds_files_that_keep_a_daemon_from_starting(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_secret_file(home / "fleet.psk", FleetKey.generate())
    (home / "fleet.toml").write_text(ROSTER, encoding="utf-8")
    (home / "fleet.toml").chmod(0o666)
    home.chmod(0o755)
    folder = home / "nodes" / "me"
    folder.mkdir(parents=True)
    for name in ("audit.jsonl", "incarnation", "known_nodes.json"):
        os.mkfifo(folder / name)
    doctor = Doctor(home, capsys)
    assert "chmod go-w" in doctor.one("fleet.toml can be changed by other users")["remedy"]
    for name in ("audit.jsonl", "incarnation", "known_nodes.json"):
        assert doctor.one(f"{folder / name}")["level"] == "problem"
    (home / "kakeya.toml").touch()
    (home / "kakeya.toml").chmod(0o666)
    assert "chmod go-w" in doctor.one("kakeya.toml can be changed by other users")["remedy"]
