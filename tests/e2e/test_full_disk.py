"""Output and files that cannot be written: one line with the reason, no "internal error", and the right exit code."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK
from daemons.fleet.home import unwritable
from tests.fleet_rig import PROJECT, clean_environment
from wire.keys import FleetKey, write_secret_file

FULL = Path("/dev/full")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    return tmp_path


def _command(home: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "daemons", *words], {**clean_environment(), "KAKEYA_HOME": str(home)}


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["config sample", "key show", "status", "doctor --quick", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk_is_one_line(home: Path, words: str, unbuffered: str) -> None:
    command, environment = _command(home, *words.split())
    environment["PYTHONUNBUFFERED"] = unbuffered
    with FULL.open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=PROJECT, env=environment, check=False
        )
    (line,) = done.stderr.splitlines()
    assert line == "kakeya: standard output cannot be written: No space left on device"
    assert done.returncode == EXIT_FAILED


@pytest.mark.parametrize("words", ["config sample", "key show", "--help"])
def test_a_reader_that_goes_away_is_not_told_of(home: Path, words: str) -> None:
    command, environment = _command(home, *words.split())
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT, env=environment
    )
    assert process.stdout is not None
    process.stdout.close()
    _, told = process.communicate(timeout=60)
    assert told == ""
    assert process.returncode == EXIT_OK


def test_output_that_was_closed_and_errors_that_nobody_can_be_told_keep_the_exit_code(home: Path) -> None:
    words, environment = _command(home, "key", "show")
    shell = ["/bin/sh", "-c", '"$0" "$@" >&-', *words]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, cwd=PROJECT, env=environment, check=False)
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    if FULL.exists():
        words, environment = _command(home, "key", "forget")
        with FULL.open("w") as full:
            code = subprocess.run(words, stdout=full, stderr=full, timeout=60, cwd=PROJECT, env=environment, check=False)
        assert code.returncode == EXIT_BAD_INPUT


def _no_room() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_up_without_room_for_its_files_says_so_before_it_starts_anything(home: Path) -> None:
    command, environment = _command(home, "up", "--ephemeral", "--model", str(home))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=PROJECT, env=environment, preexec_fn=_no_room, check=False
    )
    (line,) = done.stderr.splitlines()
    assert str(home / "run") in line
    assert "File too large" in line
    assert done.returncode == EXIT_BAD_INPUT
    assert not (home / "logs").exists()


def test_the_dashboards_file_on_a_full_disk_is_not_called_damaged(home: Path) -> None:
    file = home / "network.sqlite3"
    opened = f"from pathlib import Path; from dashboard.database import Database; Database(Path({str(file)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", opened],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PROJECT,
        env=clean_environment(),
        preexec_fn=_no_room,
        check=False,
    )
    told = done.stderr.splitlines()[-1]
    assert f"{file} cannot be written" in told
    assert "make room" in told
    assert "begin anew" not in told


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EROFS, "read-only")]
)
def test_a_disk_that_takes_nothing_is_named(number: int, said: str) -> None:
    told = unwritable(OSError(number, "a reason", "/somewhere/run"))
    assert "/somewhere/run" in told.message
    assert said in told.message
    assert "KAKEYA_HOME" in told.remedy
