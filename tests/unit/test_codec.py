"""Control messages to bytes and back, and the packed forms."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from wire import limits
from wire.codec import (
    decode_client,
    decode_hello,
    decode_server,
    decode_welcome,
    encode_client,
    encode_hello,
    encode_server,
    encode_welcome,
    pack_bitmap,
    pack_hashes,
    pack_tokens,
    unpack_bitmap,
    unpack_hashes,
    unpack_tokens,
)
from wire.errors import FailureCode, LocalProtocolError, RemoteProtocolError
from wire.job_seal import SEALED_PROMPT_OVERHEAD_BYTES
from wire.messages import (
    Cancel,
    CipherSuite,
    ClientEnvelope,
    Credit,
    Done,
    ExchangeCards,
    Failure,
    Fetch,
    GetStatus,
    Goodbye,
    Hello,
    Lookup,
    PartKind,
    PartRef,
    Ping,
    Pong,
    Progress,
    Reply,
    Request,
    Requirement,
    ServerEnvelope,
    Status,
    SubmitJob,
    TransferDone,
    TransferGrant,
    Update,
    Welcome,
)
from wire.text import NODE_ID_CHARACTERS_MAX

CLIENT: list[ClientEnvelope] = [
    Request(request_id=1, deadline_ms=1000, body=GetStatus()),
    Request(
        request_id=2,
        deadline_ms=1,
        body=Lookup(
            fingerprint=b"f" * 32,
            requirement=Requirement(block_tokens=64, full=True, window_tokens=512, sink_tokens=4),
            block_hashes=b"h" * 96,
        ),
    ),
    Update(request_id=3, body=Credit(credit_bytes=5)),
    Update(request_id=3, body=TransferDone(complete=True)),
    Cancel(request_id=4),
    Ping(),
    Goodbye(reason="done"),
]
SERVER: list[ServerEnvelope] = [
    Reply(request_id=1, body=Done()),
    Reply(
        request_id=1,
        body=Status(node_id="n", roles=("r",), sections={"s": {"a": 1, "b": None}}, peers=({"x": 1.5},), recent=("ok",)),
    ),
    Progress(
        request_id=2,
        body=TransferGrant(
            transfer_id=b"t" * 16, port=1, token="0" * 32, key=b"k" * 32, suite=CipherSuite.AES_256_GCM, chunk_bytes=2**21
        ),
    ),
    Failure(request_id=3, code=FailureCode.NOT_FOUND, message="gone"),
    Pong(),
    Goodbye(reason=""),
]
HELLO = Hello(
    node_id="a",
    identity_public_key=b"i" * 32,
    ephemeral_public_key=b"e" * 32,
    incarnation=1,
    roles=("primary",),
    software="",
    signature=b"s" * 64,
)
WELCOME = Welcome(
    node_id="b",
    identity_public_key=b"i" * 32,
    ephemeral_public_key=b"e" * 32,
    incarnation=1,
    roles=(),
    software="x",
    session_id=b"s" * 16,
    hello_hash=b"h" * 32,
    bus_port=0,
    signature=b"s" * 64,
)


@pytest.mark.parametrize("envelope", CLIENT, ids=repr)
def test_client_round_trip(envelope: ClientEnvelope) -> None:
    assert decode_client(encode_client(envelope)) == envelope


@pytest.mark.parametrize("envelope", SERVER, ids=repr)
def test_server_round_trip(envelope: ServerEnvelope) -> None:
    assert decode_server(encode_server(envelope)) == envelope


def test_handshake_round_trip() -> None:
    assert decode_hello(encode_hello(HELLO)) == HELLO
    assert decode_welcome(encode_welcome(WELCOME)) == WELCOME


def test_the_longest_handshake_fits() -> None:
    name, role, software = "n" * NODE_ID_CHARACTERS_MAX, "r" * 32, "s" * limits.NAME_CHARACTERS_MAX
    hello = msgspec.structs.replace(HELLO, node_id=name, software=software, roles=(role,) * 8, incarnation=2**63 - 1)
    assert decode_hello(encode_hello(hello)) == hello


def test_directions_are_separate() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_client(encode_server(Reply(request_id=1, body=Done())))
    with pytest.raises(RemoteProtocolError):
        decode_server(encode_client(Ping()))


def test_the_largest_messages_fit() -> None:
    job = SubmitJob(
        job_id=b"j" * 16,
        fingerprint=b"f" * 32,
        prompt=bytes(SEALED_PROMPT_OVERHEAD_BYTES + limits.PROMPT_TOKENS_MAX * limits.TOKEN_BYTES),
        have_tokens=0,
        suites=(CipherSuite.SECRETBOX,),
        chunk_bytes_max=limits.CHUNK_BYTES_MAX,
        credit_bytes=1,
    )
    fetch = Fetch(
        lease_id=b"l" * 16,
        parts=(PartRef(block_hash=b"h" * 32, kind=PartKind.FULL),) * limits.PARTS_PER_REQUEST_MAX,
        suites=(CipherSuite.SECRETBOX,),
        chunk_bytes_max=limits.CHUNK_BYTES_MAX,
        credit_bytes=1,
    )
    count = limits.CARDS_PER_EXCHANGE_MAX
    cards = ExchangeCards(cards=(bytes(limits.CARD_BYTES_MAX),) * count, ages_ms=(2**53,) * count)
    for body in (job, fetch, cards):
        request = Request(request_id=1, deadline_ms=1, body=body)
        assert decode_client(encode_client(request)) == request


def test_too_large_to_send() -> None:
    with pytest.raises(LocalProtocolError, match="more than"):
        encode_server(Goodbye(reason="x" * limits.CONTROL_BODY_BYTES_MAX))
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        encode_server(Failure(request_id=2**70, code=FailureCode.ABORTED, message=""))
    with pytest.raises(LocalProtocolError, match="cannot be encoded"):
        encode_server(Goodbye(reason="\ud800"))


def test_oversize_is_refused_before_decoding() -> None:
    for decode in (decode_client, decode_server, decode_hello, decode_welcome):
        with pytest.raises(RemoteProtocolError, match="oversize"):
            decode(bytes(limits.CONTROL_BODY_BYTES_MAX + 1))


def test_error_lines_hold_nothing_of_the_peer() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_client(msgspec.msgpack.encode([424242, "private"]))
    assert str(caught.value) == "malformed client message"


@pytest.mark.parametrize("count", [0, 1, 7, 131_072])
def test_tokens(count: int) -> None:
    tokens = array("i", (index * 7919 % 2**31 for index in range(count)))
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * count
    assert unpack_tokens(packed) == tokens


def test_tokens_are_little_endian_and_bounded() -> None:
    assert pack_tokens([1, 2**31 - 1]) == b"\x01\0\0\0\xff\xff\xff\x7f"
    for bad in ([-1], [2**31], [0, 2**40]):
        with pytest.raises(LocalProtocolError):
            pack_tokens(bad)
    with pytest.raises(LocalProtocolError):
        pack_tokens(range(limits.PROMPT_TOKENS_MAX + 1))
    for wrong in (b"\0", b"\0\0\0\0\0", b"\0\0\0\x80", bytes(4 * limits.PROMPT_TOKENS_MAX + 4)):
        with pytest.raises(RemoteProtocolError):
            unpack_tokens(wrong)


def test_bitmap() -> None:
    bits = [True, False, False, True, False, False, False, False, False, True]
    assert pack_bitmap(bits) == b"\x09\x02"
    assert unpack_bitmap(b"\x09\x02", 10) == tuple(bits)
    assert unpack_bitmap(b"", 0) == ()
    for data, count in ((b"\x09", 10), (b"\x09\x02\x00", 10), (b"\x09\x06", 10), (b"\x01", 0)):
        with pytest.raises(RemoteProtocolError):
            unpack_bitmap(data, count)


def test_hashes() -> None:
    hashes = (b"a" * 32, b"b" * 32)
    assert unpack_hashes(pack_hashes(hashes)) == hashes
    assert unpack_hashes(b"") == ()
    for wrong in (b"x", bytes(33), bytes(32 * (limits.BLOCKS_MAX + 1))):
        with pytest.raises(RemoteProtocolError):
            unpack_hashes(wrong)
    with pytest.raises(LocalProtocolError):
        pack_hashes([b"short"])
