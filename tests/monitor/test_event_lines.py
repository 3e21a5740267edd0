"""Events as lines of JSON: whole, in order, harmless on a terminal, and bounded when nobody reads."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from daemons.top_command import PANELS_OF
from dashboard.fleet_view import HERE
from dashboard.monitor import event_lines
from dashboard.monitor.event_lines import TOPICS, EventLines, TappedFleet, event_line
from tests.dashboard.kit import message, snapshot, worker_snapshot
from wire.bus import BusMessage, Group, Topic
from wire.events import JobEvent, LogEvent
from wire.ids import NodeId


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(fleet: TappedFleet, out: list[str], **changes: Any) -> EventLines:
    chosen: dict[str, Any] = {"shows": lambda name: True, "topics": (), "lost": lambda: 0, **changes}
    return EventLines(fleet, out.append, **chosen)


def test_an_event_has_all_its_fields_also_the_usual_ones() -> None:
    line = event_line(message(JobEvent(job_id="j", state="running", tokens_total=7), "w", 3), 12.3456)
    assert line is not None
    told = json.loads(line)
    assert {name: told[name] for name in ("at", "topic", "node", "incarnation")} == {
        "at": 12.346,
        "topic": "job",
        "node": "w",
        "incarnation": 3,
    }
    assert set(told["event"]) == set(JobEvent.__struct_fields__)
    assert (told["event"]["tokens_total"], told["event"]["reason"]) == (7, "")


def test_parts_of_an_event_are_whole_too() -> None:
    told = json.loads(event_line(message(worker_snapshot()), 0.0) or "")
    assert told["event"]["worker"]["inflight_jobs"] == 0
    assert told["event"]["models"][0]["tenant"] == "default"


def test_a_line_cannot_steer_a_terminal_or_be_two() -> None:
    line = event_line(message(LogEvent(level="info", text="a\nb\x1b[2J\x9b31m\u2028\x7f🚀"), "機\u202e"), 0.0)
    assert line is not None
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["event"]["text"] == "a\nb\x1b[2J\x9b31m\u2028\x7f🚀"


@pytest.mark.parametrize("figure", [math.nan, -math.inf, 1e308])
def test_a_figure_that_is_no_number_in_json_or_out_of_bounds_gives_no_line(figure: float) -> None:
    assert event_line(message(snapshot(sections={"cache": {"a": figure, "c": 1.5}})), 0.0) is None


def test_a_malformed_message_gives_no_line() -> None:
    assert event_line(BusMessage(NodeId("x"), Topic.JOB, 1, 1, b"\xff", bytes(32)), 0.0) is None


def test_messages_come_once_and_in_their_order_with_the_changes_of_the_bus() -> None:
    fleet, out = TappedFleet(), list[str]()
    clock = fleet.clock = Clock()  # type: ignore[method-assign, assignment]
    lines = lines_of(fleet, out)
    lines.step(0.0)
    fleet.apply([(message(LogEvent(level="info", text=text)), clock.now) for text in ("one", "two")])
    lines.step(0.0)
    lines.step(0.0)
    clock.now += 60.0
    lines.step(0.0)
    fleet.apply([(message(LogEvent(level="info", text="three")), clock.now)])
    lines.step(0.0)
    told = [json.loads(line) for line in out]
    seen = [line["state"] if line["topic"] == "bus" else line["event"]["text"] for line in told]
    assert seen == ["waiting", "live", "one", "two", "silent", "live", "three"]


def test_only_what_was_chosen_is_told() -> None:
    fleet, out = TappedFleet(), list[str]()
    lines = lines_of(fleet, out, shows=lambda name: name == "a", topics={TOPICS["log"]})
    now = fleet.clock()
    for node in ("a", "b"):
        fleet.apply([(message(LogEvent(level="info", text="x"), node), now), (message(snapshot(), node), now)])
    lines.step(0.0)
    told = [json.loads(line) for line in out]
    assert [(line["topic"], line.get("node")) for line in told] == [("bus", None), ("log", "a")]


def test_a_reader_that_is_too_slow_loses_the_oldest_and_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(event_lines, "WAITING_MAX", 3)
    fleet, out = TappedFleet(), list[str]()
    lines = lines_of(fleet, out, lost=lambda: 10)
    fleet.apply([(message(LogEvent(level="info", text=str(number))), fleet.clock()) for number in range(5)])
    lines.step(0.0)
    told = [json.loads(line) for line in out]
    assert told[0] == {"at": told[0]["at"], "topic": "bus", "state": "live", "lost": 12}
    assert [line["event"]["text"] for line in told[1:]] == ["2", "3", "4"]


def test_every_topic_of_the_bus_can_be_chosen_and_has_a_panel() -> None:
    assert set(TOPICS) == set(PANELS_OF)
    assert set(TOPICS.values()) == {topic for topic in Topic if topic.group is Group.TELEMETRY}


def test_what_was_refused_is_told_as_a_security_event_of_this_reader() -> None:
    fleet, out = TappedFleet(), list[str]()
    lines = lines_of(fleet, out, topics=(Topic.SECURITY,), shows=lambda name: name == "alpha")
    fleet.refuse("alpha", "not signed with its key", 3)
    fleet.refuse("beta", "not signed with its key", 1)
    lines.step(0.0)
    (told,) = [json.loads(line) for line in out if json.loads(line)["topic"] == "security"]
    assert told["node"] == HERE
    assert {name: told["event"][name] for name in ("kind", "subject", "count", "text")} == {
        "kind": "telemetry_refused",
        "subject": "alpha",
        "count": 3,
        "text": "not signed with its key",
    }
    lines.step(0.0)
    assert sum("telemetry_refused" in line for line in out) == 1
