"""The compatibility tuple and the hash chain."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import fields, replace

import numpy as np
import pytest

from kakeya_zmq.blocks import ROOT_HASH
from kakeya_zmq.compat import CACHE_FORMAT_VERSION, Compatibility, chain_hashes, check_assertions
from wire.errors import ConfigError, InvalidInput

TUPLE = Compatibility(
    model_id="m",
    model_revision="r",
    tokenizer_revision="t",
    quantization="none",
    kv_dtype="float32",
    cache_format_version=CACHE_FORMAT_VERSION,
    rope_hash="rope",
    layer_geometry_hash="geometry",
    block_size_tokens=64,
    sink_size=0,
    window_size=0,
    tenant_namespace="default",
)
KEY = b"0123456789abcdef"


@pytest.mark.parametrize("name", [f.name for f in fields(Compatibility)])
def test_every_field_changes_the_fingerprint(name: str) -> None:
    value = getattr(TUPLE, name)
    other = replace(TUPLE, **{name: value + 1 if isinstance(value, int) else value + "é"})
    assert other.fingerprint() != TUPLE.fingerprint()
    assert TUPLE.differences(other) == (name,)
    assert len(TUPLE.fingerprint()) == 32


def test_the_fingerprint_is_the_documented_formula() -> None:
    text = (
        '{"block_size_tokens":64,"cache_format_version":"kakeya-zmq-v1","kv_dtype":"float32","layer_geometry_hash":"geometry",'
        '"model_id":"m","model_revision":"r","quantization":"none","rope_hash":"rope","sink_size":0,'
        '"tenant_namespace":"default","tokenizer_revision":"t","window_size":0}'
    )
    assert TUPLE.fingerprint() == hashlib.sha256(text.encode()).digest()


def test_assertions_that_hold_pass() -> None:
    check_assertions(TUPLE, {"model_id": "m", "block_size_tokens": 64})
    check_assertions(TUPLE, {})


def test_every_wrong_assertion_is_named_with_both_values() -> None:
    with pytest.raises(ConfigError) as caught:
        check_assertions(TUPLE, {"model_id": "x", "block_size_tokens": 32, "kv_dtype": "float32"})
    text = str(caught.value)
    assert "model_id is 'm', not 'x'" in text
    assert "block_size_tokens is 64, not 32" in text
    assert "kv_dtype" not in text


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown compatibility field colour"):
        check_assertions(TUPLE, {"colour": "red"})


@pytest.mark.parametrize("key", [KEY, bytes(range(64)), b"k" * 65, b"k" * 200])
def test_the_chain_is_the_documented_formula(key: bytes) -> None:
    tokens = np.arange(40, dtype=np.int32)
    chain = chain_hashes(tokens, bytes(32), key, 16)
    parent = bytes(32)
    for block, (start, count) in zip(chain.blocks, [(0, 16), (16, 16), (32, 8)], strict=True):
        body = bytes(32) + parent + struct.pack(f"<{count}i", *range(start, start + count))
        assert block.block_hash == hmac.new(key, body, hashlib.sha256).digest()
        assert (block.parent_hash, block.start, block.token_count) == (parent, start, count)
        parent = block.block_hash
    assert chain.tokens == 40


def test_the_tail_can_be_left_out_and_no_tokens_make_no_blocks() -> None:
    tokens = np.arange(40, dtype=np.int32)
    assert chain_hashes(tokens, bytes(32), KEY, 16, tail=False).tokens == 32
    empty = chain_hashes(tokens[:0], bytes(32), KEY, 16)
    assert empty.blocks == ()
    assert empty.tokens == 0


def test_fingerprint_tenant_and_earlier_tokens_all_reach_the_last_hash() -> None:
    tokens = np.arange(64, dtype=np.int32)
    last = chain_hashes(tokens, bytes(32), KEY, 16).blocks[-1].block_hash
    changed = tokens.copy()
    changed[0] = 7
    assert chain_hashes(changed, bytes(32), KEY, 16).blocks[-1].block_hash != last
    assert chain_hashes(tokens, b"\1" * 32, KEY, 16).blocks[-1].block_hash != last
    assert chain_hashes(tokens, bytes(32), KEY + b"x", 16).blocks[-1].block_hash != last


def test_a_strided_view_hashes_like_its_copy() -> None:
    tokens = np.arange(64, dtype=np.int32)[::2]
    assert chain_hashes(tokens, bytes(32), KEY, 16) == chain_hashes(tokens.copy(), bytes(32), KEY, 16)
    assert chain_hashes(tokens, bytes(32), KEY, 16).blocks[0].parent_hash == ROOT_HASH


@pytest.mark.parametrize(
    ("tokens", "fingerprint", "key", "block_tokens"),
    [
        (np.zeros(4, np.int32), bytes(32), KEY, 0),
        (np.zeros(4, np.int32), bytes(31), KEY, 16),
        (np.zeros(4, np.int32), bytes(32), b"short", 16),
        (np.zeros((2, 2), np.int32), bytes(32), KEY, 16),
        (np.zeros(4, np.int64), bytes(32), KEY, 16),
        (np.zeros(4, np.float32), bytes(32), KEY, 16),
    ],
)
def test_wrong_inputs_are_refused(tokens: np.ndarray, fingerprint: bytes, key: bytes, block_tokens: int) -> None:
    with pytest.raises(InvalidInput):
        chain_hashes(tokens, fingerprint, key, block_tokens)
