"""MLX: is it there, on which device, how fast; and the model folders: whole, and of a kind that can be loaded."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from daemons.check import check_model_folder
from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.doctor.site import Site
from daemons.engine_host import model_folder
from wire.errors import KakeyaError

PROBE: Final = ("-m", "kakeya_zmq.model.speed_probe")
FOLDER_PROBE: Final = ("-m", "kakeya_zmq.model.folder_probe")
PROBE_TIMEOUT_S: Final = 120.0
SLOW_GFLOPS: Final = 10.0
"""For each thread. A reference BLAS reaches about 2, a good one 40 and more on any machine of the last ten years."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of the folder probe: ``part`` is "weights" or "tokenizer"."""

    part: str
    error: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Speed:
    """What the probe measured: float32 matrix products on the default device."""

    device: str
    gigaflops: float
    threads: int
    blas: str
    warning: str


def examine_model(site: Site) -> Iterator[Finding]:
    """A machine without MLX may still be a cache peer: that is a remark, not a problem."""
    yield from _folders(site)
    if not site.quick:
        yield judge_probe(*_last_line(_run(*PROBE)))


def _folders(site: Site) -> Iterator[Finding]:
    """Each folder once, whichever roles use it: completeness always, what only loading would show not in a quick look."""
    configured = [settings for role, settings in site.settings.items() if role != "cache" and settings.model]
    for folder in dict.fromkeys(map(model_folder, configured)):
        try:
            check_model_folder(folder)
        except KakeyaError as error:
            yield problem("model", error.message, error.remedy or "check --model (KAKEYA_MODEL)")
            continue
        if not site.quick:
            yield from judge_folder(folder, _run(*FOLDER_PROBE, str(folder)))


def judge_folder(folder: Path, done: subprocess.CompletedProcess[str] | None) -> Iterator[Finding]:
    """What the probe has written; nothing where it could not judge, which is no fault of the model."""
    for line in done.stdout.splitlines() if done is not None else ():
        try:
            fault = msgspec.json.decode(line, type=Fault)
        except msgspec.MsgspecError:
            continue  # a remark of a library
        if fault.part == "tokenizer":
            # Daemons see token ids only: a folder that never had a tokenizer is enough for whoever sends those.
            found = problem if (folder / "tokenizer.json").exists() else warning
            remedy = "download the model's tokenizer files again"
            yield found("model", f"no text can be turned into tokens: {fault.error}", remedy)
        else:
            yield problem("model", f"{folder}: {fault.error}", fault.remedy)


def _run(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """A probe, in a process of its own, since MLX binds its BLAS once; None when it took too long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")},
            check=False,
        )
    return None


def _last_line(done: subprocess.CompletedProcess[str] | None) -> tuple[int, str]:
    """The probe's exit code and the last line it wrote."""
    if done is None:
        return 1, ""
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def judge_probe(code: int, line: str) -> Finding:
    if code != 0:
        if "ModuleNotFoundError" in line:
            remedy = "on a primary or worker: pip install 'kakeya-zmq[mlx]'"
            return warning("mlx", "MLX is not installed: this machine can only be a cache peer", remedy)
        return problem("mlx", "MLX does not work here", f"run: {sys.executable} {' '.join(PROBE)}")
    try:
        speed = msgspec.convert(json.loads(line), Speed)
    except (ValueError, msgspec.ValidationError):
        return problem("mlx", "the speed of MLX could not be measured", f"run: {sys.executable} {' '.join(PROBE)}")
    return judge_speed(speed)


def judge_speed(speed: Speed) -> Finding:
    text = f"MLX on {speed.device}: {speed.gigaflops:.0f} GFLOP/s in float32"
    if speed.warning:
        message, _, remedy = speed.warning.partition("; ")
        return problem("mlx", f"{text}: {message}", remedy or "run: pip install cmeel-openblas")
    if "cpu" in speed.device and sys.platform == "darwin":
        remedy = "use a native arm64 Python" if platform.machine() != "arm64" else "check that Metal is available"
        return problem("mlx", f"{text}: the GPU is not used", remedy)
    if speed.gigaflops < SLOW_GFLOPS * speed.threads:
        remedy = "close what else computes here; on Linux: pip install cmeel-openblas, and start daemons with kakeya"
        return warning("mlx", f"{text}, which is slow ({speed.blas or 'no OpenBLAS'})", remedy)
    return ok("mlx", f"{text} ({speed.blas})" if speed.blas else text)
