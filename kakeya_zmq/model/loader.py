"""Loading a model folder into an engine, and deriving what it is compatible with; nothing heavy is imported before a call.

No tokenizer is loaded: an engine sees token ids only, and mlx-lm's tokenizer costs seconds and hundreds of megabytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakeya_zmq.compat import CACHE_FORMAT_VERSION, Compatibility, check_assertions
from kakeya_zmq.engine import ModelFacts
from kakeya_zmq.model import revision
from kakeya_zmq.model.revision import DigestCache, Progress
from wire.errors import ConfigError, KakeyaError, ModelError
from wire.limits import BLOCK_TOKENS_DEFAULT, NAME_CHARACTERS_MAX, PROMPT_TOKENS_MAX, TEXT_CHARACTERS_MAX

if TYPE_CHECKING:
    from kakeya_zmq.model.blas import BlasReport
    from kakeya_zmq.model.engine import MlxEngine
    from kakeya_zmq.model.layout import CacheLayout
    from kakeya_zmq.model.policy import CachePolicy

SEGMENT_TOKENS_DEFAULT = 256
"""Measured: as fast as larger segments, and the smallest that is."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""Names under which model configurations tell their longest context, the usual one first."""
LOAD_FAILURES = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, MemoryError)
"""What mlx-lm raises for a folder that it can't make a model of: it builds objects from unchecked configuration."""


def load_engine(
    folder: Path,
    *,
    model_id: str | None = None,
    revision_label: str = "",
    block_tokens: int = BLOCK_TOKENS_DEFAULT,
    segment_tokens: int = SEGMENT_TOKENS_DEFAULT,
    policy: CachePolicy | None = None,
    tenant: str = "default",
    digest_cache: Path | None = None,
    blas_threads: int | None = None,
    on_progress: Progress | None = None,
    assertions: Mapping[str, str | int] | None = None,
) -> MlxEngine:
    """Load a model in mlx-lm's folder layout, warmed up; call it on the thread that will run the engine.

    Weights keep the dtype the folder has.

    Args:
        folder: holds config.json and model*.safetensors.
        model_id: name in the compatibility tuple; the folder's name if None.
        revision_label: the operator's own name of the revision; set beside the weights' digest, never in its place.
        block_tokens: tokens of a KV block.
        segment_tokens: grid of prefill, a multiple of ``block_tokens``.
        policy: None for the model's own caches.
        tenant: tenant namespace.
        digest_cache: file that remembers weight digests, None to hash every time.
        blas_threads: threads of the CPU's matrix library, None for its default; has no effect on Apple silicon.
        on_progress: called with one line for a user now and then.
        assertions: compatibility fields the operator wants to be sure of.

    Raises:
        ModelError: the folder can't be loaded, or its caches are not supported.
        ConfigError: an assertion does not hold, or a number is out of range.
    """
    tell = on_progress or _tell_nobody
    if blas_threads is not None and blas_threads < 1:
        raise ConfigError(f"the number of BLAS threads must be at least 1, not {blas_threads}")
    config = read_config(folder)
    name = _checked_name(model_id if model_id is not None else folder.resolve().name)
    files = revision.weight_files(folder)
    weights = revision.model_revision(config, files, DigestCache(digest_cache), on_progress)
    tokenizer = revision.tokenizer_revision(folder)

    # MLX binds its matrix library when it is first imported.
    from kakeya_zmq.model.blas import prepare_blas

    report = prepare_blas(blas_threads)
    if report.warning:
        tell(report.warning)
    tell(f"loading {name}")
    model = load_weights(folder, report)
    return _assemble(
        model,
        config,
        name=name,
        model_revision=f"{weights} {revision_label}" if revision_label else weights,
        tokenizer_revision=tokenizer,
        eos_token_ids=eos_token_ids(folder, config),
        block_tokens=block_tokens,
        segment_tokens=segment_tokens,
        policy=policy,
        tenant=tenant,
        assertions=assertions or {},
    )


def engine_from_model(
    model: Any,
    *,
    name: str,
    block_tokens: int = BLOCK_TOKENS_DEFAULT,
    segment_tokens: int = SEGMENT_TOKENS_DEFAULT,
    policy: CachePolicy | None = None,
    tenant: str = "default",
    eos_token_ids: tuple[int, ...] = (),
    assertions: Mapping[str, str | int] | None = None,
    launch_ahead: bool | None = None,
) -> MlxEngine:
    """An engine for an mlx-lm model that was built in memory; its revision is a digest of its parameters.

    ``launch_ahead``: see :class:`MlxEngine`.

    Raises:
        ModelError, ConfigError: as :func:`load_engine`.
    """
    import mlx.core as mx

    mx.eval(model.parameters())
    config = _arguments_of(model)
    return _assemble(
        model,
        config,
        name=_checked_name(name),
        model_revision=revision.parameters_revision(config, _parameters(model)),
        tokenizer_revision="none",
        eos_token_ids=eos_token_ids,
        block_tokens=block_tokens,
        segment_tokens=segment_tokens,
        policy=policy,
        tenant=tenant,
        assertions=assertions or {},
        launch_ahead=launch_ahead,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        ModelError: no such folder, no config.json, or not a JSON object with a ``model_type``.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}", remedy="give the folder that holds config.json")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"no config.json in {folder}", remedy="give a folder in mlx-lm's format")
    config = _read_json(path)
    if config is None:
        raise ModelError(f"config.json in {folder} is not a JSON object", remedy="download or convert the model again")
    if not isinstance(config.get("model_type"), str):
        raise ModelError("config.json names no model_type", remedy="download or convert the model again")
    return config


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json, else config.json, else the tokenizer's own; may be empty."""
    generation = _read_json(folder / "generation_config.json") or {}
    for source in (generation, config, config.get("text_config")):
        found = _ids(source.get("eos_token_id")) if isinstance(source, Mapping) else ()
        if found:
            return found
    return _tokenizer_eos(folder)


