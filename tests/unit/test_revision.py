"""Digests of models: what changes them, what doesn't, and what the cache file may get wrong."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from kakeya_zmq.model import revision
from kakeya_zmq.model.revision import (
    DigestCache,
    file_sha256,
    model_revision,
    parameters_revision,
    quantization_name,
    rope_hash,
    tokenizer_revision,
    weight_files,
)
from wire.errors import ModelError
from wire.limits import MIB

CONFIG = {"model_type": "x", "rope_theta": 10_000.0, "hidden_size": 8}


def write_safetensors(path: Path, data: bytes = bytes(16)) -> Path:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def cached(path: Path, cache_file: Path | None = None) -> str:
    return file_sha256(path, DigestCache(cache_file))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model-00001-of-00002.safetensors", b"one")
    write_safetensors(folder / "model-00002-of-00002.safetensors", b"two")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def revise(folder: Path, config: dict[str, Any] | None = None) -> str:
    return model_revision(CONFIG if config is None else config, weight_files(folder), DigestCache(None))


def test_a_copy_has_the_same_revision(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert revise(folder) == revise(copy)
    assert tokenizer_revision(folder) == tokenizer_revision(copy)
    assert len(revise(folder)) == 64


def test_what_changes_the_model_revision(folder: Path) -> None:
    original = revise(folder)
    assert revise(folder, {**CONFIG, "hidden_size": 9}) != original
    assert revise(folder, {**CONFIG, "transformers_version": "1", "_name_or_path": "here"}) == original
    assert revise(folder, dict(reversed(CONFIG.items()))) == original
    write_safetensors(folder / "model-00002-of-00002.safetensors", b"twO")
    assert revise(folder) != original


def test_what_changes_the_tokenizer_revision(folder: Path) -> None:
    seen = {tokenizer_revision(folder)}
    (folder / "README.md").write_text("no tokenizer")
    assert tokenizer_revision(folder) in seen
    for name, text in [("tokenizer.json", "{ }"), ("chat_template.jinja", "x"), ("tokenizer_config.json", "x")]:
        (folder / name).write_text(text)
        seen.add(tokenizer_revision(folder))
    assert len(seen) == 4


def test_parameters_revision_depends_on_every_input() -> None:
    one = ("w", "float32", (2, 2), memoryview(bytes(16)))
    variants = [
        parameters_revision(CONFIG, [one]),
        parameters_revision({}, [one]),
        parameters_revision(CONFIG, [("v", *one[1:])]),
        parameters_revision(CONFIG, [(one[0], "int32", *one[2:])]),
        parameters_revision(CONFIG, [(*one[:2], (4,), one[3])]),
        parameters_revision(CONFIG, [(*one[:3], memoryview(bytes(15) + b"1"))]),
        parameters_revision(CONFIG, [one, ("w2", *one[1:])]),
    ]
    assert len(set(variants)) == len(variants)
    assert parameters_revision(CONFIG, [("w2", *one[1:]), one]) == variants[-1]


def test_the_cache_file_saves_hashing_and_is_private(folder: Path, tmp_path: Path) -> None:
    cache_file = tmp_path / "state" / "digests.json"
    weights = folder / "model-00001-of-00002.safetensors"
    digest = cached(weights, cache_file)
    assert stat.S_IMODE(cache_file.stat().st_mode) == 0o600
    assert str(folder) not in cache_file.read_text()
    assert list(cache_file.parent.iterdir()) == [cache_file]
    # Proof that it is used: what the cache says is believed for an unchanged file.
    entries = json.loads(cache_file.read_text())
    cache_file.write_text(json.dumps(dict.fromkeys(entries, "0" * 64)))
    assert cached(weights, cache_file) == "0" * 64
    assert cached(weights) == digest


def test_the_cache_notices_a_change_that_keeps_size_and_date(folder: Path, tmp_path: Path) -> None:
    cache_file = tmp_path / "digests.json"
    weights = write_safetensors(folder / "model-00001-of-00002.safetensors", b"one")
    before = weights.stat()
    digest = cached(weights, cache_file)
    replacement = write_safetensors(tmp_path / "new", b"eno")
    os.replace(replacement, weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert cached(weights, cache_file) != digest


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"a": 1}', '{"a": "short"}', "\xff"])
def test_a_damaged_cache_file_only_costs_hashing(folder: Path, tmp_path: Path, damage: str) -> None:
    cache_file = tmp_path / "digests.json"
    cache_file.write_bytes(damage.encode("latin-1"))
    weights = folder / "model-00001-of-00002.safetensors"
    assert cached(weights, cache_file) == cached(weights)
    assert len(json.loads(cache_file.read_text())) == 1


def test_a_cache_file_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    weights = folder / "model-00001-of-00002.safetensors"
    assert cached(weights, blocker / "digests.json") == cached(weights)


def test_progress_is_told_for_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revision, "PROGRESS_STEP_BYTES", 16 * MIB)
    large = tmp_path / "model.safetensors"
    with large.open("wb") as stream:
        stream.truncate(40 * MIB)  # sparse
    lines: list[str] = []
    file_sha256(large, DigestCache(None), lines.append)
    assert lines == ["hashing model.safetensors: 40 %", "hashing model.safetensors: 80 %"]


def test_weight_files_are_found_and_complete(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"")
    assert [file.name for file in weight_files(folder)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_missing_and_broken_weight_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model\*\.safetensors"):
        weight_files(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00003-of-00003.safetensors"}}))
    with pytest.raises(ModelError, match="1 weight files are missing, first model-00003"):
        weight_files(folder)
    for broken in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(broken)
        with pytest.raises(ModelError, match="not a weight index"):
            weight_files(folder)
    index.unlink()
    weights = folder / "model-00002-of-00002.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, 8, 20):
        weights.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is truncated"):
            weight_files(folder)
    weights.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=rf"truncated: {len(whole) - 1} of {len(whole)} bytes"):
        weight_files(folder)
    for header in (b"[1]", b"{", b'{"w": {}}', b'{"w": {"data_offsets": [0]}}', b'{"w": 1}'):
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ModelError, match="broken header"):
            weight_files(folder)


def test_rope_hash_sees_rope_settings_only() -> None:
    original = rope_hash(CONFIG)
    assert rope_hash({**CONFIG, "hidden_size": 9}) == original
    variants = {
        original,
        rope_hash({**CONFIG, "rope_theta": 20_000.0}),
        rope_hash({**CONFIG, "rope_scaling": {"factor": 2.0}}),
        rope_hash({**CONFIG, "partial_rotary_factor": 0.5}),
        rope_hash({**CONFIG, "max_position_embeddings": 4096}),
        rope_hash({"text_config": {"rope_theta": 10_000.0}}),
        rope_hash({}),
    }
    assert len(variants) == 7


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "none"),
        ({"quantization": None}, "none"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "4bit-group64"),
        ({"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}, "4bit-group64"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "mxfp4-4bit-group32"),
    ],
)
def test_quantization_names(config: dict[str, Any], name: str) -> None:
    assert quantization_name(config) == name


def test_quantization_names_tell_mixed_and_foreign_schemes_apart() -> None:
    base = {"bits": 4, "group_size": 64}
    mixed = [quantization_name({"quantization": {**base, "layer.1": layer}}) for layer in ({"bits": 8}, {"bits": 6}, False)]
    assert len(set(mixed)) == 3
    assert all(name.startswith("4bit-group64-mixed-") for name in mixed)
    assert quantization_name({"quantization_config": {"quant_method": "awq", "w_bit": 4}}).startswith("awq-")
