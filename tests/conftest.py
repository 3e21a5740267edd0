"""What every test gets: a fast BLAS before anything imports mlx, and a check that nothing is left running."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

from kakeya_zmq.model.blas import prepare_blas
from tests.fleet_rig import KEPT_PROCESSES

prepare_blas(1)
# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
