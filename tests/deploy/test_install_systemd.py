"""The install script for systemd, run for real against a stand-in for systemctl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemons.service_definitions import read_unit
from tests.deploy.service_rig import PROJECT, Home, make_home

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

    def plan(self, name: str, count: int = 1) -> None:
        """Let the stand-in fail: no-manager or refuse-enable; refuse-restart: so many times."""
        (self.folder / name).write_text(str(count), encoding="utf-8")

    def lines(self, service: str, key: str) -> list[str]:
        """What the installed unit says of a key."""
        text = self.unit(service).read_text(encoding="utf-8")
        return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}=")]


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


# --- another definition, another home ------------------------------------------------------------------------------------


def test_a_unit_that_does_not_start_gives_way_to_the_one_before(systemd: Systemd) -> None:
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    before = systemd.unit("worker").read_bytes()
    systemd.plan("refuse-restart", 1)
    done = systemd.home.run(SCRIPT, "worker", KAKEYA_WORKER_CACHE_GB="6")
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("kakeya: error: kakeya-worker.service does not start with the new definition")
    assert told.endswith("the old one is back and runs")
    assert systemd.unit("worker").read_bytes() == before
    assert systemd.calls[-3:] == ["daemon-reload", "enable kakeya-worker.service", "restart kakeya-worker.service"]
    assert (systemd.folder / "runs-kakeya-worker.service").exists()


def test_a_unit_that_was_stopped_stays_stopped_when_the_new_one_does_not_start(systemd: Systemd) -> None:
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    before = systemd.unit("worker").read_bytes()
    (systemd.folder / "runs-kakeya-worker.service").unlink()
    systemd.plan("refuse-restart", 1)
    done = systemd.home.run(SCRIPT, "worker", KAKEYA_WORKER_CACHE_GB="6")
    assert (done.returncode, done.stderr.splitlines()[-1].endswith("the old one is back")) == (1, True)
    assert systemd.unit("worker").read_bytes() == before
    assert systemd.calls[-1] == "stop kakeya-worker.service"


def test_neither_of_two_units_starts(systemd: Systemd) -> None:
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    before = systemd.unit("worker").read_bytes()
    systemd.plan("refuse-restart", 2)
    done = systemd.home.run(SCRIPT, "worker", KAKEYA_WORKER_CACHE_GB="6")
    assert (done.returncode, "and does not run either" in done.stderr) == (1, True)
    assert systemd.unit("worker").read_bytes() == before


@pytest.mark.parametrize("name", ["second", """a 50% "home" \\ of 's'"""])
def test_a_second_fleet_does_not_take_the_place_of_the_first_without_a_word(systemd: Systemd, name: str) -> None:
    first = systemd.home.home / ".kakeya"
    second = Path(shutil.copytree(first, systemd.home.home / name))
    assert systemd.home.run(SCRIPT, "worker", KAKEYA_HOME=str(second)).returncode == 0
    before, calls = systemd.unit("worker").read_bytes(), len(systemd.calls)
    for arguments in (("worker",), ("worker", "--dry-run")):
        done = systemd.home.run(SCRIPT, *arguments)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2
        assert f"kakeya-worker.service is installed for the home {second}, and this one is for {first}" in line
        assert "--uninstall worker" in line
        assert "--replace" in line
    assert systemd.unit("worker").read_bytes() == before
    assert systemd.calls[calls:] == []
    assert systemd.home.run(SCRIPT, "worker", "--replace").returncode == 0
    assert systemd.lines("worker", "WorkingDirectory") == [str(first)]
    assert systemd.home.run(SCRIPT, "worker", KAKEYA_HOME=f"{first}/").returncode == 0, "the same home, written otherwise"


# --- what lies outside of the home ---------------------------------------------------------------------------------------


def _folders(systemd: Systemd, service: str) -> list[str]:
    return [line.strip('"') for line in systemd.lines(service, "ReadWritePaths")]


@pytest.mark.parametrize("variable", ["KAKEYA_NETWORK_STATE", "KAKEYA_DASHBOARD_STATE"])
def test_the_dashboards_unit_may_write_where_its_database_is(systemd: Systemd, variable: str) -> None:
    state = systemd.home.home / "state" / "network.sqlite3"
    done = systemd.home.run(SCRIPT, "dashboard", **{variable: str(state)})
    assert done.returncode == 0, done.stderr
    assert str(state.parent) in _folders(systemd, "dashboard")
    assert state.parent.stat().st_mode & 0o777 == 0o700
    again = systemd.home.run(SCRIPT, "dashboard", **{variable: str(systemd.home.home / ".kakeya" / "x" / "y")})
    assert again.returncode == 0, again.stderr
    assert str(state.parent) not in _folders(systemd, "dashboard")


def test_a_dry_run_makes_no_folder(systemd: Systemd) -> None:
    state = systemd.home.home / "state" / "network.sqlite3"
    done = systemd.home.run(SCRIPT, "dashboard", "--dry-run", KAKEYA_NETWORK_STATE=str(state))
    assert done.returncode == 0, done.stderr
    assert f'ReadWritePaths="{state.parent}"' in done.stdout
    assert not state.parent.exists()


def test_a_relative_database_is_where_the_installer_was_told(systemd: Systemd) -> None:
    (systemd.home.home / "here").mkdir()
    done = systemd.home.run(SCRIPT, "dashboard", folder=systemd.home.home / "here", KAKEYA_NETWORK_STATE="own/state.db")
    assert done.returncode == 0, done.stderr
    assert str(systemd.home.home / "here" / "own") in _folders(systemd, "dashboard")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("a/b/state.db", "there is no"),
        ("models/tiny/config.json/state.db", "is no folder"),
        ("~nobody-here/state.db", "write the home folder of another user in full"),
    ],
)
def test_a_database_that_has_no_place_is_refused(systemd: Systemd, where: str, words: str) -> None:
    state = where if where.startswith("~") else str(systemd.home.home / where)
    done = systemd.home.run(SCRIPT, "dashboard", KAKEYA_NETWORK_STATE=state)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line
    assert systemd.calls == []
    assert not systemd.unit("dashboard").exists()


def test_a_unit_sees_a_temporary_folder_that_it_uses_and_else_has_its_own(systemd: Systemd) -> None:
    """The home of the tests is in one, and so may be the clone that they are run in."""
    done = systemd.home.run(SCRIPT, "dashboard")
    assert done.returncode == 0, done.stderr
    used = [path for path in (systemd.home.home, PROJECT) if str(path).startswith(("/tmp/", "/var/tmp/"))]
    assert systemd.lines("dashboard", "PrivateTmp") == ["no" if used else "yes"]
    assert ("/tmp" in _folders(systemd, "dashboard")) == bool(used)
    assert ("it uses /" in done.stderr) == bool(used)


def test_a_key_that_is_made_at_the_first_start_has_a_place(systemd: Systemd) -> None:
    keys = systemd.home.home / "keys"
    keys.mkdir(mode=0o700)
    psk = Path(shutil.copy2(systemd.home.home / ".kakeya" / "fleet.psk", keys / "own.psk"))
    done = systemd.home.run(SCRIPT, "worker", KAKEYA_FLEET_PSK_FILE=str(psk))
    assert done.returncode == 0, done.stderr
    assert str(keys / "tenants") in _folders(systemd, "worker")
    assert (keys / "tenants").stat().st_mode & 0o777 == 0o700
    (keys / "tenants" / "default.key").write_text("00" * 32, encoding="utf-8")
    (keys / "tenants" / "default.key").chmod(0o600)
    assert systemd.home.run(SCRIPT, "worker", KAKEYA_FLEET_PSK_FILE=str(psk)).returncode == 0
    assert str(keys / "tenants") not in _folders(systemd, "worker"), "it is only read from then on"
    assert systemd.home.run(SCRIPT, "cache", KAKEYA_FLEET_PSK_FILE=str(psk)).returncode == 0
    assert str(keys / "tenants") not in _folders(systemd, "cache"), "a cache peer needs none"


def test_a_ready_file_that_the_configuration_names_has_a_place(systemd: Systemd) -> None:
    ready = systemd.home.home / "ready" / "worker"
    toml = systemd.home.home / ".kakeya" / "kakeya.toml"
    toml.write_text(f'ready_file = "elsewhere"\n[worker]\nready_file = "{ready}"\n', encoding="utf-8")
    done = systemd.home.run(SCRIPT, "worker")
    assert done.returncode == 0, done.stderr
    assert str(ready.parent) in _folders(systemd, "worker")
    assert ready.parent.is_dir()
    toml.write_text('ready_file = "in-the-home"\n', encoding="utf-8")
    assert systemd.home.run(SCRIPT, "worker").returncode == 0
    assert str(ready.parent) not in _folders(systemd, "worker")
