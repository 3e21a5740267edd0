"""Accelerated soak of what operators do: start, drain, kill, restart, upgrade, with two formats of stored KV side by side.

No wrong answer, no failed request that a running primary had to serve, no KV of one format used by the other, nothing that
grows. The seed is printed; ``SOAK_SEED=n`` runs the same operations again (though not the same timing), and
``SOAK_SECONDS=n`` another length.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya_zmq.kvfs import NamespaceView, namespaces
from tests import fleet_rig as rig
from tests.fleet_rig import Answer, Fleet, Node, Reference, answer, figure, prompt, wait_until
from tests.soak.load import COUNT, Actor, Script, Watcher, run
from tests.soak.test_soak import DESCRIPTORS_SPARE, GROWTH_BYTES_MAX, STORE_GB, TIMEOUTS, WARM_UP
from tests.soak.upgrade import HOLDER, KINDS, NEW, NEXT_PROTOCOL, OLD, SECOND, USUAL, WITNESS, Operations, Operator, Visitor
from wire.messages import PrefillPolicy, SourceKind

VISITORS = 2
SMALL = ("--cache-gb", STORE_GB, "--drain-s", "20")
WORKERS = {"worker": OLD, "worker-2": NEW}
PRIMARIES = {WITNESS: OLD, SECOND: NEW}
NEVER = ("import_failures", "parts_refused", "machine_failures", "effect_failures", "capture_mismatches")
"""Counters that stay at 0 when no node takes another's format for its own."""
LONG_S = 120.0
GROWTH_OF_A_SHORT_RUN_BYTES_MAX = 3 * GROWTH_BYTES_MAX
"""A process is still warming up then: only what grows fast shows."""
FINGERPRINT_SHOWN = 16
"""Digits of it in a node's status."""
REMOTE = {"policy": PrefillPolicy.REMOTE_REQUIRED, "use_local_cache": False}
OTHER_PROTOCOL = "another protocol version"


@pytest.fixture
def operations(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Operations]:
    with rig.kept_fleet(request, model, tmp_path) as fleet:
        made = Operations(fleet)
        first = made.add("primary", WITNESS, PRIMARIES[WITNESS], *SMALL, *TIMEOUTS)
        fleet.launch(first)
        others = [made.add("primary", SECOND, PRIMARIES[SECOND], *SMALL, *TIMEOUTS), made.add("cache", HOLDER, OLD, *SMALL)]
        others += [made.add("worker", name, stored_as, *SMALL) for name, stored_as in WORKERS.items()]
        fleet.launch(*others)
        yield made
        fleet.show_logs()


@pytest.mark.parametrize(
    "duration_s",
    [
        pytest.param(25, marks=pytest.mark.timeout(280), id="half-a-minute"),
        pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1_100)], id="ten-minutes"),
    ],
)
def test_operating_a_fleet_of_two_formats_breaks_and_mixes_nothing(
    operations: Operations, reference: Reference, duration_s: float
) -> None:
    duration_s = float(os.environ.get("SOAK_SECONDS", "0")) or duration_s
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.randrange(1, 1_000_000)
    print(f"SOAK_SEED={seed}")
    script = Script(reference, seed, prompts=12, conversations=4)
    files = set(operations.fleet.home.rglob("*"))
    visitors = [Visitor(number, operations, script, seed + number) for number in range(VISITORS)]
    operator, watcher = Operator(operations, seed), Watcher(operations.fleet[WITNESS].pid)
    actors: list[Actor] = [*visitors, operator, watcher]
    run(actors, duration_s)
    done = sum((actor.done for actor in actors), Counter())
    first, last = watcher.medians(WARM_UP)
    print(f"{dict(done)}, first {first}, last {last}")
    assert [line for visitor in visitors for line in visitor.wrong] == []
    assert [line for visitor in visitors for line in visitor.mixed] == []
    assert done["answers"] > duration_s / 5
    assert done["tokens of others"] > 0
    assert sum(operator.done.values()) >= duration_s / 20
    assert duration_s < LONG_S or set(operator.done) == set(KINDS)
    spare_bytes = GROWTH_BYTES_MAX if duration_s >= LONG_S else GROWTH_OF_A_SHORT_RUN_BYTES_MAX
    assert last.memory_bytes - first.memory_bytes <= spare_bytes, f"memory grows: {first}, {last}"
    assert last.descriptors - first.descriptors <= DESCRIPTORS_SPARE, f"descriptors grow: {first}, {last}"
    assert last.threads - first.threads <= DESCRIPTORS_SPARE, f"threads grow: {first}, {last}"
    restore(operations)
    assert set(operations.fleet.home.rglob("*")) <= files, "nodes that come and go leave files behind"
    assert_nothing_left(operations.fleet)
    assert_not_mixed(operations, reference, seed)


