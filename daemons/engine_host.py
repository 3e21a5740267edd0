"""Loads the model of a primary or worker on the engine's thread, and brings its events to the reactor."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from daemons.decode_child import child_settings
from daemons.dispatch import Dispatcher
from daemons.engine_loading import load_model
from kakeya_zmq.calibration import measure_prefill
from kakeya_zmq.compat import check_field_names
from kakeya_zmq.config import Settings
from kakeya_zmq.decode_worker.engine import DecodeWorkerEngine
from kakeya_zmq.decode_worker.values import WorkerSettings
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


def need_model_libraries() -> None:
    """Whether MLX is installed, found without the seconds of importing it.

    Raises:
        ModelError: it is not.
    """
    missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{' and '.join(missing)} cannot be imported here, and a primary or worker computes with MLX",
            remedy="run: pip install 'kakeya-zmq[mlx]'; a cache peer needs no model",
        )


def parse_assertions(texts: tuple[str, ...]) -> dict[str, str | int]:
    """``field=value`` pairs; whole numbers become integers.

    Raises:
        ConfigError: a text without ``=``, or a field that there is none of.
    """
    asserted: dict[str, str | int] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--assert-compatibility {text!r} is not field=value", remedy="for example window_size=2048")
        value = value.strip()
        asserted[name.strip()] = int(value) if value.isdigit() and name.strip().endswith(("_tokens", "_size")) else value
    check_field_names(asserted)
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
    need_model_libraries()
    folder = model_folder(settings)
    assertions = parse_assertions(settings.assert_compatibility)
    measured: list[float] = []

    def tell(text: str) -> None:
        _log.info("%s", text)

    def build() -> Engine:
        engine = load_model(settings, folder, assertions, tell=tell)
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

    child: DecodeWorkerEngine | None = None
    if settings.decode_worker:
        given = _worker_settings(settings, child_settings(settings, folder, assertions))
        child = DecodeWorkerEngine(given, tell=tell, warn=lambda text: _log.warning("%s", text))

    def start_child() -> Engine:
        assert child is not None
        child.start()
        measured.append(child.tokens_per_second)
        return child

    def post(event: RunnerEvent) -> None:
        reactor.post(lambda: deliver(event))

    runner = EngineRunner(build if child is None else start_child, post, control=child)
    dispatcher.runner = runner
    return runner


def _worker_settings(settings: Settings, for_child: bytes) -> WorkerSettings:
    return WorkerSettings(
        program=(sys.executable, "-m", "daemons.decode_child"),
        settings=for_child,
        step_timeout_s=settings.decode_worker_timeout_s,
        startup_timeout_s=settings.decode_worker_startup_timeout_s,
    )
