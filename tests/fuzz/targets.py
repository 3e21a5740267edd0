"""Everything that reads bytes of others, as functions of bytes: one table for hypothesis and for atheris (slow run).

The invariant: any bytes are taken, or refused with the errors named here, never with any other; in bounded time and memory.
Where bytes come sealed, the target seals them properly first: what a member can send is what must be survived.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import inspect

from kakeya_zmq.audit import parse_entry
from kakeya_zmq.blocks import part_checksum
from kakeya_zmq.codecs.geometry import RowGeometry
from kakeya_zmq.codecs.link import FrameDecoder, FrameEncoder
from kakeya_zmq.codecs.registry import STORAGE_CODECS, codec_from_format, storage_codec
from kakeya_zmq.compat import CACHE_FORMAT_VERSION
from kakeya_zmq.config import resolve_settings
from kakeya_zmq.io.addresses import parse_address, parse_port_range
from kakeya_zmq.io.assembler import Assembler, PartFilter
from kakeya_zmq.io.gate import _parse
from kakeya_zmq.known_nodes import KNOWN_NODES_FILE, load_known_nodes
from kakeya_zmq.protocol import session
from kakeya_zmq.protocol.effects import RequestArrived, RequestKey, WantedPart
from kakeya_zmq.protocol.revocation import RevocationBook
from kakeya_zmq.protocol.work_door import JobDoor
from kakeya_zmq.protocol.work_job import WorkSettings, check_submission
from kakeya_zmq.revocation_file import REVOCATIONS_FILE, load_revocations
from kakeya_zmq.roster import ROSTER_FILE, Roster
from tests.unit.preparation_kit import FINGERPRINT, FULL, TENANT_KEY, facts_of
from tests.unit.test_cards import IDENTITY, make_card
from tests.unit.test_codec import CLIENT, HELLO, SERVER, WELCOME
from tests.vectors.describe import Maker
from wire import bus, cards, chunks, codec, events, handshake, limits, messages, revocations
from wire.bulk import ChunkSealer
from wire.errors import ConfigError, DataLossError, RemoteProtocolError, RequestFailed
from wire.frames import FrameKind, Header, split_frames
from wire.ids import NodeId
from wire.job_seal import PREFIX_BYTES, JobBinding, JobKeys
from wire.keyring import KeyRing
from wire.keys import KEY_RING_HEADER, CurvePair, FleetKey, NodeIdentity, split_keys

Target = Callable[[bytes], object]
KEY: Final = FleetKey(b"a fleet key for fuzzing only")
TOKENS: Final = 3


@dataclass(frozen=True)
class Fuzzed:
    """A reader of bytes, valid examples of what it reads, and how it may refuse."""

    run: Target
    seeds: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (RemoteProtocolError,)


class _Random:
    """Different bytes each time, the same in every run."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, count: int) -> bytes:
        self._count += 1
        return hashlib.shake_128(self._count.to_bytes(8, "big")).digest(count)


def _node(name: str) -> session.LocalNode:
    identity = NodeIdentity(hashlib.sha256(name.encode()).digest())
    return session.LocalNode(node_id=name, identity=identity, roles=("cache",), incarnation=1, software="")


class SessionTarget:
    """A server with one session: what is fuzzed is the plaintext of sealed messages, and frames as they are."""

    def __init__(self) -> None:
        self._random = _Random()
        self._keys = handshake.HandshakeKeys(KEY)
        self._open()

    def _open(self) -> None:
        self._server = session.ServerSessions(local=_node("server"), fleet_key=KEY, random_bytes=self._random)
        client = _node("client")
        own = CurvePair.from_secret(self._random(32))
        hello = messages.Hello(
            node_id=client.node_id,
            identity_public_key=client.identity.public_key,
            ephemeral_public_key=own.public,
            incarnation=1,
            roles=client.roles,
            software="",
            signature=b"",
        )
        frames = handshake.seal_hello(hello, client.identity, self._keys, self._random)
        (answer,) = self._server.on(session.RouterFrames(b"r", frames), 0.0)
        assert isinstance(answer, session.RouteTransmit)
        header, body = split_frames(answer.frames)
        welcome = handshake.open_welcome(header, body, self._keys, handshake.hash_hello(frames))
        keys = handshake.agree_on_keys(self._keys, own, welcome.ephemeral_public_key, welcome)
        self._channel = handshake.Channel(
            session_id=welcome.session_id,
            key_id=self._keys.key_id,
            send_key=keys.client_to_server,
            receive_key=keys.server_to_client,
        )
        self._sent = 0

    def sealed(self, data: bytes) -> None:
        self._sent += 1
        if self._sent > 500 or not self._server._sessions:
            self._open()
        self._server.on(session.RouterFrames(b"r", self._channel.seal(data[:100_000])), 0.0)

    def frames(self, data: bytes) -> None:
        at = min(36, len(data))
        self._server.on(session.RouterFrames(b"r", (data[:at], data[at:])), 0.0)


