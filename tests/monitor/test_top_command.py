"""The real command beside a real fleet, with nothing but the telemetry-read key; and what it says when it can't."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from daemons import command
from tests.fleet_rig import PROJECT, Fleet, clean_environment, prompt, run_kakeya, worker_only
from wire.errors import ConfigError, RequestFailed, SecretFileError
from wire.keys import FleetKey, TelemetryKey, write_secret_file

FLAGS = ("--telemetry-interval-s", "1")


@pytest.fixture(scope="module")
def fleet(empty_fleet: Fleet) -> Fleet:
    empty_fleet.start("primary", "worker", primary=FLAGS, worker=FLAGS)
    return empty_fleet


@pytest.fixture
def reader(fleet: Fleet, tmp_path: Path) -> tuple[Path, str]:
    """(a home with the telemetry key and nothing else, the bus of one node)."""
    key = FleetKey.load(fleet.psk_file).telemetry_key()
    write_secret_file(tmp_path / "telemetry.key", key.to_text())
    facts = json.loads((fleet.home / "run" / "primary.ready").read_text("utf-8"))
    return tmp_path, f"127.0.0.1:{facts['bus_port']}"


class Stream:
    """``kakeya top --json`` and what it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.seen: list[dict[str, Any]] = []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event from here on that fits."""
        while True:
            event = json.loads(self._lines.get(timeout=60.0))
            self.seen.append(event)
            if condition(event):
                return event

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(30)
        self._thread.join(30)
        return code


@contextmanager
def streaming(home: Path, *arguments: str) -> Iterator[Stream]:
    command = [sys.executable, "-m", "daemons", "top", "--json", *arguments]
    environment = {**clean_environment(), "KAKEYA_HOME": str(home)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT, env=environment
    ) as process:
        try:
            yield Stream(process)
        finally:
            process.kill()


def test_events_of_a_prompt_stream_as_json_and_one_frame_shows_them(fleet: Fleet, reader: tuple[Path, str]) -> None:
    home, bus = reader
    assert not (home / "fleet.psk").exists()
    with streaming(home, "--bus", bus) as stream:
        nodes = set[str]()

        def both(event: dict[str, Any]) -> bool:
            nodes.update([event["node"]] if event["topic"] == "node" else [])
            return nodes >= {"primary", "worker"}

        stream.wait(both)
        with fleet["primary"].client() as client, worker_only(client) as session:
            session.append(prompt(700, 1))
            list(session.generate(4))
        wanted: dict[str, Callable[[dict[str, Any]], bool]] = {
            "job": lambda event: event["state"] == "completed" and event["tokens_done"] == event["tokens_total"] > 0,
            "transfer": lambda event: bool(event["ok"] and event["payload_bytes"]),
            "request": lambda event: event["operation"] == "generate" and event["source"] == "worker",
        }
        missing = dict(wanted)

        def all_of_them(event: dict[str, Any]) -> bool:
            if event["topic"] in missing and missing[event["topic"]](event["event"]):
                del missing[event["topic"]]
            return not missing

        stream.wait(all_of_them)
        assert stream.seen[0]["topic"] == "bus"
        assert stream.interrupt() == 130
    done = run_kakeya("top", "--once", "--bus", bus, "--size", "200x40", home=home)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert all(cell_len(line) <= 200 for line in lines)
    assert "\x1b" not in done.stdout
    row = next(line for line in lines if line.startswith(" primary ") and "generate" in line)
    assert "worker" in row
    assert "past" in row
    assert "2 online" in lines[0]


def test_one_listing_as_json_ends_by_itself_and_filters(fleet: Fleet, reader: tuple[Path, str]) -> None:
    home, bus = reader
    done = run_kakeya("top", "--once", "--json", "--bus", bus, "--node", "work*", "--topic", "node", home=home)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(line["topic"], line.get("node")) for line in told} == {("bus", None), ("node", "worker")}


def test_a_reader_that_goes_away_ends_it(fleet: Fleet, reader: tuple[Path, str]) -> None:
    home, bus = reader
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "daemons", "top", "--json", "--bus", bus]
    with open(write_end, "wb") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=PROJECT,
            env={**clean_environment(), "KAKEYA_HOME": str(home)},
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


# --- when it can't -----------------------------------------------------------------------------------------------------


def top(home: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """The command in this process, without what the entry point does with signals and errors."""
    monkeypatch.setenv("KAKEYA_HOME", str(home))
    parsed = command.build_parser().parse_args(["top", *flags])
    code: int = parsed.run(parsed)
    return code


def test_a_key_of_another_fleet_hears_nothing_and_is_not_replaced(
    fleet: Fleet, reader: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, bus = reader
    other = home / "other.key"
    write_secret_file(other, FleetKey(FleetKey.generate()).telemetry_key().to_text())
    before = other.read_bytes()
    with pytest.raises(RequestFailed, match="no telemetry bus was heard") as caught:
        top(fleet.home, monkeypatch, "--once", "--bus", bus, "--telemetry-key-file", str(other), "--wait-s", "2")
    assert command.exit_code(caught.value) == command.EXIT_UNAVAILABLE
    assert other.read_bytes() == before


def test_without_a_key_it_says_where_one_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SecretFileError, match="kakeya key telemetry"):
        top(tmp_path, monkeypatch, "--once")


def test_the_telemetry_key_is_made_where_the_psk_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    with pytest.raises(RequestFailed):
        top(tmp_path, monkeypatch, "--once", "--wait-s", "0.1")
    made = TelemetryKey.load(tmp_path / "telemetry.key")
    assert made.secret == FleetKey.load(tmp_path / "fleet.psk").telemetry_key().secret


@pytest.mark.parametrize(
    "flags",
    [
        ("--size", "80"),
        ("--size", "0x10"),
        ("--size", "9999x1"),
        ("--wait-s", "nan"),
        ("--refresh-s", "0"),
        ("--topic", "card"),
        ("--bus", "nonsense"),
    ],
)
def test_bad_options_are_refused(flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secret_file(tmp_path / "fleet.psk", FleetKey.generate())
    with pytest.raises(ConfigError):
        top(tmp_path, monkeypatch, *flags)
