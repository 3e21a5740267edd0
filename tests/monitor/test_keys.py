"""Bytes of a terminal become keys, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.monitor.keys import ESCAPE_S, NAMES, SEQUENCE_MAX, KeyDecoder


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOC", ["right"]),
        (b"\x1b[1;5D", ["left"]),
        (b"\x1b[5~\x1b[6~", ["page-up", "page-down"]),
        (b"\x1b[Z\t\r\n", ["back-tab", "tab", "enter", "enter"]),
        (b"\x7f\x15", ["backspace", "clear"]),
        ("ü機".encode(), ["ü", "機"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\x1b\x1b[A", ["escape", "up"]),
        (b"\x1b[<0;10;5M", []),
        (b"\x1b[200~x", ["x"]),
        (b"\x01\x02", []),
        (b"\xff", ["\ufffd"]),
    ],
)
def test_what_is_typed(data: bytes, keys: list[str]) -> None:
    assert KeyDecoder().feed(data, 0.0) == keys
    decoder = KeyDecoder()
    assert [key for byte in data for key in decoder.feed(bytes([byte]), 0.0)] == keys


def test_escape_alone_is_a_key_when_nothing_follows() -> None:
    decoder = KeyDecoder()
    assert decoder.deadline() is None
    assert decoder.feed(b"\x1b", 5.0) == []
    assert decoder.deadline() == 5.0 + ESCAPE_S
    assert decoder.feed(b"", 5.0 + ESCAPE_S / 2) == []
    assert decoder.feed(b"", 5.0 + ESCAPE_S) == ["escape"]
    assert decoder.deadline() is None


@given(st.lists(st.binary(max_size=40)))
def test_any_bytes_give_keys_and_keep_little(pieces: list[bytes]) -> None:
    decoder = KeyDecoder()
    for now, piece in enumerate(pieces):
        for key in decoder.feed(piece, float(now)):
            assert key in NAMES or len(key) == 1
        assert len(decoder._waiting) < SEQUENCE_MAX
