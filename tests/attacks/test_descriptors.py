"""A daemon that may open few files, and strangers that would like to have them all."""

from __future__ import annotations

import contextlib
import socket as os_socket
from collections.abc import Iterator

import pytest

from daemons.descriptor_watch import connections_bound
from kakeya_zmq.io.connections import REFUSED_ADDRESS, REFUSED_UNFINISHED, REFUSED_UNPROVEN
from tests.attacks.kit import Siege, descriptors, lone_cache
from tests.fleet_rig import wait_until

LIMIT = 256
SPARE = 20


@pytest.fixture(scope="module")
def poor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with lone_cache(request, tmp_path_factory.mktemp("descriptors"), "poor", open_files=LIMIT) as siege:
        yield siege


def stranger(siege: Siege) -> os_socket.socket:
    host, _, port = siege.address.rpartition(":")
    return os_socket.create_connection((host, int(port)), timeout=20)


def test_it_says_how_many_it_lets_in(poor: Siege) -> None:
    node = poor.node.status().sections["node"]
    assert node["descriptors_max"] == LIMIT
    assert f"of 1024 connections {connections_bound(1024, LIMIT)} are let in" in poor.node.log.read_text("utf-8")
    wait_until(lambda: int(poor.node.status().sections["node"]["descriptors_open"] or 0) > 0, "it has looked", 20)


def test_more_connections_than_files(poor: Siege) -> None:
    with poor.expect(REFUSED_ADDRESS, REFUSED_UNPROVEN, count=LIMIT), contextlib.ExitStack() as stack:
        for _ in range(2 * LIMIT):
            stack.enter_context(stranger(poor))
        wait_until(lambda: descriptors(poor) < LIMIT // 2, "most are cut")


def test_a_flood_of_connections_that_end_at_once_leaves_nothing_open(poor: Siege) -> None:
    before = descriptors(poor)
    with poor.expect(REFUSED_UNFINISHED, REFUSED_UNPROVEN, REFUSED_ADDRESS, count=1000):
        for _ in range(1500):
            stranger(poor).close()
    wait_until(lambda: descriptors(poor) < before + SPARE, "all are gone")
