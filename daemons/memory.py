"""How much memory this process has had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """The most memory this process has had resident since it was started.

    Linux keeps the parent's peak in ``ru_maxrss`` of a process that was started from a large one, so its own record is
    read where there is one.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a Linux without it
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
