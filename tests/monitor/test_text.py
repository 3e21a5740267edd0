"""Foreign text becomes harmless, everything has the width it was given, figures are short."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dashboard.monitor import text as t

GLYPHS = st.sampled_from((t.UNICODE, t.ASCII))


@given(st.text(), GLYPHS)
def test_nothing_of_a_foreign_text_steers_joins_or_turns(text: str, glyphs: t.Glyphs) -> None:
    shown = t.clean(text, glyphs)
    assert all(unicodedata.category(character)[0] in "LNPSZ" for character in shown)
    assert all(unicodedata.bidirectional(character) not in ("R", "AL", "AN", "RLO", "LRO") for character in shown)
    assert t.width_of(shown) == cell_len(shown)
    assert not glyphs.plain or shown.isascii()


@given(st.text(), st.integers(0, 60), st.booleans(), GLYPHS)
def test_a_text_is_cut_or_padded_to_exactly_the_width(text: str, width: int, right: bool, glyphs: t.Glyphs) -> None:
    assert cell_len(t.fit(t.clean(text, glyphs), width, glyphs, right=right)) == width


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mac-mini", "mac-mini"),
        ("Zoë's café", "Zoë's café"),
        ("e\u0301", "é"),
        ("\x1b[31mred\x1b[0m", "?[31mred?[0m"),
        ("a\rb\nc\td", "a?b?c?d"),
        ("\u202etxt.exe", "?txt.exe"),
        ("שלום", "????"),
        ("機械", "機械"),
        ("🚀 go", "🚀 go"),
        ("👩\u200d💻", "👩?💻"),
        ("🇩🇪", "??"),
        ("a\u200bb\x9b31m", "a?b?31m"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
    ],
)
def test_what_names_look_like(text: str, shown: str) -> None:
    assert t.clean(text, t.UNICODE) == shown


def test_a_long_text_is_cut_before_it_costs_time() -> None:
    assert len(t.clean("é" * 1_000_000, t.UNICODE)) == t.CLEANED_MAX


def test_a_wide_character_that_does_not_fit_leaves_no_half() -> None:
    assert t.fit("機械機械", 4, t.UNICODE) == "機… "
    assert t.fit("abc", 0, t.UNICODE) == ""
    assert t.fit("abc", 1, t.ASCII) == "~"


NUMBERS = st.floats() | st.integers(-(2**64), 2**64)


@given(NUMBERS)
def test_figures_stay_short_whatever_a_node_says(value: float) -> None:
    assert len(t.count(value)) <= 6
    assert len(t.size(value)) <= 8
    assert len(t.duration(value)) <= 6
    assert len(t.age(value)) <= 4
    assert len(t.percent(value)) <= 4
    assert len(t.rate(value)) <= 6


@given(NUMBERS, NUMBERS, st.integers(0, 40), GLYPHS)
def test_bars_have_their_width_whatever_they_show(part: float, whole: float, width: int, glyphs: t.Glyphs) -> None:
    share = t.ratio(part, whole)
    assert 0 <= share <= 1
    assert len(t.bar(share, width, glyphs)) == width
    assert len(t.bar(part, width, glyphs)) == width


@given(st.lists(st.none() | NUMBERS), GLYPHS)
def test_a_chart_has_one_cell_a_value(values: list[float | None], glyphs: t.Glyphs) -> None:
    assert len(t.chart(values, glyphs)) == len(values)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (t.count(0), "0"),
        (t.count(999.4), "999"),
        (t.count(1234), "1.2k"),
        (t.count(89_400), "89k"),
        (t.size(0), "0 B"),
        (t.size(96e6), "96 MB"),
        (t.duration(0.24), "240 ms"),
        (t.duration(0.9999), "1.0 s"),
        (t.duration(61), "61 s"),
        (t.duration(7321), "2 h"),
        (t.duration(0), "-"),
        (t.duration(math.nan), "-"),
        (t.age(0.2), "now"),
        (t.age(100), "2m"),
        (t.percent(0.835), "84%"),
        (t.rate(38.44), "38.4"),
        (t.rate(0), "-"),
        (t.bar(0.5, 4, t.UNICODE), "██░░"),
        (t.bar(0.55, 4, t.UNICODE), "██▏░"),
        (t.bar(1.0, 3, t.ASCII), "###"),
        (t.chart([None, 0, 4, 8], t.ASCII), " _=#"),
    ],
)
def test_what_figures_look_like(made: str, expected: str) -> None:
    assert made == expected
