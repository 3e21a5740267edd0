"""Storage codecs by name and version; link frames, groups and the choice for a link."""

from __future__ import annotations

import itertools
import struct
import zlib

import mlx.core as mx
import numpy as np
import pytest
import zstandard

from kakeya_zmq.codecs.geometry import RowGeometry, Run
from kakeya_zmq.codecs.link import (
    HEADER,
    LINK_CODECS,
    PAYLOADS_MAX,
    CodecRates,
    FrameDecoder,
    FrameEncoder,
    PayloadSlice,
    choose_link_codec,
    estimate_seconds,
    frame_bytes_max,
    group_payloads,
    measure_codec,
)
from kakeya_zmq.codecs.registry import (
    STORAGE_CODECS,
    StorageCodec,
    codec_from_format,
    decode_part,
    encode_part,
    format_version,
    storage_codec,
)
from kakeya_zmq.model.layout import CacheLayout
from kakeya_zmq.model.policy import CachePolicy
from tests.tiny_models import KINDS, build, prompt
from tests.unit.test_int8 import payload_of, values_of
from wire.errors import ConfigError, DataLossError, InvalidInput, LocalProtocolError, RemoteProtocolError
from wire.messages import PartKind

MB = 1_000_000
GEOMETRY = RowGeometry("bfloat16", ((2, 32), (2, 32), (1, 64)))
TOKENS = 16
RAW = payload_of(np.random.default_rng(0).normal(size=GEOMETRY.channels * TOKENS), "bfloat16")
EVERY_CODEC = [storage_codec(name) for name in STORAGE_CODECS]


def name_of(codec: StorageCodec) -> str:
    return codec.name


# --- geometry ----------------------------------------------------------------------------------------------------


def test_runs_are_stretches_of_equal_dim() -> None:
    geometry = RowGeometry("float16", ((2, 8), (1, 8), (1, 4), (3, 8)))
    assert list(geometry.runs()) == [Run(3, 8), Run(1, 4), Run(3, 8)]
    assert geometry.channels == 52
    assert geometry.raw_bytes(3) == 312


@pytest.mark.parametrize(("dtype", "tensors"), [("int8", ((1, 4),)), ("float32", ()), ("float32", ((1, 0),))])
def test_impossible_geometries_are_refused(dtype: str, tensors: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidInput):
        RowGeometry(dtype, tensors)


@pytest.mark.parametrize("model", KINDS)
def test_a_layout_gives_the_geometry_of_its_payloads(model: str) -> None:
    layout = CacheLayout(build(model), block_tokens=64, policy=CachePolicy.native())
    for kind, size in zip((PartKind.FULL, PartKind.WINDOW), layout.part_bytes_per_token, strict=False):
        geometry = layout.row_geometry(kind)
        assert (geometry is None) is (size == 0)
        if geometry is not None:
            assert geometry.dtype == "float32"
            assert geometry.raw_bytes(7) == 7 * size
    assert layout.row_geometry(PartKind.STATE) is None


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "gemma4_k_eq_v"])
@pytest.mark.parametrize("name", ["int8", "kakeyalattice-d4"])
def test_a_models_own_parts_come_back_nearly_as_they_were(model: str, name: str) -> None:
    tiny = build(model, dtype=mx.bfloat16)
    layout = CacheLayout(tiny, block_tokens=64, policy=CachePolicy.native())
    caches = layout.new_caches()
    mx.eval(tiny(prompt(64), cache=caches))
    codec = storage_codec(name)
    for part in layout.export(caches, 0, 64):
        geometry = layout.row_geometry(part.kind)
        assert geometry is not None
        stored = encode_part(codec, part.payload, geometry, part.token_count)
        assert stored.nbytes < 0.6 * part.payload.nbytes
        before, after = (
            values_of(payload, geometry.dtype)
            for payload in (part.payload, decode_part(codec, stored, geometry, part.token_count))
        )
        assert ((before - after) ** 2).sum() < 2e-3 * (before**2).sum()


# --- storage codecs ------------------------------------------------------------------------------------------------


