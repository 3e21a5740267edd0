"""Attacks on bulk ports: each serves one bearer of one token. A thief gets nothing, a flooder costs nothing, and the honest
transfer arrives whole all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket as os_socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import psutil
import pytest
import xxhash
import zmq

from kakeya_zmq.io.monitor import CROWDED
from tests.attacks.kit import ZMTP_NULL_GREETING, ZMTP_PLAIN_GREETING, RawClient, Siege
from tests.fleet_rig import resident_bytes, wait_until
from tests.vectors import independent as wire

CHUNK = 1 << 20
NOT_THE_PROTOCOL = "a bulk connection was refused: it does not speak this protocol"
PARTS = 4
PART_BYTES = 1 << 20
WRONG_TOKEN = "a bulk connection was refused: wrong token"
USED_TOKEN = "a bulk connection was refused: token already used"
CROWDED_PORT = f"a bulk connection was refused: {CROWDED}"
PUBLISH, FETCH, LOOKUP, RELEASE = 5, 3, 2, 4
DATA_LAST = 1
CREDIT = 64 << 20


@dataclass
class Material:
    """Parts of a prompt that nobody has yet."""

    namespace: bytes
    hashes: list[bytes]
    payloads: list[bytes]

    @classmethod
    def new(cls) -> Material:
        namespace, tenant_key, parent = os.urandom(32), os.urandom(32), bytes(32)
        hashes = []
        for number in range(PARTS):
            parent = wire.block_hash(tenant_key, namespace, parent, [number] * 64)
            hashes.append(parent)
        return cls(namespace, hashes, [os.urandom(PART_BYTES) for _ in range(PARTS)])

    def metas(self) -> list[list[Any]]:
        parents = [bytes(32), *self.hashes]
        return [
            [
                hash_,
                parents[i],
                0,
                i * 64,
                64,
                len(payload),
                hashlib.sha256(payload).digest(),
                xxhash.xxh3_64_digest(payload),
            ]
            for i, (hash_, payload) in enumerate(zip(self.hashes, self.payloads, strict=True))
        ]

    def offer(self) -> list[Any]:
        return [PUBLISH, self.namespace, self.metas(), [1], CHUNK]

    def lookup(self) -> list[Any]:
        return [LOOKUP, self.namespace, [64, True, 0, 0, False], b"".join(self.hashes), 30_000]

    def frames(self, grant: list[Any]) -> Iterator[list[bytes]]:
        """The chunks of a publish of everything under a grant."""
        _, transfer, _, _, key, suite, *_ = grant
        contents = [(1, msgpack.packb(self.metas())), *((2, payload) for payload in self.payloads)]
        for index, (kind, content) in enumerate(contents):
            flags = DATA_LAST if index == len(contents) - 1 else 0
            header = wire.pack_chunk_header(kind, flags, transfer, index, 0, len(content))
            yield [header, wire.seal_chunk(suite, key, header, content)]


@contextlib.contextmanager
def bulk_socket(kind: int, port: int, token: str | None, *, receive_max: int = 64) -> Iterator[zmq.Socket[bytes]]:
    """PUSH or PULL at a bulk port, with a token or as a stranger without any."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvhwm = receive_max
    if token is not None:
        socket.plain_username, socket.plain_password = b"kakeya", token.encode()
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def publish(client: RawClient, session: wire.Session, material: Material, number: int = 1) -> list[Any]:
    """The grant of an offer."""
    envelope = client.ask(session, material.offer(), number=number, deadline_ms=60_000)
    assert envelope[0] == 5, envelope
    assert envelope[2][0] == 201
    grant: list[Any] = envelope[2][2]
    return grant


def push_all(material: Material, grant: list[Any]) -> None:
    with bulk_socket(zmq.PUSH, grant[2], grant[3]) as socket:
        for frames in material.frames(grant):
            assert socket.poll(20_000, zmq.POLLOUT)
            socket.send_multipart(frames)
        socket.close(linger=20_000)


def published(client: RawClient, session: wire.Session, number: int = 1) -> list[Any]:
    """The PublishResult: [stored, held, refused, reason]."""
    while True:
        envelope = client.answer_to(session, number, timeout_s=30)
        if envelope[0] != 5:
            assert envelope[0] == 4, envelope
            return list(envelope[2][1:])


def put(siege: Siege, material: Material) -> None:
    with siege.client() as client:
        session = client.join()
        push_all(material, publish(client, session, material))
        assert published(client, session)[:3] == [PARTS, 0, 0]


def fetch_grant(client: RawClient, session: wire.Session, material: Material) -> list[Any]:
    reply = client.ask(session, material.lookup(), number=1)
    assert reply[0] == 4, reply
    lease = reply[2][4]
    wanted = [[hash_, 0] for hash_ in material.hashes]
    envelope = client.ask(session, [FETCH, lease, wanted, [1], CHUNK, CREDIT], number=2, deadline_ms=60_000)
    assert envelope[2][0] == 200, envelope
    grant: list[Any] = envelope[2]
    return grant


def pull_all(grant: list[Any]) -> bytes:
    """Everything of a fetch, opened and checked for order."""
    with bulk_socket(zmq.PULL, grant[2], grant[3]) as socket:
        return pull_rest(socket, grant)


def pull_rest(socket: zmq.Socket[bytes], grant: list[Any]) -> bytes:
    content = b""
    for index in range(10_000):
        assert socket.poll(20_000), f"chunk {index} did not come"
        chunk = wire.open_chunk(grant[5], grant[4], *socket.recv_multipart())
        assert (chunk.index, chunk.transfer_id) == (index, grant[1])
        content += chunk.plaintext if chunk.kind == 2 else b""
        if chunk.flags:
            return content
    raise AssertionError("no end")


