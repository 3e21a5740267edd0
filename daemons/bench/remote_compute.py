"""``remote-compute``: a prompt computed by a worker and streamed to the primary, against bare mlx-lm computing it.

Ours ends when the KV of the whole prompt but its last token is in the primary's model; so does the reference, in its own
process. Every round is a new prompt: a worker keeps what it computed.
"""

from __future__ import annotations

from collections.abc import Callable

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, Series, interleave, processor_seconds, ratio
from daemons.bench.report import milliseconds, percent
from daemons.bench.rig import Rig, answer, succeeds, wait_for
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillPolicy, SourceKind

BAR = 1.10
WARM_UP_TOKENS = 200


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(1, 3)
    tokens = options.choose(384, 2048, 200)
    running = rig.model_fleet()
    bare = rig.model_program("bare_mlx")
    cache = running.member("cache").node_id
    pids = {
        "kakeya worker": (running.member("worker").pid, running.member("primary").pid),
        "bare mlx-lm": (bare.pid,),
    }
    cpu_s: dict[str, list[float]] = {name: [] for name in pids}
    with rig.client(running) as client:

        def compute(prompt: list[int]) -> float:
            answered = answer(client, prompt, policy=PrefillPolicy.REMOTE_REQUIRED, exclude=(cache,))
            if {source.kind for source in answered.explanation.sources} != {SourceKind.WORKER}:
                raise RequestFailed(FailureCode.INTERNAL, "the worker did not compute the whole prompt")
            return answered.append_s

        warm_up = WARM_UP_TOKENS
        wait_for("the primary to use its worker", lambda: succeeds(lambda: compute(rig.prompt(warm_up, salt=999))))
        bare.ask("prefill", tokens=rig.prompt(warm_up, salt=999))
        rig.tell(f"remote-compute: {tokens:,} tokens, {rounds} rounds")

        def timed(name: str, work: Callable[[list[int]], float]) -> Callable[[int], float]:
            def measure(number: int) -> float:
                before_s = processor_seconds(*pids[name])
                wall_s = work(rig.prompt(tokens, salt=300 + number))
                cpu_s[name].append(processor_seconds(*pids[name]) - before_s)
                return wall_s

            return measure

        sides = {
            "kakeya worker": timed("kakeya worker", compute),
            "bare mlx-lm": timed("bare mlx-lm", lambda prompt: float(bare.ask("prefill", tokens=prompt)["wall_s"])),
        }
        found = interleave(rounds, sides)
    processor = {name: Series(name, tuple(values)) for name, values in cpu_s.items()}
    measured = ratio(found["kakeya worker"], found["bare mlx-lm"])
    name = f"{tokens:,} tokens through a worker against bare mlx-lm"
    bars = () if options.smoke else (Bar(name, measured, BAR, Direction.AT_MOST),)
    rows = tuple(
        (
            name,
            milliseconds(series.median),
            f"{(tokens - 1) / series.median:.0f}",
            percent(series.spread),
            f"{processor[name].median:.2f}",
        )
        for name, series in found.items()
    )
    heads = ("way", "median ms", "tokens/s", "spread", "CPU s, all processes")
    figures: dict[str, object] = {"tokens": tokens} | {
        name: {**series.as_json(), "processor_s": processor[name].as_json()} for name, series in found.items()
    }
    return Outcome("remote-compute", f"{tokens:,} tokens", heads, rows, bars, figures)
