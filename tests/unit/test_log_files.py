"""Log lines for people and programs, rotation of a file that somebody else holds open, and following it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from daemons.log_files import KEPT, JsonFormatter, LogRotation, path_of
from daemons.logs import Followed, last_lines, log_files, new_lines, show_logs
from wire.errors import ConfigError


def test_a_json_line_is_one_object_whatever_the_text() -> None:
    record = logging.LogRecord("daemons.node", logging.WARNING, "", 0, "a %s\nb", ('ü"',), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["text"]) == ("warning", "daemons.node", 'a ü"\nb')
    assert told["time"].endswith("+00:00")


def _written(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode())


def test_a_large_file_is_copied_and_cut_and_three_old_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    # Without O_APPEND, as some service managers open it: the rotation sees to that.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        assert path_of(descriptor) == path
        rotation = LogRotation(10, (descriptor,))
        for number in range(KEPT + 2):
            _written(descriptor, f"{number}" * 20)
            assert rotation.look()
            assert not rotation.look()
        _written(descriptor, "new")
    finally:
        os.close(descriptor)
    assert path.read_text() == "new"
    assert [(tmp_path / f"x.log.{n}").read_text() for n in (1, 2, 3)] == ["4" * 20, "3" * 20, "2" * 20]
    assert not (tmp_path / "x.log.4").exists()
    assert (tmp_path / "x.log.1").stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_or_was_replaced_is_left_alone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x" * 100)
    assert not LogRotation(10, (writer,)).look()
    os.close(reader)
    os.close(writer)
    path = tmp_path / "x.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _written(descriptor, "x" * 100)
    assert not LogRotation(0, (descriptor,)).look()
    path.rename(tmp_path / "y.log")
    path.write_text("another's")
    LogRotation(10, (descriptor,)).look()
    os.close(descriptor)
    assert path.read_text() == "another's"


def test_a_process_keeps_writing_through_a_rotation(tmp_path: Path) -> None:
    """Both standard streams lead to one file that a parent opened, as under launchd."""
    path = tmp_path / "service.log"
    program = (
        "import os, sys\n"
        "from daemons.log_files import LogRotation\n"
        "print('o' * 50, flush=True)\n"
        "print('e' * 50, file=sys.stderr, flush=True)\n"
        "assert LogRotation(60).look()\n"
        "print('after out', flush=True)\n"
        "print('after err', file=sys.stderr, flush=True)\n"
    )
    with path.open("ab") as out, path.open("ab") as err:
        subprocess.run([sys.executable, "-c", program], stdout=out, stderr=err, check=True, timeout=60)
    assert path.read_text() == "after out\nafter err\n"
    assert (tmp_path / "service.log.1").read_text() == "o" * 50 + "\n" + "e" * 50 + "\n"


# --- kakeya logs -------------------------------------------------------------------------------------------------------


def test_logs_of_services_and_of_up_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no logs"):
        show_logs((), last=5, follow=False)
    (tmp_path / "logs").mkdir()
    for name in ("prefill-worker.log", "logs/primary.log", "logs/prefill-worker.log", "prefill-worker.log.1"):
        (tmp_path / name).write_text("x\n")
    assert list(log_files(tmp_path)) == ["prefill-worker", "logs/prefill-worker", "primary"]
    with pytest.raises(ConfigError, match="there are: prefill-worker"):
        show_logs(("nobody",), last=5, follow=False)


def test_lines_are_shown_whole_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    (tmp_path / "a.log").write_text("1\n2\n3\n")
    (tmp_path / "b.log").write_text("x\n")
    show_logs((), last=2, follow=False)
    assert capsys.readouterr().out == "a: 2\na: 3\nb: x\n"
    show_logs(("a",), last=1, follow=False)
    assert capsys.readouterr().out == "3\n"


def test_following_goes_on_across_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("1\n2\nhal")
    log = Followed("a", path)
    assert last_lines(log, 1) == ["2"]
    with path.open("a") as stream:
        stream.write("f\n3\n")
    assert list(new_lines(log)) == ["half", "3"]
    os.truncate(path, 0)
    path.write_text("4\n")
    assert list(new_lines(log)) == ["4"]
    path.unlink()
    assert list(new_lines(log)) == []


@pytest.mark.parametrize("rotations", [1, 2, KEPT])
def test_following_misses_no_line_however_often_the_file_was_rotated_between_two_looks(
    tmp_path: Path, rotations: int
) -> None:
    path = tmp_path / "a.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    log = Followed("a", path)
    try:
        _written(descriptor, "0 first\n")
        assert list(new_lines(log)) == ["0 first"]
        wanted = []
        for number in range(rotations):
            # Longer than what was read, so that its size alone says nothing.
            wanted += [f"{number} before the rotation", f"{number} last"]
            _written(descriptor, f"{number} before the rotation\n{number} last\n")
            assert LogRotation(5, (descriptor,)).look()
        _written(descriptor, "9 after all of them, and longer than the first line\n")
        assert list(new_lines(log)) == [*wanted, "9 after all of them, and longer than the first line"]
        _written(descriptor, "9 more\n")
        assert list(new_lines(log)) == ["9 more"]
    finally:
        os.close(descriptor)


class _Turns:
    """In the place of sleeping: what happens between two looks, then an interruption."""

    def __init__(self, *turns: Callable[[], object]) -> None:
        self._left = list(turns)

    def __call__(self, seconds: float) -> None:
        if not self._left:
            raise KeyboardInterrupt
        self._left.pop(0)()


def test_a_log_that_appears_while_all_are_followed_is_shown_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    worker = tmp_path / "logs" / "worker.log"
    worker.write_text("1\n")

    def install() -> None:
        (tmp_path / "worker.log").write_text("a\nb\n")
        with worker.open("a") as stream:
            stream.write("2\n")

    monkeypatch.setattr("daemons.logs.time.sleep", _Turns(install, lambda: (tmp_path / "cache.log").write_text("c\n")))
    with pytest.raises(KeyboardInterrupt):
        show_logs((), last=5, follow=True)
    # The service's log has the plain name now, as `kakeya logs worker` has it.
    assert capsys.readouterr().out == "1\nlogs/worker: 2\nworker: a\nworker: b\ncache: c\n"


def test_nothing_is_added_to_logs_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    (tmp_path / "worker.log").write_text("1\n")
    monkeypatch.setattr("daemons.logs.time.sleep", _Turns(lambda: (tmp_path / "cache.log").write_text("c\n")))
    with pytest.raises(KeyboardInterrupt):
        show_logs(("worker",), last=5, follow=True)
    assert capsys.readouterr().out == "1\n"


def test_a_folder_named_like_a_log_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    (tmp_path / "a.log").mkdir()
    (tmp_path / "logs" / "b.log").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no log named 'a'"):
        show_logs(("a",), last=5, follow=False)
    with pytest.raises(ConfigError, match="no logs here"):
        show_logs((), last=5, follow=False)
