"""How much memory this process has had, and how much it may have."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

SYSTEM_ROOT = Path("/")


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


def physical_memory_bytes(root: Path = SYSTEM_ROOT) -> int:
    """The machine's memory, or the limit of the control groups this process is in, whichever is less."""
    return min([psutil.virtual_memory().total, *(group.limit_bytes for group in control_groups(root))])


def available_memory_bytes(root: Path = SYSTEM_ROOT) -> int:
    """What could be allocated now without swapping, on the machine and within the control groups."""
    groups = (max(0, group.limit_bytes - group.used_bytes) for group in control_groups(root))
    return min([psutil.virtual_memory().available, *groups])


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Memory of one Linux control group with a limit. ``used_bytes`` leaves out file cache that can go at any time."""

    limit_bytes: int
    used_bytes: int


def control_groups(root: Path = SYSTEM_ROOT) -> list[ControlGroup]:
    """The limited control groups this process is in, both versions; empty where there are none, or no Linux.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    groups: list[ControlGroup] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            folders = [root / "sys/fs/cgroup"]
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            folders = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        # Every group above counts, too. In a container the path may be the host's, and only the top folder be there.
        for name in [part for part in path.split("/") if part not in ("", "..")]:
            folders.append(folders[-1] / name)
        groups += [group for folder in folders if (group := _read_group(folder, *files)) is not None]
    return groups


def _read_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> ControlGroup | None:
    try:
        limit = int((folder / limit_name).read_text(encoding="ascii"))
        used = int((folder / usage_name).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # no such group or file, or "max": no limit
        return None
    rows = dict(row.split(maxsplit=1) for row in stat.splitlines() if " " in row)
    cached = int(rows.get(cache_name, 0))
    return ControlGroup(limit, max(0, used - cached))
