"""``codecs``: how much smaller and how fast, on the KV state of a real prompt; zlib at level 1 is the reference.

Sizes are of the state rounded to bfloat16, as larger models have it; the rates of lossy codecs are of the model's own type.
One core: the process has one BLAS thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, Program, Series
from daemons.bench.report import percent
from daemons.bench.rig import Rig
from kakeya_zmq.codecs.registry import STORAGE_CODECS

BARE_ZLIB = "bare zlib"
ZSTD_RATIO, ZSTD_SPEED = 1.40, 8.0
LATTICE_RATIO, LATTICE_ENCODE, LATTICE_DECODE = 2.45, 150.0, 300.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One codec on one type of values."""

    codec: str
    dtype: str
    q_range: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.codec.replace('kakeyalattice-d4', 'D4')}{f' Q={self.q_range}' if self.q_range else ''}"


CANDIDATES = (
    Candidate(BARE_ZLIB, "bfloat16"),
    Candidate("link zlib", "bfloat16"),
    Candidate("link zstd", "bfloat16"),
    Candidate("link zstd", "own"),
    Candidate("int8", "bfloat16"),
    Candidate("int8", "own"),
    Candidate("kakeyalattice-d4", "bfloat16", 38),
    Candidate("kakeyalattice-d4", "own", 38),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over the rounds; rates in MB (10**6 bytes) of payload a second."""

    ratio: float
    encode: Series
    decode: Series


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(2, 9)
    tokens = options.choose(257, 1025, 129)
    program = rig.model_program("kv_codecs")
    rig.tell(f"codecs: {tokens - 1:,} tokens, {rounds} rounds")
    kv_dtype = str(rig.loaded("kv_codecs")["kv_dtype"])
    program.ask("prepare", prompt=rig.prompt(tokens, salt=700), first=True)
    stored = [(one.codec, one.q_range) for one in CANDIDATES if one.codec in STORAGE_CODECS]
    refusals: dict[str, str] = program.ask("refusals", codecs=stored)["refusals"]
    found = _measure(program, rounds, [one for one in CANDIDATES if f"{one.codec}/{one.q_range}" not in refusals])
    rows = tuple(
        (
            candidate.name,
            kv_dtype if candidate.dtype == "own" else candidate.dtype,
            f"{each.ratio:.2f}",
            f"{each.encode.median:.0f}",
            f"{each.decode.median:.0f}",
            percent(each.encode.spread),
        )
        for candidate, each in found.items()
    )
    figures: dict[str, object] = {
        f"{candidate.name}, {candidate.dtype}": {
            "ratio": each.ratio,
            "encode_megabytes_per_second": each.encode.as_json(),
            "decode_megabytes_per_second": each.decode.as_json(),
        }
        for candidate, each in found.items()
    }
    heads = ("codec", "values", "× smaller", "encode MB/s", "decode MB/s", "spread")
    bars = () if options.smoke else _bars(found)
    notes = tuple(f"{name.partition('/')[0]} is left out: {why}" for name, why in refusals.items())
    return Outcome("codecs", f"KV of {tokens - 1:,} tokens, one core", heads, rows, bars, figures, notes)


def _measure(program: Program, rounds: int, candidates: Sequence[Candidate]) -> dict[Candidate, Measured]:
    answers: dict[Candidate, list[dict[str, float]]] = {candidate: [] for candidate in candidates}
    for _ in range(rounds + 1):
        for candidate in candidates:
            answers[candidate].append(
                program.ask("speed", codec=candidate.codec, q_range=candidate.q_range, dtype=candidate.dtype)
            )
    return {
        candidate: Measured(
            ratio=some[-1]["raw_bytes"] / some[-1]["stored_bytes"],
            # The first round is the warm-up.
            encode=Series("encode", tuple(each["raw_bytes"] / 1e6 / each["encode_s"] for each in some[1:])),
            decode=Series("decode", tuple(each["raw_bytes"] / 1e6 / each["decode_s"] for each in some[1:])),
        )
        for candidate, some in answers.items()
    }


def _bars(found: dict[Candidate, Measured]) -> tuple[Bar, ...]:
    bare = found[Candidate(BARE_ZLIB, "bfloat16")]
    zstd = found[Candidate("link zstd", "bfloat16")]
    narrow = found.get(Candidate("kakeyalattice-d4", "bfloat16", 38))
    wide = found.get(Candidate("kakeyalattice-d4", "own", 38))
    speed = zstd.encode.median / bare.encode.median
    at_least = Direction.AT_LEAST
    bars = (
        Bar("zstd, size of bfloat16 state", zstd.ratio, ZSTD_RATIO, at_least, "× smaller"),
        Bar("zstd, speed of compression against zlib 1", speed, ZSTD_SPEED, at_least),
    )
    if narrow is None or wide is None:
        return bars
    return (
        *bars,
        Bar("D4 Q=38, size of bfloat16 state", narrow.ratio, LATTICE_RATIO, at_least, "× smaller"),
        Bar("D4 Q=38, encode", wide.encode.median, LATTICE_ENCODE, at_least, "MB/s"),
        Bar("D4 Q=38, decode", wide.decode.median, LATTICE_DECODE, at_least, "MB/s"),
    )
