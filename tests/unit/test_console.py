"""Output of the command where it is narrow: few columns, or few characters in its encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.console import Console


def test_a_long_value_is_folded_and_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A public key is there to be copied into a roster."""
    monkeypatch.setenv("COLUMNS", "80")
    public_key = "0123456789abcdef" * 4
    Console().table("keys", ("key", "state"), [("identity of primary-mini-1", f"ready, mode 0600, public key {public_key}")])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert public_key in "".join(line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│"))


POSIX_LOCALE = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Standard output is ASCII then, and handles what it has not in another way than a plain ASCII one."""


@pytest.mark.parametrize("narrow", [POSIX_LOCALE, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(("doctor",), "keys: there is no fleet key"), (("bench", "security", "--smoke"), "price ")],
    ids=["doctor", "bench"],
)
def test_characters_that_the_output_has_not_end_no_command(
    arguments: tuple[str, ...], shown: str, narrow: dict[str, str], tmp_path: Path
) -> None:
    done = _kakeya(*arguments, home=tmp_path, environment=narrow)
    assert "internal error" not in done.stderr
    assert shown in done.stdout


def test_the_json_object_is_json_where_the_output_is_narrow(tmp_path: Path) -> None:
    """An escape that is for people would not be read back."""
    strange = tmp_path / "zuhause-über"
    environment = {"PYTHONIOENCODING": "ascii"}
    done = _kakeya("config", "show", "--role", "cache", "--json", home=strange, environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"] == str(strange / "kakeya.toml")


def _kakeya(*arguments: str, home: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (home / "tmp").mkdir(parents=True)
    (home / "kakeya.toml").touch()
    return subprocess.run(
        [sys.executable, "-m", "daemons", *arguments],
        env={**os.environ, **environment, "KAKEYA_HOME": str(home), "TMPDIR": str(home / "tmp")},
        capture_output=True,
        encoding="latin-1",
        timeout=120,
    )
