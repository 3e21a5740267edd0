"""The fault matrix as data: which fault at which step, how it is made, and what must be seen afterwards.

Each cell of FAULTS x STEPS is a :class:`Cell`, a test of tests/faults/test_matrix.py (or of another file it names), or a
:class:`Never`, with the reason. ``python -m tests.faults.document`` writes docs/faults.md from here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeAlias


class Fault(enum.Enum):
    KILL = "kill -9"
    FREEZE = "frozen (SIGSTOP)"
    CUT = "network cut"
    CORRUPT = "corrupt bytes"
    DIGEST = "wrong digest"
    TRUNCATED = "truncated stream"
    EXPIRED = "expired lease"
    EVICTED = "evicted block"
    RESTART = "restart, new incarnation"
    FULL = "memory full"
    INCOMPATIBLE = "wrong compatibility"
    SKEW = "clock wrong by 10 min"


class Step(enum.Enum):
    LOOKUP = "lookup"
    LEASE = "lease"
    FETCH = "fetch"
    SUBMIT = "job submit"
    RUN = "job run"
    PUBLISH = "publish"
    GOSSIP = "gossip"
    DECODE = "decode"


MEANINGS: Final[dict[Fault, str]] = {
    Fault.KILL: "the process is killed and its connections are reset",
    Fault.FREEZE: "the process is stopped for three times the step's deadline, then goes on",
    Fault.CUT: "the link is down and nobody is told (network namespaces; without root a proxy that swallows everything)",
    Fault.CORRUPT: "one bit is flipped between the two nodes",
    Fault.DIGEST: "the bytes of a part are not what its digest or checksum says",
    Fault.TRUNCATED: "the connection ends in the middle of a message",
    Fault.EXPIRED: "the holder forgets the lease before the fetch",
    Fault.EVICTED: "a block made room for others",
    Fault.RESTART: "the process is killed and started again at once, on the same address",
    Fault.FULL: "a store is smaller than what has to go into it",
    Fault.INCOMPATIBLE: "the other node serves another tenant: another namespace for the same model",
    Fault.SKEW: "the wall clock of the worker is 10 min ahead, that of the cache peer 10 min behind",
}
STEP_MEANINGS: Final[dict[Step, str]] = {
    Step.LOOKUP: "the cache peer has been asked what it holds and has not answered",
    Step.LEASE: "the cache peer has answered and keeps the blocks for the asker, which still waits for another peer",
    Step.FETCH: "some bytes of the first part are through",
    Step.SUBMIT: "the job is on its way to the worker",
    Step.RUN: "the worker computes and has sent some bytes",
    Step.PUBLISH: "some bytes of the first part are at the cache peer",
    Step.GOSSIP: "an exchange of cards is under way",
    Step.DECODE: "between the first and the last token of an answer",
}


class Network(enum.Enum):
    """Which fleet a cell runs on; one runs at a time, and cells of one fleet follow each other."""

    PROXIED = "a proxy before each peer"
    NAMESPACES = "each peer in a network namespace"
    SKEWED = "wrong wall clocks"
    SMALL = "stores of 1 MiB"
    TENANTS = "two tenants"
    WRONG_DIGESTS = "a primary that publishes wrong digests"
    FORGETFUL = "a cache peer that forgets leases"


@dataclass(frozen=True, slots=True)
class Cell:
    """One test.

    ``counts``: figures ``node.section.name`` that must have grown. ``steady``: figures that must not. ``says``: words in the
    explanation's reasons, or in one of the primary's noteworthy events. ``elsewhere``: the test that covers it.
    ``known_bug``: why it fails today.
    """

    counts: tuple[str, ...] = ()
    says: str = ""
    steady: tuple[str, ...] = ()
    network: Network = Network.PROXIED
    slow: bool = False
    elsewhere: str = ""
    known_bug: str = ""


@dataclass(frozen=True, slots=True)
class Never:
    """A cell that cannot occur."""

    reason: str


Entry: TypeAlias = Cell | Never

FALLBACKS: Final = "primary.prefill.fallbacks"
FETCH_FAILED: Final = "primary.prefill.fetch_failures"
JOB_FAILED: Final = "primary.prefill.remote_job_failures"
PUBLISH_FAILED: Final = "primary.prefill.publish_failures"
EXCHANGE_FAILED: Final = "primary.prefill.exchange_failures"

_NOT_BULK: Final = Never("nothing but small sealed messages passes; a part has a digest only where parts pass")
_QUIET: Final = Never("nothing of other nodes is used between the first and the last token")
_NO_LEASE: Final = Never("no lease is involved")


def _broken(*, normal: tuple[Step, ...] = tuple(Step), network: Network = Network.PROXIED) -> dict[Step, Entry]:
    """What every way of losing the other node must look like; ``normal``: the steps that are tested in every run."""
    seen: dict[Step, tuple[tuple[str, ...], str]] = {
        Step.LOOKUP: ((FALLBACKS,), "cache cache"),
        # The worker, which is waited for, holds nothing of it: a job takes as long with or without the leased blocks.
        Step.LEASE: ((), "connection to cache lost"),
        Step.FETCH: ((FALLBACKS, FETCH_FAILED), "cache cache"),
        Step.SUBMIT: ((FALLBACKS, JOB_FAILED), "worker worker"),
        Step.RUN: ((FALLBACKS, JOB_FAILED), "worker worker"),
        Step.PUBLISH: ((PUBLISH_FAILED,), "publish to cache"),
        Step.GOSSIP: ((EXCHANGE_FAILED,), "connection to cache lost"),
        Step.DECODE: ((), "connection to cache lost"),
    }
    return {step: Cell(counts, says, network=network, slow=step not in normal) for step, (counts, says) in seen.items()}


def _silent(row: dict[Step, Entry]) -> dict[Step, Entry]:
    """The other node says nothing, and its connection stays: the short-lived cards of the tests expire first."""
    gone = (Step.LEASE, Step.GOSSIP, Step.DECODE)
    return {
        step: replace(entry, says="cache is gone") if step in gone and isinstance(entry, Cell) else entry
        for step, entry in row.items()
    }


def _only(reason: Never, **cells: Entry) -> dict[Step, Entry]:
    return {step: cells.get(step.name, reason) for step in Step}


MATRIX: Final[dict[Fault, dict[Step, Entry]]] = {
    Fault.KILL: _broken(),
    Fault.FREEZE: _silent(_broken(normal=(Step.LOOKUP, Step.DECODE))),
    Fault.CUT: _silent(_broken(normal=(Step.LEASE, Step.RUN, Step.GOSSIP), network=Network.NAMESPACES)),
    Fault.CORRUPT: _broken(normal=(Step.FETCH, Step.RUN, Step.PUBLISH, Step.GOSSIP)),
    Fault.TRUNCATED: _broken(normal=(Step.LEASE, Step.FETCH, Step.RUN, Step.GOSSIP)),
    Fault.RESTART: {
        **_broken(normal=(Step.LOOKUP, Step.FETCH, Step.SUBMIT, Step.PUBLISH)),
        Step.GOSSIP: Cell((EXCHANGE_FAILED,), "cache restarted", slow=True),
    },
    Fault.DIGEST: _only(
        _NOT_BULK,
        FETCH=Cell(
            (FALLBACKS, FETCH_FAILED),
            "cache rogue-wrong-bytes",
            elsewhere="tests/faults/test_corruption.py::test_a_cache_that_breaks_its_word_costs_time_only[wrong-bytes]",
        ),
        PUBLISH=Cell(
            (PUBLISH_FAILED, "cache.prefill.cache_broken_transfers"),
            "publish to cache",
            network=Network.WRONG_DIGESTS,
        ),
        RUN=Cell((FALLBACKS, JOB_FAILED), "worker worker", network=Network.WRONG_DIGESTS),
        DECODE=_QUIET,
    ),
    Fault.EXPIRED: _only(
        _NO_LEASE,
        LOOKUP=Never("a lease begins with the answer to the lookup"),
        LEASE=Cell((FALLBACKS, FETCH_FAILED), "cache cache no longer held", network=Network.FORGETFUL),
        FETCH=Never("the holder renews the lease of a running fetch, and its sender keeps the parts in any case"),
        DECODE=_QUIET,
    ),
    Fault.EVICTED: _only(
        Never("cards tell how much a node holds, not what"),
        LOOKUP=Cell(("cache.cache.lookup_misses",), "known cache contents end at token", network=Network.SMALL),
        LEASE=Never("what is leased is not evicted (tests/property/test_store_machine.py)"),
        FETCH=Cell(
            (FALLBACKS, FETCH_FAILED),
            "cache rogue-boasts",
            elsewhere="tests/faults/test_corruption.py::test_a_cache_that_breaks_its_word_costs_time_only[boasts]",
        ),
        SUBMIT=Cell(("worker.prefill.job_tokens_computed",), network=Network.SMALL),
        RUN=Cell(("worker.cache.evictions",), network=Network.SMALL),
        PUBLISH=Cell(("cache.cache.evictions", "primary.prefill.publish_successes"), network=Network.SMALL),
        DECODE=Cell(("primary.cache.evictions",), network=Network.SMALL),
    ),
    Fault.FULL: _only(
        Never("it takes no room but that of a lease or a card, and their numbers are bounded (tests/unit)"),
        FETCH=Cell(("primary.cache.evictions", "primary.prefill.bytes_received"), network=Network.SMALL),
        SUBMIT=Cell((JOB_FAILED, "worker.prefill.jobs_refused"), "job failed (resource exhausted)", network=Network.SMALL),
        RUN=Never("room is reserved before a job computes"),
        PUBLISH=Cell(("cache.prefill.cache_refused_parts", "primary.prefill.publish_parts_refused"), network=Network.SMALL),
        DECODE=Cell(("primary.cache.evictions",), network=Network.SMALL),
    ),
    Fault.INCOMPATIBLE: _only(
        Never("a name of another namespace is never leased"),
        LOOKUP=Cell(("cache.cache.lookup_misses",), "known cache contents end at token 0", network=Network.TENANTS),
        FETCH=Cell(
            (FALLBACKS, FETCH_FAILED),
            "cache rogue-strange-parts",
            elsewhere="tests/faults/test_corruption.py::test_a_cache_that_breaks_its_word_costs_time_only[strange-parts]",
        ),
        SUBMIT=Cell((), "is not compatible: tenant", steady=("primary.prefill.remote_jobs",), network=Network.TENANTS),
        RUN=Never("a worker checks the namespace when the job is submitted and cannot change its own"),
        PUBLISH=Cell(("cache.prefill.cache_published_parts",), steady=(PUBLISH_FAILED,), network=Network.TENANTS),
        GOSSIP=Cell((), "is not compatible: tenant", steady=("primary.prefill.cards_refused",), network=Network.TENANTS),
        DECODE=_QUIET,
    ),
    Fault.SKEW: {
        step: Cell(counts, steady=steady, network=Network.SKEWED)
        for step, counts, steady in (
            (Step.LOOKUP, ("cache.cache.lookup_hits",), (FALLBACKS,)),
            (Step.LEASE, ("cache.prefill.cache_lookup_hits",), (FALLBACKS,)),
            (Step.FETCH, ("primary.prefill.fetches_completed",), (FALLBACKS, FETCH_FAILED)),
            (Step.SUBMIT, ("worker.prefill.jobs_accepted",), (FALLBACKS, JOB_FAILED)),
            (Step.RUN, ("primary.prefill.remote_jobs_completed",), (FALLBACKS, JOB_FAILED)),
            (Step.PUBLISH, ("primary.prefill.publish_successes",), (PUBLISH_FAILED,)),
            (Step.GOSSIP, ("primary.node.fleet_exchanges",), ("primary.prefill.cards_refused",)),
            (Step.DECODE, ("primary.prefill.tokens_generated",), (FALLBACKS,)),
        )
    },
}


def cells() -> Iterator[tuple[Fault, Step, Cell]]:
    """All tests of the matrix, those on one fleet together."""
    found = [(fault, step, entry) for fault, row in MATRIX.items() for step, entry in row.items() if isinstance(entry, Cell)]
    order = list(Network)
    yield from sorted(found, key=lambda one: order.index(one[2].network))


def check_matrix() -> None:
    """Raises AssertionError when a row or column is missing, or has no test in the normal run."""
    assert MATRIX.keys() == set(Fault)
    assert all(row.keys() == set(Step) for row in MATRIX.values())
    normal = [(fault, step) for fault, step, cell in cells() if not cell.slow]
    assert {fault for fault, _ in normal} == set(Fault), "a row without a test in the normal run"
    assert {step for _, step in normal} == set(Step), "a column without a test in the normal run"
