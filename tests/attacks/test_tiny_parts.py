"""A member publishes as many parts, as small, and as oddly hung together as the protocol lets it: each costs something."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
import xxhash
import zmq

from kakeya_zmq.store_room import parts_in
from tests.attacks.kit import MEMORY_MAX, Honest, RawClient, Siege, lone_cache
from tests.attacks.test_bulk import CHUNK, DATA_LAST, PUBLISH, Material, bulk_socket, published, put
from tests.fleet_rig import resident_bytes, wait_until
from tests.vectors import independent as wire
from tests.vectors.independent import Identity

STORE_MIB = 24
PARTS = 3000
"""Of one offer; a request has 1 MiB at most."""
OFFERS = 5
ROOT = bytes(32)
LARGE_IN_STORE = 4
"""Materials of 4 MiB that are published after the small parts."""


@pytest.fixture(scope="module")
def crumbs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with lone_cache(request, tmp_path_factory.mktemp("crumbs"), "crumbs", "--cache-gb", f"{STORE_MIB / 1024}") as siege:
        yield siege


@dataclass(frozen=True)
class Crumbs:
    """First blocks of as many prompts, of one byte each, and a tail of each that is said to be its beginning."""

    namespace: bytes
    hashes: list[bytes]

    @classmethod
    def new(cls, namespace: bytes) -> Crumbs:
        return cls(namespace, [os.urandom(32) for _ in range(PARTS)])

    def metas(self) -> list[list[Any]]:
        digest, checksum = hashlib.sha256(b"x").digest(), xxhash.xxh3_64_digest(b"x")
        return [[name, ROOT, 0, 0, 64, 1, digest, checksum] for name in self.hashes]

    def cuts(self) -> list[list[Any]]:
        return [[ROOT, os.urandom(32), 7, name, 64, 1] for name in self.hashes]

    def publish(self, client: RawClient, session: wire.Session, number: int, *, cuts: bool) -> list[Any]:
        body = [PUBLISH, self.namespace, self.metas(), [1], CHUNK, 0, self.cuts() if cuts else []]
        envelope = client.ask(session, body, number=number, deadline_ms=60_000)
        if envelope[0] == 4:
            return list(envelope[2][1:])
        assert envelope[0] == 5, envelope
        _, transfer, port, token, key, suite, *_ = envelope[2][2]
        with bulk_socket(zmq.PUSH, port, token) as socket:
            for index, (kind, content) in enumerate([(1, msgpack.packb(self.metas())), (2, b"x" * PARTS)]):
                header = wire.pack_chunk_header(kind, DATA_LAST if kind == 2 else 0, transfer, index, 0, len(content))
                socket.send_multipart([header, wire.seal_chunk(suite, key, header, content)])
            socket.close(linger=20_000)
        return published(client, session, number=number)


def test_parts_of_one_byte_fill_no_more_than_their_places(crumbs: Siege) -> None:
    """They have no more places than the store's size gives, cost no more memory than that, and make room for others."""
    node = crumbs.node
    memory, namespace = resident_bytes(node.pid), os.urandom(32)
    with Honest(node) as honest, crumbs.client() as client:
        session = client.join(Identity.new("crumbling"), roles=("cache",))
        for number in range(1, OFFERS + 1):
            stored, _, refused, _ = Crumbs.new(namespace).publish(client, session, number, cuts=False)
            assert stored + refused == PARTS
        figures = crumbs.status().sections["cache"]
        assert figures["entry_count"] == parts_in(int(figures["max_bytes"] or 0)), "the attack took place"
        assert resident_bytes(node.pid) - memory < MEMORY_MAX
        for _ in range(LARGE_IN_STORE):
            put(crumbs, Material.new())
        before = honest.answers
        wait_until(lambda: honest.answers > before or bool(honest.failures), "the honest client is still served")
    assert honest.failures == []


def test_an_offer_beside_thousands_of_cuts_is_answered_as_any_other(crumbs: Siege) -> None:
    """Each offered part is compared with none of them, however many blocks under its parent have one."""
    namespace = os.urandom(32)
    with Honest(crumbs.node) as honest, crumbs.client() as client:
        session = client.join(Identity.new("cutting"), roles=("cache",))
        for number in range(1, OFFERS + 1):
            Crumbs.new(namespace).publish(client, session, number, cuts=True)
        before = honest.answers
        wait_until(lambda: honest.answers > before or bool(honest.failures), "the honest client is still served")
    assert honest.failures == []
