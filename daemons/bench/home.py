"""The temporary home of a run: a folder for keys and daemons, gone with the run however that ends.

- A run that ends, or is interrupted, ends what it started and removes the folder.
- One that is killed cannot. Its watch (:mod:`daemons.bench.watch`) does, a process of its own.
- If the watch is killed too, or the machine stops, the next run does: it knows a home that nobody owns by the lock on the
  note of its owner, which the system takes away with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from daemons.bench.watch import STOP_SECONDS_MAX, end_home
from wire.errors import ConfigError

PREFIX: Final = "kakeya-bench-"
OWNER_FILE: Final = "owner"
KEPT_VARIABLES: Final = ("KAKEYA_MODEL_CACHE", "KAKEYA_DEBUG")
TEMPORARY_FOLDER_VARIABLES: Final = ("TMPDIR", "TEMP", "TMP")
"""In the order in which Python looks at them."""


@contextlib.contextmanager
def temporary_home() -> Iterator[Path]:
    """A KAKEYA_HOME of its own for this process and all it starts, gone afterwards.

    Settings in the user's environment are hidden meanwhile: every fleet here is measured with the same ones.

    Raises:
        ConfigError: the folder for temporary files cannot be used.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("KAKEYA_") and name not in KEPT_VARIABLES}
    with _folder() as folder, _owned(folder), _watched(folder):
        for name in before:
            del os.environ[name]
        os.environ["KAKEYA_HOME"] = str(folder)
        try:
            yield folder
        finally:
            del os.environ["KAKEYA_HOME"]
            os.environ.update(before)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A new folder where the environment says; Python alone would go elsewhere without a word, and MLX would fail."""
    named = next((name for name in TEMPORARY_FOLDER_VARIABLES if os.environ.get(name)), "")
    parent = os.path.abspath(os.environ[named]) if named else ""
    try:
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(Path(parent))
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
    except OSError as error:
        what = f"the folder for temporary files, {parent or '/tmp'}{f' (from {named})' if named else ''}, cannot be used"
        remedy = "set TMPDIR to a folder that can be written"
        raise ConfigError(f"{what}: {error.strerror or type(error).__name__}", remedy=remedy) from None
    with folder as name:
        yield Path(name)


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """The note of its owner is there and locked. It appears locked: in between it would be an abandoned one's."""
    unfinished = folder / f"{OWNER_FILE}.tmp"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: no note, and the next run leaves it alone
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unfinished.rename(folder / OWNER_FILE)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[None]:
    """A watch waits for the end of its input, which is the end of this block or of this process."""
    watch = subprocess.Popen(
        [sys.executable, "-m", "daemons.bench.watch", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor a kill of our process group reaches it
    )
    try:
        yield
    finally:
        assert watch.stdin is not None
        watch.stdin.close()
        try:
            watch.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            watch.kill()
            watch.wait()


def _remove_abandoned(parent: Path) -> None:
    """Remove homes of this user's runs that are gone, and end what still lives there."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # no note, held by a run, gone by now
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_home(folder)
            finally:
                os.close(descriptor)
