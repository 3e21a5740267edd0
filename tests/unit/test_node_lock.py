"""One process of a machine runs a node: the lock, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemons import node_lock
from daemons.command import EXIT_PORT_IN_USE, exit_code
from daemons.node_lock import NodeLock
from wire.errors import NodeInUseError

pytestmark = pytest.mark.skipif(node_lock.fcntl is None, reason="this system has no file locks")

HOLD = """
import sys
from pathlib import Path
from daemons.node_lock import NodeLock
lock = NodeLock(Path(sys.argv[1]), "mac")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_node_that_runs_is_not_run_twice_and_the_error_names_it(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(NodeInUseError) as raised:
            NodeLock(tmp_path, "mac", wait_s=0.0)
        assert raised.value.message == f"the node id mac is already in use on this machine by process {process.pid}"
        assert "--node-id" in raised.value.remedy
        assert exit_code(raised.value) == EXIT_PORT_IN_USE
        NodeLock(tmp_path / "another", "other").release()


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        lock = NodeLock(tmp_path, "mac", wait_s=0.0)
    assert (tmp_path / "lock").read_text(encoding="ascii") == f"{os.getpid()}\n"
    lock.release()


def test_a_node_waits_a_moment_for_the_one_that_is_ending(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()  # ends it, sooner or later
        NodeLock(tmp_path, "mac", wait_s=30.0).release()


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path, "mac", wait_s=0.0)
    lock.release()
    lock.release()
    NodeLock(tmp_path, "mac", wait_s=0.0).release()


def test_a_folder_that_cannot_be_made_is_left_to_those_who_need_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="ascii")
    NodeLock(tmp_path / "file" / "node", "mac").release()
