"""What the health endpoint tells service managers, load balancers and people (who serves it: daemons.health_server).

``GET /healthz``                  200 when healthy, else 503; the body has the two below
``GET /v1/runtime/liveness``      what the model is doing, and since when
``GET /v1/runtime/memory``        the figures of the memory guard

The reactor's thread puts reports on the board, every few seconds and when somebody asks; the server's thread reads the last
one. A report that is too old means that the reactor does not turn any more, which is unhealthy, too. No session, token or
address is in any of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any, Final

STALE_AFTER_S: Final = 30.0
"""Reports come at least every five seconds; a reactor that is silent for so long hangs."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """What the model is doing. ``phase``: starting, idle, prefill, decode, draining. ``step_s``: how long in this step."""

    phase: str
    pid: int
    sessions: int = 0
    step_s: float = 0.0
    unhealthy: str = ""
    """Why, or empty."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """One look at a daemon. ``at``: seconds on the board's clock; ``updated_at_unix``: for people."""

    liveness: Liveness
    memory: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0
    updated_at_unix: float = 0.0


class HealthBoard:
    """Holds the last report; written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: HealthReport | None = None

    def put(self, liveness: Liveness, memory: dict[str, Any]) -> None:
        self._last = HealthReport(liveness, dict(memory), self._clock(), time.time())

    def age_s(self) -> float:
        """Of the last report; infinite when there is none yet."""
        last = self._last
        return self._clock() - last.at if last is not None else math.inf

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, Any]] | None:
        """Status and body for a path; None when there is no such path."""
        last = self._last
        if path not in ("/healthz", "/v1/runtime/liveness", "/v1/runtime/memory"):
            return None
        if last is None:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "starting"}
        memory = {**last.memory, "updated_at_unix": last.updated_at_unix}
        liveness = {**asdict(last.liveness), "updated_at_unix": last.updated_at_unix}
        why = self._why_unhealthy(last)
        if why:
            liveness["unhealthy"] = why
        if path == "/v1/runtime/memory":
            return HTTPStatus.OK, memory
        if path == "/v1/runtime/liveness":
            return HTTPStatus.OK, liveness
        body = {"status": why or "ok", "liveness": liveness, "memory": memory}
        return HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, body

    def _why_unhealthy(self, last: HealthReport) -> str:
        if last.liveness.unhealthy:
            return last.liveness.unhealthy
        if last.memory.get("level") == "unhealthy":
            return "memory"
        if self._clock() - last.at > STALE_AFTER_S:
            return "the daemon does not react"
        return ""
