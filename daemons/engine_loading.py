"""Builds the engine that settings describe, on the thread that will run it: in a daemon, or in its decode worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kakeya_zmq.codecs.engine import CodecEngine
from kakeya_zmq.codecs.registry import storage_codec
from kakeya_zmq.compat import check_assertions
from kakeya_zmq.config import Settings, kakeya_home
from kakeya_zmq.engine import Engine


def load_model(
    settings: Settings, folder: Path, assertions: Mapping[str, str | int], *, tell: Callable[[str], None]
) -> Engine:
    """Load a model as the settings say; MLX must not have been imported before.

    Args:
        folder: of the model.
        assertions: compatibility fields the operator wants to be sure of.
        tell: takes one line of progress or warning.

    Raises:
        ModelError: the folder can't be loaded, or its caches are not supported.
        ConfigError: an assertion does not hold, or a number is out of range.
    """
    # Here, not above: only processes with a model need this package. It imports MLX on the engine's thread, which must be
    # the one that uses it, and after the matrix library that MLX binds to.
    from kakeya_zmq.model.loader import load_engine
    from kakeya_zmq.model.policy import CachePolicy

    bounded = settings.kv_policy == "sink-window"
    codec = storage_codec(settings.cache_compression, q_range=settings.lattice_q)
    loaded = load_engine(
        folder,
        model_id=settings.model_id or None,
        revision_label=settings.revision_label,
        block_tokens=settings.cache_block_tokens,
        segment_tokens=settings.prefill_compute_chunk_tokens,
        policy=CachePolicy.sink_window(settings.sink, settings.window) if bounded else CachePolicy.native(),
        tenant=settings.tenant_id,
        digest_cache=kakeya_home() / "digests.json",
        blas_threads=settings.blas_threads or os.cpu_count() or 1,
        on_progress=tell,
        assertions={name: value for name, value in assertions.items() if name != "cache_format_version"},
    )
    engine: Engine = loaded
    if settings.cache_compression != "none":
        engine = CodecEngine(loaded, codec, loaded.layout.row_geometry)
    check_assertions(engine.facts.compatibility, assertions)
    return engine
