"""The install script for systemd, run for real against a stand-in for systemctl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.service_rig import Home, make_home

SCRIPT = "install_systemd.sh"
SERVICES = ("runtime", "worker", "cache", "dashboard")


@dataclass(frozen=True, slots=True)
class Systemd:
    """A home, and the folder of the stand-in."""

    home: Home
    folder: Path

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def unit(self, service: str) -> Path:
        return self.home.home / ".config" / "systemd" / "user" / f"kakeya-{service}.service"

    def plan(self, name: str) -> None:
        """Let the stand-in fail: no-manager or refuse-enable."""
        (self.folder / name).touch()


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    home = make_home(tmp_path)
    folder = home.home / "systemd"
    folder.mkdir()
    (home.home / "bin" / "systemctl").symlink_to(Path(__file__).with_name("systemctl.sh"))
    home.environment["FAKE_SYSTEMD"] = str(folder)
    return Systemd(home, folder)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_written_enabled_and_started(systemd: Systemd, service: str) -> None:
    done = systemd.home.run(SCRIPT, service)
    assert done.returncode == 0, done.stderr
    unit = systemd.unit(service)
    assert "ExecStart=" in unit.read_text(encoding="utf-8")
    assert systemd.calls[-3:] == ["daemon-reload", f"enable {unit.name}", f"restart {unit.name}"]


def test_the_same_again_changes_nothing_and_restarts(systemd: Systemd) -> None:
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    before, calls = systemd.unit("worker").read_bytes(), systemd.calls
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    assert systemd.unit("worker").read_bytes() == before
    assert systemd.calls == calls * 2


@pytest.mark.parametrize("arguments", [("worker",), ("--uninstall",)])
def test_without_a_manager_of_this_user_nothing_is_touched(systemd: Systemd, arguments: tuple[str, ...]) -> None:
    """As after su, or in a container."""
    if arguments == ("--uninstall",):
        assert systemd.home.run(SCRIPT, "worker").returncode == 0
    there = systemd.unit("worker").exists()
    systemd.plan("no-manager")
    done = systemd.home.run(SCRIPT, *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "enable-linger" in line
    assert systemd.unit("worker").exists() == there


def test_a_refused_unit_is_told(systemd: Systemd) -> None:
    systemd.plan("refuse-enable")
    done = systemd.home.run(SCRIPT, "cache")
    assert done.returncode == 1
    assert "systemd refuses kakeya-cache.service" in done.stderr
    assert not any(call.startswith("restart") for call in systemd.calls)


def test_away_with_it(systemd: Systemd) -> None:
    for service in ("worker", "cache"):
        assert systemd.home.run(SCRIPT, service).returncode == 0
    dry = systemd.home.run(SCRIPT, "--uninstall", "--dry-run")
    assert dry.returncode == 0
    assert systemd.unit("worker").exists()
    done = systemd.home.run(SCRIPT, "--uninstall")
    assert done.returncode == 0, done.stderr
    assert "disable --now kakeya-worker.service" in systemd.calls
    assert systemd.calls[-1] == "daemon-reload"
    assert not any(systemd.unit(service).exists() for service in SERVICES)
    assert (systemd.home.home / ".kakeya" / "fleet.psk").exists()
    again = systemd.home.run(SCRIPT, "--uninstall")
    assert again.returncode == 0
    assert "nothing" in again.stderr
