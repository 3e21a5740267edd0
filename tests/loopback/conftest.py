"""Fixtures of tests with real lanes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kakeya_zmq.io.gate import Gate
from tests.loopback.lane_support import Context, clean_context


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context in which no socket may be left open."""
    with clean_context() as made:
        yield made


@pytest.fixture
def gate(context: Context) -> Iterator[Gate]:
    """Who may connect in that context."""
    made = Gate(context)
    yield made
    made.close()
