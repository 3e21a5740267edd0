"""What others wrote on its way to a terminal, a log or a page: cleaned at every place where something is shown."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from rich.text import Text

from daemons import explain, status
from daemons.audit_command import show_audit
from daemons.console import Console, fail
from daemons.doctor.network import NodeView
from daemons.doctor.network_findings import judge_nodes
from daemons.log_files import HumanFormatter, JsonFormatter
from daemons.logs import show_logs
from dashboard.http import encode_json
from dashboard.monitor.event_lines import event_line
from dashboard.monitor.terminal import Painter
from kakeya_zmq.audit import AuditLog
from kakeya_zmq.client import Client
from kakeya_zmq.kvfs import namespaces
from kakeya_zmq.protocol.session import LocalNode
from kakeya_zmq.telemetry import explanation_line
from tests.dashboard.kit import message
from tests.test_layers import PRODUCT, ROOT
from tests.unit.test_cards import IDENTITY, make_card
from tests.vectors.describe import ROOTS, Maker, fields_of, structs_under
from wire import cards, codec, events, messages, text
from wire.errors import ConfigError, KakeyaError, LocalProtocolError, RemoteProtocolError
from wire.keys import FleetKey
from wire.text import clean, clean_prose, is_line, is_node_id, json_text

STEERING: Final = (
    "\x1b]0;owned\x07\x1b[2J\x9b31m\rlog\n2026-01-01 00:00:00 ERROR forged\u202etxt\u2066\u200b\u2028\x7f\x00\ufeff"
)
MARKUP: Final = "[red]r[/red] [link=http://x]l[/link] :warning: [/] \\[b]"
HOSTILE = st.text() | st.text(st.sampled_from(STEERING + MARKUP + "\u05d0é機🚀\U000e0041\u0301"))


def is_harmless(shown: str) -> bool:
    """Only visible characters, and no line end but the last one of each line that we wrote ourselves."""
    return all(each == "\n" or each.isprintable() for each in shown)


# --- the cleaning ------------------------------------------------------------------------------------------------------


@given(HOSTILE)
@example(STEERING)
def test_a_clean_line_has_only_what_can_be_seen_and_stays_clean(given_text: str) -> None:
    shown = clean(given_text)
    assert shown.isprintable()
    assert not any(unicodedata.category(each) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for each in shown)
    assert clean(shown) == shown
    if given_text.isascii() and given_text.isprintable():
        assert shown == given_text


@pytest.mark.parametrize(
    ("given_text", "shown"),
    [
        ("mac-mini [red]", "mac-mini [red]"),
        ("Zoë 機械 שלום 🚀", "Zoë 機械 שלום 🚀"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("two\nlines\r\t", r"two\nlines\r\t"),
        ("\u202etxt.exe\x9b", r"\u202etxt.exe\x9b"),
        ("wo\u200brker\u00a0x\u3164", r"wo\u200brker\xa0x\u3164"),
        ("\U000e0041\ud800", r"\U000e0041\ud800"),
        ("e" + "\u0301" * 4, "e\u0301\u0301" + r"\u0301\u0301"),
    ],
)
def test_what_is_taken_out_can_be_read(given_text: str, shown: str) -> None:
    assert clean(given_text) == shown


def test_a_long_text_is_cut_before_it_costs_anything() -> None:
    assert clean("é" * 1_000_000) == "é" * text.LINE_CHARACTERS_MAX + "…"
    assert len(clean("\x1b" * 1_000_000)) == 4 * text.LINE_CHARACTERS_MAX + 1
    assert clean("abcdef", 3) == "abc…"


@given(HOSTILE)
@example("हिन्\u200dदी ❤\ufe0f\tمرحبا\u200f\nnext")
def test_prose_keeps_lines_and_scripts_and_steers_nothing(given_text: str) -> None:
    shown = clean_prose(given_text)
    kept = "\n\t\u200c\u200d\u200e\u200f\u061c"
    assert all(
        each in kept or unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for each in shown
    )
    if not any(unicodedata.category(each)[0] == "C" or unicodedata.category(each) in ("Zl", "Zp") for each in given_text):
        assert shown == given_text


@settings(max_examples=40)
@given(st.recursive(HOSTILE | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(HOSTILE, inner)))
def test_json_loses_nothing_and_steers_nothing(value: Any) -> None:
    shown = json_text(value)
    assert shown.isprintable()
    assert json.loads(shown) == value


# --- the grammar of names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", ".a", "a b", "a\n", "n\u200b", "wоrker", "a/b", "a:b", "[red]", "x" * 101])
def test_what_no_node_may_be_called(name: str) -> None:
    assert not is_node_id(name)


@given(HOSTILE)
@example("wo\u200brker")
@example("two\nlines")
def test_a_name_on_one_line_has_nothing_hidden(given_text: str) -> None:
    if is_line(given_text):
        assert not any(unicodedata.category(each) in ("Cc", "Zl", "Zp") for each in given_text)
        assert not any(each in given_text for each in "\u200b\u202e\u2066\ufeff\U000e0041")


class Steered(Maker):
    """Values for every field, with one text wherever a text stands, or where free text stands."""

    def __init__(self, hostile: str, *, everywhere: bool) -> None:
        super().__init__()
        self._hostile = hostile
        self._everywhere = everywhere

    def make(self, node: inspect.Type, body: Any = None) -> Any:
        if isinstance(node, inspect.StrType) and (self._everywhere or node.pattern is None):
            return self._hostile[: node.max_length].ljust(node.min_length or 0, "f")
        return super().make(node, body)


WIRE_TYPES: Final[tuple[type, ...]] = (
    *dict.fromkeys(each for _, kinds in ROOTS for kind in kinds for each in structs_under(inspect.type_info(kind))),
    *events.EVENT_TYPES.values(),
)
FREE_TEXT: Final = {
    "Goodbye.reason",
    "Failure.message",
    "TransferGrant.token",
    "PublishResult.reason",
    "Explanation.reasons",
    "Decision.costs_ms",
    "Decision.text",
    "Status.sections",
    "Status.peers",
    "Status.recent",
    "NodeSnapshot.sections",
    "JobEvent.reason",
    "RequestEvent.reasons",
    "TransferEvent.reason",
    "DecisionView.costs_ms",
    "DecisionView.text",
    "SecurityEvent.text",
    "LogEvent.text",
}
"""Every field on the wire whose text has no grammar: cleaned where it is shown. A token is compared, and never shown."""


def texts_under(node: inspect.Type) -> Iterator[inspect.StrType]:
    match node:
        case inspect.StrType():
            yield node
        case inspect.VarTupleType(item_type=item):
            yield from texts_under(item)
        case inspect.TupleType(item_types=items) | inspect.UnionType(types=items):
            for each in items:
                yield from texts_under(each)
        case inspect.DictType(key_type=key, value_type=value):
            yield from texts_under(key)
            yield from texts_under(value)


def fields_with_text(kind: type, *, free: bool) -> set[str]:
    node = inspect.type_info(kind)
    assert isinstance(node, inspect.StructType)
    return {
        f"{kind.__name__}.{field.name}"
        for field in node.fields
        if any((each.pattern is None) is free for each in texts_under(field.type))
    }


def event_structs() -> set[type]:
    return {each for kind in events.EVENT_TYPES.values() for each in structs_under(inspect.type_info(kind))}


def test_every_text_on_the_wire_has_a_grammar_or_is_listed() -> None:
    found = set().union(*(fields_with_text(kind, free=True) for kind in (*WIRE_TYPES, *event_structs())))
    assert found == FREE_TEXT


@pytest.mark.parametrize("hostile", ["\x1b[2J", "two\nlines", "\u202etxt", "wo\u200brker"])
def test_a_message_whose_names_break_their_grammar_is_refused(hostile: str) -> None:
    """Each type alone, with a text that steers in all of its fields at once."""
    for kind in {*WIRE_TYPES, *event_structs()}:
        value = Steered(hostile, everywhere=True).make(inspect.type_info(kind), messages.Ping())
        data = codec.encode_bounded(value, 1 << 20)
        if any(fields_with_text(each, free=False) for each in structs_under(inspect.type_info(kind))):
            with pytest.raises(RemoteProtocolError):
                codec.decode_bounded(msgspec.msgpack.Decoder(kind), data, 1 << 20, "message")
        elif "body" not in dict(fields_of(kind)):
            assert codec.decode_bounded(msgspec.msgpack.Decoder(kind), data, 1 << 20, "message") == value


@pytest.mark.parametrize(
    "changes", [{"node_id": "a\x1b[2J"}, {"roles": ("[red]",)}, {"platform": "Linux\n"}, {"software": "1\u202e"}]
)
def test_a_card_with_a_name_that_steers_is_neither_sent_nor_taken(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        cards.sign_card(make_card(**changes), IDENTITY)
    body = codec.encode_bounded(make_card(**changes), 1 << 16)
    forged = msgspec.msgpack.encode([body, IDENTITY.sign(b"kakeya-zmq card\0" + body)])
    with pytest.raises(RemoteProtocolError, match="malformed"):
        cards.open_card(forged)


# --- every place where something is shown --------------------------------------------------------------------------------

WRITERS: Final = {
    "print",
    "input",
    "sys.stdout.write",
    "sys.stderr.write",
    "sys.stdout.buffer.write",
    "os.write",
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.basicConfig",
    "logging.Formatter",
    "traceback.print_exc",
    "warnings.warn",
}
SINKS: Final = {
    ("daemons.console", "rich"): "say, stream, table and progress clean what they are given",
    ("daemons.console", "sys.stdout.write"): "JSON, escaped",
    ("daemons.console", "sys.stderr.write"): "the line of an error, cleaned",
    ("daemons.console", "os.write"): "an empty line",
    ("daemons.log_files", "logging.StreamHandler"): "with one of the two formatters, which clean",
    ("daemons.log_files", "logging.basicConfig"): "with the handler above",
    ("daemons.logs", "sys.stdout.write"): "each line cleaned",
    ("daemons.audit_command", "print"): "entries cleaned, or JSON escaped; and a fixed line",
    ("dashboard.monitor.terminal", "rich"): "the painter's lines, cleaned a second time",
    ("dashboard.monitor.terminal", "os.write"): "of the painter's lines and of fixed sequences",
    ("dashboard.monitor.screen", "sys.stdout.write"): "the painter's lines",
    ("daemons.top_command", "sys.stdout.write"): "event_line and bus_line: JSON, escaped",
    ("daemons.top_command", "print"): "an empty line",
    ("daemons.top_command", "logging.basicConfig"): "a handler that writes nothing",
    ("daemons.chat", "input"): "a fixed prompt",
    ("daemons.operation_flags", "print"): "the sample file",
    ("daemons.entry", "sys.stderr.write"): "a fixed line",
    ("daemons.decode_child", "sys.stderr.write"): "the name of an exception's type",
    ("kakeya_zmq.model.folder_probe", "print"): "an object for the process that asked; it is cleaned where it is shown",
    ("kakeya_zmq.model.speed_probe", "print"): "figures of this machine",
    ("kakeya_zmq.demo.prepare", "print"): "steps and folder of this machine, errors of ours (which are clean)",
    ("kakeya_zmq.demo.prepare", "rich"): "the same",
}
"""(module, writer) → why nothing of others gets out there as it is. Pages: tests/browser/test_page.py."""


def writers(source: str) -> Iterator[str]:
    if not any(name in source for name in (*WRITERS, "rich")):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=func) if ast.unparse(func) in WRITERS:
                yield ast.unparse(func)
            case ast.ImportFrom(module="rich.console" | "rich" | "rich.live"):
                yield "rich"


def test_nothing_is_shown_but_at_the_places_that_clean() -> None:
    found = set()
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found |= {(module, writer) for writer in writers(path.read_text("utf-8"))}
    assert found == set(SINKS)


@contextlib.contextmanager
def captured() -> Iterator[Callable[[], str]]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out.getvalue


def log_record(told: str) -> logging.LogRecord:
    return logging.LogRecord("kakeya", logging.ERROR, "f.py", 1, "%s", (told,), None)


def through_console(told: str) -> str:
    with captured() as shown:
        console = Console()
        console.say(told)
        console.table(told, (told, "b"), [(told, told)])
        with console.progress(told) as show:
            show(1, 2)
        console.result({told: told})
        Console(json_mode=True).say(told)
        fail(told)
    return shown()


def through_logs(told: str) -> str:
    return f"{HumanFormatter().format(log_record(told))}\n{JsonFormatter().format(log_record(told))}\n"


def through_errors(told: str) -> str:
    return f"{KakeyaError(told, remedy=told)}\n"


def through_painter(told: str) -> str:
    return "\n".join(Painter(colour=False).draw([Text(told), Text(f"{told} b")]))


def through_event_lines(told: str) -> str:
    line = event_line(message(events.LogEvent(level="info", text=told[:512])), 0.0)
    assert line is not None
    return line


def through_page_data(told: str) -> str:
    data = encode_json({"text": told})
    assert json.loads(data) == {"text": told}
    return data.decode()


THROUGH: Final = (
    through_console,
    through_logs,
    through_errors,
    through_painter,
    through_event_lines,
    through_page_data,
)


@pytest.mark.parametrize("through", THROUGH)
@settings(max_examples=40)
@given(told=st.text(st.characters(codec="utf-8")))
@example(told=STEERING)
@example(told=MARKUP)
def test_no_sink_lets_a_text_steer(through: Callable[[str], str], told: str) -> None:
    assert is_harmless(through(told))


@pytest.mark.parametrize("through", [each for each in THROUGH if each is not through_console])
def test_what_a_text_says_is_one_line_everywhere(through: Callable[[str], str]) -> None:
    lines = through(f"a\n2026-01-01 00:00:00,000 ERROR forged\r{MARKUP}").strip("\n").splitlines()
    assert not any(line.startswith("2026-01-01 00:00:00,000 ERROR forged") for line in lines)
    assert any("forged" in line for line in lines)


def test_markup_is_printed_as_it_stands() -> None:
    told = "[red]r[/red] [link=http://x]l[/link] :warning: [/] [b]"
    with captured() as shown:
        console = Console()
        console.say(told)
        console.stream(told + "\n")
        console.table("", ("head",), [(told,)])
    assert shown().count(told) == 3


def test_a_traceback_in_the_log_is_below_its_line_and_clean() -> None:
    try:
        raise ValueError(STEERING)
    except ValueError:
        record = logging.LogRecord("kakeya", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    first, *below = HumanFormatter().format(record).split("\n")
    assert first.endswith("ERROR failed")
    assert below
    assert all(line.startswith("    ") and line.isprintable() for line in below)


def test_log_files_and_audit_files_are_clean_on_disk_and_when_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAKEYA_HOME", str(tmp_path))
    (tmp_path / "old.log").write_text(f"{STEERING} end\n", encoding="utf-8")
    folder = tmp_path / "nodes" / "n"
    folder.mkdir(parents=True)
    AuditLog(folder, monotonic=lambda: 0.0, wall=lambda: 0.0).write("refused", STEERING + MARKUP, subject=STEERING)
    assert is_harmless((folder / "audit.jsonl").read_text("utf-8"))
    assert show_logs((), last=20, follow=False) == 0
    assert show_audit((), last=5, follow=False, as_json=False) == 0
    assert show_audit((), last=5, follow=False, as_json=True) == 0
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert MARKUP in out
    assert r"\x1b]0;owned" in out
    assert json.loads(out.splitlines()[-1])["reason"] == STEERING + MARKUP


# --- what a member may send, as the commands show it -----------------------------------------------------------------------


def shown_of(told: str) -> str:
    """Everything the commands print of messages whose free text is this."""
    maker = Steered(told, everywhere=False)
    state = maker.make(inspect.type_info(messages.Status))
    figures: dict[str, Any] = {"node": {"state": told, "uptime_s": 1.0, "software": told}, "memory": {"level": told}}
    row: dict[str, Any] = {"node_id": told, "state": told, "error": told, "round_trip_ms": told, "network": told}
    state = msgspec.structs.replace(
        state,
        sections={**figures, "prefill": {"last_fallback_reason": told}},
        peers=(row, {"address": told}),
        recent=(told,),
    )
    explanation = maker.make(inspect.type_info(messages.Explanation))
    record = maker.make(inspect.type_info(events.RequestEvent))
    other = NodeView("a:1", "other", {"node": {"software": "x"}}, {state.node_id: row})
    views = [NodeView("a:2", state.node_id, {**state.sections}, {"other": row, told: row}), other]
    with captured() as shown:
        console = Console()
        status._show(console, "127.0.0.1:1", state)
        explain._show(console, record)
        console.say(explanation_line(explanation))
        for finding in judge_nodes(views):
            console.say(f"{finding.text} {finding.remedy}")
        for view in namespaces([maker.make(inspect.type_info(cards.Card))]):
            explain._show_namespace(console, view)
    return shown()


@settings(max_examples=40)
@given(st.text(st.characters(codec="utf-8"), max_size=100))
@example(STEERING)
def test_the_commands_show_a_hostile_member_harmlessly(told: str) -> None:
    shown = shown_of(told)
    assert is_harmless(shown)
    assert not any(line.startswith("2026-01-01") for line in shown.splitlines())


@pytest.mark.parametrize("name", ["two\nlines", "a b", "w\u043erker", ".hidden"])
def test_a_name_that_others_would_refuse_is_refused_here(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        Client("127.0.0.1:9", fleet_key=FleetKey(b"k" * 32), node_id=name)
    with pytest.raises(LocalProtocolError):
        LocalNode(node_id=name, identity=IDENTITY, roles=("cache",), incarnation=1, software="")
    with pytest.raises(LocalProtocolError):
        LocalNode(node_id="n", identity=IDENTITY, roles=(name,), incarnation=1, software="")
