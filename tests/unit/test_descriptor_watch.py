"""File descriptors of a process: how many connections they allow, and what is told when they run out."""

from __future__ import annotations

import contextlib
import os
import resource
from collections import Counter
from collections.abc import Iterator

import pytest

from daemons import descriptor_watch
from daemons.descriptor_watch import (
    CONNECTIONS_MIN,
    OUT_OF_THEM,
    DescriptorLevel,
    DescriptorWatch,
    connections_bound,
    level_of,
)
from kakeya_zmq.io.connections import REFUSED_NO_DESCRIPTOR
from kakeya_zmq.io.descriptors import descriptors_open, raise_descriptor_limit
from kakeya_zmq.io.reactor import Reactor
from tests.loopback.reactor_kit import run_until


@pytest.mark.parametrize(
    ("wanted", "limit", "bound"),
    [
        (1024, 16_384, 1024),
        (1024, 10_240, 1024),
        (1024, 2048, 409),
        (1024, 0, 1024),
        (1024, 20, CONNECTIONS_MIN),
        (16, 40, 16),
    ],
)
def test_connections_fit_into_the_limit(wanted: int, limit: int, bound: int) -> None:
    assert connections_bound(wanted, limit) == bound


@pytest.mark.parametrize("limit", [256, 1024, 2048, 16_384])
def test_both_ports_and_their_successors_leave_room(limit: int) -> None:
    assert 4 * connections_bound(65_536, limit) <= limit - limit // 5


@pytest.mark.parametrize(
    ("used", "level"),
    [(0, "ok"), (79, "ok"), (80, "warning"), (91, "warning"), (92, "exhausted"), (100, "exhausted")],
)
def test_levels(used: int, level: str) -> None:
    assert level_of(used, 100) is DescriptorLevel(level)


def test_without_a_limit_that_is_known_all_is_well() -> None:
    assert level_of(1_000_000, 0) is DescriptorLevel.OK


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor()
    yield made
    assert made.callback_errors == 0
    made.close()


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    while held[-1] < max(map(int, os.listdir("/dev/fd"))) - 1:
        held.append(os.dup(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)


def test_a_process_that_runs_out_says_so_once_refuses_and_recovers(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptor_watch, "LOOK_S", 0.01)
    notes: list[tuple[str, str]] = []
    refusals: Counter[str] = Counter()
    watch = DescriptorWatch(
        reactor,
        raise_descriptor_limit(),
        note=lambda level, text: notes.append((level, text)),
        refused=lambda reason: refusals.update([reason]),
    )
    run_until(reactor, lambda: watch.used > 0)
    assert (watch.level, watch.trouble, notes) == (DescriptorLevel.OK, "", [])
    with no_descriptors_left():
        watch.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        run_until(reactor, lambda: refusals[REFUSED_NO_DESCRIPTOR] > 2)
        assert watch.trouble == OUT_OF_THEM
        assert [level for level, _ in notes] == ["warning"]
        assert "exhausted" in notes[0][1]
    watch.limit = 16_384
    run_until(reactor, lambda: watch.level is DescriptorLevel.OK)
    assert [level for level, _ in notes] == ["warning", "info"]


def test_what_is_open_is_counted() -> None:
    before = descriptors_open()
    assert before is not None
    reader, writer = os.pipe()
    try:
        assert descriptors_open() == before + 2
    finally:
        os.close(reader)
        os.close(writer)
