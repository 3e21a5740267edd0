"""The fault matrix (tests/faults/matrix.py) with real processes: every fault at every step.

The answer is that of a cold run and comes by the deadline; the right figures move and the right reason is given; afterwards
nothing is left open: no socket, lease, reservation, thread or process; and everybody is used again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.faults.document import DOCUMENT, render
from tests.faults.fleets import Fleets, Kept
from tests.faults.linked_fleet import LinkedFleet
from tests.faults.matrix import Cell, Fault, Network, Step, cells, check_matrix
from tests.faults.scenes import SCENES, Outcome, Scene
from tests.faults.special import SPECIAL, Case
from tests.fleet_rig import PROJECT, answer, ask, prompt, wait_until
from tests.proxy import Damage
from wire.messages import PrefillPolicy, SourceKind

SEEDS = {one[:2]: 100 + number for number, one in enumerate(cells())}
"""Of each cell's prompt; the last line of defence against one cell finding what another has stored."""
FREEZE_FACTOR = 3
DAMAGED_AFTER_BYTES = 40
"""Of what passes next: behind the frame's head, inside its sealed body."""
HEALTHY_TOKENS = 200


def parameters() -> Iterator[object]:
    for fault, step, cell in cells():
        if not cell.elsewhere:
            marks = [pytest.mark.slow] if cell.slow else []
            if cell.known_bug:
                marks.append(pytest.mark.xfail(strict=True, reason=cell.known_bug))
            yield pytest.param(fault, step, cell, id=f"{fault.name.lower()}-{step.name.lower()}", marks=marks)


@pytest.fixture(scope="module")
def fleets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    made = Fleets(request, tmp_path_factory)
    yield made
    made.discard()


@pytest.mark.parametrize(("fault", "step", "cell"), list(parameters()))
def test_a_fault_costs_time_and_nothing_else(fleets: Fleets, fault: Fault, step: Step, cell: Cell) -> None:
    try:
        kept = fleets.get(cell.network)
        with kept.connected():
            if (fault, step) in SPECIAL:
                before = kept.figures((*cell.counts, *cell.steady))
                outcome = SPECIAL[fault, step](Case(kept.fleet, kept.client, kept.reference, SEEDS[fault, step]))
                check(kept, cell, outcome, before)
            else:
                strike(kept, fault, step, cell)
            kept.settle()
    except BaseException:
        fleets.discard(show_logs=True)
        raise


def strike(kept: Kept, fault: Fault, step: Step, cell: Cell) -> None:
    """Break something in the middle of a step."""
    assert isinstance(kept.fleet, LinkedFleet)
    with SCENES[step](kept.fleet, kept.client, kept.reference, SEEDS[fault, step]) as scene:
        scene.prepare()
        before = kept.figures((*cell.counts, *cell.steady))
        scene.open()
        struck_at = time.monotonic()
        apply(kept.fleet, fault, scene)
        outcome = scene.finish()
        check(kept, cell, outcome, before, timeout_s=30.0)
        if fault is Fault.FREEZE:
            # No synchronisation: this long silence is the fault itself.
            time.sleep(max(0.0, struck_at + FREEZE_FACTOR * scene.deadline_s - time.monotonic()))
        if fault is Fault.CUT and step is Step.GOSSIP:
            wait_until(lambda: vanished(kept.client, scene.victim), "its card has expired")
    if fault is Fault.RESTART:
        kept.fleet[SCENES[step].victim].wait_ready()
    kept.fleet.heal()
    with rig.worker_only(kept.client) as session:
        healthy = ask(session, prompt(HEALTHY_TOKENS, seed=SEEDS[fault, step] + 50_000), 2)
    assert healthy.reused == {SourceKind.WORKER: HEALTHY_TOKENS - 1}
    if step is Step.PUBLISH:
        taken = kept.figures(("cache.prefill.cache_published_parts",))
        answer(kept.client, prompt(HEALTHY_TOKENS, seed=SEEDS[fault, step] + 60_000), 2, policy=PrefillPolicy.LOCAL_ONLY)
        wait_until(lambda: kept.figures(tuple(taken)) != taken, "the cache peer is published to again")


def apply(fleet: LinkedFleet, fault: Fault, scene: Scene) -> None:
    node = fleet[scene.victim]
    match fault:
        case Fault.KILL | Fault.RESTART:
            node.kill()
            # The kernel would still deliver what was on its way; a machine that is gone does not.
            scene.proxy.reset()
            if fault is Fault.RESTART:
                node.launch(fleet.seed_for(node))
        case Fault.FREEZE:
            node.signal(signal.SIGSTOP)
        case Fault.CUT:
            fleet.cut(scene.victim)
        case Fault.CORRUPT | Fault.TRUNCATED:
            damage = Damage.FLIP if fault is Fault.CORRUPT else Damage.CLOSE
            scene.proxy.damage(scene.plane, scene.way, damage, after=DAMAGED_AFTER_BYTES)
        case _:
            raise AssertionError(f"{fault} is not made here")


def check(kept: Kept, cell: Cell, outcome: Outcome, before: dict[str, int], timeout_s: float = 5.0) -> None:
    """The answer, the figures and the reason."""
    assert outcome.tokens == outcome.expected
    after: dict[str, int] = {}

    def counted() -> bool:
        after.update(kept.figures(cell.counts))
        return all(after[name] > before[name] for name in cell.counts)

    def told() -> bool:
        if cell.says in outcome.reasons:
            return True
        return any(cell.says in line for line in kept.client.status().recent)

    try:
        wait_until(counted, "", timeout_s)
    except AssertionError:
        raise AssertionError(f"not counted: {before} before, {after} now; {outcome.reasons}") from None
    try:
        wait_until(told, "", timeout_s)
    except AssertionError:
        raise AssertionError(f"nobody says {cell.says!r}: {outcome.reasons}; {kept.client.status().recent}") from None
    steady = kept.figures(cell.steady)
    assert steady == {name: before[name] for name in cell.steady}


def vanished(client: Client, node: str) -> bool:
    return all(row["node_id"] != node for row in client.status().peers)


def test_every_cell_is_a_test_or_has_a_reason() -> None:
    check_matrix()
    for _, _, cell in cells():
        if cell.elsewhere:
            file, _, name = cell.elsewhere.partition("::")
            assert f"def {name.partition('[')[0]}(" in (PROJECT / file).read_text("utf-8")
    linked = (Network.PROXIED, Network.NAMESPACES)
    assert {(fault, step) for fault, step, cell in cells() if cell.network not in linked} == SPECIAL.keys()


def test_the_document_is_that_of_the_table() -> None:
    assert DOCUMENT.read_text("utf-8") == render(), "run: python -m tests.faults.document"
