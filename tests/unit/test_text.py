"""Text ↔ tokens with small tokenizers built here; the real one is in tests/e2e/test_demo_model.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kakeya_zmq.text import PENDING_TOKENS_MAX, StreamDecoder, TextCodec
from wire.errors import InvalidInput, ModelError

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
FIRST_BYTE_ID = len(SPECIAL)


def byte_fallback_tokenizer(*, strip_first_space: bool = False) -> Tokenizer:
    """SentencePiece style, as Gemma (and, with ``strip_first_space``, Llama): a few letters, all else in bytes."""
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *BYTES, "▁", *"abcdehlorw", "▁w", "he"])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "w"), ("h", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if strip_first_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip_first_space else steps)
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    """GPT-2 style, as Qwen: every byte has a letter of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZERS = {
    "gemma": byte_fallback_tokenizer(),
    "llama": byte_fallback_tokenizer(strip_first_space=True),
    "qwen": byte_level_tokenizer(),
}


def write_folder(folder: Path, **files: object) -> Path:
    byte_fallback_tokenizer().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def codec(template: str | None = None) -> TextCodec:
    return TextCodec(byte_fallback_tokenizer(), eos_token_ids=(1,), bos="<bos>", eos="<eos>", chat_template=template)


# --- streaming ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(deadline=None, max_examples=150)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁�"), max_size=30))
def test_streamed_pieces_join_to_the_whole_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    stream = StreamDecoder(tokenizer)
    joined = "".join([stream.push(token) for token in tokens]) + stream.finish()
    assert joined == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_tokens_stream_without_an_error_and_nothing_is_held_for_long(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    stream = StreamDecoder(tokenizer)
    silent = 0
    for token in tokens:
        silent = 0 if stream.push(token) or token < FIRST_BYTE_ID else silent + 1
        assert silent <= PENDING_TOKENS_MAX
    stream.finish()
    assert stream.finish() == ""


def test_a_character_of_four_tokens_appears_when_it_is_complete() -> None:
    stream = codec().stream_decoder()
    assert [stream.push(FIRST_BYTE_ID + value) for value in "🙂".encode()] == ["", "", "", "🙂"]


def test_an_unfinished_character_is_shown_as_damaged_at_the_end() -> None:
    stream = codec().stream_decoder()
    assert stream.push(FIRST_BYTE_ID + 0xF0) == ""
    assert stream.finish() == "�"


def test_spaces_before_words_are_kept_and_the_first_one_follows_the_tokenizer() -> None:
    tokens = TOKENIZERS["llama"].encode("he we", add_special_tokens=False).ids
    stream = StreamDecoder(TOKENIZERS["llama"])
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == "he we"
    assert any(piece.startswith(" ") for piece in pieces)


def test_special_tokens_give_no_text() -> None:
    stream = codec().stream_decoder()
    assert stream.push(1) == ""
    assert codec().decode([2, *codec().encode("hello", add_bos=False), 1]) == "hello"


# --- encoding ----------------------------------------------------------------------------------------------------


def test_the_begin_token_comes_once_and_only_when_wanted() -> None:
    assert codec().encode("he")[0] == 2
    assert codec().encode("he", add_bos=False)[0] != 2
    assert codec().encode("<bos>he") == codec().encode("he")


def test_half_a_character_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lone surrogate"):
        codec().encode("\ud800")


def test_saved_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(TextCodec.load(tmp_path).encode("hello world")) == len(codec().encode("hello world")) > 4


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [1, 3]}, "config": {"eos_token_id": 2}}, (1, 3)),
        ({"generation_config": {}, "config": {"eos_token_id": 2}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>"}}}, (1,)),
        ({"config": {"eos_token_id": []}}, ()),
        ({}, ()),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_them(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    assert TextCodec.load(write_folder(tmp_path, **files)).eos_token_ids == expected


def test_a_missing_or_damaged_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="not a tokenizer"):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_settings_are_a_model_error(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match="tokenizer_config"):
        TextCodec.load(tmp_path)


# --- chat --------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "settings_file",
    [
        {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<bos>"},
        {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": "<bos>hello"}]},
    ],
)
def test_templates_inside_the_tokenizer_settings_are_found(tmp_path: Path, settings_file: dict[str, object]) -> None:
    assert TextCodec.load(write_folder(tmp_path, tokenizer_config=settings_file)).apply_chat_template(CHAT) == "<bos>hello"


def test_the_template_file_comes_first(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": "settings"})
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert TextCodec.load(tmp_path).apply_chat_template(CHAT) == "file"


def test_a_chat_has_one_begin_token() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    assert codec(template).encode_chat(CHAT) == codec().encode("hello")


def test_the_generation_prompt_is_optional() -> None:
    chat = codec("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}")
    assert chat.apply_chat_template(CHAT) == "hello>"
    assert chat.apply_chat_template(CHAT, add_generation_prompt=False) == "hello"


def test_json_in_templates_is_not_escaped_for_html() -> None:
    assert codec("{{ messages | tojson }}").apply_chat_template([{"role": "<é>"}]) == '[{"role": "<é>"}]'


@pytest.mark.parametrize("messages", [[], [{}], [{"role": 1}]])
def test_messages_without_a_role_are_refused(messages: list[dict[str, object]]) -> None:
    with pytest.raises(InvalidInput, match="each with a role"):
        codec("x").apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ 1 + messages }}", "{{ messages.x.y }}", "{{ ''.__class__.__mro__ }}"],
)
def test_what_a_template_refuses_is_invalid_input(template: str) -> None:
    with pytest.raises(InvalidInput, match="refuses"):
        codec(template).apply_chat_template(CHAT)


def test_templates_cannot_change_what_they_are_given() -> None:
    messages = list(CHAT)
    with pytest.raises(InvalidInput):
        codec("{{ messages.append(1) }}").apply_chat_template(messages)
    assert messages == CHAT


def test_no_template_and_a_broken_template() -> None:
    assert not codec().has_chat_template
    with pytest.raises(InvalidInput, match="no chat template"):
        codec().apply_chat_template(CHAT)
    with pytest.raises(ModelError, match="not valid"):
        codec("{% if %}")
