"""A second implementation of the wire, written from docs/protocol.md alone: nothing of the project is imported here.

It serves two ends: it reads the test vectors, which proves that the document says enough; and the attack tests speak with
it, so that no cleverness of the real client can make an attack fail for the wrong reason.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from nacl import bindings
from nacl.signing import SigningKey, VerifyKey

HELLO: Final = 1
WELCOME: Final = 2
SEALED: Final = 3
UNKNOWN_SESSION: Final = 4
NO_SESSION: Final = bytes(16)
NO_SIGNATURE: Final = bytes(64)

CONTROL_HEADER: Final = struct.Struct("<2sBB8s16sQ")
CHUNK_HEADER: Final = struct.Struct(">2sBBB16sIII")
BUS_HEADER: Final = struct.Struct(">2sBBHQQ")


def blake2b(data: bytes, size: int, *, key: bytes = b"", person: str = "", salt: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=size, key=key, person=person.encode(), salt=salt).digest()


# --- keys ----------------------------------------------------------------------------------------------------------


def root_key(psk: bytes) -> bytes:
    return psk if len(psk) <= 64 else blake2b(psk, 64, person="kz long psk")


def key_id(psk: bytes) -> bytes:
    return blake2b(b"", 8, key=root_key(psk), person="kz key id")


def purpose_key(psk: bytes, purpose: str) -> bytes:
    return blake2b(b"", 32, key=root_key(psk), person=purpose, salt=key_id(psk).ljust(16, b"\0"))


def curve_pair(secret: bytes) -> tuple[bytes, bytes]:
    """(public, secret)"""
    return bindings.crypto_scalarmult_base(secret), secret


def telemetry_seal_key(telemetry_key: bytes) -> bytes:
    return blake2b(b"", 32, key=telemetry_key, person="kz telemetry sea")


def bus_curve_pair(telemetry_key: bytes) -> tuple[bytes, bytes]:
    return curve_pair(blake2b(b"", 32, key=telemetry_key, person="kz curve bus"))


# --- control plane ---------------------------------------------------------------------------------------------------


def pack_header(kind: int, key: bytes, session: bytes = NO_SESSION, counter: int = 0, version: int = 1) -> bytes:
    return CONTROL_HEADER.pack(b"KZ", version, kind, key, session, counter)


def unpack_header(header: bytes) -> tuple[int, bytes, bytes, int]:
    """(kind, key id, session id, counter)"""
    magic, version, kind, key, session, counter = CONTROL_HEADER.unpack(header)
    assert (magic, version) == (b"KZ", 1)
    return kind, key, session, counter


def seal(key: bytes, header: bytes, plaintext: bytes) -> bytes:
    return bindings.crypto_secretbox(plaintext, blake2b(header, 24), key)


def open_sealed(key: bytes, header: bytes, body: bytes) -> bytes:
    return bindings.crypto_secretbox_open(body, blake2b(header, 24), key)


def seal_prefixed(key: bytes, header: bytes, plaintext: bytes, prefix: bytes | None = None) -> bytes:
    prefix = os.urandom(24) if prefix is None else prefix
    return prefix + seal(key, header + prefix, plaintext)


def open_prefixed(key: bytes, header: bytes, body: bytes) -> bytes:
    return open_sealed(key, header + body[:24], body[24:])


def sign_fields(signing: SigningKey, context: bytes, fields: list[Any]) -> list[Any]:
    """The last field is the signature over all of them, itself as 64 zero bytes."""
    unsigned = msgpack.packb([*fields[:-1], NO_SIGNATURE])
    return [*fields[:-1], bytes(signing.sign(context + unsigned).signature)]


def check_fields(public_key: bytes, context: bytes, fields: list[Any]) -> None:
    unsigned = msgpack.packb([*fields[:-1], NO_SIGNATURE])
    VerifyKey(public_key).verify(context + unsigned, fields[-1])


@dataclass
class Identity:
    """Who one claims to be."""

    node_id: str
    signing: SigningKey

    @classmethod
    def new(cls, node_id: str) -> Identity:
        return cls(node_id, SigningKey.generate())

    @property
    def public(self) -> bytes:
        return bytes(self.signing.verify_key)


def make_hello(
    psk: bytes, who: Identity, ephemeral_public: bytes, *, incarnation: int = 1, roles: tuple[str, ...] = ("client",)
) -> tuple[bytes, bytes]:
    """The two frames of a HELLO."""
    fields = [who.node_id, who.public, ephemeral_public, incarnation, list(roles), "independent", NO_SIGNATURE]
    header = pack_header(HELLO, key_id(psk))
    body = msgpack.packb(sign_fields(who.signing, b"kakeya-zmq hello\0", fields))
    return header, seal_prefixed(purpose_key(psk, "kz hello"), header, body)


def read_hello(psk: bytes, header: bytes, body: bytes) -> list[Any]:
    fields: list[Any] = msgpack.unpackb(open_prefixed(purpose_key(psk, "kz hello"), header, body))
    check_fields(fields[1], b"kakeya-zmq hello\0", fields)
    return fields


def read_welcome(psk: bytes, hello: tuple[bytes, bytes], header: bytes, body: bytes) -> list[Any]:
    """The fields of a WELCOME that answers ``hello``."""
    kind, _, session, _ = unpack_header(header)
    assert kind == WELCOME
    fields: list[Any] = msgpack.unpackb(open_prefixed(purpose_key(psk, "kz welcome"), header, body))
    check_fields(fields[1], b"kakeya-zmq welcome\0", fields)
    assert fields[6] == session
    assert fields[7] == hello_hash(hello)
    return fields


def hello_hash(hello: tuple[bytes, bytes]) -> bytes:
    return blake2b(hello[0] + hello[1], 32, person="kz hello hash")


def session_keys(psk: bytes, secret: bytes, peer_public: bytes, welcome: list[Any]) -> tuple[bytes, bytes]:
    """(client to server, server to client)"""
    unsigned = msgpack.packb([*welcome[:-1], NO_SIGNATURE])
    data = bindings.crypto_scalarmult(secret, peer_public) + welcome[7] + blake2b(unsigned, 32, person="kz welcome hash")
    key = purpose_key(psk, "kz session")
    return blake2b(data, 32, key=key, person="kz session c>s"), blake2b(data, 32, key=key, person="kz session s>c")


@dataclass
class Session:
    """The client's end of a session."""

    key_id: bytes
    session_id: bytes
    send_key: bytes
    receive_key: bytes
    counter: int = 0

    def seal(self, message: Any, *, counter: int | None = None) -> tuple[bytes, bytes]:
        """The frames of a message; ``counter``: another one than the next."""
        if counter is None:
            self.counter += 1
            counter = self.counter
        header = pack_header(SEALED, self.key_id, self.session_id, counter)
        return header, seal(self.send_key, header, msgpack.packb(message))

    def open(self, header: bytes, body: bytes) -> Any:
        assert unpack_header(header)[0] == SEALED
        return msgpack.unpackb(open_sealed(self.receive_key, header, body))


