"""Strangers that would like to have all files of a daemon, by silent connections to the ports of its transfers."""

from __future__ import annotations

import contextlib
import socket as os_socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from tests.attacks.kit import Siege, descriptors, lone_cache
from tests.attacks.test_bulk import (
    CROWDED_PORT,
    PARTS,
    Material,
    bulk_socket,
    fetch_grant,
    publish,
    published,
    pull_rest,
    push_all,
)
from tests.fleet_rig import wait_until

LIMIT = 1024
"""What Linux gives a process that does not ask for more."""


@pytest.fixture(scope="module")
def poor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with lone_cache(request, tmp_path_factory.mktemp("bulk-descriptors"), "limited", open_files=LIMIT) as siege:
        yield siege


@contextlib.contextmanager
def knocking(port: int) -> Iterator[None]:
    """A stranger that connects to a port without end, is silent, and holds as many connections as the daemon has files."""
    stop = threading.Event()

    def knock() -> None:
        with contextlib.ExitStack() as stack:
            held: list[os_socket.socket] = []
            while not stop.is_set():
                with contextlib.suppress(OSError):  # the transfer has ended, and with it the port
                    each = stack.enter_context(os_socket.create_connection(("127.0.0.1", port), timeout=20))
                    held.append(each)
                    if len(held) > LIMIT:
                        held.pop(0).close()

    thread = threading.Thread(target=knock, name="stranger")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def bulk_strangers_cut(siege: Siege) -> int:
    return siege.refusals().get(CROWDED_PORT, 0)


def test_silent_connections_to_a_publish_port_take_no_files_from_others(poor: Siege) -> None:
    material = Material.new()
    with poor.expect(CROWDED_PORT, count=2 * LIMIT), poor.client() as client:
        session = client.join()
        grant, before = publish(client, session, material), bulk_strangers_cut(poor)
        with knocking(grant[2]):
            wait_until(lambda: bulk_strangers_cut(poor) > before + 2 * LIMIT, "the flood is cut")
            assert descriptors(poor) < LIMIT * 3 // 4
            # New clients get in, and are granted transfers of their own.
            with poor.client() as other:
                put_session = other.join()
                another = Material.new()
                push_all(another, publish(other, put_session, another))
                assert published(other, put_session)[:3] == [PARTS, 0, 0]
        push_all(material, grant)
        assert published(client, session)[:3] == [PARTS, 0, 0]


def test_silent_connections_to_a_fetch_port_take_no_files_while_its_bearer_is_served(poor: Siege) -> None:
    material = Material.new()
    with poor.client() as client:
        session = client.join()
        push_all(material, publish(client, session, material))
        assert published(client, session)[:3] == [PARTS, 0, 0]
    with poor.expect(CROWDED_PORT, count=LIMIT), poor.client() as client:
        session = client.join()
        grant = fetch_grant(client, session, material)
        with bulk_socket(zmq.PULL, grant[2], grant[3], receive_max=1) as bearer:
            assert bearer.poll(20_000), "it is there before the strangers are"
            before = bulk_strangers_cut(poor)
            with knocking(grant[2]):
                wait_until(lambda: bulk_strangers_cut(poor) > before + LIMIT, "the flood is cut")
                assert descriptors(poor) < LIMIT * 3 // 4
                assert pull_rest(bearer, grant) == b"".join(material.payloads)
    wait_until(lambda: descriptors(poor) < LIMIT // 2, "all are gone")
