"""The real demo model: prepared once, verified by digest, loaded by mlx-lm, and given sane text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kakeya_zmq.demo.document import QUESTIONS, demo_document, demo_prompt
from kakeya_zmq.demo.prepare import MANIFEST_NAME, is_prepared, prepare_demo_model
from kakeya_zmq.text import TextCodec

pytestmark = pytest.mark.model

TEXTS = (
    "The capital of France is",
    "  Two spaces,\n\n\ta tab; naïve Größe 你好 🙂👩‍👩‍👧 and <h1>markup</h1>\n",
    "def f(x: int) -> int:\n    return x ** 2  # 1234567890\n",
)


@pytest.fixture(scope="module")
def codec(model_folder: Path) -> TextCodec:
    return TextCodec.load(model_folder)


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> tuple[Any, Any]:
    """mlx-lm's model and tokenizer."""
    from mlx_lm import load

    model, tokenizer, *_ = load(str(model_folder))
    return model, tokenizer


def test_preparing_again_changes_nothing_and_digests_verify(model_folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_folder.iterdir()}
    steps: list[str] = []
    assert prepare_demo_model(on_progress=lambda step, share: steps.append(step), verify=True) == model_folder
    assert steps == ["ready"]
    assert {path.name: path.stat().st_mtime_ns for path in model_folder.iterdir()} == before
    assert is_prepared(model_folder, verify=True)
    manifest = json.loads((model_folder / MANIFEST_NAME).read_text("utf-8"))
    assert set(manifest["files"]) == set(before) - {MANIFEST_NAME}


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_mlx_lm(codec: TextCodec, loaded: tuple[Any, Any], text: str) -> None:
    _, tokenizer = loaded
    ids = codec.encode(text)
    assert ids == tokenizer.encode(text)
    assert codec.encode(text, add_bos=False) == ids[1:] == tokenizer.encode(text, add_special_tokens=False)
    stream = codec.stream_decoder()
    assert "".join([stream.push(token) for token in ids]) + stream.finish() == text


def test_chats_and_end_tokens_are_those_of_mlx_lm(codec: TextCodec, loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert codec.apply_chat_template(chat) == expected
    assert codec.encode_chat(chat) == list(tokenizer.apply_chat_template(chat, add_generation_prompt=True))
    assert set(codec.eos_token_ids) == tokenizer.eos_token_ids == {1, 106}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Question: What is the capital of France?\nAnswer:", "Paris"), ("Paris is the capital of", "France")],
)
def test_a_plain_continuation_is_sane(codec: TextCodec, loaded: tuple[Any, Any], prompt: str, expected: str) -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    model, _ = loaded
    tokens = [int(token) for token, _ in generate_step(mx.array(codec.encode(prompt)), model, max_tokens=6)]
    assert expected in codec.decode(tokens)


def test_the_demo_prompt_is_long_enough_to_be_worth_caching(codec: TextCodec) -> None:
    assert 3_000 <= len(codec.encode(demo_document())) <= 3_500
    assert all(2_500 <= len(codec.encode(demo_prompt(question))) <= 3_600 for question in QUESTIONS)