def restore(operations: Operations) -> None:
    """Everybody is of this protocol, and has the format that it began with; the holder is empty."""
    for name, node in operations.fleet.nodes.items():
        wanted = {**PRIMARIES, **WORKERS, HOLDER: OLD}[name]
        if name != HOLDER and (node.program, operations.format_of(name)) == (USUAL, wanted):
            continue
        with operations.down(name):
            assert node.terminate() == 0
            node.program = USUAL
            operations.set_format(name, wanted)
    operations.fleet.wait_joined()


def assert_nothing_left(fleet: Fleet) -> None:
    """Nothing is open or held, and nothing that must not happen was counted."""
    for name in fleet.nodes:
        with fleet[name].client() as node:
            rig.wait_idle(node)
            for held in ("leases", "bytes_reserved", "bytes_locked"):
                wait_until(lambda node=node, held=held: figure(node, "cache", held) == 0, f"{name} keeps no {held}")  # type: ignore[misc]
            assert {counter: figure(node, "prefill", counter) for counter in NEVER} == dict.fromkeys(NEVER, 0), name


def assert_not_mixed(operations: Operations, reference: Reference, seed: int) -> None:
    """The same new prompt is computed once by each format's worker, held twice, and found by each format alone."""
    fleet = operations.fleet
    tokens = prompt(400, 1_000_000 + seed)
    expected = reference.answer(tokens, COUNT)
    everything = len(tokens) - 1
    fleet.wait_all_joined()
    held = [0]
    for primary, worker in zip(PRIMARIES, WORKERS, strict=True):
        with fleet[primary].client() as client, fleet[worker].client() as own, fleet[HOLDER].client() as holder:
            computed = figure(own, "prefill", "job_tokens_computed")
            said = answer(client, tokens, COUNT, **REMOTE)
            assert (said.tokens, said.reused, providers(said)) == (expected, {SourceKind.WORKER: everything}, {worker})
            computed = figure(own, "prefill", "job_tokens_computed") - computed
            assert computed == everything, "nothing of the other format was taken for the same prompt"
            # A copy of what is computed here goes to the holder, which then holds the same prompt in both formats.
            said = answer(client, tokens, COUNT, policy=PrefillPolicy.LOCAL_ONLY, use_local_cache=False)
            assert (said.tokens, said.reused) == (expected, {SourceKind.COMPUTED: everything})
            rig.wait_published(client, lambda holder=holder: figure(holder, "cache", "entry_count") > held[-1])  # type: ignore[misc]
            held.append(figure(holder, "cache", "entry_count"))
            said = answer(client, tokens, COUNT, **REMOTE, exclude_nodes=tuple(WORKERS))
            assert (said.tokens, said.reused, providers(said)) == (
                expected,
                {SourceKind.REMOTE_CACHE: everything},
                {HOLDER},
            )
    assert held[2] == 2 * held[1], "as many parts of the one format as of the other"
    names = {fingerprint(fleet[name]) for name in PRIMARIES}
    assert len(names) == len(PRIMARIES)
    with fleet[HOLDER].client() as holder:

        def held_namespaces() -> set[str]:
            views = namespaces(holder.cards())
            return {view["fingerprint"][:FINGERPRINT_SHOWN] for view in views if HOLDER in stores_of(view)}

        wait_until(lambda: held_namespaces() == names, "the holder's card tells of both formats")


def providers(said: Answer) -> set[str]:
    return {source.node_id for source in said.appended.explanation.sources}


def stores_of(view: NamespaceView) -> set[str]:
    """Who holds something of a namespace."""
    return {mount["node_id"] for mount in view["mounts"] if mount["bytes_used"] > 0}


def fingerprint(node: Node) -> str:
    return str(node.status().sections["primary"]["fingerprint"])


def test_a_node_of_the_next_protocol_version_stays_outside_and_both_sides_say_so(
    request: pytest.FixtureRequest, model: Path, reference: Reference, tmp_path: Path
) -> None:
    tokens = prompt(400, seed=3)
    with rig.kept_fleet(request, model, tmp_path) as fleet:
        fleet.start("primary")
        newer = fleet.add("worker", program=NEXT_PROTOCOL)
        newer.launch(fleet["primary"].address)
        newer.wait_ready()
        with fleet["primary"].client() as client:
            wait_until(lambda: figure(client, "refusals", OTHER_PROTOCOL) > 0, "the primary says so")
            wait_until(lambda: "of another protocol version" in newer.last_lines(), "the newer one says what it may be")
            assert [row["node_id"] for row in client.status().peers] == []
            said = answer(client, tokens, COUNT)
            assert (said.tokens, said.reused) == (reference.answer(tokens, COUNT), {SourceKind.COMPUTED: len(tokens) - 1})
