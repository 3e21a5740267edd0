"""Paths that users write: the home folder of somebody who is not known is one line, wherever it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemons.command import main
from kakeya_zmq.user_paths import home_folder, user_path
from wire.errors import ConfigError
from wire.keys import FleetKey, write_secret_file

UNKNOWN = "~nobody-here/x"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("KAKEYA_")]:
        monkeypatch.delenv(name)
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("KAKEYA_HOME", str(made))
    write_secret_file(made / "fleet.psk", FleetKey.generate())
    return made


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x", "--model") == tmp_path / "x"
    assert user_path("x~", "--model") == Path("x~")
    assert home_folder() == tmp_path


def test_who_has_no_home_folder_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no name."""
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    for find in (home_folder, lambda: user_path("~/x", "--model")):
        with pytest.raises(ConfigError, match="the home folder of this user is not known"):
            find()


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        ("chat -m hi --model", "--model"),
        ("chat -m hi --fleet-psk-file", "--fleet-psk-file"),
        ("up --model", "--model"),
        ("demo --model", "--model"),
        ("key show --fleet-psk-file", "--fleet-psk-file"),
        ("top --once --telemetry-key-file", "--telemetry-key-file"),
        *((f"dashboard --check-settings {flag}", flag) for flag in ("--telemetry-key-file", "--api-key-file", "--state")),
        ("dashboard --check-settings --ready-file", "--ready-file"),
        ("worker --check-settings --model", "--model"),
        ("worker --check-settings --config", "the configuration file"),
        ("cache --check-settings --roster-file", "--roster-file"),
        ("primary --check-settings --tenant-key-file", "--tenant-key-file"),
    ],
)
@pytest.mark.usefixtures("home")
def test_an_unknown_user_in_a_flag_is_one_line(arguments: str, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments.split(), UNKNOWN]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert source in line
    assert f"is '{UNKNOWN}', and there is no user 'nobody-here' with a home folder (write the path in full)" in line


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [
        ("KAKEYA_HOME", "key show"),
        ("KAKEYA_HOME", "doctor"),
        ("KAKEYA_HOME", "logs"),
        ("KAKEYA_MODEL_CACHE", "chat -m hi"),
        ("KAKEYA_FLEET_PSK_FILE", "top --once"),
        ("KAKEYA_FLEET_PSK_FILE", "dashboard --check-settings"),
        ("KAKEYA_ROSTER_FILE", "top --once"),
        ("KAKEYA_ROSTER_FILE", "cache --check-settings"),
        ("KAKEYA_DASHBOARD_STATE", "dashboard --check-settings"),
    ],
)
@pytest.mark.usefixtures("home")
def test_an_unknown_user_in_a_variable_is_one_line(
    variable: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, UNKNOWN)
    assert main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no user 'nobody-here'" in line


def test_an_api_key_file_that_was_named_has_to_be_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--check-settings"]) == 0, "without one, writes are closed"
    missing = home / "elsewhere" / "key"
    assert main(["dashboard", "--check-settings", "--api-key-file", str(missing)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the API key file {missing} does not exist" in line
    assert main(["dashboard", "--bind", "127.0.0.1:0", "--api-key-file", str(missing)]) == 4
