"""Makes the test vectors: ``python -m tests.vectors.generate`` writes them anew. Everything in them is made up and fixed.

A change of these files is a change of the wire: it needs a new protocol version, or must be one that old readers survive.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
from msgspec import inspect

from kakeya_zmq.blocks import part_checksum
from kakeya_zmq.compat import Compatibility, chain_hashes
from tests.vectors.describe import Maker, plain
from wire import bus, cards, handshake, messages
from wire.bulk import ChunkSealer
from wire.chunks import ChunkHeader, ChunkKind, encode_manifest
from wire.codec import encode_client, encode_server, pack_bitmap, pack_tokens
from wire.job_seal import JobBinding, JobKeys
from wire.keys import CurvePair, FleetKey, NodeIdentity, Purpose

FOLDER: Final = Path(__file__).parent
PSK: Final = b"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
LONG_PSK: Final = b"a longer passphrase than anybody should use for this " * 2


class Source:
    """Bytes that look random and are always the same."""

    def __init__(self, name: str) -> None:
        self._state = name.encode()

    def __call__(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._state = hashlib.sha256(self._state).digest()
            data += self._state
        return data[:count]


def vectors() -> dict[str, Any]:
    """File name → content."""
    return {
        "keys.json": [key_vector(PSK), key_vector(LONG_PSK)],
        "handshake.json": handshake_vector(),
        "messages.json": message_vectors(),
        "bulk.json": bulk_vectors(),
        "bus.json": bus_vectors(),
        "names.json": name_vectors(),
        "jobs.json": job_vectors(),
    }


def key_vector(psk: bytes) -> dict[str, Any]:
    key = FleetKey(psk)
    telemetry = key.telemetry_key()
    return {
        "psk": psk.decode(),
        "key_id": key.key_id.hex(),
        "purposes": {purpose.value: key.derive(purpose).hex() for purpose in Purpose if purpose is not Purpose.CURVE_BUS},
        "curve_server_public": key.curve_server().public.hex(),
        "curve_client_public": key.curve_client().public.hex(),
        "curve_bus_public": telemetry.bus_curve().public.hex(),
        "telemetry_seal": telemetry.seal_key.hex(),
    }


def handshake_vector() -> dict[str, Any]:
    random, keys = Source("handshake"), handshake.HandshakeKeys(FleetKey(PSK))
    client, server = NodeIdentity(random(32)), NodeIdentity(random(32))
    client_secret, server_secret = random(32), random(32)
    hello = messages.Hello(
        node_id="client-e",
        identity_public_key=client.public_key,
        ephemeral_public_key=CurvePair.from_secret(client_secret).public,
        incarnation=1_700_000_000_000_000_000,
        roles=("client",),
        software="kakeya-zmq",
        signature=b"",
    )
    hello_frames = handshake.seal_hello(hello, client, keys, random)
    welcome = messages.Welcome(
        node_id="server",
        identity_public_key=server.public_key,
        ephemeral_public_key=CurvePair.from_secret(server_secret).public,
        incarnation=7,
        roles=("primary", "cache"),
        software="kakeya-zmq",
        session_id=random(16),
        hello_hash=handshake.hash_hello(hello_frames),
        bus_port=50_000,
        signature=b"",
    )
    welcome_frames = handshake.seal_welcome(welcome, server, keys, random)
    session = handshake.agree_on_keys(keys, CurvePair.from_secret(server_secret), hello.ephemeral_public_key, welcome)
    sides = {
        "c": (session.client_to_server, session.server_to_client),
        "s": (session.server_to_client, session.client_to_server),
    }
    channels = {
        side: handshake.Channel(session_id=welcome.session_id, key_id=keys.key_id, send_key=send, receive_key=receive)
        for side, (send, receive) in sides.items()
    }
    asked = [messages.Ping(), messages.Request(request_id=1, deadline_ms=1000, body=messages.GetStatus())]
    answered = [messages.Pong(), messages.Reply(request_id=1, body=messages.Done())]
    return {
        "psk": PSK.decode(),
        "client_secret": client_secret.hex(),
        "hello": [frame.hex() for frame in hello_frames],
        "hello_fields": {**plain(hello), "signature": None},
        "welcome": [frame.hex() for frame in welcome_frames],
        "welcome_fields": {**plain(welcome), "signature": None},
        "client_to_server": session.client_to_server.hex(),
        "server_to_client": session.server_to_client.hex(),
        "from_client": [[frame.hex() for frame in channels["c"].seal(encode_client(each))] for each in asked],
        "from_client_fields": [[type(each).__name__, plain(each)] for each in asked],
        "from_server": [[frame.hex() for frame in channels["s"].seal(encode_server(each))] for each in answered],
        "from_server_fields": [[type(each).__name__, plain(each)] for each in answered],
        "unknown_session": [
            frame.hex() for frame in handshake.seal_unknown_session(welcome.session_id, server, keys, random)
        ],
    }


BODIES: Final = {
    messages.Request: messages.RequestBody,
    messages.Update: messages.UpdateBody,
    messages.Reply: messages.ReplyBody,
    messages.Progress: messages.ProgressBody,
}


def message_vectors() -> list[dict[str, Any]]:
    """One of every envelope with every body it can have."""
    found = []
    client = get_args(messages.ClientEnvelope)
    for envelope in dict.fromkeys((*client, *get_args(messages.ServerEnvelope))):
        for body in get_args(BODIES[envelope]) if envelope in BODIES else (None,):
            maker = Maker()
            content = maker.make(inspect.type_info(body)) if body is not None else None
            message = maker.make(inspect.type_info(envelope), content)
            encoded = encode_client(message) if envelope in client else encode_server(message)
            found.append(
                {
                    "envelope": envelope.__name__,
                    "tag": envelope.__struct_config__.tag,
                    "body": body.__name__ if body is not None else None,
                    "body_tag": body.__struct_config__.tag if body is not None else None,
                    "msgpack": encoded.hex(),
                    "fields": plain(message),
                }
            )
    return found


def bulk_vectors() -> list[dict[str, Any]]:
    random, found = Source("bulk"), []
    payloads = [random(100), random(3)]
    metas = []
    parent = bytes(32)
    for number, payload in enumerate(payloads):
        name = random(32)
        metas.append(
            messages.PartMeta(
                block_hash=name,
                parent_hash=parent,
                kind=messages.PartKind.FULL,
                start=number * 64,
                token_count=64,
                length_bytes=len(payload),
                digest=hashlib.sha256(payload).digest(),
                checksum=part_checksum(payload),
            )
        )
        parent = name
    for suite in messages.CipherSuite:
        key, transfer_id = random(32), random(16)
        sealer = ChunkSealer(suite, key)
        contents = [(ChunkKind.MANIFEST, encode_manifest(metas)), (ChunkKind.DATA, b"".join(payloads))]
        chunks = []
        for index, (kind, content) in enumerate(contents):
            header = ChunkHeader(kind, index == 1, transfer_id, index, 0, len(content)).pack()
            sealed = bytearray(len(content) + 16)
            sealer.seal_into(header, index, [memoryview(content)], memoryview(sealed))
            chunks.append([header.hex(), sealed.hex()])
        found.append(
            {
                "suite": int(suite),
                "key": key.hex(),
                "transfer_id": transfer_id.hex(),
                "chunks": chunks,
                "manifest": [plain(meta) for meta in metas],
                "payloads": [payload.hex() for payload in payloads],
            }
        )
    return found


def bus_vectors() -> list[dict[str, Any]]:
    random, key = Source("bus"), FleetKey(PSK)
    identity = NodeIdentity(random(32))
    card = Maker().make(inspect.type_info(cards.Card))
    card = msgspec.structs.replace(card, identity_public_key=identity.public_key)
    signed = cards.sign_card(card, identity)
    groups = {bus.Group.FLEET: key.derive(Purpose.BUS_FLEET), bus.Group.TELEMETRY: key.telemetry_key().seal_key}
    found = []
    for topic, payload in ((bus.Topic.CARD, signed), (bus.Topic.NODE, b"\x80")):
        message = bus.BusMessage("nöde", topic, 2**62, 3, payload, identity.public_key)  # type: ignore[arg-type]
        frames = bus.seal_message(message, identity, groups[topic.group], random)
        found.append(
            {
                "group": topic.group.value,
                "topic": int(topic),
                "frames": [frame.hex() for frame in frames],
                "node_id": "nöde",
                "incarnation": 2**62,
                "sequence": 3,
                "payload": payload.hex(),
                "identity_public_key": identity.public_key.hex(),
                "card": plain(card) if topic is bus.Topic.CARD else None,
            }
        )
    return found


def job_vectors() -> dict[str, Any]:
    random = Source("jobs")
    tenant_key, prefix = random(32), random(24)
    binding = JobBinding(random(32), random(16), random(32), random(32))
    keys, tokens = JobKeys(tenant_key), pack_tokens([1, 70_000, 262_143])
    prompt = keys.seal(binding, prefix, tokens)
    return {
        "tenant_key": tenant_key.hex(),
        "fingerprint": binding.fingerprint.hex(),
        "job_id": binding.job_id.hex(),
        "asker_key": binding.asker_key.hex(),
        "worker_key": binding.worker_key.hex(),
        "tokens": tokens.hex(),
        "prompt": prompt.hex(),
        "proof": keys.proof(binding, prompt).hex(),
    }


def name_vectors() -> dict[str, Any]:
    random = Source("names")
    compatibility = Compatibility(
        **{
            field.name: 64 if field.type == "int" else f"{field.name} é"
            for field in Compatibility.__dataclass_fields__.values()
        }
    )
    tenant_key = random(32)
    tokens = [(number * 7919) % 262_144 for number in range(64 * 3)]
    chain = chain_hashes(np.array(tokens, dtype=np.int32), compatibility.fingerprint(), tenant_key, 64)
    bits = [True, False, False, True, False, False, False, False, True]
    return {
        "compatibility": asdict(compatibility),
        "fingerprint": compatibility.fingerprint().hex(),
        "tenant_key": tenant_key.hex(),
        "tokens": tokens,
        "block_tokens": 64,
        "block_hashes": [block.block_hash.hex() for block in chain.blocks],
        "packed_tokens": pack_tokens(tokens[:5]).hex(),
        "bitmap": [bits, pack_bitmap(bits).hex()],
    }


def text_of(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name, content in vectors().items():
        (FOLDER / name).write_text(text_of(content), encoding="utf-8")
