"""``ttft``: time to first token of a remote hit, against a cold prompt and against importing the same bytes in-process.

The cold run computes the prompt on the primary and publishes it to the cache peer; a remote hit is a new session that may
not use the primary's own store, so that every part comes over the wire. Both are timed in a client, from the request to
the first token. The in-process reference (daemons.bench.programs.engine_import) imports what it fetched before.
"""

from __future__ import annotations

from dataclasses import dataclass

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, Program, Series, interleave, ratio
from daemons.bench.report import milliseconds, percent
from daemons.bench.rig import Answer, BenchFleet, Rig, answer, succeeds, wait_for
from kakeya_zmq.client import Client
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillPolicy, SourceKind

IMPORT_BAR = 1.35


@dataclass(frozen=True, slots=True)
class Size:
    """A prompt length and what a remote hit of it must save. The in-process limit itself grows with the length."""

    tokens: int
    cold_bar: float
    colds: int


def sizes(options: BenchOptions) -> tuple[Size, ...]:
    if options.smoke:
        return (Size(200, 0.0, 1),)
    if options.long:
        return (Size(1024, 22.0, 2), Size(4096, 90.0, 2))
    return (Size(1024, 22.0, 1),)


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(5, 15)
    running = rig.model_fleet()
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    figures: dict[str, object] = {"rounds": rounds}
    importer = rig.model_program("engine_import")
    with rig.client(running) as client:
        for number, size in enumerate(sizes(options)):
            found = _measure(rig, running, client, importer, size, rounds, salt=100 * number)
            figures[str(size.tokens)] = {name: series.as_json() for name, series in found.items()}
            rows += [
                (
                    f"{size.tokens:,}",
                    name,
                    milliseconds(series.median),
                    percent(series.spread),
                    f"{ratio(found['cold'], series):.1f}",
                )
                for name, series in found.items()
            ]
            hit = found["remote hit"]
            text = f"{size.tokens:,} tokens: remote hit"
            bars.append(Bar(f"{text} against cold", ratio(found["cold"], hit), size.cold_bar, Direction.AT_LEAST))
            if not options.smoke:
                limit = ratio(hit, found["import in-process"])
                bars.append(Bar(f"{text} against an import in-process", limit, IMPORT_BAR, Direction.AT_MOST))
    heads = ("tokens", "way", "median ms", "spread", "× faster than cold")
    note = f"one cold prompt a size tells less than a median: judge with --long; {options.threads} BLAS thread(s) everywhere"
    return Outcome("ttft", "time to first token", heads, tuple(rows), tuple(bars), figures, () if options.long else (note,))


def _measure(
    rig: Rig, running: BenchFleet, client: Client, importer: Program, size: Size, rounds: int, *, salt: int
) -> dict[str, Series]:
    worker = running.member("worker").node_id
    answer(client, rig.prompt(64, salt + 99), policy=PrefillPolicy.LOCAL_ONLY)  # a warm-up
    colds: list[Answer] = []
    for number in range(size.colds):
        rig.tell(f"ttft: {size.tokens:,} tokens cold, {number + 1} of {size.colds}")
        prompt = rig.prompt(size.tokens, salt + number)
        publish = number == size.colds - 1
        colds.append(answer(client, prompt, policy=PrefillPolicy.LOCAL_ONLY, publish=publish, at_once=True))

    def hit() -> Answer:
        return answer(client, prompt, policy=PrefillPolicy.REMOTE_REQUIRED, exclude=(worker,), at_once=True)

    wait_for("the cache peer to take its copy", lambda: succeeds(hit))
    cache = running.member("cache").address
    importer.ask(
        "take",
        tokens=prompt,
        address=cache,
        psk_file=str(running.psk_file),
        tenant_key_file=str(running.tenant_key_file),
    )
    rig.tell(f"ttft: {size.tokens:,} tokens, {rounds} remote hits and imports in turn")

    def remote_hit(number: int) -> float:
        answered = hit()
        kinds = {source.kind for source in answered.explanation.sources}
        if kinds != {SourceKind.REMOTE_CACHE} or answered.tokens != colds[-1].tokens:
            raise RequestFailed(FailureCode.INTERNAL, "a remote hit did not come whole, or gave another token")
        return answered.ttft_s

    def in_process(number: int) -> float:
        measured = importer.ask("measure")
        if (measured["token"],) != colds[-1].tokens:
            raise RequestFailed(FailureCode.INTERNAL, "the import in-process gave another token")
        return float(measured["wall_s"])

    sides = {"remote hit": remote_hit, "import in-process": in_process}
    interleave(1, sides)
    return {"cold": Series("cold", tuple(cold.ttft_s for cold in colds))} | interleave(rounds, sides)