def start_session(psk: bytes, secret: bytes, hello: tuple[bytes, bytes], header: bytes, body: bytes) -> Session:
    """The session that a WELCOME opens."""
    welcome = read_welcome(psk, hello, header, body)
    send_key, receive_key = session_keys(psk, secret, welcome[2], welcome)
    return Session(key_id(psk), welcome[6], send_key, receive_key)


# --- names of KV -----------------------------------------------------------------------------------------------------


def fingerprint(compatibility: dict[str, Any]) -> bytes:
    text = json.dumps(compatibility, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()


def block_hash(tenant_key: bytes, namespace: bytes, parent: bytes, tokens: list[int]) -> bytes:
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    return hmac.new(tenant_key, namespace + parent + packed, hashlib.sha256).digest()


# --- bulk plane --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    kind: int
    flags: int
    transfer_id: bytes
    index: int
    batch: int
    plaintext: bytes


def open_chunk(suite: int, key: bytes, header: bytes, sealed: bytes) -> Chunk:
    magic, version, kind, flags, transfer_id, index, batch, length = CHUNK_HEADER.unpack(header)
    assert (magic, version) == (b"KC", 1)
    if suite == 2:
        plaintext = AESGCM(key).decrypt(index.to_bytes(12, "big"), sealed, header)
    else:
        plaintext = bindings.crypto_secretbox_open(sealed, blake2b(header, 24), key)
    assert len(plaintext) == length
    return Chunk(kind, flags, transfer_id, index, batch, plaintext)


def pack_chunk_header(kind: int, flags: int, transfer_id: bytes, index: int, batch: int, length: int) -> bytes:
    return CHUNK_HEADER.pack(b"KC", 1, kind, flags, transfer_id, index, batch, length)


def seal_chunk(suite: int, key: bytes, header: bytes, plaintext: bytes) -> bytes:
    index = CHUNK_HEADER.unpack(header)[5]
    if suite == 2:
        return AESGCM(key).encrypt(index.to_bytes(12, "big"), plaintext, header)
    return bindings.crypto_secretbox(plaintext, blake2b(header, 24), key)


# --- jobs --------------------------------------------------------------------------------------------------------------


def job_binding(namespace: bytes, job_id: bytes, asker_key: bytes, worker_key: bytes) -> bytes:
    assert (len(namespace), len(job_id), len(asker_key), len(worker_key)) == (32, 16, 32, 32)
    return namespace + job_id + asker_key + worker_key


def seal_job_prompt(tenant_key: bytes, binding: bytes, prefix: bytes, tokens: bytes) -> bytes:
    key = blake2b(b"", 32, key=tenant_key, person="kz job prompt")
    return prefix + bindings.crypto_secretbox(tokens, blake2b(binding + prefix, 24), key)


def open_job_prompt(tenant_key: bytes, binding: bytes, sealed: bytes) -> bytes:
    key = blake2b(b"", 32, key=tenant_key, person="kz job prompt")
    return bindings.crypto_secretbox_open(sealed[24:], blake2b(binding + sealed[:24], 24), key)


def job_proof(tenant_key: bytes, binding: bytes, sealed: bytes) -> bytes:
    key = blake2b(b"", 32, key=tenant_key, person="kz job proof")
    return blake2b(binding + sealed[:24], 32, key=key, person="kz job proof")


# --- bus and cards -----------------------------------------------------------------------------------------------------


def bus_signed(group_key: bytes, header: bytes, payload: bytes) -> bytes:
    return b"kakeya-zmq bus\0" + blake2b(b"", 16, key=group_key, person="kz bus group") + header + payload


def open_bus_message(group_key: bytes, frames: list[bytes]) -> tuple[str, int, int, int, bytes, bytes]:
    """(node id, topic, incarnation, sequence, payload, identity public key)"""
    topic, header, sealed = frames
    magic, version, number, length, incarnation, sequence = BUS_HEADER.unpack_from(header)
    assert (magic, version, topic) == (b"KB", 1, bytes([number]))
    node_id = header[BUS_HEADER.size :]
    assert len(node_id) == length
    key = blake2b(header, 32, key=group_key, person="kakeya-bus-v2")
    content = bindings.crypto_secretbox_open(sealed[24:], sealed[:24], key)
    public_key, signature, payload = content[:32], content[32:96], content[96:]
    VerifyKey(public_key).verify(bus_signed(group_key, header, payload), signature)
    return node_id.decode(), number, incarnation, sequence, payload, public_key


def seal_bus_message(
    group_key: bytes, who: Identity, topic: int, incarnation: int, sequence: int, payload: bytes, *, name: str = ""
) -> list[bytes]:
    """The frames of a message, under another name than the signer's where one is given."""
    node_id = (name or who.node_id).encode()
    header = BUS_HEADER.pack(b"KB", 1, topic, len(node_id), incarnation, sequence) + node_id
    signature = bytes(who.signing.sign(bus_signed(group_key, header, payload)).signature)
    nonce = os.urandom(24)
    key = blake2b(header, 32, key=group_key, person="kakeya-bus-v2")
    return [bytes([topic]), header, nonce + bindings.crypto_secretbox(who.public + signature + payload, nonce, key)]


def sign_card(signing: SigningKey, fields: list[Any]) -> bytes:
    body = msgpack.packb(fields)
    return msgpack.packb([body, bytes(signing.sign(b"kakeya-zmq card\0" + body).signature)])


def sign_revocation(signing: SigningKey, fields: list[Any]) -> bytes:
    statement = msgpack.packb(fields)
    return msgpack.packb([statement, bytes(signing.sign(b"kakeya-zmq revocation\0" + statement).signature)])


def read_revocation(data: bytes) -> list[Any]:
    statement, signature = msgpack.unpackb(data)
    fields: list[Any] = msgpack.unpackb(statement)
    VerifyKey(fields[3]).verify(b"kakeya-zmq revocation\0" + statement, signature)
    return fields


def read_card(data: bytes) -> list[Any]:
    body, signature = msgpack.unpackb(data)
    fields: list[Any] = msgpack.unpackb(body)
    VerifyKey(fields[1]).verify(b"kakeya-zmq card\0" + body, signature)
    return fields
