"""Buffers of parts that are used again."""

from __future__ import annotations

import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya_zmq.io import memory
from kakeya_zmq.io.memory import BufferPool
from wire.limits import KIB, MIB


@pytest.mark.parametrize("length", [1, 64 * KIB, 393_216, 400_000, 2 * MIB, 5 * MIB + 3])
def test_a_buffer_has_exactly_the_length_that_was_asked_for(length: int) -> None:
    buffer = BufferPool().allocate(length)
    assert buffer.nbytes == length
    assert memoryview(buffer.obj).nbytes == length, "a store keeps the whole buffer, not a slice that it would copy"
    buffer[:] = b"\x07" * length
    assert bytes(buffer[-1:]) == b"\x07"


def test_memory_returns_with_the_last_view_and_is_lent_again() -> None:
    pool = BufferPool()
    buffer = pool.allocate(400_000)
    buffer[:4] = b"mine"
    view = buffer.toreadonly()[1:3]
    del buffer
    gc.collect()
    assert pool.idle_bytes == 0
    assert bytes(view) == b"in"
    del view
    gc.collect()
    assert pool.idle_bytes == 400 * KIB
    again = pool.allocate(400 * KIB)
    assert pool.idle_bytes == 0
    assert bytes(again[:4]) == b"mine", "it is the same memory"
    other = pool.allocate(400 * KIB)
    other[:4] = b"else"
    assert bytes(again[:4]) == b"mine"


@given(st.integers(64 * KIB, 64 * MIB))
def test_a_buffer_takes_at_most_a_sixteenth_more_than_its_part(length: int) -> None:
    step = (1 << (length.bit_length() - 1)) // 16
    with pytest.MonkeyPatch.context() as patch:
        sizes: list[int] = []
        patch.setattr(memory, "allocate", lambda size: sizes.append(size) or memoryview(bytearray(length)))
        BufferPool().allocate(length)
    assert length <= sizes[0] < length + step <= length * 17 / 16


def test_what_is_kept_is_bounded_and_can_be_given_back() -> None:
    pool = BufferPool(idle_bytes_max=3 * MIB)
    buffers = [pool.allocate(MIB) for _ in range(8)]
    del buffers
    gc.collect()
    assert pool.idle_bytes == 3 * MIB
    pool.trim()
    assert pool.idle_bytes == 0
    assert pool.allocate(MIB).nbytes == MIB


def test_many_threads_never_share_a_buffer() -> None:
    pool = BufferPool()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            buffer = pool.allocate(128 * KIB)
            buffer[:8] = number.to_bytes(8, "little")
            buffer[-8:] = number.to_bytes(8, "little")
            if bytes(buffer[:8]) != bytes(buffer[-8:]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    assert 0 < pool.idle_bytes <= 8 * 128 * KIB
