"""``decode-worker``: tokens per second of a primary whose model runs in a child process, against one that runs it itself."""

from __future__ import annotations

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, interleave, ratio
from daemons.bench.report import percent
from daemons.bench.rig import BenchFleet, Rig, answer
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillPolicy

BAR = 0.95
FLAGS = {"in-process": (), "decode worker": ("--decode-worker",)}


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(2, 5)
    prompt_tokens, output_tokens = options.choose(70, 256, 70), options.choose(16, 48, 4)
    prompt = rig.prompt(prompt_tokens, salt=700)
    answers: dict[str, tuple[int, ...]] = {}
    rig.tell("decode-worker: loading the model into two primaries")
    with (
        rig.fleet("in-process", ("primary",), FLAGS["in-process"]) as plain,
        rig.fleet("decode-worker", ("primary",), FLAGS["decode worker"]) as guarded,
    ):

        def rate(name: str, running: BenchFleet) -> float:
            with rig.client(running) as client:
                answered = answer(client, prompt, policy=PrefillPolicy.LOCAL_ONLY, max_tokens=output_tokens)
            answers[name] = answered.tokens
            return answered.decode_tokens_per_second

        sides = {"in-process": plain, "decode worker": guarded}
        for name, running in sides.items():
            rate(name, running)  # a warm-up
        rig.tell(f"decode-worker: {output_tokens} tokens, {rounds} rounds")
        found = interleave(
            rounds,
            {
                "in-process": lambda number: rate("in-process", plain),
                "decode worker": lambda number: rate("decode worker", guarded),
            },
        )
    if answers["in-process"] != answers["decode worker"] or len(answers["in-process"]) < 2:
        raise RequestFailed(FailureCode.INTERNAL, "the two sides decoded different tokens")
    measured = ratio(found["decode worker"], found["in-process"])
    bars = () if options.smoke else (Bar("decode rate against in-process", measured, BAR, Direction.AT_LEAST),)
    rows = tuple((name, f"{series.median:.2f}", percent(series.spread)) for name, series in found.items())
    figures = {name: series.as_json() for name, series in found.items()}
    heads = ("way", "tokens/s", "spread")
    return Outcome("decode-worker", f"{output_tokens} tokens, greedy: {measured:.3f} x", heads, rows, bars, figures)
