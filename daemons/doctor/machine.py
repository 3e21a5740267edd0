"""Disk, memory and file descriptors of this machine."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterable, Iterator
from typing import Final

from daemons.doctor.finding import Finding, ok, problem, warning
from daemons.doctor.site import Site
from daemons.memory import available_memory_bytes, physical_memory_bytes
from wire.limits import GIB

DISK_PROBLEM_BYTES: Final = GIB // 4
DISK_WARNING_BYTES: Final = 2 * GIB
DESCRIPTORS_MIN: Final = 1024


def examine_machine(site: Site) -> Iterator[Finding]:
    folder = site.home if site.home.exists() else site.home.parent
    yield judge_disk(shutil.disk_usage(folder).free)
    budgets = [(role, settings.cache_bytes) for role, settings in site.settings.items()]
    yield judge_budgets(budgets, physical_memory_bytes(), available_memory_bytes())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_descriptors(hard)


def judge_disk(free_bytes: int) -> Finding:
    text = f"{free_bytes / GIB:.1f} GiB are free for keys, state and logs"
    if free_bytes < DISK_PROBLEM_BYTES:
        return problem("disk", f"only {text}", "make room on the disk of KAKEYA_HOME, or move it")
    if free_bytes < DISK_WARNING_BYTES:
        return warning("disk", f"only {text}", "make room on the disk of KAKEYA_HOME, or move it")
    return ok("disk", text)


def judge_budgets(budgets: Iterable[tuple[str, int]], physical_bytes: int, available_bytes: int) -> Finding:
    """Whether the stores that are configured fit into this machine, each for itself."""
    too_large = [(role, size) for role, size in budgets if size >= physical_bytes]
    if too_large:
        role, size = too_large[0]
        text = (
            f"cache_gb of the {role} is {size / GIB:.1f} GiB and this machine has {physical_bytes / GIB:.1f} GiB of memory"
        )
        return problem("memory", text, "lower --cache-gb, or set --adaptive-cache")
    tight = [(role, size) for role, size in budgets if size > available_bytes]
    if tight:
        role, size = tight[0]
        text = f"cache_gb of the {role} is {size / GIB:.1f} GiB, and {available_bytes / GIB:.1f} GiB are available now"
        return warning("memory", text, "lower --cache-gb, or set --adaptive-cache")
    return ok("memory", f"{available_bytes / GIB:.1f} of {physical_bytes / GIB:.1f} GiB of memory are available")


def judge_descriptors(hard: int) -> Finding:
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        return warning("files", f"a process may open {hard} files", "raise the limit: ulimit -Hn 16384")
    return ok("files", "enough files may be open")