class JobTarget:
    """Prompts of jobs: as they are, and what is under a proper seal."""

    def __init__(self) -> None:
        self._keys = JobKeys(TENANT_KEY)
        self._binding = JobBinding(FINGERPRINT, bytes(16), bytes(32), IDENTITY.public_key)
        self._facts = facts_of(FULL)
        self.seed = self._keys.seal(self._binding, bytes(PREFIX_BYTES), codec.pack_tokens([1, 2, 3]))

    def sealed(self, data: bytes) -> None:
        self._keys.open(self._binding, data)

    def opened(self, data: bytes) -> None:
        body = messages.SubmitJob(
            job_id=self._binding.job_id,
            fingerprint=FINGERPRINT,
            prompt=self._keys.seal(self._binding, bytes(PREFIX_BYTES), data[:100_000]),
            have_tokens=0,
            suites=(messages.CipherSuite.SECRETBOX,),
            chunk_bytes_max=1 << 20,
            credit_bytes=1 << 20,
        )
        request = RequestArrived(RequestKey((bytes(16), 1)), NodeId("n"), (), body, 1.0, self._binding.asker_key)
        submission = JobDoor(self._keys, FINGERPRINT, IDENTITY.public_key).open(request, body)
        check_submission(body, submission.packed_tokens, self._facts, WorkSettings())


class BusTarget:
    """Bus messages: as they are, and with the payload sealed properly."""

    def __init__(self) -> None:
        self._keys = {bus.Group.FLEET: bytes(32), bus.Group.TELEMETRY: bytes(32)}
        self.seed = b"".join(self._sealed(bus.Topic.NODE, b"\x80"))

    def _sealed(self, topic: bus.Topic, payload: bytes) -> list[bytes]:
        identity = NodeIdentity(bytes(32))
        message = bus.BusMessage("n", topic, 1, 1, payload, identity.public_key)  # type: ignore[arg-type]
        return bus.seal_message(message, identity, bytes(32), lambda count: bytes(count))

    def frames(self, data: bytes) -> None:
        length = int.from_bytes(data[5:7], "big") % 1024 if len(data) > 7 else 0
        end = 1 + 22 + length
        bus.open_message([data[:1], data[1:end], data[end:]], self._keys)

    @staticmethod
    def event(data: bytes) -> None:
        topics = list(events.EVENT_TYPES)
        if data:
            events.decode_event(topics[data[0] % len(topics)], data[1:])


