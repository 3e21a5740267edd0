"""The documentation says what the code does: every counter, status figure, option, message and exit code is in it."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from daemons import command
from daemons.peer_figures import traffic_figures
from kakeya_zmq.option_values import Option
from kakeya_zmq.options import OPTIONS
from kakeya_zmq.store import StoreStats
from kakeya_zmq.telemetry import PREFILL_COUNTERS, PREFILL_VALUES
from wire import events, limits
from wire.bus import Topic
from wire.chunks import HEADER_BYTES as CHUNK_HEADER_BYTES
from wire.frames import HEADER_BYTES as CONTROL_HEADER_BYTES
from wire.keys import Purpose
from wire.messages import Envelope, ProgressBody, ReplyBody, RequestBody, UpdateBody

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE_ELSEWHERE = {"cache_published_parts", "machine_failures", "effect_failures"}
"""Counters whose name reaches ``Count`` through a variable, or that the dispatcher counts by itself.

The test of literals can't see them.
"""


def text_of(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def table_names(text: str, heading: str) -> set[str]:
    """Names in code style in the first column of the tables under one heading."""
    section = re.split(r"^#+ ", text, flags=re.MULTILINE)
    (body,) = [part for part in section if part.partition("\n")[0].strip() == heading]
    return {name for row in re.findall(r"^\| (.+?) \|", body, flags=re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def product_trees() -> Iterator[ast.Module]:
    for room in ("wire", "kakeya_zmq", "daemons"):
        for path in sorted((ROOT / room).rglob("*.py")):
            yield ast.parse(path.read_text("utf-8"))


def counted_names() -> set[str]:
    """First arguments of ``Count(...)`` and ``counters.add(...)`` all over the product."""
    names = set()
    for tree in product_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            if called in {"Count", "fx.Count"} or called.endswith("counters.add"):
                names |= constants(part for part in ast.walk(node.args[0]) if isinstance(part, ast.expr))
    return names


def constants(nodes: Iterable[ast.expr | None]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def section_figures() -> dict[str, set[str]]:
    """Names of the status sections that are written as dictionaries in the daemons."""
    found: dict[str, set[str]] = {}
    for tree in product_trees():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name="figures", body=[*_, ast.Return(value=ast.Dict(keys=keys))]):
                    found["of the dispatcher"] = constants(keys)
                case ast.Return(value=ast.Tuple(elts=[ast.Constant(value=str() as name), ast.Dict(keys=keys)])):
                    found[name] = constants(keys)
                case ast.Dict(keys=keys, values=values):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "node" and isinstance(value, ast.Dict):
                            found["node"] = found.get("node", set()) | constants(value.keys)
    return found


# --- telemetry -------------------------------------------------------------------------------------------------------


def test_every_counter_is_documented_and_exists() -> None:
    documented = table_names(text_of("telemetry.md"), "Section `prefill`: counters")
    existing = counted_names() | set(PREFILL_COUNTERS) | MADE_ELSEWHERE
    assert documented == existing, f"undocumented {existing - documented}, gone {documented - existing}"


def test_the_counters_that_are_always_there_are_marked() -> None:
    marked = re.findall(r"^\| `(\w+)` • \|", text_of("telemetry.md"), flags=re.MULTILINE)
    assert sorted(marked) == sorted(PREFILL_COUNTERS)


def test_the_counters_made_elsewhere_are_in_the_code() -> None:
    strings = {n.value for tree in product_trees() for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert strings >= MADE_ELSEWHERE
    assert not MADE_ELSEWHERE & counted_names()


def test_every_prefill_value_is_documented() -> None:
    assert table_names(text_of("telemetry.md"), "Section `prefill`: values") == set(PREFILL_VALUES)


def test_every_figure_of_a_status_section_is_documented() -> None:
    figures = section_figures()
    assert figures.keys() == {"node", "of the dispatcher", "primary", "worker", "budget", "memory", "keys", "roster"}
    figures["cache"] = set(StoreStats.__dataclass_fields__)
    figures["node"] |= figures.pop("of the dispatcher") | set(traffic_figures(Counter()))
    for name, names in figures.items():
        documented = table_names(text_of("telemetry.md"), f"Section `{name}`")
        assert documented == names, f"{name}: undocumented {names - documented}, gone {documented - names}"


def event_parts() -> list[type[msgspec.Struct]]:
    """The events of the bus and what they are made of."""
    kinds = (kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return [kind for kind in kinds if kind.__module__ == events.__name__ and not kind.__name__.startswith("_")]


@pytest.mark.parametrize("kind", event_parts(), ids=lambda kind: kind.__name__)
def test_every_field_of_an_event_is_documented(kind: type[msgspec.Struct]) -> None:
    heading = f"{'Event' if kind in events.TOPIC_OF else 'Part'} `{kind.__name__}`"
    documented = fields_of(text_of("telemetry.md"), heading)
    existing = set(kind.__struct_fields__)
    assert documented == existing, f"undocumented {existing - documented}, gone {documented - existing}"


def fields_of(text: str, heading: str) -> set[str]:
    """Names in the first column of the first table under a heading."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    (first,) = re.findall(r"\A\s*((?:^\|.*\n)+)", section, flags=re.MULTILINE)
    return {name for row in re.findall(r"^\| (.+?) \|", first, flags=re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def test_every_kind_of_security_event_is_documented() -> None:
    text = text_of("telemetry.md")
    assert all(f"| `{kind.value}` |" in text for kind in events.SecurityKind)


def test_every_topic_is_documented_with_its_group_and_event() -> None:
    found = re.findall(r"^\| 0x(\w\w) (\w+) \| (\w+) \| (.+?) \|", text_of("protocol.md"), flags=re.MULTILINE)
    assert {(int(number, 16), name, group) for number, name, group, _ in found} == {
        (topic.value, topic.name, topic.group.value) for topic in Topic
    }
    contents = {name: content for _, name, _, content in found}
    assert all(f"`{kind.__name__}`" in contents[topic.name] for topic, kind in events.EVENT_TYPES.items())


# --- configuration ---------------------------------------------------------------------------------------------------


def documented_default(option: Option) -> str:
    return "–" if option.default in ("", ()) else f"`{option.default}`"


def documented_range(option: Option) -> str:
    if option.minimum is None or option.maximum is None:
        return ""
    return f"; {option.minimum:g} to {option.maximum:{'g' if option.maximum < 1 else ',.0f'}}"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_documented_with_default_meaning_and_range(option: Option) -> None:
    rows = [line for line in text_of("configuration.md").splitlines() if line.startswith(f"| `{option.flag}` |")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    roles = "all" if len(option.roles) == 3 else ", ".join(option.roles)
    assert cells[1:3] == [documented_default(option), roles]
    assert cells[3].startswith(f"{option.help}{documented_range(option)}")
    assert all(f"`{choice}`" in cells[3] for choice in option.choices)


def test_no_option_is_documented_that_does_not_exist() -> None:
    flags = set(re.findall(r"^\| `(--[a-z-]+)` \|", text_of("configuration.md"), flags=re.MULTILINE))
    assert flags == {option.flag for option in OPTIONS}


def test_every_exit_code_is_documented() -> None:
    codes = {value for name, value in vars(command).items() if name.startswith("EXIT_")}
    documented = set(re.findall(r"^\| `(\d+)` \|", text_of("configuration.md"), flags=re.MULTILINE))
    assert {int(code) for code in documented} == codes


def test_a_file_that_cannot_be_written_has_the_exit_code_that_is_documented_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in-the-way").touch()
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path / "in-the-way" / "home"))
    code = command.main(["key", "new"])
    rows = dict(re.findall(r"^\| `(\d+)` \| (.+) \|$", text_of("configuration.md"), flags=re.MULTILINE))
    assert [row for row, meaning in rows.items() if "file or folder cannot be made or written" in meaning] == [str(code)]


# --- protocol --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("union", [Envelope, RequestBody, ReplyBody, ProgressBody, UpdateBody])
def test_every_message_is_documented_with_its_tag(union: object) -> None:
    found = re.findall(r"^\| (\d+) \| `(\w+)` \|", text_of("protocol.md"), flags=re.MULTILINE)
    rows = {(int(tag), name) for tag, name in found}
    kinds = {(kind.__struct_config__.tag, kind.__name__) for kind in get_args(union)}
    assert kinds
    assert kinds <= rows


def test_no_message_is_documented_that_does_not_exist() -> None:
    unions = (Envelope, RequestBody, ReplyBody, ProgressBody, UpdateBody)
    existing = {kind.__name__ for union in unions for kind in get_args(union)}
    assert set(re.findall(r"^\| \d+ \| `(\w+)` \|", text_of("protocol.md"), flags=re.MULTILINE)) == existing


def test_header_sizes_and_key_purposes_are_those_of_the_code() -> None:
    text = text_of("protocol.md")
    assert f"{CONTROL_HEADER_BYTES} bytes" in text
    assert f"{CHUNK_HEADER_BYTES} bytes" in text
    assert all(f"`{purpose.value}`" in text for purpose in Purpose)
    assert f"protocol version is {limits.PROTOCOL_VERSION}" in text


# --- README and links ------------------------------------------------------------------------------------------------


def markdown_files() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text("utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_kakeya_command_in_a_code_block_can_be_parsed(path: Path) -> None:
    parser = command.build_parser()
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shell_words(line)
            if words[:1] in (["kakeya"], [".venv/bin/kakeya"]):
                with contextlib.suppress(SystemExit):  # --help and --version end by it
                    parser.parse_args(words[1:])  # raises ConfigError for an unknown flag or command


def shell_words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def test_every_decision_is_listed() -> None:
    index = text_of("architecture.md")
    assert all(f"decisions/{path.name}" in index for path in (DOCS / "decisions").glob("*.md"))
