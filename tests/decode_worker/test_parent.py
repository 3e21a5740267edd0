"""A child does not outlive its parent, however that ends; and a primary with a decode worker answers as one without."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from kakeya_zmq.client import Session
from kakeya_zmq.decode_worker.values import WorkerFigures
from tests.fleet_rig import PROJECT, Fleet, Node, Reference, prompt, run_kakeya, wait_until

GONE_S = 20.0
LONG = 150
"""Tokens: enough for a signal to arrive in the middle."""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("what", ["idle", "hang", "load"])
def test_a_child_ends_when_its_parent_is_killed(what: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.decode_worker.parent", what], stdout=subprocess.PIPE, cwd=PROJECT, text=True
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.kill()
        wait_until(lambda: gone(child), "the child is gone", GONE_S)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(model, tmp_path) as running:
        running.start("primary", primary=("--decode-worker", "1", "--decode-worker-timeout-s", "6"))
        yield running


def section(node: Node) -> Mapping[str, object]:
    return node.status().sections["decode_worker"]


def broken_into(session: Session, count: int, at: int, then: Callable[[], None], **sampling: Any) -> list[int]:
    """The tokens of an answer, with something done after one of them."""
    tokens = []
    for token in session.generate(count, inter_token_timeout_s=60.0, **sampling):
        tokens.append(token)
        if len(tokens) == at:
            then()
    return tokens


def test_a_primary_answers_the_same_while_its_child_is_killed_and_hangs(fleet: Fleet) -> None:
    primary = fleet["primary"]
    first, second = prompt(200, 5), prompt(40, 6)
    reference = Reference(fleet.model)
    before = section(primary)
    assert before.keys() == {field.name for field in fields(WorkerFigures)}
    child = int(str(before["pid"]))
    assert psutil.Process(child).ppid() == primary.pid
    # While nothing is asked of it, too.
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: (section(primary)["state"], section(primary)["restarts"]) == ("ready", 1), "a new child while idle")
    child = int(str(section(primary)["pid"]))
    told = run_kakeya("status", "--address", primary.address, home=fleet.home).stdout
    assert f"decode worker  ready, process {child}, restarts 1, hangs 0\n" in told
    with primary.client() as client, client.create_session() as session:
        session.append(first)
        answer = broken_into(session, LONG, 4, lambda: os.kill(child, signal.SIGKILL))
        assert answer == reference.answer(first, LONG)
        session.append(second)
        replaced = int(str(section(primary)["pid"]))
        assert replaced != child
        again = broken_into(session, LONG, 6, lambda: os.kill(replaced, signal.SIGSTOP))
        assert again == reference.answer([*first, *answer, *second], LONG)
        # Sampled: a seed makes it repeatable, with a child lost on the way as without.
        sampling = {"temperature": 0.8, "seed": 11}
        with client.create_session() as other:
            other.append(first)
            wanted = broken_into(other, LONG, 0, lambda: None, **sampling)
        third = int(str(section(primary)["pid"]))
        with client.create_session() as other:
            other.append(first)
            assert broken_into(other, LONG, 3, lambda: os.kill(third, signal.SIGKILL), **sampling) == wanted
            other.append(second)  # should the answer have been over before the child was dead, this finds it so
    after = section(primary)
    assert (after["state"], after["restarts"], after["hangs"]) == ("ready", 4, 1)
    assert int(str(after["memory_bytes"])) > 0
    last = int(str(after["pid"]))
    assert primary.terminate() == 0
    assert gone(last)
    log = primary.last_lines(200)
    assert "the decode worker was lost: it was ended by signal 9" in log
    assert "the decode worker was lost: it did not answer in time" in log


def test_the_figures_and_options_are_documented() -> None:
    text = (PROJECT / "docs" / "telemetry.md").read_text("utf-8")
    _, _, rest = text.partition("## Section `decode_worker`")
    table = rest.partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == {field.name for field in fields(WorkerFigures)}