def test_every_codec_has_its_own_format_version() -> None:
    versions = [format_version(codec) for codec in EVERY_CODEC]
    assert versions == ["kakeya-zmq-v1", "kakeya-zmq-v1-zlib", "kakeya-zmq-v1-int8", "kakeya-zmq-v1-kl-d4-q38"]
    for version in [*versions, "kakeya-zmq-v1-kl-d4-q152"]:
        assert format_version(codec_from_format(version)) == version


@pytest.mark.parametrize(
    "version",
    ["", "kakeya-zmq-v2", "-int8", "kakeya-zmq-v1-", "kakeya-zmq-v1-int8-int8", "kakeya-zmq-v1-kl-d4-q",
     "kakeya-zmq-v1-kl-d4-q038", "kakeya-zmq-v1-kl-d4-q256", "kakeya-zmq-v1-kl-d4-q٣", "kakeya-zmq-v1-kl-d4-q38\n"],
)  # fmt: skip
def test_unknown_format_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError):
        codec_from_format(version)


def test_unknown_codecs_are_refused_with_the_choice() -> None:
    with pytest.raises(ConfigError, match="none, zlib, int8, kakeyalattice-d4"):
        storage_codec("zstd")


@pytest.mark.parametrize("codec", EVERY_CODEC, ids=name_of)
def test_parts_come_back_in_new_memory_or_in_the_callers(codec: StorageCodec) -> None:
    codec.check(GEOMETRY)
    stored = codec.encode(RAW, GEOMETRY, TOKENS)
    assert stored.readonly
    decoded = codec.decode(stored, GEOMETRY, TOKENS)
    assert decoded.readonly
    assert (decoded == RAW) is codec.lossless
    assert stored.nbytes <= RAW.nbytes
    np.testing.assert_allclose(values_of(decoded, "bfloat16"), values_of(RAW, "bfloat16"), atol=0.2)
    arena = memoryview(bytearray(RAW.nbytes + 3))
    assert codec.decode(stored, GEOMETRY, TOKENS, arena[3:]) == decoded
    assert arena[3:] == decoded


@pytest.mark.parametrize("codec", EVERY_CODEC, ids=name_of)
def test_wrong_sizes_are_refused(codec: StorageCodec) -> None:
    stored = bytes(codec.encode(RAW, GEOMETRY, TOKENS))
    for raw, tokens in ((RAW[:-1], TOKENS), (RAW, TOKENS + 1), (RAW, 0), (RAW, 1 << 50)):
        with pytest.raises(InvalidInput):
            codec.encode(raw, GEOMETRY, tokens)
    for broken in (b"", stored[:-1], stored + b"\0"):
        with pytest.raises(DataLossError):
            codec.decode(memoryview(broken), GEOMETRY, TOKENS)
    for tokens in (0, 1 << 50):
        with pytest.raises(RemoteProtocolError):
            codec.decode(memoryview(stored), GEOMETRY, tokens)
    for out in (memoryview(bytes(RAW.nbytes)), memoryview(bytearray(RAW.nbytes - 1)), memoryview(bytearray(2))):
        with pytest.raises(LocalProtocolError):
            codec.decode(memoryview(stored), GEOMETRY, TOKENS, out)


def test_state_parts_stay_as_they_are() -> None:
    state = memoryview(b"anything at all, NaN or not")
    for codec in EVERY_CODEC:
        stored = encode_part(codec, state, None, 64)
        assert stored == state
        assert decode_part(codec, stored, None, 64) == state
        rows = encode_part(codec, RAW, GEOMETRY, TOKENS)
        assert rows == codec.encode(RAW, GEOMETRY, TOKENS)
        assert decode_part(codec, rows, GEOMETRY, TOKENS) == codec.decode(rows, GEOMETRY, TOKENS)


def test_zlib_bombs_are_refused_before_they_are_inflated() -> None:
    codec = storage_codec("zlib")
    geometry = RowGeometry("float32", ((1, 1024),))
    size = geometry.raw_bytes(64)
    fitting = zlib.compress(bytes(size), 9)
    assert codec.decode(memoryview(fitting), geometry, 64) == bytes(size)
    for bomb in (zlib.compress(bytes(size + 1), 9), zlib.compress(bytes(64 * MB), 9), fitting[:-5], fitting + b"x"):
        with pytest.raises(DataLossError):
            codec.decode(memoryview(bomb), geometry, 64)
    with pytest.raises(DataLossError, match="cannot hold"):
        codec.decode(memoryview(fitting), geometry, 250_000)


