"""A fast BLAS for MLX on Linux CPUs; nothing to do on macOS. Must not import mlx: it has to run before anything does.

MLX's Linux wheel links a reference BLAS, about seventy times slower than OpenBLAS in matrix products. The dynamic loader
resolves ``cblas_sgemm`` in the global scope first, so an OpenBLAS that is loaded with RTLD_GLOBAL before ``mlx.core``
replaces it. NumPy's and SciPy's own copies have prefixed symbols and don't serve; the PyPI wheel ``cmeel-openblas`` and the
distributions' packages do.

The cmeel wheel needs ``libgfortran.so.5``, which small systems lack. MLX's wheel brings that library under a private
name; a temporary copy with the usual name in its ELF header satisfies the loader (name only, no code is changed).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

FORTRAN_RUNTIME: Final = "libgfortran.so.5"
SYSTEM_NAMES: Final = ("libopenblas.so.0", "libopenblas.so")
SMALL_PRODUCT_CORES: Final = frozenset({"skylakex", "cooperlake", "sapphirerapids"})
"""Processor families for which OpenBLAS has kernels that don't copy small matrices (those with AVX-512)."""
SMALL_PRODUCT_THREADS: Final = 2
"""Those kernels run on one thread: with more than this, the ordinary ones are as fast."""
_REMEDY: Final = "run: pip install cmeel-openblas (or install your system's OpenBLAS package)"


class BlasStatus(StrEnum):
    NOT_NEEDED = "not needed"
    """macOS and others: MLX brings a fast one."""
    LOADED = "loaded"
    ALREADY_LOADED = "already loaded"
    TOO_LATE = "too late"
    """mlx.core was imported before; its BLAS stays."""
    NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What :func:`prepare_blas` did; safe to log.

    ``version``: e.g. "OpenBLAS 0.3.31", or empty. ``threads``: what was set, None for the library's own choice.
    ``small_products``: whether products of one row are faster in small groups (kakeya_zmq.model.single_row).
    ``warning``: one line for the user with the remedy, or empty.
    """

    status: BlasStatus
    version: str = ""
    threads: int | None = None
    small_products: bool = False
    warning: str = ""


def prepare_blas(threads: int | None) -> BlasReport:
    """Load OpenBLAS for MLX; call before anything imports mlx. May be called again to change the number of threads.

    Args:
        threads: BLAS threads of this process, >= 1; None leaves it to OPENBLAS_NUM_THREADS or the library. Processes
            that share a machine should use one each: two with two threads on two cores are three times slower.

    Raises:
        ValueError: ``threads`` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"BLAS threads must be at least 1, not {threads}")
    if not sys.platform.startswith("linux"):
        return BlasReport(BlasStatus.NOT_NEEDED)
    library, status = _in_global_scope(), BlasStatus.ALREADY_LOADED
    if library is None and "mlx.core" in sys.modules:
        warning = f"mlx was imported before OpenBLAS was loaded, so it computes slowly; {_REMEDY}"
        return BlasReport(BlasStatus.TOO_LATE, warning=warning)
    if library is None:
        library, status = _load(), BlasStatus.LOADED
    if library is None:
        return BlasReport(BlasStatus.NOT_FOUND, warning=f"no OpenBLAS found, so MLX computes slowly; {_REMEDY}")
    if threads is not None:
        library.openblas_set_num_threads(ctypes.c_int(threads))
    version, core = _describe(library)
    few = library.openblas_get_num_threads() <= SMALL_PRODUCT_THREADS
    return BlasReport(status, version=version, threads=threads, small_products=few and core in SMALL_PRODUCT_CORES)


def _in_global_scope() -> ctypes.CDLL | None:
    everything = ctypes.CDLL(None)
    return everything if _is_openblas(everything) else None


def _is_openblas(library: ctypes.CDLL) -> bool:
    return all(
        hasattr(library, name)
        for name in ("openblas_set_num_threads", "openblas_get_config", "openblas_get_corename", "cblas_sgemm")
    )


def _load() -> ctypes.CDLL | None:
    for name in _candidates():
        library = _open(name)
        if library is not None and _is_openblas(library):
            return library
    return None


def _candidates() -> Iterator[str]:
    for path in _files_of("cmeel-openblas", "libopenblas.so"):
        yield str(path)
    yield from SYSTEM_NAMES


def _files_of(distribution: str, prefix: str) -> list[Path]:
    """Installed files of a distribution whose names start with ``prefix``, shortest name first."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # an optional package
        return []
    return sorted((Path(str(f.locate())) for f in files if f.name.startswith(prefix)), key=lambda path: len(path.name))


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:  # not installed, or it needs a library that is not
        if FORTRAN_RUNTIME not in str(error) or not _load_bundled_fortran():
            return None
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:  # it lacks something else
        return None


def _load_bundled_fortran() -> bool:
    """Load the Fortran runtime out of MLX's wheel under its usual name. Returns whether that worked."""
    for source in _files_of("mlx-cpu", "libgfortran-"):
        try:
            for companion in _files_of("mlx-cpu", "libquadmath-"):
                ctypes.CDLL(str(companion))
            renamed = with_library_name(source.read_bytes(), FORTRAN_RUNTIME)
            with tempfile.TemporaryDirectory(prefix="kakeya-") as folder:
                copy = Path(folder) / FORTRAN_RUNTIME
                copy.write_bytes(renamed)
                ctypes.CDLL(str(copy))
        except (OSError, ValueError):  # unreadable, another format, or a folder that forbids loading code
            continue
        return True
    return False


def with_library_name(image: bytes, name: str) -> bytes:
    """A copy of a 64-bit little-endian ELF shared library whose DT_SONAME reads ``name`` (ELF specification, "Dynamic
    Section"). Only the string's bytes change, so ``name`` must not be longer than the old one.

    Raises:
        ValueError: not such a library, or the name does not fit.
    """
    load, dynamic_section, name_tag, string_table_tag = 1, 2, 14, 5
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    try:
        (table,) = struct.unpack_from("<Q", image, 32)
        entry_bytes, count = struct.unpack_from("<HH", image, 54)
        # type, flags, file offset, virtual address, physical address, bytes in the file, ...
        headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_bytes) for i in range(count)]
        offset, length = next((h[2], h[5]) for h in headers if h[0] == dynamic_section)
        dynamic = dict(struct.iter_unpack("<QQ", image[offset : offset + length // 16 * 16]))
        address = dynamic[string_table_tag] + dynamic[name_tag]
        at = next(address - h[3] + h[2] for h in headers if h[0] == load and h[3] <= address < h[3] + h[5])
        end = image.index(b"\0", at)
    except (struct.error, StopIteration, KeyError) as error:
        raise ValueError("a malformed ELF file") from error
    if len(name) > end - at:
        raise ValueError(f"the library's own name leaves room for {end - at} characters only")
    return image[:at] + name.encode().ljust(end - at, b"\0") + image[end:]


def _describe(library: ctypes.CDLL) -> tuple[str, str]:
    """Name with version, and the processor family whose kernels are in use."""
    describe, core = library.openblas_get_config, library.openblas_get_corename
    describe.restype = core.restype = ctypes.c_char_p
    words = (describe() or b"").decode("ascii", "replace").split()
    return " ".join(words[:2]), (core() or b"").decode("ascii", "replace").lower()
