"""The fleets of the fault matrix: made when a cell needs one, kept for the following cells, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.faults.linked_fleet import LinkedFleet
from tests.faults.matrix import Network
from tests.faults.rogue_cache import FORGETS
from tests.faults.scenes import PRIMARY_FLAGS
from tests.faults.special import SMALL_GB
from tests.fleet_rig import Fleet, Node, Reference, answer, figure, prompt, wait_published, wait_until
from tests.namespaces import Star, missing
from wire.errors import RequestFailed
from wire.messages import PrefillPolicy

CLOCK: Final = Path(__file__).parent / "skewed_clock"
SKEWS_S: Final = {"worker": 600, "cache": -600}
LEAK_WAIT_S: Final = 40.0
"""Above the longest lease of these fleets, and the time after which a lane gives up a frozen receiver."""
SPARE: Final = 3
"""Descriptors and threads above the first count that are no leak yet: connections in the middle of a restart, pools."""
COLLECTOR: Final = 7
"""What pyzmq makes with the first zero-copy send of a process: a thread and a context, three threads in all."""


@dataclass(slots=True)
class _Figures:
    """Of one process, when nothing goes on."""

    descriptors: int
    threads: int


@dataclass(slots=True)
class Kept:
    """A running fleet and what belongs to it."""

    network: Network
    fleet: Fleet
    reference: Reference
    stack: ExitStack
    first: dict[str, _Figures] = field(default_factory=dict)
    connection: Client | None = None
    """To the primary, inside :meth:`connected`."""

    @property
    def client(self) -> Client:
        assert self.connection is not None
        return self.connection

    @contextmanager
    def connected(self) -> Iterator[Client]:
        """A connection for one test: none of its threads outlives it."""
        with self.fleet["primary"].client() as self.connection:
            yield self.connection
        self.connection = None

    def settle(self) -> None:
        """Everybody is back and known, and everything that was open is closed: sockets, leases, reservations, threads."""
        self.fleet.heal()
        for name, node in self.fleet.nodes.items():
            with node.client() as client:
                self._wait_clean(name, client)
        for name, node in self.fleet.nodes.items():
            self._wait_small(name, node)

    def _wait_clean(self, name: str, client: Client) -> None:
        open_now: dict[str, object] = {}

        def clean() -> bool:
            sections = client.status().sections
            figures = {key: value for key, value in sections["node"].items() if key.startswith("open_")}
            figures |= {key: sections["cache"][key] for key in ("bytes_reserved", "bytes_locked", "leases")}
            open_now.clear()
            open_now.update({key: value for key, value in figures.items() if value})
            return not open_now

        try:
            wait_until(clean, "nothing is open", LEAK_WAIT_S)
        except AssertionError:
            raise AssertionError(f"{name} does not let go of {open_now}") from None

    def _wait_small(self, name: str, node: Node) -> None:
        # Of the process that did the warm-up, in which everything was used once; a later one must not have more.
        # In one fleet nothing can be sent before its cells.
        spare = SPARE + (COLLECTOR if self.network is Network.WRONG_DIGESTS else 0)
        now = first = self.first.setdefault(name, _count(node.pid))

        def small() -> bool:
            nonlocal now
            now = _count(node.pid)
            return now.descriptors <= first.descriptors + spare and now.threads <= first.threads + spare

        try:
            wait_until(small, "", LEAK_WAIT_S)
        except AssertionError:
            raise AssertionError(f"{name} keeps descriptors or threads: {first} before, {now} now") from None

    def warm_up(self) -> None:
        """Use every path once, so that what is made once is there: connections among all of them, too."""
        if self.network is Network.NAMESPACES:
            self.fleet.wait_joined()  # there the peers reach nobody but the primary
        else:
            self.fleet.wait_all_joined()
        for number, node in enumerate(self.fleet.nodes.values()):
            if node.role == "primary":
                with node.client() as client:
                    self._use(client, 10 * number)
        self.settle()

    def _use(self, client: Client, seed: int) -> None:
        # Whether it succeeds is not the question here: in some of these fleets somebody breaks his word. A cache peer that
        # has refused a publish once is not offered the next one.
        publish = self.network is not Network.WRONG_DIGESTS
        answer(client, prompt(300, seed + 1), 2, use_local_cache=False, publish=publish)
        answer(client, prompt(200, seed + 2), 2, policy=PrefillPolicy.LOCAL_ONLY, publish=publish)
        wait_published(client)
        if publish:
            self.fleet.wait_card("cache", lambda row: row.get("cache_entries", 0) > 0, "the cache's card tells of it")
        # From the cache and nowhere else: a worker of a tiny model is often quicker, and the cache had sent nothing then.
        with suppress(RequestFailed):
            answer(
                client,
                prompt(200, seed + 2),
                2,
                use_local_cache=False,
                publish=False,
                policy=PrefillPolicy.REMOTE_REQUIRED,
                exclude_nodes=("worker",),
            )

    def figures(self, names: tuple[str, ...]) -> dict[str, int]:
        """Values of ``node.section.name``."""
        found = {}
        for name in names:
            node, section, item = name.split(".")
            if node == "primary":
                found[name] = figure(self.client, section, item)
            else:
                with self.fleet[node].client() as client:
                    found[name] = figure(client, section, item)
        return found

    def close(self) -> None:
        self.stack.close()


def _count(pid: int) -> _Figures:
    process = psutil.Process(pid)
    with process.oneshot():
        return _Figures(process.num_fds(), process.num_threads())


class Fleets:
    """Gives out fleets by network; a new one ends the one before."""

    def __init__(self, request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> None:
        self._kept_processes = rig.kept_processes(request)
        self._factory = factory
        self._references: dict[Path, Reference] = {}
        self._kept: Kept | None = None

    def get(self, network: Network) -> Kept:
        if self._kept is None or self._kept.network is not network:
            self.discard()
            self._kept = self._make(network)
        return self._kept

    def discard(self, *, show_logs: bool = False) -> None:
        """End the fleet, for example after a failure."""
        kept, self._kept = self._kept, None
        if kept is not None:
            if show_logs:
                kept.fleet.show_logs()
            kept.close()

    def _make(self, network: Network) -> Kept:
        linked = network in (Network.PROXIED, Network.NAMESPACES)
        model = rig.model_folder(self._factory, "wide", **rig.WIDE) if linked else rig.model_folder(self._factory)
        if model not in self._references:
            self._references[model] = Reference(model)
        stack = ExitStack()
        try:
            fleet = self._fleet(network, model, stack)
        except BaseException:
            stack.close()
            raise
        self._kept = kept = Kept(network, fleet, self._references[model], stack)
        with kept.connected():
            kept.warm_up()
        return kept

    def _fleet(self, network: Network, model: Path, stack: ExitStack) -> Fleet:
        home = self._factory.mktemp(network.name.lower())
        kept = self._kept_processes
        if network in (Network.PROXIED, Network.NAMESPACES):
            star = None
            if network is Network.NAMESPACES and not missing():
                star = stack.enter_context(Star("primary", "worker", "cache"))
            fleet: Fleet = stack.enter_context(LinkedFleet(model, home, kept, star))
        else:
            fleet = stack.enter_context(Fleet(model, home, kept))
        self._start(network, fleet)
        return fleet

    def _start(self, network: Network, fleet: Fleet) -> None:
        small = ("--cache-gb", SMALL_GB)
        match network:
            case Network.SMALL:
                fleet.add("primary", *PRIMARY_FLAGS, *small)
                fleet.add("worker", *small)
                fleet.add("cache", *small)
            case Network.SKEWED:
                fleet.add("primary", *PRIMARY_FLAGS)
                for role, shift_s in SKEWS_S.items():
                    node = fleet.add(role)
                    node.environment.update(PYTHONPATH=str(CLOCK), TEST_CLOCK_SHIFT_S=str(shift_s))
            case Network.TENANTS:
                fleet.add("primary", *PRIMARY_FLAGS)
                fleet.add("worker", "--tenant-id", "other")
                fleet.add("cache")
                fleet.add("primary", *PRIMARY_FLAGS, "--tenant-id", "other", name="other-primary")
            case Network.WRONG_DIGESTS:
                fleet.add("primary", *PRIMARY_FLAGS, program=("tests.faults.rogue_primary",))
                fleet.add("worker", program=("tests.faults.rogue_primary",))
                fleet.add("cache")
            case Network.FORGETFUL:
                fleet.add("primary", *PRIMARY_FLAGS)
                fleet.add("cache", program=("tests.faults.rogue_cache", FORGETS))
            case _:
                fleet.add("primary", *PRIMARY_FLAGS)
                fleet.add("worker")
                fleet.add("cache")
        first, *others = fleet.nodes.values()
        first.launch()
        first.wait_ready()
        for node in others:
            node.launch(fleet.seed_for(node))
        for node in others:
            node.wait_ready()
        fleet.wait_joined()
