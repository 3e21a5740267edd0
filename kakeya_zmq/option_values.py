"""One setting of a daemon: its type, default and bounds, and how its value is read from wherever it was given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.errors import ConfigError

ALL_ROLES = ("primary", "worker", "cache")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: ``name`` is the field; with dashes it is the flag, in capitals after ``KAKEYA_`` the variable."""

    name: str
    kind: str
    """text, path, integer, number, switch, list or choice."""
    default: Any
    help: str
    roles: tuple[str, ...] = ALL_ROLES
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "KAKEYA_" + self.name.upper()


def parse_value(option: Option, value: Any, source: str) -> Any:
    """Turn a flag's, variable's or file's value into the option's type.

    Raises:
        ConfigError: it does not fit; the message names ``source`` and what would fit.
    """
    match option.kind:
        case "text" | "path":
            text = _as_text(value, source)
            return str(Path(text).expanduser()) if option.kind == "path" and text else text
        case "list":
            return tuple(text for item in _items(value, source) if (text := _as_text(item, source).strip()))
        case "switch":
            return _parse_switch(value, source)
        case "choice":
            if value not in option.choices:
                raise ConfigError(f"{source} is {str(value)[:60]!r}", remedy=f"one of: {', '.join(option.choices)}")
            return value
        case _:
            return _parse_number(option, value, source)


def _as_text(value: Any, source: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{source} is {_shown(value)}", remedy="a text in quotes")
    return value


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a very long number"


def _items(value: Any, source: str) -> Iterable[Any]:
    """A list may be one text with commas, or (in a file, or from a repeated flag) several texts, each with commas."""
    if isinstance(value, str):
        return value.split(",")
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{source} is {_shown(value)}", remedy="a list of texts, or one text with commas")
    return [part for item in value for part in _as_text(item, source).split(",")]


def _parse_switch(value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    lowered = value.lower() if isinstance(value, str) else _shown(value).lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{source} is {_shown(value)}", remedy="1 or 0")


def _parse_number(option: Option, value: Any, source: str) -> int | float:
    wanted = "a whole number" if option.kind == "integer" else "a number"
    bounds = (
        f" from {option.minimum:g} to {option.maximum:g}"
        if option.minimum is not None and option.maximum is not None
        else ""
    )
    try:
        number: int | float = int(str(value)) if option.kind == "integer" else float(str(value))
    except ValueError:
        shown = repr(value[:60]) if isinstance(value, str) else _shown(value)
        raise ConfigError(f"{source} is {shown}", remedy=f"{wanted}{bounds}") from None
    low = option.minimum if option.minimum is not None else float("-inf")
    high = option.maximum if option.maximum is not None else float("inf")
    if not low <= number <= high:
        raise ConfigError(f"{source} is {str(value)[:60]}", remedy=f"{wanted}{bounds}")
    return number