def finish(client: RawClient, session: wire.Session) -> None:
    client.send(*session.seal([2, 2, [300, True]]))
    assert client.answer_to(session, 2, timeout_s=30)[0] == 4


def test_the_second_implementation_publishes_and_fetches(siege: Siege) -> None:
    material = Material.new()
    put(siege, material)
    with siege.client() as client:
        session = client.join()
        assert pull_all(fetch_grant(client, session, material)) == b"".join(material.payloads)
        finish(client, session)


# --- fetch: somebody else pulls --------------------------------------------------------------------------------------------


def test_a_thief_pulls_from_a_fetch_port(siege: Siege) -> None:
    """Before, during and after: without the token nothing, with the used token nothing; the honest asker gets it all."""
    material = Material.new()
    put(siege, material)
    # Whoever comes after the bearer is cut, if the gate has not been quicker.
    with siege.expect(WRONG_TOKEN, USED_TOKEN, CROWDED_PORT, count=2), siege.client() as client:
        session = client.join()
        grant = fetch_grant(client, session, material)
        with (
            bulk_socket(zmq.PULL, grant[2], "0" * 64) as guessing,
            bulk_socket(zmq.PULL, grant[2], None) as naked,
        ):
            assert not guessing.poll(300)
            assert pull_all(grant) == b"".join(material.payloads)
            with bulk_socket(zmq.PULL, grant[2], grant[3]) as second:
                assert not second.poll(300)
            assert not guessing.poll(0)
            assert not naked.poll(0)
        finish(client, session)


# --- publish: somebody else pushes -----------------------------------------------------------------------------------------


def flood(port: int, greeting: bytes, stop: threading.Event) -> int:
    """Push endless multipart messages at a port, as a stranger. Returns the bytes that went out."""
    frame = b"\x03" + struct.pack(">Q", 32_768) + bytes(32_768)
    sent = 0
    while not stop.is_set():
        try:
            with os_socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(greeting)
                while not stop.is_set():
                    connection.sendall(frame)
                    sent += len(frame)
        except OSError:
            continue  # cut off: try again
    return sent


@pytest.mark.parametrize("greeting", [ZMTP_NULL_GREETING, ZMTP_PLAIN_GREETING], ids=["null", "plain"])
def test_a_flood_at_a_publish_port(siege: Siege, greeting: bytes) -> None:
    material = Material.new()
    with siege.expect(WRONG_TOKEN, memory_max=(32 + 2 * PARTS) << 20), siege.client() as client:
        session = client.join()
        grant = publish(client, session, material)
        stop = threading.Event()
        flooder = threading.Thread(target=flood, args=(grant[2], greeting, stop))
        flooder.start()
        try:
            with bulk_socket(zmq.PUSH, grant[2], "f" * 64) as guessing:
                for _ in range(100):
                    with contextlib.suppress(zmq.Again):
                        guessing.send_multipart([b"x" * 100_000] * 20, zmq.DONTWAIT)
                guessing.poll(300)
                push_all(material, grant)
                assert published(client, session)[:3] == [PARTS, 0, 0]
        finally:
            stop.set()
            flooder.join()
        # The flooder has no token that the gate could look at: the lane itself sees him.
        wait_until(lambda: siege.refusals().get(NOT_THE_PROTOCOL, 0) > 0, "the flooder is counted")


def test_idle_connections_at_a_publish_port(siege: Siege) -> None:
    """Few of them are kept, and the bearer of the token is served all the same."""
    material = Material.new()
    memory = resident_bytes(siege.node.pid)
    with siege.expect(CROWDED_PORT, count=1_500), siege.client() as client, contextlib.ExitStack() as stack:
        session = client.join()
        grant = publish(client, session, material)
        for _ in range(2_000):
            stack.enter_context(os_socket.create_connection(("127.0.0.1", grant[2]), timeout=10))
        wait_until(lambda: psutil.Process(siege.node.pid).num_fds() < 150, "most are cut, long before their time is over", 2)
        push_all(material, grant)
        assert published(client, session)[:3] == [PARTS, 0, 0]
        assert resident_bytes(siege.node.pid) - memory < (32 + 2 * PARTS) << 20
    wait_until(lambda: psutil.Process(siege.node.pid).num_fds() < 100, "all are gone")


def test_a_publisher_that_breaks_the_rules_ends_its_own_transfer_only(siege: Siege) -> None:
    """The bearer of a token who sends replayed, damaged or oversize chunks: nothing of it becomes visible."""
    for spoil in ("replayed", "damaged", "reordered", "oversize"):
        material = Material.new()
        with siege.client() as client:
            session = client.join()
            grant = publish(client, session, material)
            chunks = list(material.frames(grant))
            match spoil:
                case "replayed":
                    chunks.insert(2, chunks[1])
                case "damaged":
                    chunks[1][1] = chunks[1][1][:-1] + bytes([chunks[1][1][-1] ^ 1])
                case "reordered":
                    chunks[1], chunks[2] = chunks[2], chunks[1]
                case "oversize":
                    chunks[1][1] += bytes(3 << 20)
            with bulk_socket(zmq.PUSH, grant[2], grant[3]) as socket:
                for frames in chunks:
                    if socket.poll(2_000, zmq.POLLOUT):
                        socket.send_multipart(frames)
                stored, _, _, reason = published(client, session)
            assert stored <= 1, spoil  # what came whole before the violation stays
            assert reason, spoil
        # The daemon goes on, and takes the same parts from whoever sends them properly.
        with siege.client() as client:
            session = client.join()
            envelope = client.ask(session, material.lookup(), number=1)
            assert envelope[0] == 4
