"""What every test gets: a fast BLAS before anything imports mlx, and a check that nothing is left running. And what
several folders share: the fixtures of fleets (tests/fleet_rig.py)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from kakeya_zmq.model.blas import prepare_blas
from tests.fleet_rig import KEPT_PROCESSES, Fleet, Reference, kept_fleet, model_folder

prepare_blas(1)
# How long an example takes says more about the machine than about the code. A change is judged by the same examples as the
# code before it; other ones are looked for with deploy/test.sh --all, or --hypothesis-profile random.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """A run in the background of a script inherits an ignored SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LEAK_WAIT_S = 5.0
"""How long something that is already ending may take."""


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if not _is_python_helper(child)}


def _is_python_helper(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker lives as long as the test run; a zombie or vanished child holds nothing."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # gone while we looked
        return True


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread or a child process behind; a longer-lived fixture's are its business."""
    threads, children = _threads(), _children()
    yield
    kept = request.session.stash.get(KEPT_PROCESSES, set())

    def new_children() -> set[psutil.Process]:
        return {child for child in _children() - children if child.pid not in kept}

    deadline = time.monotonic() + LEAK_WAIT_S
    while (_threads() - threads or new_children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [thread.name for thread in _threads() - threads] + [f"process {child.pid}" for child in new_children()]
    if left:
        pytest.fail(f"left running: {', '.join(sorted(left))}")


# --- fleets ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model. A module that needs another one overrides this; the fixtures below follow."""
    return model_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    """What every answer must be."""
    return Reference(model)


@pytest.fixture(scope="module")
def empty_fleet(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet without nodes, which ends with the module; a module's own ``running`` starts some in it."""
    with kept_fleet(request, model, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Iterator[Fleet]:
    """The module's ``running`` fleet, with everybody there and joined; pytest shows its logs with a failure only."""
    running.heal()
    yield running
    running.show_logs()
