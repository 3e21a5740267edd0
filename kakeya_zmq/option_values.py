"""One setting of a daemon: its type, default and bounds, and how its value is read from wherever it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kakeya_zmq.user_paths import user_path
from wire.errors import ConfigError

ALL_ROLES = ("primary", "worker", "cache")
NUMBERS = ("integer", "number")
EXAMPLE_CHARACTERS_MAX = 40
TOO_LONG = "a very long number"


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
            return str(user_path(text, source)) if option.kind == "path" and text else text
        case "list":
            return tuple(text for item in _items(value, source) if (text := _as_text(item, source).strip()))
        case "switch":
            return _parse_switch(value, source)
        case "choice":
            if value not in option.choices:
                raise ConfigError(f"{source} is {_shown(value)}", remedy=f"one of: {', '.join(option.choices)}")
            return value
        case _:
            return _parse_number(option, value, source)


def parse_file_value(option: Option, value: Any, source: str) -> Any:
    """As :func:`parse_value`, for a value of a TOML file: there a number has no quotes and a text has them.

    Raises:
        ConfigError: it does not fit; the remedy is what to write.
    """
    if option.kind in NUMBERS and isinstance(value, str):
        raise ConfigError(f"{source} is {_shown(value)}, a text", remedy=_without_quotes(option, value))
    if option.kind in ("text", "path") and isinstance(value, int | float) and not isinstance(value, bool):
        shown = _shown(value)
        example = f': {option.name} = "{shown}"' if len(shown) <= EXAMPLE_CHARACTERS_MAX and shown != TOO_LONG else ""
        raise ConfigError(f"{source} is {shown}, a number", remedy=f"a text in quotes{example}")
    return parse_value(option, value, source)


def refuse_lists_of_tables(document: Mapping[str, Any]) -> None:
    """Of a TOML file: ``[[worker]]`` would be taken for a list of that name, and what it says would have no effect.

    Raises:
        ConfigError: there is one.
    """
    for name, value in document.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            remedy = f"a role has one table: write [{name}]" if name in ALL_ROLES else "a list of texts"
            raise ConfigError(f"[[{name[:60]}]] in the configuration file is a list of tables", remedy=remedy)


def _without_quotes(option: Option, text: str) -> str:
    """What to write instead of a number in quotes."""
    remedy = f"{_wanted(option)}, without quotes"
    try:
        return f"{remedy}: {option.name} = {_parse_number(option, text, option.name)}"
    except ConfigError:
        return remedy


def _as_text(value: Any, source: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{source} is {_shown(value)}", remedy="a text in quotes")
    return value


def _shown(value: Any) -> str:
    """A value as it stands in a TOML file, cut off."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return repr(value)[:80]
    except ValueError:  # Python writes no number of more than some thousand digits
        return TOO_LONG


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
    try:
        number: int | float = int(str(value)) if option.kind == "integer" else float(str(value))
    except ValueError:
        shown = repr(value[:60]) if isinstance(value, str) else _shown(value)
        raise ConfigError(f"{source} is {shown}", remedy=_wanted(option)) from None
    low = option.minimum if option.minimum is not None else float("-inf")
    high = option.maximum if option.maximum is not None else float("inf")
    if not low <= number <= high:
        raise ConfigError(f"{source} is {str(value)[:60]}", remedy=_wanted(option))
    return number


def _wanted(option: Option) -> str:
    """Which numbers would fit."""
    wanted = "a whole number" if option.kind == "integer" else "a number"
    if option.minimum is None or option.maximum is None:
        return wanted
    return f"{wanted} from {option.minimum:g} to {option.maximum:g}"
