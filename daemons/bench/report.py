"""Shows outcomes: a table and its bars for people, one object for ``--json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from daemons.bench.harness import Bar, Outcome
from daemons.console import Console


def show_outcome(console: Console, outcome: Outcome, elapsed_s: float) -> None:
    """One benchmark's table, then one line a bar."""
    if outcome.skipped:
        console.say(f"{outcome.name}: not measured: {outcome.skipped}")
        return
    console.table(f"{outcome.name}: {outcome.title} ({elapsed_s:.0f} s)", outcome.heads, outcome.rows)
    for bar in outcome.bars:
        console.say(f"  {'held  ' if bar.passed else 'MISSED'}  {describe_bar(bar)}")
    for note in outcome.notes:
        console.say(f"  note    {note}")


def describe_bar(bar: Bar) -> str:
    measured = figure(bar.measured) if math.isnan(bar.measured) else f"{figure(bar.measured)} {bar.unit}"
    return f"{bar.name}: {measured} (bar {bar.direction.value} {figure(bar.limit)} {bar.unit})"


def figure(value: float) -> str:
    """A number with about four digits that matter."""
    if value != value:
        return "nothing measured"
    if value == 0 or 0.001 <= abs(value) < 100:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2e}"


def as_json(
    outcomes: Mapping[str, Outcome], elapsed_s: Mapping[str, float], machine: Mapping[str, object], *, long: bool
) -> dict[str, object]:
    """The object of ``--json``."""
    return {
        "passed": all_held(list(outcomes.values())),
        "long": long,
        "elapsed_s": round(sum(elapsed_s.values()), 1),
        "machine": dict(machine),
        "benchmarks": {
            name: {**outcome.as_json(), "elapsed_s": round(elapsed_s[name], 2)} for name, outcome in outcomes.items()
        },
    }


def all_held(outcomes: Sequence[Outcome]) -> bool:
    """Whether every bar holds. What was skipped was not measured, so it doesn't hold."""
    return all(outcome.passed for outcome in outcomes)


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The line of ``--check``. Some benchmarks show prices and have no bar: then nothing was held, and nothing missed."""
    if not all_held(outcomes):
        return "NOT every bar holds"
    return "every bar holds" if any(outcome.bars for outcome in outcomes) else "measured; there is no bar for this"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
