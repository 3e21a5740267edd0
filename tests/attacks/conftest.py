"""One cache peer for all attacks: what survives them together survives them one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kakeya_zmq.io.descriptors import raise_descriptor_limit
from tests.attacks.kit import Siege
from tests.fleet_rig import Fleet, kept_fleet


@pytest.fixture(autouse=True)
def _many_descriptors() -> None:
    """The attacker's own side of some thousand connections. For each test: importing mlx_lm, which another file's fixture
    may do in this process, sets the limit to 2,048."""
    raise_descriptor_limit()


@pytest.fixture(scope="package")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("attacks")
    # No node of it has a model.
    with kept_fleet(request, home / "no-model", home) as fleet:
        first = fleet.add("cache", "--peer-jobs-per-s", "5", name="target")
        second = fleet.add("cache", name="other")
        first.launch()
        first.wait_ready()
        second.launch(first.address)
        second.wait_ready()
        yield fleet


@pytest.fixture
def siege(fleet: Fleet) -> Siege:
    return Siege(fleet, "target")


@pytest.fixture
def other(fleet: Fleet) -> Siege:
    return Siege(fleet, "other")
