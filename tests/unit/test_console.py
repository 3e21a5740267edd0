"""Tables of the command on narrow terminals."""

from __future__ import annotations

import pytest

from daemons.console import Console


def test_a_long_value_is_folded_and_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A public key is there to be copied into a roster."""
    monkeypatch.setenv("COLUMNS", "80")
    public_key = "0123456789abcdef" * 4
    Console().table("keys", ("key", "state"), [("identity of primary-mini-1", f"ready, mode 0600, public key {public_key}")])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert public_key in "".join(line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│"))
