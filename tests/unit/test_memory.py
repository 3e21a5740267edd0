"""Buffers of received parts: right length, writable, apart from each other, and gone when released."""

from __future__ import annotations

import psutil
import pytest

from kakeya_zmq.io.memory import allocate
from wire import limits


@pytest.mark.parametrize(
    "length", [1, 4096, 64 * limits.KIB + 1, limits.MIB, 2 * limits.MIB, 2 * limits.MIB + 16, 5 * limits.MIB - 1]
)
def test_a_buffer_has_its_length_and_its_own_memory(length: int) -> None:
    first, second = allocate(length), allocate(length)
    assert (first.nbytes, first.format, first.readonly, first.contiguous) == (length, "B", False, True)
    first[:] = b"\x01" * length
    second[:] = b"\x02" * length
    assert bytes(first) == b"\x01" * length


def test_large_buffers_go_back_to_the_system() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    buffers = [allocate(4 * limits.MIB + 100) for _ in range(16)]
    for buffer in buffers:
        buffer[:] = bytes(buffer.nbytes)
    assert process.memory_info().rss - before > 48 * limits.MIB
    buffer.release()
    del buffer
    buffers.clear()
    assert process.memory_info().rss - before < 16 * limits.MIB
