"""The fleet's key is replaced on three running daemons while requests never stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya_zmq.client import Client
from tests import fleet_rig as rig
from tests.fleet_rig import Fleet, Node, Reference, wait_until
from wire.errors import KakeyaError
from wire.keyring import KeyRing
from wire.keys import FleetKey, write_secret_file
from wire.messages import SourceKind, Status

TOKENS = 8
ROTATION_S = 60.0


class Load:
    """Sends prompts one after another, and lookups of the status between; keeps what failed."""

    def __init__(self, node: Node, reference: rig.Reference, seed: int) -> None:
        self._node = node
        self._prompts = [rig.prompt(320, seed + number) for number in range(3)]
        self._expected = [reference.answer(prompt, TOKENS) for prompt in self._prompts]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load-{seed}")
        self.done = 0
        self.failures: list[str] = []
        self.wrong = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._node.client() as client:
            while not self._stop.is_set():
                number = self.done % len(self._prompts)
                try:
                    client.status()
                    found = rig.answer(client, self._prompts[number], TOKENS, use_local_cache=False)
                except KakeyaError as error:
                    self.failures.append(f"request {self.done}: {error}")
                else:
                    self.wrong += found.tokens != self._expected[number]
                self.done += 1


class Machines:
    """A key file for each daemon, as each is on a machine of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.files = {name: fleet.home / f"machine-{name}" / "fleet.psk" for name in ("primary", "worker", "cache")}
        for path in self.files.values():
            write_secret_file(path, fleet.psk_file.read_bytes())

    def status(self, name: str) -> Status:
        with Client(self._fleet[name].address, psk_file=self.files[name]) as client:
            return client.status()

    def give(self, name: str, ring: KeyRing) -> None:
        ring.save(self.files[name])

    def section(self, name: str) -> dict[str, object]:
        """What a node says of its keys; nothing while its address changes from one key to the other."""
        try:
            return dict(self.status(name).sections["keys"])
        except KakeyaError:
            return {"newest_key": "", "endpoints": 0, "valid_keys": 0}


@pytest.fixture
def fleet(tmp_path: Path, model: Path) -> Iterator[Fleet]:
    with Fleet(model, tmp_path) as fleet:
        yield fleet


def test_no_request_fails_while_the_key_is_rotated_across_three_daemons(fleet: Fleet, reference: Reference) -> None:
    machines = Machines(fleet)
    keys = {name: ("--fleet-psk-file", str(path)) for name, path in machines.files.items()}
    tenant = ("--tenant-key-file", str(fleet.home / "tenant.key"))
    keys |= {name: (*keys[name], *tenant) for name in ("primary", "worker")}
    # The client of the users reads the primary's file: it is on that machine.
    fleet.psk_file = machines.files["primary"]
    fleet.start("primary", "worker", "cache", **keys)
    old = KeyRing.load(fleet.psk_file)
    both = old.rotated(FleetKey.generate())
    new = both.retired()
    with Load(fleet["primary"], reference, 100) as first, Load(fleet["primary"], reference, 200) as second:
        loads = (first, second)

        def go_on(what: str) -> None:
            before = [load.done for load in loads]
            wait_until(lambda: all(load.done > was for load, was in zip(loads, before, strict=True)), what, ROTATION_S)
            assert [load.failures for load in loads] == [[], []]

        go_on("requests are answered under the old key")
        for name in ("cache", "primary", "worker"):
            machines.give(name, both)
            wait_until(lambda name=name: machines.section(name)["valid_keys"] == 2, f"{name} has both keys")  # type: ignore[misc]
            go_on(f"requests are answered while {name} has both keys")
        newest = new.newest.key_id.hex()
        wait_until(lambda: links_of(machines) == {"worker", "cache"}, "peers are reached", ROTATION_S)
        wait_until(lambda: machines.section("cache")["older_key_peers"] in (0, 1), "peers use the new key", ROTATION_S)
        go_on("requests are answered under both keys")
        for name in ("worker", "cache", "primary"):
            machines.give(name, new)
            wait_until(
                lambda name=name: (
                    machines.section(name)["newest_key"] == newest and machines.section(name)["endpoints"] == 1
                ),  # type: ignore[misc]
                f"{name} has given up the old key",
                ROTATION_S,
            )
            go_on(f"requests are answered after {name} has retired the old key")
        fleet.wait_joined()
        go_on("requests are answered under the new key")
    assert [load.failures for load in loads] == [[], []]
    assert [load.wrong for load in loads] == [0, 0]
    assert all(load.done >= 8 for load in loads)
    with pytest.raises(KakeyaError), Client(fleet["cache"].address, fleet_key=old.newest, connect_timeout_s=2.0):
        pass
    with fleet["primary"].client() as client:
        seeds = iter(range(1000, 1100))

        def helped() -> bool:
            prompt = rig.prompt(640, next(seeds))
            found = rig.answer(client, prompt, TOKENS, use_local_cache=False)
            assert found.tokens == reference.answer(prompt, TOKENS)
            return SourceKind.WORKER in found.reused

        wait_until(helped, "the fleet helps under the new key as under the old one")


def links_of(machines: Machines) -> set[str]:
    return {str(row["node_id"]) for row in machines.status("primary").peers if row["state"] == "up"}
