"""Loads the model of a primary or worker on the engine's thread, and brings its events to the reactor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from daemons.dispatch import Dispatcher
from kakeya_zmq.calibration import measure_prefill
from kakeya_zmq.codecs.engine import CodecEngine
from kakeya_zmq.codecs.registry import storage_codec
from kakeya_zmq.compat import check_assertions
from kakeya_zmq.config import Settings, kakeya_home
from kakeya_zmq.demo.prepare import demo_model_folder
from kakeya_zmq.engine import Engine, ModelFacts
from kakeya_zmq.engine_runner import EngineFailed, EngineReady, EngineRunner, RunnerEvent
from kakeya_zmq.io.reactor import Reactor
from wire.errors import ConfigError, ModelError

_log = logging.getLogger(__name__)


def model_folder(settings: Settings) -> Path:
    """The configured model, or the prepared demo model.

    Raises:
        ModelError: there is neither.
    """
    if settings.model:
        return Path(settings.model)
    folder = demo_model_folder()
    if not folder.is_dir():
        raise ModelError(
            "no model is configured and the demo model is not prepared",
            remedy="give --model FOLDER, or run `kakeya model prepare`",
        )
    return folder


def parse_assertions(texts: tuple[str, ...]) -> dict[str, str | int]:
    """``field=value`` pairs; whole numbers become integers.

    Raises:
        ConfigError: a text without ``=``.
    """
    asserted: dict[str, str | int] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--assert-compatibility {text!r} is not field=value", remedy="for example window_size=2048")
        value = value.strip()
        asserted[name.strip()] = int(value) if value.isdigit() and name.strip().endswith(("_tokens", "_size")) else value
    return asserted


def make_runner(
    reactor: Reactor,
    settings: Settings,
    dispatcher: Dispatcher,
    *,
    on_ready: Callable[[ModelFacts, float], None],
    on_failed: Callable[[Exception], None],
) -> EngineRunner:
    """Build the runner (not started): its thread loads the model and owns it.

    Args:
        on_ready: given the model's facts and the measured tokens per second of prefill.
        on_failed: given what kept the model from loading.

    Raises:
        ModelError: no model is configured or prepared.
        ConfigError: an assertion cannot be parsed.
    """
    folder = model_folder(settings)
    assertions = parse_assertions(settings.assert_compatibility)
    measured: list[float] = []

    def build() -> Engine:
        # Imported on the engine's thread: MLX takes seconds to import, and must be used on the thread that loads it.
        from kakeya_zmq.model.blas import prepare_blas

        # MLX binds its matrix library when it is first imported, so this comes before every import that needs MLX.
        threads = settings.blas_threads or os.cpu_count() or 1
        report = prepare_blas(threads)
        if report.warning:
            _log.warning("%s", report.warning)
        from kakeya_zmq.model.layout import CachePolicy
        from kakeya_zmq.model.loader import load_engine

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
            blas_threads=threads,
            on_progress=lambda text: _log.info("%s", text),
            assertions={name: value for name, value in assertions.items() if name != "cache_format_version"},
        )
        engine: Engine = loaded
        if settings.cache_compression != "none":
            engine = CodecEngine(loaded, codec, loaded.layout.row_geometry)
        check_assertions(engine.facts.compatibility, assertions)
        measured.append(measure_prefill(engine))
        _log.info("prefill on this machine: %.0f tokens/s", measured[0])
        return engine

    def deliver(event: RunnerEvent) -> None:
        match event:
            case EngineReady(facts=facts):
                on_ready(facts, measured[0])
            case EngineFailed(message=message, error=error):
                on_failed(error if isinstance(error, ConfigError) else ModelError(message))
            case _:
                dispatcher.engine_event(event)

    runner = EngineRunner(build, lambda event: reactor.post(lambda: deliver(event)))
    dispatcher.runner = runner
    return runner
