"""Paths as users write them: a leading ``~`` is the home folder, ``~name`` that of another user."""

from __future__ import annotations

from pathlib import Path

from wire.errors import ConfigError


def user_path(text: str, source: str) -> Path:
    """A path that somebody wrote; ``source`` is the flag, variable or key of the file that says it.

    Raises:
        ConfigError: it begins with the home folder of a user who is not known here.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:  # pathlib's way of saying that nobody has such a folder
        pass
    name = text.partition("/")[0][1:]
    who = f"there is no user {name[:60]!r} with a home folder" if name else "the home folder of this user is not known"
    raise ConfigError(f"{source} is {text[:200]!r}, and {who}", remedy="write the path in full")


def home_folder() -> Path:
    """The home folder of this user.

    Raises:
        ConfigError: nothing tells where it is: ``HOME`` is not set, and the system does not know this user.
    """
    try:
        return Path.home()
    except RuntimeError:  # as in a container with a user of no name
        raise ConfigError("the home folder of this user is not known", remedy="set HOME, or KAKEYA_HOME") from None
