"""A worker dies in the middle of a job: what it has sent is the beginning of the answer, also where KV has windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fleet_rig as rig
from tests.faults.linked_fleet import LinkedFleet
from tests.faults.requests import COUNT, Asking
from tests.fleet_rig import Reference, figure, prompt, wait_until
from tests.proxy import Plane, Way
from wire.messages import PrefillPolicy, SourceKind

TOKENS = 1500
SENT_BYTES = 30 << 20
"""What gets through. A token's K/V has 32 KiB in the full layers of this model and as much in the windowed ones: it is more
than the first checkpoint needs, and less than the whole."""
CHECKPOINT_TOKENS = 256
"""The closest that checkpoints lie: the window is shorter."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.model_folder(tmp_path_factory, "wide", **rig.WIDE)


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedFleet]:
    with LinkedFleet(model, tmp_path_factory.mktemp("fleet"), rig.kept_processes(request)) as running:
        # This model computes faster than an ordinary network sends; checkpoints are sent as often as the link affords.
        running.start("primary", "worker", primary=("--cache-link-mbps", "1e6"))
        yield running


def break_off(fleet: LinkedFleet, tokens: list[int]) -> rig.Answer:
    """Ask, and kill the worker when it has sent a part of the KV."""
    with fleet["primary"].client() as client:
        fleet.proxies["worker"].hold(Plane.BULK, Way.TO_CLIENT, after=SENT_BYTES)
        asking = Asking(client, tokens, 60.0, policy=PrefillPolicy.LOCAL_FALLBACK, use_local_cache=False, publish=False)
        received = figure(client, "prefill", "bytes_received")
        wait_until(lambda: fleet.proxies["worker"].held(Plane.BULK, Way.TO_CLIENT) >= 1, "a part of the KV has passed")
        wait_until(
            lambda: figure(client, "prefill", "bytes_received") >= received + SENT_BYTES * 3 // 4, "and has been taken"
        )
        fleet["worker"].kill()
        fleet.proxies["worker"].reset()
        found = asking.result()
        rig.wait_idle(client)
    return found


def test_the_answer_goes_on_from_what_the_dead_worker_has_sent(fleet: LinkedFleet, reference: Reference) -> None:
    tokens = prompt(TOKENS, 1)
    found = break_off(fleet, tokens)
    assert found.tokens == reference.answer(tokens, COUNT)
    from_worker = found.reused.get(SourceKind.WORKER, 0)
    assert from_worker >= CHECKPOINT_TOKENS, found.reasons
    assert from_worker + found.reused[SourceKind.COMPUTED] == TOKENS - 1
    assert "worker worker" in found.reasons
