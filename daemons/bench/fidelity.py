"""``fidelity``: what the model says after KV went through a codec, against the same KV untouched.

Greedy continuations of many prompts are fed again from packed and unpacked state. KL, in nats, is that of the untouched
distribution over the next token from the other one; *agreement* is how often the likeliest token is the same; a prompt
*diverges* at the first token where it isn't: until there a greedy answer is equal.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome
from daemons.bench.rig import Rig
from kakeya_zmq.codecs.registry import STORAGE_CODECS

LOSSLESS = (("link zstd", 0), ("zlib", 0))
LOSSY = (("int8", 0), ("kakeyalattice-d4", 38))
INT8_AGREEMENT, INT8_KL = 0.98, 5e-4
POSITIONS_MIN, PROMPTS_MIN = 1_000, 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """One codec over all prompts. ``divergence``: tokens until each prompt diverged; as many as were fed: never."""

    name: str
    kl: tuple[float, ...]
    agreement: float
    divergence: tuple[int, ...]
    same_bytes: bool
    fed: int

    @property
    def equal_prompts(self) -> int:
        return sum(at == self.fed for at in self.divergence)


def run(rig: Rig, options: BenchOptions) -> Outcome:
    prompts = options.choose(1, PROMPTS_MIN, 2)
    # Longer than the model's sliding window, and no whole number of blocks: windows and tails take part.
    tokens, fed = options.choose(200, 560, 200), options.choose(8, 64, 8)
    program = rig.model_program("kv_codecs")
    rig.tell(f"fidelity: {prompts} prompts of {tokens} tokens, {fed} tokens each")
    for number in range(prompts):
        if number % 5 == 0 and number:
            rig.tell(f"fidelity: {number} of {prompts} prompts computed")
        program.ask("prepare", prompt=rig.prompt(tokens, salt=800 + number), first=number == 0)
    program.ask("continue_all", count=fed)
    stored = [one for one in (*LOSSLESS, *LOSSY) if one[0] in STORAGE_CODECS]
    refusals: dict[str, str] = program.ask("refusals", codecs=stored)["refusals"]
    codecs = [(name, q_range) for name, q_range in (*LOSSLESS, *LOSSY) if f"{name}/{q_range}" not in refusals]
    answers = []
    for number in range(prompts):
        if number % 5 == 0 and number:
            rig.tell(f"fidelity: {number} of {prompts} prompts compared")
        answers.append(program.ask("compare", number=number, codecs=codecs))
    verdicts = [_verdict(name, q_range, answers, fed) for name, q_range in codecs]
    rows = tuple(
        (
            verdict.name,
            f"{statistics.fmean(verdict.kl):.1e}",
            f"{max(verdict.kl):.1e}",
            f"{verdict.agreement * 100:.1f} %",
            f"{verdict.equal_prompts}/{prompts}",
            str(min(verdict.divergence)) if verdict.equal_prompts < prompts else "never",
        )
        for verdict in verdicts
    )
    heads = ("codec", "KL mean", "KL max", "agreement", "equal answers", "first divergence")
    figures: dict[str, object] = {"prompts": prompts, "positions": prompts * fed} | {
        verdict.name: {
            "kl_mean": statistics.fmean(verdict.kl),
            "kl_max": max(verdict.kl),
            "agreement": verdict.agreement,
            "divergence": list(verdict.divergence),
            "same_bytes": verdict.same_bytes,
        }
        for verdict in verdicts
    }
    notes = tuple(f"{name.partition('/')[0]} is left out: {why}" for name, why in refusals.items())
    notes += () if options.long else (f"so few prompts ({prompts}) are an indication: the bars are meant for --long",)
    title = f"{prompts} prompts, {prompts * fed:,} positions"
    return Outcome("fidelity", title, heads, rows, () if options.smoke else _bars(verdicts), figures, notes)


def _verdict(name: str, q_range: int, answers: list[dict[str, dict[str, list[float]]]], fed: int) -> Verdict:
    found = [answer[f"{name}/{q_range}"] for answer in answers]
    agrees = [[bool(each) for each in one["agrees"]] for one in found]
    return Verdict(
        name=f"{name.replace('kakeyalattice-d4', 'D4')}{f' Q={q_range}' if q_range else ''}",
        kl=tuple(kl for one in found for kl in one["kl"]),
        agreement=statistics.fmean(each for one in agrees for each in one),
        divergence=tuple(one.index(False) if False in one else fed for one in agrees),
        same_bytes=all(one["same_bytes"] for one in found),
        fed=fed,
    )


def _bars(verdicts: list[Verdict]) -> tuple[Bar, ...]:
    lossless = [verdict for verdict in verdicts if verdict.name in {name for name, _ in LOSSLESS}]
    int8 = next(verdict for verdict in verdicts if verdict.name == "int8")
    equal = statistics.fmean(at / verdict.fed for verdict in lossless for at in verdict.divergence)
    return (
        Bar("lossless codecs, equal greedy tokens", equal * 100, 100.0, Direction.AT_LEAST, "%"),
        Bar(
            "lossless codecs, equal bytes", float(all(v.same_bytes for v in lossless)) * 100, 100.0, Direction.AT_LEAST, "%"
        ),
        Bar("int8, agreement", int8.agreement * 100, INT8_AGREEMENT * 100, Direction.AT_LEAST, "%"),
        Bar("int8, mean KL", statistics.fmean(int8.kl), INT8_KL, Direction.AT_MOST, "nats"),
    )
