"""The project still makes exactly the test vectors, and a second implementation reads them by the document alone."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest
from nacl.exceptions import CryptoError

from tests.vectors import describe, generate
from tests.vectors import independent as wire

FOLDER = Path(__file__).parent
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


@cache
def load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


def unhex(frames: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in frames]


def test_the_project_still_makes_these_vectors() -> None:
    for name, content in generate.vectors().items():
        text = (FOLDER / name).read_text("utf-8")
        assert generate.text_of(content) == text, f"{name}: the wire has changed (python -m tests.vectors.generate)"


def test_the_document_lists_every_field() -> None:
    text = DOCUMENT.read_text("utf-8")
    for line in describe.document().splitlines():
        assert line in text.splitlines(), f"docs/protocol.md lacks: {line} (python -m tests.vectors.describe --write)"


# --- keys and handshake ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_keys(number: int) -> None:
    vector = load("keys.json")[number]
    psk = vector["psk"].encode()
    assert wire.key_id(psk).hex() == vector["key_id"]
    for purpose, expected in vector["purposes"].items():
        assert wire.purpose_key(psk, purpose).hex() == expected
    for name in ("server", "client"):
        public, _ = wire.curve_pair(wire.purpose_key(psk, f"kz curve {name}"))
        assert public.hex() == vector[f"curve_{name}_public"]
    telemetry = wire.purpose_key(psk, "kz bus telemetry")
    assert wire.bus_curve_pair(telemetry)[0].hex() == vector["curve_bus_public"]
    assert wire.telemetry_seal_key(telemetry).hex() == vector["telemetry_seal"]


def test_a_handshake_and_what_follows() -> None:
    vector = load("handshake.json")
    psk = vector["psk"].encode()
    hello = unhex(vector["hello"])
    assert_fields("Hello", wire.read_hello(psk, *hello), vector["hello_fields"])
    welcome_frames = unhex(vector["welcome"])
    welcome = wire.read_welcome(psk, (hello[0], hello[1]), *welcome_frames)
    assert_fields("Welcome", welcome, vector["welcome_fields"])
    secret = bytes.fromhex(vector["client_secret"])
    session = wire.start_session(psk, secret, (hello[0], hello[1]), *welcome_frames)
    assert session.send_key.hex() == vector["client_to_server"]
    assert session.receive_key.hex() == vector["server_to_client"]
    for frames, (name, fields) in zip(vector["from_server"], vector["from_server_fields"], strict=True):
        assert_fields(name, session.open(*unhex(frames)), fields, tagged=True)
    session.receive_key = session.send_key
    for frames, (name, fields) in zip(vector["from_client"], vector["from_client_fields"], strict=True):
        assert_fields(name, session.open(*unhex(frames)), fields, tagged=True)
    header, body = unhex(vector["unknown_session"])
    assert wire.unpack_header(header)[0] == wire.UNKNOWN_SESSION
    signature = wire.open_prefixed(wire.purpose_key(psk, "kz welcome"), header, body)
    wire.VerifyKey(welcome[1]).verify(b"kakeya-zmq unknown session\0" + session.session_id, signature)


def test_the_second_implementation_notices_a_changed_bit() -> None:
    vector = load("handshake.json")
    header, body = unhex(vector["hello"])
    for changed in (header[:-1] + b"\1", header), (header, body[:-1] + bytes([body[-1] ^ 1])):
        with pytest.raises(CryptoError):
            wire.open_prefixed(wire.purpose_key(vector["psk"].encode(), "kz hello"), *changed)


# --- messages, read by the tables of the document ----------------------------------------------------------------------


@cache
def documented() -> dict[str, list[tuple[str, str]]]:
    """Struct → (field, type) in order, from the section Fields."""
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`: .*|–) \|$", DOCUMENT.read_text("utf-8"), flags=re.MULTILINE)
    return {name: re.findall(r"`(\w+)`: ([^;]+)", cells) for name, cells in rows}


@cache
def documented_tags() -> dict[str, int]:
    found = re.findall(r"^\| (\d+) \| `(\w+)` \|", DOCUMENT.read_text("utf-8"), flags=re.MULTILINE)
    return {name: int(tag) for tag, name in found}


ENVELOPES = {"Request", "Update", "Cancel", "Reply", "Progress", "Failure", "Ping", "Pong", "Goodbye"}
GRAMMARS = {
    "NodeId": r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}|",
    "Word": r"[A-Za-z][A-Za-z0-9_+-]{0,31}|",
    "Ascii": r"[ -~]{0,128}",
    "Line": r"\w[^\x00-\x1f\x7f-\x9f]{0,511}",
    "text": r".{0,512}",
}
BODY_OF = {
    "Request": range(1, 100),
    "Reply": range(100, 200),
    "Progress": range(200, 300),
    "Update": (202, *range(300, 400)),
}


def named(type_: str, value: Any, envelope: str = "") -> Any:
    """A value with the names that the document gives to its parts."""
    type_ = type_.strip()
    if value is None:
        assert type_.endswith("or nil") or type_ == "nil"
        return None
    type_ = type_.removesuffix(" or nil")
    if type_ == "body":
        tags = {name: tag for name, tag in documented_tags().items() if name not in ENVELOPES}
        (name,) = [name for name, tag in tags.items() if tag == value[0] and tag in BODY_OF[envelope]]
        return by_name(name, value, tagged=True)
    if type_ in documented():
        return by_name(type_, value, tagged=type_ in documented_tags())
    if match := re.fullmatch(r"\[(?:(\d+) × )?(.+)\]", type_):
        assert match[1] is None or len(value) == int(match[1])
        return [named(match[2], each) for each in value]
    if match := re.fullmatch(r"\{(text(?: \w+)?): (.+)\}", type_):
        return {named(match[1], key): named(match[2], each) for key, each in value.items()}
    if type_.startswith("bytes"):
        assert isinstance(value, bytes)
        assert type_ == "bytes" or len(value) == int(type_.split()[1])
        return {"hex": value.hex()}
    words = {"int": int, "float": float, "bool": bool, "text": str}
    choices = [each.split() for each in type_.split(" or ")]
    assert isinstance(value, tuple(words[choice[0]] for choice in choices))
    if isinstance(value, str):
        (grammar,) = [choice[-1] for choice in choices if choice[0] == "text"]
        assert re.fullmatch(GRAMMARS[grammar], value)
    return value


def by_name(name: str, values: list[Any], *, tagged: bool) -> dict[str, Any]:
    if tagged:
        assert values[0] == documented_tags()[name]
        values = values[1:]
    fields = documented()[name]
    assert len(values) == len(fields)
    return {field: named(type_, value, name) for (field, type_), value in zip(fields, values, strict=True)}


def assert_fields(name: str, values: list[Any], expected: dict[str, Any], *, tagged: bool = False) -> None:
    found = by_name(name, values, tagged=tagged)
    # What a signature is cannot be told before: it was checked when the message was read.
    assert {**found, **{key: None for key in found if expected.get(key, 0) is None and key == "signature"}} == expected


@pytest.mark.parametrize("number", range(len(load("messages.json"))))
def test_messages(number: int) -> None:
    vector = load("messages.json")[number]
    values = msgpack.unpackb(bytes.fromhex(vector["msgpack"]))
    assert (values[0], vector["tag"]) == (vector["tag"], documented_tags()[vector["envelope"]])
    assert by_name(vector["envelope"], values, tagged=True) == vector["fields"]
    if vector["body"] is not None:
        assert vector["body_tag"] == documented_tags()[vector["body"]]
    # And the other way round: the second implementation writes the same bytes.
    assert msgpack.packb(values).hex() == vector["msgpack"]


# --- bulk, bus, names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_bulk(number: int) -> None:
    vector = load("bulk.json")[number]
    key = bytes.fromhex(vector["key"])
    chunks = [wire.open_chunk(vector["suite"], key, *unhex(frames)) for frames in vector["chunks"]]
    assert [(chunk.kind, chunk.flags, chunk.index, chunk.batch) for chunk in chunks] == [(1, 0, 0, 0), (2, 1, 1, 0)]
    assert {chunk.transfer_id.hex() for chunk in chunks} == {vector["transfer_id"]}
    manifest = [by_name("PartMeta", values, tagged=False) for values in msgpack.unpackb(chunks[0].plaintext)]
    assert manifest == vector["manifest"]
    assert chunks[1].plaintext.hex() == "".join(vector["payloads"])
    for chunk, frames in zip(chunks, vector["chunks"], strict=True):
        header, sealed = unhex(frames)
        assert wire.seal_chunk(vector["suite"], key, header, chunk.plaintext) == sealed


@pytest.mark.parametrize("number", [0, 1])
def test_bus(number: int) -> None:
    vector = load("bus.json")[number]
    psk = load("keys.json")[0]["psk"].encode()
    telemetry = wire.purpose_key(psk, "kz bus telemetry")
    keys = {"fleet": wire.purpose_key(psk, "kz bus fleet"), "telemetry": wire.telemetry_seal_key(telemetry)}
    message = wire.open_bus_message(keys[vector["group"]], unhex(vector["frames"]))
    expected = ("node_id", "topic", "incarnation", "sequence")
    assert message[:4] == tuple(vector[name] for name in expected)
    assert (message[4].hex(), message[5].hex()) == (vector["payload"], vector["identity_public_key"])
    if vector["card"] is not None:
        assert by_name("Card", wire.read_card(message[4]), tagged=False) == vector["card"]


def test_names() -> None:
    vector = load("names.json")
    namespace = wire.fingerprint(vector["compatibility"])
    assert namespace.hex() == vector["fingerprint"]
    parent = bytes(32)
    for number, expected in enumerate(vector["block_hashes"]):
        tokens = vector["tokens"][number * 64 : (number + 1) * 64]
        parent = wire.block_hash(bytes.fromhex(vector["tenant_key"]), namespace, parent, tokens)
        assert parent.hex() == expected
    packed = bytes.fromhex(vector["packed_tokens"])
    assert list(wire.struct.unpack("<5i", packed)) == vector["tokens"][:5]
    bits, bitmap = vector["bitmap"][0], bytes.fromhex(vector["bitmap"][1])
    assert [bool(bitmap[at // 8] >> at % 8 & 1) for at in range(len(bits))] == bits


def test_jobs() -> None:
    vector = {name: bytes.fromhex(value) for name, value in load("jobs.json").items()}
    key, prompt = vector["tenant_key"], vector["prompt"]
    binding = wire.job_binding(vector["fingerprint"], vector["job_id"], vector["asker_key"], vector["worker_key"])
    assert wire.open_job_prompt(key, binding, prompt) == vector["tokens"]
    assert wire.seal_job_prompt(key, binding, prompt[:24], vector["tokens"]) == prompt
    assert wire.job_proof(key, binding, prompt) == vector["proof"]
    swapped = wire.job_binding(vector["fingerprint"], vector["job_id"], vector["worker_key"], vector["asker_key"])
    with pytest.raises(CryptoError):
        wire.open_job_prompt(key, swapped, prompt)
