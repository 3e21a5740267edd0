"""The install script for systemd, run for real against a stand-in for systemctl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemons.service_definitions import read_unit
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
    done = systemd.home.run(SCRIPT, service, KAKEYA_MODEL_REVISION="r1")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr  # nor one of a variable that the script itself sets
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


def test_away_with_the_named_ones_only(systemd: Systemd) -> None:
    for service in ("worker", "cache"):
        assert systemd.home.run(SCRIPT, service).returncode == 0
    done = systemd.home.run(SCRIPT, "cache", "--uninstall")
    assert done.returncode == 0, done.stderr
    assert [systemd.unit(service).exists() for service in ("worker", "cache")] == [True, False]
    assert not any("disable" in call and "worker" in call for call in systemd.calls)


def test_two_at_once_are_refused_in_one_line(systemd: Systemd) -> None:
    done = systemd.home.run(SCRIPT, "worker", "cache")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "one service at a time" in done.stderr
    assert systemd.calls == []


def test_a_unit_that_cannot_be_written_leaves_what_runs(systemd: Systemd) -> None:
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    before, calls = systemd.unit("worker").read_bytes(), len(systemd.calls)
    program = systemd.home.home / "bin" / "cp"
    program.write_text('#!/bin/sh\n: >"$2"\necho "cp: $2: No space left on device" >&2\nexit 1\n', encoding="utf-8")
    program.chmod(0o755)
    done = systemd.home.run(SCRIPT, "worker", KAKEYA_WORKER_CACHE_GB="6")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "No space left on device" in done.stderr
    assert systemd.calls[calls:] == ["show-environment"]
    assert list(systemd.unit("worker").parent.iterdir()) == [systemd.unit("worker")]
    assert systemd.unit("worker").read_bytes() == before


def test_a_folder_in_the_place_of_a_unit_is_refused(systemd: Systemd) -> None:
    systemd.unit("worker").mkdir(parents=True)
    done = systemd.home.run(SCRIPT, "worker")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "is a folder" in done.stderr
    assert list(systemd.unit("worker").iterdir()) == []


def test_away_with_the_rest_when_one_cannot_be_removed(systemd: Systemd) -> None:
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    systemd.unit("runtime").mkdir()
    done = systemd.home.run(SCRIPT, "--uninstall")
    assert done.returncode == 1
    assert "cannot be removed" in done.stderr
    assert not systemd.unit("worker").exists()
    assert systemd.calls[-1] == "daemon-reload"


def test_without_home_it_is_told_or_not_needed(systemd: Systemd) -> None:
    done = systemd.home.run(SCRIPT, "worker", HOME="")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "HOME is not set" in done.stderr
    folders = {"KAKEYA_HOME": str(systemd.home.home / ".kakeya"), "XDG_CONFIG_HOME": str(systemd.home.home / ".config")}
    done = systemd.home.run(SCRIPT, "worker", HOME="", **folders)
    assert done.returncode == 0, done.stderr
    assert systemd.unit("worker").exists()


def test_awkward_paths_reach_the_daemon_as_they_are(systemd: Systemd) -> None:
    awkward = systemd.home.home / """50% $HOME "q" 's' \\back;slash"""
    model = Path(shutil.copytree(systemd.home.environment["KAKEYA_WORKER_MODEL"], awkward / "model"))
    kakeya = Path(shutil.copytree(systemd.home.home / ".kakeya", awkward / "home"))
    done = systemd.home.run(SCRIPT, "worker", KAKEYA_WORKER_MODEL=str(model), KAKEYA_HOME=str(kakeya))
    assert done.returncode == 0, done.stderr
    arguments, environment = read_unit(systemd.unit("worker").read_text(encoding="utf-8"))
    assert arguments[arguments.index("--model") + 1] == str(model)
    assert environment == {"KAKEYA_HOME": str(kakeya)}
    checked = subprocess.run(
        [*arguments, "--check-settings"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_variables_without_effect_are_told(systemd: Systemd) -> None:
    done = systemd.home.run(
        SCRIPT, "runtime", "--dry-run", KAKEYA_DRAIN_S="90", KAKEYA_NODE_ID="n1", KAKEYA_RUNTIME_CACHEGB="4"
    )
    assert done.returncode == 0, done.stderr
    for told in (
        "put drain_s into kakeya.toml",
        "KAKEYA_NODE_ID does not reach the service: KAKEYA_RUNTIME_NODE_ID does",
        "did you mean KAKEYA_RUNTIME_CACHE_GB?",
    ):
        assert told in done.stderr
