"""``kakeya bench``: how fast this machine moves, packs and reuses KV, beside what one would use instead.

Rules
- Ours and its reference are measured in the same run, interleaved (A B A B), after a warm-up; medians are compared.
- Whatever is measured runs in a process of its own, ours like the reference (daemons.bench.programs).
- A benchmark returns values (:class:`daemons.bench.harness.Outcome`); only daemons.bench.report prints them.
- Everything a run starts is its own: a temporary KAKEYA_HOME, free ports, processes that end with it.
"""

BENCHMARKS = (
    "transfer",
    "store",
    "security",
    "dedupe",
    "codecs",
    "fidelity",
    "remote-compute",
    "ttft",
    "decode",
    "decode-worker",
)
"""In the order of a whole run: what needs no model first, while nothing else holds memory."""
BY_NAME_ONLY = ("security", "decode-worker")
"""Not in a run of everything, which has a minute (eight with --long): they tell what an option or a protection costs."""
