"""One protection at a time, with it and without it, on the same work. Seconds for each unit of work.

Control messages go to and fro between two sockets on one thread, so that nothing but the path itself is measured.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import numpy as np
import xxhash
import zmq

from daemons.bench.harness import serve
from daemons.bench.programs.bytes_source import pieces
from kakeya_zmq.compat import chain_hashes
from kakeya_zmq.io.gate import Gate
from kakeya_zmq.io.sockets import apply_curve_client, apply_curve_server
from kakeya_zmq.protocol.limits import RequestLimiter, RequestLimits
from kakeya_zmq.roster import Access, Roster, RosterNode
from wire import handshake
from wire.bulk import ChunkSealer
from wire.codec import decode_client, decode_hello, encode_client, encode_hello
from wire.frames import Header
from wire.job_seal import PREFIX_BYTES, JobBinding, JobKeys
from wire.keys import FleetKey, NodeIdentity
from wire.limits import MIB
from wire.messages import CipherSuite, GetStatus, Hello, Ping, Request

BLOCK_TOKENS = 64
HEADER = bytes(33)
DOMAIN = "control/bench"


class Link:
    """A DEALER and a ROUTER in one thread, with CURVE or without."""

    def __init__(self, *, curve: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._context) if curve else None
        self._router = self._context.socket(zmq.ROUTER)
        self._dealer = self._context.socket(zmq.DEALER)
        if self._gate is not None:
            key = FleetKey(secrets.token_bytes(32))
            self._gate.allow_curve(DOMAIN, {key.curve_client().public})
            apply_curve_server(self._router, key.curve_server(), DOMAIN)
            apply_curve_client(self._dealer, key.curve_server().public, key.curve_client())
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._dealer.connect(f"tcp://127.0.0.1:{port}")

    def round_trip(self, frames: tuple[bytes, ...], answer: Callable[[list[bytes]], tuple[bytes, ...]]) -> list[bytes]:
        self._dealer.send_multipart(frames)
        route, *received = self._router.recv_multipart()
        self._router.send_multipart([route, *answer(received)])
        return self._dealer.recv_multipart()

    def close(self) -> None:
        self._dealer.close(0)
        self._router.close(0)
        if self._gate is not None:
            self._gate.close()
        self._context.term()


def control(curve: bool, sealed: bool, times: int) -> float:
    """A request and its answer."""
    link = Link(curve=curve)
    ours, theirs = _channels()
    request = Request(request_id=1, deadline_ms=1000, body=GetStatus())

    def plain(frames: list[bytes]) -> tuple[bytes, ...]:
        decode_client(frames[-1])
        return (b"", encode_client(Ping()))

    def opened(frames: list[bytes]) -> tuple[bytes, ...]:
        decode_client(theirs.open(Header.unpack(frames[0]), frames[1]))
        return theirs.seal(encode_client(Ping()))

    def once() -> None:
        if sealed:
            header, body = link.round_trip(ours.seal(encode_client(request)), opened)
            decode_client(ours.open(Header.unpack(header), body))
        else:
            decode_client(link.round_trip((b"", encode_client(request)), plain)[-1])

    try:
        once()  # the connection and its handshake
        return _each(once, times)
    finally:
        link.close()


def _channels() -> tuple[handshake.Channel, handshake.Channel]:
    session, one, other = secrets.token_bytes(16), secrets.token_bytes(32), secrets.token_bytes(32)
    return (
        handshake.Channel(session_id=session, key_id=bytes(8), send_key=one, receive_key=other),
        handshake.Channel(session_id=session, key_id=bytes(8), send_key=other, receive_key=one),
    )


def chunk(suite: int, total_bytes: int) -> float:
    """A MiB sealed into a buffer and opened out of it into another; suite 0 copies it instead."""
    parts = pieces(total_bytes, MIB)
    sealed, plain = memoryview(bytearray(MIB + 64)), memoryview(bytearray(MIB))
    sealer = ChunkSealer(CipherSuite(suite), secrets.token_bytes(32)) if suite else None
    began = time.perf_counter()
    for index, part in enumerate(parts):
        if sealer is None:
            sealed[: len(part)] = part
            plain[:] = sealed[: len(part)]
        else:
            length = sealer.seal_into(HEADER, index, [part], sealed)
            sealer.open_into(HEADER, index, sealed[:length], plain)
    return (time.perf_counter() - began) / len(parts)


def verify(kind: str, total_bytes: int) -> float:
    """A MiB copied to where it stays, and checked or not."""
    parts = pieces(total_bytes, MIB)
    kept = memoryview(bytearray(MIB))
    began = time.perf_counter()
    for part in parts:
        kept[:] = part
        if kind == "checksum":
            xxhash.xxh3_64_digest(kept)
        elif kind == "digest":
            hashlib.sha256(kept).digest()
    return (time.perf_counter() - began) / len(parts)


def hashing(keyed: bool, tokens: int, times: int) -> float:
    """The names of a prompt's blocks."""
    prompt = np.arange(tokens, dtype=np.int32)
    key, fingerprint = secrets.token_bytes(32), secrets.token_bytes(32)

    def unkeyed() -> None:
        parent, data = bytes(32), prompt.tobytes()
        for start in range(0, len(data), 4 * BLOCK_TOKENS):
            parent = hashlib.sha256(fingerprint + parent + data[start : start + 4 * BLOCK_TOKENS]).digest()

    return _each(lambda: chain_hashes(prompt, fingerprint, key, BLOCK_TOKENS), times) if keyed else _each(unkeyed, times)


