"""Loading model folders: what is derived from them, and one clear line for everything that can be wrong with one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from kakeya_zmq.compat import CACHE_FORMAT_VERSION
from kakeya_zmq.engine import Decode, OpenSession, Prefill, TokenDecoded
from kakeya_zmq.model.engine import MlxEngine
from kakeya_zmq.model.loader import engine_from_model, eos_token_ids, load_engine
from kakeya_zmq.model.policy import CachePolicy
from tests import tiny_models
from wire.errors import ConfigError, ModelError


def save_model(folder: Path, model: Any, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = dataclasses.asdict(model.args)
    (folder / "config.json").write_text(json.dumps({**arguments, "eos_token_id": 7, **config}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny-qwen", tiny_models.build("qwen3", seed=3))


def greedy(engine: MlxEngine) -> list[int]:
    tokens = np.arange(100, dtype=np.int32)
    list(engine.handle(OpenSession("s")))
    list(engine.handle(Prefill("s", tokens[:-1])))
    events = engine.handle(Decode("s", int(tokens[-1]), 10, ()))
    return [event.token for event in events if isinstance(event, TokenDecoded)]


def test_a_folder_gives_the_same_engine_as_its_model(folder: Path) -> None:
    lines: list[str] = []
    engine = load_engine(folder, on_progress=lines.append)
    direct = engine_from_model(tiny_models.build("qwen3", seed=3), name="tiny-qwen")
    assert greedy(engine) == greedy(direct)
    assert "loading tiny-qwen" in lines
    facts = engine.facts
    assert facts.vocabulary_size == tiny_models.VOCABULARY
    assert facts.max_context_tokens == 4096
    assert facts.eos_token_ids == (7,)
    assert facts.weight_bytes == sum(array.nbytes for _, array in tree_flatten(tiny_models.build("qwen3").parameters()))
    ours, theirs = facts.compatibility, direct.facts.compatibility
    assert set(ours.differences(theirs)) <= {"model_revision", "tokenizer_revision", "rope_hash"}
    assert ours.model_id == "tiny-qwen"
    assert ours.kv_dtype == "float32"
    assert ours.quantization == "none"
    assert ours.cache_format_version == CACHE_FORMAT_VERSION
    assert (ours.block_size_tokens, ours.sink_size, ours.window_size, ours.tenant_namespace) == (64, 0, 0, "default")


def test_the_fingerprint_follows_the_model_and_its_settings(folder: Path, tmp_path: Path) -> None:
    original = load_engine(folder).facts.compatibility
    assert load_engine(folder, digest_cache=tmp_path / "digests.json").facts.compatibility == original
    assert load_engine(folder, digest_cache=tmp_path / "digests.json").facts.compatibility == original
    assert load_engine(folder, segment_tokens=512).facts.compatibility == original

    def changed(**options: Any) -> tuple[str, ...]:
        return load_engine(folder, **options).facts.compatibility.differences(original)

    assert changed(model_id="other") == ("model_id",)
    assert changed(tenant="other") == ("tenant_namespace",)
    assert changed(block_tokens=128) == ("block_size_tokens",)
    bounded = changed(policy=CachePolicy.sink_window(4, 256))
    assert set(bounded) == {"sink_size", "window_size", "layer_geometry_hash"}
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert changed() == ("tokenizer_revision",)
    (folder / "chat_template.jinja").unlink()
    save_model(folder, tiny_models.build("qwen3", seed=4))
    assert changed() == ("model_revision",)
    save_model(folder, tiny_models.build("qwen3", seed=3), rope_theta=5000.0)
    assert changed() == ("model_revision", "rope_hash")


def test_models_in_memory_have_revisions_too() -> None:
    def revision(**options: Any) -> str:
        return engine_from_model(tiny_models.build("qwen3", **options), name="m").facts.compatibility.model_revision

    assert revision(seed=1) == revision(seed=1)
    assert revision(seed=1) != revision(seed=2)
    half = engine_from_model(tiny_models.build("qwen3", seed=1, dtype=mx.bfloat16), name="m").facts.compatibility
    assert half.kv_dtype == "bfloat16"


def test_a_quantized_folder(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3", seed=3)
    nn.quantize(model, group_size=32, bits=4)
    folder = save_model(tmp_path / "q", model, quantization={"group_size": 32, "bits": 4})
    engine = load_engine(folder)
    assert engine.facts.compatibility.quantization == "4bit-group32"
    assert len(greedy(engine)) == 10


def test_assertions_are_checked(folder: Path) -> None:
    load_engine(folder, assertions={"quantization": "none", "block_size_tokens": 64})
    with pytest.raises(ConfigError, match="quantization is 'none', not '4bit'"):
        load_engine(folder, assertions={"quantization": "4bit"})
    with pytest.raises(ConfigError, match="unknown compatibility field"):
        engine_from_model(tiny_models.build("qwen3"), name="m", assertions={"colour": 1})


def _no_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _rewrite(name: str, text: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        (folder / name).write_text(text)

    return rewrite


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_folder, "there is no model folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (_rewrite("config.json", "{"), "not a JSON object"),
        (_rewrite("config.json", "[]"), "not a JSON object"),
        (_rewrite("config.json", "{}"), "names no model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no model\*\.safetensors"),
        (_truncate, "model.safetensors is truncated"),
        (_edit_config(model_type="nothing_like_it"), "Model type nothing_like_it not supported"),
        (_edit_config(num_hidden_layers=6), "the model cannot be loaded: Missing"),
        (_edit_config(hidden_size=32), "the model cannot be loaded: Expected shape"),
        (_edit_config(hidden_size="wide"), "the model cannot be loaded"),
        (_edit_config(model_file="evil.py"), "the model cannot be loaded"),
    ],
    ids=[
        "no-folder",
        "no-config",
        "broken-json",
        "a-list",
        "no-type",
        "no-weights",
        "truncated",
        "unknown-type",
        "missing-weights",
        "wrong-shapes",
        "wrong-types",
        "custom-code",
    ],
)
def test_a_bad_folder_gives_one_line_and_a_remedy(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_engine(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 512
    assert caught.value.remedy


def test_numbers_out_of_range(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not whole blocks"):
        load_engine(folder, segment_tokens=100)
    with pytest.raises(ConfigError, match="BLAS threads must be at least 1"):
        load_engine(folder, blas_threads=0)
    with pytest.raises(ModelError, match="name must be 1 to 128"):
        load_engine(folder, model_id="")


def test_an_unsupported_cache_is_refused_by_name() -> None:
    class OtherCache:
        offset = 0
        keys = None

    model = tiny_models.build("qwen3")
    type(model).make_cache = lambda self: [OtherCache()]
    try:
        with pytest.raises(ModelError, match="OtherCache"):
            engine_from_model(model, name="m")
    finally:
        del type(model).make_cache


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [1, 106]}}, {"eos_token_id": 5}, (1, 106)),
        ({}, {"eos_token_id": 5}, (5,)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, {"text_config": {"eos_token_id": 6}}, (6,)),
        ({"generation_config.json": {"eos_token_id": None}}, {"eos_token_id": [5]}, (5,)),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": {"content": "<end>"},
                    "added_tokens_decoder": {"3": {"content": "<end>"}, "4": {"content": "<pad>"}},
                }
            },
            {},
            (3,),
        ),
        ({"tokenizer_config.json": {"eos_token": "<end>"}}, {}, ()),
        ({}, {"eos_token_id": "five"}, ()),
        ({}, {"eos_token_id": True}, ()),
    ],
)
def test_eos_token_ids(tmp_path: Path, files: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path, config) == expected


def test_importing_loader_and_runner_imports_no_mlx() -> None:
    """BLAS must be chosen before MLX is imported, and daemons without a model must stay light."""
    code = (
        "import sys, daemons.engine_loading, kakeya_zmq.engine_runner\n"
        "import kakeya_zmq.model.loader, kakeya_zmq.model.policy, kakeya_zmq.model.revision\n"
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
