"""Fixtures of the dashboard's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.dashboard.web_kit import Web


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    """A served dashboard with an API key and an empty state."""
    with closing(Web(tmp_path)) as made:
        yield made


@pytest.fixture
def keyless(tmp_path: Path) -> Iterator[Web]:
    """A served dashboard without an API key."""
    with closing(Web(tmp_path, api_key="")) as made:
        yield made
