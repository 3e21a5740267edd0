"""MLX: is it there, on which device, how fast; and the model folders."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from daemons.check import check_model_folder
from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.doctor.site import Site
from daemons.engine_host import model_folder
from wire.errors import KakeyaError

PROBE: Final = ("-m", "kakeya_zmq.model.speed_probe")
PROBE_TIMEOUT_S: Final = 120.0
SLOW_GFLOPS: Final = 10.0
"""For each thread. A reference BLAS reaches about 2, a good one 40 and more on any machine of the last ten years."""


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
    if site.quick:
        return
    yield judge_probe(*_run_probe())


def _folders(site: Site) -> Iterator[Finding]:
    for role in ("primary", "worker"):
        settings = site.settings.get(role)
        if settings is None or not settings.model:
            continue
        try:
            check_model_folder(model_folder(settings))
        except KakeyaError as error:
            yield problem("model", error.message, error.remedy or "check --model (KAKEYA_MODEL)")


def _run_probe() -> tuple[int, str]:
    """The probe's exit code and the last line it wrote; in a process of its own, since MLX binds its BLAS once."""
    try:
        done = subprocess.run(
            [sys.executable, *PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")},
            check=False,
        )
    except subprocess.TimeoutExpired:
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
