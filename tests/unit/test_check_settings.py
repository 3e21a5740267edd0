"""``--check-settings``: a daemon's settings are judged without starting it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from daemons.command import EXIT_BAD_INPUT, EXIT_NOT_AUTHENTICATED, EXIT_OK, main
from wire.keys import FleetKey, write_secret_file

EMPTY_WEIGHTS = (2).to_bytes(8, "little") + b"{}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}), encoding="utf-8")
    (model / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
    return tmp_path


def test_usable_settings_pass_and_nothing_is_made(home: Path) -> None:
    before = sorted(home.rglob("*"))
    assert main(["worker", "--check-settings", "--model", str(home / "model"), "--bind", "127.0.0.1:1"]) == EXIT_OK
    assert main(["cache", "--check-settings"]) == EXIT_OK
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--peer", "nowhere"], EXIT_BAD_INPUT, "--peer: not an address: 'nowhere'"),
        (["--bind", "nowhere"], EXIT_BAD_INPUT, "--bind: not an address"),
        (["--advertise", "10.0.0.7:0"], EXIT_BAD_INPUT, "--advertise: no port"),
        (["--bus-bind", "*:1"], EXIT_BAD_INPUT, "--bus-bind: not a host"),
        (["--endpoint", "10.0.0.7:1/wifi"], EXIT_BAD_INPUT, "--endpoint: no such network"),
        (["--endpoint", "10.0.0.7:1/lan/high"], EXIT_BAD_INPUT, "--endpoint: not a priority"),
        (["--endpoint", "10.0.0.7"], EXIT_BAD_INPUT, "--endpoint: not an address"),
        ([f"--endpoint=10.0.0.{number}:1" for number in range(40)], EXIT_BAD_INPUT, "endpoints are too many"),
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


def test_a_roster_that_is_named_has_to_be_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a slip of the pen would let everybody with the PSK in. The daemon itself refuses it, too."""
    (home / "kakeya.toml").write_text(f'roster_file = "{home}/flet.toml"\n', encoding="utf-8")
    for extra in (["--check-settings"], ["--bind", "127.0.0.1:0"]):
        assert main(["cache", *extra]) == EXIT_BAD_INPUT
        assert "flet.toml cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_roster_that_leads_nowhere_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "fleet.toml").symlink_to(home / "elsewhere.toml")
    assert main(["cache", "--check-settings"]) == EXIT_BAD_INPUT
    assert "fleet.toml cannot be read" in capsys.readouterr().err


def test_a_smallest_store_above_the_largest_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--adaptive-cache", "--cache-gb", "0.5", "--cache-min-gb", "1"]
    assert main(["cache", "--check-settings", *flags]) == EXIT_BAD_INPUT
    assert "cache_min_gb 1 is larger than cache_gb 0.5" in capsys.readouterr().err
    (home / "kakeya.toml").write_text("adaptive_cache = true\ncache_gb = 0.5\ncache_min_gb = 1\n", encoding="utf-8")
    assert main(["config", "show", "--role", "cache"]) == EXIT_BAD_INPUT
    assert "cache_min_gb 1 is larger than cache_gb 0.5" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["primary", "--check-settings", "--model", str(home)]) != EXIT_OK
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("weights", "words"), [(None, "no model*.safetensors"), (EMPTY_WEIGHTS[:-1], "model.safetensors is truncated")]
)
def test_a_model_without_whole_weights_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], weights: bytes | None, words: str
) -> None:
    file = home / "model" / "model.safetensors"
    file.unlink()
    if weights is not None:
        file.write_bytes(weights)
    assert main(["worker", "--check-settings", "--model", str(home / "model")]) == EXIT_BAD_INPUT
    assert words in capsys.readouterr().err


def test_an_assertion_about_a_field_that_there_is_none_of_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(home / "model")]
    assert main(["primary", "--check-settings", *model, "--assert-compatibility", "window_size=1"]) == EXIT_OK
    assert main(["primary", "--check-settings", *model, "--assert-compatibility", "foo=1"]) == EXIT_BAD_INPUT
    assert "unknown compatibility field foo (known fields: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--cache-peer", "--worker"])
def test_a_primary_with_an_address_that_cannot_be_does_not_start(
    home: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """It ends before it loads the model, and does not go on without that address."""
    for extra in (["--check-settings"], []):
        assert main(["primary", "--model", str(home / "model"), flag, "10.0.0.7:0", *extra]) == EXIT_BAD_INPUT
        assert capsys.readouterr().err.splitlines() == [
            f"kakeya: {flag}: no port: '10.0.0.7:0' (write the port of --bind there)"
        ]


@pytest.mark.parametrize("name", ["peer", "cache_peer", "worker", "endpoint"])
def test_config_show_names_the_variable_or_key_of_an_address_that_cannot_be(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (home / "kakeya.toml").write_text(f'[primary]\n{name} = ["10.0.0.7:1", "nowhere"]\n', encoding="utf-8")
    assert main(["config", "show", "--role", "primary"]) == EXIT_BAD_INPUT
    assert f"{name} in the configuration file: not an address: 'nowhere'" in capsys.readouterr().err
    variable = f"KAKEYA_{name.upper()}"
    monkeypatch.setenv(variable, "elsewhere")
    assert main(["config", "show", "--role", "primary"]) == EXIT_BAD_INPUT
    assert f"{variable}: not an address: 'elsewhere'" in capsys.readouterr().err
