"""The bench's own parts: bars, series, interleaving, programs that answer, fail, die and stall; what --check makes of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daemons.bench import BENCHMARKS, report
from daemons.bench import run as bench_run
from daemons.bench.harness import (
    Bar,
    BenchOptions,
    Direction,
    Outcome,
    Program,
    Series,
    interleave,
    ratio,
)
from daemons.bench.home import OWNER_FILE, PREFIX, temporary_home
from daemons.bench.references import Peers
from daemons.bench.rig import Rig, wait_for
from daemons.command import main
from daemons.console import Console
from wire.errors import FailureCode, RequestFailed
from wire.limits import MIB

TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("measured", "limit", "direction", "passed"),
    [
        (2.2, 2.2, Direction.AT_MOST, True),
        (2.21, 2.2, Direction.AT_MOST, False),
        (90.0, 90.0, Direction.AT_LEAST, True),
        (89.9, 90.0, Direction.AT_LEAST, False),
        (math.nan, 1.0, Direction.AT_MOST, False),
        (math.nan, 1.0, Direction.AT_LEAST, False),
    ],
)
def test_a_bar_holds_or_not(measured: float, limit: float, direction: Direction, passed: bool) -> None:
    bar = Bar("a bar", measured, limit, direction)
    assert bar.passed is passed
    told = json.loads(json.dumps(bar.as_json()))
    assert told["passed"] is passed
    assert told["measured"] == (None if math.isnan(measured) else measured)


def test_a_series_tells_median_and_spread() -> None:
    series = Series("ms", (4.0, 1.0, 2.0))
    assert series.median == 2.0
    assert series.spread == 1.5
    assert ratio(series, Series("other", (8.0,))) == 0.25
    assert math.isnan(ratio(series, Series("nothing", (0.0,))))
    with pytest.raises(ValueError, match="no samples of nothing"):
        Series("nothing", ())


def test_sides_take_turns() -> None:
    calls: list[str] = []

    def side(name: str, number: int) -> float:
        calls.append(f"{name}{number}")
        return float(number)

    found = interleave(3, {"a": lambda number: side("a", number), "b": lambda number: side("b", number)})
    assert calls == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert found["a"].values == found["b"].values == (0.0, 1.0, 2.0)


def test_options_choose_by_the_kind_of_run() -> None:
    assert BenchOptions().choose(2, 20) == 2
    assert BenchOptions(long=True).choose(2, 20) == 20
    assert BenchOptions(long=True, smoke=True).choose(2, 20, 1) == 1
    assert BenchOptions(rounds=7).rounds_or(2, 20) == 7


# --- programs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sender() -> Iterator[Program]:
    program = Program("raw_tcp", ["sender"])
    yield program
    program.close()


def test_two_programs_move_bytes(sender: Program) -> None:
    receiver = Program("raw_tcp", ["receiver"])
    try:
        receiver.ask("connect", port=sender.ask("open")["port"])
        sender.tell("run", total_bytes=MIB)
        assert receiver.ask("fetch", total_bytes=MIB)["wall_s"] > 0
        sender.hear()
    finally:
        receiver.close()


def test_a_program_that_dies_says_its_last_words(sender: Program) -> None:
    with pytest.raises(RequestFailed, match=r"raw_tcp ended with code 1: KeyError: 'nonsense'"):
        sender.ask("nonsense")
    with pytest.raises(RequestFailed, match="raw_tcp ended"):
        sender.ask("open")


def test_a_program_that_answers_too_late_is_ended(sender: Program) -> None:
    with pytest.raises(RequestFailed) as caught:
        sender.ask("run", timeout_s=0.2, total_bytes=MIB)  # nobody connects
    assert caught.value.code is FailureCode.DEADLINE_EXCEEDED
    process = psutil.Process(sender.pid)
    sender.close()
    sender.close()
    assert not process.is_running()


def test_a_program_that_answers_nonsense_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that prints when it is imported, before the program can send that elsewhere."""
    (tmp_path / "grpc.py").write_text("print('welcome to a broken library', flush=True)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = Program("grpc_stream", ["sender"])
    try:
        with pytest.raises(RequestFailed, match="grpc_stream: no answer but 'welcome to a broken library'"):
            program.ask("open")
    finally:
        program.close()


def test_an_error_of_ours_in_a_program_is_an_answer_and_it_lives_on() -> None:
    program = Program("store_load")
    try:
        with pytest.raises(RequestFailed, match="store_load: the store needs a positive size"):
            program.ask("put", blocks=0)
        assert program.ask("put", blocks=64)["blocks_per_second"] > 0
    finally:
        program.close()


def test_a_peer_that_fails_while_it_is_measured_takes_no_more_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("daemons.bench.references.PEER_PROGRAMS", {"one": "raw_tcp", "other": "raw_tcp"})
    peers = Peers(Rig((), BenchOptions(), tmp_path, lambda line: None))
    with contextlib.closing(peers):
        before = set(psutil.Process().children())
        peers.start()
        sides = peers.sides("1 MiB", MIB)
        assert sides["one"](0) > 0
        programs = sorted(set(psutil.Process().children()) - before, key=lambda process: process.pid)
        programs[0].kill()  # the sender of the first
        programs[0].wait(TIMEOUT_S)
        assert math.isnan(sides["one"](1))
        assert math.isnan(sides["one"](2))
        assert sides["other"](2) > 0
        assert peers.failed == {"one"}
        (note,) = peers.notes
        assert note.startswith("one is not measured with 1 MiB: bench program raw_tcp ended")
        assert set(peers.sides("2 MiB", 2 * MIB)) == {"other"}


# --- runs --------------------------------------------------------------------------------------------------------


def test_the_home_is_temporary_and_hides_the_users_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    monkeypatch.setenv("KAKEYA_CACHE_GB", "0.001")
    monkeypatch.setenv("KAKEYA_MODEL_CACHE", str(tmp_path))
    with temporary_home() as home:
        assert os.environ["KAKEYA_HOME"] == str(home) != str(tmp_path)
        assert "KAKEYA_CACHE_GB" not in os.environ
        assert os.environ["KAKEYA_MODEL_CACHE"] == str(tmp_path)
        assert home.is_dir()
    assert not home.exists()
    assert os.environ["KAKEYA_HOME"] == str(tmp_path)
    assert os.environ["KAKEYA_CACHE_GB"] == "0.001"


@pytest.mark.parametrize("folder", ["missing", "a-file"])
def test_a_temporary_folder_that_cannot_be_used_is_named(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model libraries write there, too, and would say far less."""
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
    assert main(["bench", "dedupe", "--smoke"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / folder) in line
    assert "TMPDIR" in line


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files is this one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def living_in(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that a bench could have started for ``home``; it is there when the block begins."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *arguments],
        env={**os.environ, **({} if arguments else {"KAKEYA_HOME": str(home)})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("told", ["home", "ready file"])
def test_what_lives_in_the_home_ends_with_it(temporary: Path, told: str) -> None:
    with contextlib.ExitStack() as undo:
        with temporary_home() as home:
            named = ("--ready-file", str(home / "a fleet" / "run" / "ready")) if told == "ready file" else ()
            process = undo.enter_context(living_in(home / "a fleet", *named))
            bystander = undo.enter_context(living_in(temporary))
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM
        assert bystander.poll() is None


def test_the_next_run_removes_what_a_killed_one_and_its_watch_left(temporary: Path) -> None:
    killed = temporary / f"{PREFIX}killed"
    (killed / "a fleet").mkdir(parents=True)
    (killed / OWNER_FILE).touch()
    with living_in(killed / "a fleet") as process:
        with temporary_home():
            assert not killed.exists()
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_the_next_run_leaves_the_home_of_a_running_one_and_what_is_no_home(temporary: Path) -> None:
    unfinished = temporary / f"{PREFIX}without-a-note-of-its-owner"
    unfinished.mkdir()
    aimed_at = temporary / "somewhere else"
    aimed_at.mkdir()
    (aimed_at / OWNER_FILE).touch()
    (temporary / f"{PREFIX}link").symlink_to(aimed_at)
    with temporary_home() as running:
        with temporary_home() as home:
            assert home != running
        assert running.is_dir()
        assert unfinished.is_dir()
        assert (aimed_at / OWNER_FILE).exists()


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemons.bench.rig.SETTLE_TIMEOUT_SECONDS", 0.05)
    wait_for("something that holds", lambda: True)
    with pytest.raises(RequestFailed, match="for pigs to fly"):
        wait_for("pigs to fly", lambda: False)


def outcome(name: str, measured: float) -> Outcome:
    return Outcome(name, "a title", ("what",), (("a row",),), (Bar("a bar", measured, 1.0, Direction.AT_MOST),))


@pytest.mark.parametrize(
    ("flags", "measured", "code"),
    [(["--check"], 1.0, 0), (["--check"], 1.1, 1), ([], 1.1, 0)],
)
def test_check_makes_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], measured: float, code: int
) -> None:
    monkeypatch.setattr("daemons.bench.store.run", lambda rig, options: outcome("store", measured))
    assert main(["bench", "store", "--json", *flags]) == code
    printed = capsys.readouterr()
    last = json.loads(printed.out.splitlines()[-1])
    assert last["passed"] is last["benchmarks"]["store"]["passed"] is (measured <= 1.0)
    assert ("held" if measured <= 1.0 else "MISSED") in printed.err


def test_one_that_cannot_be_measured_fails_the_run_but_not_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(rig: Rig, options: BenchOptions) -> Outcome:
        raise RequestFailed(FailureCode.UNAVAILABLE, "no such luck")

    monkeypatch.setattr("daemons.bench.transfer.run", broken)
    monkeypatch.setattr("daemons.bench.store.run", lambda rig, options: outcome("store", 0.5))
    assert bench_run.run_benchmarks(("transfer", "store"), BenchOptions(), Console(), json=True, check=False) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmarks"]["transfer"]["skipped"] == "no such luck"
    assert last["benchmarks"]["store"]["passed"] is True
    assert last["passed"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["all", "store"],
        *(["store", "--rounds", value] for value in ("-1", "0")),
        *(["store", "--threads", value] for value in ("-1", "0", "5000")),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_benchmark_has_its_module() -> None:
    for name in BENCHMARKS:
        assert (Path(bench_run.__file__).parent / f"{name.replace('-', '_')}.py").is_file()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0004321, "4.32e-04"),
        (0.97, "0.97"),
        (2.2, "2.20"),
        (123.4, "123"),
        (20_000, "20,000"),
        (math.nan, "nothing measured"),
    ],
)
def test_figures_are_short(value: float, text: str) -> None:
    assert report.figure(value) == text


def test_the_verdict_speaks_of_bars_only_where_there_are_any() -> None:
    bar = Bar("x", 1.0, 2.0, Direction.AT_MOST)
    assert report.verdict([Outcome("a", "")]) == "measured; there is no bar for this"
    assert report.verdict([Outcome("a", ""), Outcome("b", "", bars=(bar,))]) == "every bar holds"
    assert report.verdict([Outcome("a", "", skipped="why")]) == "NOT every bar holds"
