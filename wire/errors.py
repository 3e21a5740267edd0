"""The error tree.

Two families, after h11: a *local* protocol error means that our own code broke the rules (a bug), a *remote* protocol
error means that the other side did (it is counted, and the message or the connection is dropped). Everything else a
user can meet is a :class:`KakeyaError` with a failure code and, where there is one, a remedy. ``str(error)`` is always
one line that can be shown to a user: no secret, no token, no hash; and what others wrote of it is cleaned.
"""

from enum import IntEnum

from wire.text import clean


class FailureCode(IntEnum):
    """Why a request failed; travels in a Failure message. Names follow the usual RPC vocabulary."""

    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    PERMISSION_DENIED = 3
    RESOURCE_EXHAUSTED = 4
    FAILED_PRECONDITION = 5
    ABORTED = 6
    UNAVAILABLE = 7
    CANCELLED = 8
    DEADLINE_EXCEEDED = 9
    DATA_LOSS = 10
    UNIMPLEMENTED = 11
    INTERNAL = 12
    UNAUTHENTICATED = 13


class KakeyaError(Exception):
    """Base of every error this project raises on purpose.

    Args:
        message: one line: what is wrong.
        remedy: one line: what the user should do about it, or empty.
    """

    code: FailureCode = FailureCode.INTERNAL

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message = clean(message)
        self.remedy = clean(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class LocalProtocolError(KakeyaError):
    """We broke a rule of the protocol: a bug in this process."""


class RemoteProtocolError(KakeyaError):
    """The other side broke a rule of the protocol: drop what it sent and count it."""

    code = FailureCode.INVALID_ARGUMENT


class AuthenticationError(RemoteProtocolError):
    """A seal, signature or counter does not hold: the sender is not who it must be."""

    code = FailureCode.UNAUTHENTICATED


class ForgedMessageError(RemoteProtocolError):
    """A bus message of a member that is not signed by whom it says.

    Args:
        node_id: under whose name it came.
    """

    code = FailureCode.UNAUTHENTICATED

    def __init__(self, message: str, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class RequestFailed(KakeyaError):
    """A request came back as a Failure, or never came back (deadline, lost peer)."""

    def __init__(self, code: FailureCode, message: str, *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


class InvalidInput(KakeyaError):
    """The user's input cannot be used as it is."""

    code = FailureCode.INVALID_ARGUMENT


class ConfigError(InvalidInput):
    """A flag, environment variable or configuration file is wrong."""


class SecretFileError(ConfigError):
    """A PSK or key file is missing, unreadable, too short, or readable by others."""


class UnsafeFileError(ConfigError):
    """A file that says who may do what can be changed by others."""


class ModelError(ConfigError):
    """A model folder cannot be loaded, or its cache type is not supported."""


class PortInUseError(ConfigError):
    """The address a daemon should listen on is taken."""


class NodeInUseError(ConfigError):
    """Another process of this machine runs the node."""


class FleetBusyError(ConfigError):
    """Another command is starting the fleet of this home, or one that was killed has left a part of it running."""


class CapacityError(KakeyaError):
    """A bounded resource is full: store, queue, sessions, jobs."""

    code = FailureCode.RESOURCE_EXHAUSTED


class DataLossError(KakeyaError):
    """Stored or received bytes are not what their digest says."""

    code = FailureCode.DATA_LOSS
