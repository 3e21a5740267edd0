"""The messages' fields as docs/protocol.md lists them, made from wire/messages.py; and made-up values for each.

``python -m tests.vectors.describe`` prints the tables of the section "Fields" of the document, with ``--write`` it puts them
there; a test holds the two together.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from msgspec import inspect

from wire import cards, messages, text

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
UNIONS = {
    "request": messages.RequestBody,
    "reply": messages.ReplyBody,
    "progress": messages.ProgressBody,
    "update": messages.UpdateBody,
}
GRAMMARS: Final[dict[str, tuple[str, str]]] = {
    text.NODE_ID: ("NodeId", "node-{0}"),
    text.OPTIONAL_NODE_ID: ("NodeId", "node-{0}"),
    text.WORD: ("Word", "word-{0}"),
    text.OPTIONAL_WORD: ("Word", "word-{0}"),
    text.ASCII: ("Ascii", "version {0}"),
    text.LINE: ("Line", "name {0} é"),
}
"""Pattern of a text → (what the document calls it, an example with a number in it)."""
ROOTS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("Handshake", (messages.Hello, messages.Welcome)),
    ("Envelopes", get_args(messages.Envelope)),
    *((f"Bodies: {name}", get_args(union)) for name, union in UNIONS.items()),
    ("Card", (cards.Card,)),
)


def is_body(node: inspect.Type) -> bool:
    return isinstance(node, inspect.UnionType) and sum(isinstance(each, inspect.StructType) for each in node.types) > 1


def word(node: inspect.Type) -> str:
    """A type in a few letters."""
    match node:
        case inspect.IntType() | inspect.LiteralType():
            return "int"
        case inspect.FloatType():
            return "float"
        case inspect.BoolType():
            return "bool"
        case inspect.StrType(pattern=pattern):
            grammar, _ = GRAMMARS.get(pattern or "", ("", ""))
            return f"text {grammar}".strip()
        case inspect.BytesType(min_length=low, max_length=high):
            return f"bytes {low}" if low is not None and low == high else "bytes"
        case inspect.EnumType(cls=cls):
            return f"int {cls.__name__}" if issubclass(cls, enum.IntEnum) else f"text {cls.__name__}"
        case inspect.StructType(cls=cls):
            return str(cls.__name__)
        case inspect.VarTupleType(item_type=item):
            return f"[{word(item)}]"
        case inspect.TupleType(item_types=items):
            return f"[{len(items)} × {word(items[0])}]"
        case inspect.DictType(key_type=key, value_type=value):
            return f"{{{word(key)}: {word(value)}}}"
        case inspect.UnionType(types=types):
            if is_body(node):
                return "body"
            words = [word(each) for each in types if not isinstance(each, inspect.NoneType)]
            return " or ".join([*words, *(["nil"] if node.includes_none else [])])
    raise TypeError(node)


def fields_of(kind: type) -> list[tuple[str, str]]:
    node = inspect.type_info(kind)
    assert isinstance(node, inspect.StructType)
    return [(field.name, word(field.type)) for field in node.fields]


def structs_under(node: inspect.Type) -> Iterator[type]:
    """Structs inside a type, but not the bodies of an envelope."""
    match node:
        case inspect.StructType(cls=cls):
            yield cls
            for field in node.fields:
                yield from structs_under(field.type)
        case inspect.VarTupleType(item_type=item):
            yield from structs_under(item)
        case inspect.TupleType(item_types=items):
            for each in items:
                yield from structs_under(each)
        case inspect.DictType(value_type=value):
            yield from structs_under(value)
        case inspect.UnionType(types=types) if not is_body(node):
            for each in types:
                yield from structs_under(each)


def groups() -> dict[str, list[type]]:
    """Every struct on the wire, under the heading of its first use."""
    found: dict[str, list[type]] = {}
    seen: set[type] = set()
    for heading, kinds in ROOTS:
        for kind in kinds:
            for each in structs_under(inspect.type_info(kind)):
                if each not in seen:
                    seen.add(each)
                    found.setdefault(heading, []).append(each)
    return found


def enumerations() -> dict[str, type[enum.Enum]]:
    modules = {**vars(messages)}
    return {
        name: value
        for name, value in sorted(modules.items())
        if isinstance(value, type) and issubclass(value, enum.IntEnum) and value is not enum.IntEnum
    }


def row(kind: type) -> str:
    cells = "; ".join(f"`{name}`: {type_}" for name, type_ in fields_of(kind))
    return f"| `{kind.__name__}` | {cells or '–'} |"


def document() -> str:
    lines = []
    for heading, kinds in groups().items():
        lines += [f"| {heading} | fields, in this order |", "|---|---|", *map(row, kinds), ""]
    lines += ["| enumeration | values |", "|---|---|"]
    for name, kind in enumerations().items():
        lines.append(f"| {name} | {', '.join(f'{member.value} {member.name}' for member in kind)} |")
    return "\n".join(lines) + "\n"


# --- made-up values --------------------------------------------------------------------------------------------------


class Maker:
    """Values for every field: valid, and different from each other, so that two swapped fields would show."""

    def __init__(self) -> None:
        self._count = 0

    def make(self, node: inspect.Type, body: Any = None) -> Any:
        self._count += 1
        match node:
            case inspect.StructType(cls=cls, fields=fields):
                return cls(**{field.name: self.make(field.type, body) for field in fields})
            case inspect.IntType(ge=low, le=high):
                span = (high if high is not None else 1000) - (low or 0)
                return (low or 0) + self._count % (span + 1)
            case inspect.LiteralType(values=values):
                return values[self._count % len(values)]
            case inspect.FloatType():
                return self._count % 2 / 2 + 0.25
            case inspect.BoolType():
                return self._count % 2 == 0
            case inspect.StrType(pattern=pattern, min_length=low):
                _, example = GRAMMARS.get(pattern or "", ("", "10.0.0.{0}:{0}" if pattern else "text {0} é"))
                return example.format(self._count % 250).ljust(low or 0, "f")
            case inspect.BytesType(min_length=low, max_length=high):
                length = low if low is not None else min(8, high or 8)
                return bytes((self._count + i) % 256 for i in range(length))
            case inspect.EnumType(cls=cls):
                members = list(cls)
                return members[self._count % len(members)]
            case inspect.VarTupleType(item_type=item):
                return tuple(self.make(item) for _ in range(2))
            case inspect.TupleType(item_types=items):
                return tuple(self.make(item) for item in items)
            case inspect.DictType(key_type=key, value_type=value):
                return {self.make(key): self.make(value) for _ in range(2)}
            case inspect.UnionType(types=types):
                if is_body(node):
                    return body
                return self.make(next(each for each in types if not isinstance(each, inspect.NoneType)))
        raise TypeError(node)


def plain(value: Any) -> Any:
    """A value as JSON: structs as objects with names, bytes as {"hex": …}."""
    match value:
        case msgspec.Struct():
            return {field: plain(getattr(value, field)) for field in value.__struct_fields__}
        case bytes():
            return {"hex": value.hex()}
        case tuple() | list():
            return [plain(each) for each in value]
        case dict():
            return {str(key): plain(each) for key, each in value.items()}
        case enum.Enum():
            return value.value
        case _:
            return value


def write() -> None:
    """Put the tables where they belong: behind the introduction of the last section."""
    written = DOCUMENT.read_text("utf-8")
    head = written[: written.index("| Handshake | fields")]
    DOCUMENT.write_text(head + document(), encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        print(document())
