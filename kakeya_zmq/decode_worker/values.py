"""Values and errors of the decode worker boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kakeya_zmq.decode_worker.restarts import RestartLimits
from wire.errors import FailureCode, KakeyaError


class WorkerState(StrEnum):
    """What the child is doing."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    """Dead or killed; another one is about to be started."""
    GIVEN_UP = "given-up"
    """Lost too often; another one is started later."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Times in seconds.

    ``program``: words of the child's command line. ``settings``: msgpack, handed to it over the channel.
    ``cancel_grace_s``: how long a step of a cancelled command may go on before the child is killed.
    """

    program: tuple[str, ...]
    settings: bytes
    step_timeout_s: float = 120.0
    startup_timeout_s: float = 180.0
    cancel_grace_s: float = 20.0
    limits: RestartLimits = field(default_factory=RestartLimits)


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """For the status section ``decode_worker``. Sizes in bytes."""

    state: str
    pid: int
    restarts: int
    hangs: int
    restored_sessions: int
    memory_bytes: int
    kept_bytes: int


class WorkerLost(Exception):
    """The child is gone or must go; ``str()`` says why in a few words."""


class WorkerUnavailable(KakeyaError):
    """There is no child, and there must not be a new one now."""

    code = FailureCode.UNAVAILABLE
