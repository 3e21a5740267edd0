"""``decode``: tokens per second through primary and client, against mlx-lm's own loop on the same prompt, greedy."""

from __future__ import annotations

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, Series, interleave, processor_seconds, ratio
from daemons.bench.report import percent
from daemons.bench.rig import Rig, answer
from wire.errors import FailureCode, RequestFailed
from wire.messages import PrefillPolicy

BAR = 0.97


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(2, 4)
    prompt_tokens, output_tokens = options.choose(70, 256, 70), options.choose(6, 48, 4)
    running = rig.model_fleet()
    bare = rig.model_program("bare_mlx")
    prompt = rig.prompt(prompt_tokens, salt=500)
    answers: dict[str, list[int]] = {}
    cpu_s: dict[str, list[float]] = {"kakeya": [], "mlx-lm": []}
    primary_pid = running.member("primary").pid
    rig.tell(f"decode: {output_tokens} tokens, {rounds} rounds")
    with rig.client(running) as client:

        def ours(number: int) -> float:
            before_s = processor_seconds(primary_pid)
            answered = answer(client, prompt, policy=PrefillPolicy.LOCAL_ONLY, max_tokens=output_tokens)
            cpu_s["kakeya"].append(processor_seconds(primary_pid) - before_s)
            answers["ours"] = list(answered.tokens)
            return answered.decode_tokens_per_second

        def reference(number: int) -> float:
            before_s = processor_seconds(bare.pid)
            answered = bare.ask("decode", tokens=prompt, max_tokens=output_tokens)
            cpu_s["mlx-lm"].append(processor_seconds(bare.pid) - before_s)
            # mlx-lm's loop knows no end of sequence; ours keeps that token to itself.
            answers["reference"] = answered["tokens"]
            return float(answered["tokens_per_second"])

        answer(client, prompt, policy=PrefillPolicy.LOCAL_ONLY, max_tokens=2)  # a warm-up
        bare.ask("decode", tokens=prompt, max_tokens=2)
        found = interleave(rounds, {"kakeya": ours, "mlx-lm": reference})
    if answers["ours"] != answers["reference"][: len(answers["ours"])] or len(answers["ours"]) < 2:
        raise RequestFailed(FailureCode.INTERNAL, "the two sides decoded different tokens")
    measured = ratio(found["kakeya"], found["mlx-lm"])
    bars = () if options.smoke else (Bar("decode rate against mlx-lm", measured, BAR, Direction.AT_LEAST),)
    processor = {name: Series(name, tuple(values)) for name, values in cpu_s.items()}
    rows = tuple(
        (name, f"{series.median:.2f}", percent(series.spread), f"{processor[name].median:.2f}")
        for name, series in found.items()
    )
    figures = {name: {**series.as_json(), "processor_s": processor[name].as_json()} for name, series in found.items()}
    heads = ("way", "tokens/s", "spread", "CPU s, prompt included")
    return Outcome("decode", f"{output_tokens} tokens, greedy", heads, rows, bars, figures)