def job(sealed: bool, tokens: int, times: int) -> float:
    """A prompt on its way from a primary to its worker, with what both do to trust each other, or as plain bytes."""
    prompt = np.arange(tokens, dtype=np.int32)
    keys = JobKeys(secrets.token_bytes(32))

    def once() -> None:
        packed = prompt.astype("<i4", copy=False).tobytes()
        if sealed:
            binding = JobBinding(bytes(32), secrets.token_bytes(16), bytes(32), bytes(32))
            message = keys.seal(binding, secrets.token_bytes(PREFIX_BYTES), packed)
            packed = keys.open(binding, message)
            hmac.compare_digest(keys.proof(binding, message), keys.proof(binding, message))
        np.frombuffer(packed, dtype="<i4")

    return _each(once, times)


def admission(checked: str, times: int) -> float:
    """What a request passes before it is looked at."""
    limiter = RequestLimiter(RequestLimits(requests_per_s=1e6, lookups_per_s=1e6, publishes_per_s=1e6, jobs_per_s=1e6))
    access, body = Access(), GetStatus()
    access.roster = Roster({"node": RosterNode(bytes(32), frozenset({"primary"}), frozenset({"default"}))})
    clock = time.monotonic

    def once() -> None:
        now = clock()
        if checked == "limiter":
            limiter.admit("node", body, 64, now)
            limiter.release("node", 64)
        elif checked == "roster":
            access.refusal("node", ("primary",), body)
            access.hides("node", HEADER)

    return _each(once, times)


def hello(signed: bool, times: int) -> float:
    """A HELLO made and read: with signature, seal and a fresh key, or as plain bytes."""
    fleet, identity = FleetKey(secrets.token_bytes(32)), NodeIdentity.generate()
    keys = handshake.HandshakeKeys(fleet)

    def made(ephemeral_public_key: bytes) -> Hello:
        return Hello(
            node_id="n",
            identity_public_key=identity.public_key,
            ephemeral_public_key=ephemeral_public_key,
            incarnation=1,
            roles=("client",),
            software="",
            signature=bytes(64),
        )

    plain = made(bytes(32))

    def once() -> None:
        if not signed:
            decode_hello(encode_hello(plain))
            return
        ephemeral = handshake.new_ephemeral(secrets.token_bytes)
        header, body = handshake.seal_hello(made(ephemeral.public), identity, keys, secrets.token_bytes)
        handshake.open_hello(Header.unpack(header), body, keys)

    return _each(once, times)


def _each(once: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        once()
    return (time.perf_counter() - began) / times


def main() -> None:
    def answer(work: Callable[..., float]) -> Callable[..., dict[str, object]]:
        return lambda **arguments: {"seconds": work(**arguments)}

    works: dict[str, Callable[..., float]] = {
        "control": control,
        "chunk": chunk,
        "verify": verify,
        "hashing": hashing,
        "job": job,
        "admission": admission,
        "hello": hello,
    }
    serve({name: answer(work) for name, work in works.items()})


if __name__ == "__main__":
    main()
