"""The gate: decides which connections finish their handshake (ZAP, https://rfc.zeromq.org/spec/27/).

Rules:

1. Nothing is let in by default: an unknown domain, the NULL mechanism and anything malformed are refused.
2. A CURVE domain has an allow-list of client public keys.
3. A PLAIN domain admits exactly one bearer of its token and is closed after that; a wrong guess does not close it, since
   otherwise a stranger could starve the honest peer (a token has 256 random bits, so guessing is hopeless).
4. Whatever arrives, the gate's thread answers or drops it and goes on.
5. Whoever is let in gets a number of its own, which its messages bear (``User-Id``): a descriptor is soon another one's.

libzmq asks through an inproc socket before any frame of the peer is buffered, so a stranger costs no memory.
"""

from __future__ import annotations

import hmac
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import zmq

from kakeya_zmq.io.wake_up import WakeUp
from wire.errors import LocalProtocolError

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_FIELD_BYTES_MAX: Final = 255
_ALLOWED: Final = ""


@dataclass(slots=True)
class _CurveDomain:
    public_keys: frozenset[bytes]


@dataclass(slots=True)
class _OnceDomain:
    token: bytes = field(repr=False)
    used: bool = False


@dataclass(frozen=True, slots=True)
class _ZapRequest:
    route: bytes
    request_id: bytes
    domain: str
    mechanism: bytes
    credentials: tuple[bytes, ...]


class Gate:
    """Answers the ZAP requests of one context on a thread of its own. One context can have one gate only.

    Args:
        context: the context whose sockets are guarded.
        on_refused: called with the reason of each refusal, on the gate's thread or that of :meth:`note`; it must be quick
            and must not raise.

    Raises:
        LocalProtocolError: the context already has a gate.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, on_refused: Callable[[str], None] | None = None) -> None:
        self._context = context
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._domains: dict[str, _CurveDomain | _OnceDomain] = {}
        self._refused: Counter[tuple[str, str]] = Counter()
        self._numbers = itertools.count(1)
        self._wake_up = WakeUp()
        self._closing = False
        self._ready = threading.Event()
        self._start_error: zmq.ZMQError | None = None
        self._thread = threading.Thread(target=self._run, name="kakeya-gate")
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self.close()
            raise LocalProtocolError("this context already has a gate") from self._start_error

    def watch(self, on_refused: Callable[[str], None]) -> None:
        """Tell ``on_refused`` from now on, in place of whoever was told before; see the class."""
        self._on_refused = on_refused

    @property
    def refused(self) -> dict[tuple[str, str], int]:
        """How many handshakes were refused, by (domain kind, reason). The kind is the domain up to its first ``/``."""
        with self._lock:
            return dict(self._refused)

    def allow_curve(self, domain: str, client_public_keys: Iterable[bytes]) -> None:
        """Let CURVE clients with these public keys (raw 32 bytes) into ``domain``; replaces the domain's earlier list."""
        keys = frozenset(client_public_keys)
        if not domain or any(len(key) != 32 for key in keys):
            raise LocalProtocolError("an allow-list needs a domain and public keys of 32 bytes")
        with self._lock:
            self._domains[domain] = _CurveDomain(public_keys=keys)

    def admit_once(self, domain: str, token: str) -> None:
        """Let the first bearer of ``token`` into ``domain``, then nobody. A domain may be used for one token only."""
        if not domain or not token:
            raise LocalProtocolError("a one-time admission needs a domain and a token")
        with self._lock:
            if domain in self._domains:
                raise LocalProtocolError("this domain already has an admission")
            self._domains[domain] = _OnceDomain(token=token.encode("ascii"))

    def admitted(self, domain: str) -> bool:
        """Whether somebody has shown the token of this domain."""
        with self._lock:
            once = self._domains.get(domain)
            return isinstance(once, _OnceDomain) and once.used

    def forget(self, domain: str) -> None:
        """Refuse everybody at ``domain`` from now on. Connections already admitted stay."""
        with self._lock:
            self._domains.pop(domain, None)

    def note(self, kind: str, reason: str) -> None:
        """Count a refusal that the transport made without asking; from any thread."""
        self._count(kind, reason)

    def close(self) -> None:
        """Stop the thread and close its socket. May be called twice. Later handshakes fail."""
        self._closing = True
        self._wake_up.notify()
        self._thread.join()
        self._wake_up.close()

    # --- the gate's thread ---

    def _run(self) -> None:
        try:
            # A ROUTER and not a REP: a malformed request must not put it out of step.
            socket = self._context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            self._start_error = error
            self._ready.set()
            return
        try:
            socket.setsockopt(zmq.LINGER, 0)
            try:
                socket.bind(ZAP_ENDPOINT)
            except zmq.ZMQError as error:
                self._start_error = error
                return
            finally:
                self._ready.set()
            self._serve(socket)
        except zmq.ContextTerminated:
            pass  # the context went first: there is nothing left to guard
        finally:
            socket.close(linger=0)

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_up.fileno(), zmq.POLLIN)
        while not self._closing:
            if socket not in dict(poller.poll()):
                continue
            request = _parse(socket.recv_multipart())
            if request is None:
                self._count("malformed", "malformed request")
                continue
            reason = self._judge(request)
            status = (b"200", b"OK") if reason == _ALLOWED else (b"400", b"refused")
            user_id = b"%d" % next(self._numbers) if reason == _ALLOWED else b""
            # The reason stays here: a stranger learns nothing from the answer.
            socket.send_multipart([request.route, b"", _ZAP_VERSION, request.request_id, *status, user_id, b""])
            if reason != _ALLOWED:
                self._count(request.domain.partition("/")[0] if reason != "unknown domain" else "unknown", reason)

    def _judge(self, request: _ZapRequest) -> str:
        """The reason of the refusal, or :data:`_ALLOWED`."""
        with self._lock:
            domain = self._domains.get(request.domain)
            match request.mechanism, domain:
                case b"NULL", _:
                    return "no credentials"
                case _, None:
                    return "unknown domain"
                case b"CURVE", _CurveDomain(public_keys=keys):
                    if len(request.credentials) != 1:
                        return "malformed credentials"
                    return _ALLOWED if request.credentials[0] in keys else "unknown key"
                case b"PLAIN", _OnceDomain() as once:
                    if len(request.credentials) != 2:
                        return "malformed credentials"
                    # Compared before looking at ``used``, so that timing tells nothing about either.
                    right = hmac.compare_digest(request.credentials[1], once.token)
                    if once.used:
                        return "token already used"
                    if not right:
                        return "wrong token"
                    once.used = True
                    return _ALLOWED
                case _:
                    return "wrong mechanism"

    def _count(self, kind: str, reason: str) -> None:
        with self._lock:
            self._refused[kind, reason] += 1
        if self._on_refused is not None:
            self._on_refused(reason)


def _parse(frames: Sequence[bytes]) -> _ZapRequest | None:
    """A ZAP request as a ROUTER gets it: route, empty delimiter, version, request id, domain, address, identity,
    mechanism, credentials. None if it is anything else.
    """
    if len(frames) < 8 or frames[1] != b"" or frames[2] != _ZAP_VERSION or any(len(f) > _FIELD_BYTES_MAX for f in frames):
        return None
    try:
        domain = frames[4].decode("utf-8")
    except UnicodeDecodeError:
        return None  # no domain of ours: they are all text
    return _ZapRequest(
        route=frames[0], request_id=frames[3], domain=domain, mechanism=frames[7], credentials=tuple(frames[8:])
    )
