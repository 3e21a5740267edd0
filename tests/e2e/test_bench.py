"""`kakeya bench` from outside, with tiny sizes: it measures, answers for its bars, and leaves nothing behind.

No times are asserted: a busy machine must not fail a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.fleet_rig import model_folder

TIMEOUT_S: Final = 240.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "daemons", "bench", "--smoke", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """Everything the bench makes goes below ``folder``, so that what it leaves there can be seen."""
    return {**os.environ, "TMPDIR": str(folder)}


def bench(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object, and what was shown."""
    done = subprocess.run(
        command("--json", *arguments),
        env={**environment(folder), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def left_running(folder: Path) -> list[str]:
    """Processes whose home is below ``folder``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KAKEYA_HOME", "").startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:  # gone, or another user's
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    assert left_running(folder) == []
    # MLX keeps compiled kernels in the temporary folder, for whoever uses it next.
    assert [path.name for path in folder.iterdir() if path.name != "mlx"] == []


def bars_of(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {bar["name"]: bar for bar in told["benchmarks"][name]["bars"]}


def test_what_needs_no_prepared_model(tmp_path: Path) -> None:
    code, told, shown = bench(tmp_path, "transfer", "store", "security", "dedupe", "--check")
    assert code == 0, shown
    assert told["passed"] is True
    assert list(told["benchmarks"]) == ["transfer", "store", "security", "dedupe"]
    prices = told["benchmarks"]["security"]["figures"]
    named = {"CURVE and sealed session", "AES-256-GCM on a chunk", "sealed prompt and proof of a job", "limits on a peer"}
    assert named <= prices.keys()
    assert all(price["with_us"]["median"] > 0 < price["without_us"]["median"] for price in prices.values())
    transfer = told["benchmarks"]["transfer"]["figures"]["1 MiB"]
    assert all(transfer[side]["median"] > 0 for side in ("kakeya", "bare pyzmq"))
    assert told["benchmarks"]["store"]["figures"]["blocks"] == 1_064
    dedupe = told["benchmarks"]["dedupe"]["figures"]
    assert dedupe["stored_bytes"] == dedupe["published_bytes"] < dedupe["made_bytes"] / 2
    assert dedupe["fetch"]["moved_bytes"] < dedupe["fetch"]["needed_bytes"]
    assert all(bar["passed"] for bar in bars_of(told, "dedupe").values())
    assert_nothing_left(tmp_path)


def test_peers_are_measured_where_they_are_installed(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    code, told, shown = bench(tmp_path, "transfer", "--peers")
    assert code == 0, shown
    figures = told["benchmarks"]["transfer"]["figures"]["1 MiB"]
    assert {"raw TCP", "gRPC"} <= set(figures)
    assert_nothing_left(tmp_path)


def broken_server(folder: Path, script: str) -> str:
    """A search path whose ``redis-server`` is ``script``."""
    folder.mkdir()
    server = folder / "redis-server"
    server.write_text(script, encoding="utf-8")
    server.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


DEAF_SERVER: Final = f"""\
#!{sys.executable}
import signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
signal.pause()
"""
"""Takes connections, answers nothing, and does not end when it is asked to."""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/bin/sh\nexit 3\n", "redis-server ended with code 3"),
        (DEAF_SERVER, "redis-server did not answer"),
    ],
    ids=["ends", "hangs"],
)
def test_a_peer_that_cannot_run_costs_only_its_own_line(tmp_path: Path, script: str, why: str) -> None:
    pytest.importorskip("redis")
    tools, temporary, library = tmp_path / "bin", tmp_path / "tmp", tmp_path / "library"
    temporary.mkdir()
    library.mkdir()
    (library / "grpc.py").write_text("raise ImportError('built for another system')\n", encoding="utf-8")
    variables = {"PATH": broken_server(tools, script), "PYTHONPATH": str(library)}
    code, told, shown = bench(temporary, "transfer", "--peers", **variables)
    assert code == 0, shown
    transfer = told["benchmarks"]["transfer"]
    assert {"kakeya", "bare pyzmq", "raw TCP"} == set(transfer["figures"]["1 MiB"])
    missed = {name for name, bar in bars_of(told, "transfer").items() if not bar["passed"]}
    assert missed == {"1 MiB against gRPC", "1 MiB against Redis"}
    notes = {note.partition(" ")[0]: note for note in transfer["notes"]}
    assert "built for another system" in notes["gRPC"]
    assert why in notes["Redis"]
    assert_nothing_left(temporary)


MODEL_BENCHMARKS: Final = ("codecs", "fidelity", "remote-compute", "ttft", "decode")


@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=[pytest.mark.model, pytest.mark.slow])],
    ids=["tiny model", "real model"],
)
def test_what_needs_a_model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, real: bool) -> None:
    model = () if real else ("--model", str(model_folder(tmp_path_factory)))
    code, told, shown = bench(tmp_path, *MODEL_BENCHMARKS, *model)
    assert code == 0, shown
    assert not any(each["skipped"] for each in told["benchmarks"].values()), shown
    assert set(told["benchmarks"]) == set(MODEL_BENCHMARKS)
    for name in ("remote-compute", "decode"):
        figures = told["benchmarks"][name]["figures"]
        assert all(side["processor_s"]["median"] > 0 for side in figures.values() if isinstance(side, dict))
    fidelity = told["benchmarks"]["fidelity"]["figures"]
    assert all(fidelity[name]["agreement"] == 1 and fidelity[name]["same_bytes"] for name in ("zlib", "link zstd"))
    assert fidelity["D4 Q=38"]["kl_mean"] > fidelity["int8"]["kl_mean"] > fidelity["zlib"]["kl_mean"] == 0
    assert told["benchmarks"]["codecs"]["figures"]["D4 Q=38, bfloat16"]["ratio"] > 2
    assert told["benchmarks"]["ttft"]["figures"]["200"]["remote hit"]["median"] > 0
    assert_nothing_left(tmp_path)


def stop(process: subprocess.Popen[str]) -> None:
    """However the test ended: SIGTERM lets the command clean up after itself."""
    if process.poll() is None:
        process.terminate()
        process.wait(TIMEOUT_S)


@contextlib.contextmanager
def measuring(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A bench that measures ``transfer`` for long: its fleet and its programs run."""
    process = subprocess.Popen(
        command("transfer", "--rounds", "100000", *arguments),
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process, contextlib.ExitStack() as undo:
        undo.callback(stop, process)
        assert process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_S
        for line in process.stdout:
            assert time.monotonic() < deadline
            if line.startswith("transfer:"):
                break
        assert left_running(folder)
        yield process


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with measuring(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    assert_nothing_left(tmp_path)


def test_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nobody can clean up after a SIGKILL but a process that is told of it by the end of a pipe."""
    with measuring(tmp_path, "--peers") as process:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        _, alive = psutil.wait_procs(started, TIMEOUT_S)
        assert alive == []
    assert_nothing_left(tmp_path)
