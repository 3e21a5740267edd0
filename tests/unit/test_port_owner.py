"""Who has a port: a listener, a connection that goes out through it, or one that has ended. Real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from daemons.doctor.finding import Level
from daemons.doctor.ports import examine_port, judge_use
from daemons.port_owner import PortUse, port_use, with_owner
from kakeya_zmq.io.addresses import Address
from wire.errors import PortInUseError


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection, the one that went out first; its listener is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        arrived, _ = server.accept()
    with closing(out), closing(arrived):
        yield out, arrived


def _refused(port: int) -> PortInUseError:
    return with_owner(PortInUseError(f"127.0.0.1:{port} is already in use", remedy="stop what listens there"))


def _examined(port: int) -> tuple[Level, str, str]:
    found = examine_port("cache", Address("127.0.0.1", port), set())
    return found.level, found.text, found.remedy


def test_a_process_that_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"(process {os.getpid()})" in str(_refused(port))
        level, text, remedy = _examined(port)
    assert level is Level.PROBLEM
    assert f"(process {os.getpid()})" in text
    assert "stop it" in remedy


def test_a_connection_that_goes_out_through_the_port_is_named_as_one(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    port = connection[0].getsockname()[1]
    refused = str(_refused(port))
    assert "nobody listens there, a connection of " in refused
    assert f"(process {os.getpid()})" in refused
    assert "stop what listens" not in refused
    found = judge_use("cache: here", port, port_use(port), set(), "--bind")
    assert found.level is Level.PROBLEM
    assert "nobody listens there, a connection of " in found.text
    assert f"(process {os.getpid()})" in found.text
    assert "lsof" not in found.remedy


def test_a_connection_that_has_ended_is_waited_for(connection: tuple[socket.socket, socket.socket]) -> None:
    out, arrived = connection
    port = out.getsockname()[1]
    out.shutdown(socket.SHUT_WR)  # the end that closes first is the one that waits
    assert arrived.recv(1) == b""
    arrived.close()
    assert out.recv(1) == b""
    out.close()
    use = port_use(port)
    if use is None:
        pytest.skip("this system shows no connection that has ended")
    assert use.ended
    assert "nobody listens there: a connection that has ended" in str(_refused(port))
    assert "wait a minute" in str(_refused(port))
    found = judge_use("cache: here", port, use, set(), "--bind")
    assert found.level is Level.PROBLEM
    assert "has ended" in found.text


def test_a_connection_of_our_own_daemon_is_no_service() -> None:
    use = PortUse(psutil.Process(), psutil.CONN_ESTABLISHED)
    assert judge_use("cache: here", 1, use, {os.getpid()}, "--bind").level is Level.PROBLEM
    assert (
        judge_use("cache: here", 1, PortUse(psutil.Process(), psutil.CONN_LISTEN), {os.getpid()}, "--bind").level is Level.OK
    )


def test_what_cannot_be_seen_is_looked_for_with_more_rights() -> None:
    hidden = judge_use("cache: here", 77, PortUse(None, psutil.CONN_LISTEN), set(), "--bind")
    assert "a process that this user may not look at" in hidden.text
    unseen = judge_use("cache: here", 77, None, set(), "--bind")
    for found in (hidden, unseen):
        assert "sudo lsof -nP -iTCP:77" in found.remedy
        assert "LISTEN" not in found.remedy
    assert "wait a minute" in unseen.remedy
    other = judge_use("cache: here", 77, PortUse(None, psutil.CONN_ESTABLISHED), set(), "--bind")
    assert "a connection of another user" in other.text
