"""``--check-settings``: a daemon's settings are judged without starting it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemons.command import EXIT_BAD_INPUT, EXIT_NOT_AUTHENTICATED, EXIT_OK, main
from wire.keys import FleetKey, write_secret_file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}), encoding="utf-8")
    return tmp_path


def test_usable_settings_pass_and_nothing_is_made(home: Path) -> None:
    before = sorted(home.rglob("*"))
    assert main(["worker", "--check-settings", "--model", str(home / "model"), "--bind", "127.0.0.1:1"]) == EXIT_OK
    assert main(["cache", "--check-settings"]) == EXIT_OK
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--peer", "nowhere"], EXIT_BAD_INPUT, "nowhere"),
        (["--bulk-ports", "9-1"], EXIT_BAD_INPUT, "9-1"),
        (["--cache-gb", "much"], EXIT_BAD_INPUT, "--cache-gb"),
        (["--fleet-psk-file", "/nonexistent/psk"], EXIT_NOT_AUTHENTICATED, "psk"),
    ],
)
def test_unusable_settings_are_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    assert main(["cache", "--check-settings", *flags]) == code
    line = capsys.readouterr().err
    assert words in line
    assert len(line.splitlines()) == 1


def test_a_folder_without_a_model_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["primary", "--check-settings", "--model", str(home)]) != EXIT_OK
    assert "config.json" in capsys.readouterr().err
