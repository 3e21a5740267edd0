"""Soak: mixed load while peers are killed, stopped and frozen at random. No wrong answer, no error, nothing that grows.

The seed is printed; ``SOAK_SEED=n`` runs the same script, users and chaos again (though not the same timing).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, Reference, figure, wait_until
from tests.soak.load import Actor, Chaos, Script, User, Watcher, run
from wire.limits import MIB

USERS = 3
STORE_GB = "0.004"
"""Two thousand tokens: full, and evicting, before the warm-up is over."""
WARM_UP = 0.34
GROWTH_BYTES_MAX = 12 * MIB
"""Between the medians of the first and the last quarter after the warm-up: what the allocator's own noise reaches."""
DESCRIPTORS_SPARE = 12
"""Connections and transfers that come and go."""
TIMEOUTS = (
    *("--cache-lookup-timeout-s", "1", "--cache-fetch-timeout-s", "2", "--prefill-worker-timeout-s", "4"),
    *("--capacity", "8"),
)


@pytest.fixture
def fleet(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Fleet]:
    with rig.kept_fleet(request, model, tmp_path) as running:
        small = ("--cache-gb", STORE_GB)
        running.start("primary", "worker", "cache", primary=(*small, *TIMEOUTS), worker=small, cache=small)
        yield running
        running.show_logs()


@pytest.mark.parametrize(
    "duration_s",
    [
        pytest.param(60, marks=pytest.mark.timeout(280), id="one-minute"),
        pytest.param(1_200, marks=[pytest.mark.slow, pytest.mark.timeout(1_700)], id="twenty-minutes"),
    ],
)
def test_nothing_goes_wrong_and_nothing_grows(fleet: Fleet, reference: Reference, duration_s: float) -> None:
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.randrange(1, 1_000_000)
    print(f"SOAK_SEED={seed}")
    script = Script(reference, seed)
    with ExitStack() as clients:
        users = [
            User(number, clients.enter_context(fleet["primary"].client()), script, seed + number) for number in range(USERS)
        ]
        chaos, watcher = Chaos(fleet, seed), Watcher(fleet["primary"].pid)
        actors: list[Actor] = [*users, chaos, watcher]
        run(actors, duration_s)
    done = sum((actor.done for actor in actors), Counter())
    first, last = watcher.medians(WARM_UP)
    print(f"{dict(done)}, first {first}, last {last}")
    assert sum(user.wrong for user in users) == 0, f"wrong answers of {done['answers']}"
    assert done["answers"] > duration_s / 10
    assert done["killed"] + done["terminated"] + done["frozen"] >= duration_s / 20
    settle(fleet)
    assert last.memory_bytes - first.memory_bytes <= GROWTH_BYTES_MAX, f"memory grows: {first}, {last}"
    assert last.descriptors - first.descriptors <= DESCRIPTORS_SPARE, f"descriptors grow: {first}, {last}"
    assert last.threads - first.threads <= DESCRIPTORS_SPARE, f"threads grow: {first}, {last}"


def settle(fleet: Fleet) -> None:
    """Everybody is back, nothing is open, and the worker is used again."""
    fleet.heal()
    with fleet["primary"].client() as client:
        with rig.worker_only(client) as session:
            session.append(rig.prompt(300, seed=1), timeout_s=30)
        for name in fleet.nodes:
            with fleet[name].client() as node:
                rig.wait_idle(node)
                for held in ("leases", "bytes_reserved", "bytes_locked"):
                    wait_until(lambda node=node, held=held: figure(node, "cache", held) == 0, f"{name} keeps no {held}")  # type: ignore[misc]