# --- link frames ---------------------------------------------------------------------------------------------------


def smooth(size: int) -> memoryview:
    """Values that compress: like KV state, of few exponents."""
    values = np.random.default_rng(size).normal(size=size // 4 + 1).astype(np.float32)
    return values.view(np.uint8).data[:size].toreadonly()


PAYLOADS = [smooth(4096), smooth(10_001), memoryview(b""), smooth(7)]


def buffers_for(payloads: list[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(payload.nbytes)) for payload in payloads]


@pytest.mark.parametrize(("codec", "width"), list(itertools.product(LINK_CODECS, (1, 2, 4))))
def test_many_payloads_travel_in_one_frame(codec: str, width: int) -> None:
    frame = FrameEncoder(codec).encode(PAYLOADS, width)
    total = sum(payload.nbytes for payload in PAYLOADS)
    assert frame[:16] == struct.pack("<4sBBHQ", b"KZF1", frame[4], width, 4, total)
    out = buffers_for(PAYLOADS)
    FrameDecoder().decode(frame, out)
    assert out == PAYLOADS
    assert frame.nbytes <= frame_bytes_max(total)
    if width == 4:
        assert frame[4] == LINK_CODECS[codec]
        assert (frame.nbytes < 0.95 * total) is (codec != "none")


@pytest.mark.parametrize("codec", LINK_CODECS)
def test_noise_is_sent_as_it_is(codec: str) -> None:
    noise = memoryview(np.random.default_rng(1).integers(0, 256, 100_000, np.uint8).tobytes())
    frame = FrameEncoder(codec).encode([noise], 2)
    assert frame[4] == LINK_CODECS["none"]
    assert frame[16:] == noise


def test_one_encoder_makes_many_frames_and_one_decoder_opens_those_of_all() -> None:
    decoder = FrameDecoder()
    for codec, level in itertools.product(LINK_CODECS, (1, 3, 9)):
        encoder = FrameEncoder(codec, level)
        for payload in PAYLOADS[:2]:
            out = buffers_for([payload])
            decoder.decode(encoder.encode([payload], 4), out)
            assert out == [payload]


def test_what_makes_no_frame_is_refused() -> None:
    encoder = FrameEncoder("zstd")
    for payloads, width in (([], 1), ([memoryview(b"")], 1), ([smooth(8)], 3), ([smooth(1)] * (PAYLOADS_MAX + 1), 1)):
        with pytest.raises(InvalidInput):
            encoder.encode(payloads, width)
    for codec, level in (("lz4", 1), ("zstd", 0), ("zstd", 10)):
        with pytest.raises(ConfigError):
            FrameEncoder(codec, level)


def test_foreign_frames_and_bombs_are_refused() -> None:
    size = 1 << 20
    body = zstandard.ZstdCompressor().compress(bytes(size))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
    larger = zstandard.ZstdCompressor().compress(bytes(1 << 30 >> 2))
    deflated = zlib.compress(bytes(size))
    remote = {
        "empty": b"",
        "short": b"KZF1\x02",
        "magic": HEADER.pack(b"KZF2", 2, 1, 1, size) + body,
        "codec": HEADER.pack(b"KZF1", 3, 1, 1, size) + body,
        "width": HEADER.pack(b"KZF1", 2, 3, 1, size) + body,
        "count": HEADER.pack(b"KZF1", 2, 1, 2, size) + body,
        "total": HEADER.pack(b"KZF1", 2, 1, 1, 1 << 60) + body,
    }
    damaged = {
        "claims nothing": HEADER.pack(b"KZF1", 2, 1, 1, size) + streamed,
        "claims more": HEADER.pack(b"KZF1", 2, 1, 1, size) + larger,
        "cut": HEADER.pack(b"KZF1", 2, 1, 1, size) + body[:-1],
        "followed": HEADER.pack(b"KZF1", 2, 1, 1, size) + body + b"\0",
        "two": HEADER.pack(b"KZF1", 2, 1, 1, size) + body + body,
        "not zstd": HEADER.pack(b"KZF1", 2, 1, 1, size) + deflated,
        "no body": HEADER.pack(b"KZF1", 2, 1, 1, size),
        "not zlib": HEADER.pack(b"KZF1", 1, 1, 1, size) + body,
        "zlib followed": HEADER.pack(b"KZF1", 1, 1, 1, size) + deflated + b"\0",
        "raw short": HEADER.pack(b"KZF1", 0, 1, 1, size) + bytes(size - 1),
        "raw long": HEADER.pack(b"KZF1", 0, 1, 1, size) + bytes(size + 1),
    }
    accepted = []
    for error, frames in ((RemoteProtocolError, remote), (DataLossError, damaged)):
        for what, frame in frames.items():
            try:
                FrameDecoder().decode(memoryview(frame), [memoryview(bytearray(size))])
            except error:
                continue
            accepted.append(what)
    assert accepted == []
    with pytest.raises(LocalProtocolError):
        FrameDecoder().decode(memoryview(HEADER.pack(b"KZF1", 2, 1, 1, size) + body), [memoryview(bytes(size))])


def test_small_payloads_share_a_group_and_large_ones_are_cut() -> None:
    groups = group_payloads([10, 0, 20, 100, 3], frame_bytes_max(64))
    assert groups == [
        (PayloadSlice(0, 0, 10), PayloadSlice(2, 0, 20), PayloadSlice(3, 0, 32)),
        (PayloadSlice(3, 32, 96),),
        (PayloadSlice(3, 96, 100), PayloadSlice(4, 0, 3)),
    ]
    assert group_payloads([], 1000) == group_payloads([0, 0], 1000) == []
    assert len(group_payloads([1] * (PAYLOADS_MAX + 1), 1 << 20)) == 2
    with pytest.raises(InvalidInput):
        group_payloads([1], frame_bytes_max(3))


# --- the choice ----------------------------------------------------------------------------------------------------

RATES = {
    "zstd": CodecRates(encode_megabytes_per_second=900, decode_megabytes_per_second=1500, ratio=1.45),
    "zlib": CodecRates(encode_megabytes_per_second=60, decode_megabytes_per_second=400, ratio=1.5),
}


@pytest.mark.parametrize(
    ("link", "expected"),
    [(None, "none"), (0.0, "none"), (1.0, "zlib"), (30.0, "zlib"), (50.0, "zstd"), (110.0, "zstd"), (900.0, "none"),
     (5000.0, "none")],
)  # fmt: skip
def test_the_link_decides(link: float | None, expected: str) -> None:
    assert choose_link_codec(link, RATES, 100 * MB, 2 * MB) == expected


def test_no_codec_is_chosen_that_does_not_help() -> None:
    swelling = {"zstd": CodecRates(900, 1500, 1.0)}
    assert choose_link_codec(10.0, swelling, 100 * MB, MB) == "none"
    assert choose_link_codec(10.0, RATES, 0, MB) == "none"
    # One frame has nothing to overlap with: at 320 MB/s its encoding costs more than its bytes save.
    assert choose_link_codec(500.0, RATES, MB, MB) == "none"
    assert choose_link_codec(500.0, RATES, 100 * MB, MB) == "zstd"


def test_stages_overlap_in_the_estimate() -> None:
    rates = CodecRates(encode_megabytes_per_second=100, decode_megabytes_per_second=200, ratio=2.0)
    assert estimate_seconds(10 * MB, 10.0, rates, MB) == pytest.approx(0.01 + 0.05 + 0.005 + 9 * 0.05)


def test_a_codec_is_measured_on_the_payloads_at_hand() -> None:
    ticks = iter([0.0, 0.5, 0.75])
    payload = smooth(MB)
    rates = measure_codec("zstd", [payload], 4, clock=lambda: next(ticks))
    assert (rates.encode_megabytes_per_second, rates.decode_megabytes_per_second) == (2.0, 4.0)
    assert rates.ratio == MB / FrameEncoder("zstd").encode([payload], 4).nbytes > 1.1
