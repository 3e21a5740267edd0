"""atheris over one reader: ``python -m tests.fuzz.harness NAME RUNS [libFuzzer option…]``. Needs ``pip install atheris``.

Ends with a line ``executions N``; a crash, a slow input (5 s) or too much memory (1 GiB) ends it with another exit code.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["wire", "kakeya_zmq"]):
    from tests.fuzz.targets import targets


def main(name: str, runs: int, options: list[str]) -> None:
    target = targets()[name]
    executed = 0

    def one(data: bytes) -> None:
        nonlocal executed
        executed += 1
        with contextlib.suppress(*target.errors):
            target.run(data)
        if executed == runs:
            print(f"executions {executed}", flush=True)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        limits = [
            f"-runs={runs}",
            "-timeout=5",
            "-rss_limit_mb=1024",
            "-max_len=4096",
            "-verbosity=0",
            "-print_final_stats=0",
        ]
        atheris.Setup([sys.argv[0], *limits, *options, corpus], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
