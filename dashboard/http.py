"""The frame of every route: who may call it, what it takes and gives, how errors are told, which headers go along.

A route is a value (:class:`Route`); the application, the OpenAPI document and the tests are all made of the same table. A
handler gets a checked :class:`Call` and returns a value of the declared type, or raises an error of this project.
"""

from __future__ import annotations

import hmac
import logging
import math
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from dashboard.api_types import Problem
from dashboard.hosts import HostRule
from dashboard.services import Services
from dashboard.state import Conflict, NotThere
from kakeya_zmq.protocol.limits import KeyedBuckets
from wire.errors import AuthenticationError, CapacityError, InvalidInput, KakeyaError
from wire.text import escape_json

_log = logging.getLogger(__name__)

KEY_HEADER: Final = "X-API-Key"
KEY_CHARACTERS_MAX: Final = 1024
BODY_BYTES_MAX: Final = 64 * 1024
LARGE_BODY_BYTES_MAX: Final = 1024 * 1024
"""Of routes that take many stages at once."""
ATTEMPTS_PER_S: Final = 5.0
ATTEMPTS_BURST: Final = 100.0
JSON: Final = "application/json"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_ENCODER: Final = msgspec.json.Encoder()


class Access(Enum):
    """Who may call a route."""

    READ = "read"
    """Anybody; with the API key more is shown."""
    WRITE = "write"
    """Who has the API key. Without a configured key nobody, since an empty key closes writes."""
    ADMIN = "admin"
    """As WRITE, for reads of what is never public."""
    PROOF = "proof"
    """Anybody; the body itself proves what it claims."""


class Closed(KakeyaError):
    """No API key is configured, so nothing can be written."""


class Unauthorised(KakeyaError):
    """The API key is missing or wrong."""


class NotJson(KakeyaError):
    """The body is not declared as JSON, so a browser would send it for any other page without asking."""


class TooMany(KakeyaError):
    """Too many attempts in a short time."""

    def __init__(self, wait_s: float) -> None:
        super().__init__("too many attempts", remedy=f"wait {math.ceil(wait_s)} s")
        self.wait_s = wait_s


