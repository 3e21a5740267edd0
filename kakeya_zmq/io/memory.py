"""Buffers for received parts.

A part's buffer is written once and whole, and with fresh memory most of that time goes into page faults. Measured here
(x86-64 under a hypervisor) for 128 MiB in parts of 2 MiB, to allocate and fill:

=============================================  =======
pages of 4 KiB, one fault each                  72 ms
the same, mapped in one call (populate)         44 ms
transparent huge pages                          16 ms
memory that was in use just before               3 ms
=============================================  =======

So large parts get a mapping of their own with huge pages, which also goes back to the system the moment the part is
evicted; smaller ones come from the heap, mapped in one call. Both are advice that Linux may ignore; elsewhere nothing is
advised (macOS has pages of 16 KiB).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from wire import limits

_HUGE_PAGE_BYTES: Final = 2 * limits.MIB
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; the mmap module does not name it."""
_POPULATE_BYTES_MIN: Final = 64 * limits.KIB
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_HEAP_KEPT_BYTES: Final = 64 * limits.MIB
"""What libzmq may have allocated for frames at once: the queues of a few transfers."""
_POOL_BYTES_MIN: Final = 64 * limits.KIB
"""Smaller parts come from the heap."""
_POOL_CLASSES: Final = 16
"""Sizes of pooled buffers between a power of two and the next, so that parts of nearly the same size share them. A store
counts its parts, not its buffers: at most 1/16 of its memory is uncounted."""
_HEAP_BLOCK_BYTES_MAX: Final = 32 * limits.MIB
"""The most that glibc takes as M_MMAP_THRESHOLD."""


Allocate: TypeAlias = Callable[[int], memoryview]
"""Gives a writable byte buffer of a length, with arbitrary content."""


def allocate(length_bytes: int) -> memoryview:
    """A writable byte buffer with arbitrary content: zeroing it would cost as much as filling it.

    Raises:
        MemoryError: the system has no room for it.
    """
    if sys.platform == "linux" and length_bytes >= _HUGE_PAGE_BYTES:
        # OSError: the system allows no more mappings, or knows no huge pages; the heap will do.
        with contextlib.suppress(OSError):
            return _allocate_huge(length_bytes)
    array = np.empty(length_bytes, dtype=np.uint8)
    if length_bytes >= _POPULATE_BYTES_MIN:
        _populate(array.ctypes.data, length_bytes)
    return array.data


class BufferPool:
    """Buffers for received parts that are used again when their parts are gone. Thread-safe.

    A transfer into fresh memory spends as much time on page faults as on everything else together. What is kept idle is
    bounded, and given back by :meth:`trim` when no transfer has wanted it for a while.

    Args:
        idle_bytes_max: most bytes kept for the next transfer.
    """

    def __init__(self, idle_bytes_max: int = 128 * limits.MIB) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._lock = threading.Lock()
        self._idle: dict[int, list[memoryview]] = {}
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Memory kept for later use."""
        return self._idle_bytes

    def allocate(self, length_bytes: int) -> memoryview:
        """As :func:`allocate`; the memory returns to the pool when the last view of it is gone."""
        if length_bytes < _POOL_BYTES_MIN:
            return allocate(length_bytes)
        step = (1 << (length_bytes.bit_length() - 1)) // _POOL_CLASSES
        size = -(-length_bytes // step) * step
        with self._lock:
            kept = self._idle.get(size)
            memory = kept.pop() if kept else None
            if memory is not None:
                self._idle_bytes -= size
        if memory is None:
            memory = allocate(size)
        loan = np.frombuffer(memory, np.uint8, length_bytes).view(_Loan)
        loan.pool, loan.memory = self, memory
        return loan.data

    def trim(self) -> None:
        """Give all idle memory back to the system."""
        with self._lock:
            self._idle = {}
            self._idle_bytes = 0

    def _give_back(self, memory: memoryview) -> None:
        with self._lock:
            if self._idle_bytes + memory.nbytes <= self._idle_bytes_max:
                self._idle.setdefault(memory.nbytes, []).append(memory)
                self._idle_bytes += memory.nbytes


class _Loan(np.ndarray[Any, np.dtype[np.uint8]]):
    """Lends a buffer out: every view keeps this object alive, and when it goes the buffer returns to the pool."""

    pool: BufferPool | None = None
    memory: memoryview | None = None

    def __del__(self) -> None:
        # Views and slices of this array are arrays of this class too, but only the loan itself has a pool.
        pool, memory = self.pool, self.memory
        self.pool = self.memory = None
        if pool is not None and memory is not None:
            pool._give_back(memory)


def tune_heap() -> bool:
    """Let the C heap keep up to 64 MiB of what is freed, for this whole process; call it once when a daemon starts.

    libzmq allocates each received frame and frees it after the chunk was opened; glibc by default gives such memory back
    at once, and the next frame pays for its pages again (here 10,000 to 20,000 page faults for 128 MiB, and a third of
    the receiver's processor time). Parts of 2 MiB and more don't live in the heap and still go back when evicted.

    Returns:
        whether this C library could be told (glibc); elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return False
    try:
        option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another libc
    option.argtypes = (ctypes.c_int, ctypes.c_int)
    kept = option(_M_TRIM_THRESHOLD, _HEAP_KEPT_BYTES)
    return bool(kept and option(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES_MAX))


def _allocate_huge(length_bytes: int) -> memoryview:
    """A mapping whose whole huge pages are huge; the rest of the buffer has small pages, so no memory is wasted."""
    huge_bytes = length_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    # Linux aligns a mapping to huge pages only if its size is a multiple; what is never touched takes no memory.
    mapping = mmap.mmap(
        -1,
        -(-length_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    mapping.madvise(mmap.MADV_HUGEPAGE, 0, huge_bytes)
    if length_bytes > huge_bytes:
        with contextlib.suppress(OSError):  # an older kernel
            mapping.madvise(_MADV_POPULATE_WRITE, huge_bytes, length_bytes - huge_bytes)
    return memoryview(mapping)[:length_bytes]


def _populate(address: int, length_bytes: int) -> None:
    advise = _madvise()
    if advise is None:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # An older kernel answers EINVAL, and the pages come one by one.
    advise(start, end - start, _MADV_POPULATE_WRITE)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """libc's madvise (the mmap module only has it for its own mappings), or None where the advice is not known."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None  # a libc that does not export it
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
