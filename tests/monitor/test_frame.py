"""Frames: the golden ones, and that every frame has exactly its size whatever nodes tell."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dashboard.fleet_view import BusState, FleetView
from dashboard.monitor.controls import Controls, PanelName
from dashboard.monitor.frame import Frame, render
from dashboard.monitor.picture import RETURN_TOLD_S, BusNews, BusWatch, Picture, take
from dashboard.monitor.terminal import Painter, glyphs_of
from dashboard.monitor.text import ASCII, UNICODE, Glyphs
from tests.dashboard.kit import snapshot, tell
from tests.monitor.fixtures_picture import busy_picture, silent_picture
from tests.monitor.golden import FOLDER, SCENES, as_text
from wire.events import JobEvent, LogEvent, ModelView, PeerView, RequestEvent, SecurityEvent, SourceView, TransferEvent
from wire.text import NODE_ID, WORD, is_line


def plain(frame: Frame) -> str:
    return "\n".join(line.plain for line in frame.lines)


def check(frame: Frame, columns: int, rows: int) -> None:
    assert len(frame.lines) == rows
    for line in frame.lines:
        assert cell_len(line.plain) == columns, repr(line.plain)
        assert line.plain.isprintable()


@pytest.mark.parametrize("name", SCENES)
def test_a_frame_looks_as_it_did(name: str) -> None:
    kept = (FOLDER / f"{name}.txt").read_text("utf-8")
    assert as_text(SCENES[name].draw()) == kept, "look at it, then: python -m tests.monitor.golden"


def test_no_golden_frame_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SCENES)


@pytest.mark.parametrize("columns", [1, 20, 59, 60, 79, 80, 100, 159, 160, 161, 200, 400])
def test_every_size_is_filled_exactly(columns: int) -> None:
    picture = _PICTURES["busy"]
    for rows in (1, 2, 11, 12, 13, 16, 24, 29, 30, 50, 120):
        for controls in (
            Controls(),
            Controls(zoomed=True, focus=PanelName.LOG),
            Controls(helping=True),
            Controls(editing="x"),
        ):
            check(render(picture, controls, columns, rows), columns, rows)


def test_the_panel_in_focus_is_never_left_out() -> None:
    for name in PanelName:
        frame = render(_PICTURES["busy"], Controls(focus=name), 60, 12)
        assert name in frame.extents
        assert sum(line.plain.startswith(">") for line in frame.lines) == 1


# --- hostile nodes ---------------------------------------------------------------------------------------------------

_NASTY = st.one_of(
    st.text(min_size=1, max_size=60),
    st.sampled_from(
        (
            "\x1b]0;owned\x07\x1b[2J",
            "[bold red]x[/]",
            "\u202e\u2066evil",
            "機" * 40,
            "👩\u200d💻🇩🇪❤\ufe0f",
            "a\u0301\u0301\u0301",
            "שלום عربى ١٢٣",
            "\x9b31m\x90",
            "x" * 128,
            "\n\n\n",
            "<script>",
        )
    ),
).map(lambda text: text[:100])
_NUMBER = st.floats(min_value=0, max_value=1e12) | st.integers(0, 10**12).map(float)
_COUNT = st.integers(0, 2**53)
_FIGURE = st.floats(-(2.0**53), 2.0**53) | _COUNT


_LINE = _NASTY.map(lambda text: "".join(filter(is_line, text)) or "?")
_NODE = st.from_regex(NODE_ID, fullmatch=True)
_ROLE = st.from_regex(WORD, fullmatch=True)


@st.composite
def hostile_pictures(draw: st.DrawFn) -> Picture:
    """As nasty as decoders let it be: free text is anything, names are one visible line, node ids and roles are plain."""
    text, line = (lambda: draw(_NASTY)), (lambda: draw(_LINE))
    number, count = (lambda: draw(_NUMBER)), (lambda: draw(_COUNT))
    view = FleetView()
    node, role = draw(_NODE), draw(_ROLE)
    sections: dict[str, Any] = {
        "cache": {"bytes_used": draw(_FIGURE), "max_bytes": draw(_FIGURE | st.booleans())},
        "prefill": {"tokens_reused": draw(_FIGURE), "tokens_computed": count()},
    }
    model = ModelView(model_id=line(), tokens_per_second=number())
    peer = PeerView(node_id=draw(_NODE), roles=(role,))
    told = snapshot(roles=(role, role), state=line(), uptime_s=number(), models=(model,), sections=sections, peers=(peer,))
    tell(view, told, 0.0, node)
    tell(view, JobEvent(job_id="j", state=line(), place=line(), asker=line(), tokens_total=count(), tokens_done=count(),
                        tokens_per_second=number(), eta_ms=number(), reason=text()), 10.0, node)  # fmt: skip
    tell(view, RequestEvent(request_id="r", operation=line(), outcome=line(), source=line(), prompt_tokens=count(),
                            boundary=count(), transfer_bytes=count(), elapsed_ms=number(), ttft_ms=number(),
                            decode_tokens_per_second=number(), stop_reason=line(), reasons=(text(), text()),
                            sources=(SourceView(kind=line(), start=0, end=1, node_id=line()),)), 10.0, node)  # fmt: skip
    tell(view, TransferEvent(direction=line(), purpose=line(), peer=line(), parts=count(), payload_bytes=count(),
                             elapsed_ms=number(), codec=line(), ok=draw(st.booleans()), reason=text()),
         10.0, node)  # fmt: skip
    tell(view, SecurityEvent(kind=line(), subject=line(), count=count(), text=text()), 10.0, node)
    tell(view, LogEvent(level=line(), text=text()), 10.0, node)
    assert view.counters["malformed"] == 0
    return take(view, 10.0, BusNews(draw(st.sampled_from(BusState)), number(), number()))


@settings(max_examples=60, deadline=None)
@given(
    hostile_pictures(),
    st.integers(1, 240),
    st.integers(1, 60),
    st.sampled_from((UNICODE, ASCII)),
    st.sampled_from(list(PanelName)),
    _NASTY,
)
def test_hostile_nodes_do_not_break_the_frame(
    picture: Picture, columns: int, rows: int, glyphs: Glyphs, focus: PanelName, typed: str
) -> None:
    for controls in (Controls(focus=focus), Controls(focus=focus, zoomed=True, filter=typed), Controls(editing=typed)):
        frame = render(picture, controls, columns, rows, glyphs)
        check(frame, columns, rows)
        assert not glyphs.plain or plain(frame).isascii()
        drawn = Painter(colour=True).draw(frame.lines)
        assert len(drawn) == rows
        # Nothing but colours of our own: the text is what was to be shown.
        assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in drawn] == [line.plain for line in frame.lines]


# --- what is said ------------------------------------------------------------------------------------------------------


def test_the_filter_hides_what_other_nodes_tell() -> None:
    frame = plain(render(_PICTURES["busy"], Controls(nodes=("cellar",)), 120, 40))
    assert "cellar-cache" in frame
    assert "filter --node cellar" in frame
    assert "out of memory" not in frame
    assert "NODES 1 " in frame


def test_scrolling_says_where_it_is_and_ends_at_the_last_row() -> None:
    controls = Controls(focus=PanelName.REQUESTS, offsets={PanelName.REQUESTS: 99})
    frame = render(_PICTURES["busy"], controls, 80, 13)
    extent = frame.extents[PanelName.REQUESTS]
    assert extent.height < extent.count
    assert f"REQUESTS {extent.count - extent.height + 1}/{extent.count}" in plain(frame)


def test_only_the_chosen_panels_are_drawn() -> None:
    frame = render(_PICTURES["busy"], Controls(panels=(PanelName.JOBS,), focus=PanelName.JOBS), 200, 50)
    assert set(frame.extents) == {PanelName.JOBS}


def test_silence_and_return_of_the_bus_are_told() -> None:
    watch = BusWatch()
    assert watch.observe(BusState.WAITING, None, 1.0).state is BusState.WAITING
    assert watch.observe(BusState.LIVE, 2.0, 2.0).back_after_s == 0
    assert watch.observe(BusState.SILENT, 2.0, 9.0).silent_s == 7.0
    assert watch.observe(BusState.LIVE, 12.0, 12.0).back_after_s == 10.0
    assert watch.observe(BusState.LIVE, 13.0, 13.0).back_after_s == 10.0
    assert watch.observe(BusState.LIVE, 30.0, 12.0 + RETURN_TOLD_S).back_after_s == 0
    news = BusNews(BusState.LIVE, back_after_s=10.0)
    assert "BUS IS BACK after 10s" in plain(render(Picture(now=0.0, bus=news), Controls(), 80, 24))


def test_a_paused_frame_says_so_live_and_silent() -> None:
    for picture in (_PICTURES["busy"], _PICTURES["silent"]):
        assert "PAUSED" in plain(render(picture, Controls(paused=True), 80, 24))


# --- terminals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({"TERM": "xterm-256color", "LANG": "en_US.UTF-8"}, "utf-8", UNICODE),
        ({"TERM": "xterm", "LC_CTYPE": "UTF-8"}, "utf-8", UNICODE),
        ({"TERM": "xterm"}, "utf-8", UNICODE),
        ({"TERM": "xterm", "LC_CTYPE": "C.UTF-8", "LANG": "C"}, "utf-8", ASCII),
        ({"TERM": "xterm", "LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8", UNICODE),
        ({"TERM": "xterm", "LC_ALL": "C"}, "utf-8", ASCII),
        ({"TERM": "xterm", "LANG": "de_DE.ISO8859-1"}, "utf-8", ASCII),
        ({"TERM": "xterm", "LANG": "en_US.UTF-8"}, "ascii", ASCII),
        ({"TERM": "dumb", "LANG": "en_US.UTF-8"}, "utf-8", ASCII),
        ({"TERM": "vt100", "LANG": "en_US.UTF-8"}, "utf-8", ASCII),
    ],
)
def test_which_terminals_get_more_than_ascii(environment: dict[str, str], encoding: str, expected: Glyphs) -> None:
    assert glyphs_of(environment, encoding) is expected


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}])
def test_without_colours_there_are_none(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM", "COLORTERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    drawn = "\n".join(Painter(colour=True).draw(render(_PICTURES["silent"], Controls(), 80, 24).lines))
    codes = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", drawn) for code in codes.split(";")}
    assert codes <= {"0", "1", "2", "7"}, "bold, dim and inverted only"


def test_colours_are_used_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in "\n".join(Painter(colour=True).draw(render(_PICTURES["busy"], Controls(), 80, 24).lines))


_PICTURES = {"busy": busy_picture(), "silent": silent_picture()}
