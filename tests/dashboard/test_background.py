"""The dashboard that ``kakeya up`` starts: once, found again, stopped; its trouble is told and is nobody else's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from daemons import command, dashboard_process, fleet
from daemons.dashboard_flags import add_dashboard_commands
from kakeya_zmq.io.addresses import parse_address
from tests.dashboard.web_kit import call
from tests.fleet_rig import PROJECT, clean_environment
from wire.keys import FleetKey, write_secret_file

DOCUMENT = (PROJECT / "docs" / "dashboard.md").read_text("utf-8")


START = """
from daemons.dashboard_process import start_dashboard
member = start_dashboard(print, ephemeral=True)
print(member.address, member.pid)
"""
"""Short-lived, as the command that starts it is."""


def start(home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", START],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PROJECT,
        env={**clean_environment(), "KAKEYA_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.split()


def test_it_is_started_once_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    told: list[str] = []
    try:
        first = start(tmp_path)
        assert call(parse_address(first[0]), "GET", "/healthz").status == 200
        assert start(tmp_path) == first
        member = dashboard_process.running_dashboard()
        assert member is not None
        assert fleet.live_members() == ()  # it is no member of the fleet
    finally:
        stopped = fleet.stop_fleet(told.append)
    assert (stopped, told) == (1, [])
    assert not member.alive
    assert dashboard_process.running_dashboard() is None
    assert not (tmp_path / "run" / "dashboard.json").exists()
    assert (tmp_path / "telemetry.key").stat().st_mode & 0o777 == 0o600


def test_a_fleet_runs_without_one_when_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    told: list[str] = []
    assert dashboard_process.start_dashboard(told.append, ephemeral=True) is None
    assert len(told) == 1
    assert told[0].startswith("the fleet runs without a dashboard: ")
    assert "telemetry key" in told[0]


def test_the_telemetry_key_is_made_by_the_key_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    monkeypatch.delenv("KAKEYA_FLEET_PSK_FILE", raising=False)
    assert command.main(["key", "telemetry"]) == command.EXIT_NOT_AUTHENTICATED
    write_secret_file(tmp_path / "fleet.psk", FleetKey(b"k" * 32).psk)
    assert command.main(["key", "telemetry"]) == command.EXIT_OK
    text = (tmp_path / "telemetry.key").read_text("ascii").strip()
    assert text == FleetKey(b"k" * 32).telemetry_key().to_text().decode()
    assert text not in capsys.readouterr().out


# --- documentation -----------------------------------------------------------------------------------------------------


def test_every_route_is_documented(tmp_path: Path) -> None:
    from tests.dashboard.web_kit import Web

    web = Web(tmp_path)
    try:
        for route in web.routes:
            path = re.sub(r"<\w+>", "ID", route.path)
            last = "/" + path.rpartition("/")[2]
            assert path in DOCUMENT or f"`{last}`" in DOCUMENT or f"{last}`" in DOCUMENT or path == "/assets/ID", route.path
    finally:
        web.close()


def test_every_flag_is_documented() -> None:
    flags: set[str] = set()

    def collect(name: str, description: str, examples: str) -> object:
        parser = command._command_parser(None, name, description, examples)
        if name == "dashboard":
            original = parser.add_argument

            def add_argument(*names: str, **fields: object) -> object:
                flags.add(names[0])
                return original(*names, **fields)  # type: ignore[arg-type]

            parser.add_argument = add_argument  # type: ignore[method-assign, assignment]
        return parser

    add_dashboard_commands(collect)  # type: ignore[arg-type]
    documented = set(re.findall(r"^\| `(--[a-z-]+)` \|", DOCUMENT, flags=re.MULTILINE))
    assert documented == flags
