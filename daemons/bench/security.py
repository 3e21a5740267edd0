"""``security``: the price of each protection, against the same path without it.

The paths without are not for use: they are what the work would cost if nobody had to be kept out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daemons.bench.harness import BenchOptions, Outcome, Program, Series, interleave
from daemons.bench.report import percent
from daemons.bench.rig import Rig
from wire.limits import MIB
from wire.messages import CipherSuite


@dataclass(frozen=True, slots=True)
class Price:
    """One protection: what is asked of the program without it and with it."""

    name: str
    unit: str
    work: str
    without: dict[str, Any]
    protected: dict[str, Any]


def prices(options: BenchOptions) -> tuple[Price, ...]:
    """What is measured, for this kind of run."""
    times = options.choose(2000, 5000, 20)
    total = options.choose(64 * MIB, 256 * MIB, MIB)
    open_chunk, moved = {"suite": 0, "total_bytes": total}, {"kind": "", "total_bytes": total}
    link = {"times": times}
    gcm, box = int(CipherSuite.AES_256_GCM), int(CipherSuite.SECRETBOX)
    return (
        Price("CURVE on a control request", "request", "control", _link(link, 0, 0), _link(link, 1, 0)),
        Price("CURVE and sealed session", "request", "control", _link(link, 0, 0), _link(link, 1, 1)),
        Price("signed and sealed HELLO", "connection", "hello", {"signed": False, **link}, {"signed": True, **link}),
        Price("AES-256-GCM on a chunk", "MiB", "chunk", open_chunk, {**open_chunk, "suite": gcm}),
        Price("secretbox on a chunk", "MiB", "chunk", open_chunk, {**open_chunk, "suite": box}),
        Price("checksum (XXH3) of a part", "MiB", "verify", moved, {**moved, "kind": "checksum"}),
        Price("digest (SHA-256) of a published part", "MiB", "verify", moved, {**moved, "kind": "digest"}),
        Price("tenant's key in block hashes", "4,096 tokens", "hashing", *_hashing(options)),
        Price("sealed prompt and proof of a job", "4,096 tokens", "job", *_job(options)),
        Price("limits on a peer", "request", "admission", {"checked": "", **link}, {"checked": "limiter", **link}),
        Price("roster and tenants", "request", "admission", {"checked": "", **link}, {"checked": "roster", **link}),
    )


def _link(link: dict[str, Any], curve: int, sealed: int) -> dict[str, Any]:
    return {**link, "curve": bool(curve), "sealed": bool(sealed)}


def _hashing(options: BenchOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    size = {"tokens": 4096, "times": options.choose(200, 500, 2)}
    return {"keyed": False, **size}, {"keyed": True, **size}


def _job(options: BenchOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    size = {"tokens": 4096, "times": options.choose(1000, 3000, 4)}
    return {"sealed": False, **size}, {"sealed": True, **size}


def run(rig: Rig, options: BenchOptions) -> Outcome:
    rounds = options.rounds_or(5, 15)
    rig.tell(f"security: {rounds} rounds")
    rows: list[tuple[str, ...]] = []
    figures: dict[str, object] = {}
    with rig.program("protections") as program:
        for price in prices(options):
            found = interleave(rounds, {"without": _side(program, price, False), "with": _side(program, price, True)})
            rows.append(_row(price, found["without"], found["with"]))
            figures[price.name] = {
                "unit": price.unit,
                "without_us": found["without"].as_json(),
                "with_us": found["with"].as_json(),
                "price_us": found["with"].median - found["without"].median,
            }
    heads = ("protection", "a", "without µs", "with µs", "price µs", "×", "spread")
    return Outcome("security", "each protection, with it and without it", heads, tuple(rows), (), figures)


def _side(program: Program, price: Price, protected: bool) -> Callable[[int], float]:
    arguments = price.protected if protected else price.without
    return lambda number: float(program.ask(price.work, **arguments)["seconds"]) * 1e6


def _row(price: Price, without: Series, protected: Series) -> tuple[str, ...]:
    return (
        price.name,
        price.unit,
        f"{without.median:,.1f}",
        f"{protected.median:,.1f}",
        f"{protected.median - without.median:+,.1f}",
        f"{protected.median / without.median:.2f}",
        percent(protected.spread),
    )
