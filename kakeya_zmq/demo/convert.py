"""Gemma 3 270M as a GGUF file → a folder that mlx-lm loads (float32 weights, tokenizer, configuration).

float32, because bfloat16 and quantized products run in scalar code on MLX's CPU backend. The weights are streamed: one
slab of rows is dequantized, written and hashed at a time, so memory stays far below the size of the model. The safetensors
layout is: 8 bytes little-endian header length, a JSON header {name: dtype, shape, data_offsets}, the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format").

The tokenizer is built from the GGUF's own vocabulary. Gemma's is a SentencePiece BPE: a pair may merge when the joined
piece is in the vocabulary, the piece with the best score first; pieces that the authors defined by hand (newlines, runs of
spaces, markup) are cut out of the text before that; what has no piece is spelled in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from wire.errors import ModelError

Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done and the share of the whole that is done, 0 to 1."""

END_TOKEN_IDS: Final = (1, 106)
"""<eos> and <end_of_turn>."""
TURN_END_TOKEN: Final = "<end_of_turn>"
SLAB_ROWS: Final = 16_384
"""Rows dequantized at a time: 40 MiB of float32 for this model's widest tensor."""
SLIDING_PATTERN: Final = 6
"""Every sixth layer attends to everything; GGUF doesn't carry it for this architecture."""
ROPE_LOCAL_BASE: Final = 10_000.0
"""RoPE base of the sliding layers; GGUF doesn't carry it either."""

_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class PieceKind(IntEnum):
    """Token types as GGUF stores them (``tokenizer.ggml.token_type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces in id order, with the scores and kinds of SentencePiece."""

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]


def mlx_name(gguf_name: str) -> str:
    """The mlx-lm name (``gemma3_text``) of a GGUF tensor.

    Raises:
        ModelError: this architecture has no such tensor.
    """
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if layer.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise ModelError(f"the GGUF file has a tensor this conversion doesn't know: {gguf_name}")


def is_norm(name: str) -> bool:
    """Whether ``name`` (mlx-lm's) is an RMSNorm weight: GGUF stores 1 + weight, mlx-lm adds the 1 at run time."""
    return name.endswith("norm.weight")


def convert_gguf(gguf_path: Path, folder: Path, on_progress: Progress) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into ``folder``.

    Raises:
        ModelError: the file is not a Gemma 3 text model, or the ``gguf`` or ``tokenizers`` package is missing.
        OSError: ``folder`` can't be written.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("the package gguf is missing", remedy='pip install "kakeya-zmq[demo]"') from error
    on_progress("read the index", 0.0)
    reader = gguf.GGUFReader(str(gguf_path))
    _write_json(folder / "config.json", model_config(lambda key: _field(reader, key)))
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 2, "eos_token_id": list(END_TOKEN_IDS), "pad_token_id": 0}
    )
    on_progress("build the tokenizer", 0.45)
    vocabulary = Vocabulary(
        pieces=_field(reader, "tokenizer.ggml.tokens"),
        scores=_field(reader, "tokenizer.ggml.scores"),
        kinds=_field(reader, "tokenizer.ggml.token_type"),
    )
    write_tokenizer(vocabulary, folder)
    on_progress("convert the weights", 0.6)
    _write_weights(
        reader.tensors, folder / "model.safetensors", lambda share: on_progress("convert the weights", 0.6 + 0.4 * share)
    )


def model_config(read: Callable[[str], Any]) -> dict[str, Any]:
    """mlx-lm's ``config.json`` from GGUF metadata.

    Args:
        read: gives the value of a metadata key; raises ModelError when it isn't there.

    Raises:
        ModelError: another architecture.
    """
    if read("general.architecture") != "gemma3":
        raise ModelError(f"the GGUF file holds {read('general.architecture')!r}, not gemma3")
    head_dim = read("gemma3.attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": read("gemma3.embedding_length"),
        "num_hidden_layers": read("gemma3.block_count"),
        "intermediate_size": read("gemma3.feed_forward_length"),
        "num_attention_heads": read("gemma3.attention.head_count"),
        "num_key_value_heads": read("gemma3.attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        # Stored as float32; six digits give back the 1e-6 of the published configuration.
        "rms_norm_eps": float(f"{read('gemma3.attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": len(read("tokenizer.ggml.tokens")),
        "rope_theta": read("gemma3.rope.freq_base"),
        "rope_local_base_freq": ROPE_LOCAL_BASE,
        "sliding_window": read("gemma3.attention.sliding_window"),
        "sliding_window_pattern": SLIDING_PATTERN,
        "max_position_embeddings": read("gemma3.context_length"),
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(END_TOKEN_IDS),
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
    }


def merge_ranks(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair that may merge, best score first (of equal scores the smaller ids first)."""
    ids = {
        piece: index
        for index, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.kinds, strict=True))
        if kind == PieceKind.NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-vocabulary.scores[index], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Raises:
        ModelError: the ``tokenizers`` package is missing.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    except ImportError as error:
        raise ModelError("the package tokenizers is missing", remedy='pip install "kakeya-zmq[demo]"') from error
    bpe = models.BPE(
        vocab={piece: index for index, piece in enumerate(vocabulary.pieces)},
        merges=merge_ranks(vocabulary),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    kinds = list(zip(vocabulary.pieces, vocabulary.kinds, strict=True))
    # <end_of_turn> is "user defined" in the vocabulary, but it ends a reply and must not be shown.
    special = [
        AddedToken(p, special=True, normalized=False) for p, k in kinds if k == PieceKind.CONTROL or p == TURN_END_TOKEN
    ]
    plain = [
        AddedToken(p, special=False, normalized=False)
        for p, k in kinds
        if k == PieceKind.USER_DEFINED and p != TURN_END_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary.pieces.index("<bos>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32_768,
        },
    )


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Length prefix and JSON header of a safetensors file of float32 tensors, in the order of ``shapes``.

    The header is padded with spaces to a multiple of 8 bytes, so that the data is aligned.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, shape in shapes.items():
        length = 4 * int(np.prod(shape, dtype=np.int64))
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    body = json.dumps(entries, separators=(",", ":")).encode("ascii")
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _write_weights(tensors: Sequence[Any], path: Path, on_share: Callable[[float], None]) -> None:
    named = sorted((mlx_name(tensor.name), tensor) for tensor in tensors)
    # GGUF lists the fastest dimension first.
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in named}
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    written = 0
    with path.open("wb") as output:
        output.write(safetensors_header(shapes))
        for name, tensor in named:
            start = written
            for slab in _dequantized(tensor, norm=is_norm(name)):
                output.write(slab.data)
                written += slab.size
                on_share(written / total)
            if written - start != int(np.prod(shapes[name], dtype=np.int64)):
                raise ModelError(f"tensor {name} holds {written - start} values, not those of its shape {shapes[name]}")


def _dequantized(tensor: Any, *, norm: bool) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's values in float32, a slab of rows at a time."""
    from gguf import quants

    data = tensor.data if tensor.data.ndim > 1 else tensor.data[None, :]
    for start in range(0, len(data), SLAB_ROWS):
        values = quants.dequantize(data[start : start + SLAB_ROWS], tensor.tensor_type)
        if norm:
            values = values - np.float32(1.0)
        yield np.ascontiguousarray(values, dtype="<f4")


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"the GGUF file lacks {key}")
    return field.contents()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
