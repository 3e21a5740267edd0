"""The open files of this process and their bound: systems start programs with few (256 on macOS, 1,024 on Linux)."""

from __future__ import annotations

import sys
from typing import Final

import psutil

if sys.platform != "win32":
    import resource

DESCRIPTORS_WANTED: Final = 16_384
"""Some thousand connections of strangers that have not been cut yet, and room for files and transfers."""
_TRIED: Final = (DESCRIPTORS_WANTED, 10_240, 8_192, 4_096, 2_048, 1_024)
"""macOS refuses more than its own bound (OPEN_MAX, kern.maxfilesperproc) even where the hard limit says "unlimited"."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open files as far as this process may, up to DESCRIPTORS_WANTED.

    Never lowers it, and never fails: a daemon with few descriptors still serves few peers.

    Returns:
        The limit now; 0 when there is none, or the system does not say.
    """
    if sys.platform == "win32":
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _TRIED:
        if soft != resource.RLIM_INFINITY and soft >= wanted:
            return soft
        if soft == resource.RLIM_INFINITY:
            return 0
        if hard != resource.RLIM_INFINITY and wanted > hard:
            wanted = hard
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue  # more than this system allows: try less
        return wanted
    return soft


def descriptors_open() -> int | None:
    """How many descriptors this process has open; None where the system does not say.

    Raises:
        OSError: looking takes a descriptor on this system, and none is free.
    """
    if sys.platform == "win32":
        return None
    try:
        return psutil.Process().num_fds()
    except psutil.Error:
        return None
