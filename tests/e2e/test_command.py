"""The ``kakeya`` command in processes of its own: bad input gets one clear line and its exit code; fleets come and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemons.command import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NOT_AUTHENTICATED,
    EXIT_OK,
    EXIT_PORT_IN_USE,
    EXIT_UNAVAILABLE,
)
from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, prompt, run_kakeya, wait_until
from wire.errors import FailureCode, InvalidInput, KakeyaError, RequestFailed
from wire.keys import FleetKey, write_secret_file

STOP_S = 20.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A Kakeya home; whatever runs with it is ended after the test, and a test that leaves something fails."""
    yield tmp_path
    left = processes_of(tmp_path)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    assert not left, f"left running: {left}"


def processes_of(home: Path) -> list[psutil.Process]:
    """Processes that were started with this Kakeya home."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("KAKEYA_HOME") == str(home)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def with_key(home: Path) -> Path:
    write_secret_file(home / "fleet.psk", FleetKey.generate())
    return home / "fleet.psk"


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    lines = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    # Daemons may log before they fail; the error itself is one line, the last one.
    told = [line for line in lines if line.startswith("kakeya: ")]
    assert len(told) == 1, done.stderr
    assert lines[-1] == told[0]
    assert "Traceback" not in done.stderr
    assert "internal error" not in told[0]
    for word in words:
        assert word in told[0], told[0]


# --- bad input to daemons --------------------------------------------------------------------------------------------

EPHEMERAL = ("--bind", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(("cache", "--nonsense"), EXIT_BAD_INPUT, ("--nonsense",), id="flag"),
        pytest.param(("frobnicate",), EXIT_BAD_INPUT, ("frobnicate",), id="command"),
        pytest.param((), EXIT_BAD_INPUT, ("COMMAND",), id="no-command"),
        pytest.param(("cache", "--cache-gb", "lots"), EXIT_BAD_INPUT, ("--cache-gb", "number"), id="not-a-number"),
        pytest.param(("cache", "--cache-gb", "-1"), EXIT_BAD_INPUT, ("--cache-gb", "from"), id="negative"),
        pytest.param(("cache", "--bind", "here"), EXIT_BAD_INPUT, ("here",), id="address"),
        pytest.param(("cache", "--bind", "127.0.0.1:99999"), EXIT_BAD_INPUT, ("99999",), id="port"),
        pytest.param(("cache", "--peer", "nowhere", *EPHEMERAL), EXIT_BAD_INPUT, ("nowhere",), id="peer"),
        pytest.param(("cache", "--log-level", "loud"), EXIT_BAD_INPUT, ("--log-level", "debug"), id="choice"),
        pytest.param(("cache", "--node-id", "a b"), EXIT_BAD_INPUT, ("node_id",), id="node-id"),
        pytest.param(("cache", "--config", "absent.toml"), EXIT_BAD_INPUT, ("configuration file",), id="no-config"),
        pytest.param(("cache", "--ready-file", "/", *EPHEMERAL), EXIT_BAD_INPUT, ("ready file",), id="ready-file"),
        pytest.param(("key", "lose"), EXIT_BAD_INPUT, ("lose",), id="key-action"),
        pytest.param(("status", "--address", "here"), EXIT_BAD_INPUT, ("here",), id="status-address"),
    ],
)
def test_bad_arguments(home: Path, arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    with_key(home)
    assert_one_line(run_kakeya(*arguments, home=home), code, *words)


def test_a_bad_environment_value_is_named(home: Path) -> None:
    with_key(home)
    done = run_kakeya("cache", home=home, environment={"KAKEYA_GOSSIP_INTERVAL_S": "often"})
    assert_one_line(done, EXIT_BAD_INPUT, "KAKEYA_GOSSIP_INTERVAL_S", "often")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cache_gb = [", ("TOML",)),
        ("cache_gigabytes = 4", ("cache_gigabytes", "cache_gb")),
        ("[cahce]\ncache_gb = 4", ("cahce", "cache")),
        ("cache_gb = 'much'", ("cache_gb", "much")),
    ],
    ids=["broken", "unknown-key", "unknown-table", "value"],
)
def test_a_bad_configuration_file(home: Path, text: str, words: tuple[str, ...]) -> None:
    with_key(home)
    (home / "kakeya.toml").write_text(text, encoding="utf-8")
    assert_one_line(run_kakeya("cache", "--config", str(home / "kakeya.toml"), home=home), EXIT_BAD_INPUT, *words)


@pytest.mark.parametrize("broken", ["missing", "file", "empty", "config", "no-type", "weights", "truncated"])
def test_a_folder_that_is_no_model(home: Path, model: Path, broken: str) -> None:
    with_key(home)
    copy = home / "model"
    if broken == "file":
        copy.write_text("not a folder", encoding="utf-8")
    elif broken != "missing":
        copy.mkdir()
    if broken == "config":
        (copy / "config.json").write_text("{", encoding="utf-8")
    if broken == "no-type":
        (copy / "config.json").write_text("{}", encoding="utf-8")
    if broken in ("weights", "truncated"):
        (copy / "config.json").write_bytes((model / "config.json").read_bytes())
    if broken == "truncated":
        weights = (model / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    done = run_kakeya("worker", "--model", str(copy), *EPHEMERAL, home=home)
    assert_one_line(done, EXIT_BAD_INPUT)


def test_a_port_in_use(home: Path) -> None:
    with_key(home)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_line(run_kakeya("cache", "--bind", f"127.0.0.1:{port}", home=home), EXIT_PORT_IN_USE, str(port))


@pytest.mark.parametrize("broken", ["missing", "loose", "short", "folder"])
@pytest.mark.parametrize("command", [("cache", *EPHEMERAL), ("status", "--address", "127.0.0.1:9")], ids=["cache", "status"])
def test_a_psk_that_cannot_be_used(home: Path, command: tuple[str, ...], broken: str) -> None:
    path = home / "fleet.psk"
    match broken:
        case "loose":
            with_key(home).chmod(0o644)
        case "short":
            write_secret_file(path, b"0123456789abcde0")
            path.write_bytes(b"short")
        case "folder":
            path.mkdir(mode=0o700)
        case _:
            pass
    assert_one_line(run_kakeya(*command, home=home), EXIT_NOT_AUTHENTICATED)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_psk_that_cannot_be_read(home: Path) -> None:
    with_key(home).chmod(0)
    assert_one_line(run_kakeya("cache", *EPHEMERAL, home=home), EXIT_NOT_AUTHENTICATED)


def test_keys_are_made_once_and_shown_without_their_contents(home: Path) -> None:
    made = run_kakeya("key", "new", "--json", home=home)
    secret = (home / "fleet.psk").read_text(encoding="utf-8").strip()
    assert made.returncode == EXIT_OK
    assert (home / "fleet.psk").stat().st_mode & 0o777 == 0o600
    shown = run_kakeya("key", "show", "--json", home=home)
    assert json.loads(shown.stdout.splitlines()[-1])["keys"][0]["usable"] is True
    assert secret not in made.stdout + made.stderr + shown.stdout + shown.stderr
    # A second one would cut this machine off from its fleet.
    assert_one_line(run_kakeya("key", "new", home=home), EXIT_BAD_INPUT, "exists")
    assert (home / "fleet.psk").read_text(encoding="utf-8").strip() == secret


# --- without a fleet -------------------------------------------------------------------------------------------------


def test_status_with_nothing_running(home: Path) -> None:
    done = run_kakeya("status", "--json", home=home)
    assert done.returncode == EXIT_UNAVAILABLE
    assert json.loads(done.stdout) == {"nodes": []}
    assert len(done.stderr.splitlines()) == 1
    assert "kakeya up" in done.stderr


def test_status_of_a_node_that_is_not_there(home: Path) -> None:
    with_key(home)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run_kakeya("status", "--address", f"127.0.0.1:{port}", home=home)
    assert done.returncode == EXIT_UNAVAILABLE
    assert "nothing answers" in done.stdout + done.stderr


def test_down_twice_and_with_a_damaged_note(home: Path) -> None:
    for _ in range(2):
        done = run_kakeya("down", home=home)
        assert (done.returncode, done.stderr) == (EXIT_OK, "")
        assert "no fleet was running" in done.stdout
    (home / "run").mkdir()
    (home / "run" / "fleet.json").write_text("{not json", encoding="utf-8")
    assert run_kakeya("down", home=home).returncode == EXIT_OK


# --- up, status, down ------------------------------------------------------------------------------------------------


def test_a_fleet_comes_up_once_heals_and_goes_down(home: Path, model: Path) -> None:
    up = ("up", "--model", str(model), "--ephemeral", "--json")
    first = run_kakeya(*up, home=home, timeout_s=120)
    assert first.returncode == EXIT_OK, first.stderr
    members = json.loads(first.stdout)["members"]
    assert [member["role"] for member in members] == ["primary", "worker", "cache"]

    again = run_kakeya(*up, home=home)
    assert json.loads(again.stdout)["members"] == members

    shown = run_kakeya("status", "--json", home=home)
    assert shown.returncode == EXIT_OK, shown.stderr
    nodes = json.loads(shown.stdout)["nodes"]
    assert [node["node_id"] for node in nodes] == [member["node_id"] for member in members]
    assert all(node["sections"]["node"]["state"] == "serving" for node in nodes)

    # The worker dies: status says so, and `up` starts that one again.
    psutil.Process(members[1]["pid"]).kill()
    wait_until(lambda: len(processes_of(home)) == 3, "the worker is gone")
    hurt = run_kakeya("status", home=home)
    assert hurt.returncode == EXIT_UNAVAILABLE
    assert "its process has ended" in hurt.stdout
    healed = json.loads(run_kakeya(*up, home=home, timeout_s=120).stdout)["members"]
    assert healed[0] == members[0]
    assert healed[2] == members[2]
    assert healed[1]["pid"] != members[1]["pid"]

    down = run_kakeya("down", home=home)
    assert (down.returncode, down.stderr) == (EXIT_OK, "")
    assert "stopped 4" in down.stdout
    assert not processes_of(home)
    assert "no fleet was running" in run_kakeya("down", home=home).stdout


def test_up_with_a_model_that_is_none_leaves_nothing_running(home: Path) -> None:
    done = run_kakeya("up", "--model", str(home), "--ephemeral", home=home)
    assert_one_line(done, EXIT_BAD_INPUT, "config.json")
    assert not processes_of(home)


def test_up_with_a_port_in_use_leaves_nothing_running(home: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"KAKEYA_BUS_BIND": f"127.0.0.1:{port}"}
        done = run_kakeya("up", "--model", str(model), "--ephemeral", home=home, environment=environment)
    assert_one_line(done, EXIT_PORT_IN_USE, str(port))
    assert not processes_of(home)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
def test_up_that_is_stopped_half_way_leaves_nothing_running(home: Path, model: Path, number: signal.Signals) -> None:
    process = start(home, "up", "--model", str(model), "--ephemeral")
    # The primary is being started; `up` waits for it.
    wait_until(lambda: len(processes_of(home)) >= 2, "a daemon is starting")
    process.send_signal(number)
    _, told = process.communicate(timeout=STOP_S)
    assert process.returncode == EXIT_INTERRUPTED
    assert told.splitlines()[-1] == "kakeya: interrupted"
    assert "Traceback" not in told
    assert not processes_of(home)


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "daemons", *arguments],
        cwd=rig.PROJECT,
        env={**rig.clean_environment(), "KAKEYA_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- one daemon ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=["term", "int", "hup"])
def test_a_daemon_that_is_asked_to_stop_ends_well(home: Path, number: signal.Signals) -> None:
    with_key(home)
    ready = home / "ready"
    process = start(home, "cache", *EPHEMERAL, "--ready-file", str(ready))
    wait_until(ready.exists, "it serves")
    process.send_signal(number)
    _, told = process.communicate(timeout=STOP_S)
    assert process.returncode == EXIT_OK
    assert f"received {number.name}" in told
    assert "Traceback" not in told
    assert not ready.exists()


def test_a_second_signal_ends_a_daemon_at_once(home: Path, model: Path) -> None:
    with rig.Fleet(model, home) as fleet:
        fleet.start("primary", "worker")
        with fleet["primary"].client() as client, rig.worker_only(client) as session:
            node = fleet["worker"]
            # A segment of work is under way, which a stop waits for.
            for _ in _appending(session, prompt(12_000, seed=1)):
                node.signal(signal.SIGTERM)
                node.signal(signal.SIGTERM)
                break
            assert node.process is not None
            assert node.process.wait(STOP_S) in (EXIT_OK, 128 + signal.SIGTERM)


def _appending(session: Any, tokens: list[int]) -> Iterator[None]:
    """Yields at the first sign of progress; the append itself fails when its worker dies."""

    class Begun(Exception):
        pass

    def progressed(progress: object) -> None:
        raise Begun

    with contextlib.suppress(Begun):
        session.append(tokens, on_progress=progressed)
    yield


# --- bad input to a running primary ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def primary(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary")
    return empty_fleet


def test_bad_requests_each_get_one_line_and_leave_the_session_usable(primary: Fleet) -> None:
    with primary["primary"].client() as client, client.create_session() as session:
        table: list[tuple[Any, type[KakeyaError], FailureCode, str]] = [
            (lambda: session.append([]), InvalidInput, FailureCode.INVALID_ARGUMENT, "empty"),
            (lambda: session.append([-1]), InvalidInput, FailureCode.INVALID_ARGUMENT, "token ids"),
            (lambda: session.append([rig.VOCABULARY]), RequestFailed, FailureCode.INVALID_ARGUMENT, "vocabulary"),
            (
                lambda: session.append(prompt(rig.CONTEXT_TOKENS + 1, seed=1)),
                RequestFailed,
                FailureCode.INVALID_ARGUMENT,
                "context",
            ),
            (lambda: session.append([1] * 131_073), InvalidInput, FailureCode.INVALID_ARGUMENT, "131072"),
            (lambda: list(session.generate(5)), RequestFailed, FailureCode.INVALID_ARGUMENT, "nothing to continue"),
            (lambda: list(session.generate(0)), InvalidInput, FailureCode.INVALID_ARGUMENT, "max_tokens"),
            (lambda: list(session.generate(-3)), InvalidInput, FailureCode.INVALID_ARGUMENT, "max_tokens"),
            (lambda: list(session.generate(5, temperature=-1)), InvalidInput, FailureCode.INVALID_ARGUMENT, "temperature"),
            (lambda: list(session.generate(5, top_p=2)), InvalidInput, FailureCode.INVALID_ARGUMENT, "top_p"),
        ]
        for call, kind, code, words in table:
            with pytest.raises(kind) as caught:
                call()
            assert caught.value.code is code
            assert words in str(caught.value)
            assert "\n" not in str(caught.value)
        session.append(prompt(10, seed=2))
        assert len(list(session.generate(3))) == 3


def test_a_session_that_is_not_there(primary: Fleet) -> None:
    with primary["primary"].client() as client:
        session = client.create_session()
        session.close()
        session._closed = False
        for call in (lambda: session.append([1]), session.info, lambda: list(session.generate(1))):
            with pytest.raises(RequestFailed, match="no such session") as caught:
                call()
            assert caught.value.code is FailureCode.NOT_FOUND


def test_chat_says_in_one_line_what_is_wrong(home: Path, primary: Fleet, model: Path) -> None:
    # No tokenizer in the folder, then a primary with another key.
    address = primary["primary"].address
    key = str(primary.psk_file)
    chat = ("chat", "-m", "hello", "--address", address, "--model", str(model))
    assert_one_line(run_kakeya(*chat, "--fleet-psk-file", key, home=home), EXIT_BAD_INPUT, "tokenizer")
    with_key(home)
    done = run_kakeya("status", "--address", address, home=home)
    assert done.returncode == EXIT_NOT_AUTHENTICATED
    assert "PSK" in done.stdout + done.stderr
    with primary["primary"].client() as client:
        assert any("refused" in line or "PSK" in line for line in client.status().recent)
