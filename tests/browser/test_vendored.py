"""What was written by others is exactly what its list says, and comes with its licence."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.fleet_rig import PROJECT


@pytest.mark.parametrize("folder", ["dashboard/page", "tests/browser/vendor"])
def test_vendored_files_are_unchanged(folder: str) -> None:
    lines = (PROJECT / folder / "VENDORED.txt").read_text("utf-8").splitlines()
    listed = dict(reversed(line.split("  ")) for line in lines if not line.startswith("#"))
    assert any("LICENSE" in name for name in listed)
    for name, digest in listed.items():
        assert hashlib.sha256((PROJECT / folder / name).read_bytes()).hexdigest() == digest, name


def test_the_page_names_nothing_outside() -> None:
    """No address of another host is in what is served, except in comments of others' files and the SVG's namespace."""
    for path in sorted(Path(PROJECT / "dashboard" / "page").iterdir()):
        if path.suffix in (".js", ".css", ".html") and not path.name.startswith("uPlot"):
            text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text, path.name
            assert "innerHTML" not in text, path.name
            assert "insertAdjacentHTML" not in text, path.name