def _tokenizer_eos(folder: Path) -> tuple[int, ...]:
    settings = _read_json(folder / "tokenizer_config.json") or {}
    text = settings.get("eos_token")
    if isinstance(text, Mapping):
        text = text.get("content")
    added = settings.get("added_tokens_decoder")
    if not isinstance(text, str) or not isinstance(added, Mapping):
        return ()
    return tuple(
        int(key)
        for key, entry in added.items()
        if isinstance(entry, Mapping) and entry.get("content") == text and str(key).isdecimal()
    )


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when the file is absent, unreadable or something else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # the caller knows whether that matters
        return None
    return value if isinstance(value, dict) else None


def load_weights(folder: Path, blas: BlasReport) -> Any:
    """The mlx-lm model of a folder, with what makes it fast on this machine's matrix library.

    Raises:
        ModelError: mlx-lm cannot load it.
    """
    import mlx.core as mx

    from kakeya_zmq.model.open_files import limit_kept

    with limit_kept():
        from mlx_lm.utils import load_model

    try:
        model, _ = load_model(folder, lazy=False)
        mx.eval(model.parameters())
    except LOAD_FAILURES as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ModelError(
            f"the model cannot be loaded: {lines[0][: TEXT_CHARACTERS_MAX // 2]}",
            remedy="check that mlx-lm supports this model and that its download is complete",
        ) from error
    if blas.small_products:
        from kakeya_zmq.model.single_row import use_small_products

        use_small_products(model)
    return model


def _assemble(
    model: Any,
    config: Mapping[str, Any],
    *,
    name: str,
    model_revision: str,
    tokenizer_revision: str,
    eos_token_ids: tuple[int, ...],
    block_tokens: int,
    segment_tokens: int,
    policy: CachePolicy | None,
    tenant: str,
    assertions: Mapping[str, str | int],
    launch_ahead: bool | None = None,
) -> MlxEngine:
    from mlx.utils import tree_flatten

    from kakeya_zmq.model.engine import MlxEngine
    from kakeya_zmq.model.layout import CacheLayout
    from kakeya_zmq.model.policy import CachePolicy

    used = policy or CachePolicy.native()
    layout = CacheLayout(model, block_tokens=block_tokens, policy=used)
    compatibility = Compatibility(
        model_id=name,
        model_revision=model_revision,
        tokenizer_revision=tokenizer_revision,
        quantization=revision.quantization_name(config),
        kv_dtype=layout.kv_dtype,
        cache_format_version=CACHE_FORMAT_VERSION,
        rope_hash=revision.rope_hash(config),
        layer_geometry_hash=revision.text_sha256(layout.geometry),
        block_size_tokens=block_tokens,
        sink_size=used.sink_tokens,
        window_size=used.window_tokens,
        tenant_namespace=_checked_name(tenant),
    )
    check_assertions(compatibility, assertions)
    vocabulary = _warm_up(model, layout)
    facts = ModelFacts(
        compatibility=compatibility,
        requirement=layout.requirement,
        part_bytes_per_token=layout.part_bytes_per_token,
        state_part_bytes=layout.state_part_bytes,
        max_context_tokens=_context_tokens(config),
        eos_token_ids=tuple(token for token in eos_token_ids if token < vocabulary),
        vocabulary_size=vocabulary,
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    )
    return MlxEngine(model, layout, facts, segment_tokens=segment_tokens, launch_ahead=launch_ahead)


def _warm_up(model: Any, layout: CacheLayout) -> int:
    """Run one token, so that the first request finds weights and kernels ready; returns the vocabulary's size."""
    import mlx.core as mx

    try:
        logits = model(mx.array([[0]]), cache=layout.new_caches())
        mx.eval(logits)
        return int(logits.shape[-1])
    except KakeyaError:
        raise
    except LOAD_FAILURES as error:
        raise ModelError(f"the model cannot run: {type(error).__name__}", remedy="try it with mlx_lm.generate") from error


def _context_tokens(config: Mapping[str, Any]) -> int:
    for source in (config, config.get("text_config")):
        if isinstance(source, Mapping):
            for key in CONTEXT_KEYS:
                value = source.get(key)
                if isinstance(value, int) and value > 0:
                    return value
    return PROMPT_TOKENS_MAX


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise ModelError(
            f"a model or tenant name must be 1 to {NAME_CHARACTERS_MAX} printable characters", remedy="give another name"
        )
    return name


def _arguments_of(model: Any) -> dict[str, Any]:
    arguments = getattr(model, "args", None)
    if arguments is not None and dataclasses.is_dataclass(arguments) and not isinstance(arguments, type):
        return dataclasses.asdict(arguments)
    return {}


def _parameters(model: Any) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten

    for name, array in tree_flatten(model.parameters()):
        # bfloat16 has no NumPy type: digest its bits.
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        contents = np.ascontiguousarray(np.asarray(bits)).reshape(-1).view(np.uint8)
        yield name, str(array.dtype), tuple(array.shape), contents.data


def _tell_nobody(line: str) -> None:
    del line