class Attempts:
    """How often one address may try what could be guessed or flooded: wrong keys, registrations, redemptions.

    Each kind has a bucket of its own, so that what strangers on the same address do takes nothing from who has the key.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets = KeyedBuckets(ATTEMPTS_PER_S, ATTEMPTS_BURST)

    def take(self, kind: str, address: str) -> None:
        """Count one.

        Raises:
            TooMany: the address has to wait.
        """
        with self._lock:
            wait_s = self._buckets.take(f"{kind} {address}", self._clock())
        if wait_s > 0:
            raise TooMany(wait_s)


@dataclass(frozen=True, slots=True)
class Call:
    """One checked request. ``body`` and ``query`` are values of the route's types, or None where it has none."""

    services: Services
    admin: bool
    """Whether the API key came along."""
    body: Any
    query: Any
    path: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. ``answer``: the type of what the handler returns, or a media type when it is no JSON."""

    method: str
    path: str
    handler: Callable[[Call], Any]
    summary: str
    answer: Any
    access: Access = Access.READ
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    body_bytes_max: int = BODY_BYTES_MAX
    errors: tuple[int, ...] = ()
    """Status codes beyond those that follow from access, body and query."""
    counted: bool = False
    """Every call is an attempt, also one with the right key."""

    @property
    def problems(self) -> tuple[int, ...]:
        """Every error code it can answer with."""
        codes = {*self.errors, 421, 503}
        if self.access in (Access.WRITE, Access.ADMIN):
            codes |= {401, 403, 429}
        if self.counted:
            codes |= {429}
        if self.body is not None:
            codes |= {413, 422}
        if self.access is Access.PROOF:
            codes |= {415}
        if self.query is not None:
            codes |= {422}
        return tuple(sorted(codes))


def add_route(app: Flask, services: Services, attempts: Attempts, route: Route) -> None:
    """Serve a route."""

    def serve(**path: str) -> Response:
        return _answer(route, services, attempts, path)

    app.add_url_rule(
        route.path,
        endpoint=f"{route.method} {route.path}",
        view_func=serve,
        methods=[route.method],
        provide_automatic_options=False,
    )


def _answer(route: Route, services: Services, attempts: Attempts, path: Mapping[str, str]) -> Response:
    admin = _has_key(services.api_key)
    if route.access is Access.PROOF and request.mimetype != JSON:
        raise NotJson("the body is not declared as JSON", remedy=f"send Content-Type: {JSON}")
    wrong_key = not admin and bool(request.headers.get(KEY_HEADER))
    if route.counted or wrong_key:
        kind = "wrong key" if wrong_key else "right key" if admin else route.access.value
        attempts.take(kind, request.remote_addr or "")
    if route.access in (Access.WRITE, Access.ADMIN):
        _require_key(services.api_key, admin)
    query = None
    if route.query is not None:
        query = msgspec.convert(request.args.to_dict(), route.query, strict=False)
    body = None
    if route.body is not None:
        request.max_content_length = route.body_bytes_max
        body = _decoded(request.get_data(cache=False) or b"{}", route.body)
    found = route.handler(Call(services, admin, body, query, path))
    if isinstance(found, Response):
        return found
    return json_response(found)


def _decoded(data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.ValidationError("the body is nested too deeply") from None
    except OverflowError:
        raise msgspec.ValidationError("a number is out of range") from None


def _has_key(api_key: bytes) -> bool:
    given = request.headers.get(KEY_HEADER, "")[:KEY_CHARACTERS_MAX].strip().encode("utf-8", "replace")
    # Compared in any case, so that the time of an answer does not tell whether a key is configured.
    equal = hmac.compare_digest(given, api_key)
    return equal and bool(api_key)


def _require_key(api_key: bytes, admin: bool) -> None:
    if not api_key:
        raise Closed("writes are closed: no API key is configured", remedy="make one, see docs/dashboard.md")
    if not admin:
        raise Unauthorised("the API key is missing or wrong", remedy=f"send it in the header {KEY_HEADER}")


def encode_json(value: object) -> bytes:
    """JSON that may also be shown in a terminal: what steers one, or cannot be seen, is escaped."""
    data = _ENCODER.encode(value)
    return data if data.isascii() and b"\x7f" not in data else escape_json(data.decode("utf-8")).encode("utf-8")


def json_response(value: object, status: int = 200) -> Response:
    response = Response(encode_json(value), status, mimetype=JSON)
    response.headers["Cache-Control"] = "no-store"
    return response


def problem(status: int, detail: str) -> Response:
    """An error as every route tells it."""
    return json_response(Problem(detail=detail), status)


def install_frame(app: Flask, hosts: HostRule) -> None:
    """Which hosts are answered to, headers of all answers, and errors as JSON."""
    app.config["MAX_CONTENT_LENGTH"] = LARGE_BODY_BYTES_MAX

    @app.before_request
    def check_host() -> Response | None:
        # As it was sent: the frameworks put a name of their own where none is.
        if hosts.allows(request.environ.get("HTTP_HOST", "")):
            return None
        return problem(421, "this is not the host that was asked for; see --allow-host of kakeya dashboard")

    @app.after_request
    def add_headers(response: Response) -> Response:
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.errorhandler(Exception)
    def tell(error: Exception) -> Response:
        return error_response(error)


def error_response(error: Exception) -> Response:
    """What an error becomes; what is not the caller's fault is logged by type only, and told as 500 without details."""
    match error:
        case msgspec.ValidationError():
            return problem(422, str(error))
        case msgspec.DecodeError() | UnicodeError():
            return problem(422, "the body is not JSON")
        case RequestEntityTooLarge():
            return problem(413, "the body is too large")
        case HTTPException(code=int() as code):
            response = problem(code, _HTTP_TEXTS.get(code, "the request cannot be served"))
            methods = getattr(error, "valid_methods", None)
            if methods:
                response.headers["Allow"] = ", ".join(sorted(methods))
            return response
        case Closed():
            return problem(403, str(error))
        case Unauthorised() | AuthenticationError():
            return problem(401, str(error))
        case TooMany():
            response = problem(429, str(error))
            response.headers["Retry-After"] = str(math.ceil(error.wait_s))
            return response
        case NotThere():
            return problem(404, str(error))
        case Conflict():
            return problem(409, str(error))
        case CapacityError():
            return problem(503, str(error))
        case NotJson():
            return problem(415, str(error))
        case InvalidInput():
            return problem(400, str(error))
        case sqlite3.Error():
            _log.error("the database failed: %s", type(error).__name__)
            why = str(error) if isinstance(error, sqlite3.OperationalError) else "the state file is damaged"
            return problem(503, f"the state cannot be {'read' if request.method == 'GET' else 'written'}: {why}")
        case _:
            _log.error("a request failed: %s", type(error).__name__, exc_info=_log.isEnabledFor(logging.DEBUG))
            return problem(500, "internal error")


_HTTP_TEXTS: Final[Mapping[int, str]] = {
    400: "the request is malformed",
    404: "there is no such route",
    405: "this route does not take that method",
}
