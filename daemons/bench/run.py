"""Runs the chosen benchmarks one after the other, shows each, and answers for ``--check``."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence

from daemons.bench import report
from daemons.bench.harness import BenchOptions, Outcome, machine, undisturbed
from daemons.bench.home import temporary_home
from daemons.bench.rig import Rig
from daemons.console import Console
from wire.errors import KakeyaError

UNTIMED = ("dedupe",)
"""Benchmarks that measure no times."""


def run_benchmarks(names: Sequence[str], options: BenchOptions, console: Console, *, json: bool, check: bool) -> int:
    """Measure and show.

    Returns:
        0; 1 when something could not be measured, or with ``check`` when a bar does not hold.
    """
    outcomes: dict[str, Outcome] = {}
    elapsed_s: dict[str, float] = {}
    facts = machine()
    console.say(
        f"{facts['processors']} processors, load {facts['load_average']}, {options.threads} BLAS thread(s) in every process "
        f"that computes; {'long' if options.long else 'short, indicative'} run"
    )
    with contextlib.ExitStack() as ending:
        home = ending.enter_context(temporary_home())
        rig = Rig(names, options, home, console.say)
        ending.callback(_close, rig)
        try:
            for name in names:
                started = time.monotonic()
                if name in UNTIMED:
                    rig.load_ahead()
                outcomes[name] = _benchmark(name, rig, options)
                rig.await_loaded()
                elapsed_s[name] = time.monotonic() - started
                report.show_outcome(console, outcomes[name], elapsed_s[name])
        except KeyboardInterrupt:
            with undisturbed():
                console.say("stopping …")
                ending.close()
            raise
    held = report.all_held(list(outcomes.values()))
    if check:
        console.say(report.verdict(list(outcomes.values())))
    if json:
        console.result(report.as_json(outcomes, elapsed_s, facts, long=options.long))
    failed = any(outcome.skipped for outcome in outcomes.values())
    return 1 if failed or (check and not held) else 0


def _close(rig: Rig) -> None:
    with undisturbed():
        rig.close()


def _benchmark(name: str, rig: Rig, options: BenchOptions) -> Outcome:
    module = importlib.import_module(f"daemons.bench.{name.replace('-', '_')}")
    try:
        outcome: Outcome = module.run(rig, options)
    except KakeyaError as error:  # the others can still be measured
        return Outcome(name, "", skipped=str(error))
    return outcome
