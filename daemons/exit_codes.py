"""The exit codes of ``kakeya``, as its help documents them."""

from __future__ import annotations

from wire.errors import (
    AuthenticationError,
    FailureCode,
    FleetBusyError,
    InvalidInput,
    KakeyaError,
    NodeInUseError,
    PortInUseError,
    SecretFileError,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_UNAVAILABLE = 3
EXIT_NOT_AUTHENTICATED = 4
EXIT_PORT_IN_USE = 5
EXIT_INTERRUPTED = 130


def exit_code(error: KakeyaError) -> int:
    """The documented exit code of an error."""
    if isinstance(error, SecretFileError | AuthenticationError) or error.code is FailureCode.UNAUTHENTICATED:
        return EXIT_NOT_AUTHENTICATED
    if isinstance(error, PortInUseError | NodeInUseError | FleetBusyError):
        return EXIT_PORT_IN_USE
    if isinstance(error, InvalidInput) or error.code in (FailureCode.INVALID_ARGUMENT, FailureCode.NOT_FOUND):
        return EXIT_BAD_INPUT
    if error.code in (FailureCode.UNAVAILABLE, FailureCode.DEADLINE_EXCEEDED, FailureCode.RESOURCE_EXHAUSTED):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED
