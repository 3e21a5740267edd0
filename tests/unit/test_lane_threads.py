"""Threads that are lent to lanes: never two lanes on one, few of them idle, none left."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from kakeya_zmq.io.lane_threads import LaneThreads
from tests.loopback.lane_support import wait_until

DEADLINE_S = 10.0


class Held:
    """Work that goes on until it is released."""

    def __init__(self) -> None:
        self.ident = 0
        self.began = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> None:
        self.ident = threading.get_ident()
        self.began.set()
        assert self.release.wait(DEADLINE_S)


def lane_threads() -> int:
    return sum(thread.name == "kakeya-lane" for thread in threading.enumerate())


def run(threads: LaneThreads, count: int) -> list[Held]:
    """Works that all go on at the same time."""
    works = [Held() for _ in range(count)]
    for work in works:
        threads.run(work)
    assert all(work.began.wait(DEADLINE_S) for work in works)
    return works


def finish(works: list[Held]) -> None:
    for work in works:
        work.release.set()


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
def test_works_run_side_by_side_and_only_so_many_threads_stay(spare: int) -> None:
    before = lane_threads()
    threads = LaneThreads(spare)
    works = run(threads, 4)
    assert len({work.ident for work in works}) == 4
    finish(works)
    kept = min(spare, 4)
    wait_until(lambda: threads.idle == kept and lane_threads() == before + kept, "the others to end")
    threads.close()
    wait_until(lambda: lane_threads() == before, "all to end")


def test_an_idle_thread_is_used_again() -> None:
    threads = LaneThreads(1)
    (first,) = run(threads, 1)
    finish([first])
    wait_until(lambda: threads.idle == 1, "the thread to be idle")
    (second,) = run(threads, 1)
    assert second.ident == first.ident
    assert threads.idle == 0
    finish([second])
    threads.close()


def test_what_is_closed_runs_on_and_lends_threads_that_do_not_stay() -> None:
    before = lane_threads()
    threads = LaneThreads(2)
    running = run(threads, 1)
    threads.close()
    late = run(threads, 1)
    finish([*running, *late])
    wait_until(lambda: lane_threads() == before, "all to end")
    assert threads.idle == 0


def test_an_idle_thread_keeps_nothing_of_what_it_ran() -> None:
    class Work:
        def __call__(self) -> None:
            pass

    threads = LaneThreads(1)
    work: Callable[[], None] | None = Work()
    gone = weakref.ref(work)
    threads.run(work)
    work = None
    wait_until(lambda: threads.idle == 1, "the thread to be idle")
    assert gone() is None
    threads.close()
