"""``store``: how long the block store takes to find a prompt and to take blocks, and what a block costs in memory.

There is no other store to compare with, so these bars are absolute and hold for the reference machine only.
"""

from __future__ import annotations

from daemons.bench.harness import Bar, BenchOptions, Direction, Outcome, Series
from daemons.bench.report import percent
from daemons.bench.rig import Rig

LOOKUP_BAR_US = 150.0
PUT_BAR = 20_000.0
OVERHEAD_BAR_BYTES = 600.0
LOOKUPS = 200


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(5, 15)
    blocks = options.choose(100_000, 100_000, 1_000)
    put_blocks = options.choose(20_000, 20_000, 500)
    rig.tell(f"store: {blocks:,} blocks, {rounds} rounds")
    lookups: list[float] = []
    hashings: list[float] = []
    puts: list[float] = []
    overheads: list[float] = []
    # Each in a fresh process: one that ran before has freed memory that the store could grow into.
    for _ in range(options.choose(0, 4, 0)):
        with rig.program("store_load") as program:
            overheads.append(float(program.ask("memory", blocks=blocks)["overhead_bytes"]))
    with rig.program("store_load") as program:
        filled = program.ask("memory", blocks=blocks)
        overheads.append(float(filled["overhead_bytes"]))
        for _ in range(rounds):
            found = program.ask("lookup", times=LOOKUPS)
            lookups.append((found["hashing_s"] + found["finding_s"]) * 1e6)
            hashings.append(found["hashing_s"] * 1e6)
            puts.append(float(program.ask("put", blocks=put_blocks)["blocks_per_second"]))
    lookup, hashing, put = Series("lookup", tuple(lookups)), Series("hashing", tuple(hashings)), Series("put", tuple(puts))
    overhead = Series("overhead", tuple(overheads))
    bars = (
        Bar("lookup of 4,096 tokens, hashing included", lookup.median, LOOKUP_BAR_US, Direction.AT_MOST, "µs"),
        Bar("put of small blocks", put.median, PUT_BAR, Direction.AT_LEAST, "blocks/s"),
        Bar("memory a block beyond its payload", overhead.median, OVERHEAD_BAR_BYTES, Direction.AT_MOST, "bytes"),
    )
    rows = (
        ("lookup of 4,096 tokens", f"{lookup.median:.1f} µs", percent(lookup.spread)),
        ("  hashing alone", f"{hashing.median:.1f} µs", percent(hashing.spread)),
        ("put", f"{put.median:,.0f} blocks/s", percent(put.spread)),
        ("memory a block beyond its payload", f"{overhead.median:.0f} bytes", percent(overhead.spread)),
    )
    figures = {
        "blocks": filled["blocks"],
        "lookup_us": lookup.as_json(),
        "hashing_us": hashing.as_json(),
        "put_blocks_per_second": put.as_json(),
        "overhead_bytes": overhead.as_json(),
    }
    heads = ("what", "median", "spread")
    return Outcome("store", f"{filled['blocks']:,} blocks held", heads, rows, () if options.smoke else bars, figures)