class AssemblerTarget:
    """A transfer whose sender has the key and says what it likes: kind, flags, batch and content of each chunk."""

    def __init__(self, suite: messages.CipherSuite, link_codec: messages.LinkCodec) -> None:
        self._suite = suite
        self._link_codec = link_codec
        payload = bytes(range(200))
        self._meta = messages.PartMeta(
            block_hash=bytes(32),
            parent_hash=bytes(32),
            kind=messages.PartKind.FULL,
            start=0,
            token_count=64,
            length_bytes=len(payload),
            digest=hashlib.sha256(payload).digest(),
            checksum=part_checksum(payload),
        )
        self._wanted = replace(WantedPart.like(self._meta), bytes_min=1, bytes_max=limits.PART_BYTES_MAX)
        manifest = chunks.encode_manifest([self._meta])
        if link_codec is not messages.LinkCodec.NONE:
            payload = bytes(FrameEncoder("zstd").encode([memoryview(payload)], 1))
        self.seed = b"".join(
            bytes([kind, flags]) + len(content).to_bytes(2, "big") + content
            for kind, flags, content in ((1, 0, manifest), (2, 1, payload))
        )

    def __call__(self, data: bytes) -> None:
        grant = messages.TransferGrant(
            transfer_id=bytes(16),
            port=1,
            token="0" * 32,
            key=bytes(32),
            suite=self._suite,
            chunk_bytes=1 << 16,
            link_codec=self._link_codec,
        )
        filter_ = PartFilter({(self._meta.block_hash, self._meta.kind): self._wanted}, 1 << 20)
        assembler = Assembler(grant, filter_, verify_digests=True)
        sealer = ChunkSealer(self._suite, bytes(32))
        index = 0
        while len(data) >= 4 and index < 8:
            length = int.from_bytes(data[2:4], "big")
            kind, flags, content, data = data[0], data[1], data[4 : 4 + length], data[4 + length :]
            kind_of = chunks.ChunkKind.MANIFEST if kind & 1 else chunks.ChunkKind.DATA
            header = chunks.ChunkHeader(kind_of, bool(flags & 1), bytes(16), index, kind >> 4, len(content))
            packed = header.pack()
            sealed = bytearray(len(content) + 16)
            sealer.seal_into(packed, index, [memoryview(content)], memoryview(sealed))
            assembler.on_chunk(packed, header, memoryview(sealed))
            index += 1


GEOMETRY: Final = RowGeometry("float32", ((2, 8), (1, 4)))


def _stored(name: str) -> tuple[Target, bytes]:
    found = storage_codec(name)
    raw = np.linspace(-3, 3, GEOMETRY.channels * TOKENS, dtype=np.float32).tobytes()
    seed = bytes(found.encode(memoryview(raw), GEOMETRY, TOKENS))
    return lambda data: found.decode(memoryview(data), GEOMETRY, TOKENS), seed


def _link() -> tuple[Target, tuple[bytes, ...]]:
    payload, decoder = memoryview(bytes(200)), FrameDecoder()
    seeds = tuple(
        bytes(FrameEncoder(name).encode([payload], width)) for name in ("none", "zlib", "zstd") for width in (1, 4)
    )
    return lambda data: decoder.decode(memoryview(data), [memoryview(bytearray(200))]), seeds


class FileTarget:
    """Readers of files, through one file in memory or on disk."""

    def __init__(self, name: str, read: Callable[[Path], object]) -> None:
        shared = Path("/dev/shm")
        folder = tempfile.mkdtemp(dir=shared if shared.is_dir() and os.access(shared, os.W_OK) else None)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._path = Path(folder) / name
        self._read = read

    def __call__(self, data: bytes) -> None:
        self._path.write_bytes(data)
        self._read(self._path)


def _revocation() -> bytes:
    key = IDENTITY.public_key
    statement = revocations.Revocation(
        node_id="lost", identity_public_key=bytes(32), issuer_id="me", issuer_public_key=key, issued_at_unix=1.0
    )
    return revocations.sign_revocation(statement, IDENTITY)


def _unpack_bitmap(data: bytes) -> None:
    codec.unpack_bitmap(data[1:], data[0] if data else 0)


def _text(read: Callable[[str], object]) -> Target:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


def _zap(data: bytes) -> None:
    _parse(data.split(b"|"))


def _settings(path: Path) -> Any:
    return resolve_settings("cache", {}, environment={}, file=path, host_name=lambda: "host")


