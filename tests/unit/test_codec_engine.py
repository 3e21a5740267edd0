"""The engine whose parts are stored packed: what it captures, what it imports, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kakeya_zmq.blocks import RawPart
from kakeya_zmq.codecs.engine import CodecEngine
from kakeya_zmq.codecs.registry import storage_codec
from kakeya_zmq.engine import (
    AddParts,
    BeginImport,
    CommandFailed,
    FinishImport,
    ImportPrefix,
    OpenSession,
    PartsCaptured,
    Prefill,
    PrefixImported,
    SegmentComputed,
)
from tests.unit.test_engine import decode_command, make_engine, prefilled, prompt, run, select, tokens_of
from wire.messages import PartKind

CODECS = ("none", "zlib", "int8", "kakeyalattice-d4")
TOKENS = prompt(321)


def wrapped(kind: str, codec: str) -> CodecEngine:
    engine = make_engine(kind)
    return CodecEngine(engine, storage_codec(codec), engine.layout.row_geometry)


def captured(engine: CodecEngine) -> tuple[RawPart, ...]:
    """Stored parts of a hit at 256."""
    return select(TOKENS, 256, engine.facts.requirement, prefilled(engine, "whole", TOKENS))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3", "lfm2"])
def test_what_is_captured_can_be_imported_again(kind: str, codec: str) -> None:
    engine = wrapped(kind, codec)
    parts = captured(engine)
    run(engine, OpenSession("again"))
    (event,) = run(engine, ImportPrefix("again", 256, parts))
    assert isinstance(event, PrefixImported)
    expected = tokens_of(run(engine, decode_command("whole", TOKENS[320], 8)))
    run(engine, OpenSession("early"))
    run(engine, BeginImport("early", 256))
    run(engine, AddParts("early", parts))
    (event,) = run(engine, FinishImport("early"))
    assert isinstance(event, PrefixImported)
    assert engine.session_position("early") == 256
    if storage_codec(codec).lossless:
        for session in ("again", "early"):
            run(engine, Prefill(session, TOKENS[256:320]))
            assert tokens_of(run(engine, decode_command(session, TOKENS[320], 8))) == expected


@pytest.mark.parametrize("codec", CODECS)
def test_each_codec_is_a_namespace_of_its_own_and_tells_its_sizes(codec: str) -> None:
    plain, packed = make_engine("gemma3_text").facts, wrapped("gemma3_text", codec).facts
    assert (plain.compatibility.fingerprint() == packed.compatibility.fingerprint()) == (codec == "none")
    engine = wrapped("gemma3_text", codec)
    for part in captured(engine):
        assert part.payload.nbytes <= packed.part_bytes_per_token[part.kind] * part.token_count * 1.02 + 64
    if codec in ("int8", "kakeyalattice-d4"):
        assert packed.part_bytes_per_token[PartKind.FULL] < plain.part_bytes_per_token[PartKind.FULL] / 2


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_part_fails_the_import_as_the_model_s_engine_would(codec: str) -> None:
    engine = wrapped("gemma3_text", codec)
    first, *others = captured(engine)
    cut = replace(first, payload=first.payload[: first.payload.nbytes // 2])
    run(engine, OpenSession("victim"))
    (event,) = run(engine, ImportPrefix("victim", 256, (cut, *others)))
    assert isinstance(event, CommandFailed)
    assert engine.session_position("victim") == 0
    run(engine, BeginImport("whole", 256))
    (event,) = run(engine, AddParts("whole", (cut, *others)))
    assert isinstance(event, CommandFailed)
    (event,) = run(engine, FinishImport("whole"))
    assert isinstance(event, CommandFailed)
    assert engine.session_position("whole") == 320, "the session's own KV is untouched"


def test_a_part_with_infinities_is_not_stored() -> None:
    engine = wrapped("gemma3_text", "int8")
    rows = make_engine("gemma3_text").layout.row_geometry(PartKind.FULL)
    assert rows is not None
    raw = bytearray(rows.raw_bytes(64))
    raw[:4] = b"\x00\x00\x80\x7f"
    bad = RawPart(PartKind.FULL, 0, 64, memoryview(bytes(raw)))
    good = RawPart(PartKind.FULL, 64, 64, memoryview(bytes(len(raw))))
    for event in (SegmentComputed("s", 128, (bad, good), 1.0), PartsCaptured("s", (bad, good))):
        encoded = engine._encode_event(event)
        assert isinstance(encoded, SegmentComputed | PartsCaptured)
        assert ([part.start for part in encoded.parts], encoded.parts_not_encoded) == ([64], 1)
