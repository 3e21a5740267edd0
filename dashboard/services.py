"""What the routes work on, put together by whoever starts the dashboard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dashboard.benchmark_store import BenchmarkStore
from dashboard.hub import LiveFleet
from dashboard.state import NetworkState


def _no_figures() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True)
class Services:
    """``api_key`` empty: writes are closed. ``feed_figures``: counters of the bus feed."""

    fleet: LiveFleet
    state: NetworkState
    benchmarks: BenchmarkStore
    api_key: bytes = field(repr=False)
    feed_figures: Callable[[], Mapping[str, int]] = _no_figures
    wall_clock: Callable[[], float] = time.time