@cache
def targets() -> dict[str, Fuzzed]:
    """Every reader by name."""
    sessions, buses, jobs, (link, link_seeds) = SessionTarget(), BusTarget(), JobTarget(), _link()
    client = tuple(map(codec.encode_client, CLIENT))
    server = tuple(map(codec.encode_server, SERVER))
    card = cards.sign_card(make_card(), IDENTITY)
    header = Header(kind=FrameKind.HELLO, key_id=bytes(8)).pack()
    chunk_header = chunks.ChunkHeader(chunks.ChunkKind.DATA, True, bytes(16), 0, 0, 10).pack()
    version = CACHE_FORMAT_VERSION.encode() + b"-kl-d4-q38"
    event_seeds = tuple(
        bytes([number]) + events.encode_event(Maker().make(inspect.type_info(kind)))
        for number, kind in enumerate(events.EVENT_TYPES.values())
    )
    damaged = (RemoteProtocolError, DataLossError)
    found = {
        "header": Fuzzed(Header.unpack, (header,)),
        "frames": Fuzzed(lambda data: split_frames((data[:36], data[36:])), (header + bytes(50),)),
        "client envelope": Fuzzed(codec.decode_client, client),
        "server envelope": Fuzzed(codec.decode_server, server),
        "hello": Fuzzed(codec.decode_hello, (codec.encode_hello(HELLO),)),
        "welcome": Fuzzed(codec.decode_welcome, (codec.encode_welcome(WELCOME),)),
        "session, sealed": Fuzzed(sessions.sealed, client, ()),
        "session, frames": Fuzzed(sessions.frames, (header + bytes(50),), ()),
        "prompt of a job": Fuzzed(jobs.sealed, (jobs.seed,)),
        "tokens of a job": Fuzzed(jobs.opened, (codec.pack_tokens([1, 2, 3]),), (RequestFailed,)),
        "tokens": Fuzzed(codec.unpack_tokens, (codec.pack_tokens([1, 2, 3]),)),
        "hashes": Fuzzed(codec.unpack_hashes, (bytes(64),)),
        "bitmap": Fuzzed(_unpack_bitmap, (b"\x09\x01\x01",)),
        "card": Fuzzed(cards.open_card, (card,)),
        "card digest": Fuzzed(cards.unpack_digest, (bytes(24),)),
        "card marks": Fuzzed(cards.unpack_marks, (bytes(8),)),
        "bus message": Fuzzed(buses.frames, (buses.seed,)),
        "telemetry event": Fuzzed(buses.event, event_seeds),
        "chunk header": Fuzzed(chunks.ChunkHeader.unpack, (chunk_header,)),
        "manifest": Fuzzed(lambda data: chunks.decode_manifest(data), (chunks.encode_manifest([]),)),
        "link frame": Fuzzed(link, link_seeds, damaged),
        "format version": Fuzzed(_text(codec_from_format), (version,), (ConfigError,)),
        "configuration": Fuzzed(
            FileTarget("kakeya.toml", _settings), (b'peer = ["a:1"]\n[cache]\ncache_gb = 2\n',), (ConfigError,)
        ),
        "known nodes": Fuzzed(
            FileTarget(KNOWN_NODES_FILE, lambda path: load_known_nodes(path.parent)),
            (b'{"n": "' + b"00" * 32 + b'"}',),
            (ConfigError,),
        ),
        "revocation": Fuzzed(revocations.open_revocation, (_revocation(),)),
        "kept revocations": Fuzzed(
            FileTarget(REVOCATIONS_FILE, lambda path: RevocationBook(lambda key: True, load_revocations(path.parent))),
            (f'["{_revocation().hex()}"]'.encode(),),
            (ConfigError,),
        ),
        "roster": Fuzzed(
            FileTarget(ROSTER_FILE, Roster.load),
            (b'[nodes.n]\nkey = "' + b"ab" * 32 + b'"\nroles = ["cache"]\n[tenants.t]\nquota_gb = 1\n',),
            (ConfigError,),
        ),
        "fleet keys": Fuzzed(
            lambda data: KeyRing(tuple(map(FleetKey, split_keys(data)))),
            (KEY_RING_HEADER + b"\n" + b"k" * 32 + b"\n" + b"o" * 32 + b"\n# end of 2 keys",),
            (ConfigError,),
        ),
        "audit line": Fuzzed(parse_entry, (b'{"kind": "x"}',), ()),
        "admission request": Fuzzed(_zap, (b"r||1.0|1|d|127.0.0.1||CURVE|" + bytes(32),), ()),
        "address": Fuzzed(_text(parse_address), (b"[::1]:80", b"a:1"), (ConfigError,)),
        "port range": Fuzzed(_text(parse_port_range), (b"1-2",), (ConfigError,)),
    }
    for suite in messages.CipherSuite:
        for link_codec in (messages.LinkCodec.NONE, messages.LinkCodec.ZSTD):
            assembler = AssemblerTarget(suite, link_codec)
            found[f"transfer, {suite.name.lower()}, {link_codec.name.lower()}"] = Fuzzed(
                assembler, (assembler.seed,), damaged
            )
    for name in STORAGE_CODECS:
        stored, seed = _stored(name)
        found[f"stored part, {name}"] = Fuzzed(stored, (seed,), damaged)
    return found
