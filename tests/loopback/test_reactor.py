"""The reactor with real sockets, threads and time."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from kakeya_zmq.io.reactor import MESSAGES_PER_TURN, POSTED_PER_TURN, Reactor
from wire.errors import InvalidInput, LocalProtocolError, RequestFailed

WAIT_S = 10.0


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    """A reactor that must leave neither thread nor context behind."""
    before = set(threading.enumerate())
    made = Reactor()
    yield made
    assert made.close()
    assert made.context.closed
    assert set(threading.enumerate()) <= before


def pair(reactor: Reactor, name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Two connected sockets; the first is for the reactor."""
    ours = reactor.context.socket(zmq.PAIR)
    theirs = reactor.context.socket(zmq.PAIR)
    ours.linger = theirs.linger = 0
    ours.bind(f"inproc://{name}")
    theirs.connect(f"inproc://{name}")
    return ours, theirs


def collect(socket: zmq.Socket[bytes], into: list[bytes], then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    def on_readable() -> None:
        into.append(socket.recv(zmq.DONTWAIT))
        then()

    return on_readable


def test_messages_timers_deadlines_and_posted_functions_all_run_on_the_loops_thread(reactor: Reactor) -> None:
    ours, theirs = pair(reactor, "all")
    threads: dict[str, int] = {}
    deadlines: list[float | None] = [reactor.clock()]

    def note(what: str) -> None:
        threads[what] = threading.get_ident()
        if len(threads) == 4:
            reactor.stop()

    def on_due(now: float) -> None:
        deadlines[0] = None
        note("deadline")

    reactor.register(ours, collect(ours, [], lambda: note("message")))
    reactor.add_deadline_source(lambda: deadlines[0], on_due)
    reactor.call_later(0.0, lambda: note("timer"))
    threading.Thread(target=lambda: reactor.post(lambda: note("posted"))).start()
    theirs.send(b"x")
    reactor.run()
    assert threads == dict.fromkeys(("message", "deadline", "timer", "posted"), threading.get_ident())
    theirs.close()


def test_a_flood_on_one_socket_delays_another_by_one_turn_only(reactor: Reactor) -> None:
    flooded, flooder = pair(reactor, "flood")
    quiet, sender = pair(reactor, "quiet")
    served: list[bytes] = []
    reactor.register(flooded, collect(flooded, served))
    reactor.register(quiet, collect(quiet, served, reactor.stop))
    for _ in range(3 * MESSAGES_PER_TURN):
        flooder.send(b"flood")
    sender.send(b"quiet")
    reactor.run()
    assert served.index(b"quiet") <= MESSAGES_PER_TURN
    assert len(served) <= 2 * MESSAGES_PER_TURN
    flooder.close()
    sender.close()


def test_posted_functions_that_post_again_do_not_starve_sockets(reactor: Reactor) -> None:
    ours, theirs = pair(reactor, "starve")
    rounds = 0

    def again() -> None:
        nonlocal rounds
        rounds += 1
        reactor.post(again)
        reactor.post(lambda: None)

    reactor.register(ours, collect(ours, [], reactor.stop))
    reactor.post(again)
    theirs.send(b"x")
    reactor.run()
    assert rounds < 4 * POSTED_PER_TURN
    theirs.close()


def test_posting_from_many_threads_keeps_each_threads_order_and_loses_nothing(reactor: Reactor) -> None:
    seen: list[tuple[int, int]] = []
    threads_count, posts = 8, 2_000

    def poster(thread: int) -> None:
        for number in range(posts):
            reactor.post(functools.partial(seen.append, (thread, number)))

    posters = [threading.Thread(target=poster, args=(thread,)) for thread in range(threads_count)]
    reactor.start_thread()
    for thread in posters:
        thread.start()
    for thread in posters:
        thread.join()
    reactor.call(lambda: None)  # posted last, so everything before it has run
    assert len(seen) == threads_count * posts
    for thread_number in range(threads_count):
        assert [number for thread, number in seen if thread == thread_number] == list(range(posts))


def test_a_failing_callback_is_counted_and_logged_without_its_text(
    reactor: Reactor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("the user's secret prompt")

    reactor.post(fail)
    reactor.call_later(0.0, fail)
    reactor.add_deadline_source(lambda: 1 / 0, lambda now: None)
    reactor.call_later(0.05, reactor.stop)
    with caplog.at_level(logging.ERROR):
        reactor.run()
    assert reactor.callback_errors == 2
    assert caplog.text.count("ValueError at test_reactor.py") == 2
    assert "ZeroDivisionError" in caplog.text
    assert "prompt" not in caplog.text


def test_a_source_that_stays_due_does_not_spin_the_loop(reactor: Reactor) -> None:
    calls: list[float] = []
    turns = 0
    reactor.clock = lambda: 1000.0  # time stands still, so a source that acted once is not due again
    reactor.add_deadline_source(lambda: 0.0, calls.append)

    def turn() -> None:
        nonlocal turns
        turns += 1
        reactor.post(turn if turns < 100 else reactor.stop)

    reactor.post(turn)
    reactor.run()
    assert turns == 100
    assert calls == [1000.0]


def test_cancelled_timers_and_removed_sources_are_silent(reactor: Reactor) -> None:
    fired: list[str] = []
    timer = reactor.call_later(0.0, lambda: fired.append("timer"))
    source = reactor.add_deadline_source(lambda: 0.0, lambda now: fired.append("source"))
    timer.cancel()
    source.remove()
    reactor.call_later(0.02, reactor.stop)
    reactor.run()
    assert fired == []


def test_timers_run_in_order_of_their_time(reactor: Reactor) -> None:
    order: list[int] = []
    for delay_ms in (30, 10, 20, 10):
        reactor.call_later(delay_ms / 1000, functools.partial(order.append, delay_ms))
    reactor.call_later(0.04, reactor.stop)
    reactor.run()
    assert order == [10, 10, 20, 30]


def test_a_callback_may_close_its_socket_in_the_middle_of_a_turn(reactor: Reactor) -> None:
    ours, theirs = pair(reactor, "close")
    seen: list[bytes] = []

    def on_readable() -> None:
        seen.append(ours.recv(zmq.DONTWAIT))
        reactor.close_socket(ours)
        reactor.stop()

    reactor.register(ours, on_readable)
    theirs.send(b"1")
    theirs.send(b"2")
    reactor.run()
    assert seen == [b"1"]
    assert reactor.callback_errors == 0
    theirs.close()


def test_writable_is_told_only_while_it_is_watched(reactor: Reactor) -> None:
    ours, theirs = pair(reactor, "writable")
    told = 0

    def on_writable() -> None:
        nonlocal told
        told += 1
        reactor.watch_writable(ours, False)

    reactor.register(ours, collect(ours, []), on_writable)
    reactor.watch_writable(ours, True)
    reactor.call_later(0.05, reactor.stop)
    reactor.run()
    assert told == 1
    theirs.close()


def test_sockets_are_refused_to_other_threads_while_the_loop_runs(reactor: Reactor) -> None:
    ours, theirs = pair(reactor, "threads")
    reactor.start_thread()
    with pytest.raises(LocalProtocolError, match="another thread"):
        reactor.register(ours, lambda: None)
    with pytest.raises(LocalProtocolError, match="another thread"):
        reactor.call_later(1.0, lambda: None)
    reactor.call(lambda: reactor.register(ours, lambda: None))
    with pytest.raises(LocalProtocolError, match="already"):
        reactor.call(lambda: reactor.register(ours, lambda: None))
    theirs.close()


def test_call_hands_back_results_and_errors(reactor: Reactor) -> None:
    assert reactor.call(lambda: 1) == 1  # no loop: on this thread
    reactor.start_thread()
    assert reactor.call(threading.get_ident) != threading.get_ident()

    def refuse() -> None:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput, match="no"):
        reactor.call(refuse)
    release = threading.Event()

    def stall() -> None:
        release.wait(WAIT_S)

    reactor.post(stall)
    with pytest.raises(RequestFailed, match="stalled"):
        reactor.call(lambda: None, timeout_s=0.05)
    release.set()


def test_keyboard_interrupt_ends_the_loop(reactor: Reactor) -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    reactor.run()
    assert reactor.interrupted
    reactor.post(reactor.stop)
    reactor.run()  # and it can go on afterwards
    assert not reactor.interrupted


def test_stop_from_a_signal_handler(reactor: Reactor) -> None:
    previous = signal.signal(signal.SIGTERM, lambda number, frame: reactor.stop())
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        reactor.run()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not reactor.interrupted


def test_close_reports_a_socket_that_somebody_left_open(caplog: pytest.LogCaptureFixture) -> None:
    reactor = Reactor()
    left_open = reactor.context.socket(zmq.PAIR)
    with caplog.at_level(logging.ERROR):
        assert not reactor.close(timeout_s=0.2)
    assert "still open" in caplog.text
    left_open.close()
    for thread in threading.enumerate():
        if thread.name == "kakeya-zmq-term":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_close_is_idempotent_and_ends_registered_sockets_and_the_thread() -> None:
    reactor = Reactor()
    ours, theirs = pair(reactor, "closing")
    reactor.register(ours, lambda: None)
    reactor.start_thread()
    theirs.close()
    with pytest.raises(LocalProtocolError, match="inside the loop"):
        reactor.call(reactor.close)
    assert reactor.close()
    assert reactor.close()
    assert ours.closed
    reactor.post(lambda: None)  # harmless
    with pytest.raises(LocalProtocolError, match="closed"):
        reactor.run()
