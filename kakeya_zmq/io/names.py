"""Host names are looked up here, never by libzmq: its I/O thread would wait for a silent name server, and with it every
other connection of the process.

A look-up runs on a thread of its own, since the system's resolver cannot be interrupted. There is one at a time for each
name, at most ``LOOKUPS_MAX`` for all, and whoever asks waits no longer than the deadline: a thread that hangs on stays the
one look-up of its name until it ends, and what it still finds serves whoever asks then.

:class:`Dialling` is what a socket has of it: it hands an address over to connect to, at once when it is an IP address, and
when a look-up fails it says why and tries again, later each time.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from kakeya_zmq.io.addresses import Address
from kakeya_zmq.io.reactor import Reactor
from kakeya_zmq.io.schedule import TimerHandle

LOOKUP_S: Final = 5.0
"""How long somebody waits; less than a peer is waited for (PEER_LOST_S of the session)."""
LOOKUPS_MAX: Final = 16
ANSWERS_MAX: Final = 8
AGAIN_FIRST_S: Final = 1.0
AGAIN_LAST_S: Final = 60.0
SILENT: Final = "the name of this address is not looked up in time: the name server does not answer"
UNKNOWN: Final = "the name of this address is not known"
TOO_MANY: Final = "too many names are being looked up"
REASONS: Final = (SILENT, UNKNOWN, TOO_MANY)

LookUp: TypeAlias = Callable[[str], list[str]]
"""Host name → IP addresses, waiting as long as it takes.

Raises OSError or UnicodeError when there are none."""


def look_up(host: str) -> list[str]:
    """By the system's resolver, IPv4 first: nodes listen there unless they are told otherwise.

    Raises:
        OSError, UnicodeError: the name has no address, or is none.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys(str(place[0]) for _, _, _, _, place in answers))
    return sorted(found, key=lambda text: ":" in text)


def literal_of(host: str) -> str | None:
    """What a host stands for without any look-up; None when it is a name."""
    if host == "localhost":
        return "127.0.0.1"  # it may mean ::1 first, where our servers do not listen
    with contextlib.suppress(ValueError):
        if str(ipaddress.ip_address(host)) == host:
            return host
    return None


class Names:
    """Looks names up. Use it on the reactor's thread.

    Args:
        find: what the threads call.
        deadline_s: how long :meth:`find` lets somebody wait.
    """

    def __init__(self, reactor: Reactor, *, find: LookUp = look_up, deadline_s: float = LOOKUP_S) -> None:
        self.counters: Counter[str] = Counter()
        """``look_ups`` (threads started), and by reason what failed."""
        self._reactor = reactor
        self._find = find
        self._deadline_s = deadline_s
        self._waiting: dict[str, set[_Question]] = {}
        """By name: who waits for the look-up that is under way."""

    def find(self, host: str, found: Callable[[tuple[str, ...]], None], failed: Callable[[str], None]) -> _Question:
        """Call one of the two later, on the reactor's thread, unless the question is dropped before."""
        question = _Question(found, failed)
        if host not in self._waiting and not self._start(host):
            self._reactor.post(lambda: self._fail(question, TOO_MANY))
            return question
        question.wait(self._waiting[host], self._reactor.call_later(self._deadline_s, lambda: self._fail(question, SILENT)))
        return question

    def _start(self, host: str) -> bool:
        if len(self._waiting) >= LOOKUPS_MAX:
            return False
        try:
            threading.Thread(target=self._run, args=(host,), name="look-up", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            return False
        self._waiting[host] = set()
        self.counters["look_ups"] += 1
        return True

    def _run(self, host: str) -> None:
        """On a thread of its own."""
        addresses: tuple[str, ...] = ()
        with contextlib.suppress(OSError, UnicodeError, ValueError):
            addresses = tuple(str(ipaddress.ip_address(each)) for each in self._find(host))[:ANSWERS_MAX]
        self._reactor.post(partial(self._ended, host, addresses))

    def _ended(self, host: str, addresses: tuple[str, ...]) -> None:
        for question in list(self._waiting.pop(host, ())):
            if addresses:
                question.answer(lambda question=question: question.found(addresses))  # type: ignore[misc]
            else:
                self._fail(question, UNKNOWN)

    def _fail(self, question: _Question, reason: str) -> None:
        if question.open:
            self.counters[reason] += 1
            question.answer(lambda: question.failed(reason))


class _Question:
    """Somebody who waits for a look-up."""

    __slots__ = ("_others", "_timer", "failed", "found", "open")

    def __init__(self, found: Callable[[tuple[str, ...]], None], failed: Callable[[str], None]) -> None:
        self.found = found
        self.failed = failed
        self.open = True
        self._others: set[_Question] | None = None
        self._timer: TimerHandle | None = None

    def wait(self, others: set[_Question], timer: TimerHandle) -> None:
        """Be among those who wait, until dropped."""
        others.add(self)
        self._others, self._timer = others, timer

    def answer(self, tell: Callable[[], None]) -> None:
        if self.open:
            self.drop()
            tell()

    def drop(self) -> None:
        """Nobody wants to know any more."""
        self.open = False
        if self._others is not None:
            self._others.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Dialling:
    """Leads a socket to one host, whose name may mean another address each time. Use it on the reactor's thread."""

    def __init__(self, reactor: Reactor, host: str, names: Names) -> None:
        self.host = host
        """The IP address that was dialled last; before, the host as it was given."""
        self._reactor = reactor
        self._name = host
        self._literal = literal_of(host)
        self._names = names
        self._question: _Question | None = None
        self._timer: TimerHandle | None = None
        self._turn = self._next_turn = 0
        """Which of several addresses was dialled, and is next: each gets its turn until one is reached."""
        self._failures = 0

    def dial(self, port: int, connect: Callable[[Address], None], failed: Callable[[str], None]) -> None:
        """Call ``connect`` with an IP address as soon as there is one: of a literal at once, inside this call.

        ``failed`` is told why there is none yet, each time; it is tried again until :meth:`stop` or the next ``dial``.
        """
        self.stop()
        if self._literal is not None:
            self.host = self._literal
            connect(Address(self._literal, port))
            return

        def found(addresses: tuple[str, ...]) -> None:
            self._failures = 0
            self._turn, self._next_turn = self._next_turn, self._next_turn + 1
            self.host = addresses[self._turn % len(addresses)]
            connect(Address(self.host, port))

        def not_found(reason: str) -> None:
            wait_s = min(AGAIN_LAST_S, AGAIN_FIRST_S * 2.0 ** min(self._failures, 16))
            self._failures += 1
            self._timer = self._reactor.call_later(wait_s, ask)
            failed(reason)

        def ask() -> None:
            self._question = self._names.find(self._name, found, not_found)

        ask()

    def reached(self) -> None:
        """Whoever was looked for answers at the address dialled last: it is the first choice again."""
        self._next_turn = self._turn

    def stop(self) -> None:
        """Neither callback comes any more. Idempotent."""
        if self._question is not None:
            self._question.drop()
            self._question = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
