"""Builders of tiny models with random weights, one for each kind of cache mlx-lm has; each builds in tens of ms.

Weights are normal x 0.15: large enough for every layer to matter, small enough for finite logits.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

VOCABULARY: Final = 512
WINDOW: Final = 128
"""Sliding window, or attention chunk, of every tiny model that has one."""

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
}

_GEMMA3: Final = {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "sliding_window_pattern": 2}

_GEMMA4: Final[dict[str, Any]] = {
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_double_wide_mlp": False,
}

_SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_shared": {
        **_GEMMA4,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4_k_eq_v": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 64},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_theta": 150_000,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
    },
    "llama4": {
        "attention_bias": False,
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 128,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
        "full_attn_idxs": [1, 3],
    },
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "layer_norm_epsilon": 1e-6,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_d_head": 32,
        "mamba_n_heads": 4,
        "mamba_chunk_size": 64,
    },
}

KINDS: Final = tuple(_SPECIAL)
STATE_KINDS: Final = frozenset({"qwen3_next", "lfm2", "mamba2", "falcon_h1"})
"""Kinds with recurrent or convolution state: to be resumed only where it was captured."""
WINDOW_KINDS: Final = frozenset({"gemma3_text", "gemma4_text", "gemma4_shared", "gemma4_k_eq_v", "gpt_oss", "llama4"})

_MODULES: Final = {"gemma4_shared": "gemma4_text", "gemma4_k_eq_v": "gemma4_text"}


def build(kind: str, seed: int = 0, dtype: Any = mx.float32) -> Any:
    """A tiny random model of one of ``KINDS``, evaluated; the same seed gives the same weights."""
    name = _MODULES.get(kind, kind)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {**_COMMON, "model_type": name, **_SPECIAL[kind]}
    if kind == "llama4":
        config = {"model_type": name, "text_config": config}
    model = module.Model(module.ModelArgs.from_dict(config))
    key = mx.random.key(seed)
    weights = []
    for path, value in tree_flatten(model.parameters()):
        key, use = mx.random.split(key)
        weights.append((path, (mx.random.normal(value.shape, key=use) * 0.15).astype(dtype)))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def prompt(length: int, seed: int = 0) -> Any:
    """Random token ids (1, length), the same for the same seed."""
    return mx.random.randint(0, VOCABULARY, (1, length), key=mx.random.key(1000 + seed))
