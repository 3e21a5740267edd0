"""Keys change what is shown, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.monitor.controls import FILTER_MAX, Controls, Extent, PanelName, press
from dashboard.monitor.keys import NAMES

DEFAULTS = Controls()
EXTENTS = {name: Extent(20, 5) for name in PanelName}


def after(*keys: str, controls: Controls = DEFAULTS) -> Controls:
    for key in keys:
        controls = press(controls, key, EXTENTS)
    return controls


def test_the_focus_goes_round_both_ways() -> None:
    assert after("tab").focus is PanelName.JOBS
    assert after("left").focus is PanelName.LOG
    assert after(*["right"] * len(PanelName)).focus is PanelName.NODES
    assert after("3").focus is PanelName.REQUESTS


def test_the_focus_keeps_to_the_panels_that_are_shown() -> None:
    some = Controls(panels=(PanelName.JOBS, PanelName.LOG), focus=PanelName.JOBS)
    assert after("tab", "tab", controls=some).focus is PanelName.JOBS
    assert after("2", controls=some).focus is PanelName.LOG
    assert after("5", controls=some) == some


def test_scrolling_stops_at_both_ends() -> None:
    assert after("down", "down").offsets == {PanelName.NODES: 2}
    assert after("end").offsets == {PanelName.NODES: 15}
    assert after("page-down", "page-down", "page-down", "page-down", "up").offsets == {PanelName.NODES: 14}
    assert after("end", "home").offsets == {PanelName.NODES: 0}
    assert after("up").offsets == {PanelName.NODES: 0}


def test_scrolling_starts_from_what_is_seen_when_rows_have_gone() -> None:
    controls = replace(Controls(), offsets={PanelName.NODES: 90})
    assert after("up", controls=controls).offsets == {PanelName.NODES: 14}


def test_the_filter_is_typed_used_and_cleared() -> None:
    typed = after("f", "M", "a", "x", "backspace", "q")
    assert (typed.editing, typed.filter, typed.quitting) == ("Maq", "", False)
    used = after("enter", controls=typed)
    assert (used.editing, used.filter) == (None, "Maq")
    assert after("f", "x", "escape", controls=used).filter == "Maq"
    assert after("f", "clear", "enter", controls=used).filter == ""
    assert after("escape", controls=used).filter == ""
    assert len(after("/", *"x" * 200).editing or "") == FILTER_MAX


def test_escape_leaves_one_thing_at_a_time() -> None:
    controls = replace(Controls(), filter="a", zoomed=True, helping=True)
    assert after("escape", controls=controls) == replace(controls, helping=False)
    assert after("escape", "escape", controls=controls) == replace(controls, helping=False, zoomed=False)
    assert after("escape", "escape", "escape", controls=controls).filter == ""


def test_pause_zoom_help_and_quit() -> None:
    assert after("p").paused
    assert not after("p", " ").paused
    assert after("enter").zoomed
    assert after("?").helping
    assert not after("?", "p").paused
    assert after("?", "q").quitting
    assert after("x") == Controls()


@pytest.mark.parametrize(
    ("patterns", "typed", "shown"),
    [
        ((), "", {"mac-mini", "mac-studio", "attic"}),
        (("MAC",), "", {"mac-mini", "mac-studio"}),
        (("mac-*",), "studio", {"mac-studio"}),
        (("attic", "mini"), "", {"mac-mini", "attic"}),
        (("m?",), "", set()),
        (("[",), "", set()),
    ],
)
def test_which_nodes_a_filter_shows(patterns: tuple[str, ...], typed: str, shown: set[str]) -> None:
    controls = Controls(nodes=patterns, filter=typed)
    assert {name for name in ("mac-mini", "mac-studio", "attic") if controls.shows(name)} == shown


@given(st.lists(st.sampled_from(sorted(NAMES)) | st.characters()), st.integers(0, 30), st.integers(0, 30))
def test_any_keys_leave_usable_controls(keys: list[str], count: int, height: int) -> None:
    controls = Controls()
    for key in keys:
        controls = press(controls, key, {PanelName.NODES: Extent(count, height)})
        assert controls.focus in controls.panels
        assert all(0 <= offset <= max(0, count - height) for offset in controls.offsets.values())
        controls.shows("any node")
