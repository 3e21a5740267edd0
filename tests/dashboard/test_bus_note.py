"""The note of where a node's bus listens: private, found while the process lives, gone when it ends."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.bus_note import BusNote, nodes_here
from dashboard.discovery import local_buses
from kakeya_zmq.io.addresses import Address

FACTS = {"address": "127.0.0.1:5000", "bus_port": 6000}


@pytest.mark.parametrize(
    ("address", "bus_bind", "found"),
    [
        ("192.0.2.7:5000", "", Address("192.0.2.7", 6000)),
        ("0.0.0.0:5000", "", Address("127.0.0.1", 6000)),
        ("[::]:5000", "", Address("::1", 6000)),
        ("192.0.2.7:5000", "127.0.0.1:0", Address("127.0.0.1", 6000)),
    ],
)
def test_a_note_is_found_while_it_is_there(tmp_path: Path, address: str, bus_bind: str, found: Address) -> None:
    note = BusNote(tmp_path, "alpha", bus_bind)
    note.write({"address": address, "bus_port": 6000})
    (path,) = (tmp_path / "run").iterdir()
    assert path.name == "alpha.bus"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert local_buses(tmp_path) == {found}
    note.remove()
    note.remove()
    assert local_buses(tmp_path) == frozenset()
    assert not list((tmp_path / "run").iterdir())


def test_the_note_of_another_process_stays_and_that_of_a_dead_one_is_passed_over(tmp_path: Path) -> None:
    note = BusNote(tmp_path, "alpha")
    note.write(FACTS)
    path = tmp_path / "run" / "alpha.bus"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    for pid, found in ((os.getppid(), {Address("127.0.0.1", 6000)}), (ended.pid, set()), ("x", set()), (-1, set())):
        path.write_text(json.dumps({"pid": pid, "bus_address": "127.0.0.1:6000"}), encoding="utf-8")
        assert local_buses(tmp_path) == found
        note.remove()
        assert path.exists()
    note.write(FACTS)
    assert local_buses(tmp_path) == {Address("127.0.0.1", 6000)}


def test_a_note_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    BusNote(tmp_path, "alpha").write(FACTS)
    BusNote(tmp_path, "alpha").write({"address": "nonsense", "bus_port": 6000})
    BusNote(tmp_path, "alpha").write({"address": "127.0.0.1:1"})
    assert local_buses(tmp_path) == frozenset()


def test_nodes_of_this_machine_are_found_while_they_live(tmp_path: Path) -> None:
    assert nodes_here(tmp_path) == ()
    for name, port in (("beta", 5002), ("alpha", 5001)):
        BusNote(tmp_path, name).write({"address": f"192.0.2.7:{port}", "bus_port": 6000})
    assert nodes_here(tmp_path) == ("192.0.2.7:5001", "192.0.2.7:5002")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    note = json.loads((tmp_path / "run" / "alpha.bus").read_text(encoding="utf-8"))
    damaged: tuple[object, ...] = (
        {**note, "pid": ended.pid},
        {**note, "pid": -1},
        {**note, "address": "nonsense"},
        {"pid": note["pid"]},
        [],
        None,
    )
    for content in damaged:
        (tmp_path / "run" / "alpha.bus").write_text(json.dumps(content), encoding="utf-8")
        assert nodes_here(tmp_path) == ("192.0.2.7:5002",)


def test_a_process_that_only_inherited_the_number_is_no_node(tmp_path: Path) -> None:
    BusNote(tmp_path, "alpha").write(FACTS)
    os.utime(tmp_path / "run" / "alpha.bus", (1_000_000_000, 1_000_000_000))
    assert nodes_here(tmp_path) == ()
